"""What an engine is: a few functions over buckets, and what they are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from ..collectives import Terms
from ..layout import Bucket, Table
from ..outer import Outer
from ..wire import Chunks


class BoundBucket(Protocol):
    """One bucket tied to the memory of its tensors and to staging buffers, on its way through one averaging.

    Nothing but the last step of that way writes to the tensors, so a failure before it leaves them as they were.
    """


class State:
    """A bucket's part of anchor, residual and momentum (see `Anchors`); None for those that there are none of.

    homes: where they are kept. heres: where to compute with them: the same tensors, or on another device ones that all buckets
    share, since their use ends with each step of a bucket's way.
    """

    def __init__(self, homes: Sequence[torch.Tensor | None], heres: Sequence[torch.Tensor | None]) -> None:
        self.homes, self.heres = homes, heres

    def fetch(self, which: int) -> torch.Tensor | None:
        return _moved(self.homes[which], self.heres[which])

    def store(self, which: int) -> None:
        _moved(self.heres[which], self.homes[which])


ANCHOR, RESIDUAL, MOMENTUM = range(3)


def _moved(source: torch.Tensor | None, target: torch.Tensor | None) -> torch.Tensor | None:
    return target if source is None or target is None or target is source else target.copy_(source, non_blocking=True)


class Backend(Protocol):
    """An engine. `name` is what reports show."""

    name: str

    def bind(
        self, table: Table, bucket: Bucket, flats: Sequence[torch.Tensor], staging: torch.Tensor, scratch: torch.Tensor
    ) -> BoundBucket:
        """Tie a bucket to memory.

        flats: for each tensor of the plan a one-dimensional view of its memory, in the table's dtype. staging: bytes to hold
        the bucket, shape (n,), uint8, shared with buckets that are not in flight at the same time. scratch: float bytes for
        measuring, likewise shared; its use ends with each call.
        """

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
    ) -> BoundBucket:
        """As `bind`, for a table whose wire is a code. staging: `chunks.staging_bytes` bytes. chunks, state: the bucket's.
        outer: an optimizer of torch's gets its gradient, -d, in the place of the momentum; anchor and tensors are then left to
        it. rank, size: of the group."""

    def average(self, buckets: Sequence[BoundBucket], group: dist.ProcessGroup, terms: Terms) -> torch.Tensor:
        """Pack, exchange and apply all buckets in a pipeline: each waits for the one before it in its staging buffer, of which
        there are SLOTS.

        Gives [||local - mean||^2, ||mean||^2], float64 (float32 where a device has no other), shape (2,). Raises what a
        collective or `terms.watch` raises; every element then holds its local or its averaged value, but collectives may still
        be in flight and write to the staging buffers, which must not be used again.
        """
