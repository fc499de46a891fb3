"""Fast, safe parameter averaging for local SGD: the drop-in for Hugging Face Accelerate's LocalSGD."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from .errors import LayoutMismatchError, LocalSGDError, NonFiniteError, PeerError, PeerTimeoutError
    from .functional import average_parameters
    from .local_sgd import LocalSGD
    from .outer import DiLoCo, OuterSGD, SlowMo
    from .replicas import host_groups
    from .report import SyncReport
    from .schedules import QSR, DriftTarget, Every, Warmup

__all__ = [
    "QSR",
    "DiLoCo",
    "DriftTarget",
    "Every",
    "LayoutMismatchError",
    "LocalSGD",
    "LocalSGDError",
    "NonFiniteError",
    "OuterSGD",
    "PeerError",
    "PeerTimeoutError",
    "SlowMo",
    "SyncReport",
    "Warmup",
    "__version__",
    "average_parameters",
    "host_groups",
]

_WHERE = {
    "errors": ["LayoutMismatchError", "LocalSGDError", "NonFiniteError", "PeerError", "PeerTimeoutError"],
    "functional": ["average_parameters"],
    "local_sgd": ["LocalSGD"],
    "outer": ["DiLoCo", "OuterSGD", "SlowMo"],
    "replicas": ["host_groups"],
    "report": ["SyncReport"],
    "schedules": ["QSR", "DriftTarget", "Every", "Warmup"],
}


def __getattr__(name: str) -> Any:
    """All but the version when first asked for: the command line has answers that need no torch, whose import takes more than a
    second."""
    for module, names in _WHERE.items():
        if name in names:
            value = getattr(importlib.import_module(f".{module}", __name__), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
