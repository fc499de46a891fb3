"""What ranks remember between averagings of differences: what they last agreed on, what rounding dropped, and outer
momentum."""

from __future__ import annotations

import hashlib
import itertools
import math
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .backends.interface import State
from .dtensors import is_spread, local_part, place_of, spread_as
from .items import Item
from .layout import Table, fragment_ends, is_dense
from .outer import Outer, OuterSGD, make_optimizer, makes_optimizer
from .wire import lossless, wide_dtype


class _Identity:
    """Of a tensor, without keeping it alive. An address alone may be that of a tensor that is no more, and tensors compare by
    element."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self._hash = weakref.ref(tensor), id(tensor)

    def __eq__(self, other: object) -> bool:
        tensor = self.tensor()
        return isinstance(other, _Identity) and tensor is not None and tensor is other.tensor()

    def __hash__(self) -> int:
        return self._hash


class Entry(NamedTuple):
    """A tensor whose elements lie in a table: by name and by identity, since another tensor of that name begins anew."""

    item: int  # its number
    numel: int
    name: str
    stride: tuple[int, ...]  # the order in which its elements lie
    tensor: _Identity
    shape: tuple[int, ...]


class _Place(NamedTuple):
    """What distinguishes a table from others, and the tensors in it."""

    device: torch.device
    dtype: torch.dtype
    holders: tuple[int, ...]
    entries: tuple[Entry, ...]


class Anchors:
    """The state of a layout: flat tensors in `wide_dtype`, one number for each element of the parameters that travels as a
    difference.

    anchor: what all ranks last agreed on, equal to the last bit. residual, where the wire is lossy: what rounding dropped on
    this rank, as a share of the means it was meant for. momentum, where the outer optimizer has one: equal on all ranks; with
    an optimizer of torch's, the gradient it is given. For 16-bit parameters all are float32, so that the anchor keeps steps too
    small for the parameters.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        items: Sequence[Item],
        outer: Outer | None,
        device: torch.device | None,
        fragments: int = 1,
    ) -> None:
        self._tables = _places(tables, items)
        self._outer = outer
        self._home = device
        self._optimizer: torch.optim.Optimizer | None = None
        self.agreed = False
        self.is_lossy = any(table.wire is not lossless(table.dtype) for table in tables)
        has_momentum = outer.momentum > 0 if isinstance(outer, OuterSGD) else outer is not None
        self.anchor = list(map(self._new, self._tables))
        self.residual = list(map(self._new, self._tables)) if self.is_lossy else []
        self.momentum = list(map(self._new, self._tables)) if has_momentum else []
        # What an optimizer of torch's is made for: the part of each fragment alone, so that it can step one of them.
        self._parts = [
            (fragment, self.anchor[number][begin:end], self.momentum[number][begin:end] if self.momentum else None)
            for number, flat in enumerate(self.anchor)
            for fragment, (begin, end) in enumerate(itertools.pairwise([0, *fragment_ends(flat.numel(), fragments)]))
            if begin < end
        ]

    @classmethod
    def for_tables(
        cls,
        tables: Sequence[Table],
        items: Sequence[Item],
        earlier: Anchors | None,
        outer: Outer | None,
        device: torch.device | None,
        fragments: int = 1,
    ) -> Anchors:
        """Those of before where they are for the same tensors, wherever these have moved; else new ones, not agreed on, which
        take over what was known of the tensors that stay."""
        if earlier is None:
            return cls(tables, items, outer, device, fragments)
        if earlier._tables == _places(tables, items):
            return earlier
        made = cls(tables, items, outer, device, fragments)
        if earlier._optimizer is not None:
            warnings.warn(
                "the tensors that travel as differences have changed (unfrozen, replaced, of another dtype): the outer optimizer, which was "
                "made for the old ones, starts anew",
                stacklevel=2,
            )
        known = {entry[1:]: place for place, entry in earlier._places()}
        for (table, part), entry in made._places():
            if (place := known.get(entry[1:])) is not None:
                for new, old in (
                    (made.anchor, earlier.anchor),
                    (made.residual, earlier.residual),
                    (made.momentum, earlier.momentum),
                ):
                    if new and old:  # what was lossless has dropped nothing
                        new[table][part].copy_(old[place[0]][place[1]])
        return made

    def _wait_for_copies(self) -> None:
        """Where state is kept on the host and the tensors are on a GPU, copies from it and to it are under way; to be called
        before the host itself looks at it."""
        for table, anchor in zip(self._tables, self.anchor, strict=True):
            if table.device.type == "cuda" and not anchor.is_cuda:
                torch.cuda.current_stream(table.device).synchronize()

    def _places(self) -> list[tuple[tuple[int, slice], Entry]]:
        """For each tensor its table and its part of that."""
        places = []
        for number, table in enumerate(self._tables):
            begin = 0
            for entry in table.entries:
                places.append(((number, slice(begin, begin + entry.numel)), entry))
                begin += entry.numel
        return places

    def states(self, table: Table) -> list[State]:
        """Of each bucket of a table."""
        index = [each[:3] for each in self._tables].index((table.device, table.dtype, table.holders))
        flats = [each[index] if each else None for each in (self.anchor, self.residual, self.momentum)]
        here = flats
        if self.anchor[index].device != table.device:
            most = max(bucket.numel for bucket in table.buckets)
            here = [None if each is None else torch.empty(most, dtype=each.dtype, device=table.device) for each in flats]
        begin, states = 0, []
        for bucket in table.buckets:
            homes = [None if each is None else each[begin : begin + bucket.numel] for each in flats]
            theres = homes if here is flats else [None if each is None else each[: bucket.numel] for each in here]
            begin += bucket.numel
            states.append(State(homes, theres))
        return states

    @torch.no_grad()
    def set_to(self, flats: Sequence[torch.Tensor]) -> None:
        """All ranks agree on the tensors as they are now; whatever rounding dropped is forgotten. Momentum stays."""
        self._wait_for_copies()
        for (number, part), entry in self._places():
            anchor, tensor = self.anchor[number][part], flats[entry.item]
            tensor = tensor.to(anchor.device)
            if tensor.itemsize == 2:  # where the anchor rounds to it, that is it
                tensor = torch.where(anchor.to(tensor.dtype) == tensor, anchor, tensor)
            anchor.copy_(tensor)
        for residual in self.residual:
            residual.zero_()
        self.agreed = True

    @torch.no_grad()
    def pour_into(self, flats: Sequence[torch.Tensor], divisor: int) -> None:
        """Add to the tensors what this rank owes to a mean over `divisor` ranks."""
        for (number, part), entry in self._places() if self.residual else []:
            tensor = flats[entry.item]
            tensor.copy_(tensor + divisor * self.residual[number][part].to(tensor.device))

    @torch.no_grad()
    def step(self, parts: int) -> None:
        """Let torch's optimizer move the anchors of these fragments, which have their gradients by now."""
        self._wait_for_copies()
        assert makes_optimizer(self._outer)
        for fragment, anchor, gradient in self._parts:
            anchor.grad = gradient if parts >> fragment & 1 else None  # those without are left alone
        if self._optimizer is None:
            self._optimizer = make_optimizer(self._outer, [anchor for _, anchor, _ in self._parts])
        self._optimizer.step()

    def state(self) -> dict[str, torch.Tensor]:
        """For a checkpoint: by name what cannot be had from the tensors themselves, as it is after an exact averaging. Of
        DTensors as DTensors."""
        self._wait_for_copies()
        state = {}
        for (number, part), entry in self._places():
            if self._tables[number].dtype.itemsize == 2:
                state[f"anchor.{entry.name}"] = _saved(self.anchor[number][part], entry)
            if isinstance(self._outer, OuterSGD) and self.momentum:
                state[f"momentum.{entry.name}"] = _saved(self.momentum[number][part], entry)
        if makes_optimizer(self._outer):
            for number, values in enumerate(self._optimizer_states()):
                for key, value in values.items():
                    state[f"{self._prefix(number)}{key}"] = torch.as_tensor(value).cpu().clone()
        return state

    def _optimizer_states(self) -> list[dict[str, Any]]:
        """For each part. NaN before the first step, from which the names and shapes can be had that a checkpoint is read
        into."""
        anchors = [anchor for _, anchor, _ in self._parts]
        if self._optimizer is not None:
            return [self._optimizer.state[anchor] for anchor in anchors]
        trials = [torch.zeros_like(anchor) for anchor in anchors]
        assert makes_optimizer(self._outer)
        optimizer = make_optimizer(self._outer, trials)
        for trial in trials:
            trial.grad = torch.zeros_like(trial)
        optimizer.step()
        tensors = [{k: torch.as_tensor(v) for k, v in optimizer.state[trial].items()} for trial in trials]
        return [{k: torch.full_like(v, torch.nan) if v.is_floating_point() else v for k, v in each.items()} for each in tensors]

    def _prefix(self, number: int) -> str:
        """Of the state of torch's optimizer for a part, which is no part of any one tensor: where other ranks of the replica
        hold other parts, theirs have other names."""
        owners = [entry.tensor.tensor() for table in self._tables for entry in table.entries]
        place = max(map(place_of, owners), key=len, default=())
        return ".".join(["outer", *map(str, place), str(number), ""])

    @torch.no_grad()
    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take up what `state` gave, on all ranks alike; the anchor stands at the tensors. Warns where momentum is missing."""
        self._wait_for_copies()
        missing = []
        for (number, part), entry in self._places():
            anchor = self.anchor[number][part]
            saved = _loaded(state.get(f"anchor.{entry.name}"), entry)
            if saved is not None and saved.shape == anchor.shape:
                dtype, saved = self._tables[number].dtype, saved.to(anchor.device)
                anchor.copy_(torch.where(saved.to(dtype) == anchor.to(dtype), saved, anchor))
            if isinstance(self._outer, OuterSGD) and self.momentum:
                saved = _loaded(state.get(f"momentum.{entry.name}"), entry)
                if saved is not None and saved.shape == anchor.shape:
                    self.momentum[number][part].copy_(saved)
                else:
                    self.momentum[number][part].zero_()
                    missing.append(entry.name)
        if makes_optimizer(self._outer):
            missing += self._load_optimizer(state)
        if missing:
            warnings.warn(
                f"the checkpoint holds no momentum of the outer optimizer for {missing[0]!r} and {len(missing) - 1} more: it starts anew",
                stacklevel=2,
            )

    def _load_optimizer(self, state: Mapping[str, torch.Tensor]) -> list[str]:
        assert makes_optimizer(self._outer)
        self._optimizer, missing = make_optimizer(self._outer, [anchor for _, anchor, _ in self._parts]), []
        for number, (_, anchor, _) in enumerate(self._parts):
            prefix = self._prefix(number)
            found = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            if any(value.is_floating_point() and value.isnan().all() for value in found.values()):
                continue  # saved before its first step
            if not found or any(value.dim() and value.shape != anchor.shape for value in found.values()):
                missing.append(f"part {number}")
                continue
            self._optimizer.state[anchor] = {
                key: value.to(anchor.device if value.dim() else "cpu").clone() for key, value in found.items()
            }
        return missing

    @property
    def has_momentum(self) -> bool:
        """Which is still of use when the tensors are let go."""
        return bool(self.momentum)

    def fingerprint(self) -> int:
        """A number that differs, as good as surely, where any bit that ranks share does. Reads all of it: for debugging."""
        self._wait_for_copies()
        digest = hashlib.sha256()
        for each in (*self.anchor, *self.momentum):
            # One NaN for all: engines may differ in its bits.
            whole = torch.where(each.isnan(), torch.nan, each.detach()).cpu()
            digest.update(whole.view(torch.uint8).numpy().data)
        return int.from_bytes(digest.digest()[:8], "little", signed=True)

    def _new(self, table: _Place) -> torch.Tensor:
        home = self._home or table.device
        pinned = home.type == "cpu" and table.device.type == "cuda"
        numel = sum(entry.numel for entry in table.entries)
        return torch.zeros(numel, dtype=wide_dtype(table.dtype), device=home, pin_memory=pinned)


def _saved(flat: torch.Tensor, entry: Entry) -> torch.Tensor:
    owner = entry.tensor.tensor()
    if owner is None or not is_spread(owner):
        return flat.detach().cpu().clone()
    shape, stride = list(entry.shape), list(entry.stride)
    if flat.numel() > math.prod(shape):  # complex numbers, as pairs
        shape, stride = [*shape, 2], [*(2 * step for step in stride), 1]
    dense = is_dense(shape, stride)  # else its elements lie in order
    part = flat.detach().as_strided(shape, stride) if dense else flat.detach().view(shape)
    return spread_as(owner, part.contiguous().clone())


def _loaded(saved: torch.Tensor | None, entry: Entry) -> torch.Tensor | None:
    """Flat, as it lies."""
    if saved is None or (saved.dim() == 1 and not is_spread(saved)):
        return saved
    part = local_part(saved)
    shape, stride = list(entry.shape), list(entry.stride)
    if part.dim() > len(shape):
        shape, stride = [*shape, 2], [*(2 * step for step in stride), 1]
    if not is_dense(shape, stride) or list(part.shape) != shape:
        return part.reshape(-1)
    return torch.empty_strided(shape, stride, dtype=part.dtype).copy_(part).as_strided((part.numel(),), (1,))


def _places(tables: Sequence[Table], items: Sequence[Item]) -> list[_Place]:
    return [_Place(table.device, table.dtype, table.holders, _entries(table, items)) for table in tables]


def _entries(table: Table, items: Sequence[Item]) -> tuple[Entry, ...]:
    numels: dict[int, int] = {}
    for bucket in table.buckets:
        for segment in bucket.segments:
            numels[segment.tensor] = numels.get(segment.tensor, 0) + segment.numel
    return tuple(
        Entry(
            index,
            numel,
            items[index].name,
            items[index].tensor.stride(),
            _Identity(items[index].identity),
            tuple(items[index].tensor.shape),
        )
        for index, numel in numels.items()
    )
