"""Tensors of which each rank holds a part: DTensors, as FSDP2 and tensor parallelism make them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def is_spread(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor."""
    return hasattr(tensor, "device_mesh")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it: the same object each time, unlike what to_local() gives."""
    return getattr(tensor, "_local_tensor", tensor)


def spread_as(owner: Any, part: torch.Tensor) -> torch.Tensor:
    """A DTensor placed like `owner`, of which this rank holds `part`: of the shape of its part of `owner`, perhaps with a
    dimension more at the end."""
    from torch.distributed.tensor import DTensor

    extra = part.shape[owner.dim() :]
    shape = torch.Size([*owner.shape, *extra])
    stride = torch.empty(shape, device="meta").stride()
    part = part.to(local_part(owner).device)
    return DTensor.from_local(part, owner.device_mesh, owner.placements, run_check=False, shape=shape, stride=stride)


def place_of(tensor: Any) -> tuple[int, ...]:
    """Which part of it this rank holds, along each dimension of its mesh that cuts it."""
    if tensor is None or not is_spread(tensor):
        return ()
    places = zip(tensor.device_mesh.get_coordinate(), tensor.placements, strict=True)
    return tuple(place for place, placement in places if not placement.is_replicate())


def is_fully_sharded(module: torch.nn.Module) -> bool:
    """Whether FSDP2's fully_shard was applied to it."""
    return hasattr(module, "_get_fsdp_state")


def reshard(model: torch.nn.Module) -> None:
    """Let FSDP2 put the shards in the place of whole parameters that a forward pass has left behind."""
    module: Any
    for module in filter(is_fully_sharded, model.modules()):
        for params in param_groups(module):
            if (
                getattr(params, "_all_gather_result", None) is not None
            ):  # of unshard(async_op=True), which is still to be waited for
                params.wait_for_unshard()
        module.reshard()


def param_groups(module: Any) -> Sequence[Any]:
    """What FSDP2 all-gathers and reduces at once: each has a `mesh_info`."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []  # before torch 2.12


def is_sharded(params: Any) -> bool:
    """Whether such a group is cut into shards, not only replicated."""
    return hasattr(params.mesh_info, "shard_process_group")
