"""How the native engine is built: one description, used while installing (setup.py loads this file by its path) and on first
use.

Needs nothing but the standard library and a compiler; torch is only looked at, in the interpreter that will import the result.
The compilers are called directly, so neither ninja nor torch's own build machinery has to be on PATH.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

SWITCH = "LOCALSGD_EXT_BUILD"
CHOICES = ("auto", "cpu", "cuda", "off")
MODULE = "_native"

_SOURCES = (
    "bindings.cpp",
    "exchange.cpp",
    "value_bucket.cpp",
    "coded_bucket.cpp",
    "pipeline.cpp",
    "cpu/kernels.cpp",
    "cpu/coded.cpp",
)
_CUDA_SOURCES = ("cuda/kernels.cu", "cuda/coded.cu")
# Contraction into fused multiply-add is off: every engine has to give the same bits.
_NVCC_FLAGS = ("-std=c++20", "-O3", "--fmad=false", "--expt-relaxed-constexpr", "-Xcompiler", "-fPIC,-fvisibility=hidden")
# Without OpenMP torch's parallel_for is a plain loop.
_CXX_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-ffp-contract=off", "-fvisibility=hidden", "-fopenmp")

_PROBE = """
import importlib.util, json, sys, sysconfig
if importlib.util.find_spec("torch") is None:
    sys.exit(3)
import torch
print(json.dumps({
    "torch": torch.__version__, "cuda": torch.version.cuda, "abi": int(torch._C._GLIBCXX_USE_CXX11_ABI),
    "root": torch.__path__[0], "suffix": sysconfig.get_config_var("EXT_SUFFIX"), "headers": sysconfig.get_path("include"),
}))
"""


TOOL_SECONDS = 20.0
"""How long the driver's tool is waited for: a driver that hangs must not hang an installation."""


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


def installed_target() -> Target | None:
    """The torch that this Python finds without this process's paths, or None. Sees through pip's isolated builds. Raises
    BuildError if it cannot be imported."""
    done = subprocess.run([sys.executable, "-I", "-c", _PROBE], capture_output=True, text=True, check=False)
    if done.returncode == 3:
        return None
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise BuildError(f"torch is there, but cannot be imported: {said}")
    return Target(**json.loads(done.stdout.splitlines()[-1]))


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


def compiler() -> list[str]:
    """The C++ compiler: $CXX with its arguments, else the first of c++, g++, clang++ on PATH. Raises BuildError if there is
    none."""
    for command in (os.environ.get("CXX") or "", "c++", "g++", "clang++"):
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise BuildError(f"CXX={command!r} is no command: {error}") from error
        if words and (found := shutil.which(words[0])):
            return [found, *words[1:]]
    raise BuildError("no C++ compiler: $CXX is not set to one, and none of c++, g++, clang++ is on PATH")


def compiler_and_version() -> str:
    """The C++ compiler with the first line of what it says about itself. Raises BuildError if there is none."""
    command = compiler()
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise BuildError(f"{shlex.join(command)} cannot be run: {error.strerror}") from error
    said = next((line.strip() for line in done.stdout.splitlines() if line.strip()), f"--version: status {done.returncode}")
    return f"{shlex.join(command)} ({said})"


def _host_flags(cxx: list[str]) -> list[str]:
    """nvcc's flags for that compiler. nvcc takes one program, so what only starts it (`ccache g++`) is left out."""
    programs = list(itertools.takewhile(lambda word: not word.startswith("-"), cxx))
    options = (word.replace(",", "\\,") for word in cxx[len(programs) :])  # nvcc takes a bare comma for the end of an option
    return ["-ccbin", programs[-1], *(word for option in options for word in ("-Xcompiler", option))]


_TARGET = {"aarch64": "sbsa-linux"}.get(os.uname().machine, f"{os.uname().machine}-linux")
"""What CUDA calls this kind of machine."""


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit that can compile: a compiler and headers of one version."""

    nvcc: str
    include: str
    version: str  # major.minor
    why: str  # where it was found


def find_toolkit(target: Target) -> tuple[Toolkit | None, str]:
    """A toolkit of the same major version as torch's CUDA, or None; and what was looked at, for a person to read."""
    if target.cuda is None:
        return None, "this torch was built without CUDA"
    seen = []
    for where, root in _toolkit_roots(target):
        nvcc = root / "bin" / "nvcc"
        include = next((p for p in (root / "include", root / "targets" / _TARGET / "include") if _has_runtime(p)), None)
        if not nvcc.is_file() or include is None:
            seen.append(f"{where} ({root}): " + ("no bin/nvcc" if not nvcc.is_file() else "no include/cuda_runtime.h"))
            continue
        try:
            said = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=False).stdout
        except OSError as error:
            seen.append(f"{where} ({root}): nvcc cannot be run: {error.strerror}")
            continue
        found = re.search(r"release (\d+\.\d+)", said)
        version = found.group(1) if found else "unknown"
        if version.split(".")[0] != target.cuda.split(".")[0]:
            seen.append(f"{where} ({root}): CUDA {version}, but torch was built with {target.cuda}")
            continue
        return Toolkit(str(nvcc), str(include), version, f"{where} ({root})"), f"{where} ({root}): CUDA {version}"
    return None, "no usable CUDA toolkit: " + ("; ".join(seen) or "none found")


