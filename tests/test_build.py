"""Finding and building the native engine, with compilers that are scripts: what is built when, by whom, and what a failure
leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localsgd_ext import build
from localsgd_ext.backends import native

ROOT = Path(__file__).parent.parent
FIND = "from localsgd_ext.backends import native; print(native.find_or_build())"
PICK = "from localsgd_ext.backends import pick; print([pick('auto', {'cpu'}).name for _ in range(3)])"


def straw(program: Path, first: str = "") -> None:
    """Make a compiler that does `first`, then writes an empty file where it is told to."""
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(f'#!/bin/sh\n{first}\nwhile [ $# -gt 0 ]; do [ "$1" = -o ] && : > "$2"; shift; done\n')
    program.chmod(0o755)


class Host:
    """A machine with an empty cache and one compiler, a script that logs its calls and writes what it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.cache, self.log, self._bin = folder / "cache", folder / "log", folder / "bin"
        self._bin.mkdir()
        self.compiler("")

    def compiler(self, first: str) -> None:
        """Let the compiler do `first` before anything else."""
        straw(self._bin / "c++", f'echo "$*" >> {self.log}\n{first}')

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

    def logged(self) -> list[str]:
        """The arguments of each compilation; a question for the version is none."""
        return [line for line in self.log.read_text().splitlines() if "--version" not in line] if self.log.exists() else []

    def calls(self) -> int:
        return len(self.logged())


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
    host.compiler("[ $1 = --version ] || sleep 30")
    killed = host.start(FIND)
    while host.calls() == 0:
        assert killed.poll() is None, killed.communicate()
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert any(path.is_dir() for path in host.cache.iterdir()), "it has left its folder"
    host.compiler("")
    begun = time.monotonic()
    status, binary, err = host.run(FIND)
    assert status == 0, err
    assert time.monotonic() - begun < 25, "waited for a lock that nobody holds"
    folder = Path(binary).parent
    assert set(host.cache.iterdir()) == {folder, Path(f"{folder}.lock")}, "what it left is gone"


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


@pytest.mark.parametrize("repair", ["another compiler at the same path", "other arguments"])
def test_a_failure_is_no_verdict_on_other_tools(host: Host, repair: str) -> None:
    version = "[ $1 = --version ] && echo c++ of straw {} && exit 0\n"
    host.compiler(version.format("1.0") + "case $* in *-fgood*) ;; *) exit 1;; esac")
    assert host.run(FIND)[0] != 0
    calls = host.calls()
    status, _, err = host.run(FIND)
    assert status != 0
    assert "remembered" in err
    assert host.calls() == calls
    if repair == "other arguments":
        status, _, err = host.run(FIND, CXX="c++ -fgood")
    else:
        host.compiler(version.format("1.1"))
        status, _, err = host.run(FIND)
    assert status == 0, err


def test_the_arguments_of_the_compiler(host: Host) -> None:
    status, _, err = host.run(FIND, CXX="c++ -m64 '-DNAME=a b'")
    assert status == 0, err
    assert [line.startswith("-m64 -DNAME=a b -") for line in host.logged()] == [True] * ONE_BUILD


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
    before = build.key(target, "cpu")
    assert before != build.key(replace(target, torch="9.9.9"), "cpu")
    assert before != build.key(target, "cuda")
    assert before == build.key(replace(target, root="/elsewhere", headers="/too"), "cpu"), "where things lie does not matter"
    (tmp_path / "bindings.cpp").write_text("// other sources")
    monkeypatch.setattr(build, "source_folder", lambda: tmp_path)
    assert build.key(target, "cpu") != before
    assert build.installed_target() == target


