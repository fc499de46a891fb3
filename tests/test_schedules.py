"""Schedules: their formulas, and that all ranks follow the same one."""

from __future__ import annotations

import math
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from localsgd_ext import QSR, DiLoCo, DriftTarget, Every, LocalSGD, Warmup
from localsgd_ext.schedules import LONGEST, checked_interval, fragments_due, lasting

from .ranks import run_ranks
from .tensors import bits, values


def _warm_up(rank: int, wire: str) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(7, 5))
    twin = DistributedDataParallel(nn.Linear(7, 5))
    twin.load_state_dict(model.state_dict())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, twin)]
    syncs = []
    with LocalSGD(None, model, Warmup(20, then=8), wire=wire) as local_sgd:
        for step in range(36):
            for each, optimizer in zip((model, twin), optimizers, strict=True):
                each(values((4, 7), torch.float32, step, rank)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            local_sgd.step()
            same = bits(model.module.weight) == bits(twin.module.weight)
            assert same == (step < 20), step
            syncs.append(local_sgd.num_syncs)
    assert syncs == [0] * 27 + [1] * 8 + [2]


@pytest.mark.parametrize("wire", ["parameter", "int8"])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.usefixtures("engine")
def test_warm_up_is_ddp_to_the_last_bit(wire: str, world_size: int) -> None:
    run_ranks(_warm_up, world_size, wire)


def _cosine(rank: int) -> list[tuple[int, int]]:
    """Step and interval of every averaging along a cosine schedule."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    seen = []
    with LocalSGD(None, model, QSR(optimizer, base=4, alpha=0.2)) as local_sgd:
        for _ in range(200):
            optimizer.step()
            scheduler.step()
            syncs = local_sgd.num_syncs
            local_sgd.step()
            if local_sgd.num_syncs > syncs:
                seen.append((local_sgd.num_steps, local_sgd.report.interval))
                # Not rounded: a run that goes on from a checkpoint must see it fall as this one does.
                assert local_sgd.state_dict()["schedule.lr"].item() == optimizer.param_groups[0]["lr"]
    return seen


def _asked_in_a_warm_up(rank: int, leaves: bool) -> None:
    warnings.simplefilter("ignore", FutureWarning)  # broadcast_buffers is called something else now
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5)), broadcast_buffers=False)
    twin = DistributedDataParallel(nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5)), broadcast_buffers=False)
    twin.load_state_dict(model.state_dict())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, twin)]
    with LocalSGD(None, model, Warmup(20, then=8), outer=DiLoCo()) as local_sgd:
        for step in range(10):
            for each, optimizer in zip((model, twin), optimizers, strict=True):
                each(values((4, 7), torch.float32, step, rank)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            local_sgd.step()
            if step % 3 == 0 and not leaves:
                local_sgd.synchronize()
                assert local_sgd.state_dict()["num_steps"] == step + 1, "it can be saved"
            assert bits(model.module[0].weight) == bits(twin.module[0].weight)
    assert bits(model.module[0].weight) == bits(twin.module[0].weight)
    means = model.module[1].running_mean.clone()
    torch.distributed.broadcast(means, 0)
    assert bits(means) == bits(model.module[1].running_mean), "statistics, which ranks had of their own, agree"
    assert bits(means) != bits(twin.module[1].running_mean)


@pytest.mark.parametrize("leaves", [False, True])
def test_synchronous_steps_are_no_progress_for_an_outer_optimizer(leaves: bool) -> None:
    """Neither when an averaging is asked for in a warm-up, nor when the block ends in it."""
    run_ranks(_asked_in_a_warm_up, 2, leaves)


def _alone_then_together(rank: int) -> None:
    alone = LocalSGD(None, nn.Linear(2, 2), 4, process_group=torch.distributed.new_subgroups(1)[0])
    with alone:
        for _ in range(3):
            alone.step()
    local_sgd = LocalSGD(None, nn.Linear(2, 2), 4)
    local_sgd.load_state_dict(alone.state_dict())
    assert (local_sgd.num_steps, local_sgd.num_syncs, local_sgd.report) == (3, 0, None)


def test_the_state_of_a_single_process_is_as_good() -> None:
    run_ranks(_alone_then_together, 2)


def test_qsr_follows_its_formula_along_a_cosine() -> None:
    results = run_ranks(_cosine, 2)
    assert results[0] == results[1]
    expected, step = [], 0
    while True:
        lr = 0.05 * (1 + math.cos(math.pi * step / 200))
        interval = max(4, math.floor((0.2 / lr) ** 2))
        if step + interval > 200:
            break
        step += interval
        expected.append((step, interval))
    assert results[0] == expected
    assert expected[0][1] == 4
    assert expected[-1][1] > 20


def _one_cycle(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=100, pct_start=0.2)


def _linear_then_cosine(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda at: at / 20 if at < 20 else 0.5 * (1 + math.cos(math.pi * (at - 20) / 80))
    )


@pytest.mark.parametrize("make", [_one_cycle, _linear_then_cosine])
def test_qsr_in_a_warm_up(make: Any) -> None:
    """A small learning rate that rises is not one that has fallen; also where the schedule is loaded in between."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler, schedule, due = make(optimizer), QSR(optimizer, base=4, alpha=0.2), 0
    for step in range(90):
        if step == due:
            interval, lr = schedule(None), optimizer.param_groups[0]["lr"]  # type: ignore[arg-type]
            assert interval == (4 if step <= 20 else max(4, math.floor((0.2 / lr) ** 2))), step
            due += interval
            state, schedule = schedule.state_dict(), QSR(optimizer, base=4, alpha=0.2)
            schedule.load_state_dict({key: torch.tensor(value, dtype=torch.float64) for key, value in state.items()})
        optimizer.step()
        scheduler.step()
    assert due > 90


def test_qsr_where_the_learning_rate_is_0() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [parameter], "lr": 0.0}], lr=0.0)
    assert QSR(optimizer)(None) == LONGEST  # type: ignore[arg-type]


