"""The kernels under AddressSanitizer and UndefinedBehaviorSanitizer: see sanitizers/driver.cpp."""

from __future__ import annotations

import platform
import re
import subprocess
import tempfile
from pathlib import Path

import pytest

from .cuda_on_cpu import COMPILER, CSRC, build

DRIVER = Path(__file__).resolve().parent / "sanitizers" / "driver.cpp"
SECONDS = 40

pytestmark = pytest.mark.skipif(platform.system() != "Linux" or COMPILER is None, reason="needs g++ on Linux")


@pytest.fixture(scope="module")
def driver(request: pytest.FixtureRequest) -> Path:
    cache = getattr(request.config, "cache", None)
    folder = Path(cache.mkdir("sanitizers") if cache else tempfile.mkdtemp())
    sanitizers = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g")
    # OpenMP is what at::parallel_for becomes threads by.
    options = (*sanitizers, "-fopenmp", "-Wl,--no-as-needed", "-ltorch_cpu")
    return build(folder, "driver-{}", options, [*sorted((CSRC / "cpu").glob("*.cpp")), DRIVER])


def run(driver: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([driver, *arguments], capture_output=True, text=True, check=False, timeout=SECONDS)


@pytest.mark.parametrize(("engine", "count"), [("cpu", 4000), ("cuda", 3000), ("cpu-coded", 2500), ("cuda-coded", 2100)])
def test_random_buckets(driver: Path, engine: str, count: int) -> None:
    done = run(driver, engine, "1", str(count))
    assert (done.returncode, done.stdout) == (0, f"{count} buckets\n"), done.stderr[-4000:]


@pytest.mark.parametrize("engine", ["cpu", "cuda", "cpu-coded", "cuda-coded"])
@pytest.mark.parametrize(
    ("fault", "report"),
    [("short", "AddressSanitizer: heap-buffer-overflow"), ("odd", "runtime error: .* misaligned address")],
)
def test_a_fault_is_reported(driver: Path, engine: str, fault: str, report: str) -> None:
    """That the sanitizers are on, in both engines' kernels."""
    done = run(driver, engine, "1", "50", fault)
    assert done.returncode != 0
    assert re.search(report, done.stderr), done.stderr[-4000:]
