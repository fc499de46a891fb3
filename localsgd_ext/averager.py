"""One averaging: layout, staging buffers, wire and engine put together into a pipeline of asynchronous collectives."""

from __future__ import annotations

import hashlib
import operator
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from .anchors import Anchors
from .backends import Backend, BoundBucket, check_backend, pick
from .backends.reference import ReferenceBackend
from .collectives import SLOTS, Terms, Watch, all_reduce
from .errors import LocalSGDError
from .items import Item, check_in_place, unexpanded
from .layout import Rule, Table, TensorSpec, is_dense, plan
from .report import PendingReport, SyncReport
from .wire import (
    AVERAGEABLE,
    Chunks,
    Code,
    Wire,
    allreduce_bytes,
    broadcast_bytes,
    check_wire,
    exchange_bytes,
    travels_as,
)

DEFAULT_BUCKET_MB = {"cpu": 4.0}
"""MiB of one staging buffer by device type, chosen by measuring (benchmarks/averaging.py --bucket-mb)."""

DEFAULT_BUCKET_MB_ELSEWHERE = 32.0


class Averager:
    """Averages lists of tensors in place over a process group; keeps the layout and the buffers between calls.

    group: the ranks that average with each other. wire: see `LocalSGD`, or EXACT. bucket_mb: MiB of one staging buffer, None for the
    device's default; extra memory is SLOTS + 1 of them (one more for 16-bit parameters, twice as many for a lossy wire), never a copy of the
    model, save that a tensor with gaps in its memory (a slice of a larger one) is copied while it is averaged.

    A lossy wire carries differences to an anchor, which is to be set by `agree` where all ranks hold the same, and with it what
    rounding dropped: two float32 for each element of the parameters (float64 for float64). state_device: where these are, None for beside them.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        wire: str,
        backend: str,
        bucket_mb: float | None,
        state_device: torch.device | None = None,
    ) -> None:
        self.group = group
        self.world_size = group.size()
        self.rank = group.rank()
        self._wire = wire
        self._backend = backend
        self._bucket_mb = bucket_mb
        self._state_device = state_device
        # A wait with a time limit leaves the collective alone on Gloo; others may block for it, or give the collective up.
        self._can_watch = _is_gloo(group)
        self.release()

    def release(self) -> None:
        """Drop the buffers, the anchor and every view of the tensors, so that their memory can be freed; the next call makes them anew."""
        self._unbind()
        self._anchors: Anchors | None = None

    def _unbind(self) -> None:
        self._bound: Sequence[Item] = []
        self._places: list[list[object]] = [[] for _ in _PLACE]
        self._flats: list[torch.Tensor] = []
        self._buckets: list[BoundBucket] = []
        self._with_gaps: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._wire_bytes = 0
        self._on_cpu = True
        self.sums_in_float16 = False
        self._engine: Backend = ReferenceBackend()
        self.layout = 0  # a number that differs, as good as surely, between layouts of the tensors bound

    @property
    def agreed(self) -> bool:
        """Whether the tensors bound can travel as they are: their wire is exact, or there is an anchor for them."""
        return self._anchors is None or self._anchors.agreed

    @property
    def is_lossy(self) -> bool:
        """Whether some of the tensors bound travel in codes."""
        return self._anchors is not None

    def agree(self) -> None:
        """All ranks hold the same tensors now: what they send from now on is the difference to these."""
        if self._anchors is not None:
            self._read_gaps()
            self._anchors.set_to(self._flats)

    def outdate(self) -> None:
        """What was agreed on is no more what all ranks hold."""
        if self._anchors is not None:
            self._anchors.agreed = False

    @torch.no_grad()
    def pour_residual(self) -> None:
        """Put back into the tensors what rounding has dropped from them; to be followed by `agree`, after an exact averaging."""
        if self._anchors is not None:
            self._read_gaps()
            self._anchors.pour_into(self._flats)
            self._write_gaps()

    def fingerprint(self) -> int:
        """Of the anchor, for a comparison with other ranks'; 0 where there is none."""
        return 0 if self._anchors is None else self._anchors.fingerprint()

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
            if not self._can_watch or not self._on_cpu:
                watch = timeout = None
            terms = Terms(active[self.rank], sum(active), list(active).index(True), watch, timeout)
            self._read_gaps()
            try:
                sums = self._engine.average(self._buckets, self.group, terms)
            except BaseException:
                self.release()
                raise
            self._write_gaps()
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
        self._unbind()
        dense = [self._dense(item) for item in items]
        self._flats = flats = [_flat(tensor, item.rule) for tensor, item in zip(dense, items, strict=True)]
        specs = [self._spec(item, flat) for item, flat in zip(items, flats, strict=True)]
        bucket_mb = self._bucket_mb
        if bucket_mb is None and specs:
            bucket_mb = DEFAULT_BUCKET_MB.get(specs[0].device.type, DEFAULT_BUCKET_MB_ELSEWHERE)
        tables = plan(specs, int((bucket_mb or 0) * 2**20))
        self.layout = _layout(items, specs, tables)
        self._keep_anchors([table for table in tables if isinstance(table.wire, Code)])
        if not tables:
            return

        self._engine = pick(self._backend, {table.device.type for table in tables})
        pools = {device: self._pool([t for t in tables if t.device == device]) for device in {t.device for t in tables}}
        self._on_cpu = all(device.type == "cpu" for device in pools)
        self.sums_in_float16 = any(t.wire is torch.float16 and t.rule is Rule.MEAN for t in tables)
        for table in tables:
            if isinstance(table.wire, Code):
                self._bind_coded(table, table.wire, pools[table.device])
            else:
                self._bind_values(table, table.wire, pools[table.device])
        self._bound, self._places = items, [[place(item.tensor) for item in items] for place in _PLACE]

    def _bind_values(self, table: Table, wire: torch.dtype, pool: list[torch.Tensor]) -> None:
        *staging, scratch = pool
        for bucket in table.buckets:
            slot = staging[len(self._buckets) % SLOTS]
            self._buckets.append(self._engine.bind(table, bucket, self._flats, slot, scratch))
        payload = table.numel * wire.itemsize
        if table.rule is Rule.FOLLOW:
            self._wire_bytes += broadcast_bytes(payload, self.rank, self.world_size)
        else:
            self._wire_bytes += allreduce_bytes(payload, self.world_size)

    def _bind_coded(self, table: Table, code: Code, pool: list[torch.Tensor]) -> None:
        assert self._anchors is not None
        for bucket, state in zip(table.buckets, self._anchors.states(table), strict=True):
            slot = pool[len(self._buckets) % SLOTS]
            self._buckets.append(self._engine.bind_coded(table, bucket, self._flats, slot, state, self.rank, self.world_size))
            self._wire_bytes += exchange_bytes(Chunks.of(bucket.numel, code, self.world_size), self.world_size)

    def _keep_anchors(self, coded: list[Table]) -> None:
        """An anchor stays while its layout does, wherever the tensors move. All ranks change their layouts together, or not at all."""
        if not coded:
            self._anchors = None
        elif self._anchors is None or self._anchors.tables != coded:
            self._anchors = Anchors(coded, self._state_device)

    def _pool(self, tables: Sequence[Table]) -> list[torch.Tensor]:
        """SLOTS staging buffers and one scratch buffer for measuring, as bytes, each as large as the largest bucket needs."""
        staging = scratch = 0
        for table in tables:
            for bucket in table.buckets:
                if isinstance(table.wire, Code):
                    chunks = Chunks.of(bucket.numel, table.wire, self.world_size)
                    staging = max(staging, 2 * chunks.count * chunks.nbytes)
                else:
                    staging = max(staging, bucket.numel * table.wire.itemsize)
                    scratch = max(scratch, bucket.drift_numel * max(4, table.wire.itemsize))
        return [torch.empty(size, dtype=torch.uint8, device=tables[0].device) for size in [staging] * SLOTS + [scratch]]

    def _read_gaps(self) -> None:
        for tensor, dense in self._with_gaps:
            dense.copy_(tensor)

    def _write_gaps(self) -> None:
        for tensor, dense in self._with_gaps:
            tensor.copy_(dense)

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
        wire: Wire
        if item.rule is Rule.FOLLOW:
            wire = flat.dtype
        else:
            if flat.dtype not in AVERAGEABLE:
                raise LocalSGDError(
                    f"tensor {item.name!r} has dtype {item.tensor.dtype}, which has no mean; averaging takes floating-point and "
                    "complex tensors (freeze it with requires_grad=False to leave it out)"
                )
            wire = travels_as(flat.dtype, self._wire, item.is_parameter)
        return TensorSpec(item.name, flat.numel(), flat.dtype, wire, flat.device, item.rule, item.is_parameter, flat.data_ptr())


