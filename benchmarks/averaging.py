"""One averaging against its rivals and against one raw all-reduce of the same bytes, interleaved in one run.

    python -m benchmarks.averaging [--ranks 2] [--rounds 7] [--sets gpt2 resnet50 tiny] [--bucket-mb 8] [--json FILE]

Processes on this machine over Gloo on the loopback interface. Times are medians over the rounds of the slowest rank; "x raw" is the ratio to the
raw all-reduce. Peak extra memory is the growth of the resident set during one averaging in a fresh process. Error is the
largest absolute difference to the mean computed in float64.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from .shapes import SETS, Model, values

METHODS = ("raw", "native", "reference", "torch", "accelerate")
TITLES = {
    "raw": "one raw all-reduce",
    "native": "localsgd_ext, backend=native",
    "reference": "localsgd_ext, backend=torch",
    "torch": "torch average_parameters",
    "accelerate": "accelerate LocalSGD",
}


def make(method: str, model: Model, bucket_mb: float | None) -> Callable[[], object]:
    """The function that averages `model` once by `method`."""
    if method == "raw":
        flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        return lambda: dist.all_reduce(flat)
    if method in ("native", "reference"):
        from localsgd_ext import LocalSGD

        backend = "native" if method == "native" else "torch"
        local_sgd = LocalSGD(None, model, 1, backend=backend, nonfinite="ignore", bucket_mb=bucket_mb)
        local_sgd.__enter__()  # as in training: outside the block nothing is kept between averagings
        return local_sgd.synchronize
    if method == "torch":
        from torch.distributed.algorithms.model_averaging.utils import average_parameters

        group = dist.group.WORLD
        return lambda: average_parameters(iter(list(model.parameters())), group)
    if method == "accelerate":
        from accelerate import Accelerator
        from accelerate.local_sgd import LocalSGD as AccelerateLocalSGD

        return AccelerateLocalSGD(Accelerator(cpu=True), model, 1)._sync_and_avg_model_params
    raise ValueError(method)


def start(rank: int, ranks: int, folder: str) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT="29500",
        ACCELERATE_USE_CPU="true",
    )  # fmt: skip
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}", rank=rank, world_size=ranks, timeout=timedelta(minutes=5))


def time_all(rank: int, ranks: int, folder: str, name: str, rounds: int, bucket_mb: float | None, out: Any) -> None:
    """Every method on a model of its own, in turn, `rounds` times after one warm-up."""
    start(rank, ranks, folder)
    shapes = SETS[name]()
    averagers = {}
    for method in METHODS:
        averagers[method] = make(method, Model(shapes, rank), bucket_mb)
    seconds: dict[str, list[float]] = {method: [] for method in METHODS}
    for _ in range(rounds + 1):
        for method, average in averagers.items():
            dist.barrier()
            begun = time.perf_counter()
            average()
            slowest = torch.tensor(time.perf_counter() - begun)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            seconds[method].append(slowest.item())
    if rank == 0:
        out.put({method: values[1:] for method, values in seconds.items()})
    dist.barrier()
    dist.destroy_process_group()


def measure_memory(rank: int, ranks: int, folder: str, name: str, method: str, bucket_mb: float | None, out: Any) -> None:
    """Peak extra resident memory and largest error of the first averaging of a fresh process."""
    start(rank, ranks, folder)
    shapes = SETS[name]()
    model = Model(shapes, rank)
    average = make(method, model, bucket_mb)
    dist.all_reduce(torch.zeros(1))
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    average()
    extra = torch.tensor((_status("VmHWM") - before) / 1e6)
    dist.all_reduce(extra, dist.ReduceOp.MAX)
    error = 0.0
    if method != "raw":
        for index, parameter in enumerate(model.parameters()):
            mean = sum(values(shapes[index], index, other).double() for other in range(ranks)) / ranks
            error = max(error, (parameter.detach().double() - mean).abs().max().item())
    if rank == 0:
        out.put({"extra_mb": extra.item(), "error": error})
    dist.barrier()
    dist.destroy_process_group()


def _status(key: str) -> float:
    """Bytes, from this process's status page."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return float(line.split()[1]) * 1024
    raise KeyError(key)


def spawn(function: Callable[..., None], ranks: int, *args: Any) -> Any:
    """Run function(rank, ranks, folder, *args, queue) on each rank; what rank 0 put into the queue."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        queue = mp.get_context("spawn").SimpleQueue()
        mp.spawn(function, (ranks, f"{folder}/store", *args, queue), nprocs=ranks)
        return queue.get()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sets", nargs="+", default=["gpt2", "resnet50", "tiny"], choices=list(SETS))
    parser.add_argument("--bucket-mb", type=float, default=None, help="staging buffer of localsgd_ext (default: its own)")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--no-memory", action="store_true", help="time only")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

    result: dict[str, Any] = {
        "torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count(), "ranks": options.ranks,
        "rounds": options.rounds, "bucket_mb": options.bucket_mb, "sets": {},
    }  # fmt: skip
    for name in options.sets:
        count = len(SETS[name]())
        total = sum(torch.Size(shape).numel() for shape in SETS[name]())
        print(f"\n{name}: {total / 1e6:.1f} M float32 in {count} tensors, {options.ranks} ranks", flush=True)
        print(f"  {'':29}{'median':>10}{'min':>9}{'max':>9}{'x raw':>8}{'extra MB':>10}{'max error':>11}")
        seconds = spawn(time_all, options.ranks, name, options.rounds, options.bucket_mb)
        raw = statistics.median(seconds["raw"])
        rows = {}
        for method in METHODS:
            median = statistics.median(seconds[method])
            row = {
                "ms": median * 1e3,
                "min": min(seconds[method]) * 1e3,
                "max": max(seconds[method]) * 1e3,
                "x_raw": median / raw,
            }
            if not options.no_memory:
                row |= spawn(measure_memory, options.ranks, name, method, options.bucket_mb)
            rows[method] = row
            memory = f"{row['extra_mb']:>10.0f}{row['error']:>11.1e}" if "error" in row and method != "raw" else ""
            print(
                f"  {TITLES[method]:29}{row['ms']:>7.1f} ms{row['min']:>9.1f}{row['max']:>9.1f}{row['x_raw']:>8.2f}{memory}",
                flush=True,
            )
        result["sets"][name] = rows
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
