"""Finding and building the native engine, with compilers that are scripts: what is built when, by whom, and what a failure leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from localsgd_ext import build

ROOT = Path(__file__).parent.parent
FIND = "from localsgd_ext.backends import native; print(native.find_or_build())"
PICK = "from localsgd_ext.backends import pick; print([pick('auto', {'cpu'}).name for _ in range(3)])"


class Host:
    """A machine with an empty cache and one compiler, a script that logs its calls and writes what it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.cache, self.log, self._bin = folder / "cache", folder / "log", folder / "bin"
        self._bin.mkdir()
        self.compiler("")

    def compiler(self, first: str) -> None:
        """Let the compiler do `first` before anything else."""
        script = self._bin / "c++"
        script.write_text(
            f'#!/bin/sh\necho "$*" >> {self.log}\n{first}\nwhile [ $# -gt 0 ]; do [ "$1" = -o ] && : > "$2"; shift; done\n'
        )
        script.chmod(0o755)

    def start(self, code: str, **more: str) -> subprocess.Popen[str]:
        environment = {
            "PATH": f"{self._bin}:/usr/bin:/bin",
            "HOME": str(self.cache),
            "PYTHONPATH": str(ROOT),
            "LOCALSGD_EXT_CACHE": str(self.cache),
            "CXX": "",
            **more,
        }
        return subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip

    def run(self, code: str, **more: str) -> tuple[int, str, str]:
        process = self.start(code, **more)
        out, err = process.communicate(timeout=60)
        return process.returncode, out.strip(), err

    def calls(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


ONE_BUILD = len(build._SOURCES) + 1  # each source, and the link


def test_built_once_with_a_progress_line_then_found(host: Host) -> None:
    status, first, err = host.run(FIND)
    assert status == 0, err
    assert err.count("\n") == 1
    assert "building the native engine (cpu) for torch" in err
    assert host.calls() == ONE_BUILD
    assert host.run(FIND) == (0, first, "")
    assert host.calls() == ONE_BUILD


def test_two_ranks_on_an_empty_cache_build_once(host: Host) -> None:
    host.compiler("sleep 0.3")
    ranks = [host.start(FIND) for _ in range(2)]
    outputs = {rank.communicate(timeout=60)[0] for rank in ranks}
    assert len(outputs) == 1
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert host.calls() == ONE_BUILD


def test_a_killed_build_blocks_nobody(host: Host) -> None:
    host.compiler("sleep 30")
    killed = host.start(FIND)
    while host.calls() == 0:
        assert killed.poll() is None, killed.communicate()
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    host.compiler("")
    begun = time.monotonic()
    status, _, err = host.run(FIND)
    assert status == 0, err
    assert time.monotonic() - begun < 25, "waited for a lock that nobody holds"


def test_a_failure_is_shown_once_and_remembered(host: Host) -> None:
    host.compiler("echo 'fatal error: sorry, no can do' >&2; exit 1")
    status, out, err = host.run(PICK)
    assert (status, out) == (0, "['torch', 'torch', 'torch']")
    assert err.count("sorry, no can do") == 1, "the compiler's own words, in one warning"
    assert "goes on with the PyTorch engine" in err
    calls = host.calls()
    status, out, err = host.run(PICK)
    assert (status, out) == (0, "['torch', 'torch', 'torch']")
    assert "remembered" in err
    assert host.calls() == calls, "it is not tried again"


def test_a_failure_is_an_error_where_native_was_asked_for(host: Host) -> None:
    host.compiler("echo 'fatal error: sorry, no can do' >&2; exit 1")
    status, _, err = host.run(PICK, LOCALSGD_EXT_BUILD="cpu")
    assert status != 0
    assert "sorry, no can do" in err
    status, _, err = host.run("from localsgd_ext.backends import pick; pick('native', {'cpu'})")
    assert status != 0
    assert "LocalSGDError: backend='native' cannot be had" in err
    assert "sorry, no can do" in err


def test_without_a_compiler(host: Host) -> None:
    status, out, err = host.run(PICK, PATH="/nonexistent")
    assert (status, out) == (0, "['torch', 'torch', 'torch']")
    assert err.count("no C++ compiler") == 1


def test_a_cache_folder_that_cannot_be_made(host: Host) -> None:
    status, out, err = host.run(PICK, LOCALSGD_EXT_CACHE="/dev/null/cache")
    assert (status, out) == (0, "['torch', 'torch', 'torch']")
    assert err.count("/dev/null/cache") == 1


def test_switched_off_is_silent(host: Host) -> None:
    assert host.run(PICK, LOCALSGD_EXT_BUILD="off") == (0, "['torch', 'torch', 'torch']", "")
    assert host.calls() == 0
    status, _, err = host.run(PICK, LOCALSGD_EXT_BUILD="gpu")
    assert status != 0
    assert "allowed: auto, cpu, cuda, off" in err


def test_a_binary_for_another_torch_is_not_used(host: Host) -> None:
    _, binary, _ = host.run(FIND)
    note = Path(binary).parent / "_native.json"
    note.write_text(json.dumps(json.loads(note.read_text()) | {"key": "torch-1.0-0"}))
    status, again, err = host.run(FIND)
    assert status == 0, err
    assert host.calls() == 2 * ONE_BUILD
    assert again == binary


def test_the_key_tells_torch_and_sources_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = build.running_target()
    plan = build.make_plan(target, "cpu")
    other = build.make_plan(replace(target, torch="9.9.9"), "cpu")
    moved = build.make_plan(replace(target, root="/elsewhere"), "cpu")
    assert build.key(plan) != build.key(other)
    assert build.key(plan) == build.key(moved), "where torch lies does not matter"
    (tmp_path / "bindings.cpp").write_text("// other sources")
    before = build.key(plan)
    monkeypatch.setattr(build, "source_folder", lambda: tmp_path)
    assert build.key(plan) != before
    assert build.installed_target() == target


@pytest.fixture
def toolkits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three folders: a toolkit of CUDA 13, one of CUDA 12, and a bin folder with a script that starts the first."""
    for name, version in (("good", "13.0"), ("old", "12.4"), ("bare", "13.0")):
        nvcc = tmp_path / name / "bin" / "nvcc"
        nvcc.parent.mkdir(parents=True)
        nvcc.write_text(f"#!/bin/sh\necho release {version}, V{version}.1\n")
        nvcc.chmod(0o755)
        if name != "bare":
            (tmp_path / name / "include").mkdir()
            (tmp_path / name / "include" / "cuda_runtime.h").touch()
    monkeypatch.setattr(build, "_toolkit_roots", lambda target: [(n, tmp_path / n) for n in ("bare", "old", "good")])
    monkeypatch.setattr(build, "_present_gpus", list)
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    return tmp_path


def test_a_toolkit_needs_headers_and_the_major_version_of_torch(toolkits: Path) -> None:
    target = replace(build.running_target(), cuda="13.0")
    plan = build.make_plan(target, "auto")
    assert plan.flavour == "cuda"
    assert plan.toolkit is not None
    assert plan.toolkit.nvcc == str(toolkits / "good" / "bin" / "nvcc")
    assert any(arch.endswith("+PTX") for arch in plan.architectures)
    assert {"8.0", "9.0"} <= set(plan.architectures)
    assert build.make_plan(target, "cpu").flavour == "cpu"


def test_why_there_is_no_cuda(toolkits: Path) -> None:
    without = replace(build.running_target(), cuda=None)
    assert build.make_plan(without, "auto").why == "this torch was built without CUDA"
    other = replace(without, cuda="11.8")
    plan = build.make_plan(other, "auto")
    assert plan.flavour == "cpu"
    for cause in ("bare", "no include/cuda_runtime.h", "CUDA 12.4, but torch was built with 11.8"):
        assert cause in plan.why
    with pytest.raises(build.BuildError, match=r"LOCALSGD_EXT_BUILD=cuda, but .*12\.4"):
        build.make_plan(other, "cuda")


def test_an_nvcc_that_cannot_be_run(toolkits: Path) -> None:
    (toolkits / "good" / "bin" / "nvcc").chmod(0o644)
    plan = build.make_plan(replace(build.running_target(), cuda="13.0"), "auto")
    assert plan.flavour == "cpu"
    assert "nvcc cannot be run: Permission denied" in plan.why


def test_architectures_asked_for(toolkits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0a 12.0+PTX")
    plan = build.make_plan(replace(build.running_target(), cuda="13.0"), "auto")
    assert plan.architectures == ("8.0", "9.0a", "12.0+PTX")
    with monkeypatch.context() as patch, pytest.raises(build.BuildError, match="'Hopper'; write capabilities as numbers"):
        patch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;Hopper")
        build.make_plan(replace(build.running_target(), cuda="13.0"), "auto")
    flags = build._arch_flags(plan.architectures)
    assert "arch=compute_90a,code=sm_90a" in flags
    assert flags[-2:] == ["-gencode", "arch=compute_120,code=compute_120"]
