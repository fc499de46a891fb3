"""Waiting for collectives, and how many of them are under way at once."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

SLOTS = 3
"""Staging buffers per device: one bucket is packed or applied while up to SLOTS - 1 travel."""

POLL_SECONDS = 0.25
"""How often a rank that waits for a collective looks whether its peers are still with it."""

Watch = Callable[[], None]
"""Called while waiting; raises if there is nothing to wait for any more."""


class Terms(NamedTuple):
    """How this rank takes part in one averaging.

    contributes: whether its values enter the sum. divisor: how many ranks' do. root: whose values the others follow, where
    there is no mean. watch: see `Watch`; None where nobody watches, or where waiting does not block (CUDA). timeout: of each
    collective, with `watch`.
    """

    contributes: bool
    divisor: int
    root: int
    watch: Watch | None = None
    timeout: timedelta | None = None


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup, timeout: timedelta | None) -> dist.Work:
    """Start a sum over the ranks. timeout: its own, None for the group's."""
    options = dist.AllreduceOptions()
    if timeout is not None:
        options.timeout = timeout
    return group.allreduce([tensor], options)


def all_to_all(output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup, timeout: timedelta | None) -> dist.Work:
    """Start sending each rank its part of `input`, and filling `output` with the parts from all, in rank order.

    Between two ranks there is only one part, of the other's. An all-to-all is Gloo's fastest collective: unlike an all-gather
    it copies nothing besides.
    """
    split = [0, len(input)] if group.rank() == 0 else [len(input), 0]
    splits = split if group.size() == 2 else []
    options = dist.AllToAllOptions()
    if timeout is not None:
        options.timeout = timeout
    call = getattr(group, "all_to_all_single", None) or group.alltoall_base  # its name before torch 2.13
    return call(output, input, splits, splits, options)


def all_gather(output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup, timeout: timedelta | None) -> dist.Work:
    """Start filling `output` with the first part of every rank's `input`, in rank order. The other parts are overwritten."""
    first, *others = input.chunk(group.size())
    if input.is_cpu:
        for part in others:
            part.copy_(first)
        return all_to_all(output, input, group, timeout)
    # NCCL knows which ranks share a machine, and sends a part only once between machines.
    options = AllgatherOptions()
    if timeout is not None:
        options.timeout = timeout
    call = getattr(group, "all_gather_single", None) or group._allgather_base
    return call(output, first, options)


_done: deque[dist.Work] = deque(maxlen=8)
_abandoned: list[dist.Work] = []


def wait(work: dist.Work, watch: Watch | None = None) -> None:
    """Wait for a collective, and keep it (and the tensor in it) alive until some more have followed.

    Gloo's threads let go of a collective a moment after wait() returns. Were theirs the last reference, they would need the
    interpreter's lock to free the tensor in it: that stalls them in training, and aborts a process that happens to be
    exiting (pytorch#190489).
    """
    _done.append(work)
    if watch is None:
        work.wait()
        return
    while True:
        begun = time.monotonic()
        try:
            work.wait(timedelta(seconds=POLL_SECONDS))
            return
        except RuntimeError:
            # Only the waiting has timed out, unless it took less time than that.
            if time.monotonic() - begun < POLL_SECONDS:
                raise
        if work.is_completed():
            work.wait()
            return
        watch()


def abandon(work: dist.Work) -> None:
    """Give up on a collective that may never end. It goes on writing to its tensor, which is kept for it."""
    _abandoned.append(work)
