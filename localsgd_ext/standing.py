"""What one rank says of itself in a handshake."""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple


class Call(enum.IntEnum):
    """What brings a rank to a handshake."""

    ENTER = 0
    STEP = 1
    SYNCHRONIZE = 2
    AVERAGED = 3
    SETTLE = 4  # an averaging of what was not averaged yet
    EXIT = 5  # it has no more batches, and serves the others until all are done

    @property
    def spoken(self) -> str:
        ends = {Call.ENTER: "the entry of the `with` block", Call.EXIT: "the end of the `with` block"}
        return ends.get(self, f"{self.name.lower()}()")


class News(enum.IntEnum):
    """What has changed on a rank since the last averaging."""

    NOTHING = 0
    BUFFERS = 1
    WEIGHTS = 2


class Place(NamedTuple):
    """Where a rank is in its schedule: counted steps, local steps of the current round, and how many of them are done."""

    step: int
    interval: int
    phase: int


class Standing(NamedTuple):
    """What one rank says of itself in a handshake.

    trained, changed: the fragments, as bits, whose weights and whose buffers have changed since their last averaging. bad:
    number of the first parameter that holds NaN or inf, else -1. step: counted steps. interval: local steps of its current
    round. phase: how many of them are behind it. parts: the fragments that are to be averaged. replica: the one that the rank
    belongs to, a number. anchors: 2 where differences to anchors travel and rounding drops some of them, 1 where it drops
    nothing, else 0. float16: whether sums are taken in it, in which they may overflow. layout: see `Binding`. agreed: whether
    differences to what the ranks last agreed on can be sent. anchor: fingerprint of its anchors, where these are to be checked.
    following: local steps that its schedule gives the next round. taken: whether what is to be averaged was taken, and training
    goes on meanwhile.
    """

    call: Call
    trained: int
    changed: int
    bad: int
    step: int
    interval: int
    phase: int
    parts: int = 0
    layout: int = 0
    agreed: int = 1
    anchor: int = 0
    following: int = 0
    taken: int = 0
    replica: int = 0
    anchors: int = 0
    float16: int = 0

    def news(self, parts: int) -> News:
        """Of these fragments."""
        return News.WEIGHTS if self.trained & parts else News.BUFFERS if self.changed & parts else News.NOTHING

    def pack(self) -> bytes:
        return _STANDING.pack(*self)

    @classmethod
    def unpack(cls, payload: bytes) -> Standing:
        call, *rest = _STANDING.unpack_from(payload)
        return cls(_CALLS[call], *rest)


_STANDING = struct.Struct("<16q")
_CALLS = tuple(Call)

MAX_FRAGMENTS = 62
"""As many bits are safe in those numbers."""
