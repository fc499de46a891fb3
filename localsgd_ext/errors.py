"""The errors a user may want to catch. All derive from LocalSGDError, a RuntimeError."""


class LocalSGDError(RuntimeError):
    """Base of every error this package raises while averaging."""


class LayoutMismatchError(LocalSGDError):
    """Ranks do not hold the same tensors (names, shapes, strides, dtypes) or the same options."""


class PeerError(LocalSGDError):
    """Another rank failed; the message names it and the first line of its error."""


class PeerTimeoutError(PeerError):
    """Another rank did not arrive at an averaging within the timeout."""


class NonFiniteError(LocalSGDError):
    """A parameter holds NaN or inf, so an average over ranks would spread it to all of them."""
