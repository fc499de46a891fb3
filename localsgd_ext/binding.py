"""Tensors laid out and tied to staging buffers: all that stays the same from one averaging to the next."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist

from .anchors import Anchors
from .backends import pick
from .backends.interface import ANCHOR, Backend, BoundBucket
from .backends.reference import ReferenceBackend
from .collectives import SLOTS
from .errors import LocalSGDError
from .items import Item, check_in_place, first_nonfinite, unexpanded
from .layout import Bucket, Rule, Table, TensorSpec, is_dense, plan
from .outer import Outer, makes_optimizer
from .shadow import Shadow, shadows
from .wire import (
    AVERAGEABLE,
    EXACT,
    Chunks,
    Code,
    Mode,
    Wire,
    allreduce_bytes,
    broadcast_bytes,
    exchange_bytes,
    lossless,
    travels_as,
    wide_dtype,
)

DEFAULT_BUCKET_MB = {"cpu": 4.0}
"""MiB of one staging buffer by device type, chosen by measuring (benchmarks/averaging.py --bucket-mb)."""

DEFAULT_BUCKET_MB_ELSEWHERE = 32.0

DEFAULT_MESSAGE_MB = 0.5
"""MiB of codes that a rank sends another at once on CPUs, chosen by measuring: of a longer message Gloo's connections send one
way and then the other, which on a slow link takes twice the time (100 Mbit/s, 26 MB each way, three at once: 2.2 s by 0.5 MiB,
2.4 by 1, 3.0 by 4)."""


T = TypeVar("T")


class Binding:
    """Items tied to buffers on one group.

    anchors: those of an earlier binding, taken over if they are for the same elements in the same order. `anchors` is None
    where all travels as values. layout: a number that differs, as good as surely, between layouts. fragments: how many parts
    there are, each of which may be averaged alone, and is a bit in what is called `parts` below. shadowed: what is averaged is
    a copy (see `Shadow`), of one part at a time.
    """

    def __init__(
        self,
        items: Sequence[Item],
        mode: Mode,
        group: dist.ProcessGroup,
        wire: str,
        backend: str,
        bucket_mb: float | None,
        outer: Outer | None,
        state_device: torch.device | None,
        anchors: Anchors | None,
        fragments: int = 1,
        shadowed: bool = False,
    ) -> None:
        self._items, self._mode = items, mode
        self._rank, self._size = group.rank(), group.size()
        self._with_gaps: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.buckets: list[BoundBucket] = []
        self._plans: list[Bucket] = []  # of each bucket, among the tensors
        self._shadows: list[Shadow] = []
        self._led: list[tuple[int, list[torch.Tensor], list[torch.Tensor]]] = []  # fragment, what follows an anchor, and that
        self._wire_bytes = [0] * fragments
        self._counts = [0] * fragments  # of buckets bound
        dense = [self._dense(item) for item in items]
        self.flats = [_flat(tensor, item.rule) for tensor, item in zip(dense, items, strict=True)]
        specs = [_spec(item, flat, mode, wire, outer) for item, flat in zip(items, self.flats, strict=True)]
        code_mb = bucket_mb
        if bucket_mb is None and specs:
            bucket_mb = code_mb = DEFAULT_BUCKET_MB.get(specs[0].device.type, DEFAULT_BUCKET_MB_ELSEWHERE)
            if specs[0].device.type == "cpu":
                code_mb = DEFAULT_MESSAGE_MB * (1 if self._size == 2 else self._size)
        tables = plan(specs, int((bucket_mb or 0) * 2**20), int((code_mb or 0) * 2**20), fragments)
        self.layout = _layout(items, specs, tables)
        coded = [table for table in tables if isinstance(table.wire, Code)]
        self.anchors = Anchors.for_tables(coded, items, anchors, outer, state_device, fragments) if coded else None
        self.engine: Backend = pick(backend, {table.device.type for table in tables}) if tables else ReferenceBackend()
        self.on_cpu = all(table.device.type == "cpu" for table in tables)
        self.on_cuda = bool(tables) and all(table.device.type == "cuda" for table in tables)
        self.sums_in_float16 = any(t.wire is torch.float16 and t.rule is Rule.MEAN for t in tables)
        pools = {device: self._pool([t for t in tables if t.device == device]) for device in {t.device for t in tables}}
        for table in tables:
            self._plans += table.buckets
            flats, buckets = self.flats, list(table.buckets)
            if shadowed:
                made, buckets, after = shadows(table, flats)
                self._shadows += made
                flats = [after]
            if table.holders and table.holders[0] != dist.get_rank():  # which counts what they all hold, in the drift
                buckets = [replace(bucket, drift_numel=0) for bucket in buckets]
            if isinstance(table.wire, Code):
                self._bind_coded(table, buckets, flats, pools[table.device], None if mode is Mode.FLUSH else outer)
            else:
                self._bind_values(table, buckets, flats, pools[table.device])
        self._places = [[place(item.tensor) for item in items] for place in _PLACE]

    def fits(self, items: Sequence[Item]) -> bool:
        """Whether these are the same tensors, where they were."""
        return _same(items, self._items) and _unmoved(items, self._places)

    def read_gaps(self) -> None:
        for tensor, dense in self._with_gaps:
            dense.copy_(tensor)

    def agree(self) -> None:
        """All ranks hold the tensors as they are now: what they send from now on is the difference to these."""
        if self.anchors is not None:
            self.read_gaps()
            self.anchors.set_to(self.flats)

    def write_gaps(self) -> None:
        for tensor, dense in self._with_gaps:
            tensor.copy_(dense)

    def take(self, parts: int) -> None:
        """Before an averaging: what is averaged becomes what the tensors are."""
        self.read_gaps()
        for shadow in self.of(self._shadows, parts):
            shadow.take()

    def give(self, parts: int, progress: bool = True, root: int = -1) -> None:
        """After it, perhaps some steps after: the tensors become the average, and what they have gained since it was taken.
        progress: see `Shadow.give`. root: whose tensors the others follow, where there is no mean."""
        if self._shadows:
            self.read_gaps()
        for shadow in self.of(self._shadows, parts):
            shadow.give(progress, root == self._rank)
        self.write_gaps()

    def of(self, each: Sequence[T], parts: int) -> list[T]:
        """Those that belong to the parts, of what there is for each bucket."""
        return [one for one, bucket in zip(each, self._plans, strict=False) if parts >> bucket.fragment & 1]

    def wire_bytes(self, parts: int) -> int:
        """That this rank sends for one averaging of the parts."""
        return sum(nbytes for fragment, nbytes in enumerate(self._wire_bytes) if parts >> fragment & 1)

    def lead(self, parts: int) -> None:
        """Where an optimizer of torch's has moved the anchors: copy them to what is averaged."""
        for fragment, targets, anchor in self._led:
            if parts >> fragment & 1:
                torch._foreach_copy_(targets, anchor)

    def adopt(self, other: Binding) -> None:
        """What another has taken of the same tensors, which have moved since. Raises LocalSGDError where they are of another
        kind now."""
        if other.layout != self.layout:
            raise LocalSGDError(
                "tensors were replaced by others of another shape, dtype or order while their average was under way"
            )
        for shadow, known in zip(self._shadows, other._shadows, strict=True):
            shadow.adopt(known)

    def first_nonfinite(self, parts: int) -> int:
        """The number of the first item whose parameters hold NaN or inf, or -1: of those that lie in these parts; with shadows,
        of what was taken of them."""
        if not self._shadows:
            there = sorted({s.tensor for plan_ in self.of(self._plans, parts) for s in plan_.segments})
            found = first_nonfinite([self._items[index] for index in there])
            return found if found < 0 else there[found]
        taken = [Item("", shadow.parameters) for shadow in self.of(self._shadows, parts)]
        if first_nonfinite(taken) < 0:
            return -1
        for plan_, shadow in zip(self.of(self._plans, parts), self.of(self._shadows, parts), strict=True):
            if (segment := shadow.first_nonfinite()) >= 0:
                return plan_.segments[segment].tensor
        return -1

    def _dense(self, item: Item) -> torch.Tensor:
        """The tensor itself where its memory has no gaps, else a stand-in that is copied from and to it at each averaging."""
        check_in_place(item)
        tensor = unexpanded(item.tensor.detach())
        if tensor.numel() == 0 or is_dense(tensor.shape, tensor.stride()):
            return tensor
        stand_in = tensor.contiguous()
        self._with_gaps.append((tensor, stand_in))
        return stand_in

    def _bind_values(
        self, table: Table, buckets: Sequence[Bucket], flats: Sequence[torch.Tensor], pool: list[torch.Tensor]
    ) -> None:
        assert isinstance(table.wire, torch.dtype)
        *staging, scratch = pool
        payloads = [0] * len(self._wire_bytes)
        for bucket in buckets:
            slot = self._slot(staging, bucket, bucket.numel * table.wire.itemsize)
            self.buckets.append(self.engine.bind(table, bucket, flats, slot, scratch))
            payloads[bucket.fragment] += bucket.numel * table.wire.itemsize
        for fragment, payload in enumerate(payloads):
            if table.rule is Rule.FOLLOW:
                self._wire_bytes[fragment] += broadcast_bytes(payload, self._rank, self._size)
            else:
                self._wire_bytes[fragment] += allreduce_bytes(payload, self._size)

    def _bind_coded(
        self,
        table: Table,
        buckets: Sequence[Bucket],
        flats: Sequence[torch.Tensor],
        pool: list[torch.Tensor],
        outer: Outer | None,
    ) -> None:
        assert self.anchors is not None
        for bucket, state in zip(buckets, self.anchors.states(table), strict=True):
            chunks = self._chunks(table, bucket)
            slot = self._slot(pool, bucket, chunks.staging_bytes)
            self.buckets.append(
                self.engine.bind_coded(table, bucket, flats, slot, chunks, state, outer, self._rank, self._size)
            )
            if makes_optimizer(outer):
                anchor = state.homes[ANCHOR]
                assert anchor is not None
                self._led.append((bucket.fragment, bucket.views(flats), list(anchor.split([s.numel for s in bucket.segments]))))
            if chunks.summed:
                nbytes = allreduce_bytes(bucket.numel * wide_dtype(table.dtype).itemsize, self._size)
            else:
                nbytes = exchange_bytes(chunks, self._size)
            self._wire_bytes[bucket.fragment] += nbytes

    def _slot(self, staging: Sequence[torch.Tensor], bucket: Bucket, nbytes: int) -> torch.Tensor:
        """Of at least so many bytes; by turns within a fragment, whose buckets follow each other in an averaging."""
        self._counts[bucket.fragment] += 1
        return staging[self._counts[bucket.fragment] % SLOTS]

    def _chunks(self, table: Table, bucket: Bucket) -> Chunks:
        assert isinstance(table.wire, Code)
        # Whatever a wire has dropped before is sent as a difference, and so is that together with everything else.
        summed = self._mode is Mode.WIRE and table.wire is lossless(table.dtype)
        return Chunks.of(bucket.numel, table.wire, self._size, summed)

    def _pool(self, tables: Sequence[Table]) -> list[torch.Tensor]:
        """SLOTS staging buffers and one scratch buffer for measuring, as bytes, each as large as the largest bucket needs."""
        staging = scratch = 0
        for table in tables:
            for bucket in table.buckets:
                if isinstance(table.wire, Code):
                    staging = max(staging, self._chunks(table, bucket).staging_bytes)
                else:
                    staging = max(staging, bucket.numel * table.wire.itemsize)
                    scratch = max(scratch, bucket.drift_numel * max(4, table.wire.itemsize))
        return [torch.empty(size, dtype=torch.uint8, device=tables[0].device) for size in [staging] * SLOTS + [scratch]]


