"""Models that are sharded over several ranks (HSDP, FSDP2, tensor parallel), as ranks hold them, and an independent simulation
in one process."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from localsgd_ext import LocalSGD

from .tensors import bits, values

INTERVAL, STEPS = 4, 10

SIZES = {"odd": (5, 7, 3), "even": (5, 8, 3), "whole": (4, 8, 2), "large": (20, 31, 23)}
"""Inputs, hidden, outputs. odd: shards are uneven, and of 3 elements the last of 4 ranks has none; even: as tensor parallel
wants it; whole: all shards are alike; large: more than 256 elements in each of two fragments of each of two shards."""

ALIKE = ("norm.weight", "norm.bias", "scale", "second.bias")
"""What tensor parallel does not split: the ranks of a replica hold the same, and average it in groups that know nothing of each
other."""


class Model(nn.Module):
    """Two layers to be wrapped by themselves, and something for the root."""

    def __init__(self, sizes: str) -> None:
        super().__init__()
        inputs, hidden, outputs = SIZES[sizes]
        self.norm = nn.LayerNorm(inputs)
        self.first = nn.Linear(inputs, hidden)
        self.second = nn.Linear(hidden, outputs)
        self.scale = nn.Parameter(torch.empty(outputs))
        with torch.no_grad():
            for salt, parameter in enumerate(self.parameters()):
                parameter.copy_(0.3 * values(tuple(parameter.shape), torch.float64, salt, 0) + (parameter.dim() == 1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(3 * torch.tanh(self.first(self.norm(inputs)))) * (1 + 0.1 * self.scale)


def inputs_of(sizes: str, place: int, step: int, dtype: torch.dtype) -> torch.Tensor:
    return values((6, SIZES[sizes][0]), torch.float32, 100 + step, place).to(dtype)


def backward(model: nn.Module, sizes: str, place: int, step: int) -> None:
    """Of the batch that all ranks at this place share."""
    dtype = next(model.parameters()).dtype
    targets = values((6, SIZES[sizes][2]), torch.float32, 500 + step, place).to(dtype)
    nn.functional.mse_loss(model(inputs_of(sizes, place, step, dtype)), targets).backward()


def optimizer_of(kind: str, parameters: Any) -> torch.optim.Optimizer:
    if kind == "AdamW":
        return torch.optim.AdamW(parameters, lr=0.01)
    lr = {"SGD": 0.05, "small SGD": 0.0005}[kind]
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


class Sharded:
    """A model as this rank holds it. Ranks are numbered replica first, then the shard of FSDP, then that of tensor parallel."""

    def __init__(
        self, kind: str, replicas: int, sizes: str, optimizer: str = "SGD", dtype: torch.dtype = torch.float32
    ) -> None:
        ranks = dist.get_world_size() // replicas
        self.sizes, self.model = sizes, Model(sizes).to(dtype)
        plan: dict[str, Any] = {"first": ColwiseParallel(), "second": RowwiseParallel()}
        if kind == "TP":
            self.mesh = init_device_mesh("cpu", (replicas, ranks), mesh_dim_names=("dp", "tp"))
            self.replica, self.parts, part = self.mesh.get_local_rank("dp"), 1, 0
            parallelize_module(self.model, self.mesh["tp"], plan)
        else:
            if kind == "FSDP and TP":
                self.mesh = init_device_mesh("cpu", (replicas, ranks // 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
                parallelize_module(self.model, self.mesh["tp"], plan)
                mesh = self.mesh["replicate", "shard"]
            else:
                self.mesh = init_device_mesh("cpu", (replicas, ranks), mesh_dim_names=("replicate", "shard"))
                mesh = {"HSDP": self.mesh, "FSDP": self.mesh["shard"]}[kind]
            for module in (self.model.first, self.model.second, self.model):
                fully_shard(module, mesh=mesh)
            self.replica, part = self.mesh.get_local_rank("replicate"), self.mesh.get_local_rank("shard")
            self.parts = self.mesh["shard"].size()
        self.place = self.replica * self.parts + part
        self.optimizer = optimizer_of(optimizer, self.model.parameters())

    def train(self, step: int) -> None:
        backward(self.model, self.sizes, self.place, step)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> torch.Tensor:
        """Of this rank's replica, put together from its ranks; no rank of another replica takes part."""
        return vector_of(p.detach() for p in self.model.parameters())

    def bits(self, names: tuple[str, ...] | None = None) -> dict[str, bytes]:
        """What this rank itself holds."""
        return {n: bits(local(p)) for n, p in self.model.named_parameters() if names is None or n in names}


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def vector_of(tensors: Any) -> torch.Tensor:
    whole = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]
    return torch.cat([t.detach().double().flatten() for t in whole])


