"""How the native engine is built: one description, used while installing (setup.py loads this file by its path) and on first use.

Needs nothing but the standard library and a compiler; torch is only looked at, in the interpreter that will import the result.
The compilers are called directly, so neither ninja nor torch's own build machinery has to be on PATH.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

SWITCH = "LOCALSGD_EXT_BUILD"
CHOICES = ("auto", "cpu", "cuda", "off")
MODULE = "_native"

_SOURCES = ("bindings.cpp", "pipeline.cpp", "cpu/kernels.cpp")
# Contraction into fused multiply-add is off: every engine has to give the same bits.
_CXX_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-ffp-contract=off", "-fvisibility=hidden")

_PROBE = """
import json, sys, sysconfig, torch
print(json.dumps({
    "torch": torch.__version__, "cuda": torch.version.cuda, "abi": int(torch._C._GLIBCXX_USE_CXX11_ABI),
    "root": torch.__path__[0], "suffix": sysconfig.get_config_var("EXT_SUFFIX"), "headers": sysconfig.get_path("include"),
}))
"""


class BuildError(RuntimeError):
    """The native engine cannot be built; the message holds the cause, or the compiler's own words."""


@dataclass(frozen=True)
class Target:
    """The torch and the Python that will import the binary."""

    torch: str  # version, with its local part: 2.13.0+cpu
    cuda: str | None  # the CUDA version torch was built with
    abi: int  # of the C++ library: 1 is the C++11 one
    root: str  # folder of the torch package
    suffix: str  # of extension modules
    headers: str  # Python's own


def running_target() -> Target:
    """The torch of this process."""
    import torch

    return Target(
        torch.__version__,
        torch.version.cuda,
        int(torch._C._GLIBCXX_USE_CXX11_ABI),
        torch.__path__[0],
        sysconfig.get_config_var("EXT_SUFFIX"),
        sysconfig.get_path("include"),
    )


def installed_target(python: str = sys.executable) -> Target | None:
    """The torch that `python` finds without this process's paths, or None. Sees through pip's isolated builds."""
    done = subprocess.run([python, "-I", "-c", _PROBE], capture_output=True, text=True, check=False)
    return Target(**json.loads(done.stdout.splitlines()[-1])) if done.returncode == 0 else None


def switch() -> str:
    """The value of LOCALSGD_EXT_BUILD. Raises BuildError for an unknown one."""
    value = os.environ.get(SWITCH, "auto") or "auto"
    if value not in CHOICES:
        raise BuildError(f"{SWITCH}={value!r} is not known; allowed: {', '.join(CHOICES)}")
    return value


def source_folder() -> Path:
    """The C++ sources: inside an installed package, beside it in a clone."""
    here = Path(__file__).resolve().parent
    for folder in (here / "csrc", here.parent / "csrc"):
        if (folder / "bindings.cpp").is_file():
            return folder
    raise BuildError(f"the C++ sources are missing: neither {here / 'csrc'} nor {here.parent / 'csrc'} holds them")


def compiler() -> str:
    """The C++ compiler: $CXX, else the first of c++, g++, clang++ on PATH. Raises BuildError if there is none."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (found := shutil.which(shlex.split(name)[0])):
            return found
    raise BuildError("no C++ compiler: $CXX is not set to one, and none of c++, g++, clang++ is on PATH")


def key(target: Target) -> str:
    """Names what a binary was built from and for: equal keys mean that it can be loaded."""
    digest = hashlib.sha256(json.dumps([asdict(target) | {"root": ""}, _CXX_FLAGS, sys.platform, os.uname().machine]).encode())
    for path in sorted(p for p in source_folder().rglob("*") if p.suffix in (".cpp", ".h") and p.parent.name != "cuda"):
        digest.update(path.relative_to(source_folder()).as_posix().encode() + b"\0" + path.read_bytes())
    release = re.sub(r"[^0-9A-Za-z.]", "-", target.torch)
    return f"torch-{release}-{digest.hexdigest()[:16]}"


def compile_into(folder: Path, target: Target) -> Path:
    """Compile and link the engine; gives the binary's path in `folder`. Raises BuildError with the compiler's own words."""
    cxx, sources = compiler(), source_folder()
    include = [f"{target.root}/include", f"{target.root}/include/torch/csrc/api/include", target.headers]
    flags = [*_CXX_FLAGS, f"-DTORCH_EXTENSION_NAME={MODULE}", f"-D_GLIBCXX_USE_CXX11_ABI={target.abi}"]
    flags += [word for path in include for word in ("-isystem", path)]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        objects = [f"{scratch}/{name.replace('/', '_')}.o" for name in _SOURCES]
        commands = [[cxx, *flags, "-c", str(sources / name), "-o", out] for name, out in zip(_SOURCES, objects, strict=True)]
        # A translation unit with torch's headers takes about 1 GB.
        with concurrent.futures.ThreadPoolExecutor(min(len(commands), os.cpu_count() or 1)) as pool:
            list(pool.map(_run, commands))
        library = f"{target.root}/lib"
        linked = f"{scratch}/{MODULE}{target.suffix}"
        _run([cxx, "-shared", *objects, f"-L{library}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python", "-o", linked])
        binary = folder / Path(linked).name
        os.replace(linked, binary)
    (folder / f"{MODULE}.json").write_text(json.dumps({"key": key(target), **asdict(target)}, indent=1) + "\n")
    return binary


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False)
    if done.returncode != 0:
        raise BuildError(f"{shlex.join(command)}\nfailed with exit status {done.returncode}:\n{done.stdout.strip()}")