def _toolkit_roots(target: Target) -> list[tuple[str, Path]]:
    """Folders that may hold a toolkit, the most explicit first, each with how it was found."""
    roots = [(f"${name}", Path(os.environ[name])) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    if nvcc := shutil.which("nvcc"):
        roots.append(("nvcc on PATH", Path(nvcc).resolve().parent.parent))
        # It may be a script that starts the real one: then no headers lie beside it, but the real one names its folder.
        if (top := _top(nvcc)) is not None and top != roots[-1][1]:
            roots.append(("started by nvcc on PATH", top))
    roots += [("standard folder", path) for path in sorted(Path("/usr/local").glob("cuda*"), reverse=True)]
    if conda := os.environ.get("CONDA_PREFIX"):
        roots.append(("conda", Path(conda)))
    roots += [("wheels", path) for path in sorted(Path(target.root).parent.glob("nvidia/cu[0-9]*"), reverse=True)]
    return roots


def _top(nvcc: str) -> Path | None:
    """The folder that this nvcc takes its toolkit from."""
    try:
        said = subprocess.run([nvcc, "--dryrun", "x.cu"], capture_output=True, text=True, errors="replace", check=False).stderr
    except OSError:
        return None  # find_toolkit says why it cannot be run
    found = re.search(r"^#\$ TOP=(.+)$", said, re.MULTILINE)
    return Path(found.group(1)).resolve() if found else None


def _has_runtime(include: Path) -> bool:
    return (include / "cuda_runtime.h").is_file()


def architectures(toolkit: Toolkit) -> list[str]:
    """Compute capabilities to build for, as "9.0" or "10.0+PTX": $TORCH_CUDA_ARCH_LIST, else the GPUs present, else a fixed
    list."""
    if asked := os.environ.get("TORCH_CUDA_ARCH_LIST"):
        archs = [arch for arch in re.split(r"[ ;,]+", asked) if arch]
        if unknown := [arch for arch in archs if not re.fullmatch(r"\d+\.\d+[af]?(\+PTX)?", arch)]:
            raise BuildError(
                f"TORCH_CUDA_ARCH_LIST holds {unknown[0]!r}; write capabilities as numbers, such as 9.0 or 9.0+PTX"
            )
        return archs
    if present := present_gpus():
        return present
    newest = {
        "11": ["7.0", "8.0", "8.6+PTX"],
        "12": ["7.5", "8.0", "8.6", "9.0+PTX"],
        "13": ["8.0", "8.6", "9.0", "10.0", "12.0+PTX"],
    }
    return newest.get(toolkit.version.split(".")[0], ["8.0", "9.0+PTX"])


def present_gpus() -> list[str]:
    """Capabilities of this machine's GPUs; none where the driver's tool is missing or finds none."""
    if (tool := shutil.which("nvidia-smi")) is None:
        return []
    command = [tool, "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TOOL_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return sorted({line.strip() for line in done.stdout.splitlines() if re.fullmatch(r"\d+\.\d+", line.strip())})


def covers(architectures: Iterable[str], gpus: Iterable[str]) -> bool:
    """Whether device code for `architectures` runs on each of these GPUs, which are given as capabilities ("9.0")."""
    return all(any(_runs(arch, gpu) for arch in architectures) for gpu in gpus)


def _runs(arch: str, gpu: str) -> bool:
    """Code runs on its own capability and on later minors of the same major, PTX on everything later; 9.0a only on 9.0."""
    parts = re.fullmatch(r"(\d+)\.(\d+)([af]?)(\+PTX)?", arch)
    if parts is None:
        return False
    built, present = (int(parts[1]), int(parts[2])), tuple(map(int, gpu.split(".")))
    if parts[3] == "a":
        return built == present
    return built <= present and (built[0] == present[0] or (parts[4] is not None and not parts[3]))


@dataclass(frozen=True)
class Plan:
    """What is built, for which torch, and why."""

    target: Target
    flavour: str  # "cpu" or "cuda"
    toolkit: Toolkit | None
    architectures: tuple[str, ...]
    why: str


def make_plan(target: Target) -> Plan:
    """Decide on the flavour: CUDA where torch has it and a matching toolkit is found, unless the switch says otherwise.

    Raises BuildError if CUDA is asked for and cannot be had.
    """
    choice = switch()
    toolkit, why = find_toolkit(target) if choice != "cpu" else (None, f"{SWITCH}=cpu")
    if toolkit is None:
        if choice == "cuda":
            raise BuildError(f"{SWITCH}=cuda, but {why}")
        return Plan(target, "cpu", None, (), why)
    return Plan(target, "cuda", toolkit, tuple(architectures(toolkit)), why)


def key(target: Target, flavour: str) -> str:
    """Names what a binary was built from and for: equal keys mean that it loads and is right.

    Toolkit and architectures are left out, so that a binary serves machines that lack the one and ask for others: see `covers`.
    """
    description = [
        asdict(target) | {"root": "", "headers": ""}, flavour, _CXX_FLAGS, _NVCC_FLAGS, sys.platform, os.uname().machine,
    ]  # fmt: skip
    digest = hashlib.sha256(json.dumps(description).encode())
    folder = source_folder()
    for path in sorted(p for p in folder.rglob("*") if p.suffix in (".cpp", ".h", ".cu", ".cuh")):
        if flavour == "cuda" or path.parent.name != "cuda":
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    release = re.sub(r"[^0-9A-Za-z.]", "-", target.torch)
    return f"torch-{release}-{flavour}-{digest.hexdigest()[:16]}"


def compile_into(folder: Path, plan: Plan) -> Path:
    """Compile and link the engine; gives the binary's path in `folder`. Raises BuildError with the compiler's own words."""
    cxx, sources, target = compiler(), source_folder(), plan.target
    include = [f"{target.root}/include", f"{target.root}/include/torch/csrc/api/include", target.headers]
    common = [f"-DTORCH_EXTENSION_NAME={MODULE}", f"-D_GLIBCXX_USE_CXX11_ABI={target.abi}"]
    libraries = [f"-L{target.root}/lib", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    if plan.toolkit is not None:
        include.append(plan.toolkit.include)
        common.append("-DLOCALSGD_CUDA")
        # The runtime of the toolkit is linked in, so that none has to be found when the binary is loaded.
        runtime = [f"-L{path}" for path in _runtime_folders(plan.toolkit)]
        libraries += ["-lc10_cuda", *runtime, "-lcudart_static", "-lpthread", "-ldl", "-lrt"]
    common += [word for path in include for word in ("-isystem", path)]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        commands, objects = [], []
        for name in (*_SOURCES, *(_CUDA_SOURCES if plan.toolkit else ())):
            objects.append(f"{scratch}/{name.replace('/', '_')}.o")
            start = [*cxx, *_CXX_FLAGS]
            if name.endswith(".cu") and plan.toolkit is not None:
                start = [plan.toolkit.nvcc, *_NVCC_FLAGS, *_host_flags(cxx), *_arch_flags(plan.architectures)]
            commands.append([*start, *common, "-c", str(sources / name), "-o", objects[-1]])
        with concurrent.futures.ThreadPoolExecutor(min(len(commands), _jobs())) as pool:
            list(pool.map(_run, commands))
        linked = f"{scratch}/{MODULE}{target.suffix}"
        _run([*cxx, "-shared", "-fopenmp", *objects, *libraries, "-o", linked])
        binary = folder / Path(linked).name
        os.replace(linked, binary)
    (folder / f"{MODULE}.json").write_text(json.dumps({"key": key(target, plan.flavour), **asdict(plan)}, indent=1) + "\n")
    return binary


def _jobs() -> int:
    """Compilers at once: a translation unit with torch's headers takes about 1 GB. $MAX_JOBS, as in torch's own builds, else
    one per core."""
    asked = os.environ.get("MAX_JOBS", "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, int(asked)) if asked.isdecimal() else cores or 1


def _runtime_folders(toolkit: Toolkit) -> list[Path]:
    root = Path(toolkit.include).parent
    return [path for path in (root / "lib64", root / "lib") if path.is_dir()]


def _arch_flags(architectures: tuple[str, ...]) -> list[str]:
    flags = []
    for arch in architectures:
        number = arch.removesuffix("+PTX").replace(".", "")
        flags += ["-gencode", f"arch=compute_{number},code=sm_{number}"]
        if arch.endswith("+PTX"):
            flags += ["-gencode", f"arch=compute_{number},code=compute_{number}"]
    return flags


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False
        )
    except OSError as error:
        raise BuildError(f"{shlex.join(command)}\ncannot be run: {error.strerror}") from error
    if done.returncode != 0:
        raise BuildError(f"{shlex.join(command)}\nfailed with exit status {done.returncode}:\n{done.stdout.strip()}")
