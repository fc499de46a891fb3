"""What is released: the version, the wheel and the sdist, and a README whose figures are those that were measured."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from benchmarks import readme
from benchmarks.__main__ import RUNS
from benchmarks.record import RESULTS
from localsgd_ext import __version__

ROOT = Path(__file__).parents[1]
PARTS = ("localsgd_ext", "csrc", "tests", "benchmarks")
FILES = ("setup.py", "pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE")


def run(*command: str | Path, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_changelog_begins_with_this_version() -> None:
    first = re.search(r"^## (\S+) \(\d{4}-\d\d-\d\d\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first is not None
    assert first[1] == __version__


def test_wheel_and_sdist(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so")
    for part in PARTS:
        shutil.copytree(ROOT / part, source / part, ignore=ignored)
    for file in FILES:
        shutil.copy(ROOT / file, source)
    # Without the binary, which takes a minute; the sdist first, the wheel from that.
    run("build", "--no-isolation", "--outdir", tmp_path / "dist", source, LOCALSGD_EXT_BUILD="off")
    sdist, wheel = sorted((tmp_path / "dist").iterdir(), key=lambda path: path.suffix)
    assert sdist.name == f"localsgd_ext-{__version__}.tar.gz"
    assert wheel.name == f"localsgd_ext-{__version__}-py3-none-any.whl"
    assert "WARNING" not in (said := run("twine", "check", "--strict", sdist, wheel))
    assert said.count("PASSED") == 2
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    there = {str(path.relative_to(source)) for part in PARTS for path in (source / part).rglob("*") if path.is_file()}
    assert there | set(FILES) <= inside
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    modules = {name for name in there if name.startswith("localsgd_ext/")}
    sources = {f"localsgd_ext/{name}" for name in there if name.startswith("csrc/") and not name.endswith(".md")}
    assert modules | sources <= packed
    assert not [name for name in packed if not name.startswith(("localsgd_ext/", f"localsgd_ext-{__version__}.dist-info/"))]


def test_the_figures_of_the_readme_are_those_measured() -> None:
    text = readme.README.read_text()
    assert {found[2] for found in readme.MARKED.finditer(text)} == set(readme.FIGURES), "each is used, and no other"
    assert readme.render(text) == text, "run `python -m benchmarks readme`"
    typed = readme.MARKED.sub(lambda found: f"{found[1]}typed{found[4]}", text)
    assert readme.render(typed) == text


@pytest.mark.parametrize("name", RUNS)
def test_every_run_has_its_results(name: str) -> None:
    assert (RESULTS / f"{name}.json").is_file()
    module = RUNS[name][0]
    assert (ROOT / "benchmarks" / f"{module}.py").is_file()


def test_every_result_and_picture_is_used() -> None:
    text = readme.README.read_text()
    for path in RESULTS.iterdir():
        assert path.stem in RUNS if path.suffix == ".json" else f"benchmarks/results/{path.name}" in text, path.name
