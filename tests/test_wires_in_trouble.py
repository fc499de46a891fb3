"""Lossy wires where something is out of the ordinary: ranks without batches or with NaN, tensors that join, collectives that
fail."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from localsgd_ext import LocalSGD
from localsgd_ext.averager import Averager, Item

from .groups import failing_group
from .local_steps import BUCKET_MB, LOSSY, WAYS, drift, everything, mean_drift, parameters, states
from .ranks import run_ranks
from .tensors import bits, values


def _uneven(rank: int, wire: str, steps: tuple[int, ...]) -> tuple[bytes, float]:
    """Ranks with few batches serve the others with weight 0."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(30, 20), nn.BatchNorm1d(20), nn.Linear(20, 5)))
    with LocalSGD(None, model, 2, wire=wire, bucket_mb=BUCKET_MB) as local_sgd:
        for salt in range(steps[rank]):
            drift(model, rank, salt)
            local_sgd.step()
    simulated = _simulated(steps)
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return everything(model), (weights - simulated).abs().max().item()


def _simulated(steps: tuple[int, ...], interval: int = 2) -> torch.Tensor:
    """The same without rounding: a rank counts in an averaging if it has trained since the last one."""
    torch.manual_seed(0)
    copies = [nn.Sequential(nn.Linear(30, 20), nn.BatchNorm1d(20), nn.Linear(20, 5)).double() for _ in steps]
    for copy in copies[1:]:
        copy.load_state_dict(copies[0].state_dict())
    trained: set[int] = set()

    def average() -> None:
        for parts in zip(*(copy.parameters() for copy in copies), strict=True):
            mean = torch.stack([parts[rank].detach() for rank in trained]).mean(0)
            for part in parts:
                part.data.copy_(mean)
        trained.clear()

    for step in range(max(steps)):
        for rank, copy in enumerate(copies):
            if step < steps[rank]:
                drift(copy, rank, step)
                trained.add(rank)
        if (step + 1) % interval == 0:
            average()
    if trained:
        average()
    return torch.cat([p.detach().reshape(-1) for p in copies[0].parameters()])


@pytest.mark.parametrize("steps", [(3, 8), (5, 0), (1, 4, 7)], ids=str)
@pytest.mark.parametrize("wire", LOSSY)
@pytest.mark.usefixtures("engine")
def test_ranks_without_batches_weigh_nothing(wire: str, steps: tuple[int, ...]) -> None:
    results = run_ranks(_uneven, len(steps), wire, steps)
    assert len({end for end, _ in results}) == 1
    assert results[0][1] < (4e-4 if wire == "int4" else 3e-5), "what a rank still owed when it left"


def _excluded(rank: int, wire: str) -> bytes:
    model = parameters(900)
    with LocalSGD(None, model, 1, wire=wire, nonfinite="exclude", bucket_mb=BUCKET_MB) as local_sgd:
        for salt in range(4):
            drift(model, rank, salt)
            sick = salt == 1 and rank == 1
            if sick:
                model[0].data[77] = torch.nan
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                local_sgd.step()
            assert model[0].isfinite().all()
            assert local_sgd.report.active_ranks == dist.get_world_size() - (salt == 1)
    return everything(model)


@WAYS
@pytest.mark.parametrize("wire", LOSSY)
@pytest.mark.usefixtures("engine")
def test_a_sick_rank_is_left_out(wire: str, world_size: int) -> None:
    assert len(set(run_ranks(_excluded, world_size, wire))) == 1


def _ignored(rank: int, wire: str) -> tuple[bytes, list[int]]:
    model = parameters(2000)
    with LocalSGD(None, model, 1, wire=wire, nonfinite="ignore", bucket_mb=BUCKET_MB) as local_sgd:
        drift(model, rank, 0)
        if rank == 1:
            model[0].data[700] = torch.inf
        local_sgd.step()
        drift(model, rank, 1)
        local_sgd.step()
        sick = (~model[0].isfinite()).nonzero().flatten().tolist()
        return bits(model[0].isfinite()), sick


@WAYS
@pytest.mark.parametrize("wire", ["bfloat16", "int8"])
@pytest.mark.usefixtures("engine")
def test_an_ignored_inf_stays_in_its_block(wire: str, world_size: int) -> None:
    results = run_ranks(_ignored, world_size, wire)
    assert results[0] == results[1]
    assert results[0][1] == ([700] if wire == "bfloat16" else list(range(512, 768)))


def _buffers(rank: int) -> None:
    model = nn.BatchNorm1d(300)
    with LocalSGD(None, model, 1, wire="int4", bucket_mb=BUCKET_MB) as local_sgd:
        drift(model, rank, 0)
        every = [values((300,), torch.float32, 3, r).abs() * 10.0 ** (-r) for r in range(2)]
        model.running_var.copy_(every[rank])
        model.num_batches_tracked.fill_(5 + rank)
        local_sgd.step()
        assert bits(model.running_var) == bits((every[0] + every[1]) / 2)
        assert model.num_batches_tracked.item() == 5


@pytest.mark.usefixtures("engine")
def test_buffers_travel_exactly() -> None:
    run_ranks(_buffers, 2)


