"""What one averaging did, and what it cost."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from .collectives import Watch, abandon, wait


@dataclass(frozen=True)
class SyncReport:
    """One averaging, as seen by this rank; with fragments, of those that were due.

    step: counted steps when it happened. round: which averaging it was, from 1. interval: local steps the schedule gave this
    round. local_steps: since the ranks last held the same weights. seconds: host time this rank spent in it, in the background
    if it was there. device_seconds: from its first to its last kernel, on CUDA; else None. wire_bytes: payload this rank sent,
    by the collective's own arithmetic. drift: root mean square over ranks of ||x_i - mean|| / ||mean||, over all averaged
    parameters of the model, before the averaging. active_ranks: ranks whose weights entered the mean (replicas, where one takes
    several ranks). backend: the engine that packed and applied ("torch" or "native").
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

    def metrics(self) -> dict[str, float]:
        """The numbers that are known, flat, with names ready for a tracker."""
        return {f"local_sgd/{k}": float(v) for k, v in asdict(self).items() if k != "backend" and v is not None}


def saved(report: SyncReport | None) -> dict[str, torch.Tensor]:
    """For a checkpoint, whose names are the same whether there is a report or not: the numbers of one that was never made
    then."""
    numbers = asdict(report or SyncReport(0, 0, 0, 0, math.nan, None, 0, math.nan, 0, ""))
    wide = {"device_seconds", "seconds", "drift"}
    return {
        f"report.{key}": torch.tensor(math.nan if value is None else value, dtype=torch.float64 if key in wide else torch.int64)
        for key, value in numbers.items()
        if key != "backend"
    }


def restored(state: Mapping[str, torch.Tensor]) -> SyncReport | None:
    """What `saved` gave."""
    numbers: dict[str, Any] = {k.removeprefix("report."): v.item() for k, v in state.items() if k.startswith("report.")}
    if not numbers.get("round"):
        return None
    if math.isnan(numbers["device_seconds"]):
        numbers["device_seconds"] = None
    return SyncReport(**numbers, backend="")


@dataclass
class PendingReport:
    """A report whose drift is still on its way between the ranks: training need not wait for a number nobody reads."""

    report: SyncReport  # all but drift and device_seconds
    totals: (
        torch.Tensor
    )  # ||x_i - mean||^2 and, of a model in parts, ||mean||^2, float: summed over all ranks once `work` is done
    mean_sq: torch.Tensor  # ||mean||^2 of this rank's part, float, shape ()
    replicas: int  # over which the second was summed
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

    @property
    def is_in_parts(self) -> bool:
        """Whether ranks of a replica hold different parts of the model."""
        return self.totals.numel() > 1

    def is_finite(self, watch: Watch | None = None) -> bool:
        """Whether the average is, of all parts; waits for the device and, of a model in parts, for the other ranks."""
        if not self.is_in_parts:
            return bool(self.mean_sq.isfinite())
        self.wait(watch)
        return bool(self.totals[1].isfinite())

    def result(self, watch: Watch | None = None) -> SyncReport:
        """The finished report; its numbers are read from the device here."""
        self.wait(watch)
        distance_sq, *mean_sqs = self.totals.tolist()
        distance_sq /= self.report.active_ranks
        mean_sq = mean_sqs[0] / self.replicas if mean_sqs else self.mean_sq.item()
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
