"""One averaging against its rivals and against one raw all-reduce of the same bytes, interleaved in one run.

    python -m benchmarks.averaging [--ranks 2] [--rounds 7] [--sets gpt2 resnet50 tiny] [--methods native torch] [--json FILE]

Processes on this machine over Gloo on the loopback interface. Times are medians over the rounds of the slowest rank; "x raw" is
the ratio to the raw all-reduce. Peak extra memory is the growth of the resident set during one averaging in a fresh process.
Error is the largest absolute difference to the mean computed in float64.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from localsgd_ext.averager import Averager
from localsgd_ext.binding import DEFAULT_BUCKET_MB
from localsgd_ext.collectives import SLOTS
from localsgd_ext.items import Item
from localsgd_ext.replicas import resolve_group

from .record import machine, save
from .shapes import SETS, Model, values

METHODS = (
    "raw",
    "sliced",
    "passes",
    "native",
    "reference",
    "checked",
    "outer",
    "bfloat16",
    "int8",
    "int4",
    "torch",
    "torchft",
    "accelerate",
)
LOSSY = ("bfloat16", "int8", "int4")
"""Not for fast links, where bytes cost little: to see what the codes cost."""

FLOORS = ("raw", "sliced", "passes")
"""What an averaging is made of: none of them is one."""

TITLES = {
    "raw": "one raw all-reduce",
    "sliced": "the same in slices, no copying",
    "passes": "packing, copying back, no sending",
    "native": "localsgd_ext, backend=native",
    "reference": "localsgd_ext, backend=torch",
    "checked": "native, and looking for NaN",
    "outer": "native, outer=DiLoCo()",
    "bfloat16": "native, wire=bfloat16",
    "int8": "native, wire=int8",
    "int4": "native, wire=int4",
    "torch": "torch average_parameters",
    "torchft": "torchft LocalSGD",
    "accelerate": "accelerate LocalSGD",
}


def methods() -> list[str]:
    """Those that can run here: torchft is not part of the `test` extra."""
    return [m for m in METHODS if m != "torchft" or importlib.util.find_spec("torchft")]


def make(method: str, model: Model, bucket_mb: float | None) -> Callable[[], object]:
    """The function that averages `model` once by `method`."""
    if method == "raw":
        flat = trained(model)
        return lambda: dist.all_reduce(flat)
    if method == "sliced":
        return sliced(trained(model), bucket_mb or DEFAULT_BUCKET_MB["cpu"])
    if method == "passes":
        return passes(model, bucket_mb)
    if method in ("native", "reference", "checked", "outer", *LOSSY):
        from localsgd_ext import DiLoCo, LocalSGD

        backend = "torch" if method == "reference" else "native"
        wire = method if method in LOSSY else "parameter"
        outer = DiLoCo() if method == "outer" else None
        nonfinite = "raise" if method == "checked" else "ignore"
        local_sgd = LocalSGD(None, model, 1, wire=wire, outer=outer, backend=backend, nonfinite=nonfinite, bucket_mb=bucket_mb)

        def average() -> None:
            if local_sgd.num_steps == 0:
                # It starts from equal weights; and as in training, inside the block: outside it nothing is kept between
                # averagings.
                model.fill(0)
                local_sgd.__enter__()
                model.fill(dist.get_rank())
            local_sgd.step()

        return average
    if method == "torchft":
        from torchft.local_sgd import LocalSGD as TorchftLocalSGD

        return TorchftLocalSGD(Manager(), model, torch.optim.SGD(model.parameters(), lr=0.1), 1).sync
    if method == "torch":
        from torch.distributed.algorithms.model_averaging.utils import average_parameters

        group = everyone()
        parameters = [p for p in model.parameters() if p.requires_grad]  # as PeriodicModelAverager picks those with a gradient
        return lambda: average_parameters(iter(parameters), group)
    if method == "accelerate":
        from accelerate import Accelerator
        from accelerate.local_sgd import LocalSGD as AccelerateLocalSGD

        return AccelerateLocalSGD(Accelerator(cpu=True), model, 1)._sync_and_avg_model_params
    raise ValueError(method)


def everyone() -> dist.ProcessGroup:
    group = resolve_group(None)
    assert group is not None
    return group


def trained(model: Model) -> torch.Tensor:
    """Everything that has to be averaged, in one flat tensor."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters() if p.requires_grad])