class Simulation:
    """All replicas in one process, in float64 and without anything distributed. A replica's gradient is the mean over its
    parts' batches."""

    def __init__(
        self,
        replicas: int,
        parts: int,
        sizes: str,
        optimizer: str = "SGD",
        outer: tuple[float, float, bool] = (1.0, 0.0, False),
        fragments: int = 1,
        overlap: int = 0,
    ) -> None:
        self.parts, self.sizes, self.overlap = parts, sizes, overlap
        self.models = [Model(sizes).double() for _ in range(replicas)]
        self.optimizers = [optimizer_of(optimizer, model.parameters()) for model in self.models]
        self.anchor = parameters_to_vector(self.models[0].parameters()).detach().clone()
        self.momentum = torch.zeros_like(self.anchor)
        self.lr, self.beta, self.nesterov = outer
        self.masks = self._masks(fragments)
        self.due = [math.ceil((f + 1) * INTERVAL / fragments) for f in range(fragments)]
        self.news = [[False] * fragments for _ in range(replicas)]
        self.flying: tuple[torch.Tensor, list[torch.Tensor], int] | None = None
        self.drifts: list[float] = []
        self.seen: dict[int | str, list[torch.Tensor]] = {}

    def _masks(self, fragments: int) -> list[torch.Tensor]:
        """Which elements belong to each fragment: every rank divides what it holds, in whole blocks of 256."""
        masks = [torch.zeros(len(self.anchor), dtype=torch.bool) for _ in range(fragments)]
        for part in range(self.parts):
            held, first = [], 0
            for parameter in self.models[0].parameters():
                chunks = torch.arange(first, first + parameter.numel()).view(parameter.shape).chunk(self.parts)
                held.append(chunks[part].flatten() if part < len(chunks) else torch.empty(0, dtype=torch.long))
                first += parameter.numel()
            ids = torch.cat(held)
            begin = 0
            for f, mask in enumerate(masks):
                end = min(len(ids), math.ceil(math.ceil(len(ids) * (f + 1) / fragments) / 256) * 256)
                mask[ids[begin:end]] = True
                begin = end
        return masks

    def weights(self) -> list[torch.Tensor]:
        return [parameters_to_vector(model.parameters()).detach().clone() for model in self.models]

    def run(self, *steps: int) -> Simulation:
        """So many steps in each replica. Only without overlap may they differ."""
        for step in range(1, max(steps) + 1):
            for replica, count in enumerate(steps):
                if count >= step:
                    self.train(replica, step)
            if self.flying is not None and step >= self.flying[2] + self.overlap:
                self.land()
            for fragment, point in enumerate(self.due):
                if (step - 1) % INTERVAL + 1 == point:
                    self.average([fragment], step)
            self.seen[step] = self.weights()
        if self.flying is not None:
            self.land()
        self.close()
        self.seen["end"] = self.weights()
        return self

    def close(self) -> None:
        if any(map(any, self.news)):
            self.average(range(len(self.masks)), None)

    def train(self, replica: int, step: int) -> None:
        model, optimizer = self.models[replica], self.optimizers[replica]
        for part in range(self.parts):
            backward(model, self.sizes, replica * self.parts + part, step)
        for parameter in model.parameters():
            parameter.grad /= self.parts
        optimizer.step()
        optimizer.zero_grad()
        self.news[replica] = [True] * len(self.masks)

    def average(self, fragments: Any, step: int | None) -> None:
        """Weights count if they were trained since the last averaging."""
        if self.flying is not None:
            self.land()
        x = self.weights()
        mask = torch.stack([self.masks[f] for f in fragments]).any(0)
        active = [r for r, news in enumerate(self.news) if any(news[f] for f in fragments)]
        mean = sum(x[r] for r in active) / len(active)
        distance_sq = sum((x[r] - mean)[mask].square().sum() for r in active) / len(active)
        self.drifts.append(math.sqrt(distance_sq / mean[mask].square().sum()))
        d = mean[mask] - self.anchor[mask]
        self.momentum[mask] = m = self.beta * self.momentum[mask] + d
        self.anchor[mask] += self.lr * (d + self.beta * m if self.nesterov else m)
        for news in self.news:
            for f in fragments:
                news[f] = False
        self.flying = mask, x, step or 0
        if not self.overlap or step is None:
            self.land()

    def land(self) -> None:
        assert self.flying is not None
        (mask, taken, _), self.flying = self.flying, None
        for model, before in zip(self.models, taken, strict=True):
            x = parameters_to_vector(model.parameters()).detach().clone()
            x[mask] = self.anchor[mask] + (x[mask] - before[mask])
            vector_to_parameters(x, model.parameters())


