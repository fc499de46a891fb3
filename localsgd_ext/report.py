"""What one averaging did, and what it cost."""

from __future__ import annotations

import contextlib
import math
from dataclasses import asdict, dataclass, replace

import torch
import torch.distributed as dist

from .collectives import Watch, abandon, wait


@dataclass(frozen=True)
class SyncReport:
    """One averaging, as seen by this rank; with fragments, of those that were due.

    step: counted steps when it happened. round: which averaging it was, from 1. interval: local steps the schedule gave this
    round. local_steps: since the ranks last held the same weights. seconds: host time this rank spent in it, in the background if it was there. device_seconds: from its first to
    its last kernel, on CUDA; else None. wire_bytes: payload this rank sent, by the collective's own arithmetic.
    drift: root mean square over ranks of ||x_i - mean|| / ||mean||, over the averaged parameters, before the averaging.
    active_ranks: ranks whose weights entered the mean. backend: the engine that packed and applied ("torch" or "native").
    """

    step: int
    round: int
    interval: int
    local_steps: int
    seconds: float
    device_seconds: float | None
    wire_bytes: int
    drift: float
    active_ranks: int
    backend: str

    def numbers(self) -> dict[str, int | float]:
        """Those that are known."""
        return {key: value for key, value in asdict(self).items() if key != "backend" and value is not None}

    def metrics(self) -> dict[str, float]:
        """The numbers, flat, with names ready for a tracker."""
        return {f"local_sgd/{key}": float(value) for key, value in self.numbers().items()}


@dataclass
class PendingReport:
    """A report whose drift is still on its way between the ranks: training need not wait for a number nobody reads."""

    report: SyncReport  # all but drift and device_seconds
    distance_sq: torch.Tensor  # ||x_i - mean||^2, float, shape (1,): summed over ranks once `work` is done
    mean_sq: torch.Tensor  # ||mean||^2, float, shape ()
    work: dist.Work | None
    watched: bool  # whether waiting for it can be watched
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None  # around the kernels of the averaging

    def abandon(self) -> None:
        """Give up on a number that the other ranks may never send."""
        if self.work is not None:
            abandon(self.work)

    def wait(self, watch: Watch | None = None) -> None:
        """Wait for the ranks' distances to be on this rank; on CUDA in the order of the stream, without blocking the host."""
        if self.work is not None:
            wait(self.work, watch if self.watched else None)
            self.work = None

    def result(self, watch: Watch | None = None) -> SyncReport:
        """The finished report; its numbers are read from the device here."""
        self.wait(watch)
        distance_sq, mean_sq = self.distance_sq.item() / self.report.active_ranks, self.mean_sq.item()
        # An all-zero mean has no scale to relate a distance to.
        drift = math.sqrt(distance_sq / mean_sq) if mean_sq else math.inf if distance_sq else 0.0
        device_seconds = None
        if self.events is not None:
            self.events[1].synchronize()
            device_seconds = self.events[0].elapsed_time(self.events[1]) / 1e3
        return replace(self.report, drift=drift, device_seconds=device_seconds)


def span(name: str) -> contextlib.AbstractContextManager[object]:
    """A stretch that torch.profiler shows under this name; costs nothing where nobody profiles."""
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return torch.profiler.record_function(f"localsgd_ext::{name}")
    return contextlib.nullcontext()
