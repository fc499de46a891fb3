"""Training throughput between hosts on slow links, as a share of the same training without any communication; interleaved in
one run.

    python -m benchmarks.training [--per-host 1] [--mbit 100 1000] [--rounds 5] [--batch 6] [--json FILE]

Two hosts (network namespaces on this machine, one process on one core each; Linux, as root, with `ip` and `tc`) train the
demo's GPT on real text, averaging every 8 steps where they do. Each contestant has a model of its own and trains 16 steps in
its turn, in which there are two averagings; times are of the slowest host, shares are medians over the turns, each relative to
the turn without communication of the same round. At 100 Mbit/s and with six windows a step, one float32 averaging takes as
long as four to five steps.

With --per-host 2 there are two levels: each host has two processes, which share its core and its link, and DDP keeps them
together at every step, within the host; ours averages between the hosts, each process with the one of the same local rank
elsewhere. This is measured against DDP over all processes, and shares are relative to DDP inside each host with nothing between
the hosts. Every process averages all of the model, so that twice as much goes over a link, but a host's step takes twice as
long as well: one float32 averaging is as many again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from localsgd_ext import LocalSGD, host_groups
from localsgd_ext.cli.demo_training import CONTEXT, GPT, LEARNING_RATE, SEED, Windows, loss_function, read_text

from .hosts import Hosts, why_not
from .record import machine, save

INTERVAL = 8
WARM_UP = 7
"""Steps before the first turn: a turn begins and ends where nothing is under way."""
STEPS = 2 * INTERVAL

OURS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours, int8": {"wire": "int8"},
    "ours, overlap": {"overlap_steps": 4},
    "ours, overlap, 4 fragments, int8": {"overlap_steps": 1, "fragments": 4, "wire": "int8"},
}
ALONE = "no communication"
CONTESTANTS = (ALONE, "DDP", "Accelerate's LocalSGD", *OURS)

OURS_BETWEEN: dict[str, dict[str, Any]] = {
    "ours between hosts": {},
    "ours between hosts, int8": {"wire": "int8"},
    "ours between hosts, overlap, 4 fragments, int8": {"overlap_steps": 1, "fragments": 4, "wire": "int8"},
}
INSIDE = "DDP inside each host"
TWO_LEVELS = (INSIDE, "DDP", *OURS_BETWEEN)


def names(per_host: int) -> tuple[str, ...]:
    """Who takes part with so many processes on each host. The others' shares are relative to the first."""
    return CONTESTANTS if per_host == 1 else TWO_LEVELS


class Contestant:
    """A model of its own and the way to keep the hosts' copies together. groups: of two levels, inside a host and between
    hosts. ours: options of LocalSGD for a name that is not in the tables above."""

    def __init__(
        self,
        name: str,
        text: torch.Tensor,
        batch: int,
        groups: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None,
        ours: dict[str, Any] | None = None,
    ) -> None:
        # Of the same weights on all hosts: DDP sees to that inside its group only.
        torch.manual_seed(SEED)
        inside, between = groups if groups is not None and name != "DDP" else (None, None)
        self._model = DistributedDataParallel(GPT(), process_group=inside)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE)
        self._windows = Windows(text, 100_000, SEED + dist.get_rank())
        self._batch, self._next = batch, 0
        self._after: Callable[[], object] = lambda: None
        # No block is ever left: that would average once more.
        if (ours := ours or OURS.get(name, OURS_BETWEEN.get(name))) is not None:
            local_sgd = LocalSGD(None, self._model, process_group=between, **{"local_sgd_steps": INTERVAL} | ours)
            local_sgd.__enter__()
            self._after = local_sgd.step
        elif name == "Accelerate's LocalSGD":
            from accelerate import Accelerator
            from accelerate.local_sgd import LocalSGD as AccelerateLocalSGD

            theirs = AccelerateLocalSGD(Accelerator(cpu=True), self._model, INTERVAL)
            theirs.__enter__()
            self._after = theirs.step
        elif name == ALONE:
            self._keep = contextlib.ExitStack()
            self._keep.enter_context(self._model.no_sync())

    def train(self, steps: int) -> float:
        """Seconds of the slowest host."""
        batches = [self._windows[self._next + i] for i in range(steps * self._batch)]
        self._next += len(batches)
        dist.barrier()
        begun = time.perf_counter()
        for step in range(steps):
            inputs, targets = (torch.stack(each) for each in zip(*batches[step * self._batch :][: self._batch], strict=True))
            loss_function(self._model(inputs), targets).backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._after()
        slowest = torch.tensor(time.perf_counter() - begun)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.item()


