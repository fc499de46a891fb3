"""Outer optimizers: what is done with the mean progress d of a round, instead of just taking the mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

OuterFactory = Callable[[list[torch.Tensor]], torch.optim.Optimizer]
"""Makes any optimizer for the flat anchors, whose gradient is -d."""


@dataclass(frozen=True)
class OuterSGD:
    """SGD on the anchor a, the last agreed weights, with the mean progress d of a round in the place of a gradient::

        m <- momentum * m + d
        a <- a + lr * (d + momentum * m if nesterov else m)

    and all ranks go on from a. The same as `torch.optim.SGD(lr=lr, momentum=momentum, nesterov=nesterov)` with the gradient -d,
    fused into the pass that receives d. lr=1, momentum=0 is the plain mean. State: the anchor and, with momentum, m: a float32
    each for every element of the parameters (float64 for float64).

    Raises ValueError unless lr > 0 and 0 <= momentum < 1, and for nesterov without momentum.
    """

    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        _check_number("lr", self.lr, 0.0, math.inf, "> 0")
        if self.momentum != 0:
            _check_number("momentum", self.momentum, 0.0, 1.0, "at least 0 and below 1")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov=True needs a momentum above 0")


Outer = OuterSGD | OuterFactory
"""What an `outer=` argument may be, besides None."""


def DiLoCo(lr: float = 0.7, momentum: float = 0.9) -> OuterSGD:
    """DiLoCo's outer optimizer, Nesterov momentum, to be used with hundreds of local AdamW steps in a round.

    Douillard et al. 2023, arXiv 2311.08105: lr=0.7 and momentum=0.9 were best there for every number of replicas. Raises
    ValueError as `OuterSGD` does.
    """
    return OuterSGD(lr, momentum, nesterov=True)


def SlowMo(lr: float = 1.0, momentum: float = 0.5) -> OuterSGD:
    """Slow momentum over local SGD. Wang et al. 2020, arXiv 1910.00643.

    The paper's buffer is u <- momentum * u + d / gamma with the step lr * gamma * u, gamma being the inner learning rate. Here
    it is kept in units of the weights, m = gamma * u, which is the same where gamma does not change between two rounds, and
    needs no division by a learning rate that a schedule may have brought to 0. lr is the paper's alpha, momentum its beta.
    Raises ValueError as `OuterSGD` does.
    """
    return OuterSGD(lr, momentum)


def makes_optimizer(outer: Outer | None) -> TypeGuard[OuterFactory]:
    """Whether it is an optimizer of torch's that steps the anchors, after the averaging, instead of a part of its last pass."""
    return outer is not None and not isinstance(outer, OuterSGD)


def check_outer(outer: Any) -> str:
    """Raise TypeError for what is neither None, an `OuterSGD`, nor a callable that makes an optimizer whose step() needs
    nothing. Gives a description, which differs between optimizers of other classes or settings."""
    if outer is None or isinstance(outer, OuterSGD):
        return repr(outer)
    named = {DiLoCo: "DiLoCo", SlowMo: "SlowMo", OuterSGD: "OuterSGD"}
    if isinstance(outer, Hashable) and outer in named:  # callables, too
        raise TypeError(f"outer={named[outer]} wants to be called: outer={named[outer]}()")
    if not callable(outer) or isinstance(outer, torch.optim.Optimizer):
        given = f"a {type(outer).__name__} that was made already" if isinstance(outer, torch.optim.Optimizer) else repr(outer)
        raise TypeError(
            "outer must be None, OuterSGD(...), DiLoCo(), SlowMo(), or a callable that takes the list of flat anchors and returns a "
            f"torch.optim.Optimizer for them; got {given}"
        )
    trial = torch.zeros(1)
    optimizer = make_optimizer(outer, [trial])
    trial.grad = torch.zeros(1)
    try:
        optimizer.step()
    except TypeError as error:
        raise TypeError(
            f"outer made a {type(optimizer).__name__}, which cannot step by a gradient alone ({error}); use another optimizer"
        ) from None
    settings = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    return f"{type(optimizer).__name__}({settings})"


def make_optimizer(outer: OuterFactory, anchors: list[torch.Tensor]) -> torch.optim.Optimizer:
    """What the callable makes of the anchors. Raises TypeError where that is no optimizer, ValueError where it is not for
    them."""
    made = outer(anchors)
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(f"outer={outer!r} returned {made!r}; it must return a torch.optim.Optimizer")
    taken = {id(parameter) for group in made.param_groups for parameter in group["params"]}
    if taken != set(map(id, anchors)):
        raise ValueError(
            f"outer={outer!r} made an optimizer of other tensors; it must be for those, and all of those, it is called with"
        )
    return made


def _check_number(name: str, value: Any, low: float, high: float, allowed: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low < value < high:
        raise ValueError(f"{name} must be a number {allowed}; got {value!r}")
