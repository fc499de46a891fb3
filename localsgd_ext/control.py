"""What ranks tell each other beside the weights."""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist

_done: deque[dist.Work] = deque(maxlen=8)


def wait(work: dist.Work) -> None:
    """Wait for a collective, and keep it (and the tensor in it) alive until some more have followed.

    Gloo's threads let go of a collective a moment after wait() returns. Were theirs the last reference, they would need the
    interpreter's lock to free the tensor in it: that stalls them in training, and aborts a process that happens to be
    exiting (pytorch#190489).
    """
    _done.append(work)
    work.wait()


def any_rank(flag: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether `flag` is true on at least one rank; all ranks of the group must call it and get the same answer."""
    flags = torch.tensor([int(flag)], dtype=torch.int32, device=device)
    wait(dist.all_reduce(flags, dist.ReduceOp.MAX, group=group, async_op=True))
    return bool(flags.item())