def train_all(rounds: int, batch: int) -> None:
    """What every process runs: each contestant in turn. Rank 0 prints the seconds of every turn as JSON."""
    torch.set_num_threads(1)
    # A host has one core, for training and sending, and all its processes share it: threads made from here on stay there, too.
    per_host = int(os.environ["LOCAL_WORLD_SIZE"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) // per_host % len(cores)]})
    dist.init_process_group("gloo")
    groups = host_groups() if per_host > 1 else None
    text, _ = read_text()
    contestants = {name: Contestant(name, text, batch, groups) for name in names(per_host)}
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for contestant in contestants.values():
        contestant.train(WARM_UP)
    for _ in range(rounds):
        for name, contestant in contestants.items():
            seconds[name].append(contestant.train(STEPS))
    if dist.get_rank() == 0:
        print(json.dumps(seconds), flush=True)
    dist.barrier()
    # As the demo's ranks end: in the interpreter's shutdown one of Gloo's threads can abort the process, which would cost these
    # figures.
    os._exit(0)


def measure(mbit: float, rounds: int, batch: int, per_host: int) -> dict[str, dict[str, Any]]:
    """A row of figures for each contestant."""
    command = [sys.executable, "-c", f"from benchmarks.training import train_all; train_all({rounds}, {batch})"]
    with Hosts(2, mbit, per_host) as hosts:
        printed = hosts.run(command)
    seconds = json.loads(printed.splitlines()[-1])
    tokens = 2 * per_host * STEPS * batch * CONTEXT
    rows = {}
    for name, taken in seconds.items():
        shares = [alone / own for alone, own in zip(seconds[names(per_host)[0]], taken, strict=True)]
        rows[name] = {
            "tokens_per_second": tokens / statistics.median(taken), "share": statistics.median(shares), "min": min(shares),
            "max": max(shares),
        }  # fmt: skip
    return rows


STYLES = {
    "DDP": ("tab:gray", ":", "v"),
    "Accelerate's LocalSGD": ("tab:gray", "-", "s"),
    "ours": ("tab:blue", ":", "o"),
    "ours, int8": ("tab:blue", "--", "o"),
    "ours, overlap, 4 fragments, int8": ("tab:blue", "-", "o"),
}


def plot(result: dict[str, Any], path: Path) -> None:
    """The shares over the rate of the links, of those in STYLES. Needs matplotlib."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4))
    rates = sorted(result["mbit"], key=float)
    for name, (color, line, marker) in STYLES.items():
        rows = [result["mbit"][rate][name] for rate in rates]
        shares = [100 * row["share"] for row in rows]
        below, above = ([100 * abs(row[end] - row["share"]) for row in rows] for end in ("min", "max"))
        axes.errorbar(
            [float(rate) for rate in rates], shares, yerr=[below, above], color=color, linestyle=line, marker=marker, capsize=2,
            elinewidth=0.6, label=name,
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_xticks([float(rate) for rate in rates], rates)
    axes.minorticks_off()
    axes.set_xlabel("link between two hosts, Mbit/s")
    axes.set_ylabel("tokens/s, % of training\nwithout communication")
    axes.set_ylim(0, None)
    axes.grid(alpha=0.3)
    axes.legend(title=f"averaging every {result['interval']} steps", fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--per-host", type=int, default=1, help="processes on each host; more than one: two levels")
    parser.add_argument("--mbit", type=float, nargs="+", default=[100], help="rates of each host's link, both ways")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=6, help="windows per process and step (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    if (reason := why_not()) is not None:
        raise SystemExit(reason)

    result: dict[str, Any] = {
        **machine(), "hosts": 2, "per_host": options.per_host, "rounds": options.rounds, "batch": options.batch,
        "interval": INTERVAL, "mbit": {},
    }  # fmt: skip
    width = 2 + max(map(len, names(options.per_host)))
    for mbit in options.mbit:
        hosts = f"2 hosts of {options.per_host} processes" if options.per_host > 1 else "2 hosts"
        print(f"\nthe demo's GPT, {hosts}, {mbit:g} Mbit/s, averaging every {INTERVAL} steps", flush=True)
        print(f"  {'':{width}}{'tokens/s':>9}{'share':>9}{'min':>8}{'max':>8}", flush=True)
        rows = measure(mbit, options.rounds, options.batch, options.per_host)
        for name, row in rows.items():
            print(
                f"  {name:{width}}{row['tokens_per_second']:>9.0f}{row['share']:>9.1%}{row['min']:>8.1%}{row['max']:>8.1%}",
                flush=True,
            )
        result["mbit"][f"{mbit:g}"] = rows
    if options.json:
        save(options.json, result)


if __name__ == "__main__":
    main()
