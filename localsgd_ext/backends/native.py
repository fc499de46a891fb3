"""The compiled engine: found beside this package or in the cache, or built on first use; the same interface as the reference."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.machinery
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from .. import build
from ..collectives import SLOTS
from ..layout import Bucket, Rule, Table
from . import BoundBucket

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
        buffer = staging[: bucket.numel * table.wire.itemsize].view(table.wire)
        return self._extension.BoundBucket(
            [flats[segment.tensor] for segment in bucket.segments],
            [(index, segment.start, segment.numel) for index, segment in enumerate(bucket.segments)],
            buffer,
            bucket.drift_numel,
            table.rule is Rule.FOLLOW,
        )

    def average(self, buckets: Sequence[BoundBucket], group: dist.ProcessGroup) -> torch.Tensor:
        return self._extension.average(buckets, SLOTS, group)


def load() -> NativeBackend:
    """The engine for the running torch. Raises BuildError with the cause if it cannot be had."""
    return NativeBackend(_import(find_or_build()))


def find_or_build() -> Path:
    """The binary for the running torch: installed, cached, or built now by one of the ranks of this host."""
    if build.switch() == "off":
        raise build.BuildError(f"{build.SWITCH}=off")
    plan = build.make_plan(build.running_target())
    wanted = build.key(plan)
    return find(wanted) or _build(cache_folder() / wanted, plan, wanted)


def find(wanted: str) -> Path | None:
    """The binary with that key, if it is installed or cached."""
    return next((binary for folder in places(wanted).values() if (binary := _binary_in(folder, wanted)) is not None), None)


def cache_folder() -> Path:
    """Where binaries built on first use are kept: $LOCALSGD_EXT_CACHE, else the user's cache folder."""
    if chosen := os.environ.get("LOCALSGD_EXT_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "localsgd_ext"


def places(wanted: str) -> dict[str, Path]:
    """The folders that may hold the binary, in the order in which they are looked at."""
    return {"installed": Path(__file__).parent.parent, "cached": cache_folder() / wanted}


def binary_with_note(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The binary in `folder`, whatever it was built for, and the note saying what that was."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        built = json.loads((folder / f"{build.MODULE}.json").read_text())
        binary = folder / f"{build.MODULE}{built['target']['suffix']}"
        if binary.is_file():
            return binary, built
    return None


def _binary_in(folder: Path, wanted: str) -> Path | None:
    """The binary in `folder` if it was built for exactly this torch: any other could miss symbols."""
    found = binary_with_note(folder)
    return found[0] if found is not None and found[1].get("key") == wanted else None


def remembered_failure(wanted: str) -> tuple[Path, str, str] | None:
    """The file that remembers a failed build, the compiler it failed with (no other is held to it), and what was said."""
    path = cache_folder() / f"{wanted}.failed"
    if not path.is_file():
        return None
    compiler, _, said = path.read_text().partition("\n")
    return path, compiler, said


def _build(folder: Path, plan: build.Plan, wanted: str) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder.parent / f"{wanted}.lock"):
        if (binary := _binary_in(folder, wanted)) is not None:
            return binary  # another rank was faster
        compiler = build.compiler()
        if (failure := remembered_failure(wanted)) is not None and failure[1] == compiler:
            raise build.BuildError(f"{failure[2]}\n(remembered; delete {failure[0]} to try again)")
        begun = time.monotonic()
        print(
            f"localsgd_ext: building the native engine ({plan.flavour}) for torch {plan.target.torch} (once, about a minute) ...",
            end="", file=sys.stderr, flush=True,
        )  # fmt: skip
        try:
            with _temporary_sibling(folder) as scratch:
                build.compile_into(scratch, plan)
                shutil.rmtree(folder, ignore_errors=True)  # what lies there is not usable, or it would have been used
                os.replace(scratch, folder)
        except build.BuildError as error:
            print(" failed", file=sys.stderr, flush=True)
            (folder.parent / f"{wanted}.failed").write_text(f"{compiler}\n{error}")
            raise
        print(f" done in {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    binary = _binary_in(folder, wanted)
    if binary is None:
        raise build.BuildError(f"the binary just built is not in {folder}")
    return binary


@contextlib.contextmanager
def _temporary_sibling(folder: Path) -> Iterator[Path]:
    scratch = Path(tempfile.mkdtemp(prefix=folder.name + ".", dir=folder.parent))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


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
        raise _loaded
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
