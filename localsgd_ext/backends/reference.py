"""The pure PyTorch engine: runs on every device, and defines what the right result is."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..collectives import SLOTS, Terms, abandon, all_reduce, wait
from ..layout import Bucket, Rule, Table
from . import BoundBucket


class ReferenceBackend:
    """See `Backend`."""

    name = "torch"

    def bind(
        self, table: Table, bucket: Bucket, flats: Sequence[torch.Tensor], staging: torch.Tensor, scratch: torch.Tensor
    ) -> ReferenceBucket:
        return ReferenceBucket(table, bucket, flats, staging, scratch)

    def average(self, buckets: Sequence[BoundBucket], group: dist.ProcessGroup, terms: Terms) -> torch.Tensor:
        """Bucket k is packed while k - 1 travels and k - 2 is copied back."""
        flying: deque[tuple[BoundBucket, dist.Work]] = deque()
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

        def land() -> None:
            bucket, work = flying[0]
            wait(work, terms.watch)
            flying.popleft()
            if not bucket.follow:
                pair = bucket.apply(terms.divisor)
                if pair is not None:
                    pairs.append(pair)
            elif group.rank() != terms.root:
                bucket.apply(1)

        try:
            for bucket in buckets:
                # The slot that this bucket is about to use is free once the bucket SLOTS before it has been copied back.
                if len(flying) == SLOTS:
                    land()
                if terms.contributes or bucket.follow:
                    bucket.pack()
                else:
                    bucket.buffer.zero_()
                flying.append((bucket, _send(bucket, group, terms)))
            while flying:
                land()
        except BaseException:
            for _, work in flying:
                abandon(work)
            raise
        device = pairs[0][0].device if pairs else buckets[0].buffer.device if buckets else torch.device("cpu")
        wide = torch.float32 if device.type == "mps" else torch.float64
        sums = torch.zeros(2, dtype=wide, device=device)
        for pair in pairs:
            sums += torch.stack(pair).to(device, wide)
        return sums


class ReferenceBucket:
    """See `BoundBucket`. All views are made once, here: with many small tensors making them costs more than copying."""

    def __init__(
        self, table: Table, bucket: Bucket, flats: Sequence[torch.Tensor], staging: torch.Tensor, scratch: torch.Tensor
    ) -> None:
        self.follow = table.rule is Rule.FOLLOW
        self.buffer = staging[: bucket.numel * table.wire.itemsize].view(table.wire)
        sizes = [segment.numel for segment in bucket.segments]
        self._tensors = [_slice(flats[s.tensor], s.start, s.numel) for s in bucket.segments]
        self._staged = list(self.buffer.split(sizes))
        self._exact = table.dtype == table.wire
        # Parameters come first in a table, so the measured part is a whole number of leading segments.
        measured = table.wire if table.wire.itemsize >= 4 else torch.float32
        self._scratch = scratch[: bucket.drift_numel * measured.itemsize].view(measured)
        self._mean = self.buffer[: bucket.drift_numel]
        count = sum(s.offset < bucket.drift_numel for s in bucket.segments)
        self._measured = self._tensors[:count]
        self._measured_staged = list(self._scratch.split(sizes[:count])) if count else []

    def pack(self) -> None:
        if self._exact and len(self._tensors) > 1:
            torch.cat(self._tensors, out=self.buffer)
        else:
            torch._foreach_copy_(self._staged, self._tensors)

    def apply(self, divisor: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        self._divide(divisor)
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
        distance_sq = torch.dot(scratch, scratch)
        if mean.dtype != scratch.dtype:
            mean = scratch.copy_(mean)
        return distance_sq, torch.dot(mean, mean)

    def _divide(self, divisor: int) -> None:
        if divisor == 1:
            return
        if divisor & (divisor - 1) == 0:
            self.buffer.mul_(1.0 / divisor)  # exact for a power of two, hence the same bits as dividing, and faster
        else:
            self.buffer.div_(divisor)


def _send(bucket: BoundBucket, group: dist.ProcessGroup, terms: Terms) -> dist.Work:
    if bucket.follow:
        broadcast = dist.BroadcastOptions()
        broadcast.rootRank = terms.root
        if terms.timeout is not None:
            broadcast.timeout = terms.timeout
        return group.broadcast([bucket.buffer], broadcast)
    return all_reduce(bucket.buffer, group, terms.timeout)


def _slice(flat: torch.Tensor, start: int, numel: int) -> torch.Tensor:
    return flat if numel == flat.numel() else flat[start : start + numel]
