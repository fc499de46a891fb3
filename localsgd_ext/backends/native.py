"""The compiled engine: found beside this package or in the cache, or built on first use; the same interface as the
reference."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.machinery
import importlib.util
import json
import os
import shutil
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from .. import build
from ..collectives import POLL_SECONDS, Terms
from ..layout import Bucket, Rule, Table
from ..outer import Outer, OuterSGD
from ..wire import Chunks, Code
from .interface import BoundBucket, State

_MEAN, _SGD, _GRADIENT = range(3)
"""Kinds of outer steps, numbered as in elementwise.h."""

LOCK_SECONDS = 600.0
"""How long a rank waits for another that is building; a build that was killed leaves no lock behind."""


class NativeBackend:
    """See `Backend`."""

    name = "native"

    def __init__(self, extension: ModuleType) -> None:
        self._extension: Any = extension
        self.devices = frozenset({"cpu", "cuda"} if self._extension.cuda else {"cpu"})  # types that it has kernels for

    def bind(
        self, table: Table, bucket: Bucket, flats: Sequence[torch.Tensor], staging: torch.Tensor, scratch: torch.Tensor
    ) -> BoundBucket:
        assert isinstance(table.wire, torch.dtype)
        buffer = staging[: bucket.numel * table.wire.itemsize].view(table.wire)
        return self._extension.ValueBucket(*_segments(bucket, flats), buffer, bucket.drift_numel, table.rule is Rule.FOLLOW)

    def bind_coded(
        self,
        table: Table,
        bucket: Bucket,
        flats: Sequence[torch.Tensor],
        staging: torch.Tensor,
        chunks: Chunks,
        state: State,
        outer: Outer | None,
        rank: int,
        size: int,
    ) -> BoundBucket:
        assert isinstance(table.wire, Code)
        if isinstance(outer, OuterSGD):
            kind, lr, momentum, nesterov = _SGD, outer.lr, outer.momentum, outer.nesterov
        else:
            kind, lr, momentum, nesterov = _MEAN if outer is None else _GRADIENT, 1.0, 0.0, False
        return self._extension.CodedBucket(
            *_segments(bucket, flats), staging, bucket.drift_numel, list(Code).index(table.wire), chunks.count, chunks.blocks,
            chunks.nbytes, chunks.summed, state.homes, state.heres, kind, lr, momentum, nesterov, rank, size,
        )  # fmt: skip

    def average(self, buckets: Sequence[BoundBucket], group: dist.ProcessGroup, terms: Terms) -> torch.Tensor:
        milliseconds = 0 if terms.timeout is None else max(1, int(terms.timeout.total_seconds() * 1000))
        return self._extension.average(
            buckets,
            group,
            terms.contributes,
            terms.divisor,
            terms.root,
            terms.watch,
            int(POLL_SECONDS * 1000),
            milliseconds,
        )


def _segments(bucket: Bucket, flats: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[tuple[int, int, int]]]:
    """The bucket's tensors, and for each of its segments the tensor's number, the first element and their number."""
    tensors = [flats[segment.tensor] for segment in bucket.segments]
    return tensors, [(index, segment.start, segment.numel) for index, segment in enumerate(bucket.segments)]


def load() -> NativeBackend:
    """The engine for the running torch. Raises BuildError with the cause if it cannot be had."""
    return NativeBackend(_import(find_or_build()))


def find_or_build() -> Path:
    """The binary for the running torch: installed, cached, or built now by one of the ranks of this host."""
    if build.switch() == "off":
        raise build.BuildError(f"{build.SWITCH}=off")
    target = build.running_target()
    return find(target) or _build(build.make_plan(target))


def find(target: build.Target) -> Path | None:
    """The binary that is used, if it is installed or cached. Raises BuildError if there is none and can be none."""
    found = [each for folder in (installed_folder(), *cached_folders(target)) if (each := binary_with_note(folder)) is not None]
    found.sort(key=lambda each: each[1]["flavour"] != "cuda")  # one with CUDA needs no toolkit here, so none is looked for
    return next((binary for binary, built in found if misfit(built, target) is None), None)


def misfit(built: dict[str, Any], target: build.Target) -> str | None:
    """Why a binary with this note is not used, or None if it can be. Raises BuildError where the switch asks for the
    impossible."""
    flavour, architectures = built["flavour"], built["architectures"]
    if built["key"] != build.key(target, flavour):
        return "other sources, flags or platform"
    if flavour != "cuda":
        return "CUDA can be built" if build.make_plan(target).flavour == "cuda" else None
    if build.switch() == "cpu":
        return f"{build.SWITCH}=cpu"
    # The driver's tool is asked, and only now that the answer matters: it takes a moment, but to ask torch would initialise
    # CUDA in this process, which a user who forks later could not have. What building again would not change is accepted.
    gpus = build.present_gpus()
    if build.covers(architectures, gpus) or tuple(architectures) == build.make_plan(target).architectures:
        return None
    return f"no code for the GPUs here ({' '.join(gpus)})"


def cache_folder() -> Path:
    """Where binaries built on first use are kept: $LOCALSGD_EXT_CACHE, else the user's cache folder."""
    if chosen := os.environ.get("LOCALSGD_EXT_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "localsgd_ext"


def cache_problem() -> str | None:
    """Why the cache folder cannot be written, or None if it can. Nothing is written to find out."""
    folder = cache_folder()
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        return None
    return f"{there} is not a folder that can be written"


def installed_folder() -> Path:
    """Where an installation puts its binary."""
    return Path(__file__).parent.parent


def cached_folders(target: build.Target) -> list[Path]:
    """The folders of the cache with binaries for this torch, of either flavour and for any GPU."""
    return [path for flavour in ("cuda", "cpu") for path in sorted(cache_folder().glob(f"{build.key(target, flavour)}*"))]


def _folder(plan: build.Plan) -> Path:
    """Where that build goes in the cache: machines with other GPUs may share it, and must not replace each other's binaries."""
    return cache_folder() / "-".join((build.key(plan.target, plan.flavour), *plan.architectures))


def binary_with_note(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The binary in `folder`, whatever it was built for, and the note saying what that was."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        built = json.loads((folder / f"{build.MODULE}.json").read_text())
        binary = folder / f"{build.MODULE}{built['target']['suffix']}"
        if binary.is_file() and built.keys() >= {"key", "flavour", "architectures"}:
            return binary, built
    return None


def remembered_failure(plan: build.Plan) -> tuple[Path, str, str] | None:
    """The file that remembers a failed build, the tools it failed with (no others are held to it), and what was said."""
    path = Path(f"{_folder(plan)}.failed")
    if not path.is_file():
        return None
    with_tools, _, said = path.read_text().partition("\n")
    return path, with_tools, said


def tools(plan: build.Plan) -> str:
    """The compilers of a build, with their versions. Raises BuildError if there is none."""
    return build.compiler_and_version() + (f", {plan.toolkit.nvcc} ({plan.toolkit.version})" if plan.toolkit else "")


def _build(plan: build.Plan) -> Path:
    folder = _folder(plan)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(Path(f"{folder}.lock")):
        if (found := binary_with_note(folder)) is not None and found[1]["key"] == build.key(plan.target, plan.flavour):
            return found[0]  # another rank was faster
        with_tools = tools(plan)
        if (failure := remembered_failure(plan)) is not None and failure[1] == with_tools:
            raise build.BuildError(f"{failure[2]}\n(remembered; delete {failure[0]} to try again)")
        begun = time.monotonic()
        print(
            f"localsgd_ext: building the native engine ({plan.flavour}) for torch {plan.target.torch} (once, about a minute) ...",
            end="", file=sys.stderr, flush=True,
        )  # fmt: skip
        # Its name starts otherwise than a finished one's. It is here already if an earlier build was killed.
        scratch = folder.with_name(f"building-{folder.name}")
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            binary = build.compile_into(scratch, plan)
            shutil.rmtree(folder, ignore_errors=True)  # what lies there is not usable, or it would have been used
            os.replace(scratch, folder)
        except build.BuildError as error:
            print(" failed", file=sys.stderr, flush=True)
            Path(f"{folder}.failed").write_text(f"{with_tools}\n{error}")
            raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        print(f" done in {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    return folder / binary.name


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """The operating system's lock on a file: it ends with the process that holds it, however that ends."""
    deadline = time.monotonic() + LOCK_SECONDS
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise build.BuildError(f"another process has been building for {LOCK_SECONDS:.0f} s ({path})") from None
                time.sleep(0.1)
        yield


def _import(binary: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(build.MODULE, str(binary))
    spec = importlib.util.spec_from_file_location(build.MODULE, binary, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise build.BuildError(f"{binary} cannot be loaded: {error}") from error
    return module


_loaded: NativeBackend | build.BuildError | None = None


def get() -> NativeBackend:
    """The engine, looked for once per process. Raises BuildError, the same one each time."""
    global _loaded
    if _loaded is None:
        try:
            _loaded = load()
        except build.BuildError as error:
            _loaded = error
        except OSError as error:  # a cache folder that cannot be written, say
            _loaded = build.BuildError(f"{type(error).__name__}: {error}")
    if isinstance(_loaded, build.BuildError):
        raise build.BuildError(
            *_loaded.args
        )  # a new one: each time it is raised it would hold on to the frames it came through
    return _loaded


def get_or_warn() -> NativeBackend | None:
    """The engine, or None after one warning per process that says why it cannot be had."""
    known = _loaded is not None
    try:
        return get()
    except build.BuildError as error:
        if build.switch() in ("cpu", "cuda"):
            raise
        if not known and build.switch() != "off":
            warnings.warn(
                f"localsgd_ext goes on with the PyTorch engine, since the native one cannot be had:\n{error}", stacklevel=4
            )
        return None
