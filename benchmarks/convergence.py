"""What local training costs in quality: the demo's GPT, trained in several ways on the same tokens, from the same weights.

    python -m benchmarks.convergence [--ranks 2 4] [--seeds 3] [--variants float32 int8 int4] [--json FILE]
    python -m benchmarks.convergence --ranks 4 --variants ddp local-8 local-32 slowmo-32 diloco-32 diloco-128 qsr
    python -m benchmarks.convergence --ranks 2 --variants local-8 overlap-8 int8-8 fragments-8

Processes on this machine over Gloo on the loopback interface. Held-out loss is of the final model, nats per byte; a seed
decides the initial weights and the order of the data. "vs" is the relative difference to the first variant's run with the same
seed: mean, and worst. MB are what one rank sent, the closing averaging (always exact) included. The wires average every
--local-sgd-steps; the other variants have their number of local steps in their names.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from localsgd_ext import QSR, DiLoCo, SlowMo
from localsgd_ext.cli.demo_training import (
    BATCH,
    CONTEXT,
    EVALUATION_WINDOWS,
    GPT,
    LEARNING_RATE,
    SEED,
    OurLocalSGD,
    Windows,
    evaluate,
    loss_function,
    parameter_bytes,
    ranks_are_identical,
    read_text,
)
from localsgd_ext.wire import allreduce_bytes

from .averaging import spawn, start
from .record import machine, save
from .wires import WIRES

HELD_OUT_WINDOWS = 8 * EVALUATION_WINDOWS
"""More than the demo looks at: here it is differences of less than a percent that count, and there is one evaluation a run."""

STEPS = 256
"""The default run takes about 20 minutes on two cores."""


class Training(Protocol):
    """What a variant builds: around the training loop, with a step() after each of the optimizer's. bytes_sent: by this
    rank."""

    bytes_sent: int

    def step(self) -> None: ...

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: Any) -> Any: ...


class Synchronous(contextlib.nullcontext[Any]):
    """Plain DDP: gradients are all-reduced in every backward pass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(self)
        self.bytes_sent = 0
        self._each = allreduce_bytes(parameter_bytes(model), dist.get_world_size())

    def step(self) -> None:
        self.bytes_sent += self._each


Variant = Callable[[nn.Module, torch.optim.Optimizer, int], Training]
"""Given the DDP model, the inner optimizer and --local-sgd-steps."""


def local(steps: int, **options: Any) -> Variant:
    return lambda model, optimizer, _: OurLocalSGD(None, model, steps, **options)


VARIANTS: dict[str, Variant] = {
    wire: lambda model, optimizer, steps, wire=wire: OurLocalSGD(None, model, steps, wire=wire) for wire in WIRES
} | {
    "ddp": lambda model, optimizer, _: Synchronous(model),
    "local-8": local(8),
    "local-32": local(32),
    "slowmo-32": local(32, outer=SlowMo()),
    "diloco-32": local(32, outer=DiLoCo()),
    "diloco-128": local(128, outer=DiLoCo()),
    "local-128": local(128),
    "overlap-8": local(8, overlap_steps=4),
    "int8-8": local(8, wire="int8"),
    "fragments-8": local(8, overlap_steps=1, fragments=4, wire="int8"),
    # Rounds of 4 at the peak of the learning rate, and longer ones as that falls.
    "qsr": lambda model, optimizer, _: OurLocalSGD(None, model, QSR(optimizer, base=4, alpha=2 * LEARNING_RATE)),
}


