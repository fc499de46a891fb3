"""What stands for local training in the tests: models that begin equal, and progress that is known and differs between
ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from localsgd_ext import LocalSGD

from .tensors import bits, values

BUCKET_MB = 4096 / 2**20  # so small that a model has several buckets
LOSSY = ("bfloat16", "float16", "int8", "int4")
WAYS = pytest.mark.parametrize("world_size", [2, 3])  # codes to each other; chunks summed and encoded again


def parameters(*sizes: int, dtype: torch.dtype = torch.float32) -> nn.ParameterList:
    """Equal on all ranks, as entering a LocalSGD asks for."""
    return nn.ParameterList([nn.Parameter(values((n,), dtype, i, 0)) for i, n in enumerate(sizes)])


@torch.no_grad()
def drift(model: nn.Module, rank: int, salt: int, size: float = 1e-3) -> list[torch.Tensor]:
    """Local progress, uniform in [-size, size] and different on every rank; gives it, float64."""
    moves = []
    for i, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(10_000 * salt + 100 * i + rank)
        move = size * (2 * torch.rand(parameter.shape, generator=generator) - 1)
        moves.append(move.double())
        parameter.add_(move.to(parameter.dtype))
    return moves


def mean_drift(model: nn.Module, world_size: int, salt: int, size: float = 1e-3) -> list[torch.Tensor]:
    """What `drift` gives on average over the ranks."""
    copies = [nn.ParameterList([nn.Parameter(torch.zeros_like(p)) for p in model.parameters()]) for _ in range(world_size)]
    all_moves = [drift(copy, rank, salt, size) for rank, copy in enumerate(copies)]
    return [sum(moves[i] for moves in all_moves) / world_size for i in range(len(all_moves[0]))]


def states(local_sgd: LocalSGD) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Anchor and residual of each table."""
    assert local_sgd._rounds is not None
    anchors = local_sgd._rounds._averager.anchors
    assert anchors is not None
    return list(zip(anchors.anchor, anchors.residual, strict=True))


def everything(model: nn.Module) -> bytes:
    return b"".join(bits(tensor) for tensor in model.state_dict().values())


def check_resumed(whole: Sequence[Any], resumed: Sequence[Any]) -> None:
    """whole, resumed: for both ranks the ends of each run, weights first, then the rank's own optimizer."""
    for mine, others, again, others_again in zip(*whole, *resumed, strict=True):
        for was, now in zip(mine + others, again + others_again, strict=True):
            assert now == was
        assert mine[0] == others[0], "the same weights"
        assert mine[1] != others[1], "optimizers of their own"
