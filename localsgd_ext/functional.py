"""One averaging of a list of tensors, without a model, a block or Accelerate."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from .averager import Averager
from .backends import check_backend
from .backends.reference import ReferenceBackend
from .dtensors import is_spread, local_part
from .errors import LocalSGDError
from .items import Item
from .replicas import resolve_group
from .report import SyncReport
from .wire import check_wire


def average_parameters(
    tensors: Iterable[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    wire: str = "parameter",
    backend: str = "auto",
) -> SyncReport:
    """Replace every tensor by its mean over the ranks of `group` (default: all), in place, and report what it took.

    tensors: floating-point or complex, of any shape and stride; all ranks must pass equal layouts in the same order; of a
    DTensor this rank's part is averaged, over `group`, which has to be given then. wire: see `LocalSGD`; here there is no
    anchor, so one that cannot hold the tensors' dtype rounds their values, by at most half a step of its code (bfloat16: 2^-9
    of a value; float16, int8, int4: about 2^-12, 1/254 and 1/14 of the largest of 256 values that follow each other), and above
    2 ranks their mean again. backend: "auto", "native" or "torch". Without an initialised process group, or alone in it, there
    is nothing to average and the tensors stay as they are.

    Raises TypeError for what is no tensor or no process group, ValueError for an unknown wire or backend, LocalSGDError for a
    tensor that has no mean (integers) or cannot be written in place, a DTensor without `group`, a process that is not in
    `group`, and a backend="native" that cannot be had.
    """
    check_wire(wire)
    check_backend(backend)
    if isinstance(tensors, torch.nn.Module):
        raise TypeError("tensors must be torch tensors; of a model pass model.parameters()")
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"tensors must be torch tensors; tensors[{index}] is a {type(tensor).__name__}")
    if group is None and any(map(is_spread, tensors)):
        raise LocalSGDError(
            "a DTensor's parts differ between ranks; pass group, the ranks that hold the same part in all replicas"
        )
    items = [Item(f"tensors[{index}]", local_part(tensor)) for index, tensor in enumerate(tensors)]
    group = resolve_group(group)
    if group is None or group.size() == 1:
        return SyncReport(0, 1, 0, 0, 0.0, None, 0, 0.0, 1, ReferenceBackend.name)
    return Averager(group, wire, backend, None).average(items, step=0, round=1, interval=0).result()
