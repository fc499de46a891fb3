"""What training costs between ranks, in time and memory, by arithmetic alone; needs no torch, so that `localsgd-ext plan`
answers at once.

With N values in parameters of b bits, n ranks, a link of B bytes/s in each direction for each rank, a latency a, and t seconds
of computing a step:

    sent(w)      = 2 (n - 1) / n * N w / 8            bytes a rank sends in a ring all-reduce, or an exchange of codes, of w
    bits per value moving(s, h) = max(s / (0.9 B), K h a / 3) + h a  K buckets, 3 of them under way, with h hops each: 2 (n - 1)
    in Gloo's ring, 2 log2(n) in NCCL's
                                                      trees, 2 for codes (1 at two ranks)
    averaging    = handshake + moving + c N           handshake: a + 0.2 ms; c: the passes over memory, on CPUs 0.9 ns a value,
    1.5 ns for codes ours         = t + F max(0, averaging(N / F) - o t) / H      H local steps, F fragments, o steps of overlap
    DDP          = max(t, t / 3 + moving)             gradients travel in the backward pass, which is two thirds of a step
    Accelerate   = t + (2 a log2(n) + T h a + sent / (0.9 B) + c' N) / H     a barrier, then one all-reduce for each of T
    tensors; c': 3.4 ns on CPUs

Ring all-reduce: Patarasuk and Yuan 2009, JPDC 69(2). 0.9, 0.2 ms and c are what benchmarks/results holds of Gloo over TCP on
one desktop core (wires-2-hosts, averaging-2-ranks, handshake); `localsgd-ext bench` measures yours, and what it measured takes
the place of `averaging` and `moving`. Codes have a 16 bit scale for 256 values, where they have one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

BITS = {
    "float64": 64.0,
    "float32": 32.0,
    "bfloat16": 16.0,
    "float16": 16 + 16 / 256,
    "int8": 8 + 16 / 256,
    "int4": 4 + 16 / 256,
}
"""Of a value on each wire, where it carries differences."""

DTYPES = {"float64": 64, "float32": 32, "bfloat16": 16, "float16": 16}

EFFICIENCY = 0.9
HANDSHAKE = 0.2e-3
UNDER_WAY = 3
VALUE_SECONDS = {"cpu": 0.9e-9, "cuda": 0.02e-9}
THEIR_SECONDS = {"cpu": 3.4e-9, "cuda": 0.04e-9}
CODE_SECONDS = {"cpu": 1.5e-9, "cuda": 0.04e-9}
BUCKET_BYTES = {"cpu": 4 * 2**20, "cuda": 32 * 2**20}
CODE_BUCKET_BYTES = {"cpu": 2**19, "cuda": 32 * 2**20}
DDP_BUCKET_BYTES = 25 * 2**20

Line = tuple[float, float]
"""Seconds at no bytes (or values), and seconds for each."""


@dataclass(frozen=True)
class Job:
    """values: in the trained parameters. dtype: theirs. tensors: in how many. step_seconds: of one local step, without any
    communication. device: "cpu" or "cuda"."""

    values: float
    ranks: int
    step_seconds: float
    dtype: str = "float32"
    tensors: int = 150
    device: str = "cpu"


@dataclass(frozen=True)
class Link:
    """bytes_per_second: in each direction, of each rank. latency: seconds for a message one way. averaging, by wire, and
    all_reduce: measured on it, by values and by bytes, where they were."""

    bytes_per_second: float
    latency: float
    averaging: Mapping[str, Line] = field(default_factory=dict)
    all_reduce: Line | None = None


@dataclass(frozen=True)
class Setting:
    """Of LocalSGD."""

    steps: int
    wire: str = "parameter"
    overlap_steps: int = 0
    fragments: int = 1
    outer: bool = False

    @property
    def is_possible(self) -> bool:
        """Whether averagings in the background arrive before the next begins."""
        fits = self.overlap_steps < self.steps and self.overlap_steps * self.fragments <= self.steps
        return self.fragments <= self.steps and (fits or not self.overlap_steps)


def carries_values(wire: str, dtype: str) -> bool:
    """Whether it holds the dtype exactly, so that values travel and no differences."""
    return wire in ("parameter", dtype) or (wire == "float32" and DTYPES[dtype] == 16)


def bits(wire: str, dtype: str) -> float:
    """That one value takes on this wire, for parameters of this dtype; scales included."""
    return DTYPES[dtype if wire == "parameter" else wire] if carries_values(wire, dtype) else BITS[wire]


def sent_bytes(values: float, bits_each: float, ranks: int) -> float:
    """That each of so many ranks sends to average so many values of `bits_each` bits."""
    return 2 * (ranks - 1) / ranks * values * bits_each / 8


def hops(job: Job) -> int:
    """One after the other, of one all-reduce between the job's ranks."""
    return 2 * (job.ranks - 1 if job.device == "cpu" else math.ceil(math.log2(job.ranks)))


def code_bucket_bytes(job: Job) -> int:
    """Of all ranks' parts together."""
    return CODE_BUCKET_BYTES[job.device] * (job.ranks if job.device == "cpu" and job.ranks > 2 else 1)


