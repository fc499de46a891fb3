"""The questions of `benchmarks.features`: each is asked by a function that runs in every process of a contestant."""

from __future__ import annotations

import functools
import os
import re
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import contestants
from .contestants import OURS, TORCH, TORCHFT, Outcome, World, loop

CAUSE = "a bad batch"


def ask(contestant: str, function: Callable[..., Any], *args: Any, ranks: int = 2) -> list[Outcome]:
    return contestants.run(contestant, function, *args, ranks=ranks, min_replicas=1 if contestant == TORCHFT else None)


def answer(contestant: str, function: Callable[[World], str]) -> str:
    """What rank 0 says, where nothing is expected to fail."""
    outcomes = ask(contestant, function)
    return problem(outcomes) or outcomes[0].value


def problem(outcomes: list[Outcome]) -> str | None:
    """For rows in which nothing should fail: what did, or None."""
    for outcome in outcomes:
        if outcome.kind == "hangs":
            return "hangs"
        if outcome.kind != "result":
            return f"error: {short(outcome)}" if outcome.kind == "error" else f"dies with {outcome.value}"
    return None


def short(outcome: Outcome) -> str:
    """The first sentence of the error, without addresses."""
    text = str(outcome.value).strip().splitlines()[0]
    if re.search("(closed|reset) by peer", text):  # which of them it is differs from run to run
        return f"{text.split(':')[0]}: connection lost"
    if message := re.search(r'message: "([^"]*)"', text):  # as torchft's core has it
        return f"{text.split(':')[0]}: {message[1]}"
    return re.split(r"[.(](?:\s|$)", re.sub(r"\[[^\]]*\](:\d+:?)?\s*", "", text))[0].strip()[:90]


def simple(function: Callable[[World], str]) -> Callable[[str], str]:
    return lambda contestant: answer(contestant, function)


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def bytes_sent(world: World, average: Callable[[], object], model: nn.Module) -> float:
    """Bytes that a rank sends in one averaging, counted on `lo`: the least of four, since all else that travels there only adds
    to it."""
    counts = []
    for _ in range(4):
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.rand_like(parameter))
        world.barrier.wait()
        before = _lo()
        world.barrier.wait()
        average()
        world.barrier.wait()
        counts.append(_lo() - before)
    return min(counts) / world.ranks


