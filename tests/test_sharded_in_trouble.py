"""Sharded replicas that end early, break, fail, or are looked at in between."""

from __future__ import annotations

import os
import signal
import time
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import DistributedType
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial

from localsgd_ext import DiLoCo, LocalSGD, LocalSGDError, NonFiniteError

from .ranks import run_ranks
from .sharded_models import (
    INTERVAL,
    STEPS,
    Model,
    Sharded,
    Simulation,
    check_gradients,
    counted,
    inputs_of,
    local,
    train_and_see,
)
from .tensors import bits

KINDS = pytest.mark.parametrize("kind", ["HSDP", "TP"])
SIZES_OF = {"HSDP": "odd", "TP": "even"}


@pytest.mark.parametrize(("kind", "steps"), [("HSDP", (10, 7)), ("HSDP", (0, 5)), ("TP", (8, 10))])
@pytest.mark.usefixtures("engine")
def test_replicas_may_have_different_numbers_of_steps(kind: str, steps: tuple[int, ...]) -> None:
    """Who is done serves the others, whose weights then count alone."""
    simulation = Simulation(2, 2 if kind == "HSDP" else 1, SIZES_OF[kind]).run(*steps)
    results = run_ranks(train_and_see, 4, kind, 2, SIZES_OF[kind], "SGD", steps)
    for result in results:
        for step, weights in result["seen"].items():
            assert (weights - simulation.seen[step][result["replica"]]).abs().max() < 1e-5, step
    assert [result["bits"] for result in results[:2]] == [result["bits"] for result in results[2:]]


@pytest.mark.usefixtures("engine")
def test_they_may_with_all_that_there_is() -> None:
    options = {"outer": DiLoCo(), "wire": "int8", "fragments": 2, "overlap_steps": 1}
    results = run_ranks(train_and_see, 4, "HSDP", 2, "large", "small SGD", (11, 6), **options)
    assert [result["bits"] for result in results[:2]] == [result["bits"] for result in results[2:]]


def _sick(rank: int, kind: str, nonfinite: str) -> tuple[dict[str, bytes], dict[str, bytes], str]:
    """With a NaN in one shard of one replica. Gives what this rank held before and after, and what it was told."""
    sharded = Sharded(kind, 2, SIZES_OF[kind])
    local_sgd = LocalSGD(None, sharded.model, INTERVAL, nonfinite=nonfinite)
    own: dict[str, bytes] = {}

    def train() -> None:
        nonlocal own
        for step in range(1, INTERVAL + 1):
            sharded.train(step)
            if step == INTERVAL and rank == 3:
                local(sharded.model.first.bias.detach())[-1] = float("nan")
            own = sharded.bits()
            local_sgd.step()

    if nonfinite == "raise":
        with pytest.raises(NonFiniteError) as caught, local_sgd:
            train()
        assert local_sgd.num_syncs == 0
        if kind == "HSDP":
            with counted() as calls:
                sharded.train(0)
            assert any(between == {rank % 2, rank % 2 + 2} for _, between in calls), "its gradient sync is on again"
            return own, own, str(caught.value)
        return own, sharded.bits(), str(caught.value)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with local_sgd:
            train()
            after = sharded.bits()
            assert torch.isfinite(sharded.weights()).all()
            # Healed by it, it counts again.
            sharded.train(0)
            local_sgd.synchronize()
    assert torch.isfinite(sharded.weights()).all()
    return own, after, next(text for text in (str(each.message) for each in seen) if "left out" in text)


@KINDS
@pytest.mark.usefixtures("engine")
def test_a_nan_in_one_shard_is_an_error_on_every_rank(kind: str) -> None:
    results = run_ranks(_sick, 4, kind, "raise")
    for own, after, text in results:
        assert own == after, "nothing was averaged"
        assert "step 4" in text
    assert "'first.bias'" in results[3][2]


@KINDS
@pytest.mark.usefixtures("engine")
def test_a_nan_in_one_shard_excludes_the_replica(kind: str) -> None:
    """Half of the weights of a model that diverged are of no use to the others."""
    results = run_ranks(_sick, 4, kind, "exclude")
    for rank, (_, after, _) in enumerate(results):
        assert after == results[rank % 2][0], "as on the healthy replica before"


