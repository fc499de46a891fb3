"""One averaging: layout, staging buffers, wire and engine put together into a pipeline of asynchronous collectives."""

from __future__ import annotations

import hashlib
import operator
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from .backends import Backend, BoundBucket, check_backend, pick
from .backends.reference import ReferenceBackend
from .collectives import SLOTS, Terms, Watch, all_reduce
from .errors import LocalSGDError
from .layout import Rule, Table, TensorSpec, is_dense, plan
from .report import PendingReport, SyncReport
from .wire import AVERAGEABLE, allreduce_bytes, broadcast_bytes, check_wire, real_dtype, wire_dtype

DEFAULT_BUCKET_MB = {"cpu": 4.0}
"""MiB of one staging buffer by device type, chosen by measuring (benchmarks/averaging.py --bucket-mb)."""

DEFAULT_BUCKET_MB_ELSEWHERE = 32.0


class Item(NamedTuple):
    """A tensor to be averaged in place (or to follow rank 0), with the name that errors show."""

    name: str
    tensor: torch.Tensor
    rule: Rule = Rule.MEAN
    is_parameter: bool = True


class Averager:
    """Averages lists of tensors in place over a process group; keeps the layout and the buffers between calls.

    group: the ranks that average with each other. wire: see `LocalSGD`. bucket_mb: MiB of one staging buffer, None for the
    device's default; extra memory is SLOTS + 1 of them (one more for 16-bit parameters), never a copy of the model, save that a
    tensor with gaps in its memory (a slice of a larger one) is copied while it is averaged.
    """

    def __init__(self, group: dist.ProcessGroup, wire: str, backend: str, bucket_mb: float | None) -> None:
        self.group = group
        self.world_size = group.size()
        self.rank = group.rank()
        self._wire = wire
        self._backend = backend
        self._bucket_mb = bucket_mb
        # A wait with a time limit leaves the collective alone on Gloo; others may block for it, or give the collective up.
        self._can_watch = _is_gloo(group)
        self.release()

    def release(self) -> None:
        """Drop the buffers and every view of the tensors, so that their memory can be freed; the next call makes them anew."""
        self._bound: Sequence[Item] = []
        self._places: list[list[object]] = [[] for _ in _PLACE]
        self._buckets: list[BoundBucket] = []
        self._with_gaps: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._wire_bytes = 0
        self.sums_in_float16 = False
        self._engine: Backend = ReferenceBackend()
        self.layout = 0  # a number that differs, as good as surely, between layouts of the tensors bound

    def average(
        self,
        items: Sequence[Item],
        *,
        step: int,
        round: int,
        interval: int,
        active: Sequence[bool] = (),
        watch: Watch | None = None,
        timeout: timedelta | None = None,
        bound: bool = False,
    ) -> PendingReport:
        """Replace every tensor by its mean over the active ranks (or by the first one's value), in place.

        Must be called by all ranks of the group with equal layouts. active: for each rank whether its values count; default all. bound:
        whether `bind` was called for the items just before. If a collective fails or `watch` raises, every element holds either
        its local or its averaged value.
        """
        active = active or [True] * self.world_size
        begun = time.perf_counter()
        with torch.inference_mode(False), torch.no_grad():
            if not bound:
                self.bind(items)
            if not self._can_watch or not all(bucket.buffer.is_cpu for bucket in self._buckets):
                watch = timeout = None
            terms = Terms(active[self.rank], sum(active), list(active).index(True), watch, timeout)
            for tensor, dense in self._with_gaps:
                dense.copy_(tensor)
            try:
                sums = self._engine.average(self._buckets, self.group, terms)
            except BaseException:
                self.release()
                raise
            for tensor, dense in self._with_gaps:
                tensor.copy_(dense)
            # A total of its own: it goes on travelling while training does.
            distance_sq = sums[:1].clone() if terms.contributes else torch.zeros_like(sums[:1])
            mean_sq = sums[1]
        # Nothing to average (a model without trainable parameters) means no collective at all.
        work = all_reduce(distance_sq, self.group, timeout) if self._buckets else None
        seconds = time.perf_counter() - begun
        return PendingReport(
            step, round, interval, seconds, self._wire_bytes, terms.divisor, self._engine.name, distance_sq, mean_sq, work,
            watched=watch is not None,
        )  # fmt: skip

    def bind(self, items: Sequence[Item]) -> None:
        """Lay out the tensors and tie them to buffers, unless they are where they were the last time."""
        # Buffers made inside inference_mode() could never be used outside it again.
        with torch.inference_mode(False), torch.no_grad():
            self._bind(items)

    def _bind(self, items: Sequence[Item]) -> None:
        if _same(items, self._bound) and _unmoved(items, self._places):
            return
        self.release()
        dense = [self._dense(item) for item in items]
        flats = [_flat(tensor, item.rule) for tensor, item in zip(dense, items, strict=True)]
        specs = [self._spec(item, flat) for item, flat in zip(items, flats, strict=True)]
        self.layout = _layout(items, specs)
        if not specs:
            return
        bucket_mb = self._bucket_mb or DEFAULT_BUCKET_MB.get(specs[0].device.type, DEFAULT_BUCKET_MB_ELSEWHERE)
        tables = plan(specs, int(bucket_mb * 2**20))

        self._engine = pick(self._backend, {table.device.type for table in tables})
        pools = {device: _pool(device, [t for t in tables if t.device == device]) for device in {t.device for t in tables}}
        self.sums_in_float16 = any(t.wire is torch.float16 and t.rule is Rule.MEAN for t in tables)
        for table in tables:
            *staging, scratch = pools[table.device]
            for bucket in table.buckets:
                slot = staging[len(self._buckets) % SLOTS]
                self._buckets.append(self._engine.bind(table, bucket, flats, slot, scratch))
            payload = table.numel * table.wire.itemsize
            if table.rule is Rule.FOLLOW:
                self._wire_bytes += broadcast_bytes(payload, self.rank, self.world_size)
            else:
                self._wire_bytes += allreduce_bytes(payload, self.world_size)
        self._bound, self._places = items, [[place(item.tensor) for item in items] for place in _PLACE]

    def _dense(self, item: Item) -> torch.Tensor:
        """The tensor itself where its memory has no gaps, else a stand-in that is copied from and to it at each averaging."""
        check_in_place(item)
        tensor = unexpanded(item.tensor.detach())
        if tensor.numel() == 0 or is_dense(tensor.shape, tensor.stride()):
            return tensor
        stand_in = tensor.contiguous()
        self._with_gaps.append((tensor, stand_in))
        return stand_in

    def _spec(self, item: Item, flat: torch.Tensor) -> TensorSpec:
        if item.rule is Rule.FOLLOW:
            wire = flat.dtype
        else:
            if flat.dtype not in AVERAGEABLE:
                raise LocalSGDError(
                    f"tensor {item.name!r} has dtype {item.tensor.dtype}, which has no mean; averaging takes floating-point and "
                    "complex tensors (freeze it with requires_grad=False to leave it out)"
                )
            wire = wire_dtype(flat.dtype, self._wire, item.name)
        return TensorSpec(item.name, flat.numel(), flat.dtype, wire, flat.device, item.rule, item.is_parameter, flat.data_ptr())


