"""The pages of README's "How to": each one's commands run as they are printed, in an empty folder, in the order of the page."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("launchers")  # torchrun has one port

README = (Path(__file__).parents[1] / "README.md").read_text()
HOW_TO = README[README.index("\n## How to") : README.index("\n## What differs")]
PAGES = dict(re.findall(r"^### (.+?)\n(.*?)(?=^### |\Z)", HOW_TO, re.MULTILINE | re.DOTALL))
FILES = {name: text for text, name in re.findall(r"^```python\n(# (\w+\.py)\n.*?)^```", HOW_TO, re.MULTILINE | re.DOTALL)}
NEEDS = {"hf_trainer.py": "transformers", "lightning_module.py": "lightning", "replica.py": "torchft"}
FAILS = "When it says PeerError"
COMMANDS = [page for page, text in PAGES.items() if "```sh" in text]


ABORTED = "terminate called without an active exception"
"""What one of Gloo's threads says when it ends a process that is exiting anyway (pytorch#190489), whatever that did before."""


def _run(commands: str, folder: Path) -> subprocess.CompletedProcess[str]:
    # What installing makes of it, where the tests run from a clone alone.
    script = folder / "bin" / "localsgd-ext"
    script.parent.mkdir(parents=True)
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m localsgd_ext "$@"\n')
    script.chmod(0o755)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], str(script.parent)]),
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    command = ["bash", "-e", "-c", commands]
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=150)
    finally:
        with contextlib.suppress(ProcessLookupError):  # what it has started, if it is not over
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.mark.parametrize("page", COMMANDS)
def test_a_page_runs_as_printed(page: str, tmp_path: Path) -> None:
    commands = "\n".join(re.findall(r"^```sh\n(.*?)^```", PAGES[page], re.MULTILINE | re.DOTALL))
    for file, package in NEEDS.items():
        if file in commands and importlib.util.find_spec(package) is None:
            pytest.skip(f"NOT RUN: {package} is not installed")
    for attempt in range(3):
        done = _run(commands, tmp_path / str(attempt))
        if ABORTED not in done.stderr:
            break
        warnings.warn(f"{page}: a process aborted while it was exiting; the page was run again in a new folder", stacklevel=1)
    said = done.stdout + done.stderr
    if page == FAILS:
        assert done.returncode != 0
        assert "PeerError: rank 1 failed: ValueError: a bad batch" in said
        return
    assert done.returncode == 0, said
    if page == "Save and resume":
        assert re.findall(r"^step (\d+):", said, re.MULTILINE) == ["64", "128"]


def test_every_file_and_page_is_found() -> None:
    assert {"train.py", "sharded.py", "hf_trainer.py", "lightning_module.py"} <= set(FILES)
    assert len(COMMANDS) >= 7
