"""Where the default bucket size comes from: one averaging by the native engine with staging buffers of several sizes, in one
run.

    python -m benchmarks.buckets [--ranks 2] [--rounds 9] [--sets gpt2 resnet50 tiny] [--sizes 1 2 4 8 16 32] [--json FILE]

Times are medians over interleaved rounds of the slowest rank, as multiples of one raw all-reduce of the same bytes; "slices" is
the all-reduce in pieces of that size without any copying.
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path
from typing import Any

from .averaging import Contestant, spawn, time_all
from .record import machine, save
from .shapes import SETS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sets", nargs="+", default=["gpt2", "resnet50", "tiny"], choices=list(SETS))
    parser.add_argument("--sizes", nargs="+", type=float, default=[1, 2, 4, 8, 16, 32], help="MiB of one staging buffer")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    result: dict[str, Any] = {
        **machine(), "ranks": options.ranks, "rounds": options.rounds, "x_raw": {},
    }  # fmt: skip
    print(f"{options.ranks} ranks, x raw" + "".join(f"{size:>9g} MiB" for size in options.sizes))
    for name in options.sets:
        rows = {}
        for method in ("sliced", "native"):
            contestants: list[Contestant] = [("raw", None), *((method, size) for size in options.sizes)]
            raw, *times = (
                statistics.median(each) for each in spawn(time_all, options.ranks, name, options.rounds, contestants)
            )
            rows[method] = {str(size): each / raw for size, each in zip(options.sizes, times, strict=True)}
            shown = "slices" if method == "sliced" else "native"
            print(f"{name:9}{shown:8}" + "".join(f"{x:>13.2f}" for x in rows[method].values()), flush=True)
        result["x_raw"][name] = rows
    if options.json:
        save(options.json, result)


if __name__ == "__main__":
    main()
