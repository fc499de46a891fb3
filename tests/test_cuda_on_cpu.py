"""The CUDA kernels, compiled by g++ and run on the CPU (see cuda_on_cpu/cuda_on_cpu.h), against the reference engine."""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from localsgd_ext.backends.reference import ReferenceBackend
from localsgd_ext.layout import Bucket, Rule, Segment, Table

from .cuda_on_cpu import COMPILER, PYTHON_INCLUDE, load
from .tensors import bits, values

SAME = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
PAIRS = (*zip(SAME, SAME, strict=True), (torch.float16, torch.float32), (torch.bfloat16, torch.float32))
PIECE_BYTES = 4096
GUARD = 0xA5
UNWRITTEN = 0xFF  # NaN in every float type

pytestmark = [
    pytest.mark.skipif(platform.system() != "Linux" or COMPILER is None, reason="needs g++ on Linux"),
    pytest.mark.skipif(not (PYTHON_INCLUDE / "Python.h").exists(), reason="needs Python's headers"),
]


@pytest.fixture(scope="session")
def emulated(request: pytest.FixtureRequest) -> ModuleType:
    cache = getattr(request.config, "cache", None)
    module = load(Path(cache.mkdir("cuda_on_cpu") if cache else tempfile.mkdtemp()))
    assert module.PIECE_BYTES == PIECE_BYTES
    return module


@dataclass(frozen=True)
class Case:
    """One bucket: (elements, bytes past an aligned address) per tensor, how many of them are parameters, where staging
    begins."""

    dtype: torch.dtype
    wire: torch.dtype
    tensors: tuple[tuple[int, int], ...]
    parameters: int = 0
    staging_shift: int = 0
    seed: int = 0  # of the order in which blocks and threads run

    @property
    def numel(self) -> int:
        return sum(numel for numel, _ in self.tensors)

    @property
    def drift_numel(self) -> int:
        return sum(numel for numel, _ in self.tensors[: self.parameters])


def guarded(nbytes: int) -> torch.Tensor:
    """Guard bytes, aligned to a cache line as on a GPU: the order of the drift's sums depends on addresses modulo that."""
    room = torch.full((nbytes + 128,), GUARD, dtype=torch.uint8)
    return room[-room.data_ptr() % 128 :][:nbytes]


class Memory:
    """Tensors and staging of one rank, between guard bytes."""

    def __init__(self, case: Case, contents: Sequence[torch.Tensor]) -> None:
        self.arena = guarded(sum(numel * case.dtype.itemsize + 64 for numel, _ in case.tensors) + 64)
        self.flats = []
        end = 16
        for (numel, past), content in zip(case.tensors, contents, strict=True):
            begin = (end + 31) // 16 * 16 + past
            end = begin + numel * case.dtype.itemsize
            flat = self.arena[begin:end].view(case.dtype)
            flat.copy_(content)
            self.flats.append(flat)
        nbytes = case.numel * case.wire.itemsize
        self.staging = guarded(nbytes + 64)
        self.bytes = self.staging[16 + case.staging_shift :][:nbytes]
        self.bytes.fill_(UNWRITTEN)
        self.buffer = self.bytes.view(case.wire)


class Emulated:
    """Drives the kernels as the CUDA engine does."""

    def __init__(self, module: ModuleType, case: Case, memory: Memory) -> None:
        self.memory = memory
        segments = [(flat.data_ptr(), flat.numel()) for flat in memory.flats]
        names = [str(dtype).removeprefix("torch.") for dtype in (case.dtype, case.wire)]
        module.seed(case.seed)
        self.bucket = module.Bucket(segments, case.drift_numel, *names)
        self.sums = torch.zeros(2, dtype=torch.float64)

    def pack(self) -> None:
        self.bucket.pack(self.memory.bytes.data_ptr())

    def apply(self, divisor: int, measure: bool) -> None:
        partials = torch.full((self.bucket.partials_numel + 2,), torch.nan, dtype=torch.float64)
        self.bucket.apply(
            self.memory.bytes.data_ptr(), divisor, self.sums.data_ptr() if measure else 0, partials.data_ptr() if measure else 0
        )
        assert partials[-2:].isnan().all()


def reference(case: Case, memory: Memory, rule: Rule) -> Any:
    segments, offset = [], 0
    for index, (numel, _) in enumerate(case.tensors):
        segments.append(Segment(index, 0, offset, numel))
        offset += numel
    bucket = Bucket(case.numel, case.drift_numel, tuple(segments))
    table = Table(torch.device("cpu"), case.dtype, case.wire, rule, (bucket,))
    scratch = torch.empty(case.numel * 8, dtype=torch.uint8)
    return ReferenceBackend().bind(table, bucket, memory.flats, memory.bytes, scratch)


