"""What is kept with figures, and where: benchmarks/results/."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """Versions and machine: where figures come from."""
    import torch

    from localsgd_ext import __version__

    return {
        "localsgd_ext": __version__, "torch": torch.__version__, "accelerate": version("accelerate"),
        "torchft": version("torchft") if find_spec("torchft") else None, "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}", "cpu": _cpu(), "cores": os.cpu_count(),
    }  # fmt: skip


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())


def save(path: Path, result: dict[str, Any]) -> None:
    path.write_text(json.dumps(result, indent=1) + "\n")


def load(name: str) -> Any:
    """The recorded figures of that name."""
    return json.loads((RESULTS / f"{name}.json").read_text())
