"""The engine on a real GPU: `pytest tests/test_gpu.py` (or `-m gpu`). One GPU is enough, and a minute once the engine is built.

Results are compared bit for bit with the reference engine on the same CUDA tensors. Without a GPU all of it is skipped.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from localsgd_ext import LocalSGD
from localsgd_ext.averager import Averager, Item
from localsgd_ext.backends import pick
from localsgd_ext.backends.reference import ReferenceBackend
from localsgd_ext.collectives import Terms
from localsgd_ext.layout import Rule, TensorSpec, plan
from localsgd_ext.wire import Mode

from . import ranks
from .tensors import DTYPES, OddModel, values

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: torch.cuda.is_available() is False; CUDA was not tried"),
]

DEVICE = "cuda"
BUCKET_MB = 4096 / 2**20  # so small that every odd shape meets a bucket boundary
SAME = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
PAIRS = (*zip(SAME, SAME, strict=True), (torch.float16, torch.float32), (torch.bfloat16, torch.float32))
SIZES = {
    "odd": (1, 3, 17, 256, 1000, 5, 40_000, 2049, 1, 70_001, 31),
    "tiny": tuple(1 + index * 7 % 23 for index in range(2000)),
    "huge": (5, 3_000_017),
}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(*(t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


def real64(tensor: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().double()


def odd_model(dtypes: tuple[torch.dtype, ...], rank: int) -> nn.Module:
    """OddModel on the GPU with all its strides; Module.to would close the gaps of the slices."""
    model = OddModel(dtypes, rank)
    for name, parameter in list(model.named_parameters()):
        moved = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=DEVICE)
        setattr(model, name, nn.Parameter(moved.copy_(parameter.detach())))
    return model


class Memory:
    """One-dimensional tensors at odd addresses in one arena, so that a write past an end is seen too."""

    def __init__(self, dtype: torch.dtype, sizes: Sequence[int], salt: int = 0) -> None:
        self.arena = values((sum(sizes) + 3 * len(sizes) + 3,), dtype, salt, 0).to(DEVICE)
        self.flats, end = [], 0
        for index, size in enumerate(sizes):
            begin = end + 1 + index % 3
            end = begin + size
            self.flats.append(self.arena[begin:end])

    def bind(self, engine: Any, wire: torch.dtype, parameters: int, bucket_bytes: int, rule: Rule = Rule.MEAN) -> list[Any]:
        """The buckets, each with a staging buffer of its own."""
        specs = [
            TensorSpec(flat.numel(), flat.dtype, wire, flat.device, rule, i < parameters, flat.data_ptr())
            for i, flat in enumerate(self.flats)
        ]
        (table,) = plan(specs, bucket_bytes)
        scratch = torch.empty(max(bucket.numel for bucket in table.buckets) * 8, dtype=torch.uint8, device=DEVICE)
        staging = [torch.empty(bucket.numel * 8, dtype=torch.uint8, device=DEVICE) for bucket in table.buckets]
        return [engine.bind(table, b, self.flats, s, scratch) for b, s in zip(table.buckets, staging, strict=True)]


def averaging(tensors: Sequence[torch.Tensor], backend: str, bucket_mb: float) -> tuple[Averager, Callable[[], Any]]:
    averager = Averager(dist.group.WORLD, "parameter", backend, bucket_mb)
    items = [Item(str(i), tensor) for i, tensor in enumerate(tensors)]
    return averager, lambda: averager.average(items, step=0, round=1, interval=1)


@pytest.fixture(scope="module")
def engine(native_binary: Path) -> Any:
    return pick("native", {DEVICE})


@pytest.fixture(scope="module")
def nccl(native_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """This process alone in an NCCL group: the mean of one rank is itself."""
    store = tmp_path_factory.mktemp("nccl") / "store"
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1, device_id=torch.device(DEVICE, 0))
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("dtype", "wire"), PAIRS)
def test_pack_and_apply_give_the_bits_of_the_reference(engine: Any, dtype: torch.dtype, wire: torch.dtype, sizes: str) -> None:
    parameters = len(SIZES[sizes]) * 2 // 3 + 1
    for divisor in (1, 2, 3):
        got, expected = (Memory(dtype, SIZES[sizes], divisor) for _ in range(2))
        buckets = got.bind(engine, wire, parameters, 2**18)
        references = expected.bind(ReferenceBackend(), wire, parameters, 2**18)
        local = torch.cat(got.flats[:parameters]).double()
        means, sums = [], torch.zeros(2, dtype=torch.float64)
        for ours, theirs in zip(buckets, references, strict=True):
            ours.pack()
            theirs.pack()
            assert same_bits(ours.buffer, theirs.buffer)
            for rank in range(1, divisor):
                theirs.buffer.add_(values((ours.buffer.numel(),), wire, 7, rank).to(DEVICE))
            ours.buffer.copy_(theirs.buffer)
            theirs.apply(divisor)
            sums += torch.tensor([float(value) for value in ours.apply(divisor)], dtype=torch.float64)
            means.append(theirs.buffer.double())
        assert same_bits(got.arena, expected.arena)
        mean = torch.cat(means)[: local.numel()]
        true = torch.stack([(local - mean).square().sum(), mean.square().sum()]).cpu()
        torch.testing.assert_close(sums, true, rtol=1e-5, atol=0)


def test_bytes_that_follow_rank_0_are_copied_unchanged(engine: Any) -> None:
    got, expected = (Memory(torch.bfloat16, SIZES["odd"]) for _ in range(2))
    got.flats = [flat.view(torch.uint8)[1:] for flat in got.flats]
    for bucket in got.bind(engine, torch.uint8, 0, 2**14, Rule.FOLLOW):
        bucket.pack()
        bucket.buffer.bitwise_not_()
        bucket.apply(1)
    for flat in expected.flats:
        flat.view(torch.uint8)[1:].bitwise_not_()
    assert same_bits(got.arena, expected.arena)


def test_a_bucket_of_more_than_two_thousand_million_elements(engine: Any) -> None:
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("NOT RUN: needs 40 GiB of free GPU memory")
    memory, numel = Memory(torch.bfloat16, (1,)), 2**31 + 5
    memory.arena = torch.empty(numel + 1, dtype=torch.bfloat16, device=DEVICE).normal_()
    memory.flats, before = [memory.arena[1:]], memory.arena.clone()
    (bucket,) = memory.bind(engine, torch.bfloat16, 1, 2**33)
    bucket.pack()
    assert torch.equal(bucket.buffer, before[1:])
    bucket.buffer.mul_(2)
    memory.arena[1:].zero_()
    assert [float(value) for value in bucket.apply(2)] == pytest.approx([numel, numel], rel=1e-2)
    assert torch.equal(memory.arena, before)


ENGINES = (("native", "native"), ("native", "torch"), ("torch", "torch"))
CASES = [(engines, *wire) for engines in ENGINES for wire in (("parameter", DTYPES), ("float32", DTYPES[:3]))]


def _on_one_gpu(rank: int) -> list[tuple[dict[str, torch.Tensor], float, str]]:
    results = []
    for engines, wire, dtypes in CASES:
        model = odd_model(dtypes, rank)
        local_sgd = LocalSGD(None, model, 1, bucket_mb=BUCKET_MB, wire=wire, backend=engines[rank], nonfinite="ignore")
        report: Any = local_sgd.synchronize()
        results.append(({name: p.detach().cpu() for name, p in model.named_parameters()}, report.drift, report.backend))
    return results


def test_two_processes_on_one_gpu_over_gloo(native_binary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_context", multiprocessing.get_context("spawn"))
    results = ranks.run_ranks(_on_one_gpu, 2, limit=120.0)
    for (engines, wire, dtypes), (mine, drift, *used), (theirs, *others) in zip(CASES, *results, strict=True):
        assert (*used, *others) == (engines[0], pytest.approx(drift, rel=1e-5), engines[1])
        inputs = [dict(OddModel(dtypes, rank).named_parameters()) for rank in range(2)]
        sums = torch.zeros(2, dtype=torch.float64)
        for name, got in mine.items():
            assert same_bits(got, theirs[name]), f"{name} differs between ranks: {engines}, wire={wire}"
            stack = torch.stack([real64(other[name]) for other in inputs])
            mean, bound = stack.mean(0), 2 * torch.finfo(got.dtype).eps * stack.abs().mean(0)
            assert (real64(got) - mean).abs().le(bound).all(), (name, engines, wire)
            sums += torch.stack([(stack - mean).square().sum() / 2, mean.square().sum()])
        assert drift == pytest.approx((sums[0] / sums[1]).sqrt().item(), rel=1e-2)


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("dtypes", [*[(dtype,) for dtype in DTYPES], DTYPES], ids=[*map(str, DTYPES), "mixed"])
def test_alone_over_nccl_nothing_changes(dtypes: tuple[torch.dtype, ...], backend: str) -> None:
    tensors = list(odd_model(dtypes, 0).parameters())
    before = [tensor.detach().clone() for tensor in tensors]
    _, average = averaging(tensors, backend, BUCKET_MB)
    reports = [average().result(), average().result()]
    assert [(report.backend, report.drift) for report in reports] == [(backend, 0.0)] * 2
    assert all(map(same_bits, tensors, before))


def coded(backend: str, wire: str, state_device: str | None, dtype: torch.dtype, rank: int) -> list[torch.Tensor]:
    """Three rounds of odd tensors in codes; gives all that they leave."""
    model = odd_model((dtype,), 0)
    averager = Averager(
        dist.group.WORLD, wire, backend, BUCKET_MB, None, None if state_device is None else torch.device(state_device)
    )
    items = [Item(name, parameter) for name, parameter in model.named_parameters()]
    averager.bind(items)
    averager.agree()
    for salt in range(3):
        with torch.no_grad():
            for index, parameter in enumerate(model.parameters()):
                parameter.add_(values(tuple(parameter.shape), dtype, 100 * salt + index, rank).to(DEVICE), alpha=1e-3)
        averager.average(items, step=0, round=1, interval=1).result()
    assert averager.bindings[Mode.WIRE].engine.name == backend
    torch.cuda.synchronize()
    anchors = averager.anchors
    assert anchors is not None
    return [*(p.detach() for p in model.parameters()), *anchors.anchor, *anchors.residual]


CODES = [(wire, dtype) for wire in ("bfloat16", "float16", "int8", "int4") for dtype in SAME if f"torch.{wire}" != str(dtype)]


@pytest.mark.usefixtures("nccl", "native_binary")
@pytest.mark.parametrize("state_device", [None, "cpu"])
@pytest.mark.parametrize(("wire", "dtype"), CODES)
def test_codes_over_nccl_leave_the_bits_of_the_reference(wire: str, dtype: torch.dtype, state_device: str | None) -> None:
    ours, theirs = (coded(backend, wire, state_device, dtype, 0) for backend in ("native", "torch"))
    assert all(map(same_bits, ours, theirs))


def _coded_over_gloo(rank: int) -> None:
    for wire, dtype in CODES:
        ours, theirs = (coded(backend, wire, None, dtype, rank) for backend in ("native", "torch"))
        assert all(map(same_bits, ours, theirs)), (wire, dtype)
        mixed = coded(("native", "torch")[rank % 2], wire, None, dtype, rank)
        assert all(map(same_bits, mixed, ours)), (wire, dtype)


@pytest.mark.usefixtures("native_binary")
@pytest.mark.parametrize("world_size", [2, 3])
def test_codes_between_ranks_leave_the_bits_of_the_reference(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_context", multiprocessing.get_context("spawn"))
    ranks.run_ranks(_coded_over_gloo, world_size, limit=120.0)


def _in_the_background(rank: int) -> None:
    from localsgd_ext import DiLoCo, LocalSGD

    ends = []
    for device in ("cpu", "cuda"):
        model = nn.ParameterList([nn.Parameter(torch.ones(n, device=device)) for n in (900, 7, 30_000)])
        with LocalSGD(None, model, 6, wire="int8", outer=DiLoCo(), overlap_steps=2, fragments=3) as local_sgd:
            for step in range(15):
                with torch.no_grad():
                    for parameter in model:
                        generator = torch.Generator().manual_seed(1000 * step + parameter.numel() + rank)
                        parameter.add_(torch.rand(parameter.shape, generator=generator).to(device), alpha=2.0**-10)
                if device == "cuda":
                    torch.cuda._sleep(10_000_000)  # the host runs ahead of the device
                local_sgd.step()
        ends.append([parameter.detach().cpu() for parameter in model])
    assert all(map(same_bits, *ends))


@pytest.mark.usefixtures("native_binary")
def test_averaging_in_the_background_leaves_the_bits_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_context", multiprocessing.get_context("spawn"))
    ranks.run_ranks(_in_the_background, 2, limit=120.0)


def _stepped_on_the_host(rank: int) -> None:
    """Anchors beside the host's memory, moved by an optimizer there: it waits for its gradient."""
    from localsgd_ext import LocalSGD

    ends = []
    for device in ("cpu", "cuda"):
        model = nn.ParameterList([nn.Parameter(torch.ones(n, device=device)) for n in (900, 2_000_000)])
        outer = partial(torch.optim.SGD, lr=0.5, momentum=0.5)
        with LocalSGD(None, model, 2, wire="int8", outer=outer, state_device="cpu") as local_sgd:
            for step in range(8):
                with torch.no_grad():
                    for parameter in model:
                        parameter.add_((rank + 1) * 2.0**-10 * (step + 1))
                if device == "cuda":
                    torch.cuda._sleep(20_000_000)  # the host runs ahead of the device
                local_sgd.step()
        ends.append([parameter.detach().cpu() for parameter in model])
    assert all(map(same_bits, *ends))


