"""What of a model is averaged, and what kinds of training cannot be."""

from __future__ import annotations

import operator
import os
import warnings
import weakref
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from .dtensors import is_fully_sharded, is_sharded, is_spread, local_part, param_groups, reshard
from .errors import LocalSGDError
from .items import Item, averageable
from .layout import Rule
from .replicas import Replicas, find_ddp

TRAINED, FROZEN = PARAMETER_FATES = ("trainable", "frozen")

BUFFER_POLICIES = ("average", "broadcast", "keep")

_REFUSED = {
    "DEEPSPEED": "DeepSpeed owns the parameters and the optimizer state; use plain DDP (accelerate launch without DeepSpeed)",
    "MEGATRON_LM": "Megatron-LM splits the model and reduces its gradients itself; use plain DDP",
    "FSDP": "FSDP1 flattens parameters into shards of its own; use FSDP2: torch.distributed.fsdp.fully_shard on a mesh of replicas x shards or, with "
    "Accelerate, FullyShardedDataParallelPlugin(fsdp_version=2) and ParallelismConfig(dp_replicate_size=..., dp_shard_size=...)",
    "XLA": "torch_xla compiles its own collectives; use plain DDP on GPUs or CPUs",
}


def check_accelerator(accelerator: Any) -> None:
    """Raise NotImplementedError for a kind of training whose parameters cannot be averaged, naming what to use instead."""
    if accelerator is not None and not hasattr(accelerator, "distributed_type"):
        raise TypeError(
            f"accelerator must be an accelerate.Accelerator, or None for plain torch.distributed; got a {type(accelerator).__name__}"
        )
    kind = _kind(accelerator)
    if kind in _REFUSED and not getattr(accelerator, "is_fsdp2", False):
        raise NotImplementedError(f"LocalSGD does not work with DistributedType.{kind}: {_REFUSED[kind]}")


