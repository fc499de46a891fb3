"""What `localsgd-ext plan` predicts from what `localsgd-ext bench` measured, against training as it is: between two hosts on
slow links, and over loopback.

    python -m benchmarks.planned [--mbit 100 1000 0] [--rounds 3] [--batch 6] [--json FILE]

Two hosts (network namespaces on this machine, one process on one core each; Linux, as root, with `ip` and `tc`; 0 Mbit/s: both
processes on one host, over loopback) first measure the link, then train the demo's GPT in every setting by turns of 32 steps.
The time of a local step is that of the turns without communication. Predicted and measured are steps per second, as medians
over the turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from localsgd_ext.cli import bench
from localsgd_ext.cli.demo_training import GPT, read_text
from localsgd_ext.cli.plan import measured_link
from localsgd_ext.costs import Job, Setting, ours_seconds

from .hosts import Hosts, why_not
from .record import machine, save
from .training import ALONE, Contestant

STEPS = 32
SETTINGS = [(steps, wire) for wire in ("parameter", "int8") for steps in (1, 8, 32)]


def train_all(rounds: int, batch: int) -> None:
    """What every host runs. Host 0 prints what was measured and predicted, as JSON."""
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
    dist.init_process_group("gloo")
    values = sum(p.numel() for p in GPT().parameters())
    wires = sorted({wire for _, wire in SETTINGS})
    measured = bench.measure(4e-6 * values, "float32", wires, [], 5, torch.device("cpu"))
    text, _ = read_text()
    contestants = {ALONE: Contestant(ALONE, text, batch)}
    for steps, wire in SETTINGS:
        contestants[f"H = {steps}, {wire}"] = Contestant("ours", text, batch, ours={"local_sgd_steps": steps, "wire": wire})
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for contestant in contestants.values():
        contestant.train(STEPS)
    for _ in range(rounds):
        for name, contestant in contestants.items():
            seconds[name].append(contestant.train(STEPS) / STEPS)
    step = statistics.median(seconds[ALONE])
    job, link = Job(values, 2, step), measured_link(measured)
    rows = {}
    for steps, wire in SETTINGS:
        predicted = 1 / ours_seconds(job, link, Setting(steps, wire))
        found = 1 / statistics.median(seconds[f"H = {steps}, {wire}"])
        rows[f"H = {steps}, {wire}"] = {"predicted": predicted, "measured": found, "ratio": predicted / found}
    if dist.get_rank() == 0:
        print(json.dumps({"step_seconds": step, "bench": measured, "rows": rows}), flush=True)
    dist.barrier()
    os._exit(0)  # see benchmarks/training.py


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, nargs="+", default=[100, 1000, 0], help="rates of each host's link; 0: loopback")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=6, help="windows per process and step")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    if (reason := why_not()) is not None:
        raise SystemExit(reason)
    command = [sys.executable, "-c", f"from benchmarks.planned import train_all; train_all({options.rounds}, {options.batch})"]
    result: dict[str, Any] = {**machine(), "rounds": options.rounds, "batch": options.batch, "mbit": {}}
    for mbit in options.mbit:
        with Hosts(2, mbit) if mbit else Hosts(1, per_host=2) as hosts:
            found = json.loads(hosts.run(command).splitlines()[-1])
        result["mbit"][f"{mbit:g}"] = found
        print(
            f"\n{f'{mbit:g} Mbit/s' if mbit else 'loopback'}; {found['step_seconds'] * 1e3:.0f} ms a step alone",
            flush=True,
        )
        print(f"  {'steps per second':20}{'predicted':>10}{'measured':>10}{'ratio':>8}")
        for name, row in found["rows"].items():
            print(f"  {name:20}{row['predicted']:>10.2f}{row['measured']:>10.2f}{row['ratio']:>8.2f}", flush=True)
    if options.json:
        save(options.json, result)


if __name__ == "__main__":
    main()
