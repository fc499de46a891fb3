"""The CUDA kernels of coded buckets, compiled by g++ and run on the CPU, against the PyTorch engine: whole exchanges, byte by
byte.

All ranks live in this process; what the collectives would move is copied between them.
"""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from localsgd_ext.collectives import Terms
from localsgd_ext.outer import Outer
from localsgd_ext.wire import BLOCK, WIRES, Code, lossless, travels_as

from .coded_cases import CONTENTS, DTYPES, OUTERS, PAIRS, Case, Emulated, Memory, check_rounds
from .cuda_on_cpu import COMPILER, PYTHON_INCLUDE, load
from .tensors import bits

pytestmark = [
    pytest.mark.skipif(platform.system() != "Linux" or COMPILER is None, reason="needs g++ on Linux"),
    pytest.mark.skipif(not (PYTHON_INCLUDE / "Python.h").exists(), reason="needs Python's headers"),
]


@pytest.fixture(scope="session")
def emulated(request: pytest.FixtureRequest) -> ModuleType:
    cache = getattr(request.config, "cache", None)
    return load(Path(cache.mkdir("cuda_on_cpu") if cache else tempfile.mkdtemp()))


def test_all_codes_are_tested() -> None:
    assert len(PAIRS) == 21
    assert {(dtype, travels_as(dtype, wire, True, True)) for dtype in DTYPES for wire in WIRES} <= set(PAIRS)


@st.composite
def buckets(draw: st.DrawFn, itemsize: int) -> tuple[tuple[int, int], ...]:
    corners = st.builds(lambda blocks, by: BLOCK * blocks + by, st.sampled_from([1, 1, 1, 2, 3, 8]), st.integers(-1, 1))
    past = st.integers(0, 16 // itemsize - 1).map(lambda elements: elements * itemsize)
    return tuple(draw(st.lists(st.tuples(corners | st.integers(1, 40), past), min_size=1, max_size=6)))


@st.composite
def cases(draw: st.DrawFn, contents: Sequence[str] = CONTENTS) -> Case:
    dtype, code = draw(st.sampled_from(PAIRS))
    size = draw(st.sampled_from([2, 2, 3, 3, 4]))
    tensors = draw(buckets(dtype.itemsize))
    return Case(
        dtype,
        code,
        size,
        tensors,
        parameters=draw(st.integers(0, len(tensors))),
        absent=draw(st.sampled_from([0, 0, 1, size - 1])),
        outer=draw(st.sampled_from(OUTERS)),
        keeps=draw(st.sampled_from([True, True, False])),
        summed=code is lossless(dtype) and draw(st.booleans()),
        content=draw(st.sampled_from(contents)),
        anchor=draw(st.sampled_from(contents)),
        shift=draw(st.integers(0, 3)),
        seed=draw(st.integers(0, 3)),
    )


@settings(max_examples=110, deadline=None)
@given(cases(), st.integers(2, 3), st.booleans())
def test_same_bits_as_the_reference(emulated: ModuleType, case: Case, rounds: int, measure: bool) -> None:
    check_rounds(emulated, case, rounds, measure)


@pytest.mark.parametrize("outer", OUTERS, ids=("mean", "sgd", "momentum", "nesterov", "callable"))
def test_every_outer_in_every_code(emulated: ModuleType, outer: Outer | None) -> None:
    """Whatever is drawn above."""
    for number, (dtype, code) in enumerate(PAIRS):
        for size in (2, 3):
            case = Case(dtype, code, size, ((300, 0), (1, 0), (700, 8)), 2, absent=(number + size) % 2, outer=outer)
            check_rounds(emulated, case, rounds=3)
            check_rounds(emulated, replace(case, keeps=False), rounds=1)


def test_every_outer_where_values_are_summed(emulated: ModuleType) -> None:
    """Likewise."""
    for dtype in DTYPES:
        for number, outer in enumerate(OUTERS):
            for size in (2, 3):
                tensors = ((300, 0), (1, 0), (700, 8))
                case = Case(dtype, lossless(dtype), size, tensors, 2, absent=(number + size) % 2, outer=outer, summed=True)
                check_rounds(emulated, case, rounds=3)


@pytest.mark.parametrize("content", CONTENTS)
def test_every_content(emulated: ModuleType, content: str) -> None:
    """Likewise."""
    for number, (dtype, code) in enumerate(PAIRS):
        tensors = ((300, 0), (1, 0), (255, dtype.itemsize), (257, 0), (256, 0), (700, 8))
        for size, anchor in ((2, content), (3, content), (3, "normal")):
            outer = OUTERS[(number + size) % len(OUTERS)]
            case = Case(dtype, code, size, tensors, 4, content=content, anchor=anchor, outer=outer)
            check_rounds(emulated, case)
            if code is lossless(dtype):
                check_rounds(emulated, replace(case, summed=True))


def test_many_ranks_some_without_elements(emulated: ModuleType) -> None:
    for number, (dtype, code) in enumerate(PAIRS):
        for size, numel in ((3, 1), (3, 256), (4, 5 * 256 + 1), (7, 2000)):
            outer = OUTERS[(number + size) % len(OUTERS)]
            check_rounds(emulated, Case(dtype, code, size, ((numel, 0),), 1, absent=size // 3, outer=outer))


@pytest.mark.parametrize("size", [2, 3])
def test_many_tiny_tensors_and_a_huge_one(emulated: ModuleType, size: int) -> None:
    for dtype, code in zip(DTYPES, (Code.INT4, Code.FLOAT64, Code.FLOAT32, Code.FLOAT16), strict=True):
        tiny = tuple((1 + index * 7 % 5, index * dtype.itemsize % 16) for index in range(600))
        check_rounds(emulated, Case(dtype, code, size, (*tiny, (5_003, 0), *tiny[:50]), 300, seed=1))


@settings(max_examples=30, deadline=None)
@given(cases(contents=("normal", "ties")))
@example(Case(torch.bfloat16, Code.INT8, 2, ((100_001, 2), (5_000, 0)), 1))
def test_drift_is_close_and_always_the_same(emulated: ModuleType, case: Case) -> None:
    got, true = check_rounds(emulated, case)
    torch.testing.assert_close(got, true, rtol=1e-5, atol=0)
    again, _ = check_rounds(emulated, replace(case, seed=case.seed + 1))
    assert bits(again) == bits(got)


def test_other_codes_are_refused(emulated: ModuleType) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        case = Case(dtype, Code.FLOAT64, 2, ((10, 0),))
        emulation = Emulated(emulated, case, Memory(case, 0), 0)
        for act in (emulation.start, emulation.advance, partial(emulation.finish, measure=True)):
            with pytest.raises(RuntimeError, match=r"(Float|Half|BFloat16) tensors do not travel in code 0"):
                act(Terms(True, 2, 0))
