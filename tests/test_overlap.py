"""Averaging in the background and in fragments, against an independent simulation of the delayed formula in float64."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch
from torch import nn

from localsgd_ext import DiLoCo, LocalSGD, OuterSGD, SlowMo
from localsgd_ext.wire import Mode

from .local_steps import BUCKET_MB, drift, everything, parameters
from .ranks import run_ranks
from .tensors import bits

SIZES = (900, 7, 300)
INTERVAL = 12
OUTERS: dict[str, Any] = {
    "mean": None,
    "DiLoCo": DiLoCo(),
    "SlowMo": SlowMo(),
    "callable": lambda a: torch.optim.SGD(a, lr=0.8),
}
RATES = {"mean": (1.0, 0.0, False), "DiLoCo": (0.7, 0.9, True), "SlowMo": (1.0, 0.5, False), "callable": (0.8, 0.0, False)}


class Simulation:
    """All ranks' weights as they should be, in one process. Ranks make different numbers of steps."""

    def __init__(self, name: str, fragments: int, overlap: int, steps: tuple[int, ...]) -> None:
        begin = torch.cat([p.detach().double() for p in parameters(*SIZES)])
        self.x = [begin.clone() for _ in steps]
        self.anchor, self.momentum = begin.clone(), torch.zeros_like(begin)
        self.lr, self.beta, self.nesterov = RATES[name]
        self.overlap, self.steps = overlap, steps
        total = len(begin)
        ends = [min(total, math.ceil(math.ceil(total * (f + 1) / fragments) / 256) * 256) for f in range(fragments)]
        self.parts = [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]
        self.news = [[False] * fragments for _ in steps]
        self.flying: dict[int, tuple[slice, list[torch.Tensor], torch.Tensor, int]] = {}  # by rank
        self.due = [math.ceil((f + 1) * INTERVAL / fragments) for f in range(fragments)]

    def step(self, step: int) -> None:
        training = [r for r, n in enumerate(self.steps) if n >= step]
        for rank in training:
            self.x[rank] += torch.cat(drift(parameters(*SIZES), rank, step))
            self.news[rank] = [True] * len(self.parts)
            if rank in self.flying and step >= self.flying[rank][3] + self.overlap:
                self.land(rank)
        for fragment, point in enumerate(self.due):
            if (step - 1) % INTERVAL + 1 == point:
                self.average(fragment, step, training)
        for rank in training:
            if self.steps[rank] == step and rank in self.flying:
                self.land(rank)

    def run(self) -> None:
        for step in range(1, max(self.steps) + 1):
            self.step(step)
        active = [rank for rank, news in enumerate(self.news) if any(news)]
        if active:
            after = self.move(slice(None), sum(self.x[r] for r in active) / len(active))
            self.x = [after.clone() for _ in self.x]

    def average(self, fragment: int, step: int, training: list[int]) -> None:
        part = self.parts[fragment]
        for rank in training:
            if rank in self.flying:
                self.land(rank)
        active = [rank for rank in range(len(self.x)) if self.news[rank][fragment]]
        taken = [x[part].clone() for x in self.x]
        after = self.move(part, sum(taken[r] for r in active) / len(active))
        for rank in range(len(self.x)):
            self.news[rank][fragment] = False
            self.flying[rank] = part, taken, after, step
            if rank not in training or not self.overlap:
                self.land(rank)

    def move(self, part: slice, mean: torch.Tensor) -> torch.Tensor:
        d = mean - self.anchor[part]
        m = self.momentum[part].mul_(self.beta).add_(d)
        self.anchor[part] += self.lr * (d + self.beta * m if self.nesterov else m)
        return self.anchor[part].clone()

    def land(self, rank: int) -> None:
        part, taken, after, _ = self.flying.pop(rank)
        self.x[rank][part] = after + (self.x[rank][part] - taken[rank])


