"""The engine's kernels on one NVIDIA GPU against a device-to-device copy of the same bytes, interleaved in one run.

    python -m benchmarks.gpu [--sets gpt2 resnet50 tiny] [--bucket-mb 4 8 16 32 64 128] [--rounds 15] [--json FILE]

Pack and apply move all buckets of a model through the ring of staging buffers, as an averaging does; "copy" moves as many bytes
in copies of one bucket each into the same ring, and "one copy" the whole model at once. GB/s count what is read and written:
pack and copy move every byte twice, apply (which also measures the drift) three times. Medians of CUDA events; what the caches
held is evicted before each measurement, and launches are queued up behind a kernel that idles, so that the host's own time does
not show.

A whole averaging is timed alone in an NCCL group (a collective of one rank moves nothing), so that what is left is the engine's
own cost. "host" is the time until the call returns, "all" the time until the GPU is through.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from localsgd_ext.averager import Averager
from localsgd_ext.items import Item
from localsgd_ext.replicas import resolve_group

from .record import machine, save
from .shapes import SETS

DEVICE = "cuda"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DIVISOR = 3
IDLE_CYCLES = 6_000_000
EVICT_BYTES = 256 * 2**20
TRAFFIC = {"copy": 2, "pack": 2, "apply": 3, "one copy": 2}
METHODS = {
    "native": "localsgd_ext, backend=native",
    "torch": "localsgd_ext, backend=torch",
    "loop": "one all-reduce per tensor, as Accelerate does",
}

Function = Callable[[], object]


def interleaved(functions: dict[str, Function], measure: Callable[[Function], Any], rounds: int) -> dict[str, list[Any]]:
    """Every function in turn, `rounds` times after two warm-ups."""
    measured: dict[str, list[Any]] = {name: [] for name in functions}
    for round in range(rounds + 2):
        for name, function in functions.items():
            value = measure(function)
            if round >= 2:
                measured[name].append(value)
    return measured


def gpu_seconds(evict: torch.Tensor) -> Callable[[Function], float]:
    """A measure of what function() takes on the GPU."""

    def measure(function: Function) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        evict.zero_()
        torch.cuda._sleep(IDLE_CYCLES)
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    return measure


def host_and_all_seconds(function: Function) -> tuple[float, float]:
    torch.cuda.synchronize()
    begun = time.perf_counter()
    result = function()
    host = time.perf_counter() - begun
    torch.cuda.synchronize()
    both = host, time.perf_counter() - begun
    if hasattr(result, "result"):
        result.result()
    return both


def model(name: str, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype, device=DEVICE) for shape in SETS[name]()]


def items(tensors: Sequence[torch.Tensor]) -> list[Item]:
    return [Item(f"tensors[{index}]", tensor) for index, tensor in enumerate(tensors)]


def averager(backend: str, bucket_mb: float | None) -> Averager:
    group = resolve_group(None)
    assert group is not None
    return Averager(group, "parameter", backend, bucket_mb)


def bound(tensors: Sequence[torch.Tensor], bucket_mb: float) -> list[Any]:
    """The native engine's buckets, tied to the tensors and to a ring of staging buffers exactly as for an averaging."""
    native = averager("native", bucket_mb)
    return list(native.bind(items(tensors)).buckets)


def kernels(
    tensors: Sequence[torch.Tensor], bucket_mb: float, measure: Callable[[Function], float], rounds: int
) -> dict[str, Any]:
    """Seconds and GB/s of pack, apply and the copies."""
    buckets = bound(tensors, bucket_mb)
    whole = torch.cat([tensor.reshape(-1) for tensor in tensors])
    target = torch.empty_like(whole)
    pieces = whole.split([bucket.buffer.numel() for bucket in buckets])

    def copy() -> None:
        for bucket, piece in zip(buckets, pieces, strict=True):
            bucket.buffer.copy_(piece)

    def pack() -> None:
        for bucket in buckets:
            bucket.pack()

    def apply() -> None:
        for bucket in buckets:
            bucket.apply(DIVISOR)

    functions: dict[str, Function] = {"copy": copy, "pack": pack, "apply": apply, "one copy": lambda: target.copy_(whole)}
    for bucket in buckets:
        bucket.buffer.fill_(1)
    row: dict[str, Any] = {"bucket_mb": bucket_mb, "buckets": len(buckets)}
    for name, seconds in interleaved(functions, measure, rounds).items():
        median = statistics.median(seconds)
        row[name] = {
            "us": median * 1e6,
            "min_us": min(seconds) * 1e6,
            "max_us": max(seconds) * 1e6,
            "gb_per_s": TRAFFIC[name] * whole.nbytes / median / 1e9,
        }
    return row


