"""Small messages between all ranks of a group, on connections of their own, so that nothing else can come between and they can
be cut.

Every rank sends its message to every other: whoever does not arrive is known by number, not only that someone is missing.
Receives are posted ahead of time, for ordinary messages and apart from them for urgent ones. So a handshake costs one message
each way, and the announcement of a failure reaches a peer's memory at any time, whatever the peer is doing.
"""

from __future__ import annotations

import contextlib
import math
import struct
import time
from collections.abc import Collection
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

_HEAD = struct.Struct("<qq")  # number of the exchange, length of the payload
_SIZE = 512
CAPACITY = _SIZE - _HEAD.size
"""Bytes that fit into one message."""
_ORDINARY, _URGENT, _LONG = 0, 1, 2  # tags
_ANNOUNCEMENTS = 2  # that a rank makes at most: that something is wrong, then what it is
_FLUSH_SECONDS = 0.5
PROMPT_SECONDS = 1.5
"""A rank that waits in an averaging answers a roll call well within this."""


class Broken(Exception):
    """The connection to this rank is gone: its process ended, was killed, or gave up."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.rank = rank


class Silent(Exception):
    """These ranks did not arrive in time."""

    def __init__(self, ranks: Collection[int]) -> None:
        super().__init__(ranks)
        self.ranks = tuple(ranks)


class Urgent(Exception):
    """This rank announced something."""

    def __init__(self, rank: int, payload: bytes) -> None:
        super().__init__(rank)
        self.rank = rank
        self.payload = payload


class _Message:
    """Room for one message, as memory that Gloo reads and writes."""

    def __init__(self) -> None:
        self._bytes = bytearray(_SIZE)
        self.tensors = [torch.frombuffer(self._bytes, dtype=torch.uint8)]

    def write(self, number: int, payload: bytes) -> None:
        _HEAD.pack_into(self._bytes, 0, number, len(payload))
        self._bytes[_HEAD.size : _HEAD.size + len(payload)] = payload

    @property
    def number(self) -> int:
        return int(_HEAD.unpack_from(self._bytes)[0])

    @property
    def payload(self) -> bytes:
        _, length = _HEAD.unpack_from(self._bytes)
        return bytes(self._bytes[_HEAD.size : _HEAD.size + length])


class RollCall(NamedTuple):
    """What each rank has announced; whose connection is gone; who stayed silent; and the first that was seen to answer late."""

    announced: dict[int, list[bytes]]
    gone: list[int]
    silent: list[int]
    late: list[int]


class Mesh:
    """Connects the ranks of a group. Raises Silent with those that did not come within `timeout`.

    store: where they meet, under a prefix that no other mesh uses.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        self.rank, self.size = rank, size
        # Starting after itself, so that not everyone talks to rank 0 at once.
        self.others = [(rank + hop) % size for hop in range(1, size)]
        self._sent = 0
        await_all(store, rank, self.others, timeout)
        self._group: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._outgoing = _Message()
        self._rows = {other: _Message() for other in self.others}
        self._urgent_rows = {other: [_Message() for _ in range(_ANNOUNCEMENTS)] for other in self.others}
        self._receives: dict[int, dist.Work] = {}
        self._urgent_receives: dict[int, list[dist.Work]] = {}
        self._sends: list[dist.Work] = []
        for other in self.others:
            self._post(other)
            self._urgent_receives[other] = [self._receive(row, other, _URGENT) for row in self._urgent_rows[other]]

    @property
    def gone(self) -> list[int]:
        """Ranks known to have left since the last exchange."""
        return [other for other in self.others if other not in self._receives]

    def exchange(self, payload: bytes, timeout: timedelta) -> list[bytes]:
        """Send `payload` to everyone and give everyone's, in rank order. Raises Broken, Silent or Urgent."""
        deadline = time.monotonic() + timeout.total_seconds()
        self._sent += 1
        self._send(self._sent, payload, self._outgoing, _ORDINARY)
        for other in self.others:
            self._wait(other, deadline)
            if self._rows[other].number != self._sent:
                self.peek()
                raise Broken(other)
        payloads = [payload if rank == self.rank else self._rows[rank].payload for rank in range(self.size)]
        for other in self.others:
            self._post(other)
        for work in self._sends:
            with contextlib.suppress(RuntimeError):  # a rank that has gone since is the business of the next exchange
                work.wait(_left(deadline))
        self._sends.clear()
        return payloads

    def exchange_long(self, payload: bytes, timeout: timedelta) -> list[bytes]:
        """As `exchange`, for payloads of any length; costs a second round of messages."""
        lengths = [int.from_bytes(length, "little") for length in self.exchange(len(payload).to_bytes(8, "little"), timeout)]
        tensors = [torch.empty(length, dtype=torch.uint8) for length in lengths]
        tensors[self.rank] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        receives = {other: self._group.recv([tensors[other]], other, _LONG) for other in self.others}
        sends = [self._group.send([tensors[self.rank]], other, _LONG) for other in self.others]
        deadline = time.monotonic() + timeout.total_seconds()
        try:
            for other in self.others:
                receives[other].wait(_left(deadline))
        except RuntimeError:
            self.peek()
            raise (Silent([other]) if time.monotonic() >= deadline else Broken(other)) from None
        for work in sends:
            with contextlib.suppress(RuntimeError):
                work.wait(_left(deadline))
        return [tensor.numpy().tobytes() for tensor in tensors]

    def announce(self, payload: bytes) -> None:
        """Send an urgent message to everyone who can still be reached, without waiting for anyone to look at it."""
        self._send(1, payload, _Message(), _URGENT)
        # Wakes those that wait for an ordinary one. Cutting the connections would not, where a forked process (a data loader's)
        # still holds them open.
        self._send(0, b"", _Message(), _ORDINARY)
        deadline = time.monotonic() + _FLUSH_SECONDS
        for work in self._sends:
            with contextlib.suppress(RuntimeError):
                work.wait(_left(deadline))
        self._sends.clear()

    def peek(self) -> None:
        """Raise Urgent if a rank has announced something. Reads memory, waits for nothing."""
        for other in self.others:
            if payloads := self._announced(other):
                raise Urgent(other, payloads[-1]) from None

    def roll_call(self, timeout: timedelta) -> RollCall:
        """Ask who is there, and wait at most `timeout` for the answers. Nothing can be exchanged after it.

        A rank that goes on with ordinary messages counts as there.
        """
        begun = time.monotonic()
        deadline = begun + timeout.total_seconds()
        announced: dict[int, list[bytes]] = {}
        gone: list[int] = []
        silent: list[int] = []
        late: list[int] = []
        for other in self.others:
            timed_out = False
            try:
                self._urgent_receives[other][0].wait(_left(deadline))
            except RuntimeError as error:
                # The first that times out closes all other connections, too, for that reason.
                timed_out = "timeout" in str(error).lower() or "timed out" in str(error).lower()
            if payloads := self._announced(other):
                announced[other] = payloads
                if not late and time.monotonic() > begun + PROMPT_SECONDS:
                    late.append(other)  # those after it may have answered long before
            elif self._rows[other].number <= self._sent:  # nothing came since the last exchange
                (silent if timed_out else gone).append(other)
        return RollCall(announced, gone, silent, late)

    def close(self) -> None:
        """Cut the connections: whoever waits for this rank is woken by that."""
        self._receives, self._urgent_receives, self._sends, self._group = {}, {}, [], None

    def _post(self, other: int) -> None:
        try:
            self._receives[other] = self._receive(self._rows[other], other, _ORDINARY)
        except RuntimeError:
            self._receives.pop(other, None)  # gone since it sent its message, which may have been its last

    def _receive(self, row: _Message, other: int, tag: int) -> dist.Work:
        work: dist.Work = self._group.recv(row.tensors, other, tag)
        return work

    def _send(self, number: int, payload: bytes, message: _Message, tag: int) -> None:
        message.write(number, payload)
        for other in self.others:
            # A connection that is broken shows where it is read from; the others still get their message.
            with contextlib.suppress(RuntimeError):
                self._sends.append(self._group.send(message.tensors, other, tag))

    def _announced(self, other: int) -> list[bytes]:
        return [row.payload for row in self._urgent_rows[other] if row.number]

    def _wait(self, other: int, deadline: float) -> None:
        try:
            if other not in self._receives:
                raise RuntimeError
            self._receives[other].wait(_left(deadline))
        except RuntimeError:
            # What was announced tells more than a connection that is gone.
            self.peek()
            if time.monotonic() < deadline:
                raise Broken(other) from None
            raise Silent([each for each in self.others if self._rows[each].number < self._sent]) from None


def _left(deadline: float) -> timedelta:
    # Gloo counts whole milliseconds. One more, so that what times out does so after the deadline: before it, it is an error.
    return timedelta(milliseconds=max(0, math.ceil(1000 * (deadline - time.monotonic()))) + 1)


def await_all(store: Store, rank: int, others: Collection[int], timeout: timedelta, word: str = "here") -> list[str]:
    """Sign in with a word, wait for the others, and give theirs. Signs out again on giving up.

    Building connections would wait for everyone without saying for whom.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    store.delete_key(f"left/{rank}")
    store.set(f"here/{rank}", word)
    missing: list[int] = []
    try:
        for other in others:
            store.wait([f"here/{other}"], _left(deadline))
    except RuntimeError:
        missing = [other for other in others if not store.check([f"here/{other}"])]
    while not missing:
        left = [other for other in others if store.check([f"left/{other}"])]  # they may be on their way back
        if not left:
            return [store.get(f"here/{other}").decode() for other in others]
        if time.monotonic() > deadline:
            missing = left
        time.sleep(0.05)
    store.set(f"left/{rank}", "1")
    raise Silent(missing)