def _run(
    rank: int, name: str, wire: str, fragments: int, overlap: int, steps: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Weights right before this rank leaves, and at the end."""
    model = parameters(*SIZES)
    options = {"wire": wire, "outer": OUTERS[name], "bucket_mb": BUCKET_MB / 4}
    with LocalSGD(None, model, INTERVAL, fragments=fragments, overlap_steps=overlap, **options) as local_sgd:
        for step in range(1, steps[rank] + 1):
            drift(model, rank, step)
            local_sgd.step()
            if overlap and step % 5 == rank:
                time.sleep(0.003)  # ranks are never in step
        before = torch.cat([p.detach().clone() for p in model])
        under_way = int(local_sgd._rounds._flight is not None)  # type: ignore[union-attr]
    return before, torch.cat([p.detach() for p in model]), under_way


@pytest.mark.parametrize("overlap", [0, 1, 3])
@pytest.mark.parametrize("fragments", [1, 3, 4])
@pytest.mark.usefixtures("engine")
def test_the_delayed_formula(fragments: int, overlap: int) -> None:
    """With ranks that leave at different times: while something is under way, or right where it began, with nothing new
    since."""
    for name, wire, bound in (("mean", "parameter", 1e-5), ("DiLoCo", "parameter", 1e-5), ("SlowMo", "int8", 5e-4)):
        steps = (37, 24, 40, 31)[: 2 if name == "mean" else 4]
        simulation = Simulation(name, fragments, overlap, steps)
        simulation.run()
        results = run_ranks(_run, len(steps), name, wire, fragments, overlap, steps)
        for rank, (_, end, _) in enumerate(results):
            assert (end.double() - simulation.x[rank]).abs().max() < bound, (name, rank)
        assert len({bits(end) for _, end, _ in results}) == 1, "ranks differ"


@pytest.mark.parametrize("fragments", [1, 3])
def test_an_optimizer_of_torchs_steps_one_fragment_at_a_time(fragments: int) -> None:
    simulation = Simulation("callable", fragments, 2, (30, 30))
    simulation.run()
    results = run_ranks(_run, 2, "callable", "parameter", fragments, 2, (30, 30))
    assert (results[0][1].double() - simulation.x[0]).abs().max() < 1e-5


def test_weights_in_the_middle() -> None:
    """Before the end, which makes up for much: what was taken at 24 has arrived at 27, and not at 25."""
    for name, until in (("mean", 27), ("DiLoCo", 25)):
        simulation = Simulation(name, 3, 3, (1000, 1000))
        for step in range(1, until + 1):
            simulation.step(step)
        assert bool(simulation.flying) == (until == 25)
        for rank, (before, _, under_way) in enumerate(run_ranks(_run, 2, name, "parameter", 3, 3, (until, until))):
            assert (before.double() - simulation.x[rank]).abs().max() < 1e-5
            assert under_way == (rank in simulation.flying)


def _plain(rank: int, explicit: bool) -> bytes:
    model = parameters(*SIZES)
    options = {"fragments": 1, "overlap_steps": 0} if explicit else {}
    with LocalSGD(None, model, 5, wire="int8", outer=OuterSGD(0.9), **options) as local_sgd:  # type: ignore[arg-type]
        for step in range(13):
            drift(model, rank, step)
            local_sgd.step()
        assert local_sgd._rounds._worker._thread is None  # type: ignore[union-attr]
    return everything(model)


def test_one_fragment_without_overlap_is_as_before() -> None:
    assert len({*run_ranks(_plain, 2, False), *run_ranks(_plain, 2, True)}) == 1


def _bytes_at_once(rank: int, fragments: int, wire: str) -> list[int]:
    model = parameters(40_000, 3, 24_000)
    seen = []
    with LocalSGD(None, model, 8, fragments=fragments, wire=wire) as local_sgd:
        for step in range(8):
            drift(model, rank, step)
            syncs = local_sgd.num_syncs
            local_sgd.step()
            if local_sgd.num_syncs > syncs:
                seen.append(local_sgd.report.wire_bytes)  # type: ignore[union-attr]
    return seen


@pytest.mark.parametrize("wire", ["parameter", "int8"])
def test_fragments_divide_the_bytes(wire: str) -> None:
    whole = run_ranks(_bytes_at_once, 2, 1, wire)[0]
    for fragments in (2, 3, 4):
        parts = run_ranks(_bytes_at_once, 2, fragments, wire)[0]
        assert len(parts) == fragments
        assert max(parts) <= whole[0] / fragments * 1.05
        assert sum(parts) == pytest.approx(whole[0], rel=0.02)


def _shadow_bytes(rank: int, fragments: int) -> int:
    model = parameters(40_000, 3, 24_000)
    with LocalSGD(None, model, 8, fragments=fragments, overlap_steps=1, wire="int8", outer=DiLoCo()) as local_sgd:
        shadows = local_sgd._rounds._averager.bindings[Mode.WIRE]._shadows  # type: ignore[union-attr]
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for s in shadows for t in (s._before, s._after)
        }
    return sum(storages.values())


@pytest.mark.parametrize("fragments", [1, 4])
def test_overlap_keeps_two_copies_of_a_fragment(fragments: int) -> None:
    assert run_ranks(_shadow_bytes, 2, fragments)[0] == pytest.approx(2 * 4 * 64_003 / fragments, rel=0.02)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"overlap_steps": 8}, ValueError),
        ({"overlap_steps": 3, "fragments": 4}, ValueError),
        ({"overlap_steps": -1}, ValueError),
        ({"overlap_steps": True}, TypeError),
        ({"fragments": 0}, ValueError),
        ({"fragments": 9}, ValueError),
        ({"fragments": 2.0}, TypeError),
    ],
)
def test_wrong_numbers_are_refused(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(options))):
        LocalSGD(None, nn.Linear(1, 1), 8, **options)
