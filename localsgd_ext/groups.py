"""The process groups that one averaging uses."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from .errors import LocalSGDError

_Ranks = tuple[int, ...]
_Made = dict[_Ranks, list[dist.ProcessGroup]]

_shared: weakref.WeakKeyDictionary[dist.ProcessGroup, _Made] = weakref.WeakKeyDictionary()
"""By the group that averages, and by their ranks: groups of all ranks of all replicas."""

_idle: weakref.WeakKeyDictionary[dist.ProcessGroup, _Made] = weakref.WeakKeyDictionary()
"""Likewise: groups of their own that nobody uses now. torch keeps them to the end anyway."""


class Groups:
    """given: the ranks that average with each other. `averaging` is that, or one of the same ranks; `everyone` all ranks of all
    replicas, which may be more, for sums over the whole model."""

    def __init__(self, given: dist.ProcessGroup) -> None:
        self._given = self.averaging = self.everyone = given
        self._ranks: _Ranks = ()
        self._own: list[tuple[_Ranks, dist.ProcessGroup]] = []
        # A wait with a time limit leaves the collective alone on Gloo; others may block for it, or give the collective up.
        self.can_watch = _is_gloo(given)

    def note(self, ranks: Sequence[int]) -> None:
        """These are all ranks of all replicas."""
        self._ranks = tuple(sorted(ranks))

    def shared(self) -> str:
        """Name of the group that `include` will use, where it is another than the given one: all ranks have to come to the
        same."""
        if len(self._ranks) == self._given.size():
            return ""
        made = _shared.get(self._given, {}).get(self._ranks)
        return made[0].group_name if made else "a new one"

    def include(self, timeout: timedelta) -> None:
        """Have a group of all of them. To be called by all of them.

        Not the world: if an averaging is interrupted, sums that only some ranks have begun stay in its group, and nobody can
        have another world.
        """
        if self._own:
            return
        if len(self._ranks) == self._given.size():
            self.everyone = self._given
            return
        made = _shared.setdefault(self._given, {}).setdefault(self._ranks, [])
        if not made:
            made.append(self._new(self._ranks, timeout))
        self.everyone = made[0]

    def own(self) -> tuple[str, str]:
        """Names of the groups that `use_own` will use, for averaging and for everyone: their ranks have to come to the same."""
        more = len(self._ranks) > self._given.size()
        return self._idle_one(self._averaging_ranks()), self._idle_one(self._ranks) if more else ""

    def _idle_one(self, ranks: _Ranks) -> str:
        pool = _idle.get(self._given, {}).get(ranks)
        return pool[-1].group_name if pool else "a new one"

    def use_own(self, timeout: timedelta) -> None:
        """From now on use groups of the same ranks and backends that nobody else uses, since averagings in the background would
        come between others' collectives. To be called by all ranks, after `note`."""
        if self._own:
            return
        self.averaging = self._take(self._averaging_ranks(), timeout)
        more = len(self._ranks) > self._given.size()
        self.everyone = self._take(self._ranks, timeout) if more else self.averaging
        self.can_watch = _is_gloo(self.averaging)

    def use_given(self, clean: bool) -> None:
        """clean: the others can be used again. Else they may hold collectives that never end."""
        for ranks, group in self._own if clean else ():
            _idle.setdefault(self._given, {}).setdefault(ranks, []).append(group)
        self._own = []
        self.averaging = self.everyone = self._given

    def _take(self, ranks: _Ranks, timeout: timedelta) -> dist.ProcessGroup:
        pool = _idle.get(self._given, {}).get(ranks)
        self._own.append((ranks, pool.pop() if pool else self._new(ranks, timeout)))
        return self._own[-1][1]

    def _new(self, ranks: _Ranks, timeout: timedelta) -> dist.ProcessGroup:
        backend = dist.get_backend_config(self._given)
        return dist.new_group(list(ranks), timeout, backend, use_local_synchronization=True)

    def _averaging_ranks(self) -> _Ranks:
        try:
            return tuple(dist.get_process_group_ranks(self._given))
        except (KeyError, RuntimeError, ValueError):
            raise LocalSGDError(
                "overlap_steps needs a process group of its own, and torch.distributed does not know the one it is given"
            ) from None


def _is_gloo(group: dist.ProcessGroup) -> bool:
    try:
        return group._get_backend(torch.device("cpu")).name() == "gloo"
    except (RuntimeError, AttributeError):  # no backend for CPUs, or a group of the user's own making
        return False