_PLACE: tuple[Callable[[torch.Tensor], object], ...] = (
    torch.Tensor.data_ptr,
    torch.Tensor.stride,
    operator.attrgetter("shape"),
    operator.attrgetter("dtype"),
)
"""What the layout depends on beside the tensor itself: `tensor.data = other` may change all of it."""

_tensor = operator.attrgetter("tensor")


def _same(items: Sequence[Item], bound: Sequence[Item]) -> bool:
    return items is bound or (
        len(items) == len(bound) and all(a.tensor is b.tensor and a[2:] == b[2:] for a, b in zip(items, bound, strict=True))
    )


def _unmoved(items: Sequence[Item], places: list[list[object]]) -> bool:
    """Whether the tensors are still where they were bound. In C loops, since there may be thousands of tensors, and in ones that
    allocate nothing that lasts, so that no garbage collection starts here."""
    tensors = list(map(_tensor, items))
    return all(all(map(operator.eq, map(place, tensors), was)) for place, was in zip(_PLACE, places, strict=True))


def _layout(items: Sequence[Item], specs: Sequence[TensorSpec], tables: Sequence[Table]) -> int:
    """Of what has to be alike on all ranks for their buckets, and the elements in them, to match."""
    lines = (
        f"{i.name} {list(i.tensor.shape)} {i.tensor.stride()} {i.tensor.dtype} {s.wire} {s.rule.value} {s.is_parameter}\n"
        for i, s in zip(items, specs, strict=True)
    )
    # Tied tensors travel once: that, too, has to be alike.
    digest = hashlib.sha256(("".join(lines) + str([table.numel for table in tables])).encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _flat(tensor: torch.Tensor, rule: Rule) -> torch.Tensor:
    """A one-dimensional view of a dense tensor's memory, in the order of the memory: real numbers, or bytes to follow."""
    if tensor.is_conj():
        tensor = tensor.conj()  # the numbers in memory: the mean of conjugates is the conjugate of the mean
    if rule is Rule.MEAN and tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8) if rule is Rule.FOLLOW else flat


def average_parameters(
    tensors: Iterable[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    wire: str = "parameter",
    backend: str = "auto",
) -> SyncReport:
    """Replace every tensor by its mean over the ranks of `group` (default: all), in place, and report what it took.

    tensors: floating-point or complex, of any shape and stride; all ranks must pass equal layouts in the same order. wire:
    see `LocalSGD`; here there is no anchor, so one that cannot hold the tensors' dtype rounds their values, by at most half a step of
    its code (bfloat16: 2^-9 of a value; float16, int8, int4: about 2^-12, 1/254 and 1/14 of the largest of 256 values that follow
    each other), and above 2 ranks their mean again. backend: "auto", "native" or "torch". Without an initialised process
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
