"""One bucket of codes on several ranks, all of them in this process: the CUDA kernels, run on the CPU, beside the PyTorch
engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from localsgd_ext.backends.coded import CodedBucket, decode
from localsgd_ext.backends.interface import State
from localsgd_ext.collectives import Terms
from localsgd_ext.layout import Bucket, Rule, Segment, Table
from localsgd_ext.outer import Outer, OuterSGD
from localsgd_ext.wire import BLOCK, SCALE_BYTES, Chunks, Code, wide_dtype

from .tensors import values

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
PAIRS = [(dtype, code) for dtype in DTYPES for code in Code if code is not Code.FLOAT64 or dtype == torch.float64]
OUTERS: tuple[Outer | None, ...] = (
    None,
    OuterSGD(0.7),
    OuterSGD(1.0, 0.9),
    OuterSGD(0.7, 0.9, nesterov=True),
    torch.optim.AdamW,  # any callable: is never called here
)
GUARD = 0xA5
UNWRITTEN = 0xFF  # NaN in every float type


@dataclass(frozen=True)
class Case:
    """One bucket on `size` ranks: (elements, bytes past an aligned address) per tensor, how many of them are parameters."""

    dtype: torch.dtype
    code: Code
    size: int
    tensors: tuple[tuple[int, int], ...]
    parameters: int = 0
    absent: int = 0  # ranks that contribute nothing: the first ones in the first round, those behind them in the next
    outer: Outer | None = None
    keeps: bool = True  # what is dropped
    summed: bool = False  # only in a lossless code
    content: str = "normal"
    anchor: str = "normal"
    shift: int = 0  # elements by which anchor and residual lie past an aligned address
    seed: int = 0  # of the order in which blocks and threads run

    @property
    def numel(self) -> int:
        return sum(numel for numel, _ in self.tensors)

    @property
    def drift_numel(self) -> int:
        return sum(numel for numel, _ in self.tensors[: self.parameters])

    @property
    def chunks(self) -> Chunks:
        return Chunks.of(self.numel, self.code, self.size, self.summed)

    def contributes(self, rank: int, turn: int) -> bool:
        return (rank - turn) % self.size >= self.absent


CONTENTS = ("normal", "ties", "tiny", "huge", "zeros", "outlier", "odd", "nonfinite")


def content_of(kind: str, numel: int, dtype: torch.dtype, salt: int, rank: int) -> torch.Tensor:
    """What a tensor or an anchor may hold; each kind is hard in its own way."""
    normal = values((numel,), torch.float64, salt, rank)
    info, index = torch.finfo(dtype), torch.arange(numel) + salt
    if kind == "ties":  # the largest is 127 or 7, hence the scale 1
        limit = 127 if salt % 2 else 7
        normal = (normal * limit).round().clamp(-2 * limit, 2 * limit) / 2
        normal[::BLOCK] = limit
    elif kind == "tiny":
        normal *= max(info.tiny, 1e-40) * (8 if salt % 2 else 1e-2)
    elif kind == "huge":
        normal *= float(info.max) / 8
    elif kind == "zeros":
        normal = torch.where(index % 3 == 0, 0.0, -0.0).double()
    elif kind == "outlier":
        normal[numel // 2 :: 10 * BLOCK] = min(float(info.max), 1e38)
    elif kind in ("odd", "nonfinite"):
        special = [0.0, -0.0, info.tiny, -info.tiny / 4, 1e-40, 1.5, -2.0]
        if kind == "nonfinite":
            special = [
                torch.inf,
                -torch.inf,
                torch.nan,
                info.max,
                -info.max,
                3.4028235677973366e38,
                -1e300,
            ]  # two beyond float32
        step = 3 if kind == "odd" else 301
        picked = index[::step] - salt
        normal[picked] = torch.tensor(special, dtype=torch.float64)[(picked // step + salt + rank) % len(special)]
    return normal.to(dtype)


def guarded(nbytes: int, past: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes that lie `past` past an aligned address, and the same with guard bytes on both sides."""
    room = torch.full((nbytes + 192,), GUARD, dtype=torch.uint8)
    begin = -room.data_ptr() % 64 + 64 + past
    return room[begin : begin + nbytes].fill_(UNWRITTEN), room


