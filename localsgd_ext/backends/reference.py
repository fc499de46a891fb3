"""The pure PyTorch engine: runs on every device, and defines what the right result is."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol, cast

import torch
import torch.distributed as dist

from ..collectives import Terms, abandon, all_reduce, wait
from ..layout import Bucket, Rule, Table
from ..outer import Outer
from ..report import span
from ..wire import Chunks
from .coded import CodedBucket, divide, room_for_sums
from .interface import BoundBucket, State

Pair = tuple[torch.Tensor, torch.Tensor]


class _Bucket(Protocol):
    """The way of a bucket through one averaging, in calls that follow each other when the collective before has ended."""

    slot: int  # address of its staging buffer

    def start(self, group: dist.ProcessGroup, terms: Terms) -> dist.Work:
        """Pack, and start the first collective."""

    def advance(self, group: dist.ProcessGroup, terms: Terms) -> dist.Work | None:
        """Start the second collective, if there is one."""

    def finish(self, group: dist.ProcessGroup, terms: Terms) -> Pair | None:
        """Write to the tensors. Gives ||local - mean||^2 and ||mean||^2 over the bucket's parameters, or None where there are
        none."""


class ReferenceBackend:
    """See `Backend`."""

    name = "torch"

    def bind(
        self, table: Table, bucket: Bucket, flats: Sequence[torch.Tensor], staging: torch.Tensor, scratch: torch.Tensor
    ) -> ReferenceBucket:
        return ReferenceBucket(table, bucket, flats, staging, scratch)

    def bind_coded(
        self,
        table: Table,
        bucket: Bucket,
        flats: Sequence[torch.Tensor],
        staging: torch.Tensor,
        chunks: Chunks,
        state: State,
        outer: Outer | None,
        rank: int,
        size: int,
    ) -> CodedBucket:
        return CodedBucket(table, bucket, flats, staging, chunks, state, outer, rank, size)

    def average(self, buckets: Sequence[BoundBucket], group: dist.ProcessGroup, terms: Terms) -> torch.Tensor:
        """Bucket k is packed while k - 1 travels and k - 2 is copied back."""
        flying: deque[tuple[_Bucket, dist.Work, bool]] = deque()  # the last: whether that was its first collective
        pairs: list[Pair] = []

        def land() -> None:
            bucket, work, first = flying[0]
            with span("exchange"):
                wait(work, terms.watch)
            flying.popleft()
            with span("apply"):
                if first and (more := bucket.advance(group, terms)) is not None:
                    flying.append((bucket, more, False))
                elif (pair := bucket.finish(group, terms)) is not None:
                    pairs.append(pair)

        try:
            for bucket in cast("Sequence[_Bucket]", buckets):
                # Its staging buffer is free once the bucket that was in there has been copied back.
                while any(other.slot == bucket.slot for other, *_ in flying):
                    land()
                with span("pack"):
                    flying.append((bucket, bucket.start(group, terms), True))
            while flying:
                land()
        except BaseException:
            for _, work, _ in flying:
                abandon(work)
            raise
        device = pairs[0][0].device if pairs else torch.device("cpu")
        wide = torch.float32 if device.type == "mps" else torch.float64
        sums = torch.zeros(2, dtype=wide, device=device)
        for pair in pairs:
            sums += torch.stack(pair).to(device, wide)
        return sums


class ReferenceBucket:
    """A bucket of values. All views are made once, here: with many small tensors making them costs more than copying.

    buffer: what travels, shape (bucket.numel,), the table's wire dtype. follow: one rank's buffer is broadcast, rather than the
    sum taken.
    """

    def __init__(
        self, table: Table, bucket: Bucket, flats: Sequence[torch.Tensor], staging: torch.Tensor, scratch: torch.Tensor
    ) -> None:
        assert isinstance(table.wire, torch.dtype)
        self.follow, self.slot = table.rule is Rule.FOLLOW, staging.data_ptr()
        self.buffer = staging[: bucket.numel * table.wire.itemsize].view(table.wire)
        sizes = [segment.numel for segment in bucket.segments]
        self._tensors = bucket.views(flats)
        self._staged = list(self.buffer.split(sizes))
        self._exact = table.dtype == table.wire
        # Parameters come first in a table, so the measured part is a whole number of leading segments.
        measured = table.wire if table.wire.itemsize >= 4 else torch.float32
        self._scratch = scratch[: bucket.drift_numel * measured.itemsize].view(measured)
        self._mean = self.buffer[: bucket.drift_numel]
        self._sums = room_for_sums(self._scratch)
        count = sum(s.offset < bucket.drift_numel for s in bucket.segments)
        self._measured = self._tensors[:count]
        self._measured_staged = list(self._scratch.split(sizes[:count])) if count else []

    def start(self, group: dist.ProcessGroup, terms: Terms) -> dist.Work:
        if terms.contributes or self.follow:
            self.pack()
        else:
            self.buffer.zero_()
        if not self.follow:
            return all_reduce(self.buffer, group, terms.timeout)
        broadcast = dist.BroadcastOptions()
        broadcast.rootRank = terms.root
        if terms.timeout is not None:
            broadcast.timeout = terms.timeout
        return group.broadcast([self.buffer], broadcast)

    def advance(self, group: dist.ProcessGroup, terms: Terms) -> None:
        """One collective is all."""

    def finish(self, group: dist.ProcessGroup, terms: Terms) -> Pair | None:
        if not self.follow:
            return self.apply(terms.divisor)
        if group.rank() != terms.root:
            self.apply(1)
        return None

    def pack(self) -> None:
        """Copy the tensors into `buffer`, rounding to the wire dtype (exact for the exact wires)."""
        if self._exact and len(self._tensors) > 1:
            torch.cat(self._tensors, out=self.buffer)
        else:
            torch._foreach_copy_(self._staged, self._tensors)

    def apply(self, divisor: int) -> Pair | None:
        """Divide the sum by `divisor` in the wire dtype and copy it back, rounding once to the tensors' dtype."""
        divide(self.buffer, divisor)
        if not self._measured:
            torch._foreach_copy_(self._tensors, self._staged)
            return None
        scratch, mean = self._scratch, self._mean
        if len(self._measured) > 1 and scratch.dtype == self._measured[0].dtype:
            torch.cat(self._measured, out=scratch)
        else:
            torch._foreach_copy_(self._measured_staged, self._measured)
        torch._foreach_copy_(self._tensors, self._staged)
        scratch.sub_(mean)
        distance_sq, mean_sq = self._sums
        torch.dot(scratch, scratch, out=distance_sq)
        if mean.dtype != scratch.dtype:
            mean = scratch.copy_(mean)
        torch.dot(mean, mean, out=mean_sq)
        return distance_sq, mean_sq