@pytest.fixture
def toolkits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three folders: a toolkit of CUDA 13, one of CUDA 12, and a bin folder with a script that starts the first."""
    for name, version in (("good", "13.0"), ("old", "12.4"), ("bare", "13.0")):
        straw(tmp_path / name / "bin" / "nvcc", f"echo release {version}, V{version}.1")
        if name != "bare":
            (tmp_path / name / "include").mkdir()
            (tmp_path / name / "include" / "cuda_runtime.h").touch()
    monkeypatch.setattr(build, "_toolkit_roots", lambda target: [(n, tmp_path / n) for n in ("bare", "old", "good")])
    monkeypatch.setattr(build, "present_gpus", list)
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    return tmp_path


def test_a_toolkit_needs_headers_and_the_major_version_of_torch(toolkits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = replace(build.running_target(), cuda="13.0")
    plan = build.make_plan(target)
    assert plan.flavour == "cuda"
    assert plan.toolkit is not None
    assert plan.toolkit.nvcc == str(toolkits / "good" / "bin" / "nvcc")
    assert any(arch.endswith("+PTX") for arch in plan.architectures)
    assert {"8.0", "9.0"} <= set(plan.architectures)
    monkeypatch.setenv(build.SWITCH, "cpu")
    assert build.make_plan(target).flavour == "cpu"


def test_why_there_is_no_cuda(toolkits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without = replace(build.running_target(), cuda=None)
    assert build.make_plan(without).why == "this torch was built without CUDA"
    other = replace(without, cuda="11.8")
    plan = build.make_plan(other)
    assert plan.flavour == "cpu"
    for cause in ("bare", "no include/cuda_runtime.h", "CUDA 12.4, but torch was built with 11.8"):
        assert cause in plan.why
    monkeypatch.setenv(build.SWITCH, "cuda")
    with pytest.raises(build.BuildError, match=r"LOCALSGD_EXT_BUILD=cuda, but .*12\.4"):
        build.make_plan(other)


def test_an_nvcc_that_cannot_be_run(toolkits: Path) -> None:
    (toolkits / "good" / "bin" / "nvcc").chmod(0o644)
    plan = build.make_plan(replace(build.running_target(), cuda="13.0"))
    assert plan.flavour == "cpu"
    assert "nvcc cannot be run: Permission denied" in plan.why


def test_architectures_asked_for(toolkits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0a 12.0+PTX")
    plan = build.make_plan(replace(build.running_target(), cuda="13.0"))
    assert plan.architectures == ("8.0", "9.0a", "12.0+PTX")
    with monkeypatch.context() as patch, pytest.raises(build.BuildError, match="'Hopper'; write capabilities as numbers"):
        patch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;Hopper")
        build.make_plan(replace(build.running_target(), cuda="13.0"))
    flags = build._arch_flags(plan.architectures)
    assert "arch=compute_90a,code=sm_90a" in flags
    assert flags[-2:] == ["-gencode", "arch=compute_120,code=compute_120"]


def test_the_toolkit_of_an_nvcc_that_is_a_script(toolkits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it starts lies in a folder that nobody would look into, and says so."""
    monkeypatch.undo()
    says_where = f'[ $1 = --dryrun ] && echo "#$ _HERE_=x\n#$ TOP={toolkits}/good/bin/.." >&2'
    straw(toolkits / "bare" / "bin" / "nvcc", f"{says_where}\necho release 13.0, V13.0.1")
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{toolkits / 'bare' / 'bin'}:/usr/bin:/bin")
    toolkit, why = build.find_toolkit(replace(build.running_target(), cuda="13.0"))
    assert toolkit is not None, why
    assert toolkit.nvcc == str(toolkits / "good" / "bin" / "nvcc")


