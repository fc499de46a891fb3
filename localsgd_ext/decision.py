"""What all ranks make of a handshake, each by itself and all alike: whose weights count, and how they are averaged."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NamedTuple

from .collectives import Watch
from .errors import NonFiniteError
from .items import Item, first_nonfinite
from .report import PendingReport
from .standing import Call, News, Standing
from .wire import Mode

NONFINITE = ("raise", "exclude", "ignore")


class Outcome(NamedTuple):
    """Where the ranks stood; what those that still train are doing, if any are; the replicas whose weights count; how to
    average which fragments (as bits); and the report of that, once it is done in the background."""

    standings: list[Standing]
    common: Call
    active: list[bool]
    mode: Mode
    parts: int
    warning: str = ""  # for the user
    pending: PendingReport | None = None

    @property
    def deferred(self) -> bool:
        """Whether ranks that went on training have to meet again: what was taken is not what will be averaged."""
        return any(self.active) and self.mode is not Mode.WIRE and any(standing.taken for standing in self.standings)


def decide(
    standings: list[Standing],
    items: Sequence[Item],
    ranks: Sequence[int],
    nonfinite: str,
    rounded: bool,
    overlaps: bool,
    everything: int,
) -> Outcome:
    """items: by whose names errors are told; ranks: likewise. nonfinite: see `LocalSGD`. rounded: whether the last averaging
    left something unsent. overlaps: whether step() averages shadows. everything: all fragments. Raises NonFiniteError."""
    common = min(standing.call for standing in standings)
    parts = next(standing.parts for standing in standings if standing.call is common)
    mode = _mode(standings, common, parts, overlaps, everything)
    if mode is not Mode.WIRE:
        parts = everything
    active, warning = _active(standings, common, parts, rounded), ""
    bad = {rank: s.bad for rank, s in enumerate(standings) if active[s.replica] and s.bad >= 0}
    if bad:
        active, warning = _healthy(standings, active, bad, items, ranks, nonfinite)
    return Outcome(standings, common, active, mode, parts, warning)


def _active(standings: Sequence[Standing], common: Call, parts: int, rounded: bool) -> list[bool]:
    """The replicas with something new.

    One that only ran its model forward has nothing to add to weights that others trained.
    """
    most = max(standing.news(parts) for standing in standings)
    if most is not News.NOTHING:
        return _replicas(standings, [standing.news(parts) is most for standing in standings])
    # Asked for, though nothing was seen to change; or the last averaging left something unsent.
    asked = common in (Call.SYNCHRONIZE, Call.AVERAGED) or (common in (Call.SETTLE, Call.EXIT) and rounded)
    return _replicas(standings, [asked and standing.call is common for standing in standings])


def _replicas(standings: Sequence[Standing], ranks: Sequence[bool]) -> list[bool]:
    """Of which one of these ranks is a part."""
    there = {standing.replica for standing, is_one in zip(standings, ranks, strict=True) if is_one}
    return [replica in there for replica in range(1 + max(standing.replica for standing in standings))]


def _healthy(
    standings: Sequence[Standing],
    active: list[bool],
    bad: dict[int, int],
    items: Sequence[Item],
    ranks: Sequence[int],
    nonfinite: str,
) -> tuple[list[bool], str]:
    found = ", ".join(f"rank {ranks[rank]} (first in {items[index].name!r})" for rank, index in bad.items())
    step = max(standing.step for standing in standings)
    ill = _replicas(standings, [standing.bad >= 0 for standing in standings])
    if not any(each and not is_ill for each, is_ill in zip(active, ill, strict=True)):
        active = [not each for each in ill]  # then the last average, which ranks without news still hold
    if nonfinite == "raise" or not any(active):
        raise NonFiniteError(
            f"NaN or inf in the parameters of {found} at step {step}; nothing was averaged. Lower the learning rate or clip gradients; "
            "nonfinite='exclude' goes on with the healthy ranks, nonfinite='ignore' with everything"
        )
    warning = f"NaN or inf in the parameters of {found} at step {step}: left out of the average, and replaced by it. An optimizer there may still hold NaN"
    return [each and not is_ill for each, is_ill in zip(active, ill, strict=True)], warning


def _mode(standings: Sequence[Standing], common: Call, parts: int, overlaps: bool, everything: int) -> Mode:
    if not all(standing.agreed for standing in standings):
        return Mode.VALUES
    whole = overlaps and parts & (parts - 1) != 0  # one fragment at a time has a shadow
    if not any(standing.anchors for standing in standings):  # those of a rank whose part of the model is empty are, too
        return Mode.VALUES if whole or (overlaps and common is not Call.STEP) else Mode.WIRE
    if common is Call.AVERAGED:
        return Mode.VALUES  # all ranks get their own weights back: for the anchor it has never been
    if all(standing.news(everything) is not News.WEIGHTS for standing in standings):
        return Mode.FLUSH
    trained = any(standing.news(parts) is News.WEIGHTS for standing in standings)
    return Mode.WIRE if common is Call.STEP and trained and not whole else Mode.EXACT


def warn(outcome: Outcome) -> None:
    """Where training goes on, whatever thread came to it."""
    if outcome.warning:
        warnings.warn(outcome.warning, stacklevel=5)


def check_average(
    items: Sequence[Item], pending: PendingReport, standings: Sequence[Standing], step: int, watch: Watch
) -> None:
    """All that went in was finite. Where that need not be so of what came out, look, and raise NonFiniteError, on all ranks of
    all replicas alike."""
    in_float16 = any(standing.float16 for standing in standings)
    if not (in_float16 or any(standing.anchors for standing in standings)) or pending.is_finite(watch):
        return
    bad = first_nonfinite(items)
    if bad < 0 and not pending.is_in_parts:
        return  # just too large to be squared
    where = f"first in {items[bad].name!r}" if bad >= 0 else "on another rank of this replica"
    if in_float16:
        why = "the sum over ranks overflowed float16"
    else:
        why = "differences, or the average, are too large for the wire or for the parameters' dtype"
    raise NonFiniteError(
        f"the average holds inf or NaN at step {step}, {where}, though all ranks' weights were finite: {why}; use a wire of more bits, such as "
        "wire='float32'"
    )
