"""The parameter shapes that the benchmarks average."""

from __future__ import annotations

import torch

Shape = tuple[int, ...]


def gpt2() -> list[Shape]:
    """GPT-2 small: 124 M parameters in 148 tensors."""
    width = 768
    block = [(width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,)]
    block += [(width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return [(50257, width), (1024, width), *block * 12, (width,), (width,)]


def resnet50() -> list[Shape]:
    """ResNet-50: 25.6 M parameters in 161 tensors."""
    shapes: list[Shape] = [(64, 3, 7, 7), (64,), (64,)]
    inside = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for shape in ((width, inside, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)):
                shapes += [shape, (shape[0],), (shape[0],)]
            if block == 0:
                shapes += [(4 * width, inside, 1, 1), (4 * width,), (4 * width,)]
            inside = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def tiny() -> list[Shape]:
    """4.2 M parameters in 2000 tensors."""
    return [(2100 + 7 * (index % 13) - 42,) for index in range(2000)]


def large() -> list[Shape]:
    """100 M parameters in 2 tensors."""
    return [(10_000, 5_000)] * 2


def lora() -> list[Shape]:
    """300 M frozen parameters, and 6 M trained ones in 192 small matrices."""
    return [*[(1024, 1024)] * FROZEN["lora"], *[(31, 1024)] * 192]


SETS = {"gpt2": gpt2, "resnet50": resnet50, "tiny": tiny, "large": large, "lora": lora}

FROZEN = {"lora": 286}
"""How many of the first parameters of a set are frozen."""


class Model(torch.nn.Module):
    """float32 parameters of a set of shapes; every element differs, and those that are trained differ between ranks."""

    def __init__(self, name: str, rank: int) -> None:
        super().__init__()
        for index, shape in enumerate(SETS[name]()):
            trainable = index >= FROZEN.get(name, 0)
            # What is frozen is the same on every rank.
            self.register_parameter(f"p{index}", torch.nn.Parameter(torch.empty(shape), requires_grad=trainable))
        self.fill(rank)

    @torch.no_grad()
    def fill(self, rank: int) -> None:
        """Give the parameters the weights of `rank`, in place and without a copy."""
        for index, parameter in enumerate(self.parameters()):
            parameter.normal_(generator=generator(index, rank if parameter.requires_grad else 0))

    @torch.no_grad()
    def drift(self, rank: int) -> None:
        """Move what is trained a little, in place and quickly, and on every rank otherwise: as local steps would."""
        for index, parameter in enumerate(self.parameters()):
            if parameter.requires_grad:
                parameter.mul_(1 + 1e-3 * (rank + 1) * (-1) ** index)


def values(shape: Shape, index: int, rank: int) -> torch.Tensor:
    """The weights of tensor number `index` on `rank`."""
    return torch.randn(shape, generator=generator(index, rank))


def generator(index: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * index + rank)