def _lo() -> int:
    """From /proc and not from /sys, which shows another network namespace's in one that was made by `unshare -n`."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split(":")[1].split()[8])
    raise KeyError("lo")


# What an averaging does to the model


def view(world: World) -> str:
    looped = loop(world, two_layers(), 1).warmed_up()
    parameter = looped.model[0].weight
    kept, place = parameter.detach(), parameter.data_ptr()
    looped.fill(world.rank)
    looped.step()
    assert parameter.mean() == 0.5, "not averaged"
    return "yes" if torch.equal(kept, parameter) and place == parameter.data_ptr() else "no"


def strides(world: World) -> str:
    model = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    looped = loop(world, model, 1, shape=(1, 4, 8, 8)).warmed_up()
    looped.fill(world.rank)
    looped.step()
    assert model.weight.mean() == 0.5, "not averaged"
    return "yes" if model.weight.is_contiguous(memory_format=torch.channels_last) else "no"


def frozen(world: World) -> str:
    model = nn.Sequential(nn.Linear(100, 100, bias=False), nn.Linear(100, 100_000, bias=False))
    model[1].requires_grad_(False)
    looped = loop(world, model, 1, shape=(1, 100)).warmed_up()
    megabytes = bytes_sent(world, looped.step, model) / 1e6
    return f"yes: {megabytes:.2f} MB sent" if megabytes < 1 else f"no: {megabytes:.0f} MB sent"


def batch_norm(world: World) -> str:
    looped = loop(world, nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), 2).warmed_up()
    looped.step()
    looped.step()
    statistics = looped.model[1].running_mean
    save(world, "after", statistics)
    if same(world, "after"):
        return "yes"
    looped.wrapped.eval()(torch.zeros(1, 4))
    save(world, "later", statistics)
    return "no; DDP makes them rank 0's in the next forward" if same(world, "later") else "no"


def save(world: World, name: str, tensor: torch.Tensor) -> None:
    torch.save(tensor.clone(), world.folder / f"{name}-{world.rank}")
    world.barrier.wait()


def same(world: World, name: str) -> bool:
    return torch.equal(*(torch.load(world.folder / f"{name}-{rank}") for rank in range(2)))


# Ranks that differ, and ranks that fail


def _uneven(world: World, evaluates: bool) -> tuple[list[float], float]:
    """The weights at the end, and the seconds of the longest step after rank 1 was done."""
    looped = loop(world, two_layers(), 2, lr=0.05)
    longest = 0.0
    with looped:
        for step in range(1, 1 + (5 if world.rank == 1 else 10)):
            begun = time.perf_counter()
            looped.step()
            if step > 5:
                longest = max(longest, time.perf_counter() - begun)
    if evaluates and world.rank == 1:
        world.wait_for("over")  # alive, and in no averaging
    world.mark("over")
    looped.end()
    return looped.weights(), longest


def uneven(contestant: str, evaluates: bool) -> str:
    outcomes = ask(contestant, _uneven, evaluates, ranks=3)
    if found := problem([outcomes[0], outcomes[2], outcomes[1]]):
        return found
    (first, longest), (done, _), (last, _) = (outcome.value for outcome in outcomes)
    if first != last:
        return "finishes, other weights on each"
    waits = f", a step waits {longest:.1f} s" if longest > 1 else ""
    return f"finishes, {'same weights' if first == done else 'other weights where there were 5'}{waits}"


def _failing(world: World, how: str) -> tuple[str | None, float, int]:
    """Rank 1 fails while rank 0 waits for it in the averaging of step 8. Of rank 0: its error, if any, when, and in which
    step."""
    looped = loop(world, two_layers(), 4, lr=0.01)
    step, seconds = 0, 0.0
    try:
        with looped:
            for step in range(1, 17):
                if step == 7 and world.rank == 1:
                    time.sleep(1)
                    world.fails_now()
                    if how == "killed":
                        os.kill(os.getpid(), signal.SIGKILL)
                    raise ValueError(CAUSE)
                looped.step()
                if step == 8:
                    seconds = world.since()
    except Exception as error:
        if world.rank == 1:
            raise
        return str(error), world.since(), step
    return None, seconds, step


@functools.cache
def failing(contestant: str, how: str) -> str:
    outcome = ask(contestant, _failing, how)[0]
    if found := problem([outcome]):
        return found
    text, seconds, step = outcome.value
    if text is None:
        return f"goes on alone after {seconds:.1f} s"
    # An address such as 127.0.0.1:4711 is none of a rank.
    named = ["rank 1"] if re.search(r"\brank\W*1\b", text, re.IGNORECASE) else []
    named += ["the cause"] if CAUSE in text else []
    error = f"error naming {' and '.join(named) or 'nobody'}"
    if step > 8:  # rank 1 has still averaged, on its way out, and rank 0 with it
        return f"its weights go into one more average, then {error}"
    return f"{error} {'within 0.1' if seconds < 0.1 else f'after {seconds:.1f}'} s"


def other_weights(world: World) -> str:
    looped = loop(world, two_layers(), 1)
    looped.fill(world.rank)  # after DDP has made them equal: such as a checkpoint that one rank alone has loaded
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with looped:
            looped.step()
    warned = any("rank" in str(each.message) for each in caught)
    weight = looped.weights()[0]
    if weight == 0.5:
        return f"the mean of both, {'with a warning' if warned else 'silent'}"
    # Whether torchft says anything about it is not looked at: its core logs, on standard error.
    found = {0.0: "rank 0's for all", 1.0: "rank 1's for all"}.get(weight, "something else")
    return f"{found}, with a warning" if warned else found


def _other_model(world: World) -> list[float]:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(1 + world.rank)))
    with loop(world, model, 1, ddp=False) as looped:
        looped.step()
        looped.step()
    return looped.weights()


def other_model(contestant: str) -> str:
    outcomes = ask(contestant, _other_model)
    kinds = [outcome.kind for outcome in outcomes]
    if "hangs" in kinds:
        return "hangs"
    if kinds == ["result"] * 2:
        return "silent"
    said = [_of_model(each) for each in outcomes]
    return f"{said[0]} on both ranks" if said[0] == said[1] else f"rank 0: {said[0]}; rank 1: {said[1]}"


def _of_model(outcome: Outcome) -> str:
    if outcome.kind == "result":
        return "goes on"
    if outcome.kind == "dies":
        return f"dies of {signal.Signals(-outcome.value).name}"
    kind, text = str(outcome.value).split(": ", 1)
    return f"{kind}{' of DDP' if 'DDP expects' in text else ''}{' naming the tensor' if '1.weight' in text else ''}"


def nan(world: World) -> str:
    looped = loop(world, two_layers(), 1).warmed_up()
    if world.rank == 1:
        looped.fill(float("nan"))
    world.barrier.wait()
    before = looped.weights()
    try:
        looped.step()
    except Exception as error:
        named = " naming the rank" if "rank 1" in str(error) else ""
        return f"{type(error).__name__}{named}, {'own' if looped.weights() == before else 'other'} weights kept"
    nans = torch.tensor(looped.weights()).isnan()
    return "silent: all NaN" if nans.all() else f"silent: {int(nans.sum())} of {len(nans)} NaN"


def _lost_one_of_three(world: World, integration: bool) -> tuple[list[float], float]:
    """The weights at the end, and the seconds of the longest step."""
    kind = contestants.OursOverTorchft if integration else contestants.Torchft
    longest = 0.0
    with kind(world, two_layers(), 2, lr=0.01) as looped:
        for step in range(1, 17):
            if step == 7 and world.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            begun = time.perf_counter()
            looped.step()
            if step >= 7:
                longest = max(longest, time.perf_counter() - begun)
    looped.end()
    return looped.weights(), longest


def goes_on(contestant: str) -> str:
    if contestant not in (OURS, TORCHFT):
        seen = failing(contestant, "killed")
        return seen if seen.startswith("goes on") else "no"
    outcomes = contestants.run(contestant, _lost_one_of_three, contestant == OURS, ranks=3, min_replicas=2)
    left = [outcomes[0], outcomes[2]]
    if found := problem(left):
        return found
    equal = "same" if left[0].value[0] == left[1].value[0] else "other"
    seconds = max(each.value[1] for each in left)
    return f"yes{', over torchft' if contestant == OURS else ''}: after {seconds:.1f} s, {equal} weights on the rest"


def _both_raise(world: World) -> str:
    looped = loop(world, two_layers(), 4)
    if looped.wrapped is looped.model:
        return "no DDP in it"
    try:
        with looped:
            looped.step()
            raise ValueError(CAUSE)
    except ValueError:
        pass
    looped.local_step()
    save(world, "gradient", looped.model[0].weight.grad)
    return "on again" if same(world, "gradient") else "off"


def _caught(world: World) -> bool:
    """Whether rank 0's gradients would travel again, after it has caught what the loss of rank 1 has raised."""
    looped = loop(world, two_layers(), 2)
    try:
        with looped:
            for step in range(8):
                if step == 3 and world.rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                looped.step()
    except Exception:
        return bool(looped.wrapped.require_backward_grad_sync)
    raise AssertionError("no exception")


def gradient_sync(contestant: str) -> str:
    alike = answer(contestant, _both_raise)
    if contestant == TORCH and alike == "off":
        return "off: its DDP hook stays"
    if alike != "on again":
        return alike
    lost = ask(contestant, _caught)[0]
    if lost.kind != "result":
        return f"{alike}; {problem([lost])} after a lost rank"
    return f"{alike}, {'also' if lost.value else 'but off'} after a lost rank"