def train_and_see(
    rank: int, kind: str, replicas: int, sizes: str, optimizer: str, steps: tuple[int, ...], given: str = "", **options: Any
) -> dict[str, Any]:
    """The replica's weights after each step and at the end, and what this rank holds of them."""
    sharded = Sharded(kind, replicas, sizes, optimizer)
    if given:
        options["process_group"] = sharded.mesh.get_group(given)
    seen: dict[int | str, torch.Tensor] = {}
    alike, drifts = {}, []
    with LocalSGD(None, sharded.model, INTERVAL, **options) as local_sgd:
        for step in range(1, steps[sharded.replica] + 1):
            sharded.train(step)
            syncs = local_sgd.num_syncs
            local_sgd.step()
            if local_sgd.num_syncs > syncs:
                drifts.append(local_sgd.report.drift)  # type: ignore[union-attr]
            seen[step], alike[step] = sharded.weights(), sharded.bits(ALIKE)
    seen["end"], alike["end"] = sharded.weights(), sharded.bits(ALIKE)
    if local_sgd.num_syncs > len(drifts):
        drifts.append(local_sgd.report.drift)  # type: ignore[union-attr]
    return {"seen": seen, "alike": alike, "drifts": drifts, "bits": sharded.bits(), "replica": sharded.replica}


def compare(results: list[dict[str, Any]], simulation: Simulation, bound: float, replicas: int) -> None:
    """All along, right before an averaging, too, when replicas differ."""
    for rank, result in enumerate(results):
        for step, weights in result["seen"].items():
            error = (weights - simulation.seen[step][result["replica"]]).abs().max().item()
            assert error < bound, f"rank {rank} after step {step}"
    per_replica = len(results) // replicas
    for shard in range(per_replica):
        holders = [results[shard + replica * per_replica]["bits"] for replica in range(replicas)]
        assert all(held == holders[0] for held in holders), "ranks that hold the same shard differ"
    assert results[0]["bits"] != results[1]["bits"], "a shard each"
    before = INTERVAL - 1
    assert (results[0]["seen"][before] - results[-1]["seen"][before]).abs().max() > 2 * bound, "replicas train apart"


COLLECTIVE = ("reduce", "gather", "scatter", "broadcast", "all_to_all", "alltoall", "send", "recv")


@contextlib.contextmanager
def counted() -> Iterator[list[tuple[str, set[int]]]]:
    """Which collectives this process starts, and between which ranks, whoever starts them and by whatever function."""
    calls: list[tuple[str, set[int]]] = []
    originals = {n: f for n, f in vars(dist.ProcessGroup).items() if any(word in n for word in COLLECTIVE) and callable(f)}

    def noted(name: str, original: Any) -> Any:
        def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            calls.append((name, set(dist.get_process_group_ranks(group))))
            return original(group, *args, **kwargs)

        return call

    for name, original in originals.items():
        setattr(dist.ProcessGroup, name, noted(name, original))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(dist.ProcessGroup, name, original)


def check_gradients(sharded: Sharded, step: int, places: Any) -> list[tuple[str, set[int]]]:
    """Those of one step are the mean over the batches of these places. Gives the collectives that it took."""
    expected = Model(sharded.sizes).double()
    vector_to_parameters(sharded.weights(), expected.parameters())
    for place in places:
        backward(expected, sharded.sizes, place, step)
    sharded.optimizer.zero_grad()
    with counted() as calls:
        backward(sharded.model, sharded.sizes, sharded.place, step)
    got = vector_of(p.grad for p in sharded.model.parameters())
    error = (got - vector_of(p.grad for p in expected.parameters()) / len(places)).abs().max().item()
    assert error < 1e-5, f"step {step}"
    return calls