class Memory:
    """All that a rank has, between guard bytes."""

    def __init__(self, case: Case, rank: int) -> None:
        self.rooms: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.flats = [self.new(numel, case.dtype, past) for numel, past in case.tensors]
        self.anchor, self.residual, self.momentum = (
            self.new(case.numel, wide_dtype(case.dtype), case.shift * wide_dtype(case.dtype).itemsize) for _ in range(3)
        )
        self.anchor.copy_(content_of(case.anchor, case.numel, case.dtype, 50, 0))
        if case.dtype.itemsize == 2:  # an anchor that has moved does not fit
            self.anchor.mul_(1 + values((case.numel,), torch.float32, 52, 0) * (torch.finfo(case.dtype).eps / 4))
        self.residual.copy_(content_of("odd", case.numel, torch.float32, 51, rank) / 1024)
        if isinstance(case.outer, OuterSGD):
            self.momentum.copy_(content_of("odd", case.numel, torch.float32, 53, 0))
        nbytes = case.chunks.count * case.chunks.nbytes
        self.staging = self.new(case.chunks.staging_bytes, torch.uint8, 0)
        if case.summed:
            self.mine = self.theirs = self.received = self.staging
            return
        first, second = self.staging[:nbytes], self.staging[nbytes:]
        self.mine, self.theirs = (second, first) if case.chunks.count == 1 and rank == 1 else (first, second)
        self.received = self.staging if case.chunks.count == 1 else second

    def state(self, case: Case) -> list[torch.Tensor | None]:
        """Anchor, residual and momentum, where the case has them."""
        moves = not (case.outer is None or (isinstance(case.outer, OuterSGD) and not case.outer.momentum))
        return [self.anchor, self.residual if case.keeps else None, self.momentum if moves else None]

    def new(self, numel: int, dtype: torch.dtype, past: int) -> torch.Tensor:
        inside, room = guarded(numel * dtype.itemsize, past)
        self.rooms.append((inside, room))
        return inside.view(dtype)

    def check_guards(self) -> None:
        for inside, room in self.rooms:
            begin = inside.data_ptr() - room.data_ptr()
            assert (room[:begin] == GUARD).all()
            assert (room[begin + len(inside) :] == GUARD).all()