def _raising(rank: int, kind: str) -> tuple[str, str, tuple[int, ...], float]:
    """What this rank got, and how long after it was last well."""
    sharded = Sharded(kind, 2, SIZES_OF[kind])
    well = time.monotonic()
    try:
        with LocalSGD(None, sharded.model, INTERVAL) as local_sgd:
            for step in range(1, STEPS + 1):
                well = time.monotonic()
                sharded.train(step)
                if rank == 3 and step == 6:
                    raise ValueError("the loader is empty")
                local_sgd.step()
    except (ValueError, RuntimeError, LocalSGDError) as error:
        return type(error).__name__, str(error), getattr(error, "ranks", ()), time.monotonic() - well
    return "", "", (), 0.0


@KINDS
@pytest.mark.usefixtures("engine")
def test_a_rank_that_raises_leaves_nobody_waiting(kind: str) -> None:
    """Its replica is stuck in collectives of FSDP's own, which end with its process; the other replica is told by us."""
    results = run_ranks(_raising, 4, kind, limit=40)
    assert results[3][:2] == ("ValueError", "the loader is empty")
    for name, text, ranks, seconds in results[:3]:
        assert name, "went on to the end"
        assert name != "ValueError"
        assert seconds < 15
        if name == "PeerError":
            assert ranks, text
            assert set(ranks) <= {2, 3}, text
    # Which of the ranks of the other replica first sees what is a race, but one waits for no other than the culprit.
    assert any("rank 3 failed: ValueError: the loader is empty" in text for _, text, _, _ in results[:3]), results


def _killed(rank: int) -> tuple[str, str, tuple[int, ...]]:
    sharded = Sharded("HSDP", 2, "odd")
    try:
        with LocalSGD(None, sharded.model, INTERVAL) as local_sgd:
            for step in range(1, STEPS + 1):
                sharded.train(step)
                if rank == 3 and step == 6:
                    os.kill(os.getpid(), signal.SIGKILL)
                local_sgd.step()
    except RuntimeError as error:
        return type(error).__name__, str(error), getattr(error, "ranks", ())
    return "", "", ()


def test_a_killed_rank_is_named_in_the_other_replicas() -> None:
    """Rank 2 hears of it from FSDP first, and is no more to blame than they are."""
    results = run_ranks(_killed, 4, lost=3, limit=40)
    for name, text, ranks in results[:2]:
        assert (name, ranks) == ("PeerError", (3,)), text
    assert results[2][0], "went on to the end"


def _with_accelerate(rank: int) -> dict[str, bytes]:
    """Accelerate has no FSDP on CPUs: what LocalSGD looks at, as its Accelerator would show it."""
    sharded = Sharded("HSDP", 2, "odd")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    accelerator: Any = SimpleNamespace(
        distributed_type=DistributedType.FSDP,
        is_fsdp2=True,
        torch_device_mesh=mesh,
        sync_gradients=True,
        register_save_state_pre_hook=lambda hook: SimpleNamespace(remove=lambda: None),
        register_load_state_pre_hook=lambda hook: SimpleNamespace(remove=lambda: None),
    )
    local_sgd = LocalSGD(accelerator, sharded.model, INTERVAL)
    assert local_sgd._rounds is not None
    assert local_sgd._rounds._averager.groups.averaging is mesh.get_group("dp_replicate")
    with local_sgd:
        for step in range(1, STEPS + 1):
            sharded.train(step)
            local_sgd.step()
    with pytest.raises(NotImplementedError, match=r"FSDP1.*fsdp_version=2"):
        LocalSGD(SimpleNamespace(distributed_type=DistributedType.FSDP, is_fsdp2=False), sharded.model, INTERVAL)  # type: ignore[arg-type]
    return sharded.bits()


def test_the_replicate_group_is_that_of_accelerates_mesh() -> None:
    results = run_ranks(_with_accelerate, 4)
    assert results[:2] == results[2:]
    assert results[0] != results[1]


