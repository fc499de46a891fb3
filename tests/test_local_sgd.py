"""The context manager: when it averages, what it does to DDP's gradient sync, and what it refuses."""

from __future__ import annotations

import contextlib
import multiprocessing
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from localsgd_ext import LocalSGD, LocalSGDError, OuterSGD, averager, collectives
from localsgd_ext.backends import reference

from . import ranks
from .ranks import run_ranks
from .tensors import apart, bits, values


def tutorial(rank: int, kind: str, calls: int, accumulation: int, **options: Any) -> dict[str, Any]:
    """Accelerate's documented loop; gives the step() calls after which an averaging had happened, and the final weights."""
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD as AccelerateLocalSGD

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
    batches = [(values((4, 6), torch.float32, 2 * i, 0), values((4, 3), torch.float32, 2 * i + 1, 0)) for i in range(2 * calls)]
    dataset = [(x[j], y[j]) for x, y in batches for j in range(4)]
    dataloader = torch.utils.data.DataLoader(dataset, batch_size=4)
    model, optimizer, dataloader, scheduler = accelerator.prepare(model, optimizer, dataloader, scheduler)
    averaged: list[int] = []
    count = 0

    class Watched(AccelerateLocalSGD):
        def _sync_and_avg_model_params(self) -> None:
            averaged.append(count)
            super()._sync_and_avg_model_params()

    if kind == "accelerate":
        context: Any = Watched(accelerator=accelerator, model=model, enabled=True, **options)
    else:
        context = LocalSGD(accelerator=accelerator, model=model, enabled=True, **options)
    with context as local_sgd:
        for inputs, targets in dataloader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                count += 1
                before = getattr(local_sgd, "num_syncs", 0)
                local_sgd.step()
                if getattr(local_sgd, "num_syncs", 0) > before:
                    averaged.append(count)
            assert not model.require_backward_grad_sync
    if kind == "ours" and local_sgd.num_syncs > len(averaged):
        averaged.append(count)
    return {
        "averaged": averaged,
        "steps": local_sgd.num_steps,
        "weights": [bits(p) for p in model.parameters()],
        "sync": model.require_backward_grad_sync,
    }


@pytest.mark.parametrize("calls", [32, 35])
def test_same_averagings_and_same_weights_as_accelerate(calls: int) -> None:
    ours = run_ranks(tutorial, 2, "ours", calls, 2, local_sgd_steps=8)
    theirs = run_ranks(tutorial, 2, "accelerate", calls, 2, local_sgd_steps=8)
    # Accelerate averages once more at the end, also when nothing has changed since.
    assert ours[0]["averaged"] == sorted(set(theirs[0]["averaged"])) == sorted({8, 16, 24, 32, calls})
    assert ours[0]["steps"] == theirs[0]["steps"] == calls
    assert ours[0]["weights"] == ours[1]["weights"] == theirs[0]["weights"] == theirs[1]["weights"]
    assert all(result["sync"] for result in ours)


def test_count_optimizer_counts_applied_steps() -> None:
    for result in run_ranks(tutorial, 2, "ours", 35, 2, local_sgd_steps=8, count="optimizer"):
        assert result["averaged"] == [16, 32, 35]
        # 17 pairs, and the last batch, at which Accelerate applies what it has accumulated.
        assert result["steps"] == 18


