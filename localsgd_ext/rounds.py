"""One round from handshake to report: who meets, whose weights count, and what is done when a rank fails."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from . import agreement
from .averager import Averager
from .background import JOIN_SECONDS, Flight, Worker
from .binding import Binding
from .control import Control
from .decision import Outcome, check_average, decide, warn
from .entry import agree
from .errors import LocalSGDError
from .items import Item, first_nonfinite, values_after, version
from .models import Selection
from .report import PendingReport, SyncReport, restored, saved, span
from .standing import Call, Place, Standing
from .wire import Mode

CHECK = "LOCALSGD_EXT_CHECK"
"""Set to 1, makes every handshake compare the anchors of all ranks, bit by bit. Slow: for debugging."""


class Rounds:
    """The averagings of one LocalSGD.

    nonfinite: see `LocalSGD`. options: whatever else has to be equal on all ranks, by name. overlaps: whether averagings go on
    in the background of training, in a process group of their own.
    """

    def __init__(
        self,
        selection: Selection,
        averager: Averager,
        control: Control,
        nonfinite: str,
        options: Mapping[str, object],
        overlaps: bool = False,
    ) -> None:
        self._selection = selection
        self._averager = averager
        self._control = control
        self._checks = os.environ.get(CHECK, "") not in ("", "0")
        self.is_unsent = False  # whether the last averaging has dropped something, which is still to be sent
        self._nonfinite = nonfinite
        self._options = options
        self._pending: PendingReport | None = None
        self._report: SyncReport | None = None
        self._version = (-1, -1)  # of the tensors when last looked at
        self._loaded: Mapping[str, torch.Tensor] | None = None  # of a checkpoint, until the tensors are bound
        self._begun = False  # whether the ranks have begun a block together, and not left it
        self._everything = averager.everything
        self._equal_at = [0] * averager.fragments  # counted steps when the ranks last held the same weights of each
        # The fragments, as bits, whose weights and whose buffers have changed on this rank since their last averaging.
        self._trained = self._changed = 0
        self._overlaps = overlaps
        self._worker = Worker()
        self._flight: tuple[Flight[Outcome], Binding, Standing, bool] | None = None
        self.count = 0  # averagings done

    @property
    def report(self) -> SyncReport | None:
        """The report of the last averaging. Reading it may wait for the ranks' drift, and for the device."""
        self.wait_for_drift()
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._report = pending.result()
        return self._report

    def wait_for_drift(self) -> None:
        """Wait for the drift of the last averaging, which travels while training goes on; read no value from the device."""
        if self._pending is not None:
            with self._control.blaming():
                self._pending.wait(self._control.watch())

    @property
    def has_news(self) -> bool:
        """Whether this rank has trained since the last averaging, as far as step() told."""
        return bool(self._trained or self._changed or self._flight is not None)

    def stepped(self) -> None:
        """This rank has trained."""
        self._trained = self._everything

    def begin(self, place: Place) -> None:
        """Make sure that all ranks hold the same tensors, options and weights; where the weights differ, take rank 0's."""
        self.agree(place, equal=True)
        if self._overlaps:
            self._averager.groups.use_own(self._control.timeout)
        self._start(place.step)

    def _start(self, step: int) -> None:
        """From what all ranks hold now."""
        items = self._selection.items()
        self._averager.bind(items)
        if (anchors := self._averager.anchors) is not None:
            self._averager.agree()
            anchors.agreed = first_nonfinite(items) < 0  # no progress can be told from NaN
            if self._loaded is not None:
                anchors.load(self._loaded)
        self._loaded = None
        self._begun = True
        self.is_unsent = False
        self._equal_at = [step] * len(self._equal_at)
        self._note_version(items)

    def rebase(self, place: Place) -> None:
        """The ranks have trained in step, without averagings: where they are now, their next differences begin."""
        self._equal_at = [place.step] * len(self._equal_at)
        if self._averager.may_keep_anchors:  # whether this rank does: its part of the model may be empty
            self._look(self._selection.items())
            changed = self._changed  # buffers are each rank's own
            self.begin(place)
            self._changed = changed

    def agree(self, place: Place, equal: bool = False) -> None:
        """Make sure that all ranks hold the same tensors and options. equal: see `begin`."""
        self._control.open()
        groups = self._averager.groups
        groups.note(self._control.global_ranks)
        averaging, everyone = groups.own() if self._overlaps and equal else ("", groups.shared())
        options = {
            **self._options,
            CHECK: self._checks,
            "local_sgd_steps": place.interval,
            "steps into the round": place.phase,
            "process group of all replicas": everyone,
        }
        agree(self._control, self._averager, self._selection.described(), options, averaging, place.step, equal)
        groups.include(self._control.timeout)

    def average(self, call: Call, place: Place, following: int = 0, parts: int = 0) -> list[Standing]:
        """Meet the other ranks, and average if one of them has something new; gives where they stood.

        following: local steps of the next round, as far as this rank is concerned. parts: the fragments that step() is to
        average; all other calls average all of them. Nothing may be under way in the background.
        """
        items = self._selection.items()
        own = self._standing(call, place, following, parts, items)
        if self._nonfinite != "ignore":
            whole = own.parts == self._everything
            bad = first_nonfinite(items) if whole else self._averager.bindings[Mode.WIRE].first_nonfinite(own.parts)
            own = own._replace(bad=bad)
        outcome = self._meet(own, items)
        warn(outcome)
        if any(outcome.active) and not outcome.deferred:
            # A rank that serves others in averaged() puts its own weights back as they do.
            lent = outcome.common is Call.AVERAGED and call is Call.EXIT
            with self.own_weights_after() if lent else contextlib.nullcontext():
                self._replace_by_mean(items, outcome, place)
        return outcome.standings

    def depart(self, place: Place, following: int, parts: int, ends: bool) -> None:
        """Begin what `average` does in step(), in the background: `land` ends it. parts: one of them. ends: whether a round
        does, kept for `land`."""
        items = self._selection.items()
        own = self._standing(Call.STEP, place, following, parts, items)._replace(taken=1)
        binding = self._averager.bindings[Mode.WIRE]
        with torch.inference_mode(False), torch.no_grad():
            binding.take(parts)
        self._trained &= ~parts
        self._changed &= ~parts
        devices = {item.tensor.device for item in items if item.tensor.is_cuda}

        def fly(flight: Flight[Outcome]) -> Outcome:
            bad = -1 if self._nonfinite == "ignore" else binding.first_nonfinite(parts)
            outcome = self._meet(own._replace(bad=bad), items)
            flight.met.set_result(outcome.standings)
            if any(outcome.active) and not outcome.deferred:
                flight.check()
                outcome = outcome._replace(pending=self._average(items, outcome, place, binding, flight.check))
            return outcome

        self._flight = Flight(self._worker, fly, devices), binding, own, ends

    @property
    def under_way(self) -> bool:
        """Whether something goes on in the background, or waits to be landed."""
        return self._flight is not None

    @property
    def has_failed(self) -> bool:
        """Whether it is known to have failed: `land` raises that."""
        return self._flight is not None and self._flight[0].has_failed

    def met(self) -> list[Standing]:
        """Wait for where the ranks stand, of what was begun by `depart`."""
        assert self._flight is not None
        return self._flight[0].met.result() or self.land()[0]

    def land(self) -> tuple[list[Standing], bool]:
        """Wait for what was begun by `depart`, and give it to the tensors. Gives where the ranks stood, and what `ends` was."""
        assert self._flight is not None
        flight, taken, own, ends = self._flight
        place = Place(own.step, own.interval, own.phase)
        try:
            outcome = flight.land()
        except BaseException:
            self._trained |= own.trained & own.parts
            self._changed |= own.changed & own.parts
            raise
        finally:
            if flight.ended(0):  # else this rank was interrupted, and gives up
                self._flight = None
        warn(outcome)
        if outcome.deferred:
            return self.average(Call.STEP, place, own.following, self._everything), ends
        if outcome.pending is not None:
            items = self._selection.items()
            self._look(items)
            binding = self._averager.bind(items)
            with torch.inference_mode(False), torch.no_grad():
                if binding is not taken:
                    binding.adopt(taken)
                # Where NaN was left out of the mean, there is no progress either.
                progress = all(each.bad < 0 for each in outcome.standings if each.replica == self._control.replica)
                binding.give(outcome.parts, progress, outcome.active.index(True))
            self._pending = outcome.pending
            self._landed(items, outcome, place)
        return outcome.standings, ends

    def _standing(self, call: Call, place: Place, following: int, parts: int, items: Sequence[Item]) -> Standing:
        """Of this rank, save whether its weights are finite. Makes sure that the tensors are bound."""
        self.wait_for_drift()
        binding = self._averager.bind(items, Mode.WIRE if self._begun else Mode.VALUES)
        anchors = self._averager.anchors
        agreed = self._begun and (anchors is None or anchors.agreed)
        anchor = anchors.fingerprint() if self._checks and anchors is not None and agreed else 0
        if self._overlaps or self._trained != self._everything:  # else there is nothing left to notice
            self._look(items)
        parts = parts if call is Call.STEP else self._everything
        kept = 0 if anchors is None else 1 + anchors.is_lossy
        standing = Standing(call, self._trained, self._changed, -1, *place, parts, binding.layout, agreed, anchor, following)
        return standing._replace(replica=self._control.replica, anchors=kept, float16=binding.sums_in_float16)

    def _meet(self, own: Standing, items: Sequence[Item]) -> Outcome:
        with span("handshake"):
            standings = self._control.meet(own, lambda: agreement.describe({}, self._selection.described()))
        outcome = decide(
            standings,
            items,
            self._control.global_ranks,
            self._nonfinite,
            self.is_unsent,
            self._overlaps,
            self._everything,
        )
        if any(outcome.active):
            self._control.check_all_here()
        return outcome

    def serve(self, place: Place) -> Place:
        """This rank has no more batches: take part in the others' averagings until all are done, and in the closing one.

        Gives the place of the rank that has counted most steps, for all to go on from together.
        """
        standings = self.average(Call.EXIT, place)
        while any(standing.call is not Call.EXIT for standing in standings):
            standings = self.average(Call.EXIT, place)
        self.wait_for_drift()
        furthest = max(standings, key=lambda standing: standing.step)
        return Place(furthest.step, furthest.interval, furthest.phase)

    @contextlib.contextmanager
    def own_weights_after(self) -> Iterator[None]:
        """Whatever the block does to the weights, this rank's own are there again after it, bit for bit."""
        items = self._selection.items()
        self._look(items)
        trained, changed = self._trained, self._changed
        try:
            with values_after(items):
                yield
        finally:
            self._note_version(self._selection.items())  # looked up again: FSDP2 may still hold whole parameters of the average
            self._trained, self._changed = trained, changed

    def fail(self, error: BaseException) -> None:
        """This rank gives up: tell the others, start nothing more, and wait for nothing."""
        if self._pending is not None:
            self._pending.abandon()
            self._pending = None
        flight, self._flight = self._flight, None
        if flight is not None:
            flight[0].abandon()
        self._control.fail(error)
        if flight is not None:
            self._drop(flight[0])
        self._averager.groups.use_given(clean=False)

    def state(self) -> dict[str, torch.Tensor]:
        """What goes on from here, by name, the same on every rank. Raises LocalSGDError where that is not all there is."""
        if self._begun:
            self._look(self._selection.items())
        if self._begun and (self.is_unsent or self.has_news):
            raise LocalSGDError("this rank has trained since the last averaging; call synchronize() on all ranks before saving")
        state = {"num_syncs": torch.tensor(self.count)} | saved(self.report)
        if self._begun:
            anchors = self._averager.anchors
            return state if anchors is None else state | anchors.state()
        return state | self._averager.state(self._selection.items(), self._loaded)

    def restore(self, state: Mapping[str, torch.Tensor], step: int) -> None:
        """Go on from what `state` gave; the tensors have been loaded."""
        flight, self._flight = self._flight, None
        if flight is not None:  # what it brings is of no use any more
            pending = flight[0].land().pending
            if pending is not None:
                pending.wait(self._control.watch())
        self.count = int(state["num_syncs"])
        self._pending, self._report = None, restored(state)
        self._loaded = state
        if self._begun:
            self._start(step)

    def _drop(self, flight: Flight[Outcome]) -> None:
        if not flight.ended(JOIN_SECONDS):
            self._worker = Worker()  # the old one may never end
        elif not flight.has_failed and (pending := flight.land().pending) is not None:
            pending.abandon()

    def release(self) -> None:
        """Hold no tensor and no buffer until the next averaging."""
        self._begun = False
        self._worker.stop()
        self._averager.groups.use_given(clean=True)
        self._averager.release()
        self._selection.release()

    def _look(self, items: Sequence[Item]) -> None:
        """Notice what has changed in place without step()."""
        parameters, buffers = version(items)
        if parameters != self._version[0]:
            self._trained = self._everything
        if buffers != self._version[1]:
            self._changed = self._everything
        self._version = parameters, buffers

    def _note_version(self, items: Sequence[Item]) -> None:
        """All there is is known, and nothing of it is new."""
        self._version = version(items)
        self._trained = self._changed = 0

    def _replace_by_mean(self, items: Sequence[Item], outcome: Outcome, place: Place) -> None:
        anchors = self._averager.anchors if self._begun else None
        if outcome.mode is Mode.VALUES and anchors is not None and outcome.active[self._control.replica]:
            self._averager.pour_residual(sum(outcome.active))
        self._pending = self._average(items, outcome, place)
        self._landed(items, outcome, place)

    def _average(
        self,
        items: Sequence[Item],
        outcome: Outcome,
        place: Place,
        taken: Binding | None = None,
        check: Callable[[], None] | None = None,
    ) -> PendingReport:
        """check: called while waiting, too."""
        watch = self._control.watch()

        def both() -> None:
            if check is not None:
                check()
            watch()

        since = min(at for fragment, at in enumerate(self._equal_at) if outcome.parts >> fragment & 1)
        with self._control.blaming():
            return self._averager.average(
                items, step=place.step, round=self.count + 1, interval=place.interval, local_steps=place.step - since,
                mode=outcome.mode, parts=outcome.parts, taken=taken, active=outcome.active, watch=both, timeout=self._control.timeout,
            )  # fmt: skip

    def _landed(self, items: Sequence[Item], outcome: Outcome, place: Place) -> None:
        """The tensors hold the average."""
        anchors = self._averager.anchors if self._begun else None
        if outcome.common is not Call.AVERAGED:
            for fragment in range(len(self._equal_at)):
                if outcome.parts >> fragment & 1:
                    self._equal_at[fragment] = place.step
            lossy = self._begun and any(standing.anchors > 1 for standing in outcome.standings)
            self.is_unsent = outcome.mode is Mode.WIRE and lossy
            if outcome.mode is Mode.VALUES and anchors is not None:
                self._averager.agree()
        self.count += 1
        trained, changed = self._trained, self._changed
        self._note_version(items)
        if outcome.pending is not None:  # training went on meanwhile
            self._trained, self._changed = trained, changed
        else:
            self._trained, self._changed = trained & ~outcome.parts, changed & ~outcome.parts
        if self._nonfinite != "ignore" and self._pending is not None:
            with self._control.blaming():
                check_average(items, self._pending, outcome.standings, place.step, self._control.watch())
