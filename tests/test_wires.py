"""Lossy wires between real ranks: what arrives, what is kept for later, and that the ranks stay equal to the last bit."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from localsgd_ext import LocalSGD, LocalSGDError, average_parameters
from localsgd_ext.averager import Averager, Item
from localsgd_ext.binding import Mode
from localsgd_ext.wire import EXACT, Chunks, Code, travels_as

from .groups import failing_group
from .ranks import run_ranks
from .tensors import DTYPES, OddModel, bits, values

BUCKET_MB = 4096 / 2**20  # so small that a model has several buckets
LOSSY = ("bfloat16", "float16", "int8", "int4")
LEVELS = {"int8": 127, "int4": 7}
WAYS = pytest.mark.parametrize("world_size", [2, 3])  # codes to each other; chunks summed and encoded again


def parameters(*sizes: int, dtype: torch.dtype = torch.float32) -> nn.ParameterList:
    """Equal on all ranks, as entering a LocalSGD asks for."""
    return nn.ParameterList([nn.Parameter(values((n,), dtype, i, 0)) for i, n in enumerate(sizes)])


@torch.no_grad()
def drift(model: nn.Module, rank: int, salt: int, size: float = 1e-3) -> list[torch.Tensor]:
    """Local progress, uniform in [-size, size] and different on every rank; gives it, float64."""
    moves = []
    for i, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(10_000 * salt + 100 * i + rank)
        move = size * (2 * torch.rand(parameter.shape, generator=generator) - 1)
        moves.append(move.double())
        parameter.add_(move.to(parameter.dtype))
    return moves


def mean_drift(model: nn.Module, world_size: int, salt: int, size: float = 1e-3) -> list[torch.Tensor]:
    """What `drift` gives on average over the ranks."""
    copies = [nn.ParameterList([nn.Parameter(torch.zeros_like(p)) for p in model.parameters()]) for _ in range(world_size)]
    all_moves = [drift(copy, rank, salt, size) for rank, copy in enumerate(copies)]
    return [sum(moves[i] for moves in all_moves) / world_size for i in range(len(all_moves[0]))]


def states(local_sgd: LocalSGD) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Anchor and residual of each table."""
    assert local_sgd._rounds is not None
    anchors = local_sgd._rounds._averager.anchors
    assert anchors is not None
    return list(zip(anchors.anchor, anchors.residual, strict=True))


def everything(model: nn.Module) -> bytes:
    return b"".join(bits(tensor) for tensor in model.state_dict().values())


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


def _both_engines(rank: int, wire: str, dtype: torch.dtype) -> None:
    """Several rounds of odd tensors, and of numbers that few expect, with each engine: all they leave is the same."""
    results = []
    for backend in ("torch", "native"):
        model = OddModel((dtype,), 0)
        averager = Averager(dist.group.WORLD, wire, backend, BUCKET_MB)
        items = [Item(name, parameter) for name, parameter in model.named_parameters()]
        averager.bind(items)
        averager.agree()
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


def _elsewhere(rank: int, wire: str, moved: bool) -> list[bytes]:
    from localsgd_ext import anchors
    from localsgd_ext.backends import State

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


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the weights of ranks")
        yield