def moving_seconds(sent: float, buckets: int, steps: int, link: Link) -> float:
    """See `moving` above; steps: h there."""
    return max(sent / (EFFICIENCY * link.bytes_per_second), buckets * steps * link.latency / UNDER_WAY) + steps * link.latency


def averaging_seconds(job: Job, link: Link, wire: str, values: float | None = None) -> float:
    """Of one averaging of so many values (default: all), from handshake to the end."""
    values = job.values if values is None else values
    if job.ranks == 1:
        return 0.0
    if wire in link.averaging:
        return _on(link.averaging[wire], values)
    sent = sent_bytes(values, bits(wire, job.dtype), job.ranks)
    if carries_values(wire, job.dtype):
        steps, size, each = hops(job), BUCKET_BYTES[job.device], VALUE_SECONDS[job.device]
    else:
        steps, size, each = (1 if job.ranks == 2 else 2), code_bucket_bytes(job), CODE_SECONDS[job.device]
    buckets = math.ceil(values * bits(wire, job.dtype) / 8 / size)
    return link.latency + HANDSHAKE + moving_seconds(sent, buckets, steps, link) + each * values


def ours_seconds(job: Job, link: Link, setting: Setting) -> float:
    """Of one step with LocalSGD, the averagings' share included. The setting must be possible (`Setting.is_possible`)."""
    averaging = averaging_seconds(job, link, setting.wire, job.values / setting.fragments)
    exposed = max(0.0, averaging - setting.overlap_steps * job.step_seconds)
    return job.step_seconds + setting.fragments * exposed / setting.steps


def ddp_seconds(job: Job, link: Link) -> float:
    """Of one step with DDP, whose gradients are of the parameters' dtype."""
    if job.ranks == 1:
        return job.step_seconds
    nbytes = job.values * DTYPES[job.dtype] / 8
    if link.all_reduce is not None:
        moving = _on(link.all_reduce, nbytes)
    else:
        sent = sent_bytes(job.values, DTYPES[job.dtype], job.ranks)
        moving = moving_seconds(sent, math.ceil(nbytes / DDP_BUCKET_BYTES), hops(job), link)
    return max(job.step_seconds, job.step_seconds / 3 + moving)


def accelerate_seconds(job: Job, link: Link, steps: int) -> float:
    """Of a step with its LocalSGD, which averages every so many."""
    if job.ranks == 1:
        return job.step_seconds
    if link.all_reduce is not None:
        base, each = link.all_reduce
        moving = base * job.tensors + each * job.values * DTYPES[job.dtype] / 8
    else:
        sent = sent_bytes(job.values, DTYPES[job.dtype], job.ranks)
        moving = job.tensors * hops(job) * link.latency + sent / (EFFICIENCY * link.bytes_per_second)
    barrier = 2 * link.latency * math.log2(job.ranks)
    return job.step_seconds + (barrier + moving + THEIR_SECONDS[job.device] * job.values) / steps


def share(step_seconds: float, seconds: float) -> float:
    """Of communication in a step that would take `step_seconds` without it."""
    return 1 - step_seconds / seconds


def smallest_steps(job: Job, link: Link, setting: Setting, overhead: float) -> int | None:
    """The smallest H for which communication takes at most this share (0 to 1) of the time, all else as in `setting`; None
    beyond 2^20."""
    averaging = averaging_seconds(job, link, setting.wire, job.values / setting.fragments)
    exposed = setting.fragments * max(0.0, averaging - setting.overlap_steps * job.step_seconds)
    needed = math.ceil(exposed * (1 - overhead) / (overhead * job.step_seconds) - 1e-9)
    steps = max(1, needed, setting.fragments, setting.overlap_steps + 1 if setting.overlap_steps else 1)
    steps = max(steps, setting.overlap_steps * setting.fragments)
    return steps if steps <= 2**20 else None


def memory_bytes(job: Job, setting: Setting) -> float:
    """Beside the model and its optimizer, on each rank: staging buffers, the last average and what is still to be sent, outer
    momentum, and copies for averagings in the background."""
    is_lossy = not carries_values(setting.wire, job.dtype)
    wide = 8 if job.dtype == "float64" else 4
    kept = wide * (is_lossy or setting.outer) + wide * is_lossy + wide * setting.outer
    copies = 2 / setting.fragments * DTYPES[job.dtype] / 8 if setting.overlap_steps else 0
    size = 2 * code_bucket_bytes(job) if is_lossy else BUCKET_BYTES[job.device]
    return (kept + copies) * job.values + (UNDER_WAY + 1) * min(size, job.values * DTYPES[job.dtype] / 8)


def line(sizes: Sequence[float], seconds: Sequence[float]) -> Line:
    """Through two measurements; never below 0 at no bytes. Where the larger took no longer, in proportion to it: noise, which
    is not to make any size free."""
    (small, large), (less, more) = sizes, seconds
    if more <= less:
        return 0.0, more / large
    each = min((more - less) / (large - small), more / large)
    return max(0.0, less - each * small), each


def _on(measured: Line, size: float) -> float:
    return measured[0] + measured[1] * size
