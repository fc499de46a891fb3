"""LocalSGD over torchft: replicas are killed, come back and heal, and the others go on. Accelerate's helper ends instead."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from localsgd_ext import DiLoCo, OuterSGD, SlowMo

from .groups import Broken
from .local_steps import BUCKET_MB, drift, everything
from .ranks import RanksFailed, run_ranks
from .tensors import DTYPES, OddModel, bits, values
from .torchft_replicas import Replica, lighthouse, run_replicas

pytest.importorskip("torchft", reason="NOT RUN: torchft is not installed")

H, ROUNDS = 4, 7
VICTIM = 1
QUORUMS = pytest.mark.parametrize("use_async_quorum", [True, False], ids=["async", "sync"])
State = dict[str, torch.Tensor]


def held(model: nn.Module) -> State:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def small_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def wait_for(path: Path, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} did not come"
        time.sleep(0.02)


def _dying(manager: Any, number: int, folder: str, outer: OuterSGD | None, victim: int, dies: str) -> dict[str, Any]:
    """Trains until manager step `ROUNDS`. The victim kills itself in its third round, unless it is there for the second time.

    Each round that is committed here goes to a file: the manager's step, steps of training in it, state before and after, and
    how many replicas took part.
    """
    from localsgd_ext.integrations.torchft import LocalSGD

    killed, returned = Path(folder) / "killed", Path(folder) / "returned"
    again = number == victim and killed.exists()
    torch.manual_seed(100 * number + again)  # each begins with other weights
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    local_sgd = LocalSGD(manager, model, optimizer, H, outer=outer, bucket_mb=BUCKET_MB)
    addresses = [tensor.data_ptr() for tensor in model.state_dict().values()]
    if again:
        threading.Timer(1.0, returned.touch).start()  # when the lighthouse has heard of it, which waits for it then
    else:  # the lighthouse would begin with two
        (Path(folder) / f"ready-{number}").touch()
        for other in range(3):
            wait_for(Path(folder) / f"ready-{other}")
        time.sleep(1.0)  # some heartbeats

    def die() -> None:
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)

    since = step = 0
    with local_sgd:
        began, begun_at = held(model), manager.current_step()
        while manager.current_step() < ROUNDS:
            if manager.current_step() == 5:  # by then the two have averaged twice without the third
                wait_for(returned)
            step, since = step + 1, since + 1
            model(values((4, 6), torch.float32, step, number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == victim and not again and manager.current_step() == 3:
                if dies == "in mid-window" and since == 2:
                    die()
                if dies == "in an averaging" and since == H:
                    _at_call(manager, 3, die)
            before, syncs = held(model), local_sgd.num_syncs
            local_sgd.step()
            if local_sgd.num_syncs > syncs:
                entry = manager.current_step(), since, before, held(model), local_sgd.num_participants
                torch.save(entry, Path(folder) / f"{number}-{manager.current_step()}.round")
                since = 0
    assert addresses == [tensor.data_ptr() for tensor in model.state_dict().values()]
    steps = tuple(state["step"].item() for state in optimizer.state.values())
    return {
        "began": began,
        "begun_at": begun_at,
        "ended": everything(model),
        "counters": (local_sgd.num_steps, local_sgd.num_syncs, manager.current_step(), steps),
    }


def _at_call(manager: Any, number: int, do: Callable[[], None]) -> None:
    """All-reduce `number` from now on does that instead."""
    calls, whole = iter(range(1, 1000)), manager.allreduce
    manager.allreduce = lambda *args, **kwargs: do() if next(calls) == number else whole(*args, **kwargs)


def _check_rounds(folder: Path, outer: OuterSGD | None, anchor: State) -> dict[int, list[Any]]:
    """Each average is, in float64, the mean of those that trained in that round, or the outer step by their mean progress."""
    parameters = dict(small_model().named_parameters())
    momentum = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in anchor.items()}
    wide = {name: tensor.double() for name, tensor in anchor.items()}
    rounds: dict[int, list[Any]] = {step: [] for step in range(2, ROUNDS + 1)}
    for path in sorted(folder.glob("*.round")):
        entry = torch.load(path)
        rounds[entry[0]].append(entry)
    for entries in rounds.values():
        assert {participants for *_, participants in entries} == {len(entries)}
        for name in anchor:
            after = entries[0][3][name]
            assert all(bits(after) == bits(entry[3][name]) for entry in entries)
            if not after.is_floating_point():
                continue
            mean = sum(entry[2][name].double() for entry in entries) / len(entries)
            if outer is not None and name in parameters:
                d = mean - wide[name]
                momentum[name] = m = outer.momentum * momentum[name] + d
                mean = wide[name] + outer.lr * (d + outer.momentum * m if outer.nesterov else m)
                wide[name] = mean
            torch.testing.assert_close(after.double(), mean, atol=1e-6, rtol=0)
    return rounds


@pytest.mark.parametrize(
    ("victim", "dies", "use_async_quorum", "outer"),
    [
        (0, "in mid-window", True, None),  # whose store the others meet at
        (1, "in mid-window", False, DiLoCo()),
        (2, "in an averaging", True, SlowMo()),
        (0, "in an averaging", False, None),
    ],
    ids=[
        "in mid-window, async, mean",
        "in mid-window, sync, DiLoCo",
        "in an averaging, async, SlowMo",
        "in an averaging, sync, mean",
    ],
)
def test_a_killed_replica_comes_back(
    tmp_path: Path, victim: int, dies: str, use_async_quorum: bool, outer: OuterSGD | None
) -> None:
    survivors = [number for number in range(3) if number != victim]
    settings = {"manager_options": {"use_async_quorum": use_async_quorum}}
    args = str(tmp_path), outer, victim, dies
    with lighthouse() as address, ExitStack() as stack:
        replicas = [Replica(address, _dying, number, *args, **settings) for number in range(3)]
        for replica in replicas:
            stack.callback(replica.kill)
        assert replicas[victim].join() == -signal.SIGKILL
        for number in survivors:
            wait_for(tmp_path / f"{number}-5.round")
        replicas[victim] = Replica(address, _dying, victim, *args, **settings)
        stack.callback(replicas[victim].kill)
        results = [replica.result() for replica in replicas]

    assert len({result["ended"] for result in results}) == 1
    assert len({result["counters"] for result in results}) == 1
    assert results[victim]["begun_at"] == 6
    assert all(results[number]["begun_at"] == 1 for number in survivors)
    first, last = (results[number]["began"] for number in survivors)
    assert all(bits(first[name]) == bits(last[name]) for name in first), "other weights at the start"
    rounds = _check_rounds(tmp_path, outer, first)
    assert [len(entries) for entries in rounds.values()] == [3, 3, 2, 2, 2, 3]
    began = {entry[1] for entry in rounds[4]}
    assert began == {2 * H if dies == "in an averaging" else H}, "what was not committed counts in the next average"


@QUORUMS
@pytest.mark.parametrize("outer", [None, DiLoCo()], ids=["mean", "DiLoCo"])
def test_three_without_failures(use_async_quorum: bool, outer: OuterSGD | None) -> None:
    results = run_replicas(_averaging, 3, outer, manager_options={"use_async_quorum": use_async_quorum})
    began, last, momentum = {}, dict(results[0]["began"]), {}
    for entries in zip(*(result["rounds"] for result in results), strict=True):
        for name in entries[0][0]:
            befores, afters = ([entry[which][name] for entry in entries] for which in (0, 1))
            assert len({bits(after) for after in afters}) == 1
            if not afters[0].is_floating_point() and not afters[0].is_complex():
                assert bits(afters[0]) == bits(befores[0]), "integers follow the first"
                continue
            wide = torch.complex128 if afters[0].is_complex() else torch.float64
            mean = sum(before.to(wide) for before in befores) / 3
            if outer is not None and name in results[0]["trained"]:
                # 16-bit weights begin a round as the anchor rounds to them, and the anchor goes on unrounded.
                d = mean - last[name].to(wide)
                momentum[name] = m = outer.momentum * momentum.get(name, 0) + d
                began[name] = mean = began.get(name, last[name].to(wide)) + outer.lr * (d + outer.momentum * m)
            last[name] = afters[0]
            eps = torch.finfo(afters[0].dtype).eps
            # An anchor of up to 8 rounds by 2.4e-7 in each operation, and these add up over three rounds.
            atol = max(1e-6 if outer is None else 4e-6, 8 * eps)
            torch.testing.assert_close(afters[0].to(wide), mean, atol=atol, rtol=8 * eps if eps > 1e-6 else 0)
    assert len({bits(result["frozen"]) for result in results}) == 1
    for result in results:
        assert result["same places"]
        # Of 40 odd and 300 small tensors.
        assert result["collectives"] == results[0]["collectives"] < 60


def _averaging(manager: Any, number: int, outer: OuterSGD | None) -> dict[str, Any]:
    """Three rounds of many tensors; what was held before and after each."""
    from localsgd_ext.integrations.torchft import LocalSGD

    model = OddModel(DTYPES, number)
    for index in range(300):
        model.register_parameter(f"small_{index}", nn.Parameter(values((3, 1 + index % 7), torch.float32, 500 + index, number)))
    model.register_parameter("frozen", nn.Parameter(values((4,), torch.float32, 99, number), requires_grad=False))
    model.register_parameter("tied", model.small_0)
    model.register_buffer("mean", values((5,), torch.float32, 77, number))
    model.register_buffer("count", torch.tensor(100 + number))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local_sgd = LocalSGD(manager, model, optimizer, 2, outer=outer, bucket_mb=BUCKET_MB)
    places = [(tensor.data_ptr(), tensor.stride()) for tensor in model.state_dict().values()]
    whole, calls = manager.allreduce, []
    manager.allreduce = lambda *args, **kwargs: (calls.append(args[0].numel()), whole(*args, **kwargs))[1]
    rounds = []
    with local_sgd:
        began = held(model)
        for step in range(6):
            drift(nn.ParameterList(filter(lambda each: each.requires_grad, model.parameters())), number, step, size=1.0)
            model.count += 1 + number
            model.mean += number
            before, syncs, count = held(model), local_sgd.num_syncs, len(calls)
            local_sgd.step()
            assert (local_sgd.num_syncs > syncs) == (step % 2 == 1)
            if step % 2:
                rounds.append((before, held(model)))
                collectives = len(calls) - count
                assert local_sgd.num_participants == 3
    assert local_sgd.num_syncs == manager.current_step() == 4, "nothing was left to average at the end"
    return {
        "began": began,
        "rounds": rounds,
        "trained": [name for name, each in model.named_parameters(remove_duplicate=False) if each.requires_grad],
        "frozen": model.frozen.detach(),
        "same places": places == [(tensor.data_ptr(), tensor.stride()) for tensor in model.state_dict().values()],
        "collectives": collectives,
    }


@pytest.mark.parametrize("fails", ["when waited for", "when started"])
def test_a_collective_that_fails_in_the_middle(fails: str) -> None:
    results = run_replicas(_failing, 3, fails, manager_options={"use_async_quorum": fails == "when started"}, limit=90.0)
    committed = [result["committed"] for result in results]
    # Where one alone sees the failure, the others have the average; where its part of later ones is missing, nobody has.
    assert committed == ([True, False, True] if fails == "when waited for" else [False] * 3)
    means = {name: sum(result["before"][name].double() for result in results) / 3 for name in results[0]["before"]}
    for result in results:
        for name, after in result["after"].items():
            if result["committed"]:
                torch.testing.assert_close(after.double(), means[name], atol=1e-6, rtol=0)
            else:
                assert bits(after) == bits(result["before"][name])
        assert result["at the end"] == results[0]["at the end"]
        assert result["syncs"] == results[0]["syncs"]


def _break(group: Any, number: int, fails: str) -> None:
    """All-reduce `number` from now on fails, and those after it do not."""
    whole, calls = group.allreduce, iter(range(1, 1000))

    def allreduce(tensors: list[torch.Tensor], options: object) -> Any:
        fail = next(calls) == number
        if fail and fails == "when started":
            raise ConnectionError("connection reset by peer")
        work = whole(tensors, options)
        return Broken(work) if fail else work

    group.allreduce = allreduce


def _failing(manager: Any, number: int, fails: str) -> dict[str, Any]:
    """One round in which replica 1 fails in the fourth of many collectives, and two more."""
    from localsgd_ext.integrations.torchft import LocalSGD

    model = nn.ParameterList([nn.Parameter(values((600,), torch.float32, index, number)) for index in range(20)])
    local_sgd = LocalSGD(manager, model, torch.optim.SGD(model.parameters(), lr=0.1), 1, bucket_mb=BUCKET_MB)
    with local_sgd:
        if number == 1:
            _break(manager._pg, 4, fails)
        drift(model, number, 1, size=1.0)
        before, syncs = held(model), local_sgd.num_syncs
        local_sgd.step()
        after, committed = held(model), local_sgd.num_syncs > syncs
        for salt in (2, 3):
            drift(model, number, salt, size=1.0)
            local_sgd.step()
    return {
        "before": before,
        "after": after,
        "committed": committed,
        "at the end": everything(model),
        "syncs": (local_sgd.num_syncs, manager.current_step()),
    }


@QUORUMS
def test_a_replica_of_another_model_does_not_end_the_run(tmp_path: Path, use_async_quorum: bool) -> None:
    options = {"manager_options": {"use_async_quorum": use_async_quorum}}
    with lighthouse() as address, ExitStack() as stack:
        replicas = []
        for number in range(3):
            if number == 2:
                wait_for(tmp_path / "begun")
            replicas.append(Replica(address, _among_others, number, str(tmp_path), **options))
            stack.callback(replicas[-1].kill)
        with pytest.raises(RanksFailed, match=r"LayoutMismatchError: (this replica's tensors|the state is not one of)"):
            replicas[2].result()
        replicas[2].kill()
        (tmp_path / "gone").touch()
        results = [replica.result() for replica in replicas[:2]]
    assert results[0] == results[1]


def _among_others(manager: Any, number: int, folder: str) -> bytes:
    from localsgd_ext.integrations.torchft import LocalSGD

    model = nn.Linear(3, 2 + number // 2)
    with LocalSGD(manager, model, torch.optim.SGD(model.parameters(), lr=0.1), 1) as local_sgd:
        (Path(folder) / "begun").touch()
        while manager.current_step() < 12:
            if manager.current_step() == 8:
                wait_for(Path(folder) / "gone")
            drift(model, number, manager.current_step())
            time.sleep(0.2)
            local_sgd.step()
    return everything(model)


def test_where_accelerate_ends() -> None:
    """The same loop with Accelerate's helper: where one rank is killed, the others raise or hang."""
    begun = time.monotonic()
    with pytest.raises(RanksFailed) as failed:
        run_ranks(_accelerate, 3, limit=15.0, lost=VICTIM)
    assert time.monotonic() - begun < 30
    first, last = str(failed.value).split("rank 2: ")
    for survivor in (first, last):
        assert re.search("closed by peer|reset by peer|[Tt]imed out|did not end in time", survivor), survivor


def _accelerate(rank: int) -> None:
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD

    accelerator = Accelerator(cpu=True)
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    model, optimizer = accelerator.prepare(model, optimizer)
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=H, enabled=True) as local_sgd:
        for step in range(ROUNDS * H):
            accelerator.backward(model(values((4, 6), torch.float32, step, rank)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if rank == VICTIM and step == 2 * H + 2:
                os.kill(os.getpid(), signal.SIGKILL)
            local_sgd.step()
