"""What a wire costs in quality: the demo's GPT trained with local SGD over each, on the same tokens, from the same weights.

    python -m benchmarks.convergence [--ranks 2 4] [--seeds 3] [--steps N] [--local-sgd-steps 16] [--wires float32 int8 int4] [--json FILE]

Processes on this machine over Gloo on the loopback interface. Held-out loss is of the final model, nats per byte; a seed decides the initial weights
and the order of the data. "vs float32" is the relative difference to the run with wire="float32" and the same seed: mean, and worst. MB are what one
rank sent in all averagings, the closing one (always exact) included.
"""

from __future__ import annotations

import argparse
import functools
import json
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
    ranks_are_identical,
    read_text,
)

from .averaging import spawn, start
from .wires import WIRES, machine

HELD_OUT_WINDOWS = 8 * EVALUATION_WINDOWS
"""More than the demo looks at: here it is differences of less than a percent that count, and there is one evaluation a run."""

STEPS = 256
"""The default run takes about 20 minutes on two cores."""
BASELINE = "float32"


class Training(Protocol):
    """What a variant builds: around the training loop, with a step() after each of the optimizer's. bytes_sent: by this rank."""

    bytes_sent: int

    def step(self) -> None: ...

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: Any) -> Any: ...


Variant = Callable[[nn.Module, int], Training]
"""Given the DDP model and the number of local steps."""

VARIANTS: dict[str, Variant] = {wire: functools.partial(OurLocalSGD, None, wire=wire) for wire in WIRES}


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
    with build(model, local_sgd_steps) as training:
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
    parser.add_argument("--wires", nargs="+", default=["float32", "int8", "int4"], choices=list(VARIANTS))
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

    names = list(dict.fromkeys([BASELINE, *options.wires]))
    seeds = [SEED + index for index in range(options.seeds)]
    result: dict[str, Any] = {
        **machine(), "steps": options.steps, "local_sgd_steps": options.local_sgd_steps,
        "tokens_per_rank_and_step": BATCH * CONTEXT, "held_out_windows": HELD_OUT_WINDOWS, "ranks": {},
    }  # fmt: skip
    for ranks in options.ranks:
        print(f"\n{ranks} ranks, {options.steps} steps, averaging every {options.local_sgd_steps}", flush=True)
        runs = spawn(train_all, ranks, names, seeds, options.steps, options.local_sgd_steps)
        rows = {name: summary(runs[name], runs[BASELINE]) for name in names}
        print(f"  {'held-out loss':14}{'mean':>8}{'min':>9}{'max':>9}{'vs float32':>13}{'worst':>10}{'MB sent':>9}")
        for name, row in rows.items():
            print(
                f"  {name:14}{row['mean']:>8.4f}{row['min']:>9.4f}{row['max']:>9.4f}{row['relative_mean']:>+13.3%}"
                f"{row['relative_worst']:>+10.3%}{row['bytes_sent'] / 1e6:>9.1f}",
                flush=True,
            )
        result["ranks"][str(ranks)] = rows
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
