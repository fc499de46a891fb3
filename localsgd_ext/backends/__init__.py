"""The engines that move tensors into and out of staging buffers, behind one small interface over buckets.

`reference` is pure PyTorch, runs on every device and is the definition of correct; any other engine must match it bit for bit
and use the same layout on the wire, so that ranks with different engines can average with each other.
"""

from __future__ import annotations

from collections.abc import Collection

from ..build import BuildError
from ..errors import LocalSGDError
from .interface import Backend

BACKENDS = ("auto", "native", "torch")


def check_backend(backend: str) -> None:
    """Raise ValueError for an unknown `backend=` argument."""
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is not known; allowed: {', '.join(map(repr, BACKENDS))}")


def pick(backend: str, devices: Collection[str]) -> Backend:
    """The engine for a `backend=` argument and tensors on devices of these types ("cpu", "cuda").

    "auto" takes the native engine where it is ready or can be built, else the PyTorch one, after one warning that says why.
    Raises LocalSGDError with the cause (the compiler's own words) where "native" cannot be had.
    """
    from .reference import ReferenceBackend

    check_backend(backend)
    if backend == "torch":
        return ReferenceBackend()
    from . import native

    if backend == "auto" and not set(devices) <= {"cpu", "cuda"}:
        return ReferenceBackend()
    try:
        engine = native.get_or_warn() if backend == "auto" else native.get()
    except BuildError as error:
        raise LocalSGDError(f"backend='native' cannot be had: {error}") from error
    if engine is not None and set(devices) <= engine.devices:
        return engine
    if backend == "native":
        raise LocalSGDError(
            f"backend='native' was built with kernels for {', '.join(sorted(native.get().devices))}, and the tensors are on "
            f"{', '.join(sorted(devices))}; use backend='auto' or backend='torch'"
        )
    return ReferenceBackend()