@pytest.mark.parametrize(
    ("cxx", "program", "options"),
    [
        ("g++", "{bin}/g++", []),
        ("g++ -m64 -Wa,-k", "{bin}/g++", ["-Xcompiler", "-m64", "-Xcompiler", "-Wa\\,-k"]),
        ("ccache g++ -m64", "g++", ["-Xcompiler", "-m64"]),
    ],
)
def test_the_compiler_behind_nvcc(
    toolkits: Path, monkeypatch: pytest.MonkeyPatch, cxx: str, program: str, options: list[str]
) -> None:
    for name in ("g++", "ccache"):
        straw(toolkits / "tools" / name)
    monkeypatch.setenv("PATH", f"{toolkits / 'tools'}:/usr/bin:/bin")
    monkeypatch.setenv("CXX", cxx)
    commands: list[list[str]] = []
    monkeypatch.setattr(build, "_run", lambda command: (commands.append(command), straw(Path(command[-1]))))
    build.compile_into(toolkits / "built", build.make_plan(replace(build.running_target(), cuda="13.0")))
    wanted = [program.format(bin=toolkits / "tools"), *options, "-gencode"]
    calls = [command for command in commands if command[0].endswith("/nvcc")]
    assert calls
    for call in calls:
        at = call.index("-ccbin") + 1
        assert call[at : at + len(wanted)] == wanted


@pytest.mark.parametrize(
    ("architectures", "runs_on", "not_on"),
    [
        ("9.0", ["", "9.0"], ["8.0", "8.9", "10.0"]),
        ("8.6", ["8.6", "8.9"], ["8.0", "9.0"]),
        ("8.0+PTX", ["8.0 9.0 12.0", "10.0"], ["7.5"]),
        ("8.0 9.0", ["8.6 9.0"], ["8.6 10.0"]),
        ("10.0a", ["10.0"], ["10.3"]),
        ("10.0f", ["10.0 10.3"], ["11.0"]),
        ("9.0a+PTX 10.0f+PTX", ["9.0"], ["12.0"]),
        ("", [""], ["9.0"]),
        ("nonsense", [""], ["9.0"]),
    ],
)
def test_what_device_code_runs_on(architectures: str, runs_on: list[str], not_on: list[str]) -> None:
    for gpus in runs_on + not_on:
        assert build.covers(architectures.split(), gpus.split()) is (gpus in runs_on), gpus


