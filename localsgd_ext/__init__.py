"""Fast, safe parameter averaging for local SGD: the drop-in for Hugging Face Accelerate's LocalSGD."""

from ._version import __version__
from .averager import average_parameters
from .errors import LayoutMismatchError, LocalSGDError, NonFiniteError, PeerError, PeerTimeoutError
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
