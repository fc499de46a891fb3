"""What has to be equal on all ranks before they average: a line for each option and tensor, and a checksum of the values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch


def describe(options: Mapping[str, object], tensors: Iterable[tuple[str, str, torch.Tensor]]) -> list[str]:
    """One line for each option, and for each tensor, given as (name, what becomes of it, tensor)."""
    lines = [f"option {name}: {value}" for name, value in options.items()]
    first: dict[tuple[int, int], str] = {}
    for name, fate, tensor in tensors:
        if tensor.is_nested:
            lines.append(f"tensor {name}: {_dtype(tensor)}, nested, {fate}")
            continue
        line = f"tensor {name}: {_dtype(tensor)} of shape {list(tensor.shape)}, {fate}"
        if tensor.layout is torch.strided:
            line += f", strides {list(tensor.stride())}, on {tensor.device.type}"
            tied = first.setdefault((tensor.data_ptr(), tensor.numel()), name) if tensor.numel() else name
            line += f", the same as {tied}" if tied != name else ""
        lines.append(line)
    return lines


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def digest(lines: Iterable[str]) -> bytes:
    """32 bytes that are equal where all lines are."""
    whole = hashlib.sha256()
    for line in lines:
        whole.update(line.encode() + b"\n")
    return whole.digest()


def name_ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def difference(descriptions: Sequence[Sequence[str]], ranks: Sequence[int]) -> str:
    """Which line is the first to differ between the ranks, and what each of them has there."""
    length = max(map(len, descriptions))
    for index in range(length):
        said: dict[str, list[int]] = {}
        for rank, lines in zip(ranks, descriptions, strict=True):
            said.setdefault(lines[index] if index < len(lines) else "nothing more", []).append(rank)
        if len(said) > 1:
            each = "; ".join(f"{name_ranks(who)}: {line}" for line, who in said.items())
            return f"the ranks differ, first in: {each}. All ranks need the same model and the same options"
    return "the ranks differ, but no longer"  # a description that changes while it is compared


STRETCH = 2**20
"""Words that are summed up together."""


@torch.no_grad()
def checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Numbers that differ, as good as surely, where any bit of the tensors does, or their order. One pass, on the tensors'
    devices."""
    sums = []
    rooms: dict[torch.device, tuple[torch.Tensor, ...]] = {}
    for tensor in filter(_has_bits, tensors):
        words = _words(tensor)
        if words.device not in rooms:
            # Odd, and another for each place, so that no two words can change places unseen.
            weights = torch.arange(STRETCH, dtype=torch.int32, device=words.device).mul_(-1640531534).add_(1)
            # Room that is used again and again: temporaries of this size, with small results between them, leave an allocator's
            # memory in pieces that fit nothing, as much as the model has.
            rooms[words.device] = weights, torch.empty_like(weights), torch.empty_like(weights)
        for stretch in words.split(STRETCH):
            weights, wide, mixed = (each[: len(stretch)] for each in rooms[words.device])
            torch.bitwise_right_shift(wide.copy_(stretch), 13, out=mixed)
            mixed.bitwise_xor_(wide)  # else two changes of a sign would cancel each other
            sums.append(mixed.mul_(weights).sum(dtype=torch.int32))
    if not sums:
        return []
    device = sums[0].device
    return [int(each) for each in torch.stack([each.to(device) for each in sums]).tolist()]


def _has_bits(tensor: torch.Tensor) -> bool:
    """Whether it has plain memory to look at; frozen parameters may be of any kind."""
    return tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_nested or tensor.is_quantized)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor in logical order, as whole numbers of at most 32 bits. Their sum may wrap around: that loses
    nothing."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    size = flat.element_size()
    return flat.view(torch.int32 if size % 4 == 0 else torch.int16 if size == 2 else torch.uint8)