_PLACE: tuple[Callable[[torch.Tensor], object], ...] = (
    torch.Tensor.data_ptr,
    torch.Tensor.stride,
    operator.attrgetter("shape"),
    operator.attrgetter("dtype"),
)
"""What the layout depends on beside the tensor itself: `tensor.data = other` may change all of it."""

_tensor = operator.attrgetter("tensor")
_version = operator.attrgetter("_version")


def _same(items: Sequence[Item], bound: Sequence[Item]) -> bool:
    return items is bound or (
        len(items) == len(bound) and all(a.tensor is b.tensor and a[2:] == b[2:] for a, b in zip(items, bound, strict=True))
    )


def _unmoved(items: Sequence[Item], places: list[list[object]]) -> bool:
    """Whether the tensors are still where they were bound. In C loops, since there may be thousands of tensors, and in ones that
    allocate nothing that lasts, so that no garbage collection starts here."""
    tensors = list(map(_tensor, items))
    return all(all(map(operator.eq, map(place, tensors), was)) for place, was in zip(_PLACE, places, strict=True))


def _layout(items: Sequence[Item], specs: Sequence[TensorSpec]) -> int:
    """Of what has to be alike on all ranks for their buckets, and the elements in them, to match."""
    lines = (
        f"{i.name} {list(i.tensor.shape)} {i.tensor.stride()} {i.tensor.dtype} {s.wire} {s.rule.value} {s.is_parameter}\n"
        for i, s in zip(items, specs, strict=True)
    )
    digest = hashlib.sha256("".join(lines).encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _flat(tensor: torch.Tensor, rule: Rule) -> torch.Tensor:
    """A one-dimensional view of a dense tensor's memory, in the order of the memory: real numbers, or bytes to follow."""
    if tensor.is_conj():
        tensor = tensor.conj()  # the numbers in memory: the mean of conjugates is the conjugate of the mean
    if rule is Rule.MEAN and tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8) if rule is Rule.FOLLOW else flat


