"""One averaging: a pipeline of asynchronous collectives over bound buckets, and what an outer optimizer makes of it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from .anchors import Anchors
from .background import keep
from .binding import Binding
from .collectives import Terms, Watch, all_reduce
from .groups import Groups
from .items import Item
from .outer import Outer, makes_optimizer
from .report import PendingReport, SyncReport
from .wire import Mode


class Averager:
    """Averages lists of tensors in place over a process group; keeps the layout and the buffers between calls.

    group: the ranks that average with each other. wire, outer: see `LocalSGD`. bucket_mb: MiB of one staging buffer, None for
    the device's default; extra memory is SLOTS + 1 of them (one more for 16-bit parameters, twice as many where differences
    travel), never a copy of the model, save that a tensor with gaps in its memory (a slice of a larger one) is copied while it
    is averaged.

    Where a wire is lossy, or with an outer optimizer, differences to an anchor travel, which is to be set by `agree` where all
    ranks hold the same: `Anchors` says what that takes. state_device: where that is, None for beside the tensors. fragments:
    how many parts there are that may be averaged alone, each named by a bit of what is called `parts`. shadowed: see `Binding`;
    takes two copies of the largest part.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        wire: str,
        backend: str,
        bucket_mb: float | None,
        outer: Outer | None = None,
        state_device: torch.device | None = None,
        fragments: int = 1,
        shadowed: bool = False,
    ) -> None:
        self.groups = Groups(group)
        self.world_size = group.size()
        self.rank = group.rank()
        self._wire = wire
        self._backend = backend
        self._bucket_mb = bucket_mb
        self._outer = outer
        self._state_device = state_device
        self.fragments = fragments
        self.everything = (1 << fragments) - 1
        self._shadowed = shadowed
        self.bindings: dict[Mode, Binding] = {}
        self.anchors: Anchors | None = None
        # Whether some rank may keep anchors, whatever tensors this one holds.
        self.may_keep_anchors = outer is not None or wire != "parameter"

    def release(self) -> None:
        """Drop the buffers and every view of the tensors, so that their memory can be freed, and of the anchors what can be had
        again."""
        self.bindings = {}
        if self.anchors is not None and not self.anchors.has_momentum:
            self.anchors = None

    def agree(self) -> None:
        """All ranks hold the same tensors as bound now: what they send from now on is the difference to these."""
        if self.anchors is not None:
            with torch.inference_mode(False), torch.no_grad():
                self.bindings[Mode.WIRE].agree()

    def state(self, items: Sequence[Item], loaded: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
        """What `Anchors.state` gives, outside a block. loaded: what such a state was, and what it is to be when the tensors are
        bound."""
        if self._outer is None and not any(item.is_parameter and item.tensor.itemsize == 2 for item in items):
            return {}  # without making what a wire would take
        bound = bool(self.bindings)
        self.bind(items)
        if self.anchors is None:
            return {}
        self.agree()
        if loaded is not None:
            self.anchors.load(loaded)
        state = self.anchors.state()
        if not bound:
            self.release()
        return state

    def pour_residual(self, divisor: int) -> None:
        """Put into the tensors what this rank owes to a mean over `divisor` ranks, for their values to carry it."""
        if self.anchors is not None:
            binding = self.bindings[Mode.WIRE]
            with torch.inference_mode(False):
                binding.read_gaps()
                self.anchors.pour_into(binding.flats, divisor)
                binding.write_gaps()

    def bind(self, items: Sequence[Item], mode: Mode = Mode.WIRE) -> Binding:
        """Lay out the tensors and tie them to buffers, unless they are where they were the last time."""
        binding = self.bindings.get(mode)
        if binding is not None and binding.fits(items):
            return binding
        self.bindings.pop(mode, None)  # its memory goes to the next one
        # Buffers made inside inference_mode() could never be used outside it again.
        with torch.inference_mode(False), torch.no_grad():
            binding = Binding(
                items,
                mode,
                self.groups.averaging,
                self._wire,
                self._backend,
                self._bucket_mb,
                self._outer,
                self._state_device,
                self.anchors,
                self.fragments,
                self._shadowed and mode is Mode.WIRE,
            )
        if mode is not Mode.VALUES:
            self.anchors = binding.anchors
        self.bindings[mode] = binding
        return binding

    def average(
        self,
        items: Sequence[Item],
        *,
        step: int,
        round: int,
        interval: int,
        local_steps: int = 0,
        mode: Mode = Mode.WIRE,
        parts: int | None = None,
        taken: Binding | None = None,
        active: Sequence[bool] = (),
        watch: Watch | None = None,
        timeout: timedelta | None = None,
    ) -> PendingReport:
        """Replace every tensor by its mean over the active ranks (or by the first one's value), in place.

        Must be called by all ranks of the group with equal layouts. active: for each rank whether its values count; default
        all. parts: only these. taken: binding whose `take` was called before, and whose `give` will be later: nothing else is
        bound, and the tensors are left alone. If a collective fails or `watch` raises, every element holds either its local or
        its averaged value, and nothing is agreed on any more.
        """
        active = active or [True] * self.world_size
        begun = time.perf_counter()
        with torch.inference_mode(False), torch.no_grad():
            binding = taken or self.bind(items, mode)
            if not self.groups.can_watch or not binding.on_cpu:
                watch = timeout = None
            parts = self.everything if parts is None else parts
            buckets = binding.of(binding.buckets, parts)
            terms = Terms(active[self.rank], sum(active), list(active).index(True), watch, timeout)
            begin = torch.cuda.Event(enable_timing=True) if binding.on_cuda else None
            if begin is not None:
                begin.record()
            if taken is None:
                binding.take(parts)
            try:
                sums = binding.engine.average(buckets, self.groups.averaging, terms)
                if mode in (Mode.WIRE, Mode.EXACT) and self.anchors is not None and makes_optimizer(self._outer):
                    self.anchors.step(parts)
                    binding.lead(parts)
            except BaseException:
                if taken is not None and not binding.on_cpu:
                    keep(binding)
                if self.anchors is binding.anchors:  # not those of a block that was begun since
                    self.bindings, self.anchors = {}, None
                raise
            if taken is None:
                binding.give(parts, progress=False, root=terms.root)
            # A total of its own: it goes on travelling while training does. ||mean||^2 is known where this rank holds the whole
            # model.
            everyone = self.groups.everyone
            totals = sums[: 1 if everyone is self.groups.averaging else 2].clone()
            if not terms.contributes:
                totals[0] = 0
            if not buckets and items:
                totals = totals.to(items[0].tensor.device)
        # Nothing to average (a model without trainable parameters) means no collective at all; unless other ranks of the
        # replica have something.
        work = all_reduce(totals, everyone, timeout) if buckets or everyone is not self.groups.averaging else None
        seconds = time.perf_counter() - begun
        if mode is not Mode.WIRE:
            self.bindings.pop(mode, None)  # seldom needed
        events = None
        if begin is not None:
            events = begin, torch.cuda.Event(enable_timing=True)
            events[1].record()
        report = SyncReport(
            step,
            round,
            interval,
            local_steps,
            seconds,
            None,
            binding.wire_bytes(parts),
            math.nan,
            terms.divisor,
            binding.engine.name,
        )
        return PendingReport(report, totals, sums[1], self.world_size, work, watched=watch is not None, events=events)
