"""The errors a user may want to catch. All derive from LocalSGDError, a RuntimeError."""

from __future__ import annotations

from collections.abc import Sequence


class LocalSGDError(RuntimeError):
    """Base of every error this package raises while averaging."""


class LayoutMismatchError(LocalSGDError):
    """Ranks do not hold the same tensors (names, shapes, strides, dtypes) or the same options."""


class PeerError(LocalSGDError):
    """Another rank failed; the message names it and the first line of its error. ranks: whose fault it is, as far as known."""

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class PeerTimeoutError(PeerError):
    """Another rank did not arrive at an averaging within the timeout."""


class NonFiniteError(LocalSGDError):
    """A rank's parameter holds NaN or inf, which an average would spread to all ranks."""
