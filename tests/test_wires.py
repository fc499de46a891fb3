"""Lossy wires between real ranks: what arrives, what is kept for later, and that the ranks stay equal to the last bit."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from localsgd_ext import LocalSGD, LocalSGDError, average_parameters
from localsgd_ext.averager import Averager, Item
from localsgd_ext.collectives import SLOTS
from localsgd_ext.wire import EXACT, Chunks, Code, Mode, travels_as

from .local_steps import BUCKET_MB, LOSSY, WAYS, drift, everything, mean_drift, parameters, states
from .ranks import run_ranks
from .tensors import DTYPES, OddModel, bits, values


def _random_drift(rank: int, wire: str, rounds: int, feedback: bool) -> tuple[float, bytes]:
    """Largest distance of the anchor to the exact mean, in quantisation steps, after `rounds` rounds."""
    world_size = dist.get_world_size()
    model = parameters(2000, 300)
    exact = [p.detach().double() for p in model]
    with LocalSGD(None, model, 1, wire=wire, bucket_mb=BUCKET_MB) as local_sgd:
        for salt in range(rounds):
            drift(model, rank, salt)
            for whole, move in zip(exact, mean_drift(model, world_size, salt), strict=True):
                whole.add_(move)
            local_sgd.step()
            if not feedback:
                for _, residual in states(local_sgd):
                    residual.zero_()
        distance = max((p.detach() - whole).abs().max().item() for p, whole in zip(model, exact, strict=True))
        end = everything(model)
    # The largest difference that travels is a rank's drift and what it still owed, in all a little more than 1e-3.
    step = {"bfloat16": 1e-3 * 2**-8, "int8": 1.01e-3 / 127, "int4": 1.2e-3 / 7}[wire]
    return distance / step, end


@pytest.mark.parametrize(("wire", "world_size"), [("bfloat16", 2), ("int8", 2), ("int8", 3), ("int4", 3)])
@pytest.mark.usefixtures("engine")
def test_error_feedback_keeps_the_anchor_within_one_step_of_the_exact_mean(wire: str, world_size: int) -> None:
    results = run_ranks(_random_drift, world_size, wire, 200, True)
    assert results[0][0] < 1
    assert len({end for _, end in results}) == 1, "ranks differ"
    assert run_ranks(_random_drift, world_size, wire, 200, False)[0][0] > 1.5, "what feedback is for"


def _small_updates(rank: int, differences: bool) -> float:
    """Share of 50 updates, each of a ten-thousandth of the weights, that arrives."""
    model = parameters(1000)
    begin = model[0].detach().clone()
    with LocalSGD(None, model, 1, wire="bfloat16") if differences else contextlib.nullcontext() as local_sgd:
        for _ in range(50):
            with torch.no_grad():
                model[0].add_(1e-4 * begin)
            if local_sgd is None:
                average_parameters(list(model), wire="bfloat16")
            else:
                local_sgd.step()
        moved = (model[0].detach() / begin - 1) / 50e-4
    return moved.sub(1).abs().max().item()


@pytest.mark.usefixtures("engine")
def test_values_in_bfloat16_lose_small_updates_and_differences_keep_them() -> None:
    assert run_ranks(_small_updates, 2, True)[0] < 0.01
    assert run_ranks(_small_updates, 2, False)[0] > 0.5


def _large(rank: int) -> tuple[float, float]:
    """Differences whose sum, and whose products with anything, are beyond float16."""
    model = parameters(600)
    with LocalSGD(None, model, 1, wire="float16") as local_sgd, torch.no_grad():
        model[0].copy_(values((600,), torch.float32, 5, rank).sign() * 6e4 * (1 + rank))
        model[0][512:].mul_(1e30)
        expected = sum(values((600,), torch.float32, 5, r).sign() * 6e4 * (1 + r) for r in range(4)) / 4
        expected[512:] *= 1e30
        local_sgd.step()
        near = (model[0] - expected).abs() <= 2**-9 * 2.4e5 * torch.where(torch.arange(600) < 512, 1.0, 1e30)
    return near.double().mean().item(), local_sgd.report.drift


@pytest.mark.usefixtures("engine")
def test_a_float16_wire_never_overflows() -> None:
    assert {near for near, _ in run_ranks(_large, 4)} == {1.0}


BLOCK_MB = 130 / 2**20
"""Of a bucket with one block in few bits."""


def _both_engines(rank: int, wire: str, dtype: torch.dtype) -> None:
    """Several rounds of odd tensors, and of numbers that few expect, with each engine: all they leave is the same."""
    results = []
    for backend in ("torch", "native"):
        model = OddModel((dtype,), 0)
        averager = Averager(dist.group.WORLD, wire, backend, BLOCK_MB)
        items = [Item(name, parameter) for name, parameter in model.named_parameters()]
        averager.bind(items)
        averager.agree()
        assert len(averager.bindings[Mode.WIRE].buckets) > 2 * SLOTS, "each staging buffer is used several times"
        info = torch.finfo(dtype)
        odd = [0.0, -0.0, info.tiny / 4, -info.tiny, 1e4, -1e-30, 3e38 if dtype != torch.float16 else 6e4]
        for salt in range(4):
            drift(model, rank, salt)
            with torch.no_grad():
                largest = dict(model.named_parameters())[str(dtype).removeprefix("torch.") + "_larger_than_three_buckets"]
                picked = torch.arange(largest.numel())[salt + rank :: 97]
                largest[picked] = torch.tensor([odd[n % len(odd)] for n in range(len(picked))], dtype=torch.float64).to(dtype)
            active = [True, salt != 1, True][: dist.get_world_size()]
            averager.average(items, step=0, round=1, interval=1, active=active)
        assert averager.bindings[Mode.WIRE].engine.name == backend
        results.append([everything(model), *(bits(each) for each in (*averager.anchors.anchor, *averager.anchors.residual))])
    assert results[0] == results[1]


PAIRS = [
    (wire, dtype)
    for wire in ("float32", *LOSSY)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    if isinstance(travels_as(dtype, wire, is_parameter=True), Code)
]


@WAYS
@pytest.mark.parametrize(("wire", "dtype"), PAIRS)
@pytest.mark.usefixtures("native_binary")
def test_engines_agree_bit_for_bit(wire: str, dtype: torch.dtype, world_size: int) -> None:
    run_ranks(_both_engines, world_size, wire, dtype)


def _mixed(rank: int, wire: str, rounds: int) -> bytes:
    model = parameters(700, 40, 3000)
    with LocalSGD(None, model, 1, wire=wire, backend=("native", "torch")[rank % 2], bucket_mb=BUCKET_MB) as local_sgd:
        for salt in range(rounds):
            drift(model, rank, salt)
            local_sgd.step()
        anchors = b"".join(bits(anchor) for anchor, _ in states(local_sgd))
        assert local_sgd.report.backend == ("native", "torch")[rank % 2]
    return anchors


@pytest.mark.parametrize(("wire", "world_size"), [("bfloat16", 2), ("float16", 3), ("int8", 2), ("int8", 3), ("int4", 3)])
@pytest.mark.usefixtures("native_binary")
def test_anchors_are_the_same_bits_after_500_rounds_with_mixed_engines(
    wire: str, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("tests.ranks", fromlist=["environment"]).environment, "LOCALSGD_EXT_CHECK", "1")
    assert len(set(run_ranks(_mixed, world_size, wire, 500, limit=120))) == 1


def _tampered(rank: int) -> None:
    model = parameters(700)
    with pytest.raises(LocalSGDError, match=r"anchors of rank 1 differ from rank 0's at step 2"):  # noqa: SIM117
        with LocalSGD(None, model, 1, wire="int8") as local_sgd:
            drift(model, rank, 0)
            local_sgd.step()
            if rank == 1:
                anchor = states(local_sgd)[0][0]
                anchor[[3, 5]] = anchor[[5, 3]]
            local_sgd.step()


@pytest.mark.usefixtures("engine")
def test_anchors_that_differ_are_found_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from . import ranks

    monkeypatch.setitem(ranks.environment, "LOCALSGD_EXT_CHECK", "1")
    run_ranks(_tampered, 2)


def _exact_where_asked(rank: int, wire: str) -> None:
    world_size = dist.get_world_size()
    model = parameters(2000, 300)
    exact = [p.detach().double() for p in model]

    def train(salt: int) -> None:
        drift(model, rank, salt)
        for whole, move in zip(exact, mean_drift(model, world_size, salt), strict=True):
            whole.add_(move)

    def error() -> float:
        return max((p.detach() - whole).abs().max().item() for p, whole in zip(model, exact, strict=True))

    rounding = 1e-6  # of float32 weights, over these few rounds
    lossy = 3e-5 if wire == "int4" else rounding
    with LocalSGD(None, model, 1, wire=wire, bucket_mb=BUCKET_MB) as local_sgd:
        train(0)
        local_sgd.step()
        assert error() > lossy
        coded_bytes = local_sgd.report.wire_bytes
        # Nothing new but what rounding has dropped.
        assert local_sgd.synchronize().wire_bytes > 1.4 * coded_bytes
        assert error() < rounding
        assert not any(residual.any() for _, residual in states(local_sgd))
        assert everything(model) == b"".join(bits(anchor[:n]) for (anchor, _), n in zip(states(local_sgd), [2300], strict=True))
        train(1)
        own, before = everything(model), [bits(each) for pair in states(local_sgd) for each in pair]
        with local_sgd.averaged():
            assert error() < rounding
        assert everything(model) == own
        assert [bits(each) for pair in states(local_sgd) for each in pair] == before, "as if it had never been"
        local_sgd.step()
        assert error() > lossy
        rounds = local_sgd.num_syncs
    assert local_sgd.num_syncs == rounds + 1, "what was left to be sent"
    assert error() < rounding
    with local_sgd:
        pass
    assert local_sgd.num_syncs == rounds + 1, "and then nothing"
    train(2)
    local_sgd.synchronize()  # outside its block: ranks have nothing in common there
    assert error() < rounding


@WAYS
@pytest.mark.parametrize("wire", ["bfloat16", "int8", "int4"])
@pytest.mark.usefixtures("engine")
def test_averagings_that_are_asked_for_and_the_last_one_are_exact(wire: str, world_size: int) -> None:
    run_ranks(_exact_where_asked, world_size, wire)


def _shapes(rank: int, wire: str) -> dict[str, torch.Tensor]:
    dtypes = tuple(DTYPES)
    model = OddModel(dtypes, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with LocalSGD(None, model, 1, wire=wire, bucket_mb=BUCKET_MB) as local_sgd:
            pointers = [p.data_ptr() for p in model.parameters()]
            drift_complex(model, rank)
            local_sgd.step()
            assert [p.data_ptr() for p in model.parameters()] == pointers
            return {name: p.detach().clone() for name, p in model.named_parameters()}


@torch.no_grad()
def drift_complex(model: nn.Module, rank: int) -> None:
    for i, p in enumerate(model.parameters()):
        p.add_(0.1 * values(tuple(p.shape), p.dtype, 1000 + i, rank))


@WAYS
@pytest.mark.parametrize("wire", ["float16", "int8"])
@pytest.mark.usefixtures("engine")
def test_every_dtype_shape_and_stride(wire: str, world_size: int) -> None:
    results = run_ranks(_shapes, world_size, wire)
    copies = [OddModel(DTYPES, 0) for _ in range(world_size)]
    for rank, copy in enumerate(copies):
        drift_complex(copy, rank)
    for name, parts in zip(results[0], zip(*(copy.parameters() for copy in copies), strict=True), strict=True):
        result = results[0][name]
        assert all(bits(other[name]) == bits(result) for other in results), name
        real = [torch.view_as_real(p.detach()) if p.is_complex() else p.detach() for p in (*parts, result)]
        *whole, got = [each.double() for each in real]
        # Half a step of the largest difference, twice, and half a step of the dtype.
        bound = 0.5 / (127 if wire == "int8" else 2**11) * 1.1 + torch.finfo(result.dtype).eps * 4
        assert (got - sum(whole) / world_size).abs().le(bound).all(), name


def _bytes(rank: int, wire: str) -> tuple[int, int]:
    model = parameters(70_000, 3)
    with LocalSGD(None, model, 1, wire=wire, bucket_mb=0.02) as local_sgd:
        drift(model, rank, 0)
        local_sgd.step()
        buckets = local_sgd._rounds._averager.bindings[Mode.WIRE].buckets
        return local_sgd.report.wire_bytes, len(buckets)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("wire", LOSSY)
@pytest.mark.usefixtures("engine")
def test_wire_bytes_are_what_the_chunks_say(wire: str, world_size: int) -> None:
    results = run_ranks(_bytes, world_size, wire)
    assert len(set(results)) == 1
    sent, count = results[0]
    code = Code(wire)
    least = 70_003 * code.bits // 8 + (2 * 70_003 // 256 if code.scaled else 0)
    hops = 1 if world_size == 2 else 2 * (world_size - 1) / world_size
    most = least + count * world_size * (Chunks.of(1, code, world_size).nbytes)
    assert count > 1
    assert least * hops <= sent <= most * hops


def _one_shot(rank: int, wire: str) -> float:
    tensors = [values((n,), torch.float32, n, rank) for n in (1000, 7)]
    average_parameters(tensors, wire=wire)
    error = 0.0
    for tensor in tensors:
        both = [values(tuple(tensor.shape), torch.float32, len(tensor), r) for r in range(2)]
        error = max(error, (tensor - (both[0] + both[1]) / 2).abs().max().item())
    return error


@pytest.mark.parametrize(("wire", "bound"), [("bfloat16", 2**-7), ("float16", 2**-10), ("int8", 4 / 254), ("int4", 4 / 14)])
@pytest.mark.usefixtures("engine")
def test_averaging_once_rounds_the_values(wire: str, bound: float) -> None:
    errors = run_ranks(_one_shot, 2, wire)
    assert errors[0] == errors[1]
    assert bound / 50 < errors[0] < bound


def _no_state(rank: int) -> None:
    model = parameters(100)
    with LocalSGD(None, model, 1, wire="float32") as local_sgd:
        assert local_sgd._rounds._averager.anchors is None
    with LocalSGD(None, model, 1, wire="int8") as local_sgd:
        assert states(local_sgd)[0][0].dtype == torch.float32
    assert local_sgd._rounds._averager.anchors is None, "freed on leaving"
    averager = Averager(dist.group.WORLD, EXACT, "torch", None)
    averager.bind([Item("half", torch.zeros(3, dtype=torch.float16))])
    assert averager.anchors is None


@pytest.mark.usefixtures("engine")
def test_exact_wires_need_no_anchor() -> None:
    run_ranks(_no_state, 2)
