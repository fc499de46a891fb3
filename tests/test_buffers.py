"""BatchNorm statistics and other buffers under each policy, and `averaged()`."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from localsgd_ext import LocalSGD, LocalSGDError, average_parameters

from .ranks import run_ranks
from .tensors import apart, bits, values

pytestmark = pytest.mark.usefixtures("engine")


def batch_norm(rank: int) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    norm = model[1]
    norm.running_mean.copy_(values((5,), torch.float32, 1, rank))
    norm.running_var.copy_(values((5,), torch.float32, 2, rank).exp())
    norm.num_batches_tracked.fill_(100 + rank)
    norm.register_buffer("flags", torch.tensor([rank == 0, True, rank == 1]))
    norm.register_buffer("wide", values((3,), torch.float64, 3, rank))
    norm.register_buffer("cache", torch.zeros(2 + rank), persistent=False)  # of another length on each rank
    return model


def _state(rank: int, policy: str) -> dict[str, torch.Tensor]:
    model = batch_norm(rank)
    LocalSGD(None, model, 1, buffers=policy).synchronize()
    return {name: buffer.clone() for name, buffer in model[1].named_buffers()}


@pytest.mark.parametrize("world_size", [2, 3])
def test_average(world_size: int) -> None:
    results = run_ranks(_state, world_size, "average")
    own = [dict(batch_norm(rank)[1].named_buffers()) for rank in range(world_size)]
    for name in ("running_mean", "running_var", "wide"):
        mean = torch.stack([buffers[name].double() for buffers in own]).mean(0)
        assert torch.allclose(results[0][name].double(), mean, rtol=1e-6)
        assert len({bits(result[name]) for result in results}) == 1
    for rank, result in enumerate(results):
        assert result["num_batches_tracked"].item() == 100
        assert result["flags"].tolist() == [True, True, False]
        assert result["cache"].tolist() == [0] * (2 + rank), "a cache outside the state dict is not touched"


def test_broadcast() -> None:
    results = run_ranks(_state, 3, "broadcast")
    first = dict(batch_norm(0)[1].named_buffers())
    for result in results:
        for name in ("running_mean", "running_var", "wide", "num_batches_tracked", "flags"):
            assert bits(result[name]) == bits(first[name])


def test_keep() -> None:
    for rank, result in enumerate(run_ranks(_state, 2, "keep")):
        for name, buffer in batch_norm(rank)[1].named_buffers():
            assert bits(result[name]) == bits(buffer)


def _drift(rank: int) -> tuple[float, float]:
    model = batch_norm(rank)
    for p in model.parameters():
        p.data.add_(rank * 0.01)
    weights = [p.detach().clone() for p in model.parameters()]
    with_buffers = LocalSGD(None, model, 1).synchronize()
    assert with_buffers is not None
    return with_buffers.drift, average_parameters(weights).drift


def test_buffers_do_not_count_in_the_drift() -> None:
    torch.manual_seed(0)
    for with_buffers, without in run_ranks(_drift, 2):
        assert with_buffers == pytest.approx(without, rel=1e-5)


def _trained_batch_norm(rank: int) -> None:
    """Under no_sync DDP itself no longer keeps BatchNorm statistics together; after the block they are equal and a mean."""
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    ddp = DistributedDataParallel(model)
    with LocalSGD(None, ddp, 10, buffers="average") as local_sgd:
        for step in range(3):
            ddp(values((16, 3), torch.float32, step, rank) + rank).sum().backward()
            local_sgd.step()
        local = model[1].running_mean.clone()
        average_parameters([both := local.clone()])
    assert not torch.equal(local, both)
    assert bits(model[1].running_mean) == bits(both)


def test_statistics_gathered_in_training_are_averaged_at_the_end() -> None:
    run_ranks(_trained_batch_norm, 2)


def _averaged(rank: int) -> None:
    model = batch_norm(rank)
    for i, p in enumerate(model.parameters()):
        p.data.copy_(values(tuple(p.shape), torch.float32, 20 + i, rank))
    tensors = [*model.parameters(), *(b for n, b in model.named_buffers() if "cache" not in n)]
    own = [bits(t) for t in tensors]
    expected = (values((5, 3), torch.float32, 20, 0) + values((5, 3), torch.float32, 20, 1)) / 2
    with LocalSGD(None, DistributedDataParallel(nn.Linear(1, 1)), 10):
        pass
    with apart(LocalSGD(None, model, 10), model) as local_sgd:
        local_sgd.step()
        with local_sgd.averaged() as report:
            assert report is not None
            assert report.drift > 0
            assert bits(model[0].weight) == bits(expected)
            assert model[1].num_batches_tracked.item() == 100
        assert [bits(t) for t in tensors] == own
        with pytest.raises(KeyError), local_sgd.averaged():
            assert bits(model[0].weight) == bits(expected)
            raise KeyError
        assert [bits(t) for t in tensors] == own
        for _ in range(8):
            local_sgd.step()
        assert local_sgd.num_syncs == 2, "the schedule did not move"
        local_sgd.step()
        assert local_sgd.num_syncs == 3
        with local_sgd.averaged():
            pass
        before_exit = local_sgd.num_syncs
    assert local_sgd.num_syncs == before_exit, "nothing new since the averaging: the end has nothing to send"
    assert bits(model[0].weight) == bits(expected)


def test_averaged_gives_the_mean_inside_and_the_own_weights_after() -> None:
    run_ranks(_averaged, 2)


def _averaged_then_exit(rank: int) -> None:
    model = nn.Linear(2, 2)
    with LocalSGD(None, model, 10) as local_sgd:
        model.weight.data.fill_(rank)
        local_sgd.step()
        with local_sgd.averaged():
            assert model.weight.eq(0.5).all()
        assert model.weight.eq(rank).all()
    assert model.weight.eq(0.5).all(), "the local steps before averaged() are not forgotten at the end"


def test_averaged_does_not_count_as_having_sent_the_local_steps() -> None:
    run_ranks(_averaged_then_exit, 2)


def _inside_averaged(rank: int) -> None:
    model = nn.Linear(2, 2)
    with apart(LocalSGD(None, model, 1), model) as local_sgd, local_sgd.averaged():
        for call in (local_sgd.step, local_sgd.synchronize, local_sgd.averaged().__enter__):
            with pytest.raises(LocalSGDError, match=r"inside `with local_sgd\.averaged"):
                call()
    assert local_sgd.num_syncs == 2, "averaged() and the end of the block"


def test_averaging_inside_averaged_would_be_lost_and_is_an_error() -> None:
    run_ranks(_inside_averaged, 2)


def _odd_buffers(rank: int) -> None:
    model = nn.Linear(3, 5)
    base = values((5, 1), torch.float32, 1, rank)
    model.register_buffer("expanded", base.expand(5, 4))
    model.register_buffer("alias", model.weight.detach()[:2])
    own = [bits(t) for t in (*model.parameters(), *model.buffers())]
    local_sgd = LocalSGD(None, model, 1, buffers="broadcast")
    with local_sgd.averaged():
        assert torch.equal(model.expanded, values((5, 1), torch.float32, 1, 0).expand(5, 4))
        assert torch.equal(model.alias, model.weight[:2])
        weights = bits(model.weight)
    everyone: list[bytes] = [b"", b""]
    dist.all_gather_object(everyone, weights)
    assert everyone[0] == everyone[1], "a buffer that is a part of a parameter is averaged with it, not broadcast"
    assert [bits(t) for t in (*model.parameters(), *model.buffers())] == own


def test_expanded_buffers_and_parts_of_parameters() -> None:
    run_ranks(_odd_buffers, 2)


def _under_inference_mode(rank: int) -> None:
    model = nn.Linear(3, 5)
    model.weight.data.fill_(rank)
    with apart(LocalSGD(None, model, 2), model) as local_sgd:
        local_sgd.step()
        with torch.inference_mode(), local_sgd.averaged():
            assert model.weight.eq(0.5).all()
        assert model.weight.eq(rank).all()
        local_sgd.step()
        assert model.weight.eq(0.5).all()
        model(torch.ones(1, 3)).sum().backward()


def test_an_evaluation_in_inference_mode_leaves_no_trace() -> None:
    run_ranks(_under_inference_mode, 2)


def _subgroup(rank: int) -> int:
    pair = dist.new_group([1, 2])
    model = nn.BatchNorm1d(2)
    model.num_batches_tracked.fill_(10 * rank)
    if rank:
        LocalSGD(None, model, 1, process_group=pair).synchronize()
    return int(model.num_batches_tracked)


def test_what_follows_rank_0_follows_the_groups_own() -> None:
    assert run_ranks(_subgroup, 3) == [0, 10, 10]


def _settled(rank: int) -> list[int]:
    """How many averagings there were: after a step, when nothing is new, after one rank alone has run its model forward, and
    again."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    counts = []
    with LocalSGD(None, model, 2) as local_sgd:
        for step in range(2):
            with torch.no_grad():
                model[0].weight.add_(rank + step)
            local_sgd.step()
        counts.append(local_sgd.num_syncs)
        local_sgd.settle()
        counts.append(local_sgd.num_syncs)
        if rank == 1:
            model(torch.randn(5, 3))
        local_sgd.settle()
        counts.append(local_sgd.num_syncs)
        local_sgd.state_dict()  # which is refused where something is new
        local_sgd.settle()
        counts.append(local_sgd.num_syncs)
    return counts


def test_settling_averages_what_is_new_on_any_rank_and_nothing_else() -> None:
    assert run_ranks(_settled, 2) == [[1, 1, 2, 2]] * 2
