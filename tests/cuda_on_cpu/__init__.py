"""Builds the kernels of csrc/cuda for the CPU: see cuda_on_cpu.h."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch

HERE = Path(__file__).resolve().parent
CSRC = HERE.parent.parent / "csrc"
PYTHON_INCLUDE = Path(sysconfig.get_path("include"))
COMPILER = shutil.which("g++")


def build(folder: Path, name: str, options: Sequence[str], sources: Sequence[Path]) -> Path:
    """What g++ makes of `sources` and the kernels: in `folder` already unless something that goes into it has changed.

    `name` holds {} for what names that; `options` come after the sources.
    """
    torch_root = Path(torch.__file__).parent
    command = [
        *(COMPILER or "g++", "-O1", "-std=c++20", "-ffp-contract=off", "-fno-strict-aliasing"),
        *("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"),
        *("-DLOCALSGD_CUDA_ON_CPU", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"),
        # Before everything else, for the macros.
        *("-I", str(HERE), "-include", "cuda_on_cpu.h", "-isystem", str(torch_root / "include")),
        *("-x", "c++", *map(str, sorted((CSRC / "cuda").glob("*.cu"))), *map(str, sources)),
        *("-L", str(torch_root / "lib"), f"-Wl,-rpath,{torch_root / 'lib'}", *options, "-lc10"),
    ]
    compiler = subprocess.run([command[0], "-v"], capture_output=True, check=True).stderr
    key = hashlib.sha256(repr((command, compiler, torch.__version__)).encode())
    headers = {header for folder in (HERE, *(source.parent for source in sources)) for header in folder.glob("*.h")}
    for path in sorted({*headers, *CSRC.rglob("*.h"), *(CSRC / "cuda").iterdir(), *sources}):
        key.update(path.name.encode() + path.read_bytes())
    built = folder / name.format(key.hexdigest()[:24])
    if not built.exists():
        unfinished = built.with_name(f"{built.name}.{os.getpid()}")
        done = subprocess.run([*command, "-o", str(unfinished)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-8000:]
        unfinished.replace(built)
    return built


_loaded: dict[str, ModuleType] = {}


def load(folder: Path) -> ModuleType:
    """The compiled module, the same one at each call: its types can be registered only once."""
    options = ("-fPIC", "-shared", "-DTORCH_EXTENSION_NAME=cuda_on_cpu", "-isystem", str(PYTHON_INCLUDE))
    library = build(folder, f"cuda_on_cpu-{{}}{sysconfig.get_config_var('EXT_SUFFIX')}", options, [HERE / "module.cpp"])
    if library.name in _loaded:
        return _loaded[library.name]
    spec = importlib.util.spec_from_file_location("cuda_on_cpu", library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    _loaded[library.name] = module
    return module
