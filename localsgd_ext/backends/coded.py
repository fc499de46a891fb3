"""Buckets of codes in pure PyTorch: differences to the anchor are encoded with error feedback, and the anchor follows their
mean.

Error feedback: Seide et al. 2014 (1-bit SGD); Karimireddy et al. 2019, arXiv 1901.09847. Every rank decodes the same bytes by
the same arithmetic, so the anchors stay equal to the last bit; no product is fused into an addition, so engines agree likewise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..collectives import Terms, all_gather, all_reduce, all_to_all
from ..layout import Bucket, Table
from ..outer import Outer, OuterSGD
from ..wire import BLOCK, SCALE_BYTES, Chunks, Code, wide_dtype
from .interface import ANCHOR, MOMENTUM, RESIDUAL, State

LEVELS = {Code.INT8: 127.0, Code.INT4: 7.0}
"""The largest code."""

_TINY = torch.finfo(torch.float32).tiny
_EXPONENT = 0x7F800000
_FLOAT16_TOP = 14 << 23  # exponent of the largest value of a block in float16: below 2^15


def encode(v: torch.Tensor, code: Code, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Write the codes of v, float32 or float64 of shape (blocks, 256), and leave in v what they drop.

    codes: bytes, shape (blocks, 256 * bits / 8). scales: bfloat16, shape (blocks, 1), if the code has them. A block that holds
    NaN or inf gets the scale NaN (a single value becomes NaN or inf where there are no scales), one whose scale would be
    subnormal 0; of the former nothing is kept as dropped, of the latter all.
    """
    v32 = v if code is Code.FLOAT64 else v.float()
    if code.scaled:
        scale, inverse = scale_of(v32.abs().amax(1, keepdim=True), code)
        scales.copy_(scale)
        v32 = torch.where(inverse > 0, v32, 0.0) * inverse
    if code in LEVELS:
        whole = v32.round_().to(torch.int8)
        if code is Code.INT4:
            low, high = whole.view(torch.uint8).split(BLOCK // 2, 1)
            codes.copy_((low & 15) | (high << 4))
        else:
            codes.view(torch.int8).copy_(whole)
    else:
        codes.view(getattr(torch, code.value)).copy_(v32)
    dropped = v.sub_(decode(code, codes, scales))
    dropped.masked_fill_(~dropped.isfinite(), 0.0)


def decode(code: Code, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The values of codes, float32 (float64 for FLOAT64), shape (blocks, 256)."""
    if code is Code.INT4:
        # Both nibbles, with their signs.
        values = torch.cat([(codes << 4).view(torch.int8) >> 4, codes.view(torch.int8) >> 4], 1).float()
    else:
        values = codes.view(getattr(torch, code.value))
        values = values if code is Code.FLOAT64 else values.float()
    return values.mul_(scales.float()) if code.scaled else values


def scale_of(largest: torch.Tensor, code: Code) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and its inverse (0 where nothing of a block can be sent), float32, for blocks whose largest absolute value this
    is."""
    if code is Code.FLOAT16:
        bits = ((largest.view(torch.int32) & _EXPONENT) - _FLOAT16_TOP).clamp_(min=0)
    else:
        bits = ((largest * (1.0 / LEVELS[code])).view(torch.int32) + 0xFFFF) & -0x10000  # rounded up to bfloat16
    scale = bits.view(torch.float32)
    scale = torch.where(scale >= _TINY, scale, 0.0)
    scale = torch.where(largest.isfinite(), scale, torch.nan)
    return scale, torch.where(scale > 0, scale.reciprocal(), 0.0)


class CodedBucket:
    """A bucket whose differences to the anchor travel in codes; see `_Bucket` in reference.py for the calls and their order.

    chunks: where they are `summed`, it is values that travel. staging, state, outer: see `Backend.bind_coded`.
    """

    def __init__(
        self,
        table: Table,
        bucket: Bucket,
        flats: Sequence[torch.Tensor],
        staging: torch.Tensor,
        chunks: Chunks,
        state: State,
        outer: Outer | None,
        rank: int,
        size: int,
    ) -> None:
        assert isinstance(table.wire, Code)
        self._code, self.slot = table.wire, staging.data_ptr()
        self._numel = bucket.numel
        self._rank, self._size = rank, size
        self._chunks = chunks
        self._tensors = bucket.views(flats)
        self._sizes = [segment.numel for segment in bucket.segments]
        self._drift_numel = bucket.drift_numel
        self._state = state
        self._outer = outer
        self._dtype, self._wide = table.dtype, wide_dtype(table.dtype)
        self._sums = room_for_sums(torch.empty(0, dtype=self._wide, device=staging.device))
        nbytes = self._chunks.count * self._chunks.nbytes
        if self._chunks.summed:
            self._mine = self._received = self._theirs = staging[:nbytes]
            self._sum = self._mine.view(self._wide)[: self._numel]
        elif self._chunks.count == 1:
            self._received = staging[: 2 * nbytes]  # both ranks' codes, in rank order
            self._mine, self._theirs = (self._received[rank * nbytes :][:nbytes] for rank in (self._rank, 1 - self._rank))
        else:
            self._mine, self._received = staging[:nbytes], staging[nbytes : 2 * nbytes]
            self._theirs = self._received

    def start(self, group: dist.ProcessGroup, terms: Terms) -> dist.Work:
        """Encode this rank's progress and what it owes: what rounding has dropped from the means it took part in, as a share of
        these.

        A rank that does not contribute still pays its debts.
        """
        if self._chunks.summed:
            self._gather(self._sum) if terms.contributes else self._sum.zero_()
            return all_reduce(self._sum, group, terms.timeout)
        residual = self._state.fetch(RESIDUAL)
        v = self._zeros(self._chunks.count * self._chunks.blocks * BLOCK)
        if terms.contributes:
            self._gather(v[: self._numel]).sub_(self._begun(self._anchor()))
        if residual is not None:
            v[: self._numel].add_(residual * terms.divisor)
        for chunk, part in zip(self._mine.view(self._chunks.count, -1), v.view(self._chunks.count, -1), strict=True):
            self._encode(part, chunk)
        if residual is not None:
            torch.mul(v[: self._numel], self._share(terms.divisor), out=residual)
            self._state.store(RESIDUAL)
        return all_to_all(self._theirs, self._mine, group, terms.timeout)

    def advance(self, group: dist.ProcessGroup, terms: Terms) -> dist.Work | None:
        """Sum the chunk of this rank and send it to all, in codes again; what that drops is this rank's to send."""
        if self._chunks.count == 1:
            return None
        mean = self._mean(terms.divisor)
        self._encode(mean, self._mine[: self._chunks.nbytes])
        if (residual := self._state.fetch(RESIDUAL)) is not None:
            own = residual[self._rank * self._chunks.blocks * BLOCK :][: len(mean)]
            own.add_(mean[: len(own)])
            self._state.store(RESIDUAL)
        return all_gather(self._received, self._mine, group, terms.timeout)

    def finish(self, group: dist.ProcessGroup, terms: Terms) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Let the anchor follow the mean progress d, and copy it to the tensors, rounding once; gives what
        `ReferenceBucket.apply` does."""
        anchor = self._anchor()
        begun = self._begun(anchor)
        if self._chunks.summed:
            mean = divide(self._sum, terms.divisor)
            d = mean - begun
        else:
            d = self._mean(terms.divisor) if self._chunks.count == 1 else self._means()
            d = d[: self._numel]
            mean = begun + d
        sums = None
        if self._drift_numel:
            local = self._gather(self._zeros(self._numel))
            distance, mean = local.sub_(mean)[: self._drift_numel], mean[: self._drift_numel]
            sums = self._sums
            torch.dot(distance, distance, out=sums[0])
            torch.dot(mean, mean, out=sums[1])
        momentum = self._state.fetch(MOMENTUM)
        if self._outer is None:
            anchor.add_(d)
        elif isinstance(self._outer, OuterSGD):
            if momentum is not None:
                momentum.mul_(self._outer.momentum).add_(d)
                d = momentum.mul(self._outer.momentum).add_(d) if self._outer.nesterov else momentum
            anchor.add_(d * self._outer.lr)
        else:
            assert momentum is not None
            torch.neg(d, out=momentum)
        self._state.store(MOMENTUM)
        if self._outer is None or isinstance(self._outer, OuterSGD):
            self._state.store(ANCHOR)
            torch._foreach_copy_(self._tensors, list(anchor.split(self._sizes)))
        return sums

    def _anchor(self) -> torch.Tensor:
        anchor = self._state.fetch(ANCHOR)
        assert anchor is not None
        return anchor

    def _begun(self, anchor: torch.Tensor) -> torch.Tensor:
        """Where the tensors began the round: at the anchor, as it fits in their dtype."""
        return anchor.to(self._dtype).to(self._wide) if self._dtype.itemsize == 2 else anchor

    def _share(self, divisor: int) -> float:
        """1 / divisor, rounded as the tensors' arithmetic does."""
        return torch.tensor(1.0, dtype=self._wide).div_(divisor).item()

    def _gather(self, to: torch.Tensor) -> torch.Tensor:
        """The tensors' values."""
        torch._foreach_copy_(list(to.split(self._sizes)), self._tensors)
        return to

    def _zeros(self, numel: int) -> torch.Tensor:
        return torch.zeros(numel, dtype=self._wide, device=self._mine.device)

    def _mean(self, divisor: int) -> torch.Tensor:
        """Of the ranks' chunks received, whose sum is taken in rank order."""
        total = self._zeros(self._chunks.blocks * BLOCK)
        for chunk in self._received.view(self._size, -1):
            total.add_(self._decode(chunk))
        return divide(total, divisor)

    def _means(self) -> torch.Tensor:
        """That each rank has encoded of its chunk."""
        return torch.cat([self._decode(chunk) for chunk in self._received.view(self._size, -1)]).to(self._wide)

    def _encode(self, v: torch.Tensor, chunk: torch.Tensor) -> None:
        encode(v.view(-1, BLOCK), self._code, *self._parts(chunk))

    def _decode(self, chunk: torch.Tensor) -> torch.Tensor:
        return decode(self._code, *self._parts(chunk)).flatten()

    def _parts(self, chunk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales of a chunk, a row for each block."""
        blocks, begin = self._chunks.blocks, self._chunks.blocks * BLOCK * self._code.bits // 8
        scales = chunk[begin : begin + blocks * SCALE_BYTES if self._code.scaled else begin]
        return chunk[:begin].view(blocks, -1), scales.view(torch.bfloat16).view(-1, 1)


def room_for_sums(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two scalars of its dtype, on its device. Made once: small results that outlive an averaging's large temporaries, and lie
    between them, leave the allocator's memory in pieces that fit nothing, as much as the model has."""
    return like.new_empty(()), like.new_empty(())


def divide(tensor: torch.Tensor, divisor: int) -> torch.Tensor:
    """Divide in place, rounding once on every device."""
    if divisor == 1:
        return tensor
    if divisor & (divisor - 1) == 0:
        return tensor.mul_(1.0 / divisor)  # exact for a power of two, hence the same bits as dividing, and faster
    if tensor.is_cpu:
        return tensor.div_(divisor)
    # By a tensor: CUDA makes a division by a number into a product with its inverse, which rounds twice.
    wide = tensor.to(wide_dtype(tensor.dtype))
    return tensor.copy_(wide.div_(torch.full((), divisor, dtype=wide.dtype, device=tensor.device)))
