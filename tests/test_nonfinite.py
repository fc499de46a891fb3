"""Weights that hold NaN or inf when an averaging begins: raise, exclude, ignore."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from localsgd_ext import LocalSGD, NonFiniteError

from .ranks import run_ranks
from .tensors import bits, values

pytestmark = pytest.mark.usefixtures("engine")

FIRST = {0: "0.bias", 1: "1.bias", 2: "0.weight"}
"""The first parameter of a sick rank to hold NaN or inf."""


def _model() -> DistributedDataParallel:
    return DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))


def _train(model: DistributedDataParallel, rank: int, sick: bool) -> list[bytes]:
    """New weights on every rank, those of a sick one with an inf, and a NaN further on; gives their bits."""
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(values(tuple(p.shape), torch.float32, i, rank))
        if sick:
            model.module.get_parameter(FIRST[rank]).view(-1)[-1] = -float("inf")
            model.module[1].bias[0] = float("nan")
    return [bits(p) for p in model.parameters()]


def _raise(rank: int, nonfinite: str, sick: tuple[int, ...], found: str) -> None:
    model = _model()
    local_sgd = LocalSGD(None, model, 1, nonfinite=nonfinite)
    with pytest.raises(NonFiniteError, match=f"of {found} at step 1; nothing was averaged"), local_sgd:
        own = _train(model, rank, rank in sick)
        local_sgd.step()
    assert [bits(p) for p in model.parameters()] == own
    assert local_sgd.num_syncs == 0
    assert model.require_backward_grad_sync


ONE = r"rank 1 \(first in '1\.bias'\)"
TWO = ONE + r", rank 2 \(first in '0\.weight'\)"


@pytest.mark.parametrize(
    ("nonfinite", "world_size", "sick", "found"),
    [("raise", 2, (1,), ONE), ("raise", 3, (1, 2), TWO), ("exclude", 3, (0, 1, 2), r"rank 0 .*, " + TWO)],
    ids=["one", "two", "all"],
)
def test_every_rank_raises_before_anything_is_averaged(
    nonfinite: str, world_size: int, sick: tuple[int, ...], found: str
) -> None:
    run_ranks(_raise, world_size, nonfinite, sick, found)


def _exclude(rank: int, sick: tuple[int, ...], found: str) -> None:
    model = _model()
    with LocalSGD(None, model, 1, nonfinite="exclude") as local_sgd:
        _train(model, rank, rank in sick)
        with pytest.warns(UserWarning, match=f"of {found} at step 1: left out of the average"):
            local_sgd.step()
        healthy = [r for r in range(3) if r not in sick]
        for i, p in enumerate(model.parameters()):
            total = sum(values(tuple(p.shape), torch.float32, i, r) for r in healthy)
            assert bits(p) == bits(total / len(healthy)), "on the sick ranks, too"
        assert local_sgd.report is not None
        assert local_sgd.report.active_ranks == len(healthy)
        assert local_sgd.report.drift < 10, "finite"
        # Healed by it, they count again.
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            local_sgd.step()
        assert local_sgd.report.active_ranks == 3


@pytest.mark.parametrize(("sick", "found"), [((1,), ONE), ((1, 2), TWO)], ids=["one", "two"])
def test_excluded_ranks_receive_the_average_of_the_healthy_ones(sick: tuple[int, ...], found: str) -> None:
    run_ranks(_exclude, 3, sick, found)


def _ignore(rank: int) -> None:
    model = _model()
    with LocalSGD(None, model, 1, nonfinite="ignore") as local_sgd:
        _train(model, rank, rank == 1)
        local_sgd.step()
    assert str(model.module[1].bias.tolist()) == "[nan, -inf]"
    assert bits(model.module[0].weight) == bits(sum(values((2, 2), torch.float32, 0, r) for r in range(2)) / 2)


def test_ignored_it_spreads() -> None:
    run_ranks(_ignore, 2)


def _huge_but_finite(rank: int) -> None:
    model = nn.Linear(2, 2)
    with LocalSGD(None, model, 1) as local_sgd:
        model.weight.data.fill_(1e30)  # its square overflows float32
        local_sgd.step()
    assert model.weight.eq(1e30).all()


def test_huge_finite_weights_are_no_error() -> None:
    run_ranks(_huge_but_finite, 2)


def _float16_sum(rank: int, wire: str) -> None:
    model = nn.Linear(2, 2, dtype=torch.float16)
    local_sgd = LocalSGD(None, model, 1, wire=wire)
    with local_sgd:
        model.weight.data.fill_(60000.0)  # twice that is too large
        if wire == "parameter":
            with pytest.raises(NonFiniteError, match=r"at step 1.*overflowed float16.*wire='float32'"):
                local_sgd.step()
            model.weight.data.fill_(1.0)
        else:
            local_sgd.step()
            assert model.weight.eq(60000.0).all()


@pytest.mark.parametrize("wire", ["parameter", "float32"])
def test_a_sum_that_overflows_float16(wire: str) -> None:
    run_ranks(_float16_sum, 2, wire)


def _nan_in_a_buffer(rank: int) -> None:
    model = nn.BatchNorm1d(2)
    model.running_mean.fill_(float("nan"))
    with LocalSGD(None, model, 4) as local_sgd:
        for step in range(1, 14):
            if step == 5:
                model.weight.data.fill_(float("nan"))
            if step == 8:
                with pytest.raises(NonFiniteError, match="'weight'"):
                    local_sgd.step()
                model.weight.data.fill_(1.0)
            else:
                local_sgd.step()
            last = {0: None, 1: 4, 2: 4, 3: 12}[step // 4]
            assert (local_sgd.report and local_sgd.report.step) == last, "the schedule goes on"
    assert local_sgd.num_syncs == 3, "after steps 4 and 12, and at the end"


def test_only_parameters_count_as_non_finite_and_a_caught_error_keeps_the_schedule() -> None:
    run_ranks(_nan_in_a_buffer, 2)


class _Reads(TorchDispatchMode):
    """Counts the values that the host reads from a tensor: on a GPU each of them waits for everything queued there."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def _reads(rank: int, nonfinite: str) -> list[int]:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    counts = []
    with LocalSGD(None, model, 1, nonfinite=nonfinite) as local_sgd:
        for _ in range(3):
            model(torch.ones(2, 3))
            with _Reads() as reads:
                local_sgd.step()
            counts.append(reads.count)
        assert local_sgd.report is not None
    return counts


@pytest.mark.parametrize(("nonfinite", "reads"), [("ignore", 0), ("raise", 1), ("exclude", 1)])
def test_the_host_reads_nothing_but_the_finite_check(nonfinite: str, reads: int) -> None:
    assert run_ranks(_reads, 2, nonfinite) == [[reads] * 3] * 2
