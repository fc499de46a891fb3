"""DDP's gradient sync, off while ranks train apart and on again afterwards."""

from __future__ import annotations

import contextlib

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .models import keeps_equal, syncs_gradients_over


class GradientSync:
    """Of a DDP model whose ranks average over `group`; where there is none, or it joins other ranks than those, there is nothing to switch."""

    def __init__(self, ddp: DistributedDataParallel | None = None, group: dist.ProcessGroup | None = None) -> None:
        there = ddp is not None and group is not None and syncs_gradients_over(ddp, group)
        self._ddp = ddp if there else None
        self._no_sync: contextlib.AbstractContextManager[None] | None = None
        self._in_forward = False  # what DDP had planned for its next forward
        # Whether ranks ever trained apart.
        self.was_off = bool(there and ddp is not None and group is not None and not keeps_equal(ddp, group))

    def keeps_equal(self) -> bool:
        """Whether ranks are equal after a step in which it is on. Once they have trained apart their optimizers' states differ, and equal
        gradients no longer make equal weights."""
        return self._ddp is not None and self._no_sync is None and not self.was_off

    def set(self, on: bool) -> None:
        self.was_off |= not on
        if not on and self._no_sync is None and self._ddp is not None:
            self._no_sync = self._ddp.no_sync()
            self._no_sync.__enter__()
            # Its next forward would broadcast buffers: a collective that a rank without batches never joins.
            self._in_forward = self._ddp.require_forward_param_sync
            self._ddp.require_forward_param_sync = False
        elif on and self._no_sync is not None:
            context, self._no_sync = self._no_sync, None
            context.__exit__(None, None, None)
            if self._ddp is not None:
                self._ddp.require_forward_param_sync = self._in_forward
