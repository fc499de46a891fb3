"""The layout is pure arithmetic: every element of every tensor lies in exactly one place, whatever the sizes."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from localsgd_ext.layout import ALIGN, Rule, TensorSpec, fragment_ends, is_dense, plan

CPU = torch.device("cpu")
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])
# Sizes around the bucket boundaries matter more than large ones.
sizes = st.one_of(st.integers(0, 5), st.integers(250, 262), st.integers(500, 1100))


@st.composite
def specs(draw: st.DrawFn) -> list[TensorSpec]:
    counts = draw(st.lists(st.tuples(sizes, dtypes, st.sampled_from(Rule), st.booleans()), max_size=12))
    return [
        TensorSpec(n, dtype, torch.uint8 if rule is Rule.FOLLOW else dtype, CPU, rule, is_parameter, 10_000 * (i + 1))
        for i, (n, dtype, rule, is_parameter) in enumerate(counts)
    ]


@given(specs(), st.integers(1, 9000))
def test_every_element_has_exactly_one_place(tensors: list[TensorSpec], bucket_bytes: int) -> None:
    tables = plan(tensors, bucket_bytes)
    placed: dict[int, list[tuple[int, int]]] = {}
    for table in tables:
        for bucket in table.buckets:
            offset = 0
            for segment in bucket.segments:
                spec = tensors[segment.tensor]
                assert (spec.device, spec.dtype, spec.wire, spec.rule) == (table.device, table.dtype, table.wire, table.rule)
                assert segment.offset == offset, "segments follow each other without a gap"
                assert segment.numel > 0
                offset += segment.numel
                placed.setdefault(segment.tensor, []).append((segment.start, segment.start + segment.numel))
            assert offset == bucket.numel
    for index, spec in enumerate(tensors):
        pieces = sorted(placed.get(index, []))
        assert [a for a, _ in pieces] == [0, *(b for _, b in pieces)][: len(pieces)], "pieces join up"
        assert (pieces[-1][1] if pieces else 0) == spec.numel


@given(specs(), st.integers(1, 9000), st.integers(1, 9))
def test_fragments_are_equal_and_in_buckets_of_their_own(tensors: list[TensorSpec], bucket_bytes: int, fragments: int) -> None:
    for table, whole in zip(plan(tensors, bucket_bytes, fragments=fragments), plan(tensors, bucket_bytes), strict=True):
        assert table.numel == whole.numel
        numbers = [bucket.fragment for bucket in table.buckets]
        assert numbers == sorted(numbers)
        sizes = [sum(bucket.numel for bucket in table.buckets if bucket.fragment == f) for f in range(fragments)]
        assert list(itertools.accumulate(sizes)) == fragment_ends(table.numel, fragments)
        assert all(abs(size - table.numel / fragments) < 2 * ALIGN for size in sizes)
        pieces = [(s.tensor, s.start, s.numel) for bucket in table.buckets for s in bucket.segments]
        order = [(s.tensor, s.start + i) for bucket in whole.buckets for s in bucket.segments for i in range(s.numel)]
        assert [(t, start + i) for t, start, n in pieces for i in range(n)] == order


@given(specs(), st.integers(1, 9000))
def test_buckets_are_bounded_even_and_aligned(tensors: list[TensorSpec], bucket_bytes: int) -> None:
    for table in plan(tensors, bucket_bytes):
        counts = [bucket.numel for bucket in table.buckets]
        assert max(counts) <= max(ALIGN, bucket_bytes // table.wire.itemsize)
        assert all(count == counts[0] for count in counts[:-1])
        assert counts[0] % ALIGN == 0 or len(counts) == 1
        assert counts[0] - counts[-1] < ALIGN * len(counts), "the last bucket is no straggler of a few elements"


@given(specs(), st.integers(1, 9000))
def test_drift_covers_the_parameters_and_only_them(tensors: list[TensorSpec], bucket_bytes: int) -> None:
    for table in plan(tensors, bucket_bytes):
        for bucket in table.buckets:
            for segment in bucket.segments:
                inside = segment.offset < bucket.drift_numel
                assert inside == tensors[segment.tensor].is_parameter
                assert not inside or segment.offset + segment.numel <= bucket.drift_numel


def test_tied_tensors_are_laid_out_once() -> None:
    one = TensorSpec(12, torch.float32, torch.float32, CPU, Rule.MEAN, True, 4096)
    two = TensorSpec(12, torch.float32, torch.float32, CPU, Rule.MEAN, True, 4096)
    (table,) = plan([one, two], 1 << 20)
    assert [segment.tensor for bucket in table.buckets for segment in bucket.segments] == [0]


def test_tensors_that_do_not_fit_the_rest_of_a_bucket_are_not_dropped() -> None:
    # sizes 6 and 6 with room for 10, in blocks of ALIGN elements
    tensors = [
        TensorSpec(6 * ALIGN, torch.float32, torch.float32, CPU, Rule.MEAN, True, address)
        for name, address in (("a", 4096), ("b", 1 << 20))
    ]
    (table,) = plan(tensors, 10 * ALIGN * 4)
    assert table.numel == 12 * ALIGN
    assert len(table.buckets) == 2


@given(st.lists(st.integers(1, 4), min_size=0, max_size=4), st.randoms())
def test_dense_in_any_order_of_dimensions(shape: list[int], random: object) -> None:
    order = list(range(len(shape)))
    random.shuffle(order)  # type: ignore[attr-defined]
    tensor = torch.empty(shape).permute(order)
    assert is_dense(tensor.shape, tensor.stride())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(4, 6)[:, :3],
        torch.empty(4, 6)[::2],
        torch.empty(3, 1).expand(3, 4),
        torch.empty(8).as_strided((3, 3), (2, 1)),
    ],
)
def test_gaps_and_overlap_are_not_dense(tensor: torch.Tensor) -> None:
    assert not is_dense(tensor.shape, tensor.stride())


def test_tables_come_in_the_order_of_their_first_tensor() -> None:
    order = [torch.bfloat16, torch.float32, torch.bfloat16, torch.float64, torch.float32]
    tensors = [TensorSpec(3, d, d, CPU, Rule.MEAN, True, 100 * (i + 1)) for i, d in enumerate(order)]
    assert [table.dtype for table in plan(tensors, 1024)] == [
        k for k, _ in itertools.groupby(sorted(set(order), key=order.index))
    ]
