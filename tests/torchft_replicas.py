"""Replica groups of torchft, one process each with a manager of its own, and their lighthouse: under hard time limits."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from . import ranks

MIN_REPLICAS = 2


@contextlib.contextmanager
def lighthouse(min_replicas: int = MIN_REPLICAS, join_ms: int = 20_000) -> Iterator[str]:
    """Its address. A replica is dead a second and a half after its last sign of life; one that lives is waited for."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=min_replicas,
        join_timeout_ms=join_ms,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=1500,
    )
    try:
        yield f"http://127.0.0.1:{server.address().rsplit(':', 1)[1]}"
    finally:
        server.shutdown()


class Replica:
    """A process that calls function(manager, number, *args, **options).

    manager_options: arguments of `Manager`. limit: seconds after which it is killed, with its stack printed.
    """

    def __init__(
        self,
        address: str,
        function: Callable[..., Any],
        number: int,
        *args: Any,
        limit: float = 60.0,
        manager_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.number = number
        self._deadline = time.monotonic() + limit
        self._pipe, theirs = ranks._context.Pipe()
        call = function, number, args, options
        self._process = ranks._context.Process(
            target=_main, args=(theirs, address, limit, manager_options or {}, call), daemon=True
        )
        self._process.start()
        theirs.close()

    def join(self) -> int | None:
        """Wait for the process to end. Gives its exit code, or None where it had to be killed at its limit."""
        self._process.join(max(0.0, self._deadline - time.monotonic()))
        if self._process.is_alive():
            self.kill()
            return None
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def result(self) -> Any:
        """What the function returned. Raises `RanksFailed` with what happened instead."""
        outcome = None
        if self._pipe.poll(max(0.0, self._deadline - time.monotonic())):
            with contextlib.suppress(EOFError):
                outcome = pickle.loads(self._pipe.recv_bytes())
        if outcome is None:
            code = self.join()
            outcome = False, f"killed at its limit: {code is None} (its stack is on stderr); exit code {code}"
        if not outcome[0]:
            raise ranks.RanksFailed(f"replica {self.number}: {outcome[1]}")
        return outcome[1]


def run_replicas(function: Callable[..., Any], count: int, *args: Any, **options: Any) -> list[Any]:
    """Call the function in `count` replicas, see `Replica`, and give the results in their order."""
    with lighthouse(count) as address, contextlib.ExitStack() as stack:
        replicas = [Replica(address, function, number, *args, **options) for number in range(count)]
        for replica in replicas:
            stack.callback(replica.kill)
        return [replica.result() for replica in replicas]


def _main(pipe: Any, address: str, limit: float, manager_options: dict[str, Any], call: tuple[Any, ...]) -> None:
    faulthandler.dump_traceback_later(limit - 1, exit=False)
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    socket.gethostname = lambda: "localhost"  # by which torchft tells others where to find it
    function, number, args, options = call
    try:
        import torch
        import torch.distributed as dist
        from torchft import Manager, ProcessGroupGloo

        logging.disable(logging.CRITICAL)  # torchft logs each error that it survives
        torch.set_num_threads(1)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        settings = {"min_replica_size": MIN_REPLICAS, "timeout": timedelta(seconds=10), **manager_options}
        manager = Manager(
            # So long the others wait where one of them has seen a failure first, and has left the collective.
            pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
            load_state_dict=None,
            state_dict=None,
            quorum_timeout=timedelta(seconds=limit),
            connect_timeout=timedelta(seconds=10),
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=store.port,
            lighthouse_addr=address,
            replica_id=f"replica_{number}",
            hostname="localhost",
            **settings,
        )
        try:
            outcome = True, function(manager, number, *args, **options)
        finally:
            manager.shutdown(wait=False)
    except BaseException:
        outcome = False, traceback.format_exc()
    pipe.send_bytes(pickle.dumps(outcome))
    pipe.poll(limit)  # until all have what they need of this one
    os._exit(0)  # threads of torchft may wait for a connection for a while yet
