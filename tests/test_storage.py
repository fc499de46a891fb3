"""Averaging writes in place: pointers, strides, tied weights and views outlive it; only what is trained is sent."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import Work
from torch.nn.parallel import DistributedDataParallel

from localsgd_ext import LocalSGD, LocalSGDError

from .groups import WatchedGroup
from .ranks import run_ranks
from .tensors import DTYPES, OddModel, bits, values

pytestmark = pytest.mark.usefixtures("engine")


def _mean(shape: tuple[int, ...], salt: int) -> torch.Tensor:
    return (values(shape, torch.float32, salt, 0) + values(shape, torch.float32, salt, 1)) / 2


def _places(rank: int) -> None:
    model = OddModel(DTYPES, rank)
    before = {name: (p.data_ptr(), p.stride(), id(p)) for name, p in model.named_parameters()}
    view = model.float32_plain.detach()[2:4]
    own = view.clone()
    LocalSGD(None, model, 1, bucket_mb=0.004).synchronize()
    assert {name: (p.data_ptr(), p.stride(), id(p)) for name, p in model.named_parameters()} == before
    assert not torch.equal(view, own)
    assert torch.equal(view, model.float32_plain[2:4]), "a live view sees the average"


def test_pointers_strides_and_views_stay() -> None:
    run_ranks(_places, 2)


class Tied(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.embedding.weight.data.copy_(values((5, 4), torch.float32, 1, rank))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        # Two Parameter objects over the same memory, as some ports of models tie their weights.
        self.other = nn.Parameter(self.embedding.weight.data)


def _tied(rank: int) -> int:
    model = Tied(rank)
    report = LocalSGD(None, model, 1).synchronize()
    assert report is not None
    assert model.head.weight is model.embedding.weight
    assert model.other.data_ptr() == model.embedding.weight.data_ptr()
    assert bits(model.other) == bits(_mean((5, 4), 1))
    return report.wire_bytes


def test_tied_weights_stay_tied_and_are_sent_once() -> None:
    assert run_ranks(_tied, 2) == [80, 80]


class _Counting:
    """A group that counts the bytes handed to its all-reduces."""

    def __init__(self) -> None:
        self.bytes = 0
        self.group = WatchedGroup(self._count)

    def _count(self, call: int, tensor: torch.Tensor, work: Work) -> Work:
        self.bytes += tensor.numel() * tensor.itemsize
        return work


DRIFT_BYTES = 8  # one float64 per averaging


def _frozen(rank: int) -> None:
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(10, 3))
    for i, p in enumerate(model.parameters()):
        p.data.copy_(values(tuple(p.shape), torch.float32, i, rank))
    for p in model[0].parameters():
        p.requires_grad_(False)
    model[0].register_parameter("codes", nn.Parameter(torch.full((7,), rank, dtype=torch.int64), requires_grad=False))
    base = bits(model[0].weight)
    sent = _Counting()
    report = LocalSGD(None, model, 1, process_group=sent.group).synchronize()
    assert sent.bytes == 33 * 4 + DRIFT_BYTES
    assert report is not None
    assert report.wire_bytes == 33 * 4
    assert bits(model[0].weight) == base
    assert model[0].codes.tolist() == [rank] * 7
    assert bits(model[1].weight) == bits(_mean((3, 10), 2))


def test_frozen_and_integer_parameters_are_not_sent() -> None:
    run_ranks(_frozen, 2)


def _frozen_midway(rank: int) -> list[int]:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    count = _Counting()
    local_sgd = LocalSGD(None, model, 1, process_group=count.group)
    sent = []

    def average() -> None:
        count.bytes = 0
        local_sgd.synchronize()
        sent.append((count.bytes - DRIFT_BYTES) // 4)

    model[0].requires_grad_(False)  # before the first averaging
    average()
    model[0].weight.data.copy_(values((4, 4), torch.float32, 9, rank))
    average()
    assert bits(model[0].weight) == bits(_mean((4, 4), 9)), "what was trained before it was frozen is averaged"
    model[0].requires_grad_(True)
    average()
    return sent


def test_a_parameter_frozen_midway_goes_on_being_averaged() -> None:
    assert run_ranks(_frozen_midway, 2) == [[32, 32, 32]] * 2


def _by_turns(rank: int) -> None:
    """Two networks trained by turns, the second one frozen whenever step() is called, as for adversarial training."""
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    with LocalSGD(None, model, 2) as local_sgd:
        for step in range(4):
            model[1].requires_grad_(True)
            for i, p in enumerate(model.parameters()):
                p.data.copy_(values(tuple(p.shape), torch.float32, 10 * step + i, rank))
            model[1].requires_grad_(False)
            local_sgd.step()
    for i, p in enumerate(model.parameters()):
        assert bits(p) == bits(_mean(tuple(p.shape), 30 + i))


def test_networks_frozen_by_turns_are_all_averaged() -> None:
    run_ranks(_by_turns, 2)


def _replaced(rank: int) -> None:
    model = nn.Linear(6, 6, bias=False)
    local_sgd = LocalSGD(None, model, 1)
    local_sgd.synchronize()
    model.weight.data = values((6, 6), torch.float32, 1, rank)
    local_sgd.synchronize()
    assert bits(model.weight) == bits(_mean((6, 6), 1))
    model.weight = nn.Parameter(values((6, 6), torch.float32, 2, rank))
    local_sgd.synchronize()
    assert bits(model.weight) == bits(_mean((6, 6), 2))
    model.extra = nn.Parameter(values((3,), torch.float32, 3, rank))
    local_sgd.synchronize()
    assert bits(model.extra) == bits(_mean((3,), 3))
    model.bfloat16()
    local_sgd.synchronize()
    assert model.weight.dtype == torch.bfloat16


def test_replaced_storage_is_found_at_the_next_averaging() -> None:
    run_ranks(_replaced, 2)


def _nothing_to_train(rank: int) -> None:
    model = nn.Linear(3, 3).requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with LocalSGD(None, model, 1) as local_sgd:
            local_sgd.step()
            assert local_sgd.report is not None
            assert local_sgd.report.drift == 0.0


def test_a_model_without_trainable_parameters() -> None:
    run_ranks(_nothing_to_train, 2)


def _memory(rank: int) -> None:
    """After the block the object keeps neither the model's memory nor buffers of its own."""
    model = nn.Linear(8, 8)
    local_sgd = LocalSGD(None, model, 1)
    with local_sgd:
        local_sgd.step()
    assert not local_sgd._rounds._averager.bindings  # type: ignore[union-attr]


