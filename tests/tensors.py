"""Tensors for the tests: distinct values for every element, tensor and rank, so that a swapped or dropped one is seen."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch
from torch import nn

from localsgd_ext import LocalSGD

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64)


def values(shape: tuple[int, ...], dtype: torch.dtype, salt: int, rank: int) -> torch.Tensor:
    """Normally distributed, fixed by (salt, rank)."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    if dtype.is_complex:
        return torch.view_as_complex(torch.randn(*shape, 2, generator=generator, dtype=torch.float64).to(dtype.to_real()))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def bits(tensor: torch.Tensor) -> bytes:
    """The exact content in logical order: -0.0 differs from 0.0, and NaN equals itself."""
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())


@contextlib.contextmanager
def apart(local_sgd: LocalSGD, model: nn.Module) -> Iterator[LocalSGD]:
    """Enter `local_sgd`, each rank with the parameters and buffers that it has now: entering alone gives all of them rank 0's.

    They are put back in place, so that the change is seen and storage stays.
    """
    tensors = [*model.parameters(), *model.buffers()]
    own = [tensor.detach().clone() for tensor in tensors]
    with contextlib.ExitStack() as stack:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the weights of ranks? .* differ from rank 0's")
            stack.enter_context(local_sgd)
        with torch.no_grad():
            for tensor, copy in zip(tensors, own, strict=True):
                tensor.copy_(copy)
        yield local_sgd


class OddModel(nn.Module):
    """Parameters of every shape that has ever caused trouble."""

    def __init__(self, dtypes: tuple[torch.dtype, ...], rank: int, bucket_bytes: int = 4096) -> None:
        super().__init__()
        salt = 0

        def new(*shape: int) -> torch.Tensor:
            nonlocal salt
            salt += 1
            return values(shape, dtype, salt, rank)

        for dtype in dtypes:
            tag = str(dtype).removeprefix("torch.")
            for name, tensor in {
                "scalar": new(),
                "empty": new(0, 3),
                "plain": new(7, 13),
                "transposed": new(5, 9).t(),
                "channels_last": new(3, 4, 5, 2).to(memory_format=torch.channels_last),
                "slice": new(6, 10)[:, 2:7],
                "larger_than_three_buckets": new(3 * bucket_bytes // dtype.itemsize + 11),
                "one": new(1),
            }.items():
                self.register_parameter(f"{tag}_{name}", nn.Parameter(tensor))
