"""What travels: values of a dtype, or codes of the difference to the anchor; and how many bytes a rank sends for it."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import torch

AVERAGEABLE = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
"""Real dtypes with a mean; complex64 and complex128 are handled as pairs of float32 and float64."""

WIRES = ("parameter", "float32", "bfloat16", "float16", "int8", "int4")

EXACT = "exact"
"""A wire that no user asks for: each tensor's own dtype, float32 for those of 16 bits."""

BLOCK = 256
"""Values that share a scale."""

SCALE_BYTES = 2
"""A scale is a bfloat16, rounded up so that no value is clipped. Against a float32 scale that saves 1/16 bit per value, as much
as would lessen the error by 4 % elsewhere, and costs 0.5 % (int8) and 0.3 % (int4) of it (root mean square, normally
distributed values)."""


class Code(enum.Enum):
    """How the difference to the anchor is written, a block of 256 values at a time.

    FLOAT64 and FLOAT32 are exact where differences are taken in them (`lossless`); these and BFLOAT16 round each value. The
    others share a scale in each block: FLOAT16 a power of two that makes the largest value just below 2^15, so that small
    differences keep their bits and nothing overflows; INT8 and INT4 a 127th and a 7th of the largest value. Rounding is to
    nearest, ties to even.
    """

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def bits(self) -> int:
        """Of one value."""
        return {"float64": 64, "float32": 32, "bfloat16": 16, "float16": 16, "int8": 8, "int4": 4}[self.value]

    @property
    def scaled(self) -> bool:
        """Whether each block has a scale."""
        return self in (Code.FLOAT16, Code.INT8, Code.INT4)

    @property
    def block_bytes(self) -> int:
        """Of a block with its scale."""
        return BLOCK * self.bits // 8 + SCALE_BYTES * self.scaled


Wire = torch.dtype | Code
"""With a dtype the sums of the tensors' values travel; with a code their differences to the anchor."""


class Mode(enum.Enum):
    """How the tensors travel in one averaging."""

    WIRE = "wire"  # as the wire says
    EXACT = "exact"  # the same, but rounding nothing away: what was dropped before is sent, too
    FLUSH = "flush"  # only that: there is no progress for an outer optimizer
    VALUES = "values"  # the plain mean of the values, whatever an anchor says


@dataclass(frozen=True)
class Chunks:
    """How the codes of a bucket are cut for the exchange: `count` chunks of `blocks` blocks and `nbytes` bytes, codes first,
    then scales.

    At two ranks there is one, which each sends to the other. Else there are as many as ranks, and each rank sums one. `summed`
    means that nothing is dropped, so that the values themselves travel instead of their differences, in one chunk that an
    all-reduce sums.
    """

    count: int
    blocks: int
    nbytes: int
    summed: bool = False

    @classmethod
    def of(cls, numel: int, code: Code, world_size: int, summed: bool = False) -> Chunks:
        """For a bucket of `numel` values. Zeros fill the last block, and the last chunks up to the length of the others."""
        count = 1 if world_size <= 2 or summed else world_size
        blocks = math.ceil(math.ceil(numel / BLOCK) / count)
        nbytes = math.ceil(blocks * code.block_bytes / 16) * 16  # so that vectors of each are aligned
        return cls(count, blocks, nbytes, summed)

    @property
    def staging_bytes(self) -> int:
        """Of a buffer for what this rank sends and for what it receives."""
        return self.count * self.nbytes * (1 if self.summed else 2)


def check_wire(wire: str) -> None:
    """Raise ValueError for an unknown wire."""
    if wire not in WIRES:
        raise ValueError(f"wire={wire!r} is not known; allowed: {', '.join(map(repr, WIRES))}")


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the real numbers a tensor is made of: float32 for complex64."""
    return dtype.to_real() if dtype.is_complex else dtype


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which differences to the anchor are taken, for a tensor of real dtype `dtype`; anchor and residual are kept in it."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def lossless(dtype: torch.dtype) -> Code:
    """The code that drops nothing of differences for a tensor of real dtype `dtype`."""
    return Code.FLOAT64 if dtype == torch.float64 else Code.FLOAT32


def travels_as(dtype: torch.dtype, wire: str, is_parameter: bool, with_outer: bool = False) -> Wire:
    """What a tensor of real dtype `dtype` sends under `wire`: its values wherever they fit and nothing but their mean is asked
    for, else codes.

    Buffers always send their values: they are few, and a running variance that rounding makes negative is of no use.
    """
    exact = torch.float32 if dtype.itemsize == 2 else dtype
    if wire == "parameter":
        name = _name(dtype)
    elif wire == EXACT or not is_parameter:
        name = _name(exact)
    else:
        name = wire
    if is_parameter and with_outer:
        return Code(name)
    return next((each for each in (dtype, exact) if _name(each) == name), None) or Code(name)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def elements_in(nbytes: int, wire: Wire) -> int:
    """How many values on the wire `nbytes` bytes hold."""
    return nbytes // wire.block_bytes * BLOCK if isinstance(wire, Code) else nbytes // wire.itemsize


def allreduce_bytes(payload: int, world_size: int) -> int:
    """Bytes each rank sends in a ring all-reduce of `payload` bytes: 2 (n - 1) / n of them."""
    return 2 * (world_size - 1) * payload // world_size


def exchange_bytes(chunks: Chunks, world_size: int) -> int:
    """Bytes each rank sends for one bucket of codes: a chunk to each other rank, and its own sum to each."""
    return (world_size - 1) * chunks.nbytes * (1 if chunks.count == 1 else 2)


def broadcast_bytes(payload: int, rank: int, world_size: int) -> int:
    """Bytes `rank` sends in a broadcast of `payload` bytes from rank 0 along a binomial tree: one copy to each child."""
    children, hop = 0, 1
    while hop < world_size:
        children += rank < hop and rank + hop < world_size
        hop *= 2
    return children * payload
