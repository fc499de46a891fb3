"""Replicas that are sharded over several ranks (HSDP, FSDP2, tensor parallel) against an independent simulation in one
process."""

from __future__ import annotations

import pytest

from localsgd_ext import DiLoCo, LocalSGD, Warmup

from .ranks import run_ranks
from .sharded_models import INTERVAL, STEPS, Sharded, Simulation, check_gradients, compare, counted, train_and_see


@pytest.mark.parametrize(
    ("kind", "replicas", "parts", "optimizer"),
    [("HSDP", 2, 2, "SGD"), ("HSDP", 2, 4, "AdamW"), ("HSDP", 3, 2, "SGD"), ("FSDP", 2, 2, "AdamW")],
)
@pytest.mark.usefixtures("engine")
def test_each_rank_keeps_its_shard_and_averages_it(kind: str, replicas: int, parts: int, optimizer: str) -> None:
    """In between it is ordinary FSDP inside each replica."""
    steps = (STEPS,) * replicas
    simulation = Simulation(replicas, parts, "odd", optimizer).run(*steps)
    results = run_ranks(train_and_see, replicas * parts, kind, replicas, "odd", optimizer, steps)
    compare(results, simulation, 1e-5, replicas)
    for result in results:
        assert result["drifts"] == pytest.approx(simulation.drifts, rel=1e-4), "of the whole model"
        assert result["drifts"] == results[0]["drifts"]
    assert len(simulation.drifts) == 3


@pytest.mark.parametrize(("wire", "optimizer", "bound"), [("parameter", "SGD", 1e-5), ("int8", "small SGD", 5e-4)])
@pytest.mark.parametrize(
    ("kind", "world_size", "given"),
    [("TP", 4, ""), ("TP", 4, "dp"), ("FSDP and TP", 8, "")],
    ids=["TP", "given", "FSDP and TP"],
)
@pytest.mark.usefixtures("engine")
def test_tensor_parallel(kind: str, world_size: int, given: str, wire: str, optimizer: str, bound: float) -> None:
    """What the plan does not split stays the same inside a replica, also where it travels in one block with other things on
    each rank."""
    simulation = Simulation(2, 1 if kind == "TP" else 2, "even", optimizer).run(STEPS, STEPS)
    results = run_ranks(train_and_see, world_size, kind, 2, "even", optimizer, (STEPS, STEPS), given, wire=wire)
    compare(results, simulation, bound, 2)
    for first, second in zip(results[::2], results[1::2], strict=True):
        assert first["alike"] == second["alike"], "ranks of one replica differ"
    for result in results:
        assert result["drifts"] == pytest.approx(simulation.drifts, rel=1e-4 if wire == "parameter" else 0.03), (
            "each element once"
        )
        assert result["drifts"] == results[0]["drifts"]


@pytest.mark.parametrize(
    ("fragments", "overlap", "wire", "bound"),
    [(1, 0, "parameter", 1e-5), (2, 1, "parameter", 1e-5), (2, 0, "int8", 3e-4), (2, 1, "int8", 3e-4)],
)
@pytest.mark.usefixtures("engine")
def test_diloco(fragments: int, overlap: int, wire: str, bound: float) -> None:
    steps = (5 * INTERVAL + 3,) * 2
    simulation = Simulation(2, 2, "large", "small SGD", (0.7, 0.9, True), fragments, overlap).run(*steps)
    options = {"wire": wire, "outer": DiLoCo(), "fragments": fragments, "overlap_steps": overlap}
    results = run_ranks(train_and_see, 4, "HSDP", 2, "large", "small SGD", steps, **options)
    compare(results, simulation, bound, 2)


@pytest.mark.usefixtures("engine")
def test_diloco_keeps_alike_what_tensor_parallel_does_not_split() -> None:
    """The plain parameters' momentum, too."""
    steps = (STEPS,) * 2
    simulation = Simulation(2, 1, "even", "small SGD", (0.7, 0.9, True)).run(*steps)
    results = run_ranks(train_and_see, 4, "TP", 2, "even", "small SGD", steps, wire="int8", outer=DiLoCo())
    compare(results, simulation, 5e-4, 2)
    for first, second in zip(results[::2], results[1::2], strict=True):
        assert first["alike"] == second["alike"], "ranks of one replica differ"


def _bytes_between_replicas(rank: int, kind: str) -> None:
    sharded = Sharded(kind, 2, "odd")
    replica = range(2 * sharded.replica, 2 * sharded.replica + 2)
    across = {rank % 2, rank % 2 + 2}
    everywhere = range(4) if kind == "HSDP" else replica
    local_sgd = LocalSGD(None, sharded.model, INTERVAL)

    def check_apart(step: int) -> None:
        calls = check_gradients(sharded, step, replica)
        with counted() as more:
            sharded.optimizer.step()
            local_sgd.step()
        if local_sgd.num_steps % INTERVAL:
            calls += more
        assert calls
        assert all(between <= set(replica) for _, between in calls), calls

    for epoch in range(2):  # what was on again is off again
        before = check_gradients(sharded, 0, everywhere)
        with local_sgd:
            for step in range(7 * epoch + 1, 7 * epoch + 8):
                check_apart(step)
        after = check_gradients(sharded, 0, everywhere)
        for calls in (before, after):
            assert any(between == across for _, between in calls) == (kind == "HSDP")
    with LocalSGD(None, sharded.model, INTERVAL, enabled=False) as disabled:
        check_gradients(sharded, 1, everywhere)
        disabled.step()


@pytest.mark.parametrize("kind", ["HSDP", "FSDP"])
@pytest.mark.usefixtures("engine")
def test_nothing_travels_between_replicas_but_averages(kind: str) -> None:
    run_ranks(_bytes_between_replicas, 4, kind)


def _warmup(rank: int, kind: str) -> list[dict[str, bytes]]:
    sharded = Sharded(kind, 2, "odd", "AdamW")
    held = []
    with LocalSGD(None, sharded.model, Warmup(3, then=INTERVAL)) as local_sgd:
        for step in range(1, 3 + INTERVAL + 1):
            sharded.train(step)
            local_sgd.step()
            held.append(sharded.bits())
    return held


@pytest.mark.parametrize("kind", ["HSDP", "FSDP"])
def test_a_warmup_trains_replicas_in_step(kind: str) -> None:
    """With its own gradient sync, or an averaging after every step."""
    results = run_ranks(_warmup, 4, kind)
    for first, second in zip(results[:2], results[2:], strict=True):
        assert [a == b for a, b in zip(first, second, strict=True)] == [True] * 3 + [False] * 3 + [True]
