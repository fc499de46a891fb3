"""Ranks that raise, are killed, stopped or missing: every other rank gets an error that names them, in seconds."""

from __future__ import annotations

import datetime
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from localsgd_ext import LocalSGD, LocalSGDError, PeerError, PeerTimeoutError
from localsgd_ext.backends import reference

from .ranks import run_ranks
from .tensors import bits, values

STEPS, INTERVAL = 20, 8


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    model(values((4, 6), torch.float32, step, rank)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _raising(rank: int, culprit: int, where: str) -> dict[str, Any]:
    """Trains until `culprit` raises; what this rank got for it, how long after reaching the averaging, and what works
    afterwards."""
    model = DistributedDataParallel(nn.Linear(6, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    local_sgd = LocalSGD(None, model, INTERVAL)
    at = {"first window": 5, "middle": 12, "last window": 18, "averaged": 12}[where]
    got: BaseException | None = None
    reached = 0.0
    try:
        with local_sgd:
            for step in range(1, STEPS + 1):
                _train(model, optimizer, rank, step)
                if where == "averaged" and step == at:
                    with local_sgd.averaged():
                        if rank == culprit:
                            raise ValueError("the loader is empty\nsecond line")
                elif rank == culprit and step == at:
                    raise ValueError("the loader is empty\nsecond line")
                reached = time.monotonic()
                local_sgd.step()
            reached = time.monotonic()
    except (ValueError, LocalSGDError) as error:
        got = error
    seconds = time.monotonic() - reached
    assert model.require_backward_grad_sync
    assert model.require_forward_param_sync
    # DDP's own sync, and another LocalSGD on the same group, work again.
    _train(model, optimizer, rank, 0)
    with LocalSGD(None, model, 2) as again:
        for step in range(4):
            _train(model, optimizer, rank, step)
            again.step()
    return {"kind": type(got).__name__, "text": str(got), "ranks": getattr(got, "ranks", None), "seconds": seconds,
            "weights": bits(model.module.weight)}  # fmt: skip


@pytest.mark.parametrize("where", ["first window", "middle", "last window", "averaged"])
@pytest.mark.parametrize(("ranks", "culprit"), [(2, 1), (2, 0), (4, 2)])
def test_a_rank_that_raises_is_named_on_all_others(engine: str, where: str, ranks: int, culprit: int) -> None:
    results = run_ranks(_raising, ranks, culprit, where)
    for rank, result in enumerate(results):
        if rank == culprit:
            assert (result["kind"], result["text"]) == ("ValueError", "the loader is empty\nsecond line")
        else:
            assert result["kind"] == "PeerError"
            assert result["ranks"] == (culprit,)
            assert result["text"] == f"rank {culprit} failed: ValueError: the loader is empty"
            assert result["seconds"] < 5
        assert result["weights"] == results[0]["weights"]


def _swallowing(rank: int) -> bytes:
    """A body that catches its own errors and goes on."""
    model = DistributedDataParallel(nn.Linear(6, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with LocalSGD(None, model, 4) as local_sgd:
        for step in range(10):
            try:
                if rank == 1 and step in (2, 7):
                    raise RuntimeError("a bad batch")
                _train(model, optimizer, rank, step)
            except RuntimeError:
                pass
            local_sgd.step()
    return bits(model.module.weight)


def test_a_body_that_swallows_its_errors_goes_on(engine: str) -> None:
    first, second = run_ranks(_swallowing, 2)
    assert first == second


def _outcome(body: Any) -> tuple[str, str, tuple[int, ...], float]:
    begun = time.monotonic()
    try:
        body()
    except LocalSGDError as error:
        return type(error).__name__, str(error), getattr(error, "ranks", ()), time.monotonic() - begun
    return "", "", (), time.monotonic() - begun


def _killed(rank: int, culprit: int, numel: int, wire: str) -> tuple[str, str, tuple[int, ...], float]:
    """With few elements the rank is gone before the averaging; with many it is killed from outside while that runs."""
    model = nn.ParameterList([nn.Parameter(torch.full((numel,), 1.0))])
    outcome = ("", "", (), 0.0)
    try:
        with LocalSGD(None, model, 1, wire=wire, timeout=datetime.timedelta(seconds=30)) as local_sgd:
            local_sgd.step()
            if rank == culprit:
                if numel < 1000:
                    os.kill(os.getpid(), signal.SIGKILL)
                subprocess.Popen(["sh", "-c", f"sleep 0.05; kill -9 {os.getpid()}"])
            for _ in range(100):
                outcome = _outcome(local_sgd.step)
                if outcome[0]:
                    raise PeerError(outcome[1], outcome[2])
    except PeerError:
        pass
    return outcome


@pytest.mark.parametrize(
    ("numel", "wire"),
    [(10, "parameter"), (30_000_000, "parameter"), (30_000_000, "int8")],
    ids=["in mid-window", "in mid-averaging", "between all-to-alls"],
)
@pytest.mark.parametrize(("ranks", "culprit"), [(2, 1), (4, 2), (4, 0)])
def test_a_killed_rank_is_named_within_seconds(engine: str, ranks: int, culprit: int, numel: int, wire: str) -> None:
    results = run_ranks(_killed, ranks, culprit, numel, wire, lost=culprit)
    for rank, outcome in enumerate(results):
        if rank != culprit:
            kind, text, named, seconds = outcome
            assert kind == "PeerError", text
            assert named == (culprit,), text
            assert f"rank {culprit}" in text
            assert seconds < 15


def _stopped(rank: int, seconds: float, timeout: float) -> tuple[str, str, tuple[int, ...], float]:
    """Rank 1 stops for a while in its window, as under a debugger."""
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(1.0)
    outcome = ("", "", (), 0.0)
    local_sgd = LocalSGD(None, model, 1, timeout=datetime.timedelta(seconds=timeout))
    try:
        with local_sgd:
            local_sgd.step()
            assert local_sgd.report is not None
            dist.barrier()  # nothing of that averaging is under way any more
            if rank == 1:
                subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
                os.kill(os.getpid(), signal.SIGSTOP)
            outcome = _outcome(local_sgd.step)
            if outcome[0]:
                raise PeerError(outcome[1], outcome[2])
            local_sgd.step()
    except PeerError:
        pass
    return outcome


def test_a_stopped_rank_that_comes_back_in_time_is_nothing(engine: str) -> None:
    assert [kind for kind, *_ in run_ranks(_stopped, 2, 5, 30)] == ["", ""]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_stopped_rank_is_named_at_the_timeout(engine: str, world_size: int) -> None:
    (kind, text, named, seconds), late, *others = run_ranks(_stopped, world_size, 6, 2)
    assert (kind, named) == ("PeerTimeoutError", (1,))
    assert "rank 1 did not arrive" in text
    assert "within 2 s" in text
    assert "last seen: rank 1 at step 1" in text
    assert 2 <= seconds < 6
    # Back again, it finds that the others have given up.
    assert late[0] == "PeerError"
    assert set(late[2]) <= {0, 2}
    assert all(other[2] == (1,) for other in others)


def _missing(rank: int, absent: int) -> str:
    model = nn.Linear(4, 4)
    local_sgd = LocalSGD(None, model, 1, timeout=datetime.timedelta(seconds=2))
    text = ""
    if rank != absent:
        with pytest.raises(PeerTimeoutError) as caught, local_sgd:
            pass
        assert caught.value.ranks == (absent,)
        text = str(caught.value)
    dist.barrier()
    return text


@pytest.mark.parametrize(("ranks", "absent"), [(2, 1), (3, 0)])
def test_a_rank_that_never_enters_is_named(ranks: int, absent: int) -> None:
    for rank, text in enumerate(run_ranks(_missing, ranks, absent)):
        assert rank == absent or f"rank {absent} did not enter LocalSGD within 2 s" in text


def _other_calls(rank: int) -> str:
    model = DistributedDataParallel(nn.Linear(4, 4))
    with pytest.raises(LocalSGDError) as caught, LocalSGD(None, model, 1) as local_sgd:
        if rank == 0:
            local_sgd.synchronize()
        else:
            local_sgd.step()
    return str(caught.value)


def test_ranks_that_meet_in_different_calls_are_told() -> None:
    for text in run_ranks(_other_calls, 2):
        assert "rank 1 in step(); rank 0 in synchronize()" in text


def _in_a_subgroup(rank: int) -> tuple[str, tuple[int, ...]]:
    """Two pairs that average apart from each other; rank 3 fails, and only its own pair hears of it, by its number in the
    world."""
    pair = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(1.0)
    try:
        with LocalSGD(None, model, 2, process_group=pair) as local_sgd:
            for step in range(8):
                if rank == 3 and step == 5:
                    raise ValueError("mine")
                local_sgd.step()
    except (PeerError, ValueError) as error:
        return str(error), getattr(error, "ranks", ())
    return "", ()


def test_ranks_are_named_by_their_number_in_the_world() -> None:
    nothing = ("", ())
    assert run_ranks(_in_a_subgroup, 4) == [nothing, ("rank 3 failed: ValueError: mine", (3,)), nothing, ("mine", ())]


def _late(rank: int) -> float:
    """Rank 1 comes when rank 0 has given up once; they meet at rank 0's second try."""
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight.fill_(1.0 + rank)
        model.bias.fill_(1.0)
    local_sgd = LocalSGD(None, model, 1, timeout=datetime.timedelta(seconds=1 if rank == 0 else 20))
    dist.barrier()
    if rank == 0:
        with pytest.raises(PeerTimeoutError), local_sgd:
            pass
    time.sleep(4)  # a store in a file counts whole seconds, and the second try waits no longer than the first
    with pytest.warns(UserWarning, match="the weights of rank 1 differ"), local_sgd:
        local_sgd.step()
    return model.weight[0, 0].item()


def test_ranks_that_missed_each_other_meet_at_the_next_try() -> None:
    assert run_ranks(_late, 2) == [1.0, 1.0]


def _broken_collective(rank: int) -> tuple[str, str]:
    """An averaging that fails on one rank alone, for a reason of its own."""
    model = nn.ParameterList([nn.Parameter(torch.ones(3_000_000))])
    local_sgd = LocalSGD(None, model, 1, backend="torch")
    before = model[0].detach().clone()
    try:
        with local_sgd:
            if rank == 1:
                reference.ReferenceBackend.average = _out_of_memory  # type: ignore[method-assign]
            local_sgd.step()
    except (RuntimeError, MemoryError) as error:
        assert torch.equal(model[0], before)
        return type(error).__name__, str(error)
    return "", ""


def _out_of_memory(*_: object) -> torch.Tensor:
    raise MemoryError("no room for 12 MB")


def test_an_averaging_that_fails_on_one_rank_alone_names_it_on_the_others() -> None:
    other, culprit = run_ranks(_broken_collective, 2)
    assert culprit == ("MemoryError", "no room for 12 MB")
    assert other[0] == "PeerError"
    assert "rank 1" in other[1]
    assert "MemoryError: no room for 12 MB" in other[1]


class _Endless(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        return index


def _with_a_forked_worker(rank: int) -> tuple[str, tuple[int, ...], float]:
    """A data loader's worker, forked inside the block, holds every connection open; and the failing process lives on."""
    model = DistributedDataParallel(nn.Linear(4, 4))
    begun = time.monotonic()
    outcome: tuple[str, tuple[int, ...]] = ("", ())
    loader = torch.utils.data.DataLoader(_Endless(), num_workers=1, multiprocessing_context="fork", persistent_workers=True)
    batches = None
    try:
        with LocalSGD(None, model, 2) as local_sgd:
            batches = iter(loader)
            for step in range(8):
                next(batches)
                if rank == 1 and step == 3:
                    time.sleep(1)  # until the other waits in the handshake
                    raise ValueError("mine")
                local_sgd.step()
    except (PeerError, ValueError) as error:
        outcome = str(error), getattr(error, "ranks", ())
    seconds = time.monotonic() - begun
    dist.barrier()
    return *outcome, seconds


def test_a_failure_is_heard_though_a_forked_worker_holds_the_connections_open() -> None:
    (text, named, seconds), (own, *_) = run_ranks(_with_a_forked_worker, 2, daemon=False)
    assert (text, named) == ("rank 1 failed: ValueError: mine", (1,))
    assert seconds < 15
    assert own == "mine"


def _two_groups(rank: int) -> tuple[str, tuple[int, ...]]:
    """An outer LocalSGD over {0, 1}, {2, 3} and an inner one over {0, 2}, {1, 3}; rank 2 fails."""
    outer_group = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    inner_group = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    models = [DistributedDataParallel(nn.Linear(4, 4)) for _ in range(2)]
    try:
        with (
            LocalSGD(None, models[0], 4, process_group=outer_group) as outer,
            LocalSGD(None, models[1], 2, process_group=inner_group) as inner,
        ):
            for step in range(12):
                if rank == 2 and step == 5:
                    raise ValueError("mine")
                inner.step()
                outer.step()
    except (PeerError, ValueError) as error:
        return str(error), getattr(error, "ranks", ())
    return "", ()


def test_a_failure_heard_in_another_group_is_passed_on() -> None:
    results = run_ranks(_two_groups, 4)
    assert results[2] == ("mine", ())
    assert results[0] == results[3] == ("rank 2 failed: ValueError: mine", (2,))
    assert "rank 2 failed: ValueError: mine" in results[1][0]


def _fresh_group(rank: int, folder: str) -> list[float]:
    """The process group is made anew on the same store, as after an error."""
    model = nn.Linear(2, 2)
    seen = []
    store = dist.FileStore(f"{folder}/again", 2)
    for attempt in range(2):
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.PrefixStore(str(attempt), store), rank=rank, world_size=2)
        with torch.no_grad():
            model.weight.fill_(1.0)
            model.bias.fill_(1.0)
        with LocalSGD(None, model, 1) as local_sgd:
            with torch.no_grad():
                model.weight.fill_(2.0 + rank + attempt)
            local_sgd.step()
        seen.append(model.weight[0, 0].item())
    return seen


def test_a_fresh_process_group_can_be_entered(tmp_path: Path) -> None:
    assert run_ranks(_fresh_group, 2, str(tmp_path)) == [[2.5, 3.5]] * 2
