"""Averaging in the background and in fragments: odd tensors, ranks that fail, schedules, and what changes meanwhile."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from localsgd_ext import DiLoCo, LocalSGD, OuterSGD, PeerError

from .local_steps import BUCKET_MB, drift, everything, parameters
from .ranks import run_ranks
from .tensors import values

SIZES = (900, 7, 300)


def _several_tables(rank: int, fragments: int, overlap: int, wire: str) -> list[set[float]]:
    model = nn.ParameterList([nn.Parameter(torch.zeros(3000)), nn.Parameter(torch.zeros(2000, dtype=torch.float64))])
    model.register_buffer("mean", torch.zeros(1500))
    with LocalSGD(None, model, 6, fragments=fragments, overlap_steps=overlap, wire=wire, bucket_mb=BUCKET_MB / 4) as local_sgd:
        for _ in range(24):
            with torch.no_grad():
                model[0] += rank + 1
                model[1] += rank + 11
            local_sgd.step()
    return [set(model[0].tolist()), set(model[1].tolist())]


@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize("wire", ["parameter", "float32", "int8"])
@pytest.mark.usefixtures("engine")
def test_fragments_of_several_tables(wire: str, overlap: int) -> None:
    """Whose buckets do not follow each other: no two of them may be in one staging buffer at a time."""
    for fragments in (2, 3):
        for first, second in run_ranks(_several_tables, 2, fragments, overlap, wire):
            assert first == {36.0}
            assert second == {276.0}


def _replaced(rank: int, at: int) -> bytes:
    model = parameters(*SIZES)
    with LocalSGD(None, model, 4, overlap_steps=2, outer=DiLoCo()) as local_sgd:
        for step in range(1, 12):
            drift(model, rank, step)
            if step == at:
                for parameter in model:
                    parameter.data = parameter.data.clone()
            local_sgd.step()
            if step == 4 == at - 4:
                for parameter in model:
                    parameter.data = parameter.data.clone()
    return everything(model)


def test_tensors_that_move_while_their_average_is_under_way() -> None:
    plain = run_ranks(_replaced, 2, 0)
    assert run_ranks(_replaced, 2, 5) == plain
    assert run_ranks(_replaced, 2, 8) == plain


class _Accumulating:
    """What is asked of an Accelerator: gradients are applied at every third call."""

    distributed_type = "MULTI_CPU"
    sync_gradients = False

    def register_save_state_pre_hook(self, hook: object) -> Any:
        return self

    register_load_state_pre_hook = register_save_state_pre_hook

    def remove(self) -> None: ...


def _meanwhile(rank: int, overlap: int, everyone: bool) -> float:
    """Only a buffer has changed when the averaging is due, and weights while it is under way."""
    model = parameters(9)
    model.register_buffer("mean", torch.zeros(2))
    accelerator = _Accumulating()
    with LocalSGD(accelerator, model, 2, outer=OuterSGD(0.5), overlap_steps=overlap) as local_sgd:  # type: ignore[arg-type]
        begin = model[0].detach().clone()
        for call in range(1, 5):
            with torch.no_grad():
                if everyone or rank == 0:
                    model.mean += 1
                accelerator.sync_gradients = call == 3
                if accelerator.sync_gradients:
                    model[0] += rank + 1
            local_sgd.step()
    return (model[0] - begin)[0].item()


@pytest.mark.parametrize("everyone", [True, False])
def test_weights_that_change_where_only_buffers_were_to_be_averaged(everyone: bool) -> None:
    for overlap in (0, 1):
        assert run_ranks(_meanwhile, 2, overlap, everyone) == pytest.approx([0.75, 0.75], abs=1e-6)


def _back_to_0(rank: int) -> bytes:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with LocalSGD(None, model, lambda ours: 4 if ours.num_steps < 4 else (0 if rank == 0 else 8), overlap_steps=3) as local_sgd:
        for step in range(9):
            model(values((5, 4), torch.float32, step, rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            local_sgd.step()
            assert model.require_backward_grad_sync == (step >= 3)
    return everything(model)


def test_no_rank_trains_on_before_it_knows_of_synchronous_steps() -> None:
    assert len(set(run_ranks(_back_to_0, 2))) == 1


def _signs(rank: int) -> bytes:
    """One rank serves, the other makes progress elsewhere."""
    model = nn.ParameterList([nn.Parameter(torch.full((300,), -0.0)), nn.Parameter(torch.full((3,), -torch.inf))])
    with LocalSGD(None, model, 2, overlap_steps=1, nonfinite="ignore") as local_sgd:
        for step in range(4 - rank):
            with torch.no_grad():
                model[0][0] += step
            local_sgd.step()
    assert model[1].isneginf().all()
    return everything(model)


def test_signs_and_infinities_arrive_as_they_are() -> None:
    assert len(set(run_ranks(_signs, 2))) == 1


class Noisy(nn.Module):
    """With all kinds of tensors that overlap has to deal with."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Parameter(torch.zeros(300, dtype=torch.bfloat16))
        self.wide = nn.Parameter(torch.zeros(5, dtype=torch.float64))
        self.complex = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
        self.gaps = nn.Parameter(torch.zeros(6, 8)[:, ::2])
        self.empty = nn.Parameter(torch.zeros(0))
        self.scalar = nn.Parameter(torch.zeros(()))
        self.tied = self.scalar
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("flag", torch.zeros(2, dtype=torch.bool))


