"""The entry of a block: ranks make sure that they hold the same tensors, options and weights."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch

from . import agreement
from .averager import Averager
from .control import Control
from .items import Item
from .layout import Rule
from .models import PARAMETER_FATES
from .wire import Mode


def agree(
    control: Control,
    averager: Averager,
    described: Sequence[tuple[str, str, torch.Tensor]],
    options: Mapping[str, object],
    groups: str,
    step: int,
    equal: bool,
) -> None:
    """described: see `Selection`. groups: which ones will average, equal on ranks that hold the same part. equal: whether
    weights have to be alike, too; where they are not, all ranks take the first one's. Raises LayoutMismatchError."""
    parameters = [tensor for _, fate, tensor in described if fate in PARAMETER_FATES]
    tensors = agreement.describe({"process group": groups}, described)
    differing = control.enter(agreement.describe(options, ()), tensors, agreement.checksums(parameters) if equal else [], step)
    if not differing:
        return
    names, first = control.name(differing), control.first(differing)
    warnings.warn(
        f"the weights of {names} differ from {first}'s; all ranks start from {first}'s (a model without DDP has to be seeded alike, or loaded, "
        "on every rank)",
        stacklevel=6,
    )
    with control.blaming():
        averager.average(
            [Item(name, tensor, Rule.FOLLOW, is_parameter=False) for name, _, tensor in described],
            step=0, round=0, interval=0, mode=Mode.VALUES, watch=control.watch(), timeout=control.timeout,
        ).result(control.watch())  # fmt: skip
