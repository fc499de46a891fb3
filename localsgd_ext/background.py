"""Work that goes on while training does: on a thread of its own and, on CUDA, on streams of its own."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")

JOIN_SECONDS = 8.0
"""How long a rank that gives up waits for its work in the background to notice, which may be in a roll call."""

_abandoned: list[object] = []


def keep(memory: object) -> None:
    """For good: on CUDA kernels that were given up may still use it, on a stream that the allocator does not know of."""
    _abandoned.append(memory)


class Abandoned(Exception):
    """Nobody waits for this work any more."""


class Worker:
    """One thread that does what it is given, in that order. A daemon: what it waits for may never come."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """Always the same one, so that the memory it leaves is used again."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def do(self, task: Callable[[], None]) -> None:
        # Kept from one task to the next: OpenMP makes a team of threads for each thread that uses it.
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="localsgd_ext", daemon=True)
            thread.start()
            self._thread = thread
        self._tasks.put(task)

    def stop(self) -> None:
        """End the thread once it has done what it was given; wait a little for that."""
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join(JOIN_SECONDS)
            self._thread, self._tasks = None, queue.SimpleQueue()

    def _run(self) -> None:
        tasks = self._tasks
        while (task := tasks.get()) is not None:
            task()
            del task  # what it holds is not to be kept until the next


class Flight(Generic[T]):
    """Work under way in the background, and its result.

    On the given CUDA devices it begins where the current streams are now, and `land` makes the current streams wait for it,
    without blocking the host.
    """

    def __init__(self, worker: Worker, work: Callable[[Flight[T]], T], devices: Collection[torch.device]) -> None:
        self._future: Future[T] = Future()
        self._abandoned = False
        self._streams = {device: worker.stream(device) for device in devices}
        for device, stream in self._streams.items():
            stream.wait_stream(torch.cuda.current_stream(device))

        self.met: Future[Any] = Future()  # what the work tells before its end; None if it fails first

        def task() -> None:
            try:
                with contextlib.ExitStack() as stack:
                    for stream in self._streams.values():
                        stack.enter_context(torch.cuda.stream(stream))
                    self._future.set_result(work(self))
            except BaseException as error:
                self._future.set_exception(error)
                if not self.met.done():
                    self.met.set_result(None)

        worker.do(task)

    @property
    def has_failed(self) -> bool:
        return self._future.done() and self._future.exception() is not None

    def land(self) -> T:
        """Wait for the result, or raise what went wrong."""
        result = self._future.result()
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)
        return result

    def check(self) -> None:
        """To be called by the work now and then. Raises Abandoned if it was."""
        if self._abandoned:
            raise Abandoned

    def abandon(self) -> None:
        """Let the work end as soon as it notices."""
        self._abandoned = True

    def ended(self, seconds: float) -> bool:
        """Whether the work has, within so many seconds."""
        return bool(wait([self._future], seconds).done)