class Machines:
    """Machines that share an installed package and a cache, with a torch that has CUDA 13; all compilers are scripts."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.package, self._log, self._patch = folder / "package", folder / "log", monkeypatch
        self._roots = build._toolkit_roots
        straw(folder / "c++", f"echo >> {self._log}")
        monkeypatch.setenv("CXX", str(folder / "c++"))
        monkeypatch.setenv("LOCALSGD_EXT_CACHE", str(folder / "cache"))
        monkeypatch.setattr(native, "__file__", str(self.package / "backends" / "native.py"))
        target = replace(build.running_target(), cuda="13.0")
        monkeypatch.setattr(build, "running_target", lambda: target)

    def on(self, gpus: str = "", asked: str = "", choice: str = "auto", toolkit: bool = True) -> None:
        """Go to a machine with these GPUs, TORCH_CUDA_ARCH_LIST and LOCALSGD_EXT_BUILD."""
        self._patch.setattr(build, "present_gpus", gpus.split)
        self._patch.setattr(build, "_toolkit_roots", self._roots if toolkit else lambda target: [])
        self._patch.setenv("TORCH_CUDA_ARCH_LIST", asked)
        self._patch.setenv(build.SWITCH, choice)

    def install(self, architectures: str) -> None:
        """Install a binary with this device code, or a CPU one."""
        self.on(asked=architectures, choice="cuda" if architectures else "cpu")
        build.compile_into(self.package, build.make_plan(build.running_target()))

    def found(self) -> tuple[str, str]:
        """Where the binary that is used lies (built: now), and what it was built for."""
        before = self._log.read_text() if self._log.exists() else ""
        folder = native.find_or_build().parent
        note = json.loads((folder / "_native.json").read_text())
        built_now = self._log.read_text() != before
        where = "built" if built_now else "installed" if folder == self.package else "cached"
        return where, " ".join([note["flavour"], *note["architectures"]])


@pytest.fixture
def machines(toolkits: Path, monkeypatch: pytest.MonkeyPatch) -> Machines:
    return Machines(toolkits, monkeypatch)


@pytest.mark.parametrize(
    ("installed", "machine", "found"),
    [
        ("9.0", {"gpus": "9.0"}, ("installed", "cuda 9.0")),
        ("8.0 9.0", {"gpus": "9.0"}, ("installed", "cuda 8.0 9.0")),
        ("8.0 12.0+PTX", {}, ("installed", "cuda 8.0 12.0+PTX")),
        ("9.0", {"gpus": "9.0", "asked": "8.0;9.0"}, ("installed", "cuda 9.0")),
        ("9.0", {"gpus": "9.0", "toolkit": False}, ("installed", "cuda 9.0")),
        ("9.0", {"gpus": "9.0", "toolkit": False, "choice": "cuda"}, ("installed", "cuda 9.0")),
        ("8.0", {"gpus": "9.0"}, ("built", "cuda 9.0")),
        ("8.0", {"gpus": "9.0", "asked": "8.0"}, ("installed", "cuda 8.0")),  # building it again would change nothing
        ("8.0", {"gpus": "9.0", "toolkit": False}, ("built", "cpu")),
        ("9.0", {"gpus": "9.0", "choice": "cpu"}, ("built", "cpu")),
        ("", {"toolkit": False}, ("installed", "cpu")),
        ("", {"choice": "cpu"}, ("installed", "cpu")),
        ("", {"gpus": "9.0"}, ("built", "cuda 9.0")),
    ],
)  # fmt: skip
def test_which_binary_is_used(machines: Machines, installed: str, machine: dict[str, Any], found: tuple[str, str]) -> None:
    machines.install(installed)
    machines.on(**machine)
    assert machines.found() == found
    again = ("cached" if found[0] == "built" else found[0], found[1])
    assert machines.found() == again


def test_machines_with_other_gpus_share_a_cache(machines: Machines) -> None:
    for gpus in ("8.0", "9.0"):
        machines.on(gpus)
        assert machines.found() == ("built", f"cuda {gpus}")
    for gpus, served in (("8.0", "8.0"), ("9.0", "9.0"), ("8.6", "8.0")):
        machines.on(gpus, toolkit=False)
        assert machines.found() == ("cached", f"cuda {served}")


def test_cuda_asked_for_in_vain(machines: Machines) -> None:
    machines.install("8.0")
    machines.on("9.0", choice="cuda", toolkit=False)
    with pytest.raises(build.BuildError, match="LOCALSGD_EXT_BUILD=cuda, but no usable CUDA toolkit"):
        machines.found()


def test_tools_that_cannot_be_started_are_build_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++ 'unbalanced")
    with pytest.raises(build.BuildError, match=r"CXX=.* is no command"):
        build.compiler()
    broken = tmp_path / "g++"
    broken.write_text("#!/nowhere/at/all\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    for call in (build.compiler_and_version, lambda: build._run([str(broken), "-c"])):
        with pytest.raises(build.BuildError, match=r"g\+\+.*\s*cannot be run: No such file"):
            call()


def test_a_driver_that_hangs_or_cannot_be_asked_shows_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/nowhere/at/all\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert build.present_gpus() == []
    monkeypatch.setattr(build, "TOOL_SECONDS", 0.2)
    tool.write_text("#!/bin/sh\nexec sleep 20\n")
    begun = time.monotonic()
    assert build.present_gpus() == []
    assert time.monotonic() - begun < 10
    tool.write_text("#!/bin/sh\necho 9.0\n")
    assert build.present_gpus() == ["9.0"]


def test_a_torch_that_cannot_be_imported_is_told_from_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    monkeypatch.setattr(build.sys, "executable", str(python))
    for script, found in (("exit 3", None), ("echo 'ImportError: libcudart.so.13' >&2; exit 1", "libcudart.so.13")):
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        if found is None:
            assert build.installed_target() is None
        else:
            with pytest.raises(build.BuildError, match=found):
                build.installed_target()


@pytest.mark.parametrize(
    ("asked", "jobs"), [("3", 3), ("0", 1), ("", len(os.sched_getaffinity(0))), ("all", len(os.sched_getaffinity(0)))]
)
def test_max_jobs(asked: str, jobs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_JOBS", asked)
    assert build._jobs() == jobs