def averaging(tensors: Sequence[torch.Tensor], method: str) -> Function:
    """The function that averages the tensors once by `method`."""
    if method == "loop":
        clones = [tensor.clone() for tensor in tensors]

        def loop() -> None:
            dist.barrier()
            for index, tensor in enumerate(clones):
                mean = tensor.clone()
                dist.all_reduce(mean)
                mean /= dist.get_world_size()
                clones[index] = mean

        return loop
    engine, own = averager(method, None), items([tensor.clone() for tensor in tensors])
    return lambda: engine.average(own, step=0, round=1, interval=0)


def print_kernels(row: dict[str, Any]) -> None:
    copy = row["copy"]["gb_per_s"]
    figures = "".join(f"{row[name]['gb_per_s']:>10.0f}{row[name]['gb_per_s'] / copy:>7.2f}" for name in ("pack", "apply"))
    print(
        f"  {row['bucket_mb']:>6g} MiB{row['buckets']:>9}{row['one copy']['gb_per_s']:>10.0f}{copy:>10.0f}{figures}", flush=True
    )


def run(options: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(0), "cuda": torch.version.cuda, **machine(), "rounds": options.rounds,
        "divisor": DIVISOR, "sets": {},
    }  # fmt: skip
    print(f"{result['gpu']}, torch {result['torch']}, CUDA {result['cuda']}, medians of {options.rounds} rounds")
    measure = gpu_seconds(torch.empty(EVICT_BYTES, dtype=torch.uint8, device=DEVICE))
    for name in options.sets:
        for dtype_name, dtype in DTYPES.items():
            tensors = model(name, dtype)
            megabytes = sum(tensor.nbytes for tensor in tensors) / 1e6
            print(f"\n{name}, {dtype_name}: {megabytes:.1f} MB in {len(tensors)} tensors")
            print(f"  {'GB/s':>10}{'buckets':>9}{'one copy':>10}{'copy':>10}{'pack':>10}{'/copy':>7}{'apply':>10}{'/copy':>7}")
            rows = []
            for bucket_mb in options.bucket_mb:
                rows.append(kernels(tensors, bucket_mb, measure, options.rounds))
                print_kernels(rows[-1])
            whole = {}
            functions = {method: averaging(tensors, method) for method in METHODS}
            print(f"  {'a whole averaging, ms':46}{'host':>10}{'all':>10}")
            for method, pairs in interleaved(functions, host_and_all_seconds, options.rounds).items():
                host, until_done = (statistics.median(times) * 1e3 for times in zip(*pairs, strict=True))
                whole[method] = {"host_ms": host, "all_ms": until_done}
                print(f"  {METHODS[method]:46}{host:>10.3f}{until_done:>10.3f}", flush=True)
            result["sets"][f"{name}/{dtype_name}"] = {"megabytes": megabytes, "kernels": rows, "averaging": whole}
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", default=["gpt2", "resnet50", "tiny"], choices=list(SETS))
    parser.add_argument("--bucket-mb", nargs="+", type=float, default=[4, 8, 16, 32, 64, 128])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.gpu needs an NVIDIA GPU: torch.cuda.is_available() is False", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "nccl", init_method=f"file://{folder}/store", rank=0, world_size=1, device_id=torch.device(DEVICE, 0)
        )
        result = run(options)
        dist.destroy_process_group()
    if options.json:
        save(options.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
