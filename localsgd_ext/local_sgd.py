"""LocalSGD: enter, step, exit."""

from __future__ import annotations

import contextlib
import datetime
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from . import arguments, backends, models, schedules
from ._version import __version__
from .averager import Averager
from .checkpoint import AccelerateHooks
from .control import Control
from .errors import LocalSGDError
from .gradient_sync import GradientSync
from .items import check_in_place
from .outer import Outer, check_outer
from .replicas import find_replicas
from .report import SyncReport, saved
from .rounds import Rounds
from .schedules import Schedule, as_schedule, checked_interval, fragments_due, lasting, may_return_to_0
from .standing import Call, Place, Standing

if TYPE_CHECKING:
    from accelerate import Accelerator


class LocalSGD:
    """Train a copy of the model on every rank and average the parameters every few steps.

    A drop-in for `accelerate.local_sgd.LocalSGD`::

        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8) as local_sgd:
            for batch in dataloader:
                ...
                optimizer.step()
                local_sgd.step()

    Local SGD: Stich 2019, arXiv 1805.09767; the same averaging earlier in Zhang et al. 2016, arXiv 1606.07365.

    Args:
        accelerator: an `accelerate.Accelerator`, or None for plain torch.distributed (every step() is then an optimizer step).
        model: as returned by `accelerator.prepare`; with `accelerator=None` a DDP model, a plain module, or one of DTensors
            (FSDP2, tensor parallel). DDP starts all ranks from rank 0's weights; others must be initialised alike in all
            replicas. Of DTensors each rank averages its part with the ranks that hold the same part in the other replicas;
            their gradients are reduced inside replicas only. A replica's ranks must train in step.
        local_sgd_steps: average every so many counted steps, a whole number >= 1, or a schedule (`Every`, `Warmup`, `QSR`,
            `DriftTarget`): a callable taking this object and returning the number of local steps of the next round, 0 for a
            step of ordinary synchronous training (gradients all-reduced by DDP; a model without DDP is averaged after that step
            instead). It is asked when a round ends, right before its averaging; the word of the first rank that is still
            training counts for all.
        enabled: False makes it do nothing but count steps, as does a run that is not distributed.
        count: "calls" counts every step(), as Accelerate does; "optimizer" only those at which gradients were applied,
            which the Accelerator knows; without one every call counts.
        wire: what travels for a parameter. "parameter": its own dtype; "float32": sums 16-bit parameters in float32. A wire
            that cannot hold the parameter's dtype exactly ("bfloat16", "float16", "int8", "int4"; "float32" for float64)
            carries the difference to the last average instead, and what rounding drops goes into a later one (error feedback);
            it keeps two float32 for each element of the parameters (float64 for float64). float16, int8 and int4 share a scale
            among 256 values. Buffers, the averagings asked for (synchronize(), averaged()) and the closing one always travel
            exactly. After loading other weights in place inside the block call synchronize(), else so large a difference
            travels coarsely; with `outer` leave the block instead.
        outer: what is done with the mean progress of a round: None for taking the mean; `OuterSGD`, `DiLoCo`, `SlowMo`, or a
            callable that makes a torch.optim.Optimizer for the flat anchors (called once with a trial tensor, too). It keeps
            anchor and momentum in float32 (float64 for float64), beside what the wire takes; momentum outlives the block.
            averaged() gives the mean of the weights, without an outer step.
        buffers: what happens to float buffers in the state dict (BatchNorm statistics): "average", "broadcast" (follow rank
            0) or "keep" (each rank's own). Integer buffers follow rank 0 unless "keep".
        nonfinite: a rank whose parameters hold NaN or inf when an averaging begins: "raise" NonFiniteError on every rank,
            before anything is averaged; "exclude" that rank, which then receives the average of the healthy ones; "ignore" it,
            and save the pass over the weights that looks for it. Buffers are not looked at: some hold -inf on purpose.
        overlap_steps: how many counted steps an averaging may take in the background, less than a round has (times `fragments`,
            not more). Weights are taken when it is due; that many steps later they become the average and what this rank has
            gained meanwhile (arXiv 2002.09539, 2501.18512), or at once where another averaging is asked for. It has a process
            group of its own, and takes two copies of the largest fragment.
        fragments: in how many parts of equal size, at most 62, the weights are averaged, at even distances within a round, each
            once in it: an averaging then moves that part of the bytes. A schedule's rounds too short for this are made longer.
        process_group: the ranks that average; default the DDP model's own group, the dimension of the model's device mesh along
            which nothing is cut, or all ranks. DDP inside each host and averaging between hosts: `host_groups`.
        backend: "native" (compiled), "torch", or "auto": native where it is ready or can be built. Ranks may differ.
        bucket_mb: size of one staging buffer in MiB; None for the device's default.
        state_device: where anchor, residual and momentum are kept: None for beside the parameters, or "cpu".
        timeout: how long to wait for the other ranks at an averaging; None for the process group's own timeout.

    Ranks may run out of batches at different times: who leaves the block early goes on serving the others' averagings, in which
    a rank's weights count if it has trained since the last one, until all are done. All leave with the same weights.

    Attributes:
        num_steps: counted steps; where ranks had different numbers, that of the longest once all have left the block.
        num_syncs: averagings done, of single fragments, too. enabled: whether this object averages at all.

    Raises:
        TypeError, ValueError: an argument is not allowed; the message says what is.
        LocalSGDError: backend="native" cannot be had; the message holds the cause.
        NotImplementedError: DeepSpeed, Megatron-LM, FSDP1, XLA.
        On entry, on every rank: LayoutMismatchError where tensors or options differ. In averagings, on every rank that is left:
        PeerError where a rank failed or is gone, PeerTimeoutError where one did not come; NonFiniteError.
    """

    def __init__(
        self,
        accelerator: Accelerator | None,
        model: torch.nn.Module,
        local_sgd_steps: int | Schedule,
        enabled: bool = True,
        *,
        count: str = "calls",
        wire: str = "parameter",
        outer: Outer | None = None,
        buffers: str = "average",
        nonfinite: str = "raise",
        overlap_steps: int = 0,
        fragments: int = 1,
        process_group: dist.ProcessGroup | None = None,
        backend: str = "auto",
        bucket_mb: float | None = None,
        state_device: str | torch.device | None = None,
        timeout: datetime.timedelta | None = None,
    ) -> None:
        self._schedule = as_schedule(local_sgd_steps)
        arguments.check_choices(count=count, buffers=buffers, nonfinite=nonfinite, wire=wire, backend=backend)
        described_outer = check_outer(outer)
        arguments.check_fragments(fragments, overlap_steps, self._schedule)
        arguments.check_bucket_mb(bucket_mb)
        arguments.check_timeout(timeout)
        home = arguments.state_device(state_device)
        models.check_accelerator(accelerator)
        models.check_model(model)

        self.num_steps = 0
        self.enabled = bool(enabled) and models.is_distributed(accelerator)
        self._accelerator = accelerator
        self._count = count
        self._inside = False
        self._lent = False  # inside averaged(): the tensors hold the average for a while
        self._interval: int | None = None  # local steps of the current round; None until the schedule was first asked
        self._round_began = 0  # num_steps at the last scheduled averaging
        self._gradient_sync = GradientSync()
        self._rounds: Rounds | None = None  # None where there is nobody to average with
        self._hooks: AccelerateHooks | None = None
        self._fragments, self._overlap_steps = fragments, overlap_steps
        self._lands_at = 0  # num_steps when what is under way in the background is waited for
        if not self.enabled:
            return

        models.check_parts(model)
        replicas = find_replicas(model, process_group, accelerator)
        selection = models.Selection(model, buffers, replicas)
        for item in selection.items():
            check_in_place(item)
        if replicas is None or replicas.group.size() == 1:
            return
        group = replicas.group
        backends.pick(backend, {item.tensor.device.type for item in selection.items()})
        options = {
            "wire": wire, "outer": described_outer, "buffers": buffers, "nonfinite": nonfinite, "count": count, "bucket_mb": bucket_mb,
            "fragments": fragments, "overlap_steps": overlap_steps, "version of localsgd_ext": __version__,
        }  # fmt: skip
        averager = Averager(group, wire, backend, bucket_mb, outer, home, fragments, overlap_steps > 0)
        control = Control(group, timeout, replicas.inside)
        self._rounds = Rounds(selection, averager, control, nonfinite, options, overlap_steps > 0)
        if accelerator is not None:
            self._hooks = AccelerateHooks(self, accelerator, dist.get_rank(), replicas.part)
        self._gradient_sync = GradientSync(model, group)

    def __enter__(self) -> LocalSGD:
        if self._inside:
            raise LocalSGDError(
                "this LocalSGD was entered again inside its own `with` block; leave that first, or make another one"
            )
        if self.enabled:
            if self._interval is None:
                self._interval = self._ask()
            if self._rounds is not None:
                try:
                    self._rounds.begin(self._place)
                except BaseException as error:
                    self._rounds.fail(error)
                    self._rounds.release()
                    raise
            self._gradient_sync.set(on=self._interval == 0)
        self._inside = True
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, *_: object) -> None:
        """Average what was not averaged yet, and turn DDP's gradient sync on again, whatever happens. After an exception no
        collective is started: the peers may be anywhere. They are told."""
        try:
            if self._rounds is not None:
                if exc is not None:
                    self._rounds.fail(exc)
                else:
                    self._finish()
                    self._rebase_in_step()
                    # Ranks may have counted different numbers of steps: they go on from the same place, to the same rounds.
                    self.num_steps, self._interval, phase = self._rounds.serve(self._place)
                    self._round_began = self.num_steps - phase
        except BaseException as error:
            if self._rounds is not None:
                self._rounds.fail(error)
            raise
        finally:
            self._inside = False
            self._gradient_sync.set(on=True)
            if self._rounds is not None:
                self._rounds.release()

    def step(self) -> None:
        """Count a step, and average if one is due. Call it once after each optimizer.step(), on all ranks alike. Raises
        LocalSGDError outside the `with` block, and in an averaging what the class says."""
        applied = self._accelerator is None or self._accelerator.sync_gradients
        counted = self._count == "calls" or applied
        if not self.enabled:
            self.num_steps += counted
            return
        if not self._inside or self._interval is None:
            raise LocalSGDError("step() was called outside the `with LocalSGD(...)` block, where gradients are synchronised")
        self._check_not_lent("step")
        self.num_steps += counted
        if self._rounds is not None and applied:
            self._rounds.stepped()
        if counted:
            if self.num_steps >= self._lands_at or (self._rounds is not None and self._rounds.has_failed):
                self._finish()
            if parts := fragments_due(self._interval, self._place.phase, self._fragments):
                self._round_or_part(parts)
        if applied:
            # Only here is no `accumulate` holding its own no_sync, which would undo ours or be undone by it.
            self._gradient_sync.set(on=self._interval == 0)

    def _round_or_part(self, parts: int) -> None:
        """These fragments are due; with the last of them the round ends."""
        assert self._interval is not None
        apart = self._interval > 0 or not self._gradient_sync.keeps_equal()
        ends, was, following = self._place.phase >= self._interval, self._interval, self._interval
        if ends:
            self._round_began = self.num_steps
            following = self._ask()
        place = Place(self.num_steps, was, self._place.phase)
        if self._rounds is None or not apart:
            self._interval = following
            if self._rounds is not None and following > 0:
                self._rounds.rebase(place._replace(interval=following))
        elif self._overlap_steps == 0 or was == 0 or parts & (parts - 1):
            self._agreed(self._rounds.average(Call.STEP, place, following, parts), ends)
        else:
            self._finish()
            self._rounds.depart(place, following, parts, ends)
            self._interval = following  # until the ranks' word has arrived
            self._lands_at = self.num_steps + self._overlap_steps
            if ends and may_return_to_0(self._schedule):
                self._agreed(self._rounds.met(), ends)
            if self._interval == 0:  # what comes next is no local training
                self._finish()

    def _ask(self) -> int:
        return lasting(checked_interval(self._schedule, self), self._overlap_steps, self._fragments)

    def _agreed(self, standings: list[Standing], ends: bool) -> None:
        """One rank's word counts for the next round, so that a schedule which depends on the rank cannot set them apart."""
        if ends:
            self._interval = next(standing.following for standing in standings if standing.call is Call.STEP)

    def _finish(self) -> None:
        """Wait for what is under way in the background."""
        if self._rounds is not None and self._rounds.under_way:
            self._agreed(*self._rounds.land())

    def synchronize(self) -> SyncReport | None:
        """Average now, on all ranks alike, without moving the schedule; None where there is nobody to average with. Raises what
        the class says."""
        return self._average_now(Call.SYNCHRONIZE)

    def settle(self) -> SyncReport | None:
        """As synchronize(), but nothing is sent where all ranks have averaged all there is."""
        return self._average_now(Call.SETTLE)

    def _average_now(self, call: Call) -> SyncReport | None:
        if self._rounds is not None:
            self._check_not_lent(call.name.lower())
            self._finish()
            with self._perhaps_outside(self._rounds):
                self._rebase_in_step()
                self._rounds.average(call, self._place)
        return self.report

    def _rebase_in_step(self) -> None:
        """Steps of synchronous training are no progress for an outer optimizer: what ranks hold after them is what they agree
        on."""
        if self._rounds is not None and self._inside and self._interval == 0 and self._gradient_sync.keeps_equal():
            self._rounds.rebase(self._place)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[SyncReport | None]:
        """The averaged weights inside the block, this rank's own weights again after it, bit for bit, also after an error.

        To be entered on all ranks alike; gives the report of the averaging. Holds a copy of the averaged tensors meanwhile.
        What is under way in the background is waited for before: own weights are those with it.
        """
        if self._rounds is None:
            yield None
            return
        self._check_not_lent("averaged")
        self._finish()
        with self._perhaps_outside(self._rounds), self._rounds.own_weights_after():
            self._rounds.average(Call.AVERAGED, self._place)
            self._lent = True
            try:
                yield self._rounds.report
            finally:
                self._lent = False

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Counters, the place in the schedule, and what the outer optimizer keeps, as tensors by name; the same on every rank,
        save that for DTensors it holds DTensors: `torch.distributed.checkpoint` saves and loads this object as it is (before
        the block, or inside it).

        To be saved beside the model, right after an averaging; `accelerator.register_for_checkpointing(local_sgd)` and
        `accelerator.save_state()` see to both, and save every rank's own inner optimizer besides. Raises LocalSGDError inside
        the block if this rank has trained since the last averaging: call synchronize() on all ranks before.
        """
        state = {"num_syncs": torch.tensor(0)} | saved(None) if self._rounds is None else self._rounds.state()
        state |= {"num_steps": torch.tensor(self.num_steps), "phase": torch.tensor(self._place.phase)}
        state["was_local"] = torch.tensor(self._gradient_sync.was_off)
        state["interval"] = torch.tensor(-1 if self._interval is None else self._interval)
        return state | schedules.state(self._schedule)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from `state`, on all ranks alike, after the model's own weights have been loaded; before the block or inside
        it.

        A state of another number of ranks is as good. Warns where it holds nothing of a parameter's momentum.
        """
        if "num_steps" not in state:
            warnings.warn("this state dict holds no state of LocalSGD: its counters and momentum start anew", stacklevel=2)
            return
        state = state if self._hooks is None else self._hooks.own_state(state)
        self.num_steps = int(state["num_steps"])
        self._round_began = self.num_steps - int(state["phase"])
        interval = int(state["interval"])
        self._interval = None if interval < 0 else lasting(interval, self._overlap_steps, self._fragments)
        self._gradient_sync.was_off |= bool(state["was_local"])
        if self._rounds is not None:
            self._rounds.restore(state, self.num_steps)
        if self._inside:
            self._gradient_sync.set(on=not self._interval)
        schedules.load(self._schedule, state)
        if self._hooks is not None:
            self._hooks.load_optimizers()

    @property
    def is_inside(self) -> bool:
        """Whether its `with` block has been entered, and not left."""
        return self._inside

    @property
    def num_syncs(self) -> int:
        """Averagings done."""
        return 0 if self._rounds is None else self._rounds.count

    @property
    def report(self) -> SyncReport | None:
        """The report of the last averaging, or None before the first. Reading it may wait for the ranks' drift."""
        return None if self._rounds is None else self._rounds.report

    def metrics(self) -> dict[str, float]:
        """The last report as flat numbers, ready for `accelerator.log`; empty before the first averaging."""
        report = self.report
        return {} if report is None else report.metrics()

    @property
    def _place(self) -> Place:
        return Place(self.num_steps, self._interval or 0, self.num_steps - self._round_began)

    @contextlib.contextmanager
    def _perhaps_outside(self, rounds: Rounds) -> Iterator[None]:
        """Outside the `with` block its entry and its end are made up for."""
        if self._inside:
            yield
            return
        try:
            rounds.agree(self._place)
            yield
        except BaseException as error:
            rounds.fail(error)
            raise
        finally:
            rounds.release()

    def _check_not_lent(self, call: str) -> None:
        if self._lent:
            raise LocalSGDError(
                f"{call}() was called inside `with local_sgd.averaged():`, whose end puts each rank's own weights back; leave it first"
            )
