"""Sharded replicas that go on in new processes, through torch.distributed.checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from localsgd_ext import DiLoCo, LocalSGD

from .ranks import run_ranks
from .sharded_models import INTERVAL, Sharded, local
from .tensors import bits


def _adam(anchors: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(anchors, lr=1e-3)


RESUMED = {
    "plain": ("HSDP", torch.float32, {}),
    "int8": ("HSDP", torch.float32, {"wire": "int8", "outer": DiLoCo(), "fragments": 2, "overlap_steps": 1}),
    "bfloat16": ("HSDP", torch.bfloat16, {"outer": DiLoCo()}),
    "a callable": ("HSDP", torch.float32, {"outer": _adam, "fragments": 2}),
    "TP in bfloat16": ("TP", torch.bfloat16, {"wire": "int8", "outer": DiLoCo()}),
}
SAVED_AT = 9


def _checkpoint(sharded: Sharded, local_sgd: LocalSGD) -> dict[str, Any]:
    """Weights are one for all replicas, the state of the inner optimizer is each replica's own."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    return {
        "model": get_model_state_dict(sharded.model),
        "local_sgd": local_sgd,
        f"optimizer_{sharded.replica}": get_optimizer_state_dict(sharded.model, sharded.optimizer),
    }


def _end(sharded: Sharded, local_sgd: LocalSGD) -> dict[str, Any]:
    """All that a run goes on from: what differs after loading, if only in momentum, is seen."""
    kept = {name: bits(local(tensor)) for name, tensor in local_sgd.state_dict().items() if not name.startswith("report.")}
    return sharded.bits() | {f"local_sgd.{name}": value for name, value in kept.items()}


def _whole(rank: int, name: str, folder: str) -> tuple[dict[str, Any], list[str]]:
    import torch.distributed.checkpoint as dcp

    kind, dtype, options = RESUMED[name]
    sharded = Sharded(kind, 2, "large" if kind == "HSDP" else "even", "AdamW", dtype)
    with LocalSGD(None, sharded.model, INTERVAL, **options) as local_sgd:
        for step in range(1, SAVED_AT + 1):
            sharded.train(step)
            local_sgd.step()
        local_sgd.synchronize()
        split = [name for name, tensor in local_sgd.state_dict().items() if isinstance(tensor, DTensor)]
        dcp.save(_checkpoint(sharded, local_sgd), checkpoint_id=folder)
        for step in range(SAVED_AT + 1, 2 * SAVED_AT + 1):
            sharded.train(step)
            local_sgd.step()
    return _end(sharded, local_sgd), split


def _resumed(rank: int, name: str, folder: str) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict

    kind, dtype, options = RESUMED[name]
    sharded = Sharded(kind, 2, "large" if kind == "HSDP" else "even", "AdamW", dtype)
    with torch.no_grad():
        for parameter in sharded.model.parameters():
            parameter.zero_()  # all of it comes from the checkpoint
    local_sgd = LocalSGD(None, sharded.model, INTERVAL, **options)
    state = _checkpoint(sharded, local_sgd)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(sharded.model, state["model"])
    set_optimizer_state_dict(sharded.model, sharded.optimizer, state[f"optimizer_{sharded.replica}"])
    assert local_sgd.num_steps == SAVED_AT
    with local_sgd:
        for step in range(SAVED_AT + 1, 2 * SAVED_AT + 1):
            sharded.train(step)
            local_sgd.step()
    return _end(sharded, local_sgd)


@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.usefixtures("engine")
def test_a_distributed_checkpoint_resumes_with_the_same_bits(name: str, tmp_path: Path) -> None:
    whole = run_ranks(_whole, 4, name, str(tmp_path))
    assert run_ranks(_resumed, 4, name, str(tmp_path)) == [end for end, _ in whole]
    expected = [kept for kept in ("momentum", "anchor") if kept == "momentum" or RESUMED[name][1] is torch.bfloat16]
    for _, split in whole:
        # Each rank saves its shard: nothing of the size of the model is gathered.
        assert name in ("plain", "a callable") or {f"{kept}.first.weight" for kept in expected} <= set(split)