def _plain_loop(rank: int) -> list[tuple[int, int]]:
    """One instance entered twice: the counter goes on and averagings stay at multiples of H."""
    model = DistributedDataParallel(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local_sgd = LocalSGD(None, model, 4)
    seen = []
    for epoch in range(2):
        with local_sgd:
            for step in range(6):
                model(values((2, 3), torch.float32, step + 10 * epoch, rank)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                before = local_sgd.num_syncs
                local_sgd.step()
                if local_sgd.num_syncs > before:
                    assert local_sgd.report is not None
                    seen.append((local_sgd.report.step, local_sgd.report.interval))
        assert model.require_backward_grad_sync
    return seen


def test_entering_again_goes_on_with_the_counter() -> None:
    assert run_ranks(_plain_loop, 2) == [[(4, 4), (8, 4), (12, 4)]] * 2


def _nested(rank: int) -> None:
    model = DistributedDataParallel(nn.Linear(3, 1))
    local_sgd = LocalSGD(None, model, 4)
    with local_sgd:
        with pytest.raises(LocalSGDError, match="inside its own"), local_sgd:
            pass
        assert not model.require_backward_grad_sync, "the outer block still trains locally"
    assert model.require_backward_grad_sync
    with pytest.raises(LocalSGDError, match="outside"):
        local_sgd.step()


def test_entering_inside_its_own_block_is_an_error() -> None:
    run_ranks(_nested, 2)


def _raises(rank: int, where: str) -> None:
    model = DistributedDataParallel(nn.Linear(3, 1))
    model.module.weight.data.copy_(values((1, 3), torch.float32, 1, rank))
    own = bits(model.module.weight)
    local_sgd = LocalSGD(None, model, 1, backend="torch")  # it makes its collectives where this test can break them
    calls = 0

    def broken(*args: object) -> object:
        nonlocal calls
        calls += 1
        raise ConnectionError("link down")

    with pytest.raises(KeyError if where == "body" else ConnectionError, match=r"mine|link down"), apart(local_sgd, model):
        reference.all_reduce = averager.all_reduce = broken  # type: ignore[assignment]
        if where == "body":
            raise KeyError("mine")
        if where == "step":
            local_sgd.step()
    assert calls == (where != "body"), "no collective after an exception: the peers may be anywhere"
    reference.all_reduce = averager.all_reduce = collectives.all_reduce
    assert model.require_backward_grad_sync
    assert bits(model.module.weight) == own
    with apart(local_sgd, model):  # and it can be used again
        assert not model.require_backward_grad_sync
        local_sgd.step()
    assert bits(model.module.weight) == bits(sum(values((1, 3), torch.float32, 1, r) for r in range(2)) / 2)


def _gather(value: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def _all_equal(of_ranks: list[Any]) -> bool:
    return all(one == of_ranks[0] for one in of_ranks)


@pytest.mark.parametrize("where", ["body", "step", "exit"])
def test_gradient_sync_is_on_again_after_an_exception(where: str) -> None:
    run_ranks(_raises, 2, where)


def _leftover(rank: int, changed: tuple[int, ...]) -> None:
    model = nn.Linear(2, 2, bias=False)
    with LocalSGD(None, model, 2) as local_sgd:
        local_sgd.step()
        local_sgd.step()
        if rank in changed:
            with torch.no_grad():
                model.weight.fill_(3.0 + rank)
    assert model.weight.eq(3.0 + sum(changed) / len(changed)).all()
    assert local_sgd.num_syncs == 2
    assert local_sgd.report is not None
    assert local_sgd.report.active_ranks == len(changed)


@pytest.mark.parametrize("changed", [(1,), (0, 1)])
def test_changes_without_a_step_are_averaged_at_the_end(changed: tuple[int, ...]) -> None:
    run_ranks(_leftover, 2, changed)


def _schedule(rank: int) -> None:
    """2 synchronous steps as under DDP, then rounds of 3, 1 and 2 steps."""
    asked: list[int] = []
    plan = iter([0, 0, 3, 1, 2, 2])

    def schedule(local_sgd: LocalSGD) -> int:
        asked.append(local_sgd.num_steps)
        return next(plan)

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 1))
    twin = DistributedDataParallel(nn.Linear(3, 1))
    twin.load_state_dict(model.state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, twin)]
    syncs = []
    with LocalSGD(None, model, schedule) as local_sgd:
        for step in range(9):
            synchronous = step < 2
            assert model.require_backward_grad_sync == synchronous
            for m, optimizer in zip((model, twin), optimizers, strict=True):
                m(values((2, 3), torch.float32, step, rank)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            local_sgd.step()
            if synchronous:
                assert bits(model.module.weight) == bits(twin.module.weight), "bit-identical to DDP"
            syncs.append(local_sgd.num_syncs)
            equal = len(set(_gather(bits(model.module.weight)))) == 1
            assert equal == (step in (0, 1, 4, 5, 7))
    assert syncs == [0, 0, 0, 0, 1, 2, 2, 3, 3]
    assert asked == [0, 1, 2, 5, 6, 8]
    assert local_sgd.num_syncs == 4
    assert model.require_backward_grad_sync


def test_a_schedule_decides_the_rounds_and_0_is_synchronous_training() -> None:
    run_ranks(_schedule, 2)


def _switch_inside_accumulate(rank: int) -> None:
    """Every schedule value with accumulation: ranks are equal after each round, and sync is on after the block."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model = accelerator.prepare(nn.Linear(3, 1))
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    rounds = iter([0, 4, 0, 0, 0, 0, 5, 2, 0, 0, 0, 1, 1, *[0] * 50])
    with LocalSGD(accelerator, model, lambda _: next(rounds)) as local_sgd:
        for step in range(24):
            with accelerator.accumulate(model):
                accelerator.backward(model(values((2, 3), torch.float32, step, rank)).square().sum())
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()
            if local_sgd._interval == 0 and accelerator.sync_gradients:
                assert len(set(_gather(bits(model.module.weight)))) == 1
                assert model.require_backward_grad_sync
    assert model.require_backward_grad_sync
    assert len(set(_gather(bits(model.module.weight)))) == 1


def test_switching_between_local_and_synchronous_inside_accumulate() -> None:
    run_ranks(_switch_inside_accumulate, 2)


def _one_process(rank: int) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.state._shared_state["distributed_type"] = "MULTI_GPU"  # what torchrun with one GPU gives, without a DDP wrapper
    for acc, model in (
        (accelerator, nn.Linear(2, 2)),
        (None, nn.Linear(2, 2)),
        (None, DistributedDataParallel(nn.Linear(2, 2))),
    ):
        own = bits(next(model.parameters()))
        with LocalSGD(acc, model, 2) as local_sgd:
            for _ in range(4):
                local_sgd.step()
            assert local_sgd.synchronize() is None
            with local_sgd.averaged() as report:
                assert report is None
        assert (local_sgd.num_steps, local_sgd.num_syncs, local_sgd.report, local_sgd.metrics()) == (4, 0, None, {})
        assert bits(next(model.parameters())) == own


def test_one_process_has_nothing_to_average() -> None:
    run_ranks(_one_process, 1)


@pytest.mark.parametrize("kind", ["NO", "MULTI_CPU", None])
def test_disabled_counts_steps_and_does_nothing_else(kind: str | None) -> None:
    accelerator: Any = None if kind is None else SimpleNamespace(distributed_type=kind, sync_gradients=True)
    local_sgd = LocalSGD(accelerator, nn.Linear(2, 2), 2, enabled=kind == "NO")
    local_sgd.step()  # Accelerate's counts outside the block, too
    with local_sgd:
        for _ in range(5):
            local_sgd.step()
        assert local_sgd.synchronize() is None
    assert local_sgd.enabled is False
    assert (local_sgd.num_steps, local_sgd.num_syncs) == (6, 0)


def _metrics(rank: int) -> None:
    model = nn.Linear(10, 1, bias=False)
    model.weight.data.fill_(1.0 + rank)
    with apart(LocalSGD(None, model, 2), model) as local_sgd:
        local_sgd.step()
        assert local_sgd.report is None
        assert local_sgd.metrics() == {}
        local_sgd.step()
    report = local_sgd.report
    assert report is not None
    assert (report.step, report.round, report.interval, report.wire_bytes) == (2, 1, 2, 40)
    assert report.active_ranks == 2
    assert report.backend in ("native", "torch")
    assert report.drift == pytest.approx(0.5 / 1.5)
    metrics = local_sgd.metrics()
    assert metrics["local_sgd/drift"] == report.drift
    assert set(metrics) == {
        f"local_sgd/{k}" for k in ("step", "round", "interval", "local_steps", "seconds", "wire_bytes", "drift", "active_ranks")
    }
    assert all(type(value) is float for value in metrics.values())


def test_report_and_metrics() -> None:
    run_ranks(_metrics, 2)


def _between_hosts(rank: int) -> None:
    """DDP inside a pair at every step, averaging between pairs: DDP's own sync stays on."""
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    between = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    model = DistributedDataParallel(nn.Linear(3, 1), process_group=inside)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with LocalSGD(None, model, 2, process_group=between) as local_sgd:
        for step in range(2):
            assert model.require_backward_grad_sync
            model(values((2, 3), torch.float32, step, rank)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                everyone = _gather(bits(model.module.weight))
                assert everyone[0] == everyone[1] != everyone[2] == everyone[3]
            local_sgd.step()
    assert len(set(_gather(bits(model.module.weight)))) == 1


def test_ddp_inside_a_host_goes_on_while_hosts_average() -> None:
    run_ranks(_between_hosts, 4)


def _compiled(rank: int) -> None:
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    wrapped = torch.compile(ddp, backend="eager")
    ddp.module.weight.data.fill_(float(rank))
    with apart(LocalSGD(None, wrapped, 1), ddp) as local_sgd:
        assert not ddp.require_backward_grad_sync
        local_sgd.step()
    assert ddp.module.weight.eq(0.5).all()
    assert ddp.require_backward_grad_sync


def test_a_compiled_ddp_model_is_seen_through() -> None:
    run_ranks(_compiled, 2)


def _back_to_synchronous(rank: int, optimizer: str) -> None:
    """After local steps the optimizers' states differ, so synchronous steps alone would drive the ranks apart."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    trained = {"adamw": torch.optim.AdamW, "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)}[optimizer](
        model.parameters()
    )
    rounds = iter([2, *[0] * 10])
    with LocalSGD(None, model, lambda _: next(rounds)) as local_sgd:
        for step in range(6):
            model(values((8, 3), torch.float32, step, rank)).square().sum().backward()
            trained.step()
            trained.zero_grad()
            local_sgd.step()
            equal = _all_equal(_gather([bits(p) for p in model.parameters()]))
            assert equal == (step > 0), step
    assert _all_equal(_gather([bits(t) for t in (*model.parameters(), *model.buffers())]))


@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
def test_ranks_stay_equal_when_a_schedule_goes_back_to_synchronous(optimizer: str) -> None:
    run_ranks(_back_to_synchronous, 2, optimizer)


def _always_synchronous(rank: int) -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    with LocalSGD(None, model, lambda _: 0) as local_sgd:
        for step in range(3):
            model(values((8, 3), torch.float32, step, rank)).square().sum().backward()
            local_sgd.step()
        assert local_sgd.num_syncs == 0
    assert local_sgd.num_syncs == 1, "BatchNorm statistics differ under DDP, too"
    assert len(set(_gather(bits(model.module[1].running_mean)))) == 1


def test_buffers_agree_after_synchronous_training() -> None:
    run_ranks(_always_synchronous, 2)


def _pairs_in_the_world(rank: int) -> None:
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    model = DistributedDataParallel(nn.Linear(3, 1), process_group=pair)
    model.module.weight.data.fill_(rank // 2)
    with apart(LocalSGD(None, model, lambda _: 0, process_group=dist.group.WORLD), model) as local_sgd:
        local_sgd.step()
        assert model.module.weight.eq(0.5).all()
    own = DistributedDataParallel(nn.Linear(3, 1), process_group=pair)
    own.module.weight.data.fill_(rank)
    LocalSGD(None, own, 1).synchronize()
    assert own.module.weight.eq(0.5 + 2 * (rank // 2)).all(), "the DDP model's own group is the default"


def test_ddp_over_a_part_of_the_ranks_that_average() -> None:
    run_ranks(_pairs_in_the_world, 4)


def _profiled(rank: int) -> set[str]:
    model = nn.Linear(3, 1)
    with LocalSGD(None, model, 1, outer=OuterSGD(0.5)) as local_sgd, torch.profiler.profile() as profile:
        local_sgd.step()
    return {event.name for event in profile.events() if event.name.startswith("localsgd_ext::")}


def test_a_profiler_sees_the_stages_of_an_averaging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_context", multiprocessing.get_context("spawn"))
    names = {f"localsgd_ext::{stage}" for stage in ("handshake", "pack", "exchange", "apply")}
    seen: list[set[str]] = []
    for _ in range(4):  # torch's profiler now and then loses all events of a process, or its memory: its own, too
        with contextlib.suppress(ranks.RanksFailed):
            seen = run_ranks(_profiled, 2)
        if seen == [names] * 2:
            break
    assert seen == [names] * 2
