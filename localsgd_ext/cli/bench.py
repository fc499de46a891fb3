"""`localsgd-ext bench`: what this network and these machines give. Run by every rank, as torchrun or `accelerate launch` starts
them."""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from ..costs import DTYPES, Job, Setting, accelerate_seconds, ddp_seconds, line, ours_seconds, share, smallest_steps
from . import quantities
from .plan import WIRES, measured_link
from .quantities import spoken_bytes, spoken_count, spoken_rate, spoken_seconds

DEFAULT_WIRES = ("parameter", "bfloat16", "int8", "int4")
TENSORS = 16
"""Of the model that is averaged: few, since what a tensor costs is not the network's business."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `bench`."""
    parser.add_argument(
        "--mb",
        type=quantities.count,
        default=32.0,
        help="MB of parameters to average (default: 32); fewer where that takes long",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the parameters (default: float32)")
    parser.add_argument(
        "--wires", nargs="+", choices=WIRES, default=list(DEFAULT_WIRES), help=f"default: {' '.join(DEFAULT_WIRES)}"
    )
    parser.add_argument(
        "--bucket-mb", nargs="+", type=quantities.count, default=[1.0, 4.0, 16.0], help="to try (default: 1 4 16)"
    )
    parser.add_argument("--rounds", type=quantities.whole, default=5, help="of which the median is taken (default: 5)")
    parser.add_argument("--params", type=quantities.count, help="suggest settings for a model of so many, with --step-time")
    parser.add_argument("--step-time", type=quantities.seconds, help="of a local step, as 250ms")
    parser.add_argument(
        "--overhead", type=quantities.fraction, default=0.05, help="share of communication to aim at (default: 5%%)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured, for `plan --measured FILE`")
    parser.add_argument("--timeout", type=quantities.seconds, default=60.0, help="to wait for other ranks (default: 60 s)")


def run(args: argparse.Namespace) -> int:
    """Measure, and print on rank 0; a mistake of the user's ends in one line and status 2."""
    if (args.params is None) != (args.step_time is None):
        args.error("--params and --step-time go together")
    if not 0.01 <= args.mb <= 65536 or max(args.bucket_mb) > 65536 or args.timeout > 1e6:
        args.error("--mb must be from 0.01 to 65536, --bucket-mb at most 65536, and --timeout at most a million seconds")
    if missing := [each for each in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(each)]:
        args.error(
            f"{missing[0]} is not set: start it on every machine with torchrun (torchrun ... -m localsgd_ext bench) or accelerate launch -m"
        )
    if not os.environ["WORLD_SIZE"].isdigit() or int(os.environ["WORLD_SIZE"]) < 2:
        args.error(f"WORLD_SIZE is {os.environ['WORLD_SIZE']}: there are no two ranks to measure between")
    if args.json and os.environ["RANK"] == "0" and not _can_be_written(args.json):
        args.error(f"{args.json} cannot be written")
    import torch
    import torch.distributed as dist

    device = torch.device("cpu")
    if torch.cuda.is_available() and dist.is_nccl_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=args.timeout))
    except (RuntimeError, ValueError) as error:
        args.error(f"the ranks cannot reach each other: {str(error).splitlines()[0]}")
    try:
        measured = measure(args.mb, args.dtype, args.wires, args.bucket_mb, args.rounds, device)
    except (RuntimeError, MemoryError) as error:  # a rank that is gone or was given other options, or too many megabytes
        print(
            f"localsgd-ext bench: rank {dist.get_rank()}: {(str(error).splitlines() or ['out of memory'])[0]}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)  # no collective that is under way will end
    try:
        if dist.get_rank() == 0:
            print(report(measured), flush=True)
            if args.params:
                print("\n" + advice(measured, args.params, args.step_time, args.overhead), flush=True)
            if args.json:
                args.json.write_text(json.dumps(measured, indent=1) + "\n")
                print(f"\nwritten to {args.json}: localsgd-ext plan --measured {args.json} --params N --step-time T")
    finally:
        dist.destroy_process_group()
    return 0


def _can_be_written(path: Path) -> bool:
    return os.access(path, os.W_OK) and not path.is_dir() if path.exists() else os.access(path.parent, os.W_OK)


def measure(
    megabytes: float, dtype: str, wires: list[str], bucket_mbs: list[float], rounds: int, device: Any, longest: float = 2.0
) -> dict[str, Any]:
    """To be called by all ranks; gives the same on all. longest: seconds that one all-reduce may take, else there will be fewer
    megabytes."""
    import torch
    import torch.distributed as dist

    clock = _Clock(rounds, device)
    kind = getattr(torch, dtype)
    tiny = torch.zeros(1, device=device)
    latency = clock.median(lambda: dist.all_reduce(tiny), 20) / 2  # to the others and back
    # A first look at what the link gives.
    small = torch.zeros(max(1, int(megabytes * 1e6 / 16 / kind.itemsize)), dtype=kind, device=device)
    seconds = clock.median(lambda: dist.all_reduce(small), 2) * 16
    large = int(megabytes * 1e6 / kind.itemsize / max(1.0, seconds / longest))
    sizes = [max(TENSORS, large // 8), max(8 * TENSORS, large)]
    payload = torch.zeros(sizes[1], dtype=kind, device=device)
    raw = [clock.median(functools.partial(dist.all_reduce, payload[:size])) for size in sizes]
    result: dict[str, Any] = {
        "ranks": dist.get_world_size(), "device": device.type, "dtype": dtype, "torch": torch.__version__, "latency": latency,
        "all_reduce": {"bytes": [size * kind.itemsize for size in sizes], "seconds": raw},
    }  # fmt: skip
    n = dist.get_world_size()
    result["bytes_per_second"] = 2 * (n - 1) / n / line(result["all_reduce"]["bytes"], raw)[1]
    result["wires"] = {
        wire: {"values": sizes, "seconds": [_averaging(clock, size, kind, device, wire, None) for size in sizes]}
        for wire in wires
    }
    result["buckets"] = {f"{mb:g}": _averaging(clock, sizes[1], kind, device, wires[0], mb) for mb in bucket_mbs}
    return result


class _Clock:
    """Times of the slowest rank."""

    def __init__(self, rounds: int, device: Any) -> None:
        self._rounds, self._device = rounds, device

    def median(self, call: Callable[[], object], rounds: int | None = None) -> float:
        import torch
        import torch.distributed as dist

        call()
        taken = []
        for _ in range(rounds or self._rounds):
            dist.barrier()
            begun = time.perf_counter()
            call()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            slowest = torch.tensor(time.perf_counter() - begun, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            taken.append(float(slowest))
        return statistics.median(taken)


def _averaging(clock: _Clock, values: int, dtype: Any, device: Any, wire: str, bucket_mb: float | None) -> float:
    """Seconds of one step() that averages so many values."""
    import torch
    import torch.distributed as dist

    from ..local_sgd import LocalSGD

    sizes = [values // TENSORS] * (TENSORS - 1)
    sizes.append(values - sum(sizes))
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(size, dtype=dtype, device=device)) for size in sizes])
    with LocalSGD(None, model, 1, wire=wire, bucket_mb=bucket_mb, nonfinite="ignore") as local_sgd, torch.no_grad():
        for parameter in model:
            parameter.add_(1e-3 * dist.get_rank())
        return clock.median(local_sgd.step)


def report(measured: dict[str, Any]) -> str:
    """As text."""
    values, raw = measured["wires"][next(iter(measured["wires"]))]["values"][1], measured["all_reduce"]["seconds"][1]
    lines = [
        f"{measured['ranks']} ranks, {measured['device']}: {spoken_rate(measured['bytes_per_second'])} for each rank, "
        f"{spoken_seconds(measured['latency'])} latency",
        f"one averaging of {spoken_count(values)} parameters ({spoken_bytes(measured['all_reduce']['bytes'][1])}), and relative to one raw all-reduce of the "
        f"same ({spoken_seconds(raw)}):",
    ]
    for wire, each in measured["wires"].items():
        lines.append(f"  wire={wire!r:<12} {spoken_seconds(each['seconds'][1]):>9}  {each['seconds'][1] / raw:5.2f}")
    lines.append(f"with wire={next(iter(measured['wires']))!r} and staging buffers of")
    for mb, seconds in measured["buckets"].items():
        lines.append(f"  bucket_mb={mb:<7} {spoken_seconds(seconds):>9}  {seconds / raw:5.2f}")
    return "\n".join(lines)


def advice(measured: dict[str, Any], params: float, step_seconds: float, overhead: float) -> str:
    """Which settings would do, from what was measured."""
    link = measured_link(measured)
    job = Job(params, measured["ranks"], step_seconds, measured["dtype"], device=measured["device"])
    lines = [
        f"for {spoken_count(params)} parameters, {spoken_seconds(step_seconds)} a step, and at most {overhead:.0%} communication:"
    ]
    ddp = share(step_seconds, ddp_seconds(job, link))
    theirs = share(step_seconds, accelerate_seconds(job, link, 8))
    lines.append(f"  DDP would spend {ddp:.0%} of its time on communication, Accelerate's LocalSGD with H = 8 {theirs:.0%}")
    candidates = [Setting(1, wire) for wire in measured["wires"]]
    candidates.append(Setting(1, "int8" if "int8" in measured["wires"] else candidates[-1].wire, 1, 4))
    best: tuple[int, Setting] | None = None
    for setting in candidates:
        steps = smallest_steps(job, link, setting, overhead)
        lines.append(f"  H = {steps or 'none up to 2^20':<5} {_options(setting, steps)}")
        # What is simpler comes first, and is kept unless twice as many averagings can be had.
        if steps is not None and (best is None or 2 * steps <= best[0]):
            best = steps, setting
    mb, seconds = min(measured["buckets"].items(), key=lambda each: each[1])
    default = measured["wires"][next(iter(measured["wires"]))]["seconds"][1]
    tried = best is not None and best[1] == candidates[0]  # with its wire, at once
    bucket = f", bucket_mb={mb}" if tried and seconds < 0.9 * default else ""
    if ddp <= overhead:
        lines.append("suggested: plain DDP; this link is fast enough")
    elif best is not None:
        steps, setting = best
        then = ours_seconds(job, link, Setting(steps, setting.wire, setting.overlap_steps, setting.fragments))
        lines.append(
            f"suggested: LocalSGD(..., {_options(setting, steps)}{bucket}), with {share(step_seconds, then):.0%} communication"
        )
    return "\n".join(lines)


def _options(setting: Setting, steps: int | None) -> str:
    text = f"local_sgd_steps={steps or 'H'}"
    if setting.wire != "parameter":
        text += f", wire={setting.wire!r}"
    if setting.overlap_steps:
        text += f", overlap_steps={setting.overlap_steps}, fragments={setting.fragments}"
    return text
