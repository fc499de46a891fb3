"""What ranks tell each other beside the weights: that they agree, where they stand, and when they fail."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from . import agreement
from .collectives import Watch
from .errors import LayoutMismatchError, LocalSGDError, PeerError, PeerTimeoutError
from .mesh import CAPACITY, PROMPT_SECONDS, Broken, Mesh, Silent, Urgent, await_all
from .standing import Call, Standing

ROLL_CALL = timedelta(seconds=5)
"""How long a rank whose averaging broke waits for the others to say that they are alive. Those that wait look for
it every POLL_SECONDS."""


class Control:
    """The control plane of one LocalSGD. Any error it raises is raised on every rank that is still there.

    It is between all ranks of all replicas: what the ranks of one replica do together would hang if some of them failed or
    averaged alone.

    group: the ranks that average with each other, one of each replica. inside: the ranks of this rank's replica. timeout: how
    long to wait for others; None for the group's own.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta | None, inside: Sequence[int] = ()) -> None:
        if not dist.is_gloo_available():
            raise LocalSGDError("this torch was built without Gloo, which ranks need to tell each other where they stand")
        self.timeout = min(timeout or _timeout_of(group), timedelta(days=365))
        self._group, self._inside = group, inside
        try:
            self._column = dist.get_process_group_ranks(group)
        except (KeyError, RuntimeError, ValueError):  # a group that torch.distributed does not know
            self._column = list(range(group.size()))
        self.replica = group.rank()
        self.rank, self.size = group.rank(), group.size()
        self.global_ranks = self._column  # by which errors name the ranks; of all replicas, once `open` was called
        self._columns: list[list[int]] = [list(range(self.size))]  # ranks that hold the same part
        self._mesh: Mesh | None = None
        self._last: list[Standing] = []  # where each rank stood in the last handshake

    def open(self) -> None:
        """Connect to all ranks, unless that is done; waits for them."""
        if self._mesh is None:
            if len(self._inside) > 1:
                self.global_ranks = self._everyone()
                me = self._column[self.replica]
                self.rank, self.size = self.global_ranks.index(me), len(self.global_ranks)
            self._mesh = self._connect()

    def enter(self, options: Sequence[str], tensors: Sequence[str], sums: Sequence[int], step: int) -> list[int]:
        """Agree on the options, which have to be equal everywhere, and on the tensors, which have to be equal on ranks that
        hold the same part; gives the ranks whose values differ from those of the first that holds the same, empty where all are
        equal.

        options, tensors: one line for each. sums: a checksum for each tensor.
        """
        self.open()
        column = hashlib.sha256(repr(self._column).encode()).digest()
        said = column, agreement.digest(options), agreement.digest(tensors), agreement.digest(map(str, sums))
        own = Standing(Call.ENTER, 0, 0, -1, step, 0, 0, replica=self.replica)
        payloads = self._exchange(own.pack() + b"".join(said))
        standings = self._read(payloads)
        self._check_calls(standings)
        columns, others, held, values = (
            [payload[len(own.pack()) :][at : at + len(column)] for payload in payloads]
            for at in range(0, 4 * len(column), len(column))
        )
        self._columns = [[rank for rank, each in enumerate(columns) if each == one] for one in dict.fromkeys(columns)]
        if len(set(others)) > 1:
            self._raise_mismatch([*options, *tensors], [list(range(self.size))])
        if self._differing(held):
            self._raise_mismatch([*options, *tensors], self._columns)
        return self._differing(values)

    def _differing(self, said: Sequence[object]) -> list[int]:
        """The ranks that said something else than the first of those that hold the same part."""
        return sorted(rank for ranks in self._columns for rank in ranks if said[rank] != said[ranks[0]])

    def meet(self, own: Standing, describe: Callable[[], Sequence[str]] = tuple) -> list[Standing]:
        """The handshake before an averaging: where every rank stands, in rank order. Waits for all of them.

        describe: gives the lines of `enter`, for the error where layouts have come to differ since.
        """
        standings = self._read(self._exchange(own.pack()))
        self._check_calls(standings)
        if self._differing([standing.layout for standing in standings]):
            self._raise_mismatch(describe(), self._columns)
        training = [rank for rank, standing in enumerate(standings) if standing.call is Call.STEP]
        if len({standings[rank].parts for rank in training}) > 1:
            said = ", ".join(f"{self.name([rank])} at step {standings[rank].step}" for rank in training)
            raise LocalSGDError(f"the ranks average different fragments ({said}); all of them must call step() equally often")
        differing = self._differing([standing.anchor for standing in standings])
        if differing and all(standing.agreed for standing in standings):
            raise LocalSGDError(
                f"the anchors of {self.name(differing)} differ from {self.first(differing)}'s at step {own.step}: what one of them received or "
                "computed is not what the others did; go on from the last checkpoint, and report this"
            )
        return standings

    def check_all_here(self) -> None:
        """Raise PeerError if a rank left right after the handshake: before an averaging that would wait for it."""
        if self._mesh is not None and self._mesh.gone:
            try:
                self._mesh.peek()  # what was announced tells more
            except Urgent as urgent:
                self._raise_announced(urgent)
            raise self._gone(self._mesh.gone)

    def watch(self) -> Watch:
        """To be called now and then while a collective is under way: raises if a peer cannot go on with it, or at the
        timeout."""
        deadline = time.monotonic() + self.timeout.total_seconds()
        mesh = self._mesh

        def check() -> None:
            if mesh is None:
                return
            if self._mesh is not mesh:
                raise LocalSGDError("this rank has given up meanwhile")
            try:
                mesh.peek()
            except Urgent as urgent:
                self._raise_announced(urgent)
            if time.monotonic() > deadline:
                waited = f"an averaging was not done after {self.timeout.total_seconds():g} s"
                raise self.explain(
                    PeerTimeoutError(f"{waited}, though all ranks answer: is `timeout` too short for this network?")
                )

        return check

    def explain(self, error: BaseException, heard: _Announcement | None = None) -> BaseException:
        """The error to raise where an averaging broke with `error`: it names the ranks that are to blame, or is `error` itself
        if all of them are there. heard: what of it another rank has announced, to be passed on as it is."""
        mesh = self._mesh
        if mesh is None:
            return error
        mesh.announce((heard or _Announcement(-1 - self.rank, _first_line(error))).pack())
        called = mesh.roll_call(ROLL_CALL)
        for rank, payloads in called.announced.items():
            last = _Announcement.unpack(payloads[-1])
            # One whose averaging broke, too, and that leaves now with its own error is no more to blame than this rank; and one
            # that blames this rank was told by it.
            if last.culprit >= 0 and last.culprit != self.rank and not (last.culprit == rank and len(payloads) > 1):
                return self._announced(last, rank)
        if called.gone:
            return self._gone(called.gone)
        # Who is silent may be busy elsewhere, where it was this rank's own error that broke the averaging.
        if (slow := called.silent or called.late) and _tells_of_a_network(error):
            broke = f"an averaging broke off on rank {self._me} ({_first_line(error)})"
            seconds = ROLL_CALL.total_seconds() if called.silent else PROMPT_SECONDS
            waited = f"did not answer within {seconds:g} s{self._last_seen(slow)}"
            message = f"{broke}, and {self.name(slow)} {waited}: stopped, or the network is down"
            return self._error(PeerTimeoutError, message, slow)
        return error

    @contextlib.contextmanager
    def blaming(self) -> Iterator[None]:
        """Around collectives: an error that another rank is to blame for becomes one that names it."""
        try:
            yield
        except (LocalSGDError, torch.OutOfMemoryError):
            raise
        except (RuntimeError, OSError) as error:  # what collectives raise; anything else is this rank's own
            cause = self.explain(error)
            if cause is error:
                raise
            raise cause from error

    def fail(self, error: BaseException) -> None:
        """Tell the peers that this rank leaves with `error`, wherever they are, and cut the connections."""
        if self._mesh is None:
            return
        self._mesh.announce(self._last_words(error).pack())
        self.close()

    def _last_words(self, error: BaseException) -> _Announcement:
        assert self._mesh is not None
        # A PeerError of another LocalSGD may name a rank that is no member here.
        if isinstance(error, PeerError) and error.ranks and error.ranks[0] in self.global_ranks:
            return _Announcement(self.global_ranks.index(error.ranks[0]), str(error))
        if not _is_of_a_collective(error):
            return _Announcement(self.rank, _first_line(error))
        # One that ranks of a replica have with each other, or of the user's own: whoever failed first may have said so.
        try:
            self._mesh.peek()
        except Urgent as urgent:
            told = _Announcement.unpack(urgent.payload)
            if told.culprit >= 0:
                return _Announcement(told.culprit, str(self._announced(told, urgent.rank)))
        return _Announcement(-1 - self.rank, _first_line(error))

    def close(self) -> None:
        """Cut the connections; the next `enter` makes new ones."""
        if self._mesh is not None:
            self._mesh.close()
            self._mesh = None

    def _connect(self) -> Mesh:
        store, number = self._store(self.global_ranks)
        try:
            return Mesh(PrefixStore(f"{number}/", store), self.rank, self.size, self.timeout)
        except Silent as silent:
            store.add("entries", -1)  # for the next try, or for those that come late
            raise self._did_not_enter(silent) from None
        except RuntimeError as error:
            raise LocalSGDError(
                f"rank {self._me} cannot connect to the others through Gloo, over which ranks tell each other where they stand; "
                f"set GLOO_SOCKET_IFNAME to the network interface that reaches them ({_first_line(error)})"
            ) from error

    def _everyone(self) -> list[int]:
        """All ranks of all replicas: each rank of the group knows those of its own."""
        store, number = self._store(self._column)
        self.global_ranks, self.rank, self.size = self._column, self.replica, len(self._column)
        others = [rank for rank in range(self.size) if rank != self.rank]
        own = ",".join(map(str, self._inside))
        try:
            said = await_all(PrefixStore(f"{number}/", store), self.rank, others, self.timeout, own)
        except Silent as silent:
            store.add("entries", -1)
            raise self._did_not_enter(silent) from None
        return sorted({int(rank) for each in [own, *said] for rank in each.split(",")})

    def _store(self, ranks: Sequence[int]) -> tuple[PrefixStore, int]:
        """Where these ranks meet, and how often they have met there. It may outlive the group and its processes: no two meshes
        may use the same keys."""
        members = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
        name = ""
        if ranks is self._column:
            with contextlib.suppress(RuntimeError, AttributeError):
                name = str(self._group.group_name)
        store = PrefixStore(f"localsgd_ext/{name}/{members}/", dist.distributed_c10d._get_default_store())
        return store, (store.add("entries", 1) - 1) // len(ranks)

    def _did_not_enter(self, silent: Silent) -> PeerError:
        return self._timed_out(
            "enter LocalSGD", silent.ranks, "; all ranks must enter it, in the same order if there are several"
        )

    def _exchange(self, payload: bytes) -> list[bytes]:
        if self._mesh is None:
            raise LocalSGDError("this LocalSGD has failed before; leave its `with` block and enter it again on all ranks")
        try:
            return self._mesh.exchange(payload, self.timeout)
        except Urgent as urgent:
            self._raise_announced(urgent)
        except Broken as broken:
            raise self._gone([broken.rank]) from None
        except Silent as silent:
            why = ": stopped, slower than `timeout` allows, or not calling step() as often as the others"
            raise self._timed_out("arrive at an averaging", silent.ranks, self._last_seen(silent.ranks) + why) from None

    def _read(self, payloads: Sequence[bytes]) -> list[Standing]:
        self._last = [Standing.unpack(payload) for payload in payloads]
        return self._last

    def _check_calls(self, standings: Sequence[Standing]) -> None:
        if len({standing.call for standing in standings}) == 1:
            return
        calls: dict[Call, list[int]] = {}
        for rank, standing in enumerate(standings):
            calls.setdefault(standing.call, []).append(rank)
        # Whoever is at the end of its block serves all others, save those that are at the entry of another.
        if len(calls.keys() - {Call.EXIT}) > 1 or Call.ENTER in calls:
            said = "; ".join(f"{self.name(ranks)} in {call.spoken}" for call, ranks in sorted(calls.items()))
            raise LocalSGDError(
                f"the ranks meet in different calls: {said}; all of them must make the same calls in the same order"
            )

    def _raise_mismatch(self, description: Sequence[str], columns: Sequence[Sequence[int]]) -> NoReturn:
        """columns: the ranks that should say the same, each with each."""
        assert self._mesh is not None
        try:
            everyones = self._mesh.exchange_long("\n".join(description).encode(), self.timeout)
        except (Urgent, Broken, Silent):
            raise LayoutMismatchError(
                "the ranks hold different tensors or options, and one of them left before it said which"
            ) from None
        said = [each.decode().split("\n") for each in everyones]
        ranks = next((each for each in columns if any(said[rank] != said[each[0]] for rank in each)), columns[0])
        raise LayoutMismatchError(
            agreement.difference([said[rank] for rank in ranks], [self.global_ranks[rank] for rank in ranks])
        )

    def first(self, ranks: Sequence[int]) -> str:
        """The ranks that these should be like."""
        return self.name([each[0] for each in self._columns if set(each) & set(ranks)])

    def _raise_announced(self, urgent: Urgent) -> NoReturn:
        announcement = _Announcement.unpack(urgent.payload)
        if announcement.culprit < 0:
            origin = -1 - announcement.culprit
            message = f"a collective broke off on {self.name([origin])}: {announcement.text}"
            raise self.explain(self._error(PeerError, message, [origin]), announcement) from None
        raise self._announced(announcement, urgent.rank) from None

    def _announced(self, announcement: _Announcement, sender: int) -> PeerError:
        """What this rank raises that was told so by `sender`."""
        culprit = announcement.culprit
        if sender == culprit:
            return self._error(PeerError, f"{self.name([culprit])} failed: {announcement.text}", [culprit])
        return self._error(PeerError, announcement.text, [culprit])  # as the sender itself raised it

    @property
    def _me(self) -> int:
        return self.global_ranks[self.rank]

    def name(self, ranks: Sequence[int]) -> str:
        return agreement.name_ranks([self.global_ranks[rank] for rank in ranks])

    def _error(self, kind: type[PeerError], message: str, ranks: Sequence[int]) -> PeerError:
        return kind(message, [self.global_ranks[rank] for rank in ranks])

    def _timed_out(self, what: str, ranks: Sequence[int], more: str) -> PeerError:
        waited = f"within {self.timeout.total_seconds():g} s of rank {self._me}"
        return self._error(PeerTimeoutError, f"{self.name(ranks)} did not {what} {waited}{more}", ranks)

    def _gone(self, ranks: Sequence[int]) -> PeerError:
        why = "the process ended, was killed, or gave up waiting"
        return self._error(PeerError, f"the connection to {self.name(ranks)} is gone{self._last_seen(ranks)}: {why}", ranks)

    def _last_seen(self, ranks: Sequence[int]) -> str:
        if not self._last:
            return ""
        return (
            " (last seen: "
            + ", ".join(f"rank {self.global_ranks[rank]} at step {self._last[rank].step}" for rank in ranks)
            + ")"
        )


