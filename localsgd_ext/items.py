"""The tensors to be averaged, and what can be asked of them without sending anything."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from .errors import LocalSGDError
from .layout import Rule
from .wire import AVERAGEABLE, real_dtype

_version = operator.attrgetter("_version")


class Item(NamedTuple):
    """A tensor to be averaged in place (or to follow rank 0), with the name that errors show.

    holders: the ranks of this replica that hold the same, with this one; empty where no other does. owner: the tensor that it
    is this rank's part of, a DTensor, or else itself.
    """

    name: str
    tensor: torch.Tensor
    rule: Rule = Rule.MEAN
    is_parameter: bool = True
    holders: tuple[int, ...] = ()
    owner: torch.Tensor | None = None

    @property
    def identity(self) -> torch.Tensor:
        """The tensor by which it is known: another part of the same DTensor may take its place."""
        return self.tensor if self.owner is None else self.owner


def check_in_place(item: Item) -> None:
    """Raise LocalSGDError for a tensor that has no ordinary memory to write an average to."""
    tensor = item.tensor
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_inference():
        kind = "an inference tensor" if tensor.is_inference() else f"a {tensor.layout} tensor of {tensor.dtype}"
        raise LocalSGDError(
            f"{item.name!r} is {kind}, which cannot be averaged in place"
            + ("" if item.is_parameter else "; buffers='keep' leaves all buffers alone")
        )


def unexpanded(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without dimensions that repeat one element (stride 0), so that it can be written to."""
    for dim, step in enumerate(tensor.stride()):
        if step == 0 and tensor.size(dim) > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


@contextlib.contextmanager
def values_after(items: Sequence[Item]) -> Iterator[None]:
    """Whatever the block does to the tensors, they hold after it what they hold now, bit for bit."""
    tensors = [unexpanded(item.tensor.detach()) for item in items]
    own = [tensor.clone() for tensor in tensors]
    try:
        yield
    finally:
        with torch.inference_mode(False), torch.no_grad():
            for tensor, copy in zip(tensors, own, strict=True):
                tensor.copy_(copy)


def first_nonfinite(items: Sequence[Item]) -> int:
    """The number of the first parameter that holds NaN or inf, or -1. Reads all parameters once, and waits for the device."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for item in items:
        if item.is_parameter and item.tensor.numel():
            groups.setdefault((item.tensor.device, item.tensor.dtype), []).append(item.tensor.detach())
    with torch.no_grad():
        norms = [torch.stack(torch._foreach_norm(tensors)).isfinite().all() for tensors in groups.values()]
        if all(bool(finite) for finite in norms):
            return -1
        # A norm may be too large for its dtype where no element is.
        bad = (n for n, item in enumerate(items) if item.is_parameter and not item.tensor.isfinite().all())
        return next(bad, -1)


def version(items: Sequence[Item]) -> tuple[int, int]:
    """Two numbers that change when a parameter, or a buffer, is written to in place (as far as torch counts that: not through
    .data) or moved."""
    parameters = [item.tensor for item in items if item.is_parameter]
    buffers = [item.tensor for item in items if not item.is_parameter]
    return _version_of(parameters), _version_of(buffers)


def _version_of(tensors: list[torch.Tensor]) -> int:
    return hash((*map(_version, tensors), *map(torch.Tensor.data_ptr, tensors)))


def averageable(tensor: torch.Tensor) -> bool:
    """Whether a mean of this tensor over ranks is defined."""
    return real_dtype(tensor.dtype) in AVERAGEABLE
