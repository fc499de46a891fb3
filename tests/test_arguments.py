"""What the constructor refuses, and how it says so."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from localsgd_ext import Every, LocalSGD, LocalSGDError

from .ranks import run_ranks


@pytest.mark.parametrize("returned", [-1, 1.5, None, True, "3"])
def test_a_schedule_that_returns_nonsense(returned: object) -> None:
    accelerator: Any = SimpleNamespace(distributed_type="MULTI_CPU", sync_gradients=True)
    with (
        pytest.raises(ValueError, match=r"returned .* at step 0; it must return"),
        LocalSGD(accelerator, nn.Linear(1, 1), lambda _: returned),
    ):  # type: ignore[arg-type, return-value]
        pass


@pytest.mark.parametrize("steps", [0, -1])
def test_a_number_of_steps_below_one(steps: int) -> None:
    with pytest.raises(ValueError, match=f"whole number >= 1.*got {steps}"):
        LocalSGD(None, nn.Linear(1, 1), steps)


@pytest.mark.parametrize("steps", [None, "8", 2.5, True, 8.0])
def test_a_number_of_steps_of_another_type(steps: object) -> None:
    with pytest.raises(TypeError, match=r"whole number >= 1.*schedule.*got"):
        LocalSGD(None, nn.Linear(1, 1), steps)  # type: ignore[arg-type]


def test_what_an_integer_means() -> None:
    assert Every(8)(None) == 8  # type: ignore[arg-type]
    LocalSGD(None, nn.Linear(1, 1), torch.tensor(8))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "instead"), [("DEEPSPEED", "DDP"), ("MEGATRON_LM", "DDP"), ("FSDP", "FSDP2"), ("XLA", "DDP"), ("NO", None)]
)
@pytest.mark.parametrize("enabled", [True, False])
def test_kinds_of_training_that_cannot_be_averaged(kind: str, instead: str | None, enabled: bool) -> None:
    from accelerate import DistributedType

    accelerator: Any = SimpleNamespace(distributed_type=DistributedType(kind))
    if instead is None:
        LocalSGD(accelerator, nn.Linear(1, 1), 8, enabled)
    else:
        with pytest.raises(NotImplementedError, match=f"{kind}.*use .*{instead}"):
            LocalSGD(accelerator, nn.Linear(1, 1), 8, enabled)


def test_processes_that_accelerate_runs_alone_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator: Any = SimpleNamespace(distributed_type="NO")
    LocalSGD(accelerator, nn.Linear(1, 1), 8)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match=r"WORLD_SIZE is 2, but Accelerate runs each process alone"):
        LocalSGD(accelerator, nn.Linear(1, 1), 8)
    LocalSGD(accelerator, nn.Linear(1, 1), 8, enabled=False)


def _fsdp(rank: int) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    with pytest.raises(NotImplementedError, match=r"FSDP1.*use FSDP2"):
        LocalSGD(None, FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu")), 8)
    model = nn.Linear(4, 4)
    fully_shard(model)
    with pytest.raises(LocalSGDError, match=r"all 2 ranks of the model's .* hold parts of one replica.*two dimensions"):
        LocalSGD(None, model, 8)


def test_sharded_models_without_replicas_are_refused() -> None:
    run_ranks(_fsdp, 2)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("bucket_mb", "8"),
        ("bucket_mb", float("inf")),
        ("bucket_mb", True),
        ("count", "steps"),
        ("buffers", "mean"),
        ("nonfinite", "stop"),
        ("wire", "fp8"),
        ("state_device", "cuda"),
        ("backend", "cuda"),
        ("bucket_mb", 0),
        ("timeout", timedelta(0)),
    ],
)
def test_unknown_options_say_what_is_allowed(option: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"{option}.*(allowed|must be)"):
        LocalSGD(None, nn.Linear(1, 1), 8, **{option: value})  # type: ignore[arg-type]


def test_arguments_of_the_wrong_type_are_named() -> None:
    with pytest.raises(TypeError, match=r"accelerator must be .*got a Linear"):
        LocalSGD(nn.Linear(1, 1), None, 2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"model must be .*got a str"):
        LocalSGD(None, "model", 2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"timeout must be a datetime\.timedelta.*got 3"):
        LocalSGD(None, nn.Linear(1, 1), 2, timeout=3)  # type: ignore[arg-type]


def test_processes_that_were_never_joined_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LocalSGDError, match=r"WORLD_SIZE is 2.*init_process_group"):
        LocalSGD(None, nn.Linear(1, 1), 2)
    LocalSGD(None, nn.Linear(1, 1), 2, enabled=False)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert not LocalSGD(None, nn.Linear(1, 1), 2).enabled


def _part_of_the_model(rank: int) -> None:
    with pytest.raises(LocalSGDError, match=r"a part \('0'\) .*pass the DDP model itself"):
        LocalSGD(None, nn.Sequential(DistributedDataParallel(nn.Linear(1, 1))), 2)


def test_a_model_that_contains_a_ddp_model_is_refused() -> None:
    run_ranks(_part_of_the_model, 2)