@pytest.mark.usefixtures("native_binary")
def test_an_optimizer_on_the_host_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_context", multiprocessing.get_context("spawn"))
    monkeypatch.setenv("LOCALSGD_EXT_CHECK", "1")
    ranks.run_ranks(_stepped_on_the_host, 2, limit=120.0)


def test_work_goes_to_the_current_stream(engine: Any) -> None:
    memory = Memory(torch.float32, SIZES["odd"])
    (bucket,) = memory.bind(engine, torch.float32, len(SIZES["odd"]), 2**30)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)
        memory.arena.fill_(2)
        bucket.pack()
        bucket.buffer.add_(7)
        bucket.apply(3)
    torch.cuda.synchronize()
    assert all(flat.eq(3).all() for flat in memory.flats)


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_the_host_never_waits_for_the_gpu(backend: str) -> None:
    _, average = averaging(list(odd_model(DTYPES, 0).parameters()), backend, BUCKET_MB)
    average().result()
    torch.cuda.synchronize()
    busy = torch.cuda.Event()
    torch.cuda._sleep(3_000_000_000)  # longer than the host needs to queue an averaging; a wait of any kind would see its end
    busy.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = average()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not busy.query()
    assert pending.result().drift == 0.0


def on_the_device(function: Callable[[], object]) -> list[str]:
    """The names of all kernels and copies that run for function()."""
    function()
    # Only a profiler that does not even see a kernel of torch's is no judge: one that sees none of ours has found a fault.
    if not profiled(lambda: torch.zeros(1, device=DEVICE)):
        pytest.skip("NOT RUN: the profiler sees no kernels on this machine")
    names = profiled(function)
    assert names, "nothing ran on the device"
    return names


