"""What ranks tell each other beside the weights."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .collectives import wait


def any_rank(flag: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether `flag` is true on at least one rank; all ranks of the group must call it and get the same answer."""
    flags = torch.tensor([int(flag)], dtype=torch.int32, device=device)
    wait(dist.all_reduce(flags, dist.ReduceOp.MAX, group=group, async_op=True))
    return bool(flags.item())