def test_buffers_and_views_are_dropped_at_the_end_of_the_block() -> None:
    run_ranks(_memory, 2)


def _ddp_ignores(rank: int) -> None:
    model = nn.Linear(4, 4)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["bias"])
    ddp = DistributedDataParallel(model)
    model.bias.data.fill_(rank)
    model.weight.data.fill_(rank)
    LocalSGD(None, ddp, 1).synchronize()
    assert model.bias.tolist() == [rank] * 4
    assert model.weight.eq(0.5).all()


def test_what_ddp_was_told_to_ignore_is_left_alone() -> None:
    run_ranks(_ddp_ignores, 2)


def _conjugates(rank: int) -> None:
    weights = [values((5, 3), torch.complex64, 1, r) for r in range(2)]
    model = nn.Module()
    model.register_parameter("weight", nn.Parameter(weights[rank].clone().conj()))
    model.register_buffer("table", values((4,), torch.complex64, 2, rank).conj())
    LocalSGD(None, model, 1, buffers="broadcast").synchronize()
    assert torch.equal(model.weight.detach().resolve_conj(), ((weights[0] + weights[1]) / 2).conj().resolve_conj())
    assert torch.equal(model.table.resolve_conj(), values((4,), torch.complex64, 2, 0).conj().resolve_conj())


def test_conjugate_views() -> None:
    run_ranks(_conjugates, 2)


def _transposed_midway(rank: int) -> None:
    """The same memory read through other strides: a tensor with gaps is told from one without."""
    base = values((6, 6), torch.float32, 1, rank)
    model = nn.Linear(6, 6, bias=False)
    model.weight.data = base[:, :3]
    local_sgd = LocalSGD(None, model, 1)
    local_sgd.synchronize()
    model.weight.data = base.as_strided((6, 3), (1, 6))
    local_sgd.synchronize()
    both = [values((6, 6), torch.float32, 1, r) for r in range(2)]
    assert torch.equal(base.as_strided((18,), (1,)), ((both[0] + both[1]) / 2).as_strided((18,), (1,)))


def test_other_strides_over_the_same_memory_are_noticed() -> None:
    run_ranks(_transposed_midway, 2)


def _no_memory(rank: int) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("graph", torch.eye(3).to_sparse())
    with pytest.raises(LocalSGDError, match=r"'graph' is a torch\.sparse_coo tensor.*buffers='keep'"):
        LocalSGD(None, model, 1)
    LocalSGD(None, model, 1, buffers="keep").synchronize()
    with pytest.raises(LocalSGDError, match="'weight' is not initialised"):
        LocalSGD(None, nn.LazyLinear(3), 1)


def test_tensors_that_cannot_be_written_to_are_named() -> None:
    run_ranks(_no_memory, 2)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _growth(rank: int, wire: str, dtype: torch.dtype) -> int:
    model = nn.ParameterList([nn.Parameter(torch.zeros(30_000_000, dtype=dtype)) for _ in range(2)])
    dist.barrier()
    before = _resident()
    with LocalSGD(None, model, 1, wire=wire) as local_sgd, torch.no_grad():
        for step in range(3):
            for parameter in model:
                parameter.add_(rank + step)
            local_sgd.step()
        return _resident() - before


@pytest.mark.parametrize(
    ("wire", "dtype", "state_bytes"),
    [("parameter", torch.float32, 0), ("parameter", torch.bfloat16, 0), ("int8", torch.float32, 8)],
)
def test_memory_does_not_grow_with_the_model(wire: str, dtype: torch.dtype, state_bytes: int) -> None:
    """Of 60 million elements. Nor do temporaries leave the allocator's memory in pieces, which looks the same."""
    grown = max(run_ranks(_growth, 2, wire, dtype)) - 60_000_000 * state_bytes
    assert grown < 100e6, "staging buffers, and no second copy of any kind"
