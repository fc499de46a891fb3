"""Where each tensor lies in flat space: pure arithmetic, no torch.distributed, no tensor data.

Tensors are grouped into one :class:`Table` per (device, dtype, rule, ranks of a replica that hold them). Inside a table they
are laid end to end and the whole is cut into :class:`Bucket` objects of nearly equal size, so that a tensor larger than a
bucket spans several and small ones share one. Every rank computes the same tables from the same tensors; nothing of it travels.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .wire import BLOCK, Code, Wire, elements_in, lossless

ALIGN = BLOCK
"""Buckets start at multiples of this many elements, so that no block of a low-precision wire straddles two buckets."""


class Rule(enum.Enum):
    """How the copies of one tensor on the ranks become one value."""

    MEAN = "mean"
    FOLLOW = "follow"  # rank 0's value, byte for byte: integer buffers, and float buffers under "broadcast"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What the layout needs to know of one dense tensor. Complex tensors are described as twice as many real numbers."""

    numel: int
    dtype: torch.dtype
    wire: Wire
    device: torch.device
    rule: Rule
    is_parameter: bool  # parameters count in the drift, buffers do not
    address: int  # of the first element; equal address and size means a tied tensor
    holders: tuple[int, ...] = ()  # the ranks of one replica that hold the same


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements [start, start + numel) of tensor number `tensor`, found at `offset` in the bucket."""

    tensor: int
    start: int
    offset: int
    numel: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """What travels in one collective: `numel` elements, of which the first `drift_numel` are parameters."""

    numel: int
    drift_numel: int
    segments: tuple[Segment, ...]
    fragment: int = 0  # the part of the model that it belongs to

    def views(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Of each segment, in the tensors' flat memory."""
        return [flats[s.tensor][s.start : s.start + s.numel] for s in self.segments]


@dataclass(frozen=True, slots=True)
class Table:
    """The buckets of all tensors that share a device, a dtype, a rule and their holders, which thus lay out the same in the
    same places, and get the same bits from averagings of their own. Indices point into the list given to `plan`."""

    device: torch.device
    dtype: torch.dtype
    wire: Wire
    rule: Rule
    buckets: tuple[Bucket, ...]
    holders: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        """Elements on the wire for one averaging."""
        return sum(bucket.numel for bucket in self.buckets)


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements fill their memory without gaps or overlap, in whatever order of the dimensions."""
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


def fragment_ends(numel: int, fragments: int) -> list[int]:
    """Where each of so many parts of nearly equal size ends, among `numel` elements; at the end of a block. Small tables leave
    some empty."""
    return [min(numel, math.ceil(math.ceil(numel * (part + 1) / fragments) / ALIGN) * ALIGN) for part in range(fragments)]


def plan(
    specs: Sequence[TensorSpec], bucket_bytes: int, code_bytes: int | None = None, fragments: int = 1
) -> tuple[Table, ...]:
    """Lay the tensors out, in buckets of `bucket_bytes` bytes of values, or `code_bytes` of codes that drop bits (default: the
    same). Empty tensors take no room; of tied tensors the first stands for all.

    Tables come in the order in which their first tensor does, parameters before buffers inside each, which is the same on
    every rank. Buckets of one fragment differ by less than `ALIGN` elements per bucket, so that none of them is a straggler.
    fragments: every table is cut into so many parts first, each of which has buckets of its own; a tensor may lie in several.
    """
    groups: dict[tuple[torch.device, torch.dtype, Wire, Rule, tuple[int, ...]], list[int]] = {}
    seen: set[tuple[int, int, torch.dtype]] = set()
    for index, spec in enumerate(specs):
        identity = (spec.address, spec.numel, spec.dtype)
        if spec.numel == 0 or identity in seen:
            continue
        seen.add(identity)
        groups.setdefault((spec.device, spec.dtype, spec.wire, spec.rule, spec.holders), []).append(index)
    return tuple(
        Table(
            device,
            dtype,
            wire,
            rule,
            _cut(
                specs,
                members,
                elements_in(code_bytes if code_bytes and _drops_bits(dtype, wire) else bucket_bytes, wire),
                fragments,
            ),
            holders,
        )
        for (device, dtype, wire, rule, holders), members in groups.items()
    )


def _drops_bits(dtype: torch.dtype, wire: Wire) -> bool:
    return isinstance(wire, Code) and wire is not lossless(dtype)


def _cut(specs: Sequence[TensorSpec], members: Sequence[int], capacity: int, fragments: int) -> tuple[Bucket, ...]:
    """Cut the tensors of one table, laid end to end, into buckets of at most `capacity` elements (at least ALIGN)."""
    ordered = sorted(members, key=lambda index: not specs[index].is_parameter)
    total = sum(specs[index].numel for index in ordered)
    drift_left = sum(specs[index].numel for index in ordered if specs[index].is_parameter)
    sizes = _sizes(total, max(ALIGN, capacity // ALIGN * ALIGN), fragments)

    buckets: list[Bucket] = []
    segments: list[Segment] = []
    filled = 0
    for index in ordered:
        start = 0
        while start < specs[index].numel:
            size, fragment = sizes[len(buckets)]
            take = min(specs[index].numel - start, size - filled)
            segments.append(Segment(index, start, filled, take))
            start += take
            filled += take
            if filled == size:
                drift = min(filled, drift_left)
                drift_left -= drift
                buckets.append(Bucket(filled, drift, tuple(segments), fragment))
                segments, filled = [], 0
    return tuple(buckets)


def _sizes(total: int, capacity: int, fragments: int) -> list[tuple[int, int]]:
    """Elements of each bucket, and its fragment."""
    sizes, begin = [], 0
    for fragment, end in enumerate(fragment_ends(total, fragments)):
        if numel := end - begin:
            even = math.ceil(numel / math.ceil(numel / capacity))
            size = min(capacity, math.ceil(even / ALIGN) * ALIGN)
            sizes += [(min(size, numel - at), fragment) for at in range(0, numel, size)]
        begin = end
    return sizes