class Group:
    """Stands for a process group: keeps what a rank asks of it until `move` is called."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self.asked: tuple[torch.Tensor, torch.Tensor] | None = None

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def all_to_all_single(self, output: torch.Tensor, input: torch.Tensor, *_: Any) -> None:
        assert self.asked is None
        self.asked = output, input

    alltoall_base = all_to_all_single

    def allreduce(self, tensors: Sequence[torch.Tensor], *_: Any) -> None:
        assert self.asked is None
        self.asked = tensors[0], tensors[0]


def move(case: Case, pairs: Sequence[tuple[torch.Tensor, torch.Tensor] | None]) -> None:
    """What an all-to-all, or an all-reduce, does to the (output, input) of each rank."""
    asked = [pair for pair in pairs if pair is not None]
    assert len(asked) == len(pairs)
    if case.summed:
        sums = [output.view(wide_dtype(case.dtype))[: case.numel] for output, _ in asked]
        total = torch.stack(sums).sum(0)
        for each in sums:
            each.copy_(total)
        return
    if len(asked) == 2:
        asked[0][0].copy_(asked[1][1])
        asked[1][0].copy_(asked[0][1])
        return
    for rank, (output, _) in enumerate(asked):
        for part, (_, input) in zip(output.chunk(len(asked)), asked, strict=True):
            part.copy_(input.chunk(len(asked))[rank])


class Emulated:
    """Drives the kernels as the native engine does."""

    def __init__(self, module: ModuleType, case: Case, memory: Memory, rank: int) -> None:
        segments = [(flat.data_ptr(), flat.numel()) for flat in memory.flats]
        name, code, chunks = str(case.dtype).removeprefix("torch."), list(Code).index(case.code), case.chunks
        outer = case.outer if isinstance(case.outer, OuterSGD) else OuterSGD()
        kind = 1 if outer is case.outer else 0 if case.outer is None else 2
        self.bucket = module.CodedBucket(
            segments, case.drift_numel, name, code, chunks.count, chunks.blocks, chunks.nbytes, chunks.summed, kind, outer.lr, outer.momentum,
            outer.nesterov,
        )  # fmt: skip
        self.anchor, self.residual, self.momentum = memory.state(case)
        self.case, self.memory, self.rank = case, memory, rank
        self.sums = torch.zeros(2, dtype=torch.float64)

    def start(self, terms: Terms) -> None:
        if self.case.summed:
            self.memory.mine.zero_()
            if terms.contributes:
                self.bucket.encode(True, terms.divisor, 0, 0, self.memory.mine.data_ptr())
            return
        pointers = address(self.anchor), address(self.residual), self.memory.mine.data_ptr()
        self.bucket.encode(terms.contributes, terms.divisor, *pointers)

    def advance(self, terms: Terms) -> None:
        memory, numel = self.memory, self.case.chunks.blocks * BLOCK
        own = None if self.residual is None else self.residual[self.rank * numel :][:numel]
        numel = min(numel, max(0, self.case.numel - self.rank * numel))
        received, mine = memory.received.data_ptr(), memory.mine.data_ptr()
        self.bucket.reduce(self.case.size, received, terms.divisor, address(own), numel, mine)
        first, *others = memory.mine.chunk(self.case.size)
        for other in others:
            other.copy_(first)

    def finish(self, terms: Terms, measure: bool) -> None:
        assert self.anchor is not None
        partials = torch.full((self.bucket.partials_numel + 2,), torch.nan, dtype=torch.float64)
        parts = self.case.size if self.case.chunks.count == 1 and not self.case.summed else 1
        divisor = terms.divisor if self.case.chunks.count == 1 else 1
        state = self.anchor.data_ptr(), address(self.momentum)
        sums = (self.sums.data_ptr(), partials.data_ptr()) if measure else (0, 0)
        self.bucket.land(parts, self.memory.received.data_ptr(), divisor, *state, *sums)
        assert partials[-2:].isnan().all()


def address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def reference(case: Case, memory: Memory, rank: int) -> CodedBucket:
    segments, offset = [], 0
    for index, (numel, _) in enumerate(case.tensors):
        segments.append(Segment(index, 0, offset, numel))
        offset += numel
    bucket = Bucket(case.numel, case.drift_numel, tuple(segments))
    table = Table(torch.device("cpu"), case.dtype, case.code, Rule.MEAN, (bucket,))
    state = State(memory.state(case), memory.state(case))
    return CodedBucket(table, bucket, memory.flats, memory.staging, case.chunks, state, case.outer, rank, case.size)


def assert_same(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bits, or NaN in both."""
    if got.is_floating_point():
        nan = expected.isnan()
        assert torch.equal(got.isnan(), nan)
        got, expected = got.masked_fill(nan, 0), expected.masked_fill(nan, 0)
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    assert torch.equal(got.contiguous().view(whole), expected.contiguous().view(whole))


def parts(case: Case, staging: torch.Tensor) -> list[torch.Tensor]:
    """Codes, scales and unused bytes of all chunks."""
    chunks = staging.view(-1, case.chunks.nbytes)
    begin = case.chunks.blocks * BLOCK * case.code.bits // 8
    end = begin + case.chunks.blocks * SCALE_BYTES * case.code.scaled
    if case.summed:  # nobody's is what lies behind the last element
        begin = end = case.numel * case.code.bits // 8
        chunks = chunks[:, :begin]
    dtype = torch.uint8 if case.code is Code.INT4 else getattr(torch, case.code.value)
    cut = (chunks[:, :begin].clone().view(dtype), chunks[:, begin:end].clone().view(torch.bfloat16), chunks[:, end:])
    return [part.clone() for part in cut]


def check_same(case: Case, memories: Sequence[tuple[Memory, Memory]], finished: bool = False) -> None:
    for got, expected in memories:
        if not (finished and case.summed):  # a sum may be divided in its place
            for one, other in zip(parts(case, got.staging), parts(case, expected.staging), strict=True):
                assert_same(one, other)
        for one, other in zip(got.state(case), expected.state(case), strict=True):
            if one is not None and other is not None:
                assert_same(one, other)
        for one, other in zip(got.flats, expected.flats, strict=True):
            assert_same(one, other)
        got.check_guards()


