"""The same script under every usual way to start the processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = str(ROOT / "tests" / "launched.py")

NOTEBOOK = """
import sys
from accelerate import notebook_launcher
from tests.launched import train
if __name__ == "__main__":
    notebook_launcher(train, (sys.argv[1],), num_processes=2, use_port=sys.argv[2])
"""

SPAWN = """
import os, sys, tempfile
import torch.multiprocessing as mp
import torch.distributed as dist
from tests.launched import train

def start(rank, output, store):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    train(output)

if __name__ == "__main__":
    mp.spawn(start, (sys.argv[1], tempfile.mktemp()), nprocs=2)
"""


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


pytestmark = pytest.mark.xdist_group("launchers")

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--mixed_precision=no", "--dynamo_backend=no"]


def _run(commands: list[list[str]], output: Path, **more: str) -> list[dict[str, Any]]:
    """Start the commands at once, with RANK set where there are several; what each rank wrote."""
    processes = []
    for rank, command in enumerate(commands):
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": str(ROOT),
            "ACCELERATE_USE_CPU": "true",
            **({"RANK": str(rank), "LOCAL_RANK": str(rank)} if len(commands) > 1 else {}),
            **more,
        }
        processes.append(
            subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=output,
                start_new_session=True,
            )
        )  # fmt: skip
    try:
        for process in processes:
            said, _ = process.communicate(timeout=60)
            assert process.returncode == 0, said
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return [json.loads(path.read_text()) for path in sorted(output.glob("*.json"))]


def _equal_after_three_averagings(results: list[dict[str, Any]]) -> None:
    first, second = results
    assert first["weights"] == second["weights"]
    assert (first["world_size"], first["steps"], first["syncs"]) == (2, 6, 3)


def test_torchrun(tmp_path: Path) -> None:
    _equal_after_three_averagings(_run([[*TORCHRUN, "--nproc-per-node=2", SCRIPT, str(tmp_path)]], tmp_path))


def test_accelerate_launch(tmp_path: Path) -> None:
    # On CPUs it starts one process itself; several are started by a scheduler that sets RANK and WORLD_SIZE, or by MPI.
    command = [*ACCELERATE, "--num_processes=1", SCRIPT, str(tmp_path)]
    port = _free_port()
    _equal_after_three_averagings(
        _run([command] * 2, tmp_path, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    )


@pytest.mark.parametrize("script", [NOTEBOOK, SPAWN], ids=["notebook_launcher", "spawn"])
def test_functions_that_start_processes(script: str, tmp_path: Path) -> None:
    (tmp_path / "launch.py").write_text(script)
    command = [sys.executable, str(tmp_path / "launch.py"), str(tmp_path), _free_port()]
    _equal_after_three_averagings(_run([command], tmp_path))


@pytest.mark.parametrize(
    "command",
    [[*TORCHRUN, "--nproc-per-node=1", SCRIPT], [*ACCELERATE, "--num_processes=1", SCRIPT], [sys.executable, SCRIPT]],
    ids=["torchrun", "accelerate launch", "python"],
)
def test_one_process(command: list[str], tmp_path: Path) -> None:
    (only,) = _run([[*command, str(tmp_path)]], tmp_path)
    assert (only["world_size"], only["steps"], only["syncs"]) == (1, 12, 0)