def _unfrozen(rank: int) -> None:
    """A parameter that joins midway has been trained apart before there can be an anchor for it."""
    model = parameters(500, 400)
    model[1].requires_grad_(False)
    with LocalSGD(None, model, 1, wire="int4") as local_sgd:
        drift(model[:1], rank, 0)
        local_sgd.step()
        model[1].requires_grad_(True)
        drift(model, rank, 1, size=1.0)
        expected = [p.detach().double() for p in parameters(500, 400)]
        for whole, move in zip(expected, mean_drift(model, 2, 1, size=1.0), strict=True):
            whole.add_(move)
        local_sgd.step()
        assert (model[1] - expected[1]).abs().max() < 1e-6, "exact, once"
        few = local_sgd.report.wire_bytes
        model[0].data = model[0].data.clone()  # moved, but the same
        drift(model, rank, 2)
        local_sgd.step()
        assert local_sgd.report.wire_bytes < few / 5
        anchors = [bits(anchor) for anchor, _ in states(local_sgd)]
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, anchors)
    assert everyone[0] == everyone[1]


@pytest.mark.usefixtures("engine")
def test_tensors_that_join_or_move_in_mid_block() -> None:
    run_ranks(_unfrozen, 2)


def _warm_up(rank: int) -> None:
    """Steps that DDP synchronises move the weights far from where they began; what is sent after them is not that."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(40, 30))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    weight = model.module.weight
    first = weight.detach().clone()
    with LocalSGD(None, model, lambda ours: 0 if ours.num_steps < 3 else 2, wire="int4") as local_sgd:
        for step in range(5):
            optimizer.param_groups[0]["lr"] = 1.0 if step < 3 else 1e-3
            model(values((16, 40), torch.float32, step, rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            everyone = [torch.empty_like(weight) for _ in range(2)]
            dist.all_gather(everyone, weight.detach().clone())
            local_sgd.step()
            if step == 2:
                assert local_sgd.num_syncs == 0
                assert bits(everyone[0]) == bits(everyone[1])
                last = weight.detach().clone()
    largest = max((each - last).abs().max().item() for each in everyone)
    assert (last - first).abs().max() > 100 * largest
    assert (weight - (everyone[0] + everyone[1]) / 2).abs().max().item() <= 0.51 * largest / 7


@pytest.mark.usefixtures("engine")
def test_differences_begin_where_synchronous_steps_end() -> None:
    run_ranks(_warm_up, 2)


def _breaks_midway(rank: int, fail_at: int) -> None:
    world_size = dist.get_world_size()

    def averager(group: Any) -> tuple[nn.ParameterList, Averager, list[Item]]:
        model = parameters(9000, 7, 12_000)  # 5 buckets
        made = Averager(group, "int8", "auto", BUCKET_MB)
        items = [Item(name, parameter) for name, parameter in model.named_parameters()]
        made.bind(items)
        made.agree()
        drift(model, rank, 0)
        return model, made, items

    expected, whole, items = averager(dist.group.WORLD)
    whole.average(items, step=0, round=1, interval=1)
    model, broken, items = averager(failing_group(fail_at))
    own = [p.detach().clone() for p in model]
    with pytest.raises((ConnectionError, RuntimeError), match="connection reset"):
        broken.average(items, step=0, round=1, interval=1)
    landed = 0
    for mine, before, after in zip(model, own, expected, strict=True):
        local, averaged = mine == before, mine == after
        assert (local | averaged).all(), "neither local nor averaged"
        landed += int((averaged & ~local).sum())
    # Above 2 ranks each bucket takes two collectives, and three buckets are on their way at once.
    assert (landed > 0) == (fail_at > (1 if world_size == 2 else 4))
    assert not broken.bindings
    assert broken.anchors is None, "what the ranks agreed on is no more"


@pytest.mark.parametrize(("world_size", "fail_at"), [(2, 1), (2, 3), (3, 2), (3, 4), (3, 6)])
@pytest.mark.usefixtures("engine")
def test_a_failure_midway_leaves_local_or_averaged_values(world_size: int, fail_at: int) -> None:
    run_ranks(_breaks_midway, world_size, fail_at)


def _elsewhere(rank: int, wire: str, moved: bool) -> list[bytes]:
    from localsgd_ext import anchors
    from localsgd_ext.backends.interface import State

    if moved:
        plain = anchors.Anchors.states

        def elsewhere(self: Any, table: Any) -> list[State]:
            """As where the state lives on another device than the tensors: buckets share what they compute with."""
            shared = [torch.full((20_000,), torch.nan) for _ in range(3)]
            return [
                State(s.homes, [None if h is None else at[: len(h)] for h, at in zip(s.homes, shared, strict=True)])
                for s in plain(self, table)
            ]

        anchors.Anchors.states = elsewhere
    try:
        model = parameters(7000, 40)
        with LocalSGD(None, model, 1, wire=wire, bucket_mb=BUCKET_MB, state_device="cpu") as local_sgd:
            for salt in range(3):
                drift(model, rank, salt)
                local_sgd.step()
            return [everything(model), *(bits(each) for pair in states(local_sgd) for each in pair)]
    finally:
        if moved:
            anchors.Anchors.states = plain


@WAYS
@pytest.mark.usefixtures("engine")
def test_state_that_lives_elsewhere_comes_and_goes(world_size: int) -> None:
    assert run_ranks(_elsewhere, world_size, "int4", True) == run_ranks(_elsewhere, world_size, "int4", False)