def progress(case: Case, received: torch.Tensor, divisor: int) -> torch.Tensor:
    """The mean progress of the bucket's parameters."""
    codes, scales, _ = parts(case, received)
    decoded = decode(case.code, codes.view(len(codes) * case.chunks.blocks, -1), scales.view(-1, 1))
    mean = decoded.double().view(2, -1).sum(0) / divisor if case.chunks.count == 1 else decoded.double().flatten()
    return mean[: case.drift_numel]


def check_rounds(module: ModuleType, case: Case, rounds: int = 2, measure: bool = True) -> torch.Tensor:
    """Averagings in a row by both engines, all memory compared after every pass. Gives the kernels' sums and the true ones."""
    module.seed(case.seed)
    memories = [(Memory(case, rank), Memory(case, rank)) for rank in range(case.size)]
    emulations = [Emulated(module, case, memory, rank) for rank, (memory, _) in enumerate(memories)]
    engines = [reference(case, memory, rank) for rank, (_, memory) in enumerate(memories)]
    divisor, true = case.size - case.absent, torch.zeros(2, dtype=torch.float64)
    for turn in range(rounds):
        terms = [Terms(case.contributes(rank, turn), divisor, 0) for rank in range(case.size)]
        for rank, pair in enumerate(memories):
            # Nobody looks at the tensors of a rank that does not contribute.
            train(case, pair, rank, turn if terms[rank].contributes else None)

        groups: list[Any] = [Group(rank, case.size) for rank in range(case.size)]
        for rank in range(case.size):
            emulations[rank].start(terms[rank])
            engines[rank].start(groups[rank], terms[rank])
        check_same(case, memories)
        move(case, [group.asked for group in groups])
        move(case, [(memory.theirs, memory.mine) for memory, _ in memories])

        if case.chunks.count > 1:
            groups = [Group(rank, case.size) for rank in range(case.size)]
            for rank in range(case.size):
                emulations[rank].advance(terms[rank])
                engines[rank].advance(groups[rank], terms[rank])
            check_same(case, memories)
            move(case, [group.asked for group in groups])
            move(case, [(memory.theirs, memory.mine) for memory, _ in memories])

        for rank, pair in enumerate(memories):
            if not terms[rank].contributes:
                train(case, pair, rank, turn)
        first = memories[0][0]
        local, begun = (torch.cat(each)[: case.drift_numel].double() for each in (first.flats, [first.anchor.to(case.dtype)]))
        if case.summed:
            mean = first.received.view(wide_dtype(case.dtype))[: case.drift_numel].double() / divisor
        else:
            mean = begun + progress(case, first.received, divisor)
        true += torch.stack([(local - mean).square().sum(), mean.square().sum()])
        for rank in range(case.size):
            emulations[rank].finish(terms[rank], measure and rank == 0)
            engines[rank].finish(groups[rank], terms[rank])
        check_same(case, memories, finished=True)
        for memory, _ in memories[1:]:
            assert_same(memory.anchor, first.anchor)
            assert_same(memory.momentum, first.momentum)
        if callable(case.outer):
            for memory in (each for pair in memories for each in pair):
                memory.anchor.sub_(memory.momentum, alpha=0.5)  # what an optimizer may do
    return torch.stack([emulations[0].sums, true])


def train(case: Case, memories: Sequence[Memory], rank: int, turn: int | None) -> None:
    """What the tensors of a rank become before an averaging; None: NaN."""
    sizes = [numel for numel, _ in case.tensors]
    for memory in memories:
        for salt, (flat, anchor) in enumerate(zip(memory.flats, memory.anchor.split(sizes), strict=True)):
            if turn is None:
                flat.fill_(torch.nan)
                continue
            # After the first time near to the anchor, so that the residual makes a difference.
            kind = case.content if turn == 0 else ("normal", "ties", "odd")[salt % 3]
            change = content_of(kind, flat.numel(), case.dtype, salt + 60 * turn, rank + 1)
            flat.copy_(change if turn == 0 else anchor.to(case.dtype) + change)
