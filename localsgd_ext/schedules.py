"""When to average: a schedule is a callable `(local_sgd) -> int`, the number of local steps of the next round."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .local_sgd import LocalSGD

Schedule = Callable[["LocalSGD"], int]

LONGEST = 2**31
"""Steps of a round without an end in sight; longer ones are as long as this."""

_ALLOWED = (
    "local_sgd_steps must be a whole number >= 1 (average every so many steps), "
    "or a schedule: a callable taking the LocalSGD and returning the number of local steps of the next round"
)


@dataclass(frozen=True)
class Every:
    """Average every `steps` counted steps, a whole number >= 1; `local_sgd_steps=8` means `Every(8)`.

    Local SGD with a constant period: Stich 2019, arXiv 1805.09767. Raises TypeError or ValueError for anything else.
    """

    steps: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", _whole_number(self.steps))
        if self.steps < 1:
            raise ValueError(f"{_ALLOWED}; got {self.steps!r}")

    def __call__(self, local_sgd: LocalSGD) -> int:
        return self.steps


@dataclass(frozen=True)
class Warmup:
    """`steps` steps of ordinary synchronous training (DDP all-reduces the gradients), then the schedule `then`, a number or a
    callable.

    Post-local SGD: Lin et al. 2020, arXiv 1808.07217. Raises TypeError or ValueError for steps < 0 and for what is no schedule.
    """

    steps: int
    then: int | Schedule

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", _whole_number(self.steps))
        if self.steps < 0:
            raise ValueError(f"the steps of a Warmup must be 0 or more; got {self.steps}")
        object.__setattr__(self, "then", as_schedule(self.then))

    def __call__(self, local_sgd: LocalSGD) -> int:
        assert callable(self.then)
        return 0 if local_sgd.num_steps < self.steps else self.then(local_sgd)

    def state_dict(self) -> dict[str, Any]:
        """Of `then`, where that has one."""
        return self.then.state_dict() if hasattr(self.then, "state_dict") else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if hasattr(self.then, "load_state_dict"):
            self.then.load_state_dict(state)


@dataclass(frozen=True)
class QSR:
    """The quadratic synchronization rule: rounds of H = max(base, floor((alpha / lr)^2)) steps, longer as the learning rate
    falls.

    Gu et al. 2024, arXiv 2310.14423. optimizer: the inner one; lr is the largest of its parameter groups', as it is when a
    round begins. alpha: a coefficient to tune, in units of the learning rate. While lr rises (a warm-up: more than when last
    asked, or at first less than what the optimizer's scheduler names as its initial or largest) rounds have `base` steps, lest
    the small lr of the beginning make a round that never ends. Where lr has fallen to 0 the round lasts until the block ends,
    which averages. Raises TypeError for what is no optimizer or no number, ValueError for base < 1 and alpha <= 0.
    """

    optimizer: torch.optim.Optimizer
    base: int = 4
    alpha: float = 0.0175
    _last: list[float] = field(default_factory=list, init=False, repr=False, compare=False)  # lr when asked the last time

    def __post_init__(self) -> None:
        if not hasattr(self.optimizer, "param_groups"):
            raise TypeError(f"QSR needs the inner optimizer, whose learning rate it follows; got {self.optimizer!r}")
        object.__setattr__(self, "base", _whole_number(self.base))
        if self.base < 1 or not self.alpha > 0:
            raise ValueError(f"QSR needs base >= 1 and alpha > 0; got base={self.base!r}, alpha={self.alpha!r}")

    def __call__(self, local_sgd: LocalSGD) -> int:
        groups = self.optimizer.param_groups
        lr = max(float(group["lr"]) for group in groups)
        named = [float(group[key]) for group in groups for key in ("initial_lr", "max_lr") if key in group]
        rises = lr > self._last[0] if self._last else lr < max(named, default=lr)
        self._last[:] = [lr]
        if rises:
            return self.base
        ratio = self.alpha / lr if lr > 0 else math.inf
        return max(self.base, math.floor(min(ratio * ratio, float(LONGEST))))

    def state_dict(self) -> dict[str, Any]:
        return {"lr": self._last[0] if self._last else math.nan}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        lr = float(state.get("lr", math.nan))
        self._last[:] = [] if math.isnan(lr) else [lr]


@dataclass(frozen=True)
class DriftTarget:
    """Rounds as long as the ranks may take to drift apart by `target` (see `SyncReport.drift`), between min_steps and
    max_steps.

    Starts with min_steps. Then, since drift grows with the steps of a round, about in proportion at first, the next has those
    of the last one measured times target / drift, at most twice as many. That is the round before the one that is ending, so
    single rounds may miss the target by half or twice of it where training is uneven. Raises TypeError for steps that are no
    whole numbers, ValueError unless target > 0 and 1 <= min_steps <= max_steps.
    """

    target: float
    min_steps: int = 1
    max_steps: int = 1024

    def __post_init__(self) -> None:
        for name in ("min_steps", "max_steps"):
            object.__setattr__(self, name, _whole_number(getattr(self, name)))
        if not (self.target > 0 and 1 <= self.min_steps <= self.max_steps):
            raise ValueError(f"DriftTarget needs target > 0 and 1 <= min_steps <= max_steps; got {self}")

    def __call__(self, local_sgd: LocalSGD) -> int:
        report = local_sgd.report
        if report is None or not math.isfinite(report.drift):
            return self.min_steps
        factor = min(2.0, self.target / report.drift) if report.drift > 0 else 2.0
        return min(self.max_steps, max(self.min_steps, round(report.local_steps * factor)))


def as_schedule(local_sgd_steps: Any) -> Schedule:
    """Turn the `local_sgd_steps` argument into a schedule, or raise an error that says what is allowed."""
    if isinstance(local_sgd_steps, type):
        raise TypeError(f"{_ALLOWED}; got the class {local_sgd_steps.__name__}, which wants to be called")
    return local_sgd_steps if callable(local_sgd_steps) else Every(local_sgd_steps)


def may_return_to_0(schedule: Schedule) -> bool:
    """Whether there may be synchronous steps after local ones: then no rank may go on before it knows."""
    if isinstance(schedule, Warmup):
        return may_return_to_0(as_schedule(schedule.then))
    return not isinstance(schedule, (Every, QSR, DriftTarget))


def lasting(interval: int, overlap_steps: int, fragments: int) -> int:
    """That interval, or a longer one in which each averaging has arrived before the next begins."""
    return max(interval, overlap_steps + 1, overlap_steps * fragments) if interval and overlap_steps else interval


def fragments_due(interval: int, phase: int, fragments: int) -> int:
    """Which fragments are averaged `phase` steps into a round of `interval`, as bits: number f at (f + 1) / fragments of it,
    rounded up."""
    if fragments == 1:
        return int(phase >= interval)
    points = [-(-(number + 1) * interval // fragments) for number in range(fragments)]
    return sum(1 << number for number, point in enumerate(points) if point == min(phase, interval))


def checked_interval(schedule: Schedule, local_sgd: LocalSGD) -> int:
    """Ask the schedule for the next round; 0 means that the next step is ordinary synchronous training."""
    value = schedule(local_sgd)
    try:
        interval = operator.index(value)
    except TypeError:
        interval = -1
    if interval < 0 or isinstance(value, bool):
        raise ValueError(
            f"the schedule {schedule!r} returned {value!r} at step {local_sgd.num_steps}; it must return the number of local "
            "steps of the next round, a whole number >= 1, or 0 for a step of ordinary synchronous training"
        )
    return min(interval, LONGEST)


_PREFIX = "schedule."


def state(schedule: Schedule) -> dict[str, torch.Tensor]:
    """What a schedule remembers, by name, for a checkpoint; nothing where it has no state_dict()."""
    kept = schedule.state_dict() if hasattr(schedule, "state_dict") else {}
    return {_PREFIX + k: torch.as_tensor(v, dtype=torch.float64 if isinstance(v, float) else None) for k, v in kept.items()}


def load(schedule: Schedule, state: Mapping[str, torch.Tensor]) -> None:
    """Take up what `state` gave, among other things."""
    if hasattr(schedule, "load_state_dict"):
        schedule.load_state_dict({k.removeprefix(_PREFIX): v for k, v in state.items() if k.startswith(_PREFIX)})


def _whole_number(value: Any) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{_ALLOWED}; got {value!r} of type {type(value).__name__}") from None
