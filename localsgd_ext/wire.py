"""What travels: the element type on the wire, and how many bytes a rank sends for it."""

from __future__ import annotations

import torch

AVERAGEABLE = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
"""Real dtypes with a mean; complex64 and complex128 are handled as pairs of float32 and float64."""

WIRES = ("parameter", "float32", "bfloat16", "float16", "int8", "int4")


def check_wire(wire: str) -> None:
    """Raise ValueError for an unknown wire and NotImplementedError for one that is still to come."""
    if wire not in WIRES:
        raise ValueError(f"wire={wire!r} is not known; allowed: {', '.join(map(repr, WIRES))}")
    if wire not in ("parameter", "float32"):
        raise NotImplementedError(f"wire={wire!r} is not available yet; use wire='parameter' or wire='float32'")


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the real numbers a tensor is made of: float32 for complex64."""
    return dtype.to_real() if dtype.is_complex else dtype


def wire_dtype(dtype: torch.dtype, wire: str, name: str) -> torch.dtype:
    """Element type that carries values of real dtype `dtype` exactly under `wire`.

    Raises NotImplementedError where `wire` would drop bits of `dtype` (float32 for float64), naming the tensor.
    """
    if wire == "parameter":
        return dtype
    if dtype == torch.float64:
        raise NotImplementedError(f"wire='float32' would round the float64 tensor {name!r}; use wire='parameter'")
    return torch.float32


def allreduce_bytes(payload: int, world_size: int) -> int:
    """Bytes each rank sends in a ring all-reduce of `payload` bytes: 2 (n - 1) / n of them."""
    return 2 * (world_size - 1) * payload // world_size


def broadcast_bytes(payload: int, rank: int, world_size: int) -> int:
    """Bytes `rank` sends in a broadcast of `payload` bytes from rank 0 along a binomial tree: one copy to each child."""
    children, hop = 0, 1
    while hop < world_size:
        children += rank < hop and rank + hop < world_size
        hop *= 2
    return children * payload