def _spec(item: Item, flat: torch.Tensor, mode: Mode, wire: str, outer: Outer | None) -> TensorSpec:
    travels: Wire
    if item.rule is Rule.FOLLOW:
        travels = flat.dtype
    elif flat.dtype not in AVERAGEABLE:
        raise LocalSGDError(
            f"tensor {item.name!r} has dtype {item.tensor.dtype}, which has no mean; averaging takes floating-point and "
            "complex tensors (freeze it with requires_grad=False to leave it out)"
        )
    else:
        travels = travels_as(flat.dtype, wire, item.is_parameter, outer is not None)
        if isinstance(travels, Code) and mode is not Mode.WIRE:
            travels = travels_as(flat.dtype, EXACT, item.is_parameter) if mode is Mode.VALUES else lossless(flat.dtype)
    return TensorSpec(
        flat.numel(), flat.dtype, travels, flat.device, item.rule, item.is_parameter, flat.data_ptr(), item.holders
    )


_PLACE: tuple[Callable[[torch.Tensor], object], ...] = (
    torch.Tensor.data_ptr,
    torch.Tensor.stride,
    operator.attrgetter("shape"),
    operator.attrgetter("dtype"),
)
"""What the layout depends on beside the tensor itself: `tensor.data = other` may change all of it."""

