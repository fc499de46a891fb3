"""What `import localsgd_ext` adds to `import torch, accelerate`: milliseconds, and as a share of theirs.

    python -m benchmarks.importing [--rounds 7]

Each round is a fresh process; the figures are medians. Nothing may be compiled or loaded for it, and CUDA not be touched.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

CODE = """
import gc, json, sys, time
begun = time.perf_counter()
import torch, accelerate
theirs = time.perf_counter() - begun
gc.collect()  # a collection of torch's objects, 0.1 s, is due at about this time whoever comes next
begun = time.perf_counter()
import localsgd_ext
ours = time.perf_counter() - begun
native = "_native" in sys.modules
print(json.dumps([theirs, ours, torch.cuda.is_initialized(), native]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    runs = [json.loads(subprocess.check_output([sys.executable, "-c", CODE], text=True)) for _ in range(rounds)]
    theirs, ours = (statistics.median(run[i] for run in runs) for i in (0, 1))
    print(
        f"import torch, accelerate: {theirs * 1e3:.0f} ms; localsgd_ext adds {ours * 1e3:.1f} ms ({100 * ours / theirs:.1f} %)"
    )
    print(f"CUDA initialised: {any(run[2] for run in runs)}; native engine loaded: {any(run[3] for run in runs)}")


if __name__ == "__main__":
    main()
