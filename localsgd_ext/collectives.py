"""Waiting for collectives, and how many of them are under way at once."""

from __future__ import annotations

from collections import deque

import torch.distributed as dist

SLOTS = 3
"""Staging buffers per device: one bucket is packed or applied while up to SLOTS - 1 travel."""

_done: deque[dist.Work] = deque(maxlen=8)


def wait(work: dist.Work) -> None:
    """Wait for a collective, and keep it (and the tensor in it) alive until some more have followed.

    Gloo's threads let go of a collective a moment after wait() returns. Were theirs the last reference, they would need the
    interpreter's lock to free the tensor in it: that stalls them in training, and aborts a process that happens to be
    exiting (pytorch#190489).
    """
    keep(work)
    work.wait()


def keep(work: dist.Work) -> None:
    """Keep a collective alive as `wait` does, without waiting for it."""
    _done.append(work)
