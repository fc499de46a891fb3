"""Fast, safe parameter averaging for local SGD: the drop-in for Hugging Face Accelerate's LocalSGD."""

from ._version import __version__
from .averager import average_parameters
from .errors import LayoutMismatchError, LocalSGDError, NonFiniteError, PeerError, PeerTimeoutError
from .local_sgd import LocalSGD
from .report import SyncReport
from .schedules import Every

__all__ = [
    "Every",
    "LayoutMismatchError",
    "LocalSGD",
    "LocalSGDError",
    "NonFiniteError",
    "PeerError",
    "PeerTimeoutError",
    "SyncReport",
    "__version__",
    "average_parameters",
]
