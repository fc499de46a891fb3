"""The handshake before an averaging against `torch.distributed.barrier` on the same group, interleaved in one run.

    python -m benchmarks.handshake [--ranks 2 4] [--rounds 300] [--json FILE]

Accelerate's helper calls that barrier before each averaging. Processes on this machine over Gloo on the loopback interface;
medians of rank 0.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from localsgd_ext.control import Control
from localsgd_ext.standing import Call, Standing

from .averaging import everyone, spawn, start
from .record import machine, save


def measure(rank: int, ranks: int, folder: str, rounds: int, out: Any) -> None:
    start(rank, ranks, folder)
    control = Control(everyone(), None)
    control.enter(["option: none"], [], [], 0)
    own = Standing(Call.STEP, trained=1, changed=1, bad=-1, step=8, interval=8, phase=8)
    contestants = {"barrier": dist.barrier, "handshake": lambda: control.meet(own)}
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, call in contestants.items():
            dist.barrier()
            begun = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - begun)
    if rank == 0:
        out.put({name: statistics.median(times) * 1e6 for name, times in seconds.items()})
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    result: dict[str, Any] = {
        **machine(), "rounds": options.rounds, "microseconds": {},
    }  # fmt: skip
    for ranks in options.ranks:
        medians = spawn(measure, ranks, options.rounds)
        ratio = medians["handshake"] / medians["barrier"]
        print(
            f"{ranks} ranks: barrier {medians['barrier']:.0f} us, handshake {medians['handshake']:.0f} us, ratio {ratio:.2f}",
            flush=True,
        )
        result["microseconds"][str(ranks)] = medians | {"ratio": ratio}
    if options.json:
        save(options.json, result)


if __name__ == "__main__":
    main()
