"""What is averaged in the place of a fragment while training goes on, and what becomes of the tensors once the average has
arrived.

Overlap Local SGD: Wang et al. 2020, arXiv 2002.09539; by fragments: Douillard et al. 2025, arXiv 2501.18512.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from .layout import Bucket, Rule, Segment, Table
from .wire import wide_dtype


class Shadow:
    """Of one bucket: its elements as they were when they were taken, and a copy of them, which is averaged.

    tensors: views of the elements, one for each segment. before, after: shape (bucket.numel,), the tensors' dtype.
    """

    def __init__(
        self, table: Table, bucket: Bucket, tensors: Sequence[torch.Tensor], before: torch.Tensor, after: torch.Tensor
    ) -> None:
        self._tensors = list(tensors)
        self._before, self._after = before, after
        self._follows = table.rule is Rule.FOLLOW
        self._count = sum(segment.offset < bucket.drift_numel for segment in bucket.segments)  # segments of parameters
        self._sizes = [segment.numel for segment in bucket.segments]
        self._befores, self._afters = list(before.split(self._sizes)), list(after.split(self._sizes))
        self._drift_numel = bucket.drift_numel
        self._wide = wide_dtype(table.dtype)

    @property
    def parameters(self) -> torch.Tensor:
        """Of what was taken."""
        return self._before[: self._drift_numel]

    def take(self) -> None:
        """Copy the tensors' elements."""
        torch._foreach_copy_(self._befores, self._tensors)
        self._after.copy_(self._before)

    def adopt(self, other: Shadow) -> None:
        """What another has taken, of the same elements."""
        self._before.copy_(other._before)
        self._after.copy_(other._after)

    def give(self, progress: bool, is_root: bool) -> None:
        """x <- average + (x - x when it was taken), in float32 (float64). Without `progress`, and for buffers, whose progress
        is no sum of small steps (a variance must not become negative): the average alone."""
        if self._follows and is_root:
            return
        averages = list(self._afters)
        if self._count and progress:
            sizes, tensors = self._sizes[: self._count], self._tensors[: self._count]
            now = torch.empty(self._drift_numel, dtype=self._wide, device=self._after.device)
            pieces = list(now.split(sizes))
            torch._foreach_copy_(pieces, tensors)
            before, after = self.parameters, self._after[: self._drift_numel]
            # What has not moved is the average to the last bit, -0 and inf included.
            moved = now != before
            now.sub_(before).add_(after)
            averages[: self._count] = list(torch.where(moved, now, after.to(self._wide)).split(sizes))
        torch._foreach_copy_(self._tensors, averages)

    def first_nonfinite(self) -> int:
        """The number of the first segment of parameters that held NaN or inf when it was taken, or -1."""
        pieces = self._befores[: self._count]
        return next((number for number, piece in enumerate(pieces) if not piece.isfinite().all()), -1)


def shadows(table: Table, flats: Sequence[torch.Tensor]) -> tuple[list[Shadow], list[Bucket], torch.Tensor]:
    """For each bucket of a table its shadow, and where that lies in the one tensor that all fragments share: as only one of
    them is averaged at a time, that is as large as the largest."""
    numel = 0
    places: list[tuple[Bucket, int]] = []
    for number, bucket in enumerate(table.buckets):
        begins = number == 0 or bucket.fragment != table.buckets[number - 1].fragment
        begin = 0 if begins else places[-1][1] + places[-1][0].numel
        places.append((bucket, begin))
        numel = max(numel, begin + bucket.numel)
    before, after = (torch.empty(numel, dtype=table.dtype, device=table.device) for _ in range(2))
    made, moved = [], []
    for bucket, begin in places:
        part = slice(begin, begin + bucket.numel)
        made.append(Shadow(table, bucket, bucket.views(flats), before[part], after[part]))
        # A segment is all parameter or all buffer.
        cut = [0, bucket.drift_numel, bucket.numel]
        segments = tuple(Segment(0, begin + a, a, b - a) for a, b in itertools.pairwise(cut) if a < b)
        moved.append(Bucket(bucket.numel, bucket.drift_numel, segments, bucket.fragment))
    return made, moved, after
