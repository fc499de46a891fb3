"""One round from handshake to report: who meets, whose weights count, and what is done when a rank fails."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from . import agreement
from .averager import Averager
from .binding import Mode
from .control import Call, Control, News, Standing
from .errors import LocalSGDError, NonFiniteError
from .items import Item, first_nonfinite, unexpanded, version
from .layout import Rule
from .models import PARAMETER_FATES, Selection
from .report import PendingReport, SyncReport, span

NONFINITE = ("raise", "exclude", "ignore")

CHECK = "LOCALSGD_EXT_CHECK"
"""Set to 1, makes every handshake compare the anchors of all ranks, bit by bit. Slow: for debugging."""


class Place(NamedTuple):
    """Where a rank is in its schedule: counted steps, local steps of the current round, and how many of them are done."""

    step: int
    interval: int
    phase: int


class Rounds:
    """The averagings of one LocalSGD.

    nonfinite: see `LocalSGD`. options: whatever else has to be equal on all ranks, by name.
    """

    def __init__(
        self,
        selection: Selection,
        averager: Averager,
        control: Control,
        nonfinite: str,
        options: Mapping[str, object],
    ) -> None:
        self._selection = selection
        self._averager = averager
        self._control = control
        self._checks = os.environ.get(CHECK, "") not in ("", "0")
        self._rounded = False  # whether the last averaging has dropped something, which is still to be sent
        self._nonfinite = nonfinite
        self._options = options
        self._pending: PendingReport | None = None
        self._report: SyncReport | None = None
        self._version = (-1, -1)  # of the tensors right after the last averaging
        self._loaded: Mapping[str, torch.Tensor] | None = None  # of a checkpoint, until the tensors are bound
        self._begun = False  # whether the ranks have begun a block together, and not left it
        self._equal_at = 0  # counted steps when the ranks last held the same weights
        self.count = 0  # averagings done
        self.stepped = False  # whether this rank has trained since the last one

    @property
    def report(self) -> SyncReport | None:
        """The report of the last averaging. Reading it may wait for the ranks' drift, and for the device."""
        self.settle()
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._report = pending.result()
        return self._report

    def settle(self) -> None:
        """Wait for the drift of the last averaging, which travels while training goes on; read no value from the device."""
        if self._pending is not None:
            with self._blaming():
                self._pending.wait(self._control.watch())

    def begin(self, place: Place) -> None:
        """Make sure that all ranks hold the same tensors, options and weights; where the weights differ, take rank 0's."""
        self.agree(place, equal=True)
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
        self.stepped = self._rounded = False
        self._equal_at = step
        self._version = version(items)

    def rebase(self, place: Place) -> None:
        """The ranks have trained in step, without averagings: where they are now, their next differences begin."""
        self._equal_at = place.step
        if self._averager.anchors is not None:
            self.begin(place)

    def agree(self, place: Place, equal: bool = False) -> None:
        """Make sure that all ranks hold the same tensors and options. equal: see `begin`."""
        options = {
            **self._options,
            CHECK: self._checks,
            "local_sgd_steps": place.interval,
            "steps into the round": place.phase,
        }
        described = self._selection.described()
        parameters = [tensor for _, fate, tensor in described if fate in PARAMETER_FATES]
        lines = agreement.describe(options, described)
        differing = self._control.enter(lines, agreement.checksums(parameters) if equal else [], place.step)
        if not differing:
            return
        ranks = self._control.global_ranks
        warnings.warn(
            f"the weights of {agreement.name_ranks([ranks[each] for each in differing])} differ from rank {ranks[0]}'s; all ranks start from "
            f"rank {ranks[0]}'s (a model without DDP has to be seeded alike, or loaded, on every rank)",
            stacklevel=5,
        )
        with self._blaming():
            self._averager.average(
                [Item(name, tensor, Rule.FOLLOW, is_parameter=False) for name, _, tensor in described],
                step=0, round=0, interval=0, mode=Mode.VALUES, watch=self._control.watch(), timeout=self._control.timeout,
            ).result(self._control.watch())  # fmt: skip

    def average(self, call: Call, place: Place, following: int = 0) -> list[Standing]:
        """Meet the other ranks, and average if one of them has something new; gives where they stood.

        following: local steps of the next round, as far as this rank is concerned.
        """
        self.settle()
        items = self._selection.items()
        bad = -1 if self._nonfinite == "ignore" else first_nonfinite(items)
        # Outside a block nothing is agreed on that differences could be taken to.
        layout = self._averager.bind(items, Mode.WIRE if self._begun else Mode.VALUES).layout
        anchors = self._averager.anchors
        agreed = self._begun and (anchors is None or anchors.agreed)
        anchor = anchors.fingerprint() if self._checks and anchors is not None and agreed else 0
        own = Standing(call, self._news(), bad, *place, layout, agreed, anchor, following)
        with span("handshake"):
            standings = self._control.meet(own, lambda: agreement.describe({}, self._selection.described()))
        common = min(standing.call for standing in standings)  # what those that still train are doing, if any are
        active = self._active(standings, common, items, place.step)
        if any(active):
            self._control.check_all_here()
            # A rank that serves others in averaged() puts its own weights back as they do.
            lent = common is Call.AVERAGED and call is Call.EXIT
            with self.own_weights_after() if lent else contextlib.nullcontext():
                self._replace_by_mean(items, active, place, common, self._mode(standings, common))
        return standings

    def serve(self, place: Place) -> Place:
        """This rank has no more batches: take part in the others' averagings until all are done, and in the closing one.

        Gives the place of the rank that has counted most steps, for all to go on from together.
        """
        standings = self.average(Call.EXIT, place)
        while any(standing.call is not Call.EXIT for standing in standings):
            standings = self.average(Call.EXIT, place)
        self.settle()
        furthest = max(standings, key=lambda standing: standing.step)
        return Place(furthest.step, furthest.interval, furthest.phase)

    @contextlib.contextmanager
    def own_weights_after(self) -> Iterator[None]:
        """Whatever the block does to the weights, this rank's own are there again after it, bit for bit."""
        items = self._selection.items()
        news = self._news()
        tensors = [unexpanded(item.tensor.detach()) for item in items]
        own = [tensor.clone() for tensor in tensors]
        try:
            yield
        finally:
            with torch.inference_mode(False), torch.no_grad():
                for tensor, copy in zip(tensors, own, strict=True):
                    tensor.copy_(copy)
            self.stepped = news is News.WEIGHTS
            parameters, buffers = version(items)
            self._version = parameters, buffers if news is News.NOTHING else -1

    def fail(self, error: BaseException) -> None:
        """This rank gives up: tell the others, start nothing more, and wait for nothing."""
        if self._pending is not None:
            self._pending.abandon()
            self._pending = None
        self._control.fail(error)

    def state(self) -> dict[str, torch.Tensor]:
        """What goes on from here, by name, the same on every rank. Raises LocalSGDError where that is not all there is."""
        if self._begun and (self._rounded or self._news() is not News.NOTHING):
            raise LocalSGDError("this rank has trained since the last averaging; call synchronize() on all ranks before saving")
        state = {"num_syncs": torch.tensor(self.count)}
        if (report := self.report) is not None:
            numbers = report.numbers()
            wide = {key: torch.float64 if isinstance(value, float) else torch.int64 for key, value in numbers.items()}
            state |= {f"report.{key}": torch.tensor(value, dtype=wide[key]) for key, value in numbers.items()}
        anchors = self._averager.anchors
        return state if anchors is None else state | anchors.state()

    def restore(self, state: Mapping[str, torch.Tensor], step: int) -> None:
        """Go on from what `state` gave; the tensors have been loaded."""
        self.count = int(state["num_syncs"])
        saved: dict[str, Any] = {k.removeprefix("report."): v.item() for k, v in state.items() if k.startswith("report.")}
        self._pending, self._report = None, SyncReport(**{"device_seconds": None, "backend": ""} | saved) if saved else None
        self._loaded = state
        if self._begun:
            self._start(step)

    def release(self) -> None:
        """Hold no tensor and no buffer until the next averaging."""
        self._begun = False
        self._averager.release()
        self._selection.release()

    def _news(self) -> News:
        """What changed on this rank since the last averaging, by step() or in place without it."""
        if self.stepped:
            return News.WEIGHTS
        parameters, buffers = version(self._selection.items())
        if parameters != self._version[0]:
            return News.WEIGHTS
        return News.BUFFERS if buffers != self._version[1] else News.NOTHING

    def _active(self, standings: Sequence[Standing], common: Call, items: Sequence[Item], step: int) -> list[bool]:
        """Whose weights count: of the ranks with something new, the healthy ones.

        A rank that only ran its model forward has nothing to add to weights that others trained.
        """
        most = max(standing.news for standing in standings)
        news = [standing.news is most is not News.NOTHING for standing in standings]
        if not any(news) and (common in (Call.SYNCHRONIZE, Call.AVERAGED) or (common is Call.EXIT and self._rounded)):
            # Asked for, though nothing was seen to change; or the last averaging left something unsent.
            news = [standing.call is common for standing in standings]
        bad = {rank: s.bad for rank, s in enumerate(standings) if news[rank] and s.bad >= 0}
        if not bad:
            return news
        ranks = self._control.global_ranks
        found = ", ".join(f"rank {ranks[rank]} (first in {items[index].name!r})" for rank, index in bad.items())
        if len(bad) == sum(news):  # then the last average, which ranks without news still hold
            news = [standing.bad < 0 for standing in standings]
        if self._nonfinite == "raise" or not any(news):
            raise NonFiniteError(
                f"NaN or inf in the parameters of {found} at step {step}; nothing was averaged. Lower the learning rate or clip gradients; "
                "nonfinite='exclude' goes on with the healthy ranks, nonfinite='ignore' with everything"
            )
        warnings.warn(
            f"NaN or inf in the parameters of {found} at step {step}: left out of the average, and replaced by it. An optimizer there may "
            "still hold NaN",
            stacklevel=5,
        )
        return [each and rank not in bad for rank, each in enumerate(news)]

    def _mode(self, standings: Sequence[Standing], common: Call) -> Mode:
        """How to average, which all ranks come to alike: from what they said, and from what they have in common."""
        if not all(standing.agreed for standing in standings):
            return Mode.VALUES
        if self._averager.anchors is None:
            return Mode.WIRE
        if common is Call.AVERAGED:
            return Mode.VALUES  # all ranks get their own weights back: for the anchor it has never been
        if all(standing.news is not News.WEIGHTS for standing in standings):
            return Mode.FLUSH
        return Mode.WIRE if common is Call.STEP else Mode.EXACT

    def _replace_by_mean(self, items: Sequence[Item], active: Sequence[bool], place: Place, common: Call, mode: Mode) -> None:
        anchors = self._averager.anchors if self._begun else None
        if mode is Mode.VALUES and anchors is not None and active[self._control.rank]:
            self._averager.pour_residual(sum(active))
        with self._blaming():
            self._pending = self._averager.average(
                items, step=place.step, round=self.count + 1, interval=place.interval, local_steps=place.step - self._equal_at,
                mode=mode, active=active, watch=self._control.watch(), timeout=self._control.timeout,
            )  # fmt: skip
        if common is not Call.AVERAGED:
            self._equal_at = place.step
            self._rounded = mode is Mode.WIRE and anchors is not None and anchors.is_lossy
            if mode is Mode.VALUES and anchors is not None:
                self._averager.agree()
        self.count += 1
        self.stepped = False
        self._version = version(items)
        self._check_finite(items, place.step)

    def _check_finite(self, items: Sequence[Item], step: int) -> None:
        """All that went in was finite. Where that need not be so of what comes out, look."""
        assert self._pending is not None
        suspect = self._averager.sums_in_float16 or self._averager.anchors is not None
        if self._nonfinite == "ignore" or not suspect or self._pending.mean_sq.isfinite():
            return
        if (bad := first_nonfinite(items)) >= 0:  # and not just too large to be squared
            if self._averager.sums_in_float16:
                why = "the sum over ranks overflowed float16"
            else:
                why = "differences, or the average, are too large for the wire or for the parameters' dtype"
            raise NonFiniteError(
                f"the average holds inf or NaN at step {step}, first in {items[bad].name!r}, though all ranks' weights were finite: {why}; "
                "use a wire of more bits, such as wire='float32'"
            )

    @contextlib.contextmanager
    def _blaming(self) -> Iterator[None]:
        """Around collectives: an error that another rank is to blame for becomes one that names it."""
        try:
            yield
        except (LocalSGDError, torch.OutOfMemoryError):
            raise
        except (RuntimeError, OSError) as error:  # what collectives raise; anything else is this rank's own
            cause = self._control.explain(error)
            if cause is error:
                raise
            raise cause from error