def sliced(flat: torch.Tensor, bucket_mb: float) -> Callable[[], object]:
    """The floor of any pipeline of buckets: as many all-reduces of the same size, as many in flight, and nothing else."""
    slices = flat.split(max(1, int(bucket_mb * 2**20) // flat.itemsize))

    def average() -> None:
        flying: list[dist.Work] = []
        for piece in slices:
            if len(flying) == SLOTS:
                flying.pop(0).wait()
            flying.append(dist.all_reduce(piece, async_op=True))
        for work in flying:
            work.wait()

    return average


def passes(model: Model, bucket_mb: float | None) -> Callable[[], object]:
    """What the native engine adds to the collectives: every bucket packed, divided, measured and copied back."""
    averager = Averager(everyone(), "parameter", "native", bucket_mb)
    items = [Item(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    averager.average(items, step=0, round=0, interval=0).result()
    buckets: list[Any] = list(averager.bind(items).buckets)

    def both() -> None:
        for bucket in buckets:
            bucket.pack()
            bucket.apply(1)

    return both


class Manager:
    """What torchft's LocalSGD asks of its manager, without fault tolerance: a sum, then a division, as its own does."""

    def start_quorum(self) -> None:
        pass

    def should_commit(self) -> bool:
        return True

    def allreduce(self, tensor: torch.Tensor) -> Manager.Mean:
        return Manager.Mean(tensor, dist.all_reduce(tensor, async_op=True))

    class Mean:
        def __init__(self, tensor: torch.Tensor, work: dist.Work) -> None:
            self._tensor, self._work = tensor, work

        def wait(self) -> None:
            self._work.wait()
            self._tensor.div_(dist.get_world_size())


def start(rank: int, ranks: int, folder: str) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT="29500",
        ACCELERATE_USE_CPU="true",
    )  # fmt: skip
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}", rank=rank, world_size=ranks, timeout=timedelta(minutes=5))


Contestant = tuple[str, float | None]
"""A method, and MiB of one staging buffer (None for the default)."""


def time_all(rank: int, ranks: int, folder: str, name: str, rounds: int, contestants: list[Contestant], out: Any) -> None:
    """Each contestant on a model of its own, in turn, `rounds` times after one warm-up: seconds of the slowest rank."""
    start(rank, ranks, folder)
    floor = Model(name, rank)  # one for all: it is only read, or written to where nobody looks
    models = [floor if method in FLOORS else Model(name, rank) for method, _ in contestants]
    averagers = [make(method, model, bucket_mb) for (method, bucket_mb), model in zip(contestants, models, strict=True)]
    seconds: list[list[float]] = [[] for _ in averagers]
    for _ in range(rounds + 1):
        for average, model, taken in zip(averagers, models, seconds, strict=True):
            model.drift(rank)
            dist.barrier()
            begun = time.perf_counter()
            average()
            slowest = torch.tensor(time.perf_counter() - begun)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            taken.append(slowest.item())
    if rank == 0:
        out.put([taken[1:] for taken in seconds])
    dist.barrier()
    dist.destroy_process_group()


def measure_memory(rank: int, ranks: int, folder: str, name: str, method: str, bucket_mb: float | None, out: Any) -> None:
    """Peak extra resident memory and largest error of the first averaging of a fresh process."""
    start(rank, ranks, folder)
    shapes = SETS[name]()
    model = Model(name, rank)
    average = make(method, model, bucket_mb)
    dist.all_reduce(torch.zeros(1))
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    average()
    extra = torch.tensor((_status("VmHWM") - before) / 1e6)
    dist.all_reduce(extra, dist.ReduceOp.MAX)
    error = 0.0
    if method not in FLOORS:
        for index, parameter in enumerate(model.parameters()):
            own = [values(shapes[index], index, other if parameter.requires_grad else 0) for other in range(ranks)]
            mean = torch.stack(own).double().mean(0)
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
        mp.spawn(  # type: ignore[attr-defined]
            function, (ranks, f"{folder}/store", *args, queue), nprocs=ranks
        )
        return queue.get()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    parser.add_argument("--methods", nargs="+", default=methods(), choices=methods())
    parser.add_argument("--bucket-mb", type=float, default=None, help="staging buffer of localsgd_ext (default: its own)")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--no-memory", action="store_true", help="time only")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

    result: dict[str, Any] = {
        **machine(), "ranks": options.ranks, "rounds": options.rounds, "bucket_mb": options.bucket_mb, "sets": {},
    }  # fmt: skip
    names = ["raw", *(method for method in options.methods if method != "raw")]
    for name in options.sets:
        count = len(SETS[name]())
        total = sum(torch.Size(shape).numel() for shape in SETS[name]())
        print(f"\n{name}: {total / 1e6:.1f} M float32 in {count} tensors, {options.ranks} ranks", flush=True)
        print(f"  {'':29}{'median':>10}{'min':>9}{'max':>9}{'x raw':>8}{'extra MB':>10}{'max error':>11}")
        contestants: list[Contestant] = [(method, options.bucket_mb) for method in names]
        times = spawn(time_all, options.ranks, name, options.rounds, contestants)
        seconds = dict(zip(names, times, strict=True))
        raw = statistics.median(seconds["raw"])
        rows = {}
        for method in seconds:
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
            memory = f"{row['extra_mb']:>10.0f}{row['error']:>11.1e}" if "error" in row and method not in FLOORS else ""
            print(
                f"  {TITLES[method]:29}{row['ms']:>7.1f} ms{row['min']:>9.1f}{row['max']:>9.1f}{row['x_raw']:>8.2f}{memory}",
                flush=True,
            )
        result["sets"][name] = rows
    if options.json:
        save(options.json, result)


if __name__ == "__main__":
    main()
