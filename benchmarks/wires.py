"""One averaging per wire against Accelerate's helper, between hosts whose links have a given rate, interleaved in one run.

    python -m benchmarks.wires [--hosts 2] [--mbit 100 1000] [--rounds 5] [--set resnet50] [--json FILE]

The hosts are network namespaces on this machine, one process each (Linux, as root, with `ip` and `tc`). Times are of the
slowest host, medians over the rounds; "x speed" is the time of Accelerate's helper divided by this one's; "sent" is what host
0's interface counted during one averaging, with acknowledgements, handshake and headers (less of them than on a real wire: a
virtual interface takes up to 64 KiB at once), "payload" what the report says. Error is by how much the last average differs
from the float32 wire's, root mean square, relative to how far a round moves the weights of a rank.
"""

from __future__ import annotations

import argparse
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

from localsgd_ext import LocalSGD

from .hosts import Hosts, why_not
from .record import machine, save
from .shapes import SETS, Model

WIRES = ("float32", "bfloat16", "float16", "int8", "int4")
ACCELERATE = "accelerate"
STEP = 1e-3
"""How far each weight moves in one round of local steps, root mean square."""

TX_BYTES = Path("/sys/class/net/eth0/statistics/tx_bytes")


class Contestant:
    """A model of its own and the way to average it."""

    def __init__(self, method: str, name: str) -> None:
        # Equal on all ranks: LocalSGD makes sure of that on entry, and would send rank 0's weights to the others.
        self.model = Model(name, 0)
        self.average: Callable[[], object]
        self._local_sgd: LocalSGD | None = None
        if method == ACCELERATE:
            from accelerate import Accelerator
            from accelerate.local_sgd import LocalSGD as AccelerateLocalSGD

            self.average = AccelerateLocalSGD(Accelerator(cpu=True), self.model, 1)._sync_and_avg_model_params
        else:
            self._local_sgd = LocalSGD(None, self.model, 1, wire=method, nonfinite="ignore")
            # Inside the block, as in training: outside it there is no anchor, and every averaging is exact. The block is never
            # left, since that would cost each lossy wire one more, exact averaging.
            self._local_sgd.__enter__()
            self.average = self._local_sgd.step

    @torch.no_grad()
    def train(self, step: int) -> None:
        """What stands for local steps: every rank moves its weights elsewhere, and every contestant's in the same way."""
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=STEP)

    def reported(self) -> dict[str, Any]:
        """Payload and engine of the last averaging, which Accelerate's helper does not tell."""
        report = None if self._local_sgd is None else self._local_sgd.report
        return {} if report is None else {"wire_bytes": report.wire_bytes, "backend": report.backend}

    @torch.no_grad()
    def error(self, other: Contestant) -> float:
        """Root mean square difference of what is trained."""
        pairs = zip(self.model.parameters(), other.model.parameters(), strict=True)
        squares = [((a - b).double().square().sum().item(), a.numel()) for a, b in pairs if a.requires_grad]
        return float((sum(square for square, _ in squares) / sum(count for _, count in squares)) ** 0.5)


def average_all(name: str, rounds: int) -> None:
    """What every host runs: each contestant in turn, `rounds` times after one warm-up. Host 0 prints the figures as JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    contestants = {method: Contestant(method, name) for method in (*WIRES, ACCELERATE)}
    seconds: dict[str, list[float]] = {method: [] for method in contestants}
    sent: dict[str, list[int]] = {method: [] for method in contestants}
    for step in range(rounds + 1):
        for method, contestant in contestants.items():
            contestant.train(step)
            dist.barrier()
            before = int(TX_BYTES.read_text())
            begun = time.perf_counter()
            contestant.average()
            slowest = torch.tensor(time.perf_counter() - begun)
            # Once this is over every host has received everything: before, some of it may wait in the queue of this host's
            # link.
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            sent[method].append(int(TX_BYTES.read_text()) - before)
            seconds[method].append(slowest.item())
    if dist.get_rank() == 0:
        exact = contestants["float32"]
        figures = {
            method: {"seconds": seconds[method][1:], "sent": sent[method][1:], **contestant.reported()}
            | {"error": contestant.error(exact) / STEP}
            for method, contestant in contestants.items()
        }
        print(json.dumps(figures), flush=True)
    dist.barrier()
    # As the demo's ranks end: in the interpreter's shutdown one of Gloo's threads can abort the process, which would cost these
    # figures.
    os._exit(0)


def measure(count: int, mbit: float, name: str, rounds: int) -> dict[str, dict[str, Any]]:
    """A row of figures for each method, between `count` hosts."""
    command = [sys.executable, "-c", f"from benchmarks.wires import average_all; average_all({name!r}, {rounds})"]
    with Hosts(count, mbit) as hosts:
        printed = hosts.run(command)
    figures = json.loads(printed.splitlines()[-1])
    theirs = statistics.median(figures[ACCELERATE]["seconds"])
    plain = statistics.median(figures["float32"]["sent"])
    rows = {}
    for method, figure in figures.items():
        seconds, sent = figure.pop("seconds"), figure.pop("sent")
        median = statistics.median(seconds)
        rows[method] = {
            "ms": median * 1e3, "min": min(seconds) * 1e3, "max": max(seconds) * 1e3, "x_accelerate": theirs / median,
            "sent_bytes": statistics.median(sent), "x_float32_bytes": statistics.median(sent) / plain, **figure,
        }  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--mbit", type=float, nargs="+", default=[100, 1000], help="rates of each host's link, both ways")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--set", default="resnet50", choices=list(SETS))
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    if (reason := why_not()) is not None:
        raise SystemExit(reason)

    total = sum(torch.Size(shape).numel() for shape in SETS[options.set]())
    result: dict[str, Any] = {
        **machine(), "hosts": options.hosts, "rounds": options.rounds, "set": options.set, "mbit": {},
    }  # fmt: skip
    for mbit in options.mbit:
        print(f"\n{options.set}: {total / 1e6:.1f} M float32, {options.hosts} hosts, {mbit:g} Mbit/s", flush=True)
        titles = f"{'x speed':>9}{'sent':>11}{'of float32':>12}{'payload':>11}{'error':>8}"
        print(f"  {'':12}{'median':>11}{'min':>9}{'max':>9}{titles}", flush=True)
        rows = measure(options.hosts, mbit, options.set, options.rounds)
        for method, row in rows.items():
            payload = f"{row['wire_bytes'] / 1e6:.2f} MB" if "wire_bytes" in row else "-"
            print(
                f"  {method:12}{row['ms']:>8.0f} ms{row['min']:>9.0f}{row['max']:>9.0f}{row['x_accelerate']:>9.2f}"
                f"{row['sent_bytes'] / 1e6:>8.2f} MB{row['x_float32_bytes']:>12.3f}{payload:>11}{row['error']:>8.4f}",
                flush=True,
            )
        result["mbit"][f"{mbit:g}"] = rows
    if options.json:
        save(options.json, result)


if __name__ == "__main__":
    main()
