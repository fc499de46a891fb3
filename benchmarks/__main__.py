"""Every figure and plot of the README, measured anew and written there, by one command.

    python -m benchmarks all            measure everything (two hours on two cores), draw, and write README's figures
    python -m benchmarks NAME...        only these (`list` names them), then likewise
    python -m benchmarks readme         draw and write from what benchmarks/results/ holds

Every name is a run of one of the scripts here, in a process of its own, with nothing else beside it; its figures go to
benchmarks/results/NAME.json. The hosts on slow links are network namespaces (Linux, as root). A run that fails is told at the
end, and its old figures stay. Rivals and plots need what the `test` extra installs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from . import readme
from .record import RESULTS, load
from .training import plot

RUNS: dict[str, list[str]] = {
    "averaging-2-ranks": ["averaging", "--rounds", "9", "--methods", *readme.RIVALS],
    "averaging-4-ranks": ["averaging", "--ranks", "4", "--rounds", "5", "--no-memory", "--sets", "gpt2", "resnet50", "tiny", "--methods", *readme.RIVALS],
    "averaging-codes": ["averaging", "--rounds", "11", "--no-memory", "--sets", "gpt2", "--methods", "native", "checked", "outer", "bfloat16", "int8", "int4"],
    "buckets-2-ranks": ["buckets"],
    "handshake": ["handshake"],
    "wires-2-hosts": ["wires"],
    "wires-4-hosts": ["wires", "--hosts", "4", "--rounds", "3"],
    "training-2-hosts": ["training", "--rounds", "7", "--mbit", "50", "100", "250", "1000", "2500"],
    "training-2-hosts-of-2": ["training", "--rounds", "7", "--per-host", "2"],
    "planned": ["planned"],
    "features": ["features"],
    "soak": ["soak"],
    "convergence-overlap": ["convergence", "--ranks", "2", "--variants", "local-8", "overlap-8", "int8-8", "fragments-8"],
    "convergence-wires": ["convergence"],
    "convergence-family": ["convergence", "--ranks", "4", "--variants", *readme.FAMILY],
}  # fmt: skip


def measure(name: str) -> bool:
    """Run that script; whether it succeeded."""
    module, *arguments = RUNS[name]
    print(f"\n== {name}: python -m benchmarks.{module} {' '.join(arguments)}", flush=True)
    begun = time.monotonic()
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments, "--json", str(RESULTS / f"{name}.json")]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], check=False)
    print(
        f"== {name}: {'done' if done.returncode == 0 else f'FAILED ({done.returncode})'} in {time.monotonic() - begun:.0f} s",
        flush=True,
    )
    return done.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names",
        nargs="+",
        metavar="NAME",
        choices=["all", "list", "readme", *RUNS],
        help=", ".join(["all", "list", "readme", *RUNS]),
    )
    names = parser.parse_args().names
    if "list" in names:
        for name, (module, *arguments) in RUNS.items():
            print(f"{name:22} python -m benchmarks.{module} {' '.join(arguments)}")
        return
    chosen = list(RUNS) if "all" in names else [name for name in names if name in RUNS]
    failed = [name for name in chosen if not measure(name)]
    plot(load("training-2-hosts"), RESULTS / "training-2-hosts.png")
    readme.write()
    if failed:
        raise SystemExit(f"failed, so that their old figures stand: {', '.join(failed)}")


if __name__ == "__main__":
    main()
