"""`LocalSGDCallback` in the Trainer of Transformers, on two ranks: what is trained, evaluated, saved, and resumed from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from localsgd_ext import DiLoCo, LocalSGD, Warmup

from .local_steps import check_resumed
from .ranks import run_ranks
from .tensors import bits
from .trainers import LocalSGDCallback, equal_on_all_ranks, saved_in, tiny_gpt, trainer_for, transformers, weights_of

# The same steps, written by hand.

OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, "DiLoCo with int8": {"outer": DiLoCo(), "wire": "int8"}}


def _by_hand(folder: str, options: dict[str, Any]) -> list[bytes]:
    """What the Trainer does in two epochs, with gradients accumulated over two batches, in a loop of our own."""
    trainer = trainer_for(folder, dropout=0.0, gradient_accumulation_steps=2)
    accelerator, batches = trainer.accelerator, trainer.get_train_dataloader()
    model = trainer.model
    # The Trainer's groups: with weight decay and without, which changes the order of the optimizer's parameters.
    optimizer = torch.optim.AdamW(trainer.create_optimizer().param_groups, lr=5e-3, betas=(0.9, 0.999), eps=1e-8)
    model, optimizer = accelerator.prepare(model, optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, (12 - step) / 12))
    with LocalSGD(accelerator, model, 3, **options) as local_sgd:
        for epoch in range(2):
            batches.set_epoch(epoch)
            iterator = iter(batches)
            for _ in range(6):
                pair, tokens = trainer.get_batch_samples(iterator, 2, trainer.args.device)  # tokens: of all ranks
                for number, batch in enumerate(pair):
                    model.train()
                    accelerator.gradient_state._set_sync_gradients(number == 1)
                    accelerator.backward(model(**batch, num_items_in_batch=tokens).loss * 2)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                model.zero_grad()
                local_sgd.step()
    assert local_sgd.num_steps == 12
    return weights_of(trainer.model)


def _as_by_hand(rank: int, folder: str, kind: str) -> list[bytes]:
    callback = LocalSGDCallback(3, **OPTIONS[kind])
    trainer = trainer_for(folder, callback, dropout=0.0, gradient_accumulation_steps=2)
    trainer.train()
    assert callback.local_sgd.num_steps == trainer.state.global_step == 12
    assert "log" not in vars(trainer), "as it was"
    assert [each.get("local_sgd/step") for each in trainer.state.log_history[:-1]] == [None] * 2 + [3] * 3 + [6] * 3 + [
        9
    ] * 3 + [12]
    assert all(each["local_sgd/drift"] > 0 and each["local_sgd/seconds"] > 0 for each in trainer.state.log_history[2:-1])
    assert not any(key.startswith("local_sgd/") for key in trainer.state.log_history[-1]), "the summary"
    assert trainer.model_wrapped.require_backward_grad_sync
    weights = weights_of(trainer.model)
    assert weights != weights_of(tiny_gpt())
    assert weights == _by_hand(folder, OPTIONS[kind])
    return weights


@pytest.mark.parametrize("kind", list(OPTIONS))
def test_trains_as_a_loop_written_by_hand(kind: str, tmp_path: Path) -> None:
    first, second = run_ranks(_as_by_hand, 2, str(tmp_path), kind, limit=120)
    assert first == second


# Evaluations and checkpoints.


class _Average(transformers.TrainerCallback):
    """Works out what the average must be, and compares. asks_at: a step at which it asks for a checkpoint itself."""

    def __init__(self, asks_at: int = 0) -> None:
        self.asks_at, self.seen, self._mean = asks_at, [], []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        control.should_save |= state.global_step == self.asks_at
        self._mean = []
        for parameter in model.parameters():
            both = [torch.empty_like(parameter) for _ in range(2)]
            dist.all_gather(both, parameter.detach())
            self._mean.append(bits((both[0] + both[1]) / 2))
        self._apart = self._mean != weights_of(model)

    def _compare(self, what: str, state: Any, weights: list[bytes]) -> None:
        assert weights == self._mean, (what, state.global_step)
        self.seen.append((what, state.global_step, self._apart))

    def on_prediction_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._compare("evaluated", state, weights_of(model))

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._compare("saved", state, weights_of(model))
        dist.barrier()
        assert saved_in(f"{args.output_dir}/checkpoint-{state.global_step}") == self._mean

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "local_sgd/drift" in logs:
            self.seen.append(("logged", state.global_step, True))


class _Logs(transformers.Trainer):
    """A Trainer with a `log` of its own."""

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        super().log(logs | {"its own": 1.0}, *args, **kwargs)


def _averages(rank: int, folder: str) -> None:
    average, callback = _Average(asks_at=7), LocalSGDCallback(3)
    by_steps = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 5, "save_total_limit": 2}
    trainer = trainer_for(folder, callback, average, trainer=_Logs, max_steps=14, logging_steps=7, **by_steps)
    trainer.train()
    evaluated = [("evaluated", step, True) for step in (4, 4, 8, 8, 12, 12, 14, 14)]
    saved = [("saved", step, True) for step in (5, 7, 10, 14)]
    logged = [("logged", step, True) for step in (7, 14)]
    assert sorted(average.seen) == sorted(evaluated + saved + logged)
    assert [each["its own"] for each in trainer.state.log_history if "local_sgd/drift" in each] == [1.0, 1.0]
    assert {each.name for each in Path(folder).iterdir()} == {"checkpoint-10", "checkpoint-14"}
    assert len(list(Path(folder, "checkpoint-10").glob("local_sgd*"))) == 3
    assert callback.local_sgd.num_syncs == 10, "at 3, 6, 9, 12 and 4, 5, 7, 8, 10, 14; at 12 once"

    average, callback = _Average(), LocalSGDCallback(5)
    folder += "/by epochs"
    trainer = trainer_for(folder, callback, average, eval_strategy="epoch", save_strategy="epoch", save_only_model=True)
    trainer.train()
    assert [(what, step) for what, step, _ in average.seen if what == "saved"] == [("saved", 12), ("saved", 24)]
    assert [step for what, step, _ in average.seen if what == "evaluated"] == [12, 12, 24, 24]
    assert not list(Path(folder, "checkpoint-12").glob("local_sgd*"))


def test_evaluations_and_checkpoints_hold_the_average(tmp_path: Path) -> None:
    run_ranks(_averages, 2, str(tmp_path), limit=120)


def _in_the_warm_up(rank: int, folder: str) -> None:
    """Synchronous training is the same with evaluations and checkpoints as without, whatever the outer optimizer would make of
    it."""
    often = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 3}
    ends = []
    for number, more in enumerate(({}, often)):
        callback = LocalSGDCallback(Warmup(8, then=4), outer=DiLoCo(), wire="int8")
        trainer = trainer_for(f"{folder}/{number}", callback, dropout=0.0, max_steps=8, **more)
        trainer.train()
        ends.append(weights_of(trainer.model))
    assert equal_on_all_ranks(ends[0])
    assert ends[0] == ends[1]


def test_evaluations_do_not_disturb_synchronous_steps(tmp_path: Path) -> None:
    run_ranks(_in_the_warm_up, 2, str(tmp_path))


# Resuming.

RESUMED: dict[str, dict[str, Any]] = {
    "plain": {},
    "DiLoCo with int8": {"outer": DiLoCo(), "wire": "int8"},
    "in the background": {"overlap_steps": 1, "fragments": 2, "wire": "int4"},
    "Warmup": {"local_sgd_steps": Warmup(7, then=4), "outer": DiLoCo()},
}


def _resumable(kind: str, folder: str, **arguments: Any) -> tuple[Any, LocalSGDCallback]:
    callback = LocalSGDCallback(**{"local_sgd_steps": 4} | RESUMED[kind])
    by_steps = {"save_strategy": "steps", "save_steps": 5, "max_steps": 14}
    trainer = trainer_for(folder, *([callback] if kind == "plain" else []), **by_steps | arguments)
    if kind != "plain":
        trainer.add_callback(callback)
    return trainer, callback


def _end(trainer: Any, callback: LocalSGDCallback) -> list[Any]:
    moments = [bits(value) for state in trainer.optimizer.state.values() for value in state.values()]
    state = {key: bits(value) for key, value in callback.local_sgd.state_dict().items() if key != "report.seconds"}
    logs = [
        {key: value for key, value in each.items() if "seconds" not in key}
        for each in trainer.state.log_history[:-1]
        if each["step"] > 5  # those before are rank 0's
    ]
    return [weights_of(trainer.model), moments, state, logs]


def _whole(rank: int, folder: str) -> list[Any]:
    ends = []
    for kind in RESUMED:
        trainer, callback = _resumable(kind, f"{folder}/{kind}")
        trainer.train()
        ends.append(_end(trainer, callback))
    return ends


def _resumed(rank: int, folder: str) -> list[Any]:
    ends = []
    for kind in RESUMED:
        trainer, callback = _resumable(kind, f"{folder}/{kind}")
        trainer.train(resume_from_checkpoint=f"{folder}/{kind}/checkpoint-5")
        ends.append(_end(trainer, callback))
    return ends


def test_resumes_with_the_same_bits(tmp_path: Path) -> None:
    whole = run_ranks(_whole, 2, str(tmp_path), limit=120)
    check_resumed(whole, run_ranks(_resumed, 2, str(tmp_path), limit=120))


def _alone(rank: int, folder: str) -> None:
    """One process: nothing to average, and everything works."""
    trainer, callback = _resumable("DiLoCo with int8", folder, eval_strategy="epoch")
    trainer.train()
    end = _end(trainer, callback)
    assert (callback.local_sgd.num_steps, callback.local_sgd.num_syncs) == (14, 0)
    trainer, callback = _resumable("DiLoCo with int8", folder, eval_strategy="epoch")
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-10")
    assert _end(trainer, callback)[:3] == end[:3]


def _on_more_ranks(rank: int, folder: str) -> None:
    trainer, callback = _resumable("DiLoCo with int8", folder)
    if rank == 1:
        with pytest.warns(UserWarning, match="saved by fewer ranks: rank 1 goes on with the optimizer state of rank 0"):
            trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-10")
    else:
        trainer.train(resume_from_checkpoint=True)
    assert callback.local_sgd.num_steps == 14
    assert equal_on_all_ranks(weights_of(trainer.model))


def _without_ours(rank: int, folder: str) -> None:
    """A checkpoint from before the callback."""
    trainer, _ = _resumable("plain", folder)
    trainer.pop_callback(LocalSGDCallback)
    trainer.train()
    trainer, callback = _resumable("plain", folder)
    with pytest.warns(UserWarning, match="holds no state of LocalSGD"):
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-10")
    assert callback.local_sgd.num_steps == 4
    assert equal_on_all_ranks(weights_of(trainer.model))


def test_one_process_and_then_two(tmp_path: Path) -> None:
    run_ranks(_alone, 1, str(tmp_path))
    folder = str(tmp_path)
    (tmp_path / "checkpoint-14").rename(tmp_path / "the last")  # so that both ranks go on from the same one
    run_ranks(_on_more_ranks, 2, folder)
    run_ranks(_without_ours, 2, f"{folder}/without")


# The end of training.


class _EndsEpochs(transformers.TrainerCallback):
    """No epoch has more than three steps, so that training ends without anything saying so."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_epoch_stop = state.global_step % 3 == 0