def train(build: Variant, seed: int, steps: int, local_sgd_steps: int, text: Tensor) -> tuple[nn.Module, int]:
    """One run; gives the final model, and the bytes this rank sent."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    model = DistributedDataParallel(GPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    scheduler = torch.optim.lr_scheduler.LambdaLR(  # the demo's
        optimizer, lambda at: min(1.0, (20 * at + 1) / steps) * 0.5 * (1 + math.cos(math.pi * at / steps))
    )
    # As Accelerate deals batches out: in turn.
    batches = [list(range(at * BATCH, (at + 1) * BATCH)) for at in range(rank, steps * ranks, ranks)]
    with build(model, optimizer, local_sgd_steps) as training:
        for inputs, targets in DataLoader(Windows(text, steps * ranks * BATCH, seed), batch_sampler=batches):
            loss_function(model(inputs), targets).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            training.step()
    return model, training.bytes_sent


def train_all(
    rank: int, ranks: int, folder: str, names: list[str], seeds: list[int], steps: int, local_sgd_steps: int, out: Any
) -> None:
    """Every variant with every seed; rank 0 prints as it goes, and gives the figures as {variant: [one for each seed]}."""
    start(rank, ranks, folder)
    accelerator = Accelerator(cpu=True)  # for the demo's functions that ask for one: training goes without
    text, held_out_text = read_text()
    held_out = Windows(held_out_text, HELD_OUT_WINDOWS, SEED + 1)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for seed in seeds:
        for name in names:
            dist.barrier()
            begun = time.perf_counter()
            model, bytes_sent = train(VARIANTS[name], seed, steps, local_sgd_steps, text)
            seconds = time.perf_counter() - begun
            identical = ranks_are_identical(model)
            if rank == 0:
                loss = evaluate(accelerator, model, held_out)
                runs[name].append(
                    {"seed": seed, "loss": loss, "bytes_sent": bytes_sent, "seconds": seconds, "identical": identical}
                )
                note = "" if identical else ", ranks DIFFER at the end"
                print(f"  seed {seed} {name:10} {loss:.4f}  ({seconds:.0f} s{note})", flush=True)
    if rank == 0:
        out.put(runs)
    dist.barrier()
    dist.destroy_process_group()


def summary(runs: list[dict[str, Any]], baseline: list[dict[str, Any]]) -> dict[str, Any]:
    """Over the seeds of one variant."""
    losses = [run["loss"] for run in runs]
    relative = [loss / base["loss"] - 1 for loss, base in zip(losses, baseline, strict=True)]
    return {
        "mean": statistics.mean(losses), "min": min(losses), "max": max(losses), "relative_mean": statistics.mean(relative),
        "relative_worst": max(relative), "bytes_sent": max(run["bytes_sent"] for run in runs), "runs": runs,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seeds", type=int, default=3, help="how many (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each rank (default: %(default)s)")
    parser.add_argument("--local-sgd-steps", type=int, default=16)
    parser.add_argument("--variants", nargs="+", default=["float32", "int8", "int4"], choices=list(VARIANTS))
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

    names = list(dict.fromkeys(options.variants))
    seeds = [SEED + index for index in range(options.seeds)]
    result: dict[str, Any] = {
        **machine(), "steps": options.steps, "local_sgd_steps": options.local_sgd_steps,
        "tokens_per_rank_and_step": BATCH * CONTEXT, "held_out_windows": HELD_OUT_WINDOWS, "ranks": {},
    }  # fmt: skip
    for ranks in options.ranks:
        print(f"\n{ranks} ranks, {options.steps} steps, averaging every {options.local_sgd_steps}", flush=True)
        runs = spawn(train_all, ranks, names, seeds, options.steps, options.local_sgd_steps)
        rows = {name: summary(runs[name], runs[names[0]]) for name in names}
        print(f"  {'held-out loss':14}{'mean':>8}{'min':>9}{'max':>9}{'vs ' + names[0]:>13}{'worst':>10}{'MB sent':>9}")
        for name, row in rows.items():
            print(
                f"  {name:14}{row['mean']:>8.4f}{row['min']:>9.4f}{row['max']:>9.4f}{row['relative_mean']:>+13.3%}"
                f"{row['relative_worst']:>+10.3%}{row['bytes_sent'] / 1e6:>9.1f}",
                flush=True,
            )
        result["ranks"][str(ranks)] = rows
    if options.json:
        save(options.json, result)


if __name__ == "__main__":
    main()