def _rank_dependent(rank: int) -> list[int]:
    model = nn.Linear(3, 1)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    at = []
    with LocalSGD(None, model, lambda ours: 2 if ours.num_steps == 0 else 2 + 3 * rank) as local_sgd:
        for _ in range(12 - 4 * (rank == 0)):  # rank 0 leaves first: then the next one's word counts
            syncs = local_sgd.num_syncs
            local_sgd.step()
            if local_sgd.num_syncs > syncs:
                at.append(local_sgd.num_steps)
    return at


def test_a_schedule_that_depends_on_the_rank_sets_nobody_apart() -> None:
    assert run_ranks(_rank_dependent, 2) == [[2, 4, 6, 8], [2, 4, 6, 8, 10]]


def simulate(target: float, power: float, noise: float, **limits: int) -> list[tuple[int, float]]:
    """Rounds of a training in which ranks drift apart by 0.001 * steps ** power."""
    schedule, report, rounds = DriftTarget(target, **limits), None, []
    generator = torch.Generator().manual_seed(0)
    pending = None
    for _ in range(40):
        # A schedule is asked before the averaging that ends a round, so it knows of the one before.
        steps = schedule(SimpleNamespace(report=report))  # type: ignore[arg-type]
        report = pending
        drift = 0.001 * steps**power * (1 + noise * torch.randn((), generator=generator).item())
        pending = SimpleNamespace(local_steps=steps, drift=drift)
        rounds.append((steps, drift))
    return rounds


@pytest.mark.parametrize("power", [0.5, 0.75, 1.0])
@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_drift_is_held_at_its_target(power: float, noise: float) -> None:
    rounds = simulate(0.012, power, noise)
    assert all(abs(drift / 0.012 - 1) < 0.2 for _, drift in rounds[20:])


def test_a_drift_target_keeps_to_its_limits() -> None:
    assert {steps for steps, _ in simulate(1.0, 1.0, 0.0, min_steps=3, max_steps=50)[10:]} == {50}
    assert {steps for steps, _ in simulate(1e-6, 1.0, 0.0, min_steps=3, max_steps=50)} == {3}
    broken = SimpleNamespace(report=SimpleNamespace(local_steps=9, drift=math.inf))
    assert DriftTarget(0.1, min_steps=2)(broken) == 2  # type: ignore[arg-type]
    still = SimpleNamespace(report=SimpleNamespace(local_steps=9, drift=0.0))
    assert DriftTarget(0.1)(still) == 18  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Warmup(-1, 8), ValueError),
        (lambda: Warmup(1.5, 8), TypeError),  # type: ignore[arg-type]
        (lambda: Warmup(3, 0), ValueError),
        (lambda: Warmup(3, "8"), TypeError),  # type: ignore[arg-type]
        (lambda: QSR(torch.optim.SGD([torch.zeros(1)], lr=1.0), base=0), ValueError),
        (lambda: QSR(torch.optim.SGD([torch.zeros(1)], lr=1.0), alpha=0.0), ValueError),
        (lambda: DriftTarget(0.0), ValueError),
        (lambda: DriftTarget(0.1, min_steps=5, max_steps=4), ValueError),
    ],
)
def test_wrong_schedules_say_so_at_once(make: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        make()


@pytest.mark.parametrize("fragments", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("interval", [1, 2, 7, 8, 10, 31])
def test_fragments_are_due_once_in_a_round_and_evenly(interval: int, fragments: int) -> None:
    due = [fragments_due(interval, phase, fragments) for phase in range(1, interval + 1)]
    for fragment in range(fragments):
        assert [phase for phase, parts in enumerate(due, 1) if parts >> fragment & 1] == [
            math.ceil((fragment + 1) * interval / fragments)
        ]
    assert fragments_due(0, 1, fragments) == (1 << fragments) - 1, "synchronous steps are of all"
    assert lasting(interval, 0, fragments) == interval
    assert lasting(interval, 3, fragments) >= max(interval, 4, 3 * fragments)
    assert lasting(0, 3, fragments) == 0


def test_schedules_compose() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.001)
    schedule = Warmup(500, then=QSR(optimizer, base=4, alpha=0.0175))
    assert schedule(SimpleNamespace(num_steps=499)) == 0  # type: ignore[arg-type]
    assert schedule(SimpleNamespace(num_steps=500)) == 306  # type: ignore[arg-type]
    assert Warmup(2, then=8).then == Every(8)


def test_rounds_without_an_end_in_sight_fit_into_a_handshake() -> None:
    local_sgd = LocalSGD(None, nn.Linear(2, 2), 10**30)
    assert checked_interval(Every(10**30), local_sgd) == LONGEST
    assert checked_interval(lambda _: 2**70, local_sgd) == LONGEST
    with pytest.raises(ValueError, match="overlap_steps must be"):
        LocalSGD(None, nn.Linear(2, 2), 10**30, overlap_steps=10**29)
