"""The engines that move tensors into and out of staging buffers, behind one small interface over buckets.

`reference` is pure PyTorch, runs on every device and is the definition of correct; any other engine must match it bit for bit
and use the same layout on the wire, so that ranks with different engines can average with each other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from ..build import BuildError
from ..collectives import Terms
from ..errors import LocalSGDError
from ..layout import Bucket, Table
from ..outer import Outer
from ..wire import Chunks

BACKENDS = ("auto", "native", "torch")


class BoundBucket(Protocol):
    """One bucket tied to the memory of its tensors and to staging buffers, on its way through one averaging.

    Nothing but the last step of that way writes to the tensors, so a failure before it leaves them as they were.
    """


class State:
    """A bucket's part of anchor, residual and momentum (see `Anchors`); None for those that there are none of.

    homes: where they are kept. heres: where to compute with them: the same tensors, or on another device ones that all buckets share,
    since their use ends with each step of a bucket's way.
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
        """As `bind`, for a table whose wire is a code. staging: `chunks.staging_bytes` bytes. chunks, state: the bucket's. outer: an
        optimizer of torch's gets its gradient, -d, in the place of the momentum; anchor and tensors are then left to it. rank, size: of the group."""

    def average(self, buckets: Sequence[BoundBucket], group: dist.ProcessGroup, terms: Terms) -> torch.Tensor:
        """Pack, exchange and apply all buckets in a pipeline: each waits for the one before it in its staging buffer, of which there are SLOTS.

        Gives [||local - mean||^2, ||mean||^2], float64 (float32 where a device has no other), shape (2,). Raises what a collective
        or `terms.watch` raises; every element then holds its local or its averaged value, but collectives may still be in flight and
        write to the staging buffers, which must not be used again.
        """


def check_backend(backend: str) -> None:
    """Raise ValueError for an unknown `backend=` argument."""
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is not known; allowed: {', '.join(map(repr, BACKENDS))}")


def pick(backend: str, devices: Collection[str]) -> Backend:
    """The engine for a `backend=` argument and tensors on devices of these types ("cpu", "cuda").

    "auto" takes the native engine where it is ready or can be built, else the PyTorch one, after one warning that says why. Raises
    LocalSGDError with the cause (the compiler's own words) where "native" cannot be had.
    """
    from .reference import ReferenceBackend

    check_backend(backend)
    if backend == "torch":
        return ReferenceBackend()
    from . import native

    if backend == "auto" and not set(devices) <= {"cpu", "cuda"}:
        return ReferenceBackend()
    try:
        engine = native.get_or_warn() if backend == "auto" else native.get()
    except BuildError as error:
        raise LocalSGDError(f"backend='native' cannot be had: {error}") from error
    if engine is not None and set(devices) <= engine.devices:
        return engine
    if backend == "native":
        raise LocalSGDError(
            f"backend='native' was built with kernels for {', '.join(sorted(native.get().devices))}, and the tensors are on "
            f"{', '.join(sorted(devices))}; use backend='auto' or backend='torch'"
        )
    return ReferenceBackend()