def check_in_place(item: Item) -> None:
    """Raise LocalSGDError for a tensor that has no ordinary memory to write an average to."""
    tensor = item.tensor
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_inference():
        kind = "an inference tensor" if tensor.is_inference() else f"a {tensor.layout} tensor of {tensor.dtype}"
        raise LocalSGDError(
            f"{item.name!r} is {kind}, which cannot be averaged in place"
            + ("" if item.is_parameter else "; buffers='keep' leaves all buffers alone")
        )


def unexpanded(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without dimensions that repeat one element (stride 0), so that it can be written to."""
    for dim, step in enumerate(tensor.stride()):
        if step == 0 and tensor.size(dim) > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def first_nonfinite(items: Sequence[Item]) -> int:
    """The number of the first parameter that holds NaN or inf, or -1. Reads all parameters once, and waits for the device."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for item in items:
        if item.is_parameter and item.tensor.numel():
            groups.setdefault((item.tensor.device, item.tensor.dtype), []).append(item.tensor.detach())
    with torch.no_grad():
        norms = [torch.stack(torch._foreach_norm(tensors)).isfinite().all() for tensors in groups.values()]
        if all(bool(finite) for finite in norms):
            return -1
        # A norm may be too large for its dtype where no element is.
        bad = (n for n, item in enumerate(items) if item.is_parameter and not item.tensor.isfinite().all())
        return next(bad, -1)


def version(items: Sequence[Item]) -> tuple[int, int]:
    """Two numbers that change when a parameter, or a buffer, is written to in place (as far as torch counts that: not through .data)
    or moved."""
    parameters = [item.tensor for item in items if item.is_parameter]
    buffers = [item.tensor for item in items if not item.is_parameter]
    return _version_of(parameters), _version_of(buffers)


def _version_of(tensors: list[torch.Tensor]) -> int:
    return sum(map(_version, tensors)) + sum(map(torch.Tensor.data_ptr, tensors))


def averageable(tensor: torch.Tensor) -> bool:
    """Whether a mean of this tensor over ranks is defined."""
    return real_dtype(tensor.dtype) in AVERAGEABLE


def _pool(device: torch.device, tables: Sequence[Table]) -> list[torch.Tensor]:
    """SLOTS staging buffers and one scratch buffer for measuring, as bytes, each as large as the largest bucket needs."""
    buckets = [(bucket, table.wire.itemsize) for table in tables for bucket in table.buckets]
    staging = max(bucket.numel * itemsize for bucket, itemsize in buckets)
    scratch = max(bucket.drift_numel * max(4, itemsize) for bucket, itemsize in buckets)
    return [torch.empty(size, dtype=torch.uint8, device=device) for size in [staging] * SLOTS + [scratch]]


def average_parameters(
    tensors: Iterable[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    wire: str = "parameter",
    backend: str = "auto",
) -> SyncReport:
    """Replace every tensor by its mean over the ranks of `group` (default: all), in place, and report what it took.

    tensors: floating-point or complex, of any shape and stride; all ranks must pass equal layouts in the same order. wire:
    "parameter" (each tensor's own dtype travels) or "float32". backend: "auto",
    "native" or "torch". Without an initialised process
    group, or alone in it, there is nothing to average and the tensors stay as they are.

    Raises ValueError for an unknown wire or backend, LocalSGDError for a tensor without a mean (integers) and for a process
    that is not in `group`.
    """
    check_wire(wire)
    check_backend(backend)
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"tensors must be torch tensors; tensors[{index}] is a {type(tensor).__name__}")
    items = [Item(f"tensors[{index}]", tensor) for index, tensor in enumerate(tensors)]
    group = resolve_group(group)
    if group is None or group.size() == 1:
        return SyncReport(0, 1, 0, 0.0, 0, 0.0, 1, ReferenceBackend.name)
    return Averager(group, wire, backend, None).average(items, step=0, round=1, interval=0).result()


def _is_gloo(group: dist.ProcessGroup) -> bool:
    try:
        return group._get_backend(torch.device("cpu")).name() == "gloo"
    except (RuntimeError, AttributeError):  # no backend for CPUs, or a group of the user's own making
        return False


def resolve_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The given group, else the world, else None where torch.distributed is not initialised."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            raise TypeError(f"the process group must be a torch.distributed.ProcessGroup or None; got a {type(group).__name__}")
        raise LocalSGDError(f"rank {dist.get_rank()} is not a member of the process group it was asked to average over")
    return group