@torch.no_grad()
def _move_all(model: Noisy, amount: float) -> None:
    for parameter in model.parameters():
        parameter += amount
    model.mean += amount
    model.count += 1


def _all_kinds(rank: int, backend: str) -> tuple[bytes, list[float]]:
    model = Noisy()
    with LocalSGD(None, model, 4, overlap_steps=2, backend=backend) as local_sgd:
        for step in range(6):
            _move_all(model, 2.0**-step * (rank + 1))
            local_sgd.step()
        # Taken after 4 steps, when the ranks had 1.875 and 3.75; and two steps of progress since, 3/64 of the whole.
        progress = (rank + 1) * (2.0**-4 + 2.0**-5)
        inside = [float(p.flatten()[0].real) - progress for p in model.parameters() if p.numel()]
        assert model.mean[0].item() == 2.8125, "buffers take the average alone"
    return everything(model), inside


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.usefixtures("native_binary")
def test_all_kinds_of_tensors(backend: str) -> None:
    (one, inside), (other, inside_other) = run_ranks(_all_kinds, 2, backend)
    assert one == other
    assert inside == pytest.approx([2.8125] * 5, abs=0.01)
    assert inside_other == pytest.approx([2.8125] * 5, abs=0.01)


def _with_ddp(rank: int) -> bool:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with LocalSGD(None, model, 6, overlap_steps=2, fragments=3, wire="int8") as local_sgd:
        for step in range(20 - rank):
            model(values((5, 4), torch.float32, step, rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            local_sgd.step()
            if step == 9:
                with local_sgd.averaged():
                    averaged = everything(model)
                gathered: list[Any] = [None, None]
                dist.all_gather_object(gathered, averaged)
                assert gathered[0] == gathered[1]
            if step == 13:
                assert local_sgd.synchronize() is not None
    return model.require_backward_grad_sync


def test_with_ddp_and_what_else_averages() -> None:
    assert run_ranks(_with_ddp, 2) == [True, True]


def _fails(rank: int, how: str) -> str:
    model = parameters(*SIZES)
    try:
        with LocalSGD(None, model, 4, overlap_steps=2) as local_sgd:
            for step in range(12):
                drift(model, rank, step)
                local_sgd.step()
                if rank == 1 and step == 8:
                    if how == "killed":
                        os.kill(os.getpid(), signal.SIGKILL)
                    raise RuntimeError("out of luck")
                time.sleep(0.01)
    except PeerError as error:
        assert all(p.isfinite().all() for p in model)
        return f"{type(error).__name__} {error}"
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("how", ["raises", "killed"])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.usefixtures("engine")
def test_a_rank_that_fails_while_something_is_under_way(how: str, world_size: int) -> None:
    results = run_ranks(_fails, world_size, how, lost=1 if how == "killed" else None, limit=40)
    for rank in {0, 2} & set(range(world_size)):
        assert "PeerError" in results[rank]
        assert "rank 1" in results[rank]


class Impatience(Exception):
    """What a signal's handler raises, as Ctrl-C does."""


def _interrupted(rank: int) -> tuple[str, list[str]]:
    model = parameters(*SIZES)
    try:
        with LocalSGD(None, model, 4, overlap_steps=1) as local_sgd:
            for step in range(8):
                drift(model, rank, step)
                if rank == 1 and step == 3:
                    time.sleep(3)  # the other one waits for what it has taken
                if rank == 0 and step == 4:

                    def give_up(*_: object) -> None:
                        raise Impatience

                    signal.signal(signal.SIGALRM, give_up)
                    signal.setitimer(signal.ITIMER_REAL, 0.5)
                local_sgd.step()
    except (Impatience, PeerError) as error:
        return f"{type(error).__name__} {error}", [thread.name for thread in threading.enumerate()]
    return "no error", []


def test_a_rank_that_is_interrupted_while_it_waits_for_what_is_under_way() -> None:
    (own, threads), (other, _) = run_ranks(_interrupted, 2, limit=40)
    assert own.startswith("Impatience")
    assert other.startswith("PeerError rank 0 failed: Impatience")
    assert "localsgd_ext" not in threads, "its thread has ended"


def _blocks(rank: int) -> list[int]:
    model = parameters(*SIZES)
    counts = []
    for _ in range(4):
        with LocalSGD(None, model, 4, overlap_steps=2) as local_sgd:
            for step in range(9):
                drift(model, rank, step)
                local_sgd.step()
        counts.append(len(dist.distributed_c10d._world.pg_map))
    return counts


def test_process_groups_are_used_again() -> None:
    for counts in run_ranks(_blocks, 2):
        assert set(counts) == {2}


def _nonfinite(rank: int) -> bytes:
    model = parameters(*SIZES)
    with LocalSGD(None, model, 4, overlap_steps=1, nonfinite="exclude") as local_sgd:
        for step in range(8):
            drift(model, rank, step)
            if rank == 1 and step == 3:
                with torch.no_grad():
                    model[0][5] = torch.nan
            local_sgd.step()
    assert all(p.isfinite().all() for p in model)
    return everything(model)


@pytest.mark.filterwarnings("ignore:NaN or inf")
def test_a_rank_with_nan_takes_the_average_of_the_others() -> None:
    assert len(set(run_ranks(_nonfinite, 3))) == 1