def _best(rank: int, folder: str) -> None:
    for kind in ("an epoch", "a step", "nothing"):
        callback, worse = LocalSGDCallback(5, outer=DiLoCo()), iter(range(100))
        stopping = _EndsEpochs() if kind == "nothing" else transformers.EarlyStoppingCallback(1)
        every = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 4, "save_steps": 4}
        by = every if kind == "a step" else {"eval_strategy": "epoch", "save_strategy": "epoch"}
        trainer = trainer_for(
            f"{folder}/{kind}", callback, stopping, num_train_epochs=4, load_best_model_at_end=True,
            metric_for_best_model="worse", greater_is_better=False, **by,
        )  # fmt: skip
        trainer.compute_metrics = lambda _, worse=worse: {"worse": next(worse)}
        trainer.train()
        steps = {"an epoch": (12, 24), "a step": (4, 8), "nothing": (3, 12)}[kind]
        assert trainer.state.global_step == steps[1]
        assert trainer.state.best_model_checkpoint.endswith(f"checkpoint-{steps[0]}")
        assert weights_of(trainer.model) == saved_in(trainer.state.best_model_checkpoint), kind
        assert not callback.local_sgd.is_inside
        assert trainer.model_wrapped.require_backward_grad_sync


def test_the_best_model_is_what_is_left(tmp_path: Path) -> None:
    run_ranks(_best, 2, str(tmp_path), limit=120)