def check_model(model: Any) -> None:
    """Raise TypeError for anything but a module."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, as returned by accelerator.prepare; got a {type(model).__name__}")


def check_parts(model: torch.nn.Module) -> None:
    """Raise NotImplementedError or LocalSGDError for a model that cannot be averaged."""
    ddp = find_ddp(model)
    inner = model if ddp is None else ddp.module
    for name, module in inner.named_modules():
        if isinstance(module, DistributedDataParallel):
            raise LocalSGDError(
                f"the DDP model is a part ({name!r}) of what was passed, so its gradient sync would stay on; pass the DDP model itself"
            )
        if is_fully_sharded(module) and any(not is_sharded(params) for params in param_groups(module)):
            raise NotImplementedError(
                f"module {name!r} went through replicate(), whose gradient sync cannot be switched off; use DistributedDataParallel, or fully_shard "
                "on a mesh of replicas x shards"
            )
        if any(cls.__name__ == "FullyShardedDataParallel" for cls in type(module).__mro__):
            raise NotImplementedError(f"LocalSGD does not work with FSDP: {_REFUSED['FSDP']}")
    for name, parameter in inner.named_parameters():
        if isinstance(parameter, UninitializedTensorMixin):
            raise LocalSGDError(f"parameter {name!r} is not initialised yet; run one forward pass before making the LocalSGD")


def is_distributed(accelerator: Any) -> bool:
    """Whether there may be other ranks. Without an Accelerator torch.distributed says so.

    Raises LocalSGDError where a launcher started several processes that were never joined into a process group: each would
    train alone, unnoticed. With an Accelerator, which chose to, it warns.
    """
    launched = int(os.environ.get("WORLD_SIZE") or 1)
    if accelerator is not None:
        if (alone := _kind(accelerator) == "NO") and launched > 1:
            warnings.warn(
                f"WORLD_SIZE is {launched}, but Accelerate runs each process alone (DistributedType.NO), so nothing is averaged; on CPUs make an "
                "Accelerator(cpu=True), or set ACCELERATE_USE_CPU=1",
                stacklevel=3,
            )
        return not alone
    if dist.is_available() and dist.is_initialized():
        return True
    if launched > 1:
        raise LocalSGDError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but torch.distributed is not initialised; call "
            "torch.distributed.init_process_group() before making a LocalSGD without an Accelerator"
        )
    return False


def _kind(accelerator: Any) -> str:
    return "NO" if accelerator is None else str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))


_requires_grad = operator.attrgetter("requires_grad")


class Selection:
    """The tensors of a model that take part in an averaging, looked up anew each time: models change while they train.

    A parameter takes part once it has been seen trainable: when this object was made, or at any look since. It does so for
    good: some loops freeze and unfreeze by turns, and what was trained before it was frozen differs between ranks. What was
    frozen all along is equal everywhere and stays. So do buffers outside the state dict, which are caches that each rank can
    compute and may differ in shape; buffers that share memory with a parameter taking part; and what the user told DDP to
    ignore.

    Of a DTensor the part that this rank holds is looked at. replicas: None where there is nobody to average with.
    """

    def __init__(self, model: torch.nn.Module, buffers: str, replicas: Replicas | None = None) -> None:
        ddp = find_ddp(model)
        self._module = model if ddp is None else ddp.module
        self._ignored = set(getattr(ddp, "parameters_to_ignore", ()))
        self._buffers = buffers
        self._trained: dict[int, weakref.ref[torch.Tensor]] = {}
        reshard(self._module)
        self._spread = any(map(is_spread, chain(self._module.parameters(), self._module.buffers())))
        self._replicas = replicas
        self.release()
        self.items()

    def release(self) -> None:
        """Let go of the tensors seen last, so that their memory can be freed."""
        self._present: list[torch.Tensor] = []
        self._trainable: list[bool] = []
        self._items: list[Item] | None = None

    def items(self) -> list[Item]:
        """Parameters first, then buffers, in the model's own order; a tensor that is used twice comes once.

        The same list again while the model's tensors are the same.
        """
        if self._spread:
            reshard(self._module)
        # With thousands of tensors the walk below costs more than packing them; this comparison runs in C.
        modules = self._module.modules()
        present = [t for m in modules for t in chain(m._parameters.values(), m._buffers.values()) if t is not None]
        trainable = list(map(_requires_grad, present))
        if self._spread:
            present += [local_part(t) for t in present]  # FSDP2 puts others in their place in its first forward
        if (
            self._items is not None
            and len(present) == len(self._present)
            and all(map(operator.is_, present, self._present))
            and trainable == self._trainable
        ):
            return self._items
        parameters, buffers = self._walk()
        apart = _apart(buffers, parameters)
        # Where a buffer is a part of a parameter, that may have changed without any of the tensors being another.
        self._items = None if len(apart) < len(buffers) else parameters + apart
        self._present, self._trainable = present, trainable
        return parameters + apart if self._items is None else self._items

    def described(self) -> list[tuple[str, str, torch.Tensor]]:
        """Name, fate and tensor of all that has to be alike on every rank: what takes part, and frozen parameters."""
        items = self.items()
        there = {id(item.owner) for item in items}
        frozen = [
            (name, FROZEN, local_part(p))
            for name, p in self._module.named_parameters()
            if id(p) not in there and name not in self._ignored
        ]
        return [
            (
                i.name,
                (TRAINED if i.is_parameter else "buffer, averaged" if i.rule is Rule.MEAN else "buffer, rank 0's"),
                i.tensor,
            )
            for i in items
        ] + frozen

    def _walk(self) -> tuple[list[Item], list[Item]]:
        # One pass over the modules' own dictionaries: named_parameters() and named_buffers() take several.
        parameters: list[Item] = []
        buffers: list[Item] = []
        seen: set[int] = set()
        for prefix, module in self._module.named_modules():
            dot = f"{prefix}." if prefix else ""
            for name, parameter in module._parameters.items():
                if parameter is None or id(parameter) in seen or dot + name in self._ignored:
                    continue
                seen.add(id(parameter))
                if self._takes_part(parameter):
                    parameters.append(self._item(dot + name, parameter, Rule.MEAN, True))
            if module._buffers and self._buffers != "keep":
                for name, buffer in module._buffers.items():
                    skip = name in module._non_persistent_buffers_set or dot + name in self._ignored
                    if buffer is not None and not skip and id(buffer) not in seen:
                        seen.add(id(buffer))
                        mean = self._buffers == "average" and averageable(buffer)
                        buffers.append(self._item(dot + name, buffer, Rule.MEAN if mean else Rule.FOLLOW, False))
        return parameters, buffers

    def _item(self, name: str, tensor: torch.Tensor, rule: Rule, is_parameter: bool) -> Item:
        holders = () if self._replicas is None else self._replicas.holders(tensor)
        return Item(name, local_part(tensor), rule, is_parameter, holders, tensor)

    def _takes_part(self, parameter: torch.Tensor) -> bool:
        known = self._trained.get(id(parameter))
        if known is not None and known() is parameter:  # an id alone may be that of a tensor that is no more
            return True
        if parameter.requires_grad:
            self._trained[id(parameter)] = weakref.ref(parameter)
        return parameter.requires_grad


def _apart(buffers: list[Item], parameters: list[Item]) -> list[Item]:
    """The buffers that do not share memory with one of the parameters: those that do change with it."""
    if not buffers:
        return buffers
    places: dict[int, list[tuple[int, int]]] = {}
    for item in parameters:
        storage, begin, end = _place(item.tensor)
        places.setdefault(storage, []).append((begin, end))
    apart = []
    for item in buffers:
        storage, begin, end = _place(item.tensor)
        if not any(begin < other_end and other_begin < end for other_begin, other_end in places.get(storage, ())):
            apart.append(item)
    return apart


def _place(tensor: torch.Tensor) -> tuple[int, int, int]:
    """A tensor's storage, and the addresses between which it lies there; all 0 where it has no memory of its own."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.numel() == 0:
        return 0, 0, 0
    begin = tensor.data_ptr()
    reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.untyped_storage().data_ptr(), begin, begin + reach * tensor.itemsize