_tensor = operator.attrgetter("tensor")


def _same(items: Sequence[Item], bound: Sequence[Item]) -> bool:
    return items is bound or (
        len(items) == len(bound) and all(a.tensor is b.tensor and a[2:5] == b[2:5] for a, b in zip(items, bound, strict=True))
    )


def _unmoved(items: Sequence[Item], places: list[list[object]]) -> bool:
    """Whether the tensors are still where they were bound. In C loops, since there may be thousands of tensors, and in ones
    that allocate nothing that lasts, so that no garbage collection starts here."""
    tensors = list(map(_tensor, items))
    return all(all(map(operator.eq, map(place, tensors), was)) for place, was in zip(_PLACE, places, strict=True))


def _layout(items: Sequence[Item], specs: Sequence[TensorSpec], tables: Sequence[Table]) -> int:
    """Of what has to be alike on all ranks for their buckets, and the elements in them, to match."""
    lines = (
        f"{i.name} {list(i.tensor.shape)} {i.tensor.stride()} {i.tensor.dtype} {s.wire} {s.rule.value} {s.is_parameter}\n"
        for i, s in zip(items, specs, strict=True)
    )
    # Tied tensors travel once: that, too, has to be alike.
    digest = hashlib.sha256(("".join(lines) + str([table.numel for table in tables])).encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _flat(tensor: torch.Tensor, rule: Rule) -> torch.Tensor:
    """A one-dimensional view of a dense tensor's memory, in the order of the memory: real numbers, or bytes to follow."""
    if tensor.is_conj():
        tensor = tensor.conj()  # the numbers in memory: the mean of conjugates is the conjugate of the mean
    if rule is Rule.MEAN and tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8) if rule is Rule.FOLLOW else flat
