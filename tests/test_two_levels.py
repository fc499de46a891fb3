"""Two levels without sharding: DDP inside each host and averaging between hosts; and averaging inside a host more often than
everywhere."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from localsgd_ext import LocalSGD, LocalSGDError, NonFiniteError, host_groups

from .local_steps import everything
from .ranks import run_ranks
from .tensors import bits

INTERVAL, STEPS = 4, 10
LEARNING_RATE = 0.05


def _model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 30), nn.Tanh(), nn.Linear(30, 40))


def _loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return (model(torch.randn(4, 5, generator=generator)) - rank).square().mean()


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)


def _flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])


def _simulate(hosts: list[list[int]], steps: int) -> tuple[torch.Tensor, float]:
    """Weights after so many steps, and the drift of the last averaging: for each host one model with the mean gradient of its
    ranks."""
    models = [_model() for _ in hosts]
    optimizers = [_sgd(model) for model in models]
    drift = 0.0
    for step in range(1, steps + 1):
        for ranks, model, optimizer in zip(hosts, models, optimizers, strict=True):
            optimizer.zero_grad()
            (sum(_loss(model, rank, step) for rank in ranks) / len(ranks)).backward()
            optimizer.step()
        if step % INTERVAL == 0 or step == steps:
            flats = [_flat(model) for model in models]
            mean = sum(flats) / len(flats)
            drift = float((sum((flat - mean).square().sum() for flat in flats) / len(flats)).sqrt() / mean.norm())
            with torch.no_grad():
                for parameters in zip(*(model.parameters() for model in models), strict=True):
                    average = sum(p.double() for p in parameters) / len(models)
                    for parameter in parameters:
                        parameter.copy_(average)
    return _flat(models[0]), drift


def _inside_and_between(rank: int, options: dict[str, Any]) -> tuple[torch.Tensor, float, bytes]:
    inside, between = host_groups(2)
    model = DistributedDataParallel(_model(), process_group=inside)
    optimizer = _sgd(model)
    with LocalSGD(None, model, INTERVAL, process_group=between, **options) as local_sgd:
        for step in range(1, STEPS + 1):
            _loss(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            local_sgd.step()
    assert local_sgd.report is not None
    return _flat(model), local_sgd.report.drift, everything(model)


@pytest.mark.usefixtures("engine")
def test_ddp_inside_hosts_and_averaging_between_them() -> None:
    """Drift is that of two models, though four ranks hold them."""
    weights, drift = _simulate([[0, 1], [2, 3]], STEPS)
    results = run_ranks(_inside_and_between, 4, {})
    for found, its_drift, _ in results:
        assert (found - weights).abs().max() < 1e-6
        assert its_drift == pytest.approx(drift, rel=1e-4)
    assert len({everything for _, _, everything in results}) == 1


@pytest.mark.parametrize("options", [{"wire": "int8"}, {"wire": "int8", "overlap_steps": 1, "fragments": 2}])
def test_ranks_of_a_host_stay_equal_under_a_lossy_wire(options: dict[str, Any]) -> None:
    weights, _ = _simulate([[0, 1], [2, 3]], STEPS)
    results = run_ranks(_inside_and_between, 4, options)
    assert len({everything for _, _, everything in results}) == 1
    if "overlap_steps" not in options:
        assert (results[0][0] - weights).abs().max() < 2e-3


def _one_host_fails(rank: int) -> str:
    inside, between = host_groups(2)
    model = DistributedDataParallel(_model(), process_group=inside)
    with pytest.raises(NonFiniteError) as caught, LocalSGD(None, model, 1, process_group=between) as local_sgd:
        if rank == 2:
            with torch.no_grad():
                model.module[0].weight[0, 0] = torch.nan
        local_sgd.step()
    return str(caught.value)


def test_all_ranks_of_all_hosts_hear_of_it() -> None:
    """Rank 2 averages with rank 0 alone; ranks 1 and 3 would go on without them, and hang in DDP."""
    for message in run_ranks(_one_host_fails, 4):
        assert "rank 2 (first in '0.weight')" in message


def _groups(rank: int) -> tuple[list[int], list[int], str]:
    inside, between = host_groups(2)
    with pytest.raises(LocalSGDError, match="hosts of equally many ranks") as caught:
        host_groups(3)
    return dist.get_process_group_ranks(inside), dist.get_process_group_ranks(between), str(caught.value)


def test_host_groups_need_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LocalSGDError, match="call init_process_group"):
        host_groups()


def test_host_groups() -> None:
    for rank, (inside, between, message) in enumerate(run_ranks(_groups, 4)):
        assert inside == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert between == [rank % 2, rank % 2 + 2]
        assert "4 ranks, and by host 3 on that of rank 0; start" in message


def _unequal(rank: int) -> str:
    with pytest.raises(LocalSGDError) as caught:
        host_groups([2, 2, 1, 1][rank])
    return str(caught.value)


def test_hosts_of_different_sizes_are_an_error_on_every_rank() -> None:
    for message in run_ranks(_unequal, 4):
        assert "4 ranks, and by host 2 on that of rank 0; 1 on that of rank 2" in message


def _interrupted(rank: int) -> list[tuple[str, float]]:
    """Rank 1 fails inside an averaging that the other column finishes; then all of them go on, in new groups."""
    outcomes = []
    network = _model()
    for fails in (True, False):
        inside, between = host_groups(2)
        model = DistributedDataParallel(network, process_group=inside)
        optimizer = _sgd(model)
        try:
            with LocalSGD(None, model, 1, process_group=between, timeout=timedelta(seconds=8)) as local_sgd:
                for step in (1, 2):
                    _loss(model, rank, step).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    if fails and rank == 1 and step == 2:
                        assert local_sgd._rounds is not None
                        local_sgd._rounds._averager.average = _fails  # type: ignore[method-assign]
                    local_sgd.step()
            assert local_sgd.report is not None
            outcomes.append(("done", local_sgd.report.drift))
        except RuntimeError as error:
            outcomes.append((type(error).__name__, 0.0))
        time.sleep(1)
    return outcomes


def _fails(*_: object, **__: object) -> None:
    raise RuntimeError("a bug in here")


def test_after_an_interrupted_averaging_new_groups_are_as_good_as_ever() -> None:
    """Nothing of it is left in a group that cannot be made anew, such as the world."""
    for rank, (first, second) in enumerate(run_ranks(_interrupted, 4)):
        assert first[0] == ("RuntimeError" if rank == 1 else "PeerError")
        assert second[0] == "done"
        assert second[1] > 0


def _nested(rank: int) -> list[torch.Tensor]:
    """Inside a host every 2 steps, everywhere every 4."""
    inside, _ = host_groups(2)
    model = _model()
    optimizer = _sgd(model)
    seen = []
    with LocalSGD(None, model, 2, process_group=inside) as near, LocalSGD(None, model, INTERVAL) as far:
        for step in range(1, STEPS + 1):
            _loss(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            near.step()
            far.step()
            seen.append(_flat(model))
    return [*seen, _flat(model)]


def test_averaging_inside_hosts_more_often_than_everywhere() -> None:
    models = [_model() for _ in range(4)]
    optimizers = [_sgd(model) for model in models]
    results = run_ranks(_nested, 4)
    for step in range(1, STEPS + 1):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            _loss(model, rank, step).backward()
            optimizer.step()
        for every, groups in ((2, [[0, 1], [2, 3]]), (INTERVAL, [[0, 1, 2, 3]])):
            for group in groups if step % every == 0 else []:
                means = [(sum(p) / len(group)).detach() for p in zip(*(models[r].parameters() for r in group), strict=True)]
                for rank in group:
                    for parameter, mean in zip(models[rank].parameters(), means, strict=True):
                        parameter.data.copy_(mean)
        for rank, model in enumerate(models):
            assert (results[rank][step - 1] - _flat(model)).abs().max() < 1e-5, (step, rank)
    assert len({bits(result[-1]) for result in results}) == 1
