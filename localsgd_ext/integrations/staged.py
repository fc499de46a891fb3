"""What an averaging needs whose result may be thrown away: all buckets staged at once, and sums in the place of a process
group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from ..anchors import Anchors
from ..backends.coded import CodedBucket
from ..backends.reference import ReferenceBucket
from ..binding import Binding
from ..items import Item
from ..layout import Bucket
from ..outer import OuterSGD
from ..wire import EXACT, Mode

WIRE, ENGINE = "parameter", "torch"


class SummingGroup:
    """What buckets see of a manager: a process group whose sums are over those that contribute.

    manager: has an `allreduce(tensor, reduce_op=)`. row: this process's number among those that contribute, or -1.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self.row = -1

    def rank(self) -> int:
        return self.row

    def size(self) -> int:
        """Of no consequence for values, and not the same in all rounds."""
        return 1

    def allreduce(self, tensors: list[torch.Tensor], _: object) -> dist.Work:
        return self._manager.allreduce(tensors[0], reduce_op=dist.ReduceOp.SUM)

    def broadcast(self, tensors: list[torch.Tensor], options: dist.BroadcastOptions) -> dist.Work:
        """By a sum with zeros: the manager has nothing else."""
        if options.rootRank != self.row:
            tensors[0].zero_()
        return self.allreduce(tensors, None)


class StagedBinding(Binding):
    """Tensors tied to buckets in memory of their own: none may be copied back before all are there and committed.

    Its buckets are to be started, waited for and, once committed, finished. See `Binding` for the arguments.
    """

    def __init__(
        self,
        items: Sequence[Item],
        mode: Mode,
        group: SummingGroup,
        bucket_mb: float | None,
        outer: OuterSGD | None,
        anchors: Anchors | None,
    ) -> None:
        # Sums are all there is: with an outer optimizer the wire has to hold what 16-bit weights and their anchor differ by.
        wire = WIRE if outer is None else EXACT
        super().__init__(items, mode, cast("dist.ProcessGroup", group), wire, ENGINE, bucket_mb, outer, None, anchors)
        self.mode = mode
        self.device = items[0].tensor.device if items else torch.device("cpu")

    @property
    def staged(self) -> list[ReferenceBucket | CodedBucket]:
        return cast("list[ReferenceBucket | CodedBucket]", self.buckets)

    def _slot(self, staging: Sequence[torch.Tensor], bucket: Bucket, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=staging[0].device)
