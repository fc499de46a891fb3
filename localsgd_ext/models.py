"""What of a model is averaged, and between whom: the wrapper it came in, its tensors, its process group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .averager import Item, averageable
from .layout import Rule

BUFFER_POLICIES = ("average", "broadcast", "keep")

_REFUSED = {
    "DEEPSPEED": "DeepSpeed owns the parameters and the optimizer state; use plain DDP (accelerate launch without DeepSpeed)",
    "MEGATRON_LM": "Megatron-LM splits the model and reduces its gradients itself; use plain DDP",
    "FSDP": "FSDP shards every parameter over the ranks; use plain DDP if the model fits on one device",
    "XLA": "torch_xla compiles its own collectives; use plain DDP on GPUs or CPUs",
}


def check_accelerator(accelerator: Any) -> None:
    """Raise NotImplementedError for a kind of training whose parameters cannot be averaged, naming what to use instead."""
    kind = _kind(accelerator)
    if kind in _REFUSED:
        raise NotImplementedError(f"LocalSGD does not work with DistributedType.{kind}: {_REFUSED[kind]}")


def is_distributed(accelerator: Any) -> bool:
    """Whether there may be other ranks. Without an Accelerator torch.distributed says so."""
    if accelerator is not None:
        return _kind(accelerator) != "NO"
    return dist.is_available() and dist.is_initialized()


def _kind(accelerator: Any) -> str:
    return "NO" if accelerator is None else str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))


def find_ddp(model: torch.nn.Module) -> DistributedDataParallel | None:
    """The DDP wrapper of a model, also where torch.compile wrapped that in turn."""
    model = getattr(model, "_orig_mod", model)
    return model if isinstance(model, DistributedDataParallel) else None


def syncs_gradients_over(ddp: DistributedDataParallel, group: dist.ProcessGroup) -> bool:
    """Whether DDP's gradient sync joins ranks that average with each other, so that it has to be off between averagings.

    It does not where DDP works inside each machine and the averaging between machines.
    """
    both = set(dist.get_process_group_ranks(ddp.process_group)) & set(dist.get_process_group_ranks(group))
    return len(both) > 1


class Selection:
    """The tensors of a model that take part in an averaging, looked up anew each time: models change while they train.

    Trainable parameters are averaged; frozen ones are equal everywhere and stay. A parameter frozen since the last averaging
    is sent once more, or the local steps it took before would stay different for ever. Buffers outside the state dict are caches that
    each rank can compute, and may differ in shape; they stay. What the user told DDP to ignore stays, too.
    """

    def __init__(self, model: torch.nn.Module, buffers: str) -> None:
        ddp = find_ddp(model)
        self._module = model if ddp is None else ddp.module
        self._ignored = set(getattr(ddp, "parameters_to_ignore", ()))
        self._buffers = buffers
        self._trained: list[torch.Tensor] = []
        self._check()

    def _check(self) -> None:
        for module in self._module.modules():
            if any(cls.__name__ == "FullyShardedDataParallel" for cls in type(module).__mro__):
                raise NotImplementedError(f"LocalSGD does not work with FSDP: {_REFUSED['FSDP']}")
        for name, parameter in self._module.named_parameters():
            if hasattr(parameter, "device_mesh"):
                raise NotImplementedError(
                    f"parameter {name!r} is a DTensor (FSDP2 or tensor parallel), which LocalSGD does not average yet; use plain DDP"
                )

    def items(self) -> list[Item]:
        """Parameters first, then buffers, in the model's own order; a tensor that is used twice comes once."""
        # One pass over the modules' own dictionaries: with thousands of tensors named_parameters() costs more than packing.
        items: list[Item] = []
        buffers: list[Item] = []
        seen: set[int] = set()
        once_more: set[int] | None = None
        for prefix, module in self._module.named_modules():
            dot = f"{prefix}." if prefix else ""
            for name, parameter in module._parameters.items():
                if parameter is None or id(parameter) in seen or dot + name in self._ignored:
                    continue
                seen.add(id(parameter))
                if not parameter.requires_grad:
                    if once_more is None:
                        once_more = {id(tensor) for tensor in self._trained}
                    if id(parameter) not in once_more:
                        continue
                items.append(Item(dot + name, parameter, Rule.MEAN, True))
            if module._buffers and self._buffers != "keep":
                for name, buffer in module._buffers.items():
                    skip = name in module._non_persistent_buffers_set or dot + name in self._ignored
                    if buffer is not None and not skip and id(buffer) not in seen:
                        seen.add(id(buffer))
                        mean = self._buffers == "average" and averageable(buffer)
                        buffers.append(Item(dot + name, buffer, Rule.MEAN if mean else Rule.FOLLOW, False))
        return items + buffers

    def sent(self, items: list[Item]) -> None:
        """Note that these were averaged: what is frozen by now need not be sent again."""
        self._trained = [item.tensor for item in items if item.tensor.requires_grad]