@dataclass(frozen=True)
class _Announcement:
    """The rank to blame, and what happened to it; -1 - rank where it is not known yet, but only on which rank a collective
    broke off."""

    culprit: int
    text: str

    def pack(self) -> bytes:
        return self.culprit.to_bytes(8, "little", signed=True) + self.text.encode(errors="replace")[: CAPACITY - 8]

    @classmethod
    def unpack(cls, payload: bytes) -> _Announcement:
        return cls(int.from_bytes(payload[:8], "little", signed=True), payload[8:].decode(errors="ignore"))


def _is_of_a_collective(error: BaseException) -> bool:
    """Whether others may be to blame. Gloo's errors have no type of their own, but say where in its source they were found."""
    return not isinstance(error, LocalSGDError) and (isinstance(error, dist.DistError) or "gloo" in str(error))


def _tells_of_a_network(error: BaseException) -> bool:
    """Whether it may come of peers that do not answer: also in another rank's words."""
    words = ("gloo", "nccl", "timed out", "timeout", "connection")
    return isinstance(error, (OSError, dist.DistError)) or any(word in str(error).lower() for word in words)


def _first_line(error: BaseException) -> str:
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # an exception that cannot even be printed
        lines = []
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    """The longest of the group's own: it may have one for each kind of device."""
    found = []
    for device in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError, AttributeError):  # no such backend, or one without options
            found.append(group._get_backend(torch.device(device)).options._timeout)
    return max(found, default=dist.default_pg_timeout)
