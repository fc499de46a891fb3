"""Run a function on several real ranks (processes with a Gloo process group), under a hard time limit."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

# The fork server imports torch once; each rank is then forked from it in milliseconds. An optimizer imports torch._dynamo at
# its first step, which takes seconds.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "accelerate", "localsgd_ext", "hypothesis"])


environment: dict[str, str] = {}
"""Variables set on every rank, besides those that describe the process group."""


class RanksFailed(AssertionError):
    """At least one rank raised, died or did not end in time; the message holds what each of them said."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    limit: float = 60.0,
    lost: int | None = None,
    daemon: bool = True,
    **options: Any,
) -> list[Any]:
    """Call function(rank, *args, **options) on every rank and give the results in rank order.

    function: a top-level function of a test module. lost: a rank that is not expected to end; its result is None. daemon: False
    for ranks that start processes of their own. limit: seconds after which every rank still alive is killed, with its stack
    printed, and the test fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world_size):
            ours, theirs = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_rank_main,
                args=(theirs, function, rank, world_size, folder, limit, args, options, dict(environment)),
                daemon=daemon,
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        deadline = time.monotonic() + limit
        outcomes = [
            (True, None) if rank == lost else _receive(pipe, process, deadline)
            for rank, (pipe, process) in enumerate(zip(pipes, processes, strict=True))
        ]
        if lost is not None:
            processes[lost].kill()
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()) if process.is_alive() else 0)
            if process.is_alive():
                process.kill()
                process.join()
    failures = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(outcomes) if not ok]
    if failures:
        raise RanksFailed("\n".join(failures))
    return [value for _, value in outcomes]


def _receive(pipe: Any, process: Any, deadline: float) -> tuple[bool, Any]:
    if not pipe.poll(max(0.0, deadline - time.monotonic())):
        process.kill()
        return False, "did not end in time and was killed (its stack is on stderr)"
    with contextlib.suppress(EOFError):
        return pickle.loads(pipe.recv_bytes())
    process.join()
    return False, f"died with exit code {process.exitcode}"


def _rank_main(
    pipe: Any,
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    folder: str,
    limit: float,
    args: tuple[Any, ...],
    options: dict[str, Any],
    variables: dict[str, str],
) -> None:
    faulthandler.dump_traceback_later(limit - 1, exit=False)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",  # not used: the group is initialised through a file, before Accelerate looks
        ACCELERATE_USE_CPU="true",
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",
        **variables,
    )
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=limit),
        )
        # Plain pickle: multiprocessing's own would pass tensors by a file descriptor that dies with this process.
        pipe.send_bytes(pickle.dumps((True, function(rank, *args, **options))))
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
    pipe.close()
