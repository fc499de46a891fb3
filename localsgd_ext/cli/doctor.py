"""`localsgd-ext doctor`: what was found on this machine, what the native engine would be built with, and what backend="auto"
picks.

Builds nothing unless told to. Every decision is asked of `build` and `backends.native`, which take it when training starts.
"""

from __future__ import annotations

import argparse
import collections
import importlib.metadata
import os
import sys
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .. import build
from .._version import __version__
from ..backends import native

_CANNOT = (RuntimeError, OSError, ImportError, AssertionError)  # BuildError, a program that does not start, CUDA's refusals
_WIDTH = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `doctor`."""
    parser.add_argument("--build", action="store_true", help="build the native engine first, as its first use would")


def run(args: argparse.Namespace) -> int:
    """Print the report; gives 1 if what LOCALSGD_EXT_BUILD or --build asks for cannot be had, else 0."""
    failed = ""
    if args.build:
        try:
            native.find_or_build()
        except _CANNOT as error:
            failed = str(error)
            print(f"localsgd-ext doctor: {error}", file=sys.stderr, flush=True)
    target = build.running_target()
    plan, cached, refusal = None, [], ""
    try:
        cached = native.cached_folders(target)
        plan = build.make_plan(target)
    except _CANNOT as error:
        refusal = str(error)

    _section("localsgd_ext", before="")
    _row("version", __version__)
    _row("folder", native.installed_folder())
    _row("Python", f"{sys.version.split()[0]} ({sys.executable})")
    _row("accelerate", *_ask(lambda: [importlib.metadata.version("accelerate")]))
    _section("torch")
    _row("version", target.torch)
    _row("folder", target.root)
    _row("built with CUDA", target.cuda or "no")
    _row("C++ ABI", f"{target.abi} ({'C++11' if target.abi else 'before C++11'})")
    _row("Gloo", "yes" if dist.is_gloo_available() else "no")
    _row("NCCL", *(_ask(lambda: [".".join(map(str, torch.cuda.nccl.version()))]) if dist.is_nccl_available() else ["no"]))
    _row("GPUs", *_ask(_gpus))
    _section("build")
    _row(build.SWITCH, os.environ.get(build.SWITCH) or "not set: auto")
    _row("LOCALSGD_EXT_CACHE", os.environ.get("LOCALSGD_EXT_CACHE") or f"not set: {native.cache_folder()}")
    _row("cache folder", native.cache_problem() or "can be written")
    _row("C++ compiler", *_ask(lambda: [build.compiler_and_version()]))
    _row("CUDA toolkit", *_ask(lambda: _toolkit(target)))
    _row("architectures", f"not known: {refusal}" if plan is None else _architectures(plan))
    _section("binary")
    _row("installed", *_binary(native.installed_folder(), target) or ["none"])
    _row("cached", *[line for folder in cached for line in _binary(folder, target)] or ["none"])
    others = [path.parent for path in native.cache_folder().glob(f"*/{build.MODULE}.json") if path.parent not in cached]
    if others:
        _row("cached for others", f"{len(others)}, the newest:", *_binary(max(others, key=os.path.getmtime), target))
    _row("remembered failure", *_failure(plan))

    devices, why = _outlook(target, plan, refusal)
    strict = _is_strict()
    without = "an error, see the last line" if strict else f"torch: {why}"
    _section('backend="auto" picks')
    _row("for CPU tensors", f"native: {why}" if "cpu" in devices else without)
    if devices and "cuda" not in devices and plan is not None:
        without = f"torch: the native engine is for CPUs only ({plan.why.partition(':')[0]})"
    _row("for CUDA tensors", f"native: {why}" if "cuda" in devices else without)
    if not failed and (devices or not (strict or args.build)):
        return 0
    why = failed if devices else why
    asked = f"{build.SWITCH}={build.switch()}, but " if strict and not why.startswith(build.SWITCH) else ""
    print(f"\nproblem: {asked}{' '.join(why.splitlines())}")
    return 1


def _section(title: str, before: str = "\n") -> None:
    print(f"{before}{title}", flush=True)  # section by section: loading a broken binary can end the process


def _row(name: str, *lines: object) -> None:
    """A name and its value; further lines of the value go below its first one."""
    text = [part for line in lines for part in str(line).splitlines() or [""]]
    print(f"  {name + ':':<{_WIDTH}}" + ("\n" + " " * (_WIDTH + 2)).join(text))


def _ask(question: Callable[[], list[str]]) -> list[str]:
    """The answer, line by line, or why there is none."""
    try:
        return question()
    except _CANNOT as error:
        return [f"none: {error}"]


def _is_strict() -> bool:
    """Whether training ends with an error, rather than going on with the PyTorch engine, where the native one cannot be had."""
    try:
        return build.switch() in ("cpu", "cuda")
    except build.BuildError:
        return True


def _outlook(target: build.Target, plan: build.Plan | None, refusal: str) -> tuple[Collection[str], str]:
    """The types of devices that the native engine serves, none where it cannot be had; and why."""
    if os.environ.get(build.SWITCH) == "off":
        return (), f"{build.SWITCH}=off"
    try:
        if (found := native.find(target)) is not None:
            return native.NativeBackend(native._import(found)).devices, f"{found} fits"
        if plan is None:
            return (), refusal
        tools = native.tools(plan)
    except _CANNOT as error:
        return (), str(error)
    if (failure := native.remembered_failure(plan)) is not None and failure[1] == tools:
        return (), f"an earlier build failed (remembered; delete {failure[0]} to try again)"
    if (problem := native.cache_problem()) is not None:
        return (), f"there is no place for a binary: {problem}"
    return {"cpu", plan.flavour}, f"will be built on first use ({plan.flavour}, about a minute)"


def _gpus() -> list[str]:
    present = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    counted = collections.Counter((each.name, each.major, each.minor) for each in present)
    return [f"{n} x {name}, capability {major}.{minor}" for (name, major, minor), n in counted.items()] or ["none"]


def _toolkit(target: build.Target) -> list[str]:
    toolkit, why = build.find_toolkit(target)
    if toolkit is None:
        return why.replace(": ", ":\n", 1).replace("; ", "\n").splitlines()
    return [f"{toolkit.version}, {toolkit.why}", f"nvcc {toolkit.nvcc}", f"headers {toolkit.include}"]


def _architectures(plan: build.Plan) -> str:
    if plan.toolkit is None:
        return f"none, built for CPUs only ({plan.why.partition(':')[0]})"
    asked = os.environ.get("TORCH_CUDA_ARCH_LIST")
    source = f"TORCH_CUDA_ARCH_LIST={asked}" if asked else "the GPUs present" if build.present_gpus() else "the fixed list"
    return f"{' '.join(plan.architectures) or 'none understood'} ({source})"


def _binary(folder: Path, target: build.Target) -> list[str]:
    """The binary in `folder`, what it was built for, and whether it fits; no lines if there is none."""
    found = native.binary_with_note(folder)
    if found is None:
        return []
    built = found[1]
    made_for, here = _described(built["target"]), _described(asdict(target))
    details = made_for | {"flavour": built["flavour"], "toolkit": (built.get("toolkit") or {}).get("version", "no")}
    details["architectures"] = " ".join(built["architectures"]) or "no"
    lines = [str(found[0]), "built for " + ", ".join(f"{name} {value}" for name, value in details.items() if value != "no")]
    try:
        why = native.misfit(built, target)
    except _CANNOT:
        return [*lines, "not known whether it fits"]
    differing = [f"{name} is {value} here" for name, value in here.items() if made_for[name] != value]
    return [*lines, "fits" if why is None else "does not fit: " + ("; ".join(differing) or why)]


def _described(target: dict[str, Any]) -> dict[str, str]:
    """What a binary depends on, named for a person."""
    fields = {"torch": target.get("torch"), "CUDA": target.get("cuda") or "no"}
    fields |= {"ABI": target.get("abi"), "Python": target.get("suffix")}
    return {name: str(value) for name, value in fields.items()}


def _failure(plan: build.Plan | None) -> list[str]:
    failure = native.remembered_failure(plan) if plan is not None else None
    if failure is None:
        return ["none"]
    path, tools, said = failure
    lines = [line if len(line) <= 160 else line[:157] + "..." for line in said.splitlines()]
    return [f"{path}, with {tools}", *lines[:8], *(["..."] if len(lines) > 8 else [])]
