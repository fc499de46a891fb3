"""What a lossy wire remembers between averagings: the anchor, equal on all ranks to the last bit, and what rounding dropped here."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from .backends import State
from .layout import Bucket, Table
from .wire import wide_dtype


class Anchors:
    """Anchor and residual for the tables of one layout: two numbers in `wide_dtype` for each element that travels in codes.

    tables: those whose wire is a code. device: where both live; None for beside the tensors. All zero until `set_to`; then the anchor is what
    all ranks last agreed on.
    """

    def __init__(self, tables: Sequence[Table], device: torch.device | None) -> None:
        self.tables = tables
        self.agreed = False
        self._pairs = []
        for table in tables:
            home = device or table.device
            pinned = home.type == "cpu" and table.device.type == "cuda"
            anchor, residual = (
                torch.zeros(table.numel, dtype=wide_dtype(table.dtype), device=home, pin_memory=pinned) for _ in range(2)
            )
            self._pairs.append((anchor, residual))

    def states(self, table: Table) -> list[State]:
        """Of each bucket of a table."""
        anchor, residual = self._pairs[self.tables.index(table)]
        here: tuple[torch.Tensor, ...] | None = None
        if anchor.device != table.device:
            most = max(bucket.numel for bucket in table.buckets)
            here = tuple(torch.empty(most, dtype=anchor.dtype, device=table.device) for _ in range(2))
        begin, states = 0, []
        for bucket in table.buckets:
            part = slice(begin, begin + bucket.numel)
            begin += bucket.numel
            states.append(State(anchor[part], residual[part], here and tuple(each[: bucket.numel] for each in here)))
        return states

    def set_to(self, flats: Sequence[torch.Tensor]) -> None:
        """All ranks agree on the tensors as they are now; whatever rounding dropped is forgotten."""
        for (anchor, residual), (parts, tensors) in zip(self._pairs, self._matched(flats), strict=True):
            torch._foreach_copy_([anchor[part] for part in parts], tensors)
            residual.zero_()
        self.agreed = True

    def pour_into(self, flats: Sequence[torch.Tensor]) -> None:
        """Add what rounding dropped to the tensors, where it had been before."""
        for (_, residual), (parts, tensors) in zip(self._pairs, self._matched(flats), strict=True):
            for part, tensor in zip(parts, tensors, strict=True):
                tensor.copy_(residual[part].to(tensor.device) + tensor)

    def fingerprint(self) -> int:
        """A number that differs, as good as surely, where any bit of the anchor does. Reads all of it: for debugging."""
        digest = hashlib.sha256()
        for anchor, _ in self._pairs:
            digest.update(anchor.cpu().view(torch.uint8).numpy().data)
        return int.from_bytes(digest.digest()[:8], "little", signed=True)

    def _matched(self, flats: Sequence[torch.Tensor]) -> list[tuple[list[slice], list[torch.Tensor]]]:
        """For each table, which part of its flat space is which stretch of a tensor."""
        return [_matched(table.buckets, flats) for table in self.tables]


def _matched(buckets: Sequence[Bucket], flats: Sequence[torch.Tensor]) -> tuple[list[slice], list[torch.Tensor]]:
    parts, tensors, begin = [], [], 0
    for bucket in buckets:
        for segment in bucket.segments:
            at = begin + segment.offset
            parts.append(slice(at, at + segment.numel))
            tensors.append(flats[segment.tensor][segment.start : segment.start + segment.numel])
        begin += bucket.numel
    return parts, tensors
