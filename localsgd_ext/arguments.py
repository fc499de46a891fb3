"""What may be passed for an argument, and what is said where it may not."""

from __future__ import annotations

import datetime
from typing import Any

import torch

from .backends import check_backend
from .decision import NONFINITE
from .models import BUFFER_POLICIES
from .schedules import LONGEST, Every
from .standing import MAX_FRAGMENTS
from .wire import check_wire

_CHOICES = {
    "count": ("calls", "optimizer"),
    "buffers": BUFFER_POLICIES,
    "nonfinite": NONFINITE,
}


def check_choices(*, wire: Any, backend: Any, **others: Any) -> None:
    """Raise ValueError for a value that is not one of those allowed for an argument."""
    for argument, value in others.items():
        if value not in _CHOICES[argument]:
            raise ValueError(f"{argument}={value!r} is not known; allowed: {', '.join(map(repr, _CHOICES[argument]))}")
    check_wire(wire)
    check_backend(backend)


def check_bucket_mb(bucket_mb: Any) -> None:
    """Raise ValueError for anything but None or a number of MiB."""
    if bucket_mb is not None and not (type(bucket_mb) in (int, float) and 0 < bucket_mb <= 65536):
        raise ValueError(f"bucket_mb must be a number of MiB > 0 and <= 65536, or None for the default; got {bucket_mb!r}")


def check_timeout(timeout: Any) -> None:
    """Raise TypeError or ValueError for anything but None or a timedelta of some length."""
    if timeout is not None and not isinstance(timeout, datetime.timedelta):
        raise TypeError(f"timeout must be a datetime.timedelta, or None for the process group's; got {timeout!r}")
    if timeout is not None and timeout <= datetime.timedelta(0):
        raise ValueError(f"timeout must be longer than 0; got {timeout}")


def check_fragments(fragments: Any, overlap_steps: Any, schedule: Any) -> None:
    """Raise TypeError or ValueError for anything but a number of fragments and of steps that fit into a round."""
    for name, value, least, most in (("fragments", fragments, 1, MAX_FRAGMENTS), ("overlap_steps", overlap_steps, 0, LONGEST)):
        allowed = f"a whole number >= {least} and <= {most}"
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be {allowed}; got {value!r} of type {type(value).__name__}")
        if not least <= value <= most:
            raise ValueError(f"{name} must be {allowed}; got {value}")
    if not isinstance(schedule, Every):
        return
    if fragments > schedule.steps:
        raise ValueError(f"fragments must be at most local_sgd_steps, here {schedule.steps}; got {fragments}")
    if overlap_steps and (overlap_steps >= schedule.steps or overlap_steps * fragments > schedule.steps):
        raise ValueError(
            f"overlap_steps must be less than local_sgd_steps and, times fragments, not more, so that each averaging has arrived before the next "
            f"begins; got overlap_steps={overlap_steps}, fragments={fragments}, local_sgd_steps={schedule.steps}"
        )


def state_device(device: Any) -> torch.device | None:
    """None for beside the parameters. Raises ValueError for anything but that or the CPU."""
    if device is None:
        return None
    if isinstance(device, (str, torch.device)) and str(device) == "cpu":
        return torch.device("cpu")
    raise ValueError(f"state_device must be None (beside the parameters) or 'cpu'; got {device!r}")
