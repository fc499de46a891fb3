"""What rounding has dropped on one rank arrives, whoever takes part; and nothing is agreed on that ranks do not have in
common."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from localsgd_ext import LayoutMismatchError, LocalSGD, NonFiniteError
from localsgd_ext.agreement import checksums

from .local_steps import BUCKET_MB, WAYS, drift, mean_drift, parameters
from .ranks import run_ranks
from .tensors import bits, values

pytestmark = pytest.mark.usefixtures("engine")


def _served(rank: int, wire: str) -> list[float]:
    """The last rank has no batches, and sums its chunk of the others' progress, which is always the same and mostly small."""
    size = dist.get_world_size()
    model = nn.ParameterList([nn.Parameter(torch.zeros(256 * size))])  # a block for each rank
    with LocalSGD(None, model, 1, wire=wire) as local_sgd:
        for _ in range(0 if rank == size - 1 else 100):
            with torch.no_grad():
                step = torch.full((256 * size,), 0.01 * (1 + 0.3 * rank))
                step[::256] = 1.0
                model[0].add_(step)
            local_sgd.step()
    return [model[0][256 * chunk + 5].item() for chunk in range(size)]


@pytest.mark.parametrize("wire", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_without_batches_sends_what_it_drops(wire: str, world_size: int) -> None:
    results = run_ranks(_served, world_size, wire)
    expected = sum(0.01 * (1 + 0.3 * rank) for rank in range(world_size - 1)) / (world_size - 1) * 100
    assert results == [results[0]] * world_size
    assert results[0] == pytest.approx([expected] * world_size, rel=1e-4)


def _owed(rank: int, wire: str, what: str) -> float:
    """Distance to the exact mean of one round, after a second averaging that is to make up for what the first has dropped."""
    size = dist.get_world_size()
    model = parameters(2000, 300)
    model.register_buffer("seen", torch.zeros(3))
    other = nn.Parameter(torch.zeros(400), requires_grad=False)
    model.append(other)
    with LocalSGD(None, model, 1, wire=wire, bucket_mb=BUCKET_MB) as local_sgd:
        drift(model[:2], rank, 0, size=0.1)
        exact = [
            p.detach().double() + m for p, m in zip(parameters(2000, 300), mean_drift(model[:2], size, 0, 0.1), strict=True)
        ]
        local_sgd.step()
        if what == "averaged":
            own = bits(model[0])
            with local_sgd.averaged():
                error = _error(model, exact)
            assert bits(model[0]) == own
            return error
        if what == "news of a buffer":
            if rank == 0:
                model.seen.add_(1)
            local_sgd.synchronize()
        else:
            other.requires_grad_(True)
            local_sgd.step()
        return _error(model, exact)


def _error(model: nn.ParameterList, exact: list[torch.Tensor]) -> float:
    return max((p.detach() - whole).abs().max().item() for p, whole in zip(model[:2], exact, strict=True))


@WAYS
@pytest.mark.parametrize("what", ["averaged", "news of a buffer", "another parameter joins"])
def test_what_was_dropped_is_in_every_exact_average(what: str, world_size: int) -> None:
    for error in run_ranks(_owed, world_size, "int4", what):
        assert error < 2e-6


def _replaced(rank: int) -> None:
    """Another parameter of the same name and shape: its values have nothing to do with the anchor of the old one."""
    model = parameters(500, 400)
    with LocalSGD(None, model, 1, wire="int4", bucket_mb=BUCKET_MB) as local_sgd:
        drift(model, rank, 0)
        local_sgd.step()
        model[0] = nn.Parameter(1000 + values((500,), torch.float32, 9, 0))
        drift(model, rank, 1)
        expected = 1000 + values((500,), torch.float32, 9, 0).double() + mean_drift(model, 2, 1)[0]
        local_sgd.step()
        assert (model[0] - expected).abs().max() < 1e-4


def test_a_parameter_that_was_replaced_begins_anew() -> None:
    run_ranks(_replaced, 2)


def _tied_for_a_while(rank: int) -> bytes:
    """One rank's layout differs once; that is an error on all of them, after which only it has no anchor."""
    model = parameters(400, 400)
    with LocalSGD(None, model, 1, wire="int8") as local_sgd:
        drift(model, rank, 0)
        local_sgd.step()
        kept = model[1]
        if rank == 1:
            model[1] = model[0]
        with pytest.raises(LayoutMismatchError):
            local_sgd.step()
        if rank == 1:
            model[1] = kept
        drift(model, rank, 1)
        local_sgd.step()
        return bits(model[0]) + bits(model[1])


def test_ranks_with_and_without_an_anchor_agree_on_how_to_average() -> None:
    assert len(set(run_ranks(_tied_for_a_while, 2))) == 1


def _permuted(rank: int, how: str) -> bytes:
    model = parameters(100, 64)
    with torch.no_grad():
        if rank == 1 and how == "swapped":
            model[0][[3, 50]] = model[0][[50, 3]]
        elif rank == 1:
            model[0].neg_()
    local_sgd = LocalSGD(None, model, 1, wire="int8")
    with pytest.warns(UserWarning, match="weights of rank 1 differ"):
        local_sgd.__enter__()
    drift(model, rank, 0)
    local_sgd.step()
    local_sgd.__exit__(None, None, None)
    return bits(model[0])


@pytest.mark.parametrize("how", ["swapped", "negated"])
def test_weights_that_differ_by_order_or_sign_are_seen_on_entry(how: str) -> None:
    assert len(set(run_ranks(_permuted, 2, how))) == 1


def test_checksums_see_every_kind_of_change() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.uint8):
        whole = (values((3 * 2**20 // 2,), torch.float32, 1, 0) * 10).to(dtype)
        own = checksums([whole])
        for change in (lambda t: t.flip(0), lambda t: t.roll(2**20), lambda t: t.roll(1)):
            assert checksums([change(whole)]) != own
        assert checksums([whole.clone()]) == own


def _nan_at_first(rank: int) -> None:
    model = parameters(300)
    with torch.no_grad():
        model[0][5] = torch.nan
    with LocalSGD(None, model, 1, wire="int8") as local_sgd:
        with torch.no_grad():
            model[0].copy_(values((300,), torch.float32, 4, rank))
        local_sgd.step()
        both = [values((300,), torch.float32, 4, r) for r in range(2)]
        assert torch.equal(model[0], (both[0] + both[1]) / 2), "the first one is exact"
        drift(model, rank, 1)
        local_sgd.step()
        assert model[0].isfinite().all()


def test_weights_that_are_nan_on_entry_are_no_anchor() -> None:
    run_ranks(_nan_at_first, 2)


def _too_large(rank: int) -> None:
    model = parameters(300, dtype=torch.float64)
    with (
        pytest.raises(
            NonFiniteError, match=r"average holds inf or NaN at step 1, first in '0', though all .* finite: differences"
        ),
        LocalSGD(None, model, 1, wire="int8") as local_sgd,
    ):
        model[0].data[7] = 1e200
        local_sgd.step()


def test_differences_too_large_for_the_wire_are_an_error_that_says_so() -> None:
    run_ranks(_too_large, 2)


def _outside(rank: int) -> None:
    model = parameters(300)
    local_sgd = LocalSGD(None, model, 1, wire="int8")
    with torch.no_grad():
        model[0].copy_(values((300,), torch.float32, 4, rank))
    local_sgd.synchronize()
    both = [values((300,), torch.float32, 4, r) for r in range(2)]
    assert torch.equal(model[0], (both[0] + both[1]) / 2)
    assert local_sgd._rounds._averager.anchors is None


def test_outside_its_block_an_averaging_needs_no_anchor() -> None:
    run_ranks(_outside, 2)
