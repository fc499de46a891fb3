"""What the callbacks have in common."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..dtensors import is_spread
from ..local_sgd import LocalSGD
from ..schedules import Schedule, as_schedule

_GIVEN = {"self", "accelerator", "model", "local_sgd_steps"}


def check_options(local_sgd_steps: int | Schedule, options: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError where they cannot be meant; `LocalSGD` itself looks at the values, once there is a
    model."""
    as_schedule(local_sgd_steps)
    allowed = [name for name in inspect.signature(LocalSGD.__init__).parameters if name not in _GIVEN]
    for name in options:
        if name not in allowed:
            raise TypeError(f"LocalSGDCallback has no option {name!r}; those of LocalSGD are {', '.join(allowed)}")


def check_whole(model: torch.nn.Module) -> None:
    """Raise NotImplementedError for a model in parts, of which the checkpoints of these loops are made in another way."""
    for name, parameter in model.named_parameters():
        if is_spread(parameter):
            raise NotImplementedError(
                f"parameter {name!r} is a DTensor (FSDP2 or tensor parallel), which LocalSGDCallback does not save; use plain DDP, or LocalSGD in a "
                "training loop of your own"
            )


class Average:
    """The average that is evaluated and saved, and the numbers that are logged."""

    def __init__(self, local_sgd: LocalSGD) -> None:
        self._local_sgd = local_sgd
        self._kept: tuple[int, dict[str, float]] | None = None  # for which averaging others' numbers are logged, and these

    def make(self) -> None:
        """Average what was not averaged yet, on all ranks alike, unless training has ended."""
        rounds = self._local_sgd._rounds
        if rounds is None or not self._local_sgd.is_inside:
            return
        # What only sends the rest of an averaging tells nothing of how far the ranks have moved apart.
        numbers, count = None if rounds.has_news else self.metrics(), self._local_sgd.num_syncs
        self._local_sgd.settle()
        if self._local_sgd.num_syncs > count:
            self._kept = None if numbers is None else (self._local_sgd.num_syncs, numbers)

    def metrics(self) -> dict[str, float]:
        """`LocalSGD.metrics()` of the last averaging that had something new."""
        if self._kept is not None and self._kept[0] == self._local_sgd.num_syncs:
            return dict(self._kept[1])
        return self._local_sgd.metrics()


def replace_method(owner: Any, name: str, method: Callable[..., Any]) -> Callable[[], None]:
    """Give this one object another method of that name. What is returned puts things back, unless it was replaced once more
    meanwhile."""
    had, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, method)

    def undo() -> None:
        if vars(owner).get(name) is method:
            if had:
                setattr(owner, name, before)
            else:
                delattr(owner, name)

    return undo


def nothing() -> None:
    """What is to be undone where nothing was replaced."""
