"""Ranks that run out of batches at different times: all end, with the weights that an independent simulation gives."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from localsgd_ext import LocalSGD

from .ranks import run_ranks
from .tensors import bits, values

LR = 0.125


def _batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return values((4, 3), torch.float64, 100 + step, rank), values((4, 2), torch.float64, 500 + step, rank)


def _model() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2)).double()
    with torch.no_grad():
        for salt, parameter in enumerate(model.parameters()):
            parameter.copy_(values(tuple(parameter.shape), torch.float64, salt, 0))
    return model


def _train(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    inputs, targets = batch
    nn.functional.mse_loss(model(inputs), targets).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= LR * parameter.grad
            parameter.grad = None


def _run(
    rank: int, batches: tuple[int, ...], interval: int, ddp: bool, epochs: int = 1
) -> tuple[list[bytes], int, list[int], bool]:
    model: nn.Module = DistributedDataParallel(_model()) if ddp else _model()
    local_sgd = LocalSGD(None, model, interval)
    done, averaged = 0, []
    for _ in range(epochs):
        with local_sgd:
            for _ in range(batches[rank]):
                _train(model, _batch(rank, done))
                done += 1
                before = local_sgd.num_syncs
                local_sgd.step()
                if local_sgd.num_syncs > before:
                    averaged.append(done)
    state = (model.module if ddp else model).state_dict()
    sync = model.require_backward_grad_sync and model.require_forward_param_sync if ddp else True  # type: ignore[union-attr]
    return [bits(t) for t in state.values()], local_sgd.num_steps, averaged, sync


def _simulate(batches: tuple[int, ...], interval: int) -> dict[str, torch.Tensor]:
    """In one process. Weights count if they were trained since the last averaging; integers follow the first rank that
    counts."""
    ranks = range(len(batches))
    models = [_model() for _ in ranks]
    done = [0 for _ in ranks]
    while any(done[r] < batches[r] for r in ranks):
        # Everyone trains until an averaging is due or its batches are out; who is out only serves.
        counts = [r for r in ranks if done[r] < batches[r]]
        for r in counts:
            until = min(batches[r], done[r] + interval)
            for step in range(done[r], until):
                _train(models[r], _batch(r, step))
            done[r] = until
        states = [model.state_dict() for model in models]
        for name, first in states[counts[0]].items():
            mean = torch.stack([states[r][name] for r in counts]).sum(0) / len(counts)
            for state in states:
                state[name].copy_(mean if first.is_floating_point() else first)
    return models[0].state_dict()


@pytest.mark.parametrize(
    ("batches", "interval"), [((7, 12, 9), 4), ((0, 5), 4), ((1, 1, 30), 4), ((8, 8), 4), ((0, 0), 4), ((3, 12, 0, 5), 5)]
)
@pytest.mark.parametrize("ddp", [True, False], ids=["ddp", "plain"])
def test_all_end_with_the_simulated_weights(engine: str, batches: tuple[int, ...], interval: int, ddp: bool) -> None:
    results = run_ranks(_run, len(batches), batches, interval, ddp)
    expected = _simulate(batches, interval)
    for rank, (weights, steps, _, sync) in enumerate(results):
        assert steps == max(batches), "they go on from the same place"
        assert sync
        assert weights == results[0][0], f"rank {rank} left with other weights"
    for got, (name, want) in zip(results[0][0], expected.items(), strict=True):
        value = torch.frombuffer(bytearray(got), dtype=want.dtype).view(want.shape)
        torch.testing.assert_close(value, want, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


ACCUMULATION = 2


def _accumulate(rank: int, batches: tuple[int, ...], interval: int) -> tuple[list[bytes], int]:
    """Accelerate's loop; every second batch is an optimizer step, and only those count."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION)
    model = _model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=LR))
    with LocalSGD(accelerator, model, interval, count="optimizer") as local_sgd:
        for step in range(batches[rank]):
            inputs, targets = _batch(rank, step)
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()
    return [bits(p) for p in model.parameters()], local_sgd.num_steps


def _simulate_accumulation(batches: tuple[int, ...], interval: int) -> list[torch.Tensor]:
    ranks = range(len(batches))
    models = [_model() for _ in ranks]
    done = [0 for _ in ranks]
    while any(done[r] < batches[r] for r in ranks):
        counts = []
        for r in ranks:
            until = min(batches[r], done[r] + interval * ACCUMULATION)
            for step in range(done[r], until):
                inputs, targets = _batch(r, step)
                (nn.functional.mse_loss(models[r](inputs), targets) / ACCUMULATION).backward()
                if step % ACCUMULATION == ACCUMULATION - 1:
                    with torch.no_grad():
                        for parameter in models[r].parameters():
                            parameter -= LR * parameter.grad
                            parameter.grad = None
                    counts.append(r)
            done[r] = until
        for parameters in zip(*(model.parameters() for model in models), strict=True):
            if counts:
                mean = torch.stack([parameters[r].detach() for r in sorted(set(counts))]).mean(0)
                for parameter in parameters:
                    parameter.data.copy_(mean)
    return [p.detach() for p in models[0].parameters()]


@pytest.mark.parametrize(("batches", "interval"), [((7, 12, 9), 2), ((0, 5), 2), ((1, 1, 30), 3)])
def test_with_accumulation_only_applied_steps_count(engine: str, batches: tuple[int, ...], interval: int) -> None:
    results = run_ranks(_accumulate, len(batches), batches, interval)
    assert [steps for _, steps in results] == [max(batches) // ACCUMULATION] * len(batches)
    for got, want in zip(results[0][0], _simulate_accumulation(batches, interval), strict=True):
        value = torch.frombuffer(bytearray(got), dtype=want.dtype).view(want.shape)
        torch.testing.assert_close(value, want, rtol=1e-12, atol=1e-12)
    assert all(weights == results[0][0] for weights, _ in results)


def test_averagings_fall_due_together_again_in_the_next_epoch(engine: str) -> None:
    results = run_ranks(_run, 3, (7, 12, 9), 5, True, 2)
    assert [weights for weights, *_ in results] == [results[0][0]] * 3
    # The longest rank is 2 steps into a round of 5 when the first epoch ends: 3 more, on all ranks.
    assert [averaged for _, _, averaged, _ in results] == [[5, 10], [5, 10, 15, 20], [5, 12, 17]]


def _scheduled(rank: int, batches: tuple[int, ...]) -> tuple[list[int], bytes]:
    """Rounds that grow shorter with the number of steps, over two epochs."""
    model = _model()
    local_sgd = LocalSGD(None, model, lambda local_sgd: 4 if local_sgd.num_steps < 6 else 2)
    averaged = []
    for epoch in range(2):
        with local_sgd:
            for step in range(batches[rank]):
                _train(model, _batch(rank, 100 * epoch + step))
                before = local_sgd.num_syncs
                local_sgd.step()
                if local_sgd.num_syncs > before:
                    averaged.append(local_sgd.num_steps)
    return averaged, bits(next(model.parameters()))


def test_a_schedule_by_steps_is_the_same_on_all_ranks_in_the_next_epoch() -> None:
    (first, mine), (second, theirs) = run_ranks(_scheduled, 2, (5, 8))
    assert (first, second) == ([4, 10, 12], [4, 8, 10, 12, 14, 16])
    assert mine == theirs
