"""Gradient sync between replicas, off while they train apart and on again afterwards."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .dtensors import is_fully_sharded, is_sharded, param_groups
from .replicas import find_ddp, ranks_of


class GradientSync:
    """Of a model that averages over `group`. Where there is none, or gradients are not reduced between its ranks (DDP inside
    each machine, FSDP over a mesh of one replica), there is nothing to switch."""

    def __init__(self, model: torch.nn.Module | None = None, group: dist.ProcessGroup | None = None) -> None:
        self._ddp: DistributedDataParallel | None = None
        self._hybrid: list[_Hybrid] = []
        self._no_sync: contextlib.AbstractContextManager[None] | None = None
        self._in_forward = False  # what DDP had planned for its next forward
        self._is_on = True
        self.was_off = False  # whether ranks ever trained apart
        reach = None  # the ranks that have the same gradients
        if model is not None and group is not None:
            ddp, ours = find_ddp(model), ranks_of(group)
            if ddp is not None and len(ranks_of(ddp.process_group) & ours) > 1:
                self._ddp, reach = ddp, ranks_of(ddp.process_group)
            for module in filter(is_fully_sharded, model.modules()):
                for each in map(_Hybrid, param_groups(module)):
                    if len(each.ranks & ours) > 1:
                        self._hybrid.append(each)
                        reach = each.ranks if reach is None else reach & each.ranks
            ids = {id(parameter) for each in self._hybrid for parameter in each.parameters()}
            if self._ddp is None and any(id(p) not in ids for p in model.parameters() if p.requires_grad):
                reach = None  # what is beside FSDP2 is not kept equal by it
            there = self._ddp is not None or bool(self._hybrid)
            self.was_off = there and (reach is None or not ours <= reach)

    def keeps_equal(self) -> bool:
        """Whether ranks are equal after a step in which it is on. Once they have trained apart their optimizers' states differ,
        and equal gradients no longer make equal weights."""
        there = self._ddp is not None or bool(self._hybrid)
        return there and self._is_on and not self.was_off

    def set(self, on: bool) -> None:
        self.was_off |= not on
        self._is_on = on
        if self._ddp is not None:
            self._set_ddp(self._ddp, on)
        for each in self._hybrid:
            each.set(on)

    def _set_ddp(self, ddp: DistributedDataParallel, on: bool) -> None:
        if not on and self._no_sync is None:
            self._no_sync = ddp.no_sync()
            self._no_sync.__enter__()
            # Its next forward would broadcast buffers: a collective that a rank without batches never joins.
            self._in_forward = ddp.require_forward_param_sync
            ddp.require_forward_param_sync = False
        elif on and self._no_sync is not None:
            context, self._no_sync = self._no_sync, None
            context.__exit__(None, None, None)
            ddp.require_forward_param_sync = self._in_forward


class _Hybrid:
    """Parameters of FSDP2 that are sharded inside replicas and whose gradients are reduced between replicas, too.

    Its set_requires_all_reduce() is for accumulating gradients: without an all-reduce they never arrive in `.grad`. So while
    replicas train apart it is told that there is one dimension only, that of the shards; gradients are then means over that,
    and set_requires_gradient_sync() works on.
    """

    def __init__(self, params: Any) -> None:
        self._params = params
        group = getattr(params.mesh_info, "replicate_process_group", None)
        self.ranks = set() if group is None or not is_sharded(params) else ranks_of(group)
        self._hybrid: Any = None  # while it is off

    def parameters(self) -> list[torch.Tensor]:
        """As the module has them between its forward passes."""
        return [each.sharded_param for each in self._params.fsdp_params]

    def set(self, on: bool) -> None:
        """What the forward pass leaves gathered belongs to the same shards: only gradients go another way."""
        if on and self._hybrid is not None:
            self._put(self._hybrid)
            self._hybrid = None
        elif not on and self._hybrid is None:
            self._hybrid = self._params.mesh_info
            shards = copy.copy(self._hybrid)
            shards.__class__ = _sharded_only(type(shards))
            self._put(shards)

    def _put(self, info: Any) -> None:
        if self._params.post_forward_mesh_info is self._params.mesh_info:
            self._params.post_forward_mesh_info = info
        self._params.mesh_info = info


def _sharded_only(hybrid: type) -> type:
    """The class of a mesh without replicas, of which that with them is a subclass."""
    return next(each for each in hybrid.__mro__ if each.__name__ == "FSDPMeshInfo")