def packed(
    module: ModuleType, case: Case, contents: Sequence[torch.Tensor], rule: Rule
) -> tuple[Memory, Memory, Any, Emulated]:
    """The reference's memory and the kernels', both packed into the same bytes, and the two engines."""
    expected, got = Memory(case, contents), Memory(case, contents)
    engine, emulation = reference(case, expected, rule), Emulated(module, case, got)
    engine.pack()
    emulation.pack()
    assert bits(got.staging) == bits(expected.staging)
    return expected, got, engine, emulation


def contents_of(case: Case, odd: bool) -> list[torch.Tensor]:
    """Normally distributed; `odd` mixes in zeros of both signs, subnormal, huge and infinite numbers."""
    info = torch.finfo(case.dtype)
    special = torch.tensor([0.0, -0.0, info.tiny / 4, -info.tiny, info.max, -info.max, torch.inf], dtype=case.dtype)
    contents = [values((numel,), case.dtype, salt, 0) for salt, (numel, _) in enumerate(case.tensors)]
    if odd:
        for salt, content in enumerate(contents):
            picked = torch.arange(content.numel())[salt % 3 :: 3]
            content[picked] = special[(picked + salt) % len(special)]
    return contents


def check_round(module: ModuleType, case: Case, divisor: int, measure: bool, odd: bool, repeated: bool) -> torch.Tensor:
    """One averaging by both, every byte compared. Gives the kernels' sums and the true ones."""
    contents = contents_of(case, odd)
    expected, got, engine, emulation = packed(module, case, contents, Rule.MEAN)
    if repeated:  # all ranks alike
        expected.buffer.mul_(divisor)
    else:
        for rank in range(1, divisor):
            expected.buffer.add_(values((case.numel,), case.wire, 7, rank))
    got.buffer.copy_(expected.buffer)
    summed = got.staging.clone()
    engine.apply(divisor)
    emulation.apply(divisor, measure)
    assert bits(got.arena) == bits(expected.arena)
    assert bits(got.staging) == bits(summed)  # only read
    local = torch.cat(contents)[: case.drift_numel].double()
    mean = expected.buffer[: case.drift_numel].double()
    true = torch.stack([(local - mean).square().sum(), mean.square().sum()])
    return torch.stack([emulation.sums, true])