def _all_raise(rank: int, kind: str) -> dict[str, bytes]:
    sharded = Sharded(kind, 2, "odd")
    with pytest.raises(KeyError), LocalSGD(None, sharded.model, INTERVAL) as local_sgd:
        for step in range(1, 4):
            sharded.train(step)
            local_sgd.step()
        raise KeyError(rank)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the weights of ranks? .* differ from rank 0's")
        with LocalSGD(None, sharded.model, INTERVAL) as again:
            again.synchronize()
    calls = check_gradients(sharded, 0, range(4) if kind == "HSDP" else range(2 * sharded.replica, 2 * sharded.replica + 2))
    assert any(between == {rank % 2, rank % 2 + 2} for _, between in calls) == (kind == "HSDP")
    return sharded.bits()


@pytest.mark.parametrize("kind", ["HSDP", "FSDP"])
def test_gradients_are_synchronised_again_after_an_error(kind: str) -> None:
    results = run_ranks(_all_raise, 4, kind)
    assert results[:2] == results[2:]


def _evaluated(rank: int, kind: str) -> dict[str, torch.Tensor]:
    """Outputs for one input, each after a forward without backward, which leaves what the root holds gathered."""
    sharded = Sharded(kind, 2, "odd")
    outputs: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def look(name: str) -> None:
        outputs[name] = sharded.model(inputs_of("odd", 0, 99, torch.float32))

    look("before")
    with LocalSGD(None, sharded.model, INTERVAL) as local_sgd:
        for step in range(1, 4):
            sharded.train(step)
            local_sgd.step()
        look("own at 3")
        local_sgd.synchronize()
        look("synchronized")
        sharded.train(4)
        look("own at 4")
        local_sgd.step()
        look("step")
        for step in range(5, 7):
            sharded.train(step)
            local_sgd.step()
        look("own at 6")
        with local_sgd.averaged():
            look("averaged")
        look("own again")
    look("end")
    return outputs


@pytest.mark.parametrize("kind", ["HSDP", "FSDP"])
@pytest.mark.usefixtures("engine")
def test_an_evaluation_right_before_an_averaging(kind: str) -> None:
    simulation = Simulation(2, 2, "odd")
    expected: dict[str, list[torch.Tensor]] = {}

    @torch.no_grad()
    def look(name: str) -> None:
        expected[name] = [model(inputs_of("odd", 0, 99, torch.float64)) for model in simulation.models]

    def train(*steps: int) -> None:
        for step in steps:
            for replica in range(2):
                simulation.train(replica, step)

    look("before")
    train(1, 2, 3)
    look("own at 3")
    simulation.close()
    look("synchronized")
    train(4)
    look("own at 4")
    simulation.close()
    look("step")
    train(5, 6)
    look("own at 6")
    look("own again")
    simulation.close()
    look("averaged")
    look("end")
    results = run_ranks(_evaluated, 4, kind)
    for rank, outputs in enumerate(results):
        for name, output in outputs.items():
            assert (output - expected[name][rank // 2]).abs().max() < 1e-5, name
        assert bits(outputs["own again"]) == bits(outputs["own at 6"])
        assert bits(outputs["averaged"]) == bits(outputs["end"]) == bits(results[0]["end"])
    assert (results[0]["own at 6"] - results[2]["own at 6"]).abs().max() > 1e-3


def _one_replica(rank: int) -> None:
    for options in (
        {},
        {"mesh": init_device_mesh("cpu", (2,))},
        {"mesh": init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))},
    ):
        model = fully_shard(Model("odd"), **options)
        with pytest.raises(LocalSGDError, match="init_device_mesh"):
            LocalSGD(None, model, INTERVAL)


def test_a_model_sharded_over_all_ranks_has_nobody_to_average_with() -> None:
    run_ranks(_one_replica, 2)


def _partial(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Module()
    model.weight = nn.Parameter(DTensor.from_local(torch.ones(3), mesh["tp"], [Partial()]))
    with pytest.raises(LocalSGDError, match="Partial"):
        LocalSGD(None, model, INTERVAL)


def test_a_parameter_whose_value_is_a_sum_over_ranks_is_refused() -> None:
    run_ranks(_partial, 4)


def _wrong_group(rank: int) -> None:
    sharded = Sharded("HSDP", 2, "whole")
    for group in (sharded.mesh.get_group("shard"), dist.group.WORLD):
        with pytest.raises(LocalSGDError), LocalSGD(None, sharded.model, INTERVAL, process_group=group):
            pass


def test_a_group_that_holds_different_shards_is_refused() -> None:
    """Of the same shape they would be averaged with each other unseen."""
    run_ranks(_wrong_group, 4)
