"""`LocalSGDCallback` in a Trainer that fails, trains again, or cannot be trained so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from localsgd_ext import DiLoCo, LocalSGDError, PeerError, Warmup

from .ranks import run_ranks
from .trainers import LocalSGDCallback, equal_on_all_ranks, trainer_for, transformers, weights_of


class _Raises(transformers.TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise ZeroDivisionError("as planned")


def _again(rank: int, folder: str) -> None:
    callback, raises = LocalSGDCallback(3, outer=DiLoCo()), _Raises(-1)
    apart = {"average_tokens_across_devices": False, "logging_strategy": "no"}  # no collectives of the Trainer's own
    trainer = trainer_for(folder, callback, raises, max_steps=7, **apart)
    before = weights_of(trainer.model)
    for _ in range(2):
        trainer.train()
        assert (callback.local_sgd.num_steps, callback.local_sgd.num_syncs) == (7, 3)
        assert equal_on_all_ranks(weights_of(trainer.model))
        assert weights_of(trainer.model) != before
        before = weights_of(trainer.model)
    callback._local_sgd_steps = Warmup(100, then=3)  # synchronous steps, but the optimizers are those of before, and differ
    trainer.train()
    assert (callback.local_sgd.num_steps, callback.local_sgd.num_syncs) == (7, 7)
    callback._local_sgd_steps = 3

    raises.step = 4
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    raises.step = 4 if rank == 1 else -1
    with pytest.raises(PeerError if rank == 0 else ZeroDivisionError, match=r"rank 1.*ended with an exception|as planned"):
        trainer.train()
    raises.step = -1
    trainer.train()
    assert callback.local_sgd.num_steps == 7
    assert equal_on_all_ranks(weights_of(trainer.model))
    assert trainer.callback_handler.callbacks[-1] is callback
    assert sum(each is callback for each in trainer.callback_handler.callbacks) == 1
    assert "log" not in vars(trainer)


def test_trains_again_after_training_and_after_exceptions(tmp_path: Path) -> None:
    run_ranks(_again, 2, str(tmp_path))


def _loses_rank_1(rank: int, folder: str) -> None:
    class Ends(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if rank == 1 and state.global_step == 4:
                os._exit(1)

    callback = LocalSGDCallback(3)
    trainer = trainer_for(folder, Ends(), callback, average_tokens_across_devices=False, logging_strategy="no")
    with pytest.raises(PeerError, match="rank 1"):
        trainer.train()
    assert not callback.local_sgd.is_inside
    assert trainer.model_wrapped.require_backward_grad_sync
    assert "log" not in vars(trainer)


def test_a_lost_rank_is_named(tmp_path: Path) -> None:
    run_ranks(_loses_rank_1, 2, str(tmp_path), lost=1)


class _Changes(transformers.TrainerCallback):
    """Changes the Trainer right before training."""

    def __init__(self) -> None:
        self.change: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.change()


def _refuses(rank: int, folder: str) -> None:
    changes = _Changes()
    trainer = trainer_for(folder, changes, LocalSGDCallback(3), max_steps=2)
    states = trainer.accelerator.state
    for kind in ("DEEPSPEED", "FSDP"):
        changes.change = lambda kind=kind: setattr(states, "distributed_type", kind)
        with pytest.raises(NotImplementedError, match=f"does not work with DistributedType.{kind}: "):
            trainer.train()
        states.distributed_type = "NO"
    part = torch.nn.Parameter(dist.tensor.distribute_tensor(torch.ones(2), dist.device_mesh.init_device_mesh("cpu", (1,))))
    changes.change = lambda: trainer.model.register_parameter("part", part)
    with pytest.raises(NotImplementedError, match=r"'.*part' is a DTensor .*; use plain DDP, or LocalSGD in a"):
        trainer.train()
    trainer = trainer_for(folder, LocalSGDCallback(3, wire="int3"), max_steps=2)
    with pytest.raises(ValueError, match="wire='int3' is not known"):
        trainer.train()


def test_refuses_what_it_cannot_train(tmp_path: Path) -> None:
    run_ranks(_refuses, 1, str(tmp_path))


def test_arguments() -> None:
    with pytest.raises(TypeError, match="no option 'overlap'; those of LocalSGD are enabled, count, wire"):
        LocalSGDCallback(3, overlap=2)
    with pytest.raises(ValueError, match="local_sgd_steps"):
        LocalSGDCallback(0)
    with pytest.raises(LocalSGDError, match=r"something else than the transformers\.Trainer"):
        LocalSGDCallback(3).on_train_begin(None, None, None)


def test_is_imported_only_when_asked_for_and_says_what_to_install() -> None:
    script = (
        "import sys, localsgd_ext, localsgd_ext.integrations\n"
        "assert not {'transformers', 'lightning', 'pytorch_lightning'} & sys.modules.keys()\n"
        "sys.modules['transformers'] = None\n"
        "import localsgd_ext.integrations.transformers"
    )
    root = str(Path(__file__).parent.parent)
    environment = os.environ | {"PYTHONPATH": root}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert "ImportError: localsgd_ext.integrations.transformers needs Transformers" in done.stderr
    assert "pip install transformers" in done.stderr