def sizes(itemsize: int) -> st.SearchStrategy[int]:
    piece = PIECE_BYTES // itemsize
    corners = [piece, 2 * piece, 8 * piece, 128 // itemsize, 512 // itemsize, 2048 // itemsize, 16 // itemsize]
    return st.integers(0, 40) | st.builds(lambda corner, by: max(0, corner + by), st.sampled_from(corners), st.integers(-2, 2))


@st.composite
def cases(draw: st.DrawFn, pairs: Sequence[tuple[torch.dtype, torch.dtype]] = PAIRS) -> Case:
    dtype, wire = draw(st.sampled_from(pairs))
    past = st.integers(0, 16 // dtype.itemsize - 1).map(lambda elements: elements * dtype.itemsize)
    tensors = draw(
        st.lists(st.tuples(sizes(dtype.itemsize), past), min_size=1, max_size=6).filter(lambda t: any(n for n, _ in t))
    )
    parameters = draw(st.integers(0, len(tensors)))
    shift = draw(st.just(0) | st.integers(0, 16 // wire.itemsize - 1)) * wire.itemsize
    return Case(dtype, wire, tuple(tensors), parameters, shift, draw(st.integers(0, 3)))


DIVISORS = st.sampled_from([1, 2, 3, 4, 7])


@settings(max_examples=200, deadline=None)
@given(case=cases(), divisor=DIVISORS, measure=st.booleans(), odd=st.booleans(), repeated=st.booleans())
def test_same_bits_as_the_reference(
    emulated: ModuleType, case: Case, divisor: int, measure: bool, odd: bool, repeated: bool
) -> None:
    check_round(emulated, case, divisor, measure, odd, repeated)


@pytest.mark.parametrize(("dtype", "wire"), PAIRS)
def test_every_alignment(emulated: ModuleType, dtype: torch.dtype, wire: torch.dtype) -> None:
    """Every offset of the tensor against every offset in the bucket, at every short length and across the piece boundary."""
    step = dtype.itemsize
    for shift in range(0, 16, wire.itemsize):
        for numel in (*range(1, 41, 3), PIECE_BYTES // step - 1, PIECE_BYTES // step + 40):
            tensors = tuple((numel, past) for past in range(0, 16, step))
            check_round(emulated, Case(dtype, wire, tensors, 1, shift), 3, measure=numel % 2 == 0, odd=True, repeated=False)


@settings(max_examples=60, deadline=None)
@given(
    case=cases(pairs=[(dtype, dtype) for dtype in (torch.uint8, *SAME)]),
    salt=st.integers(0, 1000),
)
def test_copies_bytes_unchanged(emulated: ModuleType, case: Case, salt: int) -> None:
    """Any bytes, NaNs of every kind included: what a broadcast carries."""
    generator = torch.Generator().manual_seed(salt)

    def random(count: int) -> torch.Tensor:
        return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)

    contents = [random(numel * case.dtype.itemsize).view(case.dtype) for numel, _ in case.tensors]
    case = replace(case, parameters=0)
    expected, got, engine, emulation = packed(emulated, case, contents, Rule.FOLLOW)
    received = random(case.numel * case.wire.itemsize)
    expected.bytes.copy_(received)
    got.bytes.copy_(received)
    engine.apply(1)
    emulation.apply(1, measure=False)
    assert bits(got.arena) == bits(expected.arena)


@settings(max_examples=60, deadline=None)
@given(case=cases(), divisor=DIVISORS)
@example(case=Case(torch.bfloat16, torch.float32, ((200_001, 2), (5_000, 0)), 1), divisor=3)
def test_drift_is_close_and_always_the_same(emulated: ModuleType, case: Case, divisor: int) -> None:
    got, true = check_round(emulated, case, divisor, measure=True, odd=False, repeated=False)
    torch.testing.assert_close(got, true, rtol=1e-5, atol=0)
    for seed in (case.seed, case.seed + 1):
        again, _ = check_round(emulated, replace(case, seed=seed), divisor, measure=True, odd=False, repeated=False)
        assert bits(again) == bits(got)


def test_drift_adds_to_the_sums(emulated: ModuleType) -> None:
    case = Case(torch.float32, torch.float32, ((3000, 0), (17, 4)), 2)
    memory = Memory(case, contents_of(case, odd=False))
    emulation = Emulated(emulated, case, memory)
    emulation.pack()
    emulation.apply(1, measure=True)
    once = emulation.sums.clone()
    emulation.apply(1, measure=True)
    assert bits(emulation.sums) == bits(once + once)


@pytest.mark.parametrize(("dtype", "wire"), PAIRS)
def test_many_tiny_tensors(emulated: ModuleType, dtype: torch.dtype, wire: torch.dtype) -> None:
    tensors = tuple((1 + index * 7 % 23, 0) for index in range(2000))
    check_round(emulated, Case(dtype, wire, tensors, 1500), 3, measure=True, odd=False, repeated=False)


@pytest.mark.parametrize(("dtype", "wire"), PAIRS)
def test_one_huge_tensor_next_to_a_small_one(emulated: ModuleType, dtype: torch.dtype, wire: torch.dtype) -> None:
    tensors = ((5, 0), (500_003, 0))
    check_round(emulated, Case(dtype, wire, tensors, 2, seed=1), 7, measure=True, odd=False, repeated=True)


def test_an_unknown_pair_is_refused(emulated: ModuleType) -> None:
    for dtype, wire in ((torch.float64, torch.float32), (torch.uint8, torch.uint8)):
        case = Case(dtype, wire, ((10, 0),))
        emulation = Emulated(emulated, case, Memory(case, [torch.arange(10)]))
        with pytest.raises(RuntimeError, match=r"no averaging kernel for (Double|Byte) tensors on a (Float|Byte) wire"):
            emulation.apply(2, measure=False)


class TestTheEmulationItself:
    """That it can fail: kernels with mistakes, from module.cpp."""

    given = tuple(range(100, 164))

    @pytest.mark.parametrize("seed", range(5))
    def test_barrier(self, emulated: ModuleType, seed: int) -> None:
        emulated.seed(seed)
        assert emulated.run_toy("reverse", self.given) == list(self.given[::-1])
        assert emulated.run_toy("reverse without barrier", self.given) != list(self.given[::-1])

    @pytest.mark.parametrize("seed", range(5))
    def test_exited_threads_are_not_waited_for(self, emulated: ModuleType, seed: int) -> None:
        emulated.seed(seed)
        result = emulated.run_toy("early exit", self.given)
        # The last even lane of a warp gets its own value back.
        assert result[::2] == [self.given[i + 2 if i % 32 < 30 else i] for i in range(0, 64, 2)]
        assert set(result[1::2]) == {-1}

    def test_mismatched_barriers_are_an_error(self, emulated: ModuleType) -> None:
        for name in ("split barrier", "absent lane"):
            with pytest.raises(RuntimeError, match=r"mismatched barrier.*module\.cpp:\d+ and at .*module\.cpp:\d+"):
                emulated.run_toy(name, self.given)

    def test_misaligned_vectors_are_an_error(self, emulated: ModuleType) -> None:
        with pytest.raises(RuntimeError, match="misaligned access of 16 bytes"):
            emulated.run_toy("misaligned", self.given)
