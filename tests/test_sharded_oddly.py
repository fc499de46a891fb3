"""Models that are sharded in unusual ways, on which ranks might come to different decisions, or one of FSDP2's habits might
hide an average."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import DistributedType
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from localsgd_ext import DiLoCo, LocalSGD, LocalSGDError, NonFiniteError, Warmup
from localsgd_ext.replicas import find_replicas

from .ranks import run_ranks
from .sharded_models import INTERVAL, Model, Sharded, backward, local
from .tensors import bits


class Gated(nn.Module):
    """Frozen but for one number, which only the first shard holds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(5, 3).requires_grad_(False)
        self.gate = nn.Parameter(torch.ones(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.base(inputs) * self.gate


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, place: int, step: int) -> None:
    generator = torch.Generator().manual_seed(1000 * step + place)
    model(torch.randn(4, 5, generator=generator)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _nearly_empty(rank: int, options: dict[str, Any]) -> tuple[int, bytes]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(Gated(), mesh=mesh)
    optimizer = torch.optim.SGD([model.gate], lr=0.05)
    with LocalSGD(None, model, Warmup(2, then=2), timeout=timedelta(seconds=20), **options) as local_sgd:
        for step in range(7):
            _train(model, optimizer, rank, step)
            local_sgd.step()
    return local_sgd.num_syncs, bits(model.gate.full_tensor())


@pytest.mark.parametrize("options", [{"wire": "int8"}, {"outer": DiLoCo()}, {"outer": DiLoCo(), "overlap_steps": 1}])
def test_ranks_without_any_element_decide_as_the_others_do(options: dict[str, Any]) -> None:
    results = run_ranks(_nearly_empty, 4, options)
    assert len(set(results)) == 1
    assert results[0][0] >= 3


def _overflow(rank: int) -> str:
    sharded = Sharded("HSDP", 2, "odd", dtype=torch.float16)
    with pytest.raises(NonFiniteError) as caught, LocalSGD(None, sharded.model, 1) as local_sgd:
        if rank % 2 == 1:
            local(sharded.model.first.weight.detach()).fill_(5e4)
        local_sgd._rounds.stepped()  # type: ignore[union-attr]
        local_sgd.step()
    return str(caught.value)


def test_an_average_that_overflows_in_one_shard_is_an_error_on_every_rank() -> None:
    messages = run_ranks(_overflow, 4)
    for rank, message in enumerate(messages):
        assert "the sum over ranks overflowed float16" in message
        assert ("'first.weight'" if rank % 2 else "on another rank of this replica") in message


def _partly(rank: int) -> list[bool]:
    """Only the first layer is HSDP's; the rest is a plain module's, with gradients of its own on each replica."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Model("odd")
    fully_shard(model.first, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    equal = []
    with LocalSGD(None, model, Warmup(3, then=2)) as local_sgd:
        for step in range(1, 4):
            # The same on both ranks of a replica, as nothing reduces the gradients of the plain part inside it.
            backward(model, "odd", rank // 2, step)
            optimizer.step()
            optimizer.zero_grad()
            local_sgd.step()
            mine = torch.cat([local(p.detach()).flatten() for p in model.parameters()])
            least, most = mine.clone(), mine.clone()
            group = mesh.get_group("replicate")
            dist.all_reduce(least, dist.ReduceOp.MIN, group)
            dist.all_reduce(most, dist.ReduceOp.MAX, group)
            equal.append(torch.equal(least, most))
    return equal


def test_what_hsdp_does_not_keep_equal_is_averaged_in_a_warmup() -> None:
    assert all(all(each) for each in run_ranks(_partly, 4))


def _prefetched(rank: int) -> bool:
    """unshard() that is still under way holds weights of before the averaging."""
    sharded = Sharded("HSDP", 2, "odd")
    with LocalSGD(None, sharded.model, 100) as local_sgd:
        for step in range(3):
            sharded.train(step)
        for module in (sharded.model, sharded.model.first, sharded.model.second):
            module.unshard(async_op=True)
        local_sgd.synchronize()
        inputs = torch.ones(2, 5)
        with torch.no_grad():
            found = sharded.model(inputs)
            whole = Model("odd")
            for target, parameter in zip(whole.parameters(), sharded.model.parameters(), strict=True):
                target.copy_(parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter)
            return bool(torch.allclose(found, whole(inputs), atol=1e-6))


def test_weights_that_were_gathered_ahead_are_let_go() -> None:
    assert all(run_ranks(_prefetched, 4))


def _levels(rank: int) -> tuple[tuple[int, ...], tuple[int, int] | None]:
    """HSDP inside hosts, averaging between them: all ranks of a host act together."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("hosts", "replicate", "shard"))
    model = Model("odd")
    fully_shard(model, mesh=mesh["replicate", "shard"])
    with pytest.raises(LocalSGDError, match=r"along dimensions \[0, 1\].*say which"):
        find_replicas(model, None)
    replicas = find_replicas(model, mesh.get_group("hosts"))
    assert replicas is not None
    return replicas.inside, replicas.part


def test_three_levels() -> None:
    for rank, (inside, part) in enumerate(run_ranks(_levels, 8)):
        assert inside == tuple(range(rank // 4 * 4, rank // 4 * 4 + 4))
        assert part == (rank % 4, 4)


class StandIn(SimpleNamespace):
    """Accelerate has no FSDP on CPUs: its part in save_state and load_state, as LocalSGD sees it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(distributed_type=DistributedType.FSDP, is_fsdp2=True, sync_gradients=True)
        self._optimizers, self._custom_objects, self.hooks = [optimizer], [], []

    def register_save_state_pre_hook(self, hook: Any) -> Any:
        self.hooks.append(hook)
        return SimpleNamespace(remove=lambda: None)

    register_load_state_pre_hook = register_save_state_pre_hook

    def save(self, folder: Path) -> None:
        self.hooks[0]([], [], str(folder))
        if dist.get_rank() == 0:
            torch.save(self._custom_objects[0].state_dict(), folder / "custom_checkpoint_0.pkl")
        dist.barrier()

    def load(self, folder: Path) -> None:
        self.hooks[1]([], str(folder))
        state = torch.load(folder / "custom_checkpoint_0.pkl", weights_only=False)
        self._custom_objects[0].load_state_dict(state)


def _adam(anchors: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(anchors, lr=1e-3)


OUTERS = {"DiLoCo": DiLoCo(), "a callable": _adam}


def _saved_by_accelerate(rank: int, outer: str, folder: str, replicas: int, loads: bool) -> dict[str, bytes]:
    """What the outer optimizer keeps on this rank: when saved, or after loading."""
    sharded = Sharded("HSDP", replicas, "whole", "AdamW")
    accelerator: Any = StandIn(sharded.optimizer)
    local_sgd = LocalSGD(accelerator, sharded.model, INTERVAL, outer=OUTERS[outer])
    accelerator._custom_objects.append(local_sgd)
    if loads:
        accelerator.load(Path(folder))
    else:
        with local_sgd:
            for step in range(1, 10):
                sharded.train(step)
                local_sgd.step()
            accelerator.save(Path(folder))
    state = local_sgd.state_dict()
    return {k: bits(local(v)) for k, v in state.items() if k.startswith(("momentum.", "outer."))}


@pytest.mark.parametrize("outer", OUTERS)
@pytest.mark.filterwarnings("ignore:the checkpoint was saved by fewer ranks")
def test_each_rank_takes_up_the_state_of_its_own_shard(outer: str, tmp_path: Path) -> None:
    """All shards are of one shape, so that another rank's would fit; and there may be more replicas than there were."""
    saved = run_ranks(_saved_by_accelerate, 4, outer, str(tmp_path), 2, False)
    assert saved[0] != saved[1]
    assert saved[:2] == saved[2:]
    assert run_ranks(_saved_by_accelerate, 4, outer, str(tmp_path), 2, True) == saved
    assert run_ranks(_saved_by_accelerate, 6, outer, str(tmp_path), 3, True) == [*saved, *saved[:2]]


def _replicated(rank: int) -> None:
    module = pytest.importorskip(
        "torch.distributed._composable.replicate_with_fsdp", reason="NOT RUN: this torch has no such replicate()"
    )
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Linear(3, 3)
    module.replicate(model, mesh=mesh)
    with pytest.raises(NotImplementedError, match="went through replicate"):
        LocalSGD(None, model, 2)


def test_replicate_is_refused() -> None:
    run_ranks(_replicated, 2)