def profiled(function: Callable[[], object]) -> list[str]:
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        function()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.parametrize(("dtype", "wire"), PAIRS)
def test_launches_per_bucket(engine: Any, dtype: torch.dtype, wire: torch.dtype) -> None:
    for parameters, launches in ((len(SIZES["tiny"]), 2), (0, 1)):  # measuring takes one more
        (bucket,) = Memory(dtype, SIZES["tiny"]).bind(engine, wire, parameters, 2**30)
        names = on_the_device(lambda bucket=bucket: (bucket.pack(), bucket.apply(3)))
        assert sum("localsgd" in name for name in names) == 1 + launches >= len(names) - 1, names  # torch may zero the sums


@pytest.mark.usefixtures("nccl")
def test_launches_per_averaging() -> None:
    averager, average = averaging(Memory(torch.float32, SIZES["odd"]).flats, "native", 0.0625)
    names = on_the_device(average)
    assert len(averager.bindings[Mode.WIRE].buckets) > 3
    assert sum("localsgd" in name for name in names) == 3 * len(averager.bindings[Mode.WIRE].buckets), names
    assert not [name for name in names if "HtoD" in name or "DtoH" in name]


def captured(function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog thread asks events meanwhile
        result = function()
    return graph, result


@pytest.mark.parametrize(("dtype", "wire"), PAIRS)
def test_pack_and_apply_in_a_cuda_graph(engine: Any, dtype: torch.dtype, wire: torch.dtype) -> None:
    memory = Memory(dtype, SIZES["odd"])
    (bucket,) = memory.bind(engine, wire, len(memory.flats), 2**30)
    other = values((bucket.buffer.numel(),), wire, 7, 1).to(DEVICE)

    def average(bucket: Any) -> Any:
        bucket.pack()
        bucket.buffer.add_(other)
        return bucket.apply(3)

    graph, sums = captured(lambda: average(bucket))
    for salt in (1, 2):
        expected = Memory(dtype, SIZES["odd"], salt)
        memory.arena.copy_(expected.arena)
        (reference,) = expected.bind(ReferenceBackend(), wire, len(SIZES["odd"]), 2**30)
        true = average(reference)
        graph.replay()
        assert same_bits(memory.arena, expected.arena)
        assert [float(value) for value in sums] == pytest.approx([float(value) for value in true], rel=1e-3)


@pytest.mark.usefixtures("nccl")
def test_an_averaging_over_nccl_in_a_cuda_graph() -> None:  # the last one: a capture that fails may leave NCCL unusable
    tensors = Memory(torch.float32, SIZES["odd"]).flats
    averager, average = averaging(tensors, "native", 0.0625)
    average().result()
    binding = averager.bindings[Mode.WIRE]
    graph, sums = captured(
        lambda: binding.engine.average(binding.buckets, dist.group.WORLD, Terms(True, dist.get_world_size(), 0))
    )
    for scale in (2.0, 3.0):
        before = [tensor.mul_(scale).clone() for tensor in tensors]
        graph.replay()
        assert all(map(same_bits, tensors, before))
        assert sums.tolist() == pytest.approx([0.0, sum(t.double().square().sum().item() for t in tensors)], rel=1e-5)
