"""Outer optimizers against an independent simulation in float64, and against torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from localsgd_ext import DiLoCo, LocalSGD, OuterSGD, SlowMo
from localsgd_ext.averager import Averager, Item
from localsgd_ext.wire import EXACT, Mode

from .local_steps import BUCKET_MB, drift, everything, mean_drift, parameters
from .ranks import run_ranks
from .tensors import OddModel, bits, values

OUTERS: dict[str, Any] = {
    "OuterSGD": OuterSGD(0.8),
    "momentum": OuterSGD(0.5, 0.8),
    "DiLoCo": DiLoCo(),
    "SlowMo": SlowMo(),
    "callable SGD": lambda anchors: torch.optim.SGD(anchors, lr=0.7, momentum=0.9, nesterov=True),
    "callable AdamW": lambda anchors: torch.optim.AdamW(anchors, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1),
}


class Simulation:
    """The formulas of the papers, in float64, from the mean progress of each round."""

    def __init__(self, name: str, begin: list[torch.Tensor]) -> None:
        self.weights = [each.double() for each in begin]
        self._momentum = [torch.zeros_like(each) for each in self.weights]
        self._torch = OUTERS[name](self.weights) if name.startswith("callable") else None
        self._name = name

    def round(self, progress: list[torch.Tensor]) -> None:
        if self._torch is not None:
            for weight, d in zip(self.weights, progress, strict=True):
                weight.grad = -d
            self._torch.step()
            return
        lr, beta, nesterov = {
            "OuterSGD": (0.8, 0.0, False),
            "momentum": (0.5, 0.8, False),
            "DiLoCo": (0.7, 0.9, True),
            "SlowMo": (1.0, 0.5, False),
        }[self._name]
        for weight, m, d in zip(self.weights, self._momentum, progress, strict=True):
            m.mul_(beta).add_(d)
            weight.add_(lr * (d + beta * m if nesterov else m))


def _fifty_rounds(rank: int, name: str, wire: str) -> tuple[float, bytes, bytes]:
    """Largest distance to the simulation over 50 rounds."""
    size = dist.get_world_size()
    model = parameters(900, 7, 300)
    simulation = Simulation(name, [p.detach() for p in model])
    worst = 0.0
    with LocalSGD(None, model, 2, wire=wire, outer=OUTERS[name], bucket_mb=BUCKET_MB) as local_sgd:
        for round in range(50):
            drift(model, rank, 2 * round)
            local_sgd.step()
            drift(model, rank, 2 * round + 1)
            local_sgd.step()
            first, second = (mean_drift(model, size, 2 * round + half) for half in range(2))
            simulation.round([a + b for a, b in zip(first, second, strict=True)])
            error = max((p.detach() - w).abs().max().item() for p, w in zip(model, simulation.weights, strict=True))
            worst = max(worst, error)
        end = everything(model)
    return worst, end, everything(model)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(("wire", "bound"), [("parameter", 1e-5), ("int8", 3e-4)])
@pytest.mark.parametrize("name", OUTERS)
@pytest.mark.usefixtures("engine")
def test_fifty_rounds_follow_the_formula(name: str, wire: str, bound: float, world_size: int) -> None:
    if name in ("DiLoCo", "callable SGD") and wire == "parameter":
        # A float32 mean is off by up to half a step of a weight, 1.2e-7 here, in each of 50 rounds, and a momentum of 0.9 with
        # lr 0.7 makes seven times that of it: 4.2e-5, were all of one sign.
        bound = 2e-5
    if name == "callable AdamW":
        bound *= 20  # a step of 1e-3 whatever the size of the progress, so that what rounding changes counts for more
    results = run_ranks(_fifty_rounds, world_size, name, wire, limit=120)
    assert results[0][0] < bound
    assert len({end for _, end, _ in results}) == len({left for _, _, left in results}) == 1, "ranks differ"


def _both_engines(rank: int, wire: str, dtype: torch.dtype) -> None:
    for outer in (OuterSGD(0.8), OuterSGD(0.5, 0.8), DiLoCo()):
        _both_engines_with(rank, wire, dtype, outer)


def _both_engines_with(rank: int, wire: str, dtype: torch.dtype, outer: OuterSGD) -> None:
    results = []
    for backend in ("torch", "native"):
        model = OddModel((dtype,), 0)
        averager = Averager(dist.group.WORLD, wire, backend, BUCKET_MB, outer)
        items = [Item(name, parameter) for name, parameter in model.named_parameters()]
        averager.bind(items)
        averager.agree()
        for salt in range(4):
            drift(model, rank, salt)
            mode = Mode.EXACT if salt == 2 else Mode.WIRE
            averager.average(
                items, step=0, round=1, interval=1, mode=mode, active=[True, salt != 1, True][: dist.get_world_size()]
            )
        anchors = averager.anchors
        assert averager.bindings[Mode.WIRE].engine.name == backend
        results.append([everything(model), *map(bits, (*anchors.anchor, *anchors.residual, *anchors.momentum))])
    assert results[0] == results[1]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wire", ["parameter", "float32", "int8"])
@pytest.mark.usefixtures("native_binary")
def test_engines_agree_bit_for_bit(wire: str, dtype: torch.dtype, world_size: int) -> None:
    run_ranks(_both_engines, world_size, wire, dtype)


def _like_the_mean(rank: int, wire: str) -> float:
    model, twin = parameters(900, 7), parameters(900, 7)
    with (
        LocalSGD(None, model, 1, wire=wire, outer=OuterSGD(1.0)) as local_sgd,
        LocalSGD(None, twin, 1, wire=wire) as plain,
    ):
        for salt in range(10):
            for each, averaging in ((model, local_sgd), (twin, plain)):
                drift(each, rank, salt)
                averaging.step()
    return max((a.detach() - b.detach()).abs().max().item() for a, b in zip(model, twin, strict=True))


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("wire", ["parameter", "int8"])
@pytest.mark.usefixtures("engine")
def test_a_step_of_1_without_momentum_is_the_mean(wire: str, world_size: int) -> None:
    assert max(run_ranks(_like_the_mean, world_size, wire)) <= (1e-6 if wire == "parameter" else 0.0)


def _small_steps(rank: int, dtype: torch.dtype) -> float:
    """Progress of less than half of what the dtype resolves, in every round, on one rank of two."""
    model = nn.ParameterList([nn.Parameter(torch.full((300,), 1.0, dtype=dtype))])
    step = 2 * torch.finfo(dtype).eps
    with LocalSGD(None, model, 1, outer=OuterSGD(0.125)) as local_sgd:
        for _ in range(64):
            if rank == 0:
                with torch.no_grad():
                    model[0].add_(step)
            else:
                local_sgd._rounds.stepped()
            local_sgd.step()
    return (model[0].detach().double() - 1).mean().item() / (64 * step * 0.125 / 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("engine")
def test_the_anchor_of_16_bit_parameters_keeps_small_steps(dtype: torch.dtype) -> None:
    for share in run_ranks(_small_steps, 2, dtype):
        assert share == pytest.approx(1.0, abs=0.05)


def _standing_still(rank: int) -> None:
    """Momentum moves the weights only where there is progress, and it outlives the block."""
    model = parameters(400)
    model.register_buffer("seen", torch.zeros(3))
    local_sgd = LocalSGD(None, model, 1, wire="int8", outer=DiLoCo())
    with local_sgd:
        drift(model, rank, 0)
        local_sgd.step()
        before = model[0].detach().clone()
        local_sgd.synchronize()
        model.seen.add_(1 + rank)
        local_sgd.synchronize()
        assert model.seen.eq(1.5).all()
        assert (model[0] - before).abs().max() < 1e-5, "no more than rounding had dropped"
        momentum = bits(local_sgd._rounds._averager.anchors.momentum[0])
        with local_sgd.averaged():
            pass
        assert bits(local_sgd._rounds._averager.anchors.momentum[0]) == momentum
    with local_sgd:
        assert bits(local_sgd._rounds._averager.anchors.momentum[0]) == momentum
        before, m = model[0].detach().double(), local_sgd._rounds._averager.anchors.momentum[0].double()
        drift(model, rank, 1)
        d = mean_drift(model, 2, 1)[0]
        local_sgd.step()
        expected = before + 0.7 * (1.9 * d + 0.81 * m)
        assert (model[0] - expected).abs().max() < 2e-5 < 0.1 * m.abs().max()


@pytest.mark.usefixtures("engine")
def test_momentum_moves_nothing_by_itself_and_outlives_the_block() -> None:
    run_ranks(_standing_still, 2)


def _refused(rank: int) -> None:
    for wrong in (0.7, "sgd", torch.optim.SGD([torch.zeros(1)], lr=1.0), OuterSGD, DiLoCo, SlowMo):
        with pytest.raises(TypeError, match=r"outer must be None, OuterSGD\(\.\.\.\)|wants to be called"):
            LocalSGD(None, nn.Linear(1, 1), 8, outer=wrong)  # type: ignore[arg-type]


def test_wrong_outers_say_what_is_allowed() -> None:
    _refused(0)
    for arguments in ({"lr": 0}, {"lr": -1.0}, {"momentum": 1.0}, {"momentum": -0.1}, {"nesterov": True}, {"lr": float("nan")}):
        with pytest.raises(ValueError, match=r"lr|momentum"):
            OuterSGD(**arguments)
    assert DiLoCo() == OuterSGD(0.7, 0.9, nesterov=True)
    assert SlowMo() == OuterSGD(1.0, 0.5)


def _differs(rank: int, ours: bool) -> str:
    from localsgd_ext import LayoutMismatchError

    outer: Any = OuterSGD(0.5 + rank) if ours else lambda anchors: torch.optim.AdamW(anchors, lr=0.5 + rank)
    with pytest.raises(LayoutMismatchError) as caught, LocalSGD(None, nn.Linear(1, 1), 8, outer=outer):
        pass
    return str(caught.value)


@pytest.mark.parametrize("ours", [True, False])
def test_outers_that_differ_between_ranks_are_named(ours: bool) -> None:
    for text in run_ranks(_differs, 2, ours):
        assert ("option outer: OuterSGD(lr=0.5" if ours else "option outer: AdamW({'lr': 0.5") in text


def test_an_optimizer_that_wants_more_than_a_gradient_is_refused() -> None:
    with pytest.raises(TypeError, match="LBFGS, which cannot step by a gradient alone"):
        LocalSGD(None, nn.Linear(1, 1), 8, outer=torch.optim.LBFGS)
    with pytest.raises(TypeError, match=r"outer=DiLoCo wants to be called: outer=DiLoCo\(\)"):
        LocalSGD(None, nn.Linear(1, 1), 8, outer=DiLoCo)  # type: ignore[arg-type]


def _unfrozen(rank: int, wire: str, outer: Any, second: torch.dtype) -> list[float]:
    """Lossless becomes lossy in the middle; the momentum of what was there before goes on."""
    model = nn.Module()
    model.first = nn.Parameter(torch.zeros(10))
    model.second = nn.Parameter(torch.zeros(10, dtype=second), requires_grad=False)
    seen = []
    with LocalSGD(None, model, 1, wire=wire, outer=outer) as local_sgd:
        for step in range(4):
            if step == 2:
                model.second.requires_grad_(True)
            with torch.no_grad():
                model.first += 1.0
            if step == 2 and not isinstance(outer, OuterSGD):
                with pytest.warns(UserWarning, match="the outer optimizer, which was made for the old ones, starts anew"):
                    local_sgd.step()
            else:
                local_sgd.step()
            seen.append(model.first[0].item())
    return seen


@pytest.mark.parametrize(("wire", "second"), [("parameter", torch.bfloat16), ("float32", torch.float64)])
@pytest.mark.usefixtures("engine")
def test_what_is_unfrozen_may_be_lossy_where_nothing_was(wire: str, second: torch.dtype) -> None:
    # With the momenta 1, 1.5, none where nothing is agreed on for the new tensor, and then 0.5 * 1.5 + 1.
    for seen in run_ranks(_unfrozen, 2, wire, SlowMo(), second):
        assert seen == pytest.approx([1.0, 2.5, 3.5, 5.25], rel=1e-6)
    run_ranks(_unfrozen, 2, wire, _sgd, second)


Maker = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


def _uneven(rank: int, outer: Maker | OuterSGD) -> bytes:
    model = parameters(600)
    with LocalSGD(None, model, 2, wire="int4", outer=outer) as local_sgd:
        for salt in range(3 + 4 * rank):
            drift(model, rank, salt)
            local_sgd.step()
    return everything(model)


@pytest.mark.parametrize("name", ["DiLoCo", "callable SGD"])
@pytest.mark.usefixtures("engine")
def test_ranks_end_equal_whoever_trains_longest(name: str) -> None:
    assert len(set(run_ranks(_uneven, 3, OUTERS[name] if name == "DiLoCo" else _sgd))) == 1


def _sgd(anchors: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(anchors, lr=0.7, momentum=0.9, nesterov=True)


def _exact_wire(rank: int) -> None:
    averager = Averager(dist.group.WORLD, EXACT, "torch", None)
    averager.bind([Item("x", values((3,), torch.float32, 0, rank))])
    assert averager.anchors is None


def test_without_an_outer_an_exact_wire_keeps_nothing() -> None:
    run_ranks(_exact_wire, 2)
