"""The result of one averaging: against Accelerate's own helper at 2 ranks, against the float64 mean above."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel

from localsgd_ext import LocalSGD, LocalSGDError, average_parameters
from localsgd_ext.averager import Averager, Item
from localsgd_ext.groups import Groups
from localsgd_ext.wire import Mode

from .groups import LateGroup, failing_group
from .ranks import run_ranks
from .tensors import DTYPES, OddModel, apart, bits, values

pytestmark = pytest.mark.usefixtures("engine")

BUCKET_MB = 4096 / 2**20  # so small that every odd shape meets a bucket boundary


def _like_accelerate(rank: int, dtypes: tuple[torch.dtype, ...]) -> list[str]:
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD as AccelerateLocalSGD

    accelerator = Accelerator(cpu=True)
    ours, theirs = OddModel(dtypes, rank), OddModel(dtypes, rank)
    ours_ddp, theirs_ddp = DistributedDataParallel(ours), DistributedDataParallel(theirs)
    for model in (ours, theirs):  # DDP started both from rank 0's weights
        for parameter, own in zip(model.parameters(), OddModel(dtypes, rank).parameters(), strict=True):
            parameter.data.copy_(own)
    with AccelerateLocalSGD(accelerator, theirs_ddp, 1):
        pass
    with apart(LocalSGD(accelerator, ours_ddp, 1, bucket_mb=BUCKET_MB), ours):
        pass
    return [name for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True) if bits(a) != bits(b)]


@pytest.mark.parametrize("dtypes", [*[(dtype,) for dtype in DTYPES], DTYPES], ids=[*map(str, DTYPES), "mixed"])
def test_bit_identical_to_accelerate_at_2_ranks(dtypes: tuple[torch.dtype, ...]) -> None:
    assert run_ranks(_like_accelerate, 2, dtypes) == [[], []]


def _averaged(rank: int, dtypes: tuple[torch.dtype, ...], wire: str) -> dict[str, torch.Tensor]:
    model = OddModel(dtypes, rank)
    LocalSGD(None, model, 1, bucket_mb=BUCKET_MB, wire=wire).synchronize()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("world_size", [3, 4])
@pytest.mark.parametrize("wire", ["parameter", "float32"])
def test_close_to_the_float64_mean_and_equal_across_ranks(world_size: int, wire: str) -> None:
    dtypes = DTYPES if wire == "parameter" else tuple(d for d in DTYPES if d != torch.float64)
    results = run_ranks(_averaged, world_size, dtypes, wire)
    inputs = [dict(OddModel(dtypes, rank).named_parameters()) for rank in range(world_size)]
    for name, result in results[0].items():
        assert all(bits(other[name]) == bits(result) for other in results), f"{name} differs between ranks"
        wide = torch.complex128 if result.is_complex() else torch.float64
        stack = torch.stack([other[name].detach().to(wide) for other in inputs])
        if stack.is_complex():
            stack = torch.view_as_real(stack)
        got = torch.view_as_real(result.to(wide)) if result.is_complex() else result.to(wide)
        bound = world_size * torch.finfo(result.dtype).eps * stack.abs().mean(0)
        assert (got - stack.mean(0)).abs().le(bound).all(), name


def _float32_wire(rank: int) -> torch.Tensor:
    tensor = values((1000,), torch.bfloat16, 1, rank)
    average_parameters([tensor], wire="float32")
    return tensor


def test_a_float32_wire_rounds_16_bit_parameters_once() -> None:
    results = run_ranks(_float32_wire, 3)
    total = sum(values((1000,), torch.bfloat16, 1, rank).double() for rank in range(3))
    # Sums of three bfloat16 numbers are almost always exact in float32: one rounding remains.
    assert bits(results[0]) == bits((total / 3).float().bfloat16())


def _tiny(rank: int) -> list[int]:
    tensors = [values((1 + i % 5,), torch.float32, i, rank) for i in range(2000)]
    average_parameters(tensors)
    wrong = []
    for i, tensor in enumerate(tensors):
        mean = (values((1 + i % 5,), torch.float32, i, 0) + values((1 + i % 5,), torch.float32, i, 1)) / 2
        if bits(mean) != bits(tensor):
            wrong.append(i)
    return wrong


def test_two_thousand_tiny_tensors() -> None:
    assert run_ranks(_tiny, 2) == [[], []]


shapes = st.lists(
    st.one_of(st.integers(0, 4), st.integers(250, 260), st.integers(505, 520), st.integers(1500, 1600)), max_size=8
)
dtype_names = st.lists(st.sampled_from(["float32", "bfloat16", "float64"]), min_size=8, max_size=8)


def _every_boundary(rank: int) -> None:
    """Both ranks draw the same examples (derandomized), so that they average together inside one property test."""

    @settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @given(shapes, dtype_names, st.integers(1, 3))
    def check(sizes: list[int], names: list[str], blocks: int) -> None:
        dtypes = [getattr(torch, name) for name in names]
        tensors = [values((n,), d, i, rank) for i, (n, d) in enumerate(zip(sizes, dtypes, strict=False))]
        averager = Averager(dist.group.WORLD, "parameter", "auto", blocks * 1024 / 2**20)
        averager.average([Item(str(i), t) for i, t in enumerate(tensors)], step=0, round=1, interval=1)
        for i, tensor in enumerate(tensors):
            both = [values((sizes[i],), dtypes[i], i, r) for r in range(2)]
            assert bits(tensor) == bits((both[0] + both[1]) / 2), (i, sizes, names, blocks)

    check()


def test_buckets_that_cut_tensors_at_every_kind_of_boundary() -> None:
    run_ranks(_every_boundary, 2)


def _drift(rank: int, wire: str, dtype: torch.dtype) -> list[float]:
    tensors = [values((600,), dtype, i, rank) for i in range(5)]
    return [average_parameters(tensors, wire=wire).drift, average_parameters(tensors, wire=wire).drift]


@pytest.mark.parametrize(
    ("wire", "dtype"), [("parameter", torch.float32), ("parameter", torch.bfloat16), ("float32", torch.bfloat16)]
)
def test_drift_is_the_relative_distance_to_the_mean(wire: str, dtype: torch.dtype) -> None:
    results = run_ranks(_drift, 3, wire, dtype)
    x = torch.stack([torch.cat([values((600,), dtype, i, rank) for i in range(5)]).double() for rank in range(3)])
    expected = ((x - x.mean(0)).square().sum(1).mean().sqrt() / x.mean(0).norm()).item()
    assert results[0] == results[1] == results[2]
    assert results[0][0] == pytest.approx(expected, rel=1e-2 if dtype == torch.bfloat16 else 1e-5)
    assert results[0][1] < torch.finfo(dtype).eps * 2


def _report(rank: int, world_size: int) -> tuple[int, int]:
    report = average_parameters([torch.zeros(1200)])
    return report.wire_bytes, report.active_ranks


def test_wire_bytes_follow_the_ring_and_ranks_are_counted() -> None:
    assert run_ranks(_report, 2, 2) == [(4800, 2)] * 2
    assert run_ranks(_report, 3, 3) == [(6400, 3)] * 3


def _bad_input(rank: int) -> None:
    with pytest.raises(LocalSGDError, match=r"tensors\[1\].*int64"):
        average_parameters([torch.zeros(3), torch.zeros(3, dtype=torch.int64)])
    with pytest.raises(ValueError, match="'parameter'"):
        average_parameters([torch.zeros(3)], wire="float8")
    with pytest.raises(ValueError, match="'auto'"):
        average_parameters([torch.zeros(3)], backend="cuda")
    with pytest.raises(TypeError, match=r"tensors\[0\] is a float"):
        average_parameters([1.0])
    with pytest.raises(TypeError, match="got a str"):
        average_parameters([torch.zeros(3)], group="world")


def test_wrong_arguments_say_what_is_allowed() -> None:
    run_ranks(_bad_input, 2)


def test_without_a_process_group_nothing_happens() -> None:
    tensor = torch.arange(3.0)
    report = average_parameters([tensor])
    assert tensor.tolist() == [0, 1, 2]
    assert (report.active_ranks, report.wire_bytes) == (1, 0)


def _subgroup(rank: int) -> float:
    pair = dist.new_group([1, 2])
    tensor = torch.full((3,), float(rank))
    if rank == 0:
        with pytest.raises(LocalSGDError, match="rank 0 is not a member"):
            average_parameters([tensor], group=pair)
    else:
        average_parameters([tensor], group=pair)
    return tensor[0].item()


def test_a_process_group_averages_its_members_only() -> None:
    assert run_ranks(_subgroup, 3) == [0.0, 1.5, 1.5]


def _expanded(rank: int) -> list[float]:
    tensor = torch.full((1, 3), float(rank)).expand(4, 3)
    average_parameters([tensor])
    return tensor.flatten().tolist()


def test_an_expanded_tensor_is_averaged_where_its_memory_is() -> None:
    assert run_ranks(_expanded, 2) == [[0.5] * 12] * 2


def _gives_up_what_is_in_flight(rank: int) -> None:
    """Collectives that end after the failure write to memory that nothing else uses any more."""
    both = [values((8000,), torch.float32, 0, r) for r in range(2)]
    mean = (both[0] + both[1]) / 2
    tensor = both[rank].clone()
    group = LateGroup(fail_at=2)
    averager = Averager(group, "parameter", "auto", BUCKET_MB)
    items = [Item("x", tensor)]
    with pytest.raises((ConnectionError, RuntimeError), match="connection reset"):
        averager.average(items, step=0, round=1, interval=1)
    first = group.sent[0].numel()
    assert torch.equal(tensor, torch.cat([mean[:first], both[rank][first:]])), "the first bucket averaged, the others local"
    assert len(group.late) == 2, "as many as may travel beside the one that failed"
    assert not group.waited, "a collective that may never end is not waited for"

    def complete(buffer: torch.Tensor) -> None:
        before = tensor.clone()
        dist.all_reduce(buffer)
        assert bits(tensor) == bits(before)

    complete(group.late[0])
    averager.groups = Groups(dist.group.WORLD)
    averager.average(items, step=0, round=1, interval=1)
    buffers = {bucket.buffer.data_ptr() for bucket in averager.bindings[Mode.WIRE].buckets}
    assert buffers.isdisjoint(buffer.data_ptr() for buffer in group.sent), "no buffer is used again"
    complete(group.late[1])
    assert torch.equal(tensor, mean)
    late = [both[0][first * k : first * (k + 1)] + both[1][first * k : first * (k + 1)] for k in (2, 3)]
    assert all(map(torch.equal, group.late, late)), "nor written to by anything else"


def test_a_failure_gives_up_what_is_in_flight() -> None:
    run_ranks(_gives_up_what_is_in_flight, 2)


def _breaks_midway(rank: int, fail_at: int) -> None:
    shapes = [(64, 64), (7,), (900,)]  # 20 kB in 5 buckets
    tensors = [values(shape, torch.float32, i, rank) for i, shape in enumerate(shapes)]
    items = [Item(str(i), tensor) for i, tensor in enumerate(tensors)]
    averager = Averager(failing_group(fail_at), "parameter", "auto", BUCKET_MB)
    with pytest.raises((ConnectionError, RuntimeError), match="connection reset"):
        averager.average(items, step=0, round=1, interval=1)
    changed = 0
    for i, tensor in enumerate(tensors):
        both = [values(shapes[i], torch.float32, i, r) for r in range(2)]
        local, averaged = tensor == both[rank], tensor == (both[0] + both[1]) / 2
        assert (local | averaged).all(), "neither local nor averaged"
        changed += int((averaged & ~local).sum())
    assert (changed > 0) == (fail_at > 1)
    assert not averager.bindings, "no view of the tensors is kept after a failure"
    averager.groups = Groups(dist.group.WORLD)
    averager.average(items, step=0, round=1, interval=1)  # and it can average again


@pytest.mark.parametrize("fail_at", [1, 3, 5])
def test_a_failure_midway_leaves_local_or_averaged_values(fail_at: int) -> None:
    run_ranks(_breaks_midway, 2, fail_at)
