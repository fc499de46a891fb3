"""A run that was saved, and goes on in new processes, ends with the same bits as the one that saved and went on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from localsgd_ext import QSR, DiLoCo, DriftTarget, LocalSGD, LocalSGDError, OuterSGD, SlowMo, Warmup

from .ranks import run_ranks
from .tensors import bits, values

SAVED_AT, STEPS = 27, 60


def _sgd(anchors: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(anchors, lr=1e-3)


def options(kind: str, optimizer: Any) -> dict[str, Any]:
    return {
        "plain": {"local_sgd_steps": 8},
        "int4": {"local_sgd_steps": 8, "wire": "int4"},
        "DiLoCo with int8": {"local_sgd_steps": 8, "wire": "int8", "outer": DiLoCo()},
        "Warmup and QSR": {"local_sgd_steps": Warmup(10, then=QSR(optimizer, base=3, alpha=0.05)), "outer": SlowMo()},
        "in the warm-up": {"local_sgd_steps": Warmup(40, then=8), "wire": "int8"},
        "DriftTarget": {"local_sgd_steps": DriftTarget(0.05, 2, 20), "outer": OuterSGD(0.9)},
        "AdamW outside": {"local_sgd_steps": 8, "outer": _sgd, "wire": "float16"},
        "bfloat16": {"local_sgd_steps": 8, "outer": DiLoCo()},
        # At 26 steps the first fragment is taken, and arrives at 28.
        "under way": {"local_sgd_steps": 8, "outer": DiLoCo(), "wire": "int8", "fragments": 4, "overlap_steps": 2},
        "AdamW under way": {"local_sgd_steps": 8, "outer": _sgd, "fragments": 2, "overlap_steps": 4},
    }[kind]


class Run:
    """The model, and 60 steps of AdamW under Accelerate, whose state differs between ranks."""

    def __init__(self, kind: str) -> None:
        from accelerate import Accelerator

        torch.manual_seed(0)
        dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
        self.accelerator = Accelerator(cpu=True)
        model = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 2)).to(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS * self.accelerator.num_processes)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, optimizer, scheduler)
        self.local_sgd = LocalSGD(self.accelerator, self.model, **options(kind, self.optimizer))
        self.accelerator.register_for_checkpointing(self.local_sgd)
        self._dtype = dtype

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            inputs = values((5, 6), self._dtype, step, self.accelerator.process_index)
            self.accelerator.backward(self.model(inputs).square().mean())
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.local_sgd.step()

    def end(self) -> list[bytes]:
        self.local_sgd._finish()
        rounds = self.local_sgd._rounds
        assert rounds is not None
        anchors = rounds._averager.anchors
        kept = [] if anchors is None else [*anchors.anchor, *anchors.momentum]
        return [bits(t) for t in (*self.model.state_dict().values(), *kept)] + [str(self.local_sgd.num_syncs).encode()]


def _whole(rank: int, kind: str, folder: str) -> list[bytes]:
    run = Run(kind)
    with run.local_sgd:
        run.train(0, SAVED_AT)
        run.accelerator.save_state(folder)
        run.train(SAVED_AT, STEPS)
        own = run.end()
    return own + run.end()


def _resumed(rank: int, kind: str, folder: str, inside: bool) -> list[bytes]:
    run = Run(kind)
    if not inside:
        run.accelerator.load_state(folder)
    with run.local_sgd:
        if inside:
            run.train(0, 3)  # all of it is replaced
            run.accelerator.load_state(folder)
        run.train(SAVED_AT, STEPS)
        own = run.end()
    return own + run.end()


@pytest.mark.parametrize("inside", [False, True], ids=["before the block", "inside the block"])
@pytest.mark.parametrize(
    "kind",
    [
        "plain",
        "int4",
        "DiLoCo with int8",
        "Warmup and QSR",
        "in the warm-up",
        "DriftTarget",
        "AdamW outside",
        "bfloat16",
        "under way",
        "AdamW under way",
    ],
)
@pytest.mark.usefixtures("engine")
def test_resuming_in_mid_window_ends_with_the_same_bits(kind: str, inside: bool, tmp_path: Path) -> None:
    whole = run_ranks(_whole, 2, kind, str(tmp_path), limit=100)
    resumed = run_ranks(_resumed, 2, kind, str(tmp_path), inside, limit=100)
    assert whole[0][-1:] == whole[1][-1:]
    assert resumed == whole


def _other_world(rank: int, folder: str) -> list[bytes]:
    run = Run("DiLoCo with int8")
    if rank == 2:
        with pytest.warns(UserWarning, match="saved by fewer ranks: rank 2 goes on with the inner optimizer state of rank 0"):
            run.accelerator.load_state(folder)
    else:
        run.accelerator.load_state(folder)
    assert (run.local_sgd.num_steps, run.local_sgd.num_syncs) == (SAVED_AT, 4)
    with run.local_sgd:
        anchors = run.local_sgd._rounds._averager.anchors
        assert any(each.any() for each in anchors.momentum)
        run.train(SAVED_AT, SAVED_AT + 5)
        assert run.local_sgd.num_syncs == 5
        return [bits(each) for each in (*anchors.anchor, *anchors.momentum)]


def test_another_number_of_ranks_takes_up_what_does_not_depend_on_it(tmp_path: Path) -> None:
    run_ranks(_whole, 2, "DiLoCo with int8", str(tmp_path))
    results = run_ranks(_other_world, 3, str(tmp_path))
    assert results[0] == results[1] == results[2]


def _without_ours(rank: int, folder: str) -> None:
    """A checkpoint from before the move to this package."""
    run = Run("DiLoCo with int8")
    run.accelerator._custom_objects.clear()
    run.accelerator.save_state(folder)
    dist.barrier()
    run = Run("DiLoCo with int8")
    with pytest.warns(UserWarning, match="holds no state of LocalSGD"):
        run.accelerator.load_state(folder)
    with run.local_sgd:
        run.train(0, 3)
        run.accelerator.save_state(folder + "/later")
    dist.barrier()
    assert (Path(folder) / "later" / "custom_checkpoint_0.pkl").is_file()


def test_a_checkpoint_without_our_state_loads_with_a_warning(tmp_path: Path) -> None:
    run_ranks(_without_ours, 2, str(tmp_path))


def _plain_torch(rank: int) -> None:
    model = nn.Linear(3, 2)
    torch.manual_seed(0)
    nn.init.normal_(model.weight)
    nn.init.zeros_(model.bias)
    with LocalSGD(None, model, 4, outer=DiLoCo(), wire="int8") as local_sgd:
        for step in range(6):
            with torch.no_grad():
                model.weight.add_(values((2, 3), torch.float32, step, rank))
            local_sgd.step()
        with pytest.raises(LocalSGDError, match=r"synchronize\(\) on all ranks"):
            local_sgd.state_dict()
        local_sgd.synchronize()
        state = local_sgd.state_dict()
    assert all(isinstance(value, torch.Tensor) for value in state.values()), "as safetensors wants it"
    assert {"momentum.weight", "momentum.bias", "num_steps", "report.drift"} <= state.keys()
    with pytest.warns(UserWarning, match="holds no state of LocalSGD"):
        local_sgd.load_state_dict({})
    other = LocalSGD(None, model, 4, outer=DiLoCo(), wire="int8")
    del state["momentum.bias"]
    other.load_state_dict(state)
    assert (other.num_steps, other.num_syncs, other.report.drift) == (6, 2, local_sgd.report.drift)
    with pytest.warns(UserWarning, match="holds no momentum .* 'bias' and 0 more"), other:
        pass


def test_without_accelerate() -> None:
    run_ranks(_plain_torch, 2)
