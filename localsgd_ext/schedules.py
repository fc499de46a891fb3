"""When to average: a schedule is a callable `(local_sgd) -> int`, the number of local steps of the next round."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .local_sgd import LocalSGD

Schedule = Callable[["LocalSGD"], int]

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


def as_schedule(local_sgd_steps: Any) -> Schedule:
    """Turn the `local_sgd_steps` argument into a schedule, or raise an error that says what is allowed."""
    return local_sgd_steps if callable(local_sgd_steps) else Every(local_sgd_steps)


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
    return interval


def _whole_number(value: Any) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{_ALLOWED}; got {value!r} of type {type(value).__name__}") from None
