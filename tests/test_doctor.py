"""`localsgd-ext doctor` as a user meets it, on machines whose compilers are scripts: what it reports, and that it builds
nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from localsgd_ext import __version__, build
from localsgd_ext.backends import native
from localsgd_ext.cli import main
from tests.test_build import FIND, ONE_BUILD, Host

DOCTOR = "import sys; from localsgd_ext.cli import main; sys.exit(main(['doctor', *sys.argv[1:]]))"
BUILD = DOCTOR.replace("*sys.argv[1:]", "'--build'")
FAILS = "case $* in *--version*) ;; *) echo 'fatal error: sorry, no can do' >&2; exit 1;; esac"


@pytest.fixture
def host(tmp_path: Path) -> Host:
    host = Host(tmp_path)
    host.compiler("[ $1 = --version ] && echo c++ of straw 1.2 && echo Copyright")
    return host


def value(report: str, name: str) -> str:
    """What stands after `name:`, with the lines that continue it."""
    found = re.search(rf"^  {re.escape(name)}: +(.*(?:\n {{22}}.*)*)", report, re.MULTILINE)
    assert found is not None, f"no {name} in\n{report}"
    return "\n".join(line.strip() for line in found.group(1).splitlines())


def test_a_fresh_machine(host: Host) -> None:
    status, out, err = host.run(DOCTOR)
    assert (status, err) == (0, "")
    assert out.splitlines()[0] == "localsgd_ext"
    assert [value(out, name) for name in ("installed", "cached", "remembered failure")] == ["none"] * 3
    assert out.count(f"version:            {__version__}") == 1
    assert f"version:            {torch.__version__}\n" in out
    assert value(out, "C++ compiler").endswith("/bin/c++ (c++ of straw 1.2)")
    assert value(out, "LOCALSGD_EXT_BUILD") == "not set: auto"
    assert value(out, "LOCALSGD_EXT_CACHE") == str(host.cache)
    assert value(out, "Gloo") == "yes"
    assert value(out, "for CPU tensors").startswith("native: will be built on first use")
    if torch.version.cuda is None:
        assert value(out, "CUDA toolkit") == "this torch was built without CUDA"
        assert value(out, "for CUDA tensors") == (
            "torch: the native engine is for CPUs only (this torch was built without CUDA)"
        )
    assert host.calls() == 0
    assert not host.cache.exists(), "it writes nothing"


def test_build_builds_as_the_first_use_does(host: Host) -> None:
    status, out, err = host.run(BUILD)
    assert err.count("\n") == 1
    assert "building the native engine (cpu) for torch" in err
    assert host.calls() == ONE_BUILD
    path, built_for, fits = value(out, "cached").splitlines()
    assert path.startswith(str(host.cache))
    assert f"torch {torch.__version__}" in built_for
    assert fits == "fits"
    # The binary of a straw compiler is empty, and doctor has tried to load it.
    assert re.match(r"torch: .*cannot be loaded", value(out, "for CPU tensors"))
    assert status == 1, "what was asked for does not work"
    status, out, err = host.run(DOCTOR, LOCALSGD_EXT_BUILD="cpu")
    assert (status, err) == (1, "")
    assert re.match(r"problem: LOCALSGD_EXT_BUILD=cpu, but .*cannot be loaded", out.splitlines()[-1])
    assert host.calls() == ONE_BUILD


def test_a_remembered_failure(host: Host) -> None:
    host.compiler(FAILS)
    status, out, err = host.run(BUILD)
    assert status == 1, "auto trains without the native engine, but a build was asked for"
    assert out.splitlines()[-1].startswith("problem: an earlier build failed")
    assert "sorry, no can do" in err
    calls = host.calls()
    remembered = value(out, "remembered failure")
    assert "sorry, no can do" in remembered
    assert str(host.cache) in remembered.splitlines()[0]
    assert value(out, "for CPU tensors").startswith("torch: an earlier build failed")
    status, out, err = host.run(DOCTOR)
    assert (status, err) == (0, "")
    assert "problem:" not in out
    assert value(out, "remembered failure") == remembered
    status, out, _ = host.run(DOCTOR, CXX="/usr/bin/env")
    assert status == 0
    assert value(out, "for CPU tensors").startswith("native: will be built"), "another compiler is given a chance"
    assert host.calls() == calls


@pytest.mark.parametrize(
    ("asked", "more", "problem"),
    [
        ("nonsense", {}, "LOCALSGD_EXT_BUILD='nonsense' is not known; allowed: auto, cpu, cuda, off"),
        ("cuda", {}, "LOCALSGD_EXT_BUILD=cuda, but this torch was built without CUDA"),
        ("cpu", {"PATH": "/nonexistent"}, "LOCALSGD_EXT_BUILD=cpu, but no C++ compiler"),
    ],
)
def test_what_was_asked_for_cannot_be_had(host: Host, asked: str, more: dict[str, str], problem: str) -> None:
    if asked == "cuda" and torch.version.cuda is not None:
        pytest.skip("NOT RUN: this torch has CUDA; tests/test_build.py asks for it in vain there, too")
    status, out, err = host.run(DOCTOR, LOCALSGD_EXT_BUILD=asked, **more)
    assert (status, err) == (1, "")
    assert out.splitlines()[-1].startswith(f"problem: {problem}")
    assert value(out, "for CPU tensors").startswith("an error")
    assert host.calls() == 0


def test_a_cache_folder_that_cannot_be_written(host: Host) -> None:
    assert value(host.run(DOCTOR)[1], "cache folder") == "can be written"
    reason = "/dev/null is not a folder that can be written"
    status, out, err = host.run(DOCTOR, LOCALSGD_EXT_CACHE="/dev/null/cache")
    assert (status, err) == (0, "")
    assert value(out, "cache folder") == reason
    assert value(out, "for CPU tensors") == f"torch: there is no place for a binary: {reason}"
    status, out, _ = host.run(BUILD, LOCALSGD_EXT_CACHE="/dev/null/cache")
    assert status == 1
    assert out.splitlines()[-1].endswith(reason)


def test_switched_off(host: Host) -> None:
    status, out, err = host.run(BUILD, LOCALSGD_EXT_BUILD="off")
    assert (status, err) == (1, "localsgd-ext doctor: LOCALSGD_EXT_BUILD=off\n")
    assert value(out, "for CPU tensors") == "torch: LOCALSGD_EXT_BUILD=off"
    assert host.calls() == 0


def test_a_binary_for_another_torch_does_not_fit(host: Host) -> None:
    status, binary, err = host.run(FIND)
    assert status == 0, err
    edit_note(Path(binary).parent, torch="1.0.0")
    status, out, err = host.run(DOCTOR)
    assert (status, err) == (0, "")
    path, built_for, fits = value(out, "cached").splitlines()
    assert path == binary
    assert "torch 1.0.0" in built_for
    assert fits == f"does not fit: torch is {torch.__version__} here"
    assert value(out, "for CPU tensors").startswith("native: will be built")
    assert host.calls() == ONE_BUILD


def edit_note(folder: Path, **target: str) -> None:
    note = folder / f"{build.MODULE}.json"
    built = json.loads(note.read_text())
    note.write_text(json.dumps(built | {"key": "of another", "target": built["target"] | target}))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of the installed package, with a binary that loads; the cache is empty."""
    target = build.running_target()
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / f"{build.MODULE}{target.suffix}").touch()
    note = {
        "key": build.key(target, "cpu"),
        "target": vars(target),
        "flavour": "cpu",
        "architectures": [],
        "toolkit": None,
    }
    (folder / f"{build.MODULE}.json").write_text(json.dumps(note))
    monkeypatch.setattr(native, "__file__", str(folder / "backends" / "native.py"))
    monkeypatch.setattr(native, "_import", lambda binary: SimpleNamespace(cuda=False))
    monkeypatch.setenv("LOCALSGD_EXT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("LOCALSGD_EXT_BUILD", "cpu")
    return folder


def test_an_installed_binary(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert value(out, "installed").splitlines()[-1] == "fits"
    assert value(out, "for CPU tensors").startswith(f"native: {package}")
    assert value(out, "for CUDA tensors") == "torch: the native engine is for CPUs only (LOCALSGD_EXT_BUILD=cpu)"
    edit_note(package, cuda="11.8")
    assert main(["doctor"]) == 0
    assert f"does not fit: CUDA is {torch.version.cuda or 'no'} here" in value(capsys.readouterr().out, "installed")
    (package / f"{build.MODULE}.json").write_text("[1]")
    assert main(["doctor"]) == 0
    assert value(capsys.readouterr().out, "installed") == "none"


def test_toolkits_looked_at_and_architectures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A torch with CUDA 13: first without a usable toolkit, then with one."""
    target = build.Target(torch.__version__, "13.0", 1, torch.__path__[0], ".so", "/headers")
    monkeypatch.setattr(build, "running_target", lambda: target)
    monkeypatch.setattr(build, "present_gpus", list)
    monkeypatch.setattr(build, "_toolkit_roots", lambda target: [("first", tmp_path / "a"), ("second", tmp_path / "b")])
    monkeypatch.setenv("LOCALSGD_EXT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LOCALSGD_EXT_BUILD", raising=False)
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    assert main(["doctor"]) == 0
    looked = value(capsys.readouterr().out, "CUDA toolkit").splitlines()
    assert looked[0] == "no usable CUDA toolkit:"
    assert [line.partition(" ")[0] for line in looked[1:]] == ["first", "second"]

    nvcc = tmp_path / "b" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\necho release 13.1, V13.1.1\n")
    nvcc.chmod(0o755)
    (tmp_path / "b" / "include").mkdir()
    (tmp_path / "b" / "include" / "cuda_runtime.h").touch()
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    found = value(out, "CUDA toolkit")
    assert f"nvcc {nvcc}\nheaders {tmp_path / 'b' / 'include'}" in found
    assert found.startswith("13.1, second")
    assert value(out, "architectures").endswith("(the fixed list)")
    monkeypatch.setattr(build, "present_gpus", lambda: ["9.0"])
    assert main(["doctor"]) == 0
    assert value(capsys.readouterr().out, "architectures") == "9.0 (the GPUs present)"
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;12.0+PTX")
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert value(out, "architectures") == "8.0 12.0+PTX (TORCH_CUDA_ARCH_LIST=8.0;12.0+PTX)"
    if "none:" not in value(out, "C++ compiler"):
        assert value(out, "for CUDA tensors").startswith("native: will be built on first use (cuda")
