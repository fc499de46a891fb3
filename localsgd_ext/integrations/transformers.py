"""Local SGD in the Trainer of Hugging Face Transformers."""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import LocalSGDError
from ..local_sgd import LocalSGD
from ..schedules import Schedule
from .shared import Average, check_options, check_whole, nothing, replace_method

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
except ImportError as error:
    raise ImportError(
        f"localsgd_ext.integrations.transformers needs Transformers and what its Trainer needs; pip install transformers ({error})"
    ) from error

STATE = "local_sgd.bin"
"""The file in a checkpoint folder that holds the state of LocalSGD."""


class LocalSGDCallback(TrainerCallback):
    """Makes a Trainer train by local SGD: `Trainer(..., callbacks=[LocalSGDCallback(8)])`, started by torchrun or `accelerate
    launch`.

    The ranks' gradients are no longer averaged, but their weights every `local_sgd_steps` optimizer steps, and once more where
    training ends. What is evaluated and saved is the average: at an evaluation or a checkpoint between two averagings there is
    one more, which with `outer` is a step of the outer optimizer, too (unless `eval_steps` and `save_steps` are multiples of
    `local_sgd_steps`). The Trainer's logs hold the numbers of the last averaging (`local_sgd/drift`, `local_sgd/seconds`, ...)
    beside the loss. Checkpoints hold the state of LocalSGD and every rank's own optimizer, learning rate schedule and gradient
    scaler, which differ between ranks (the Trainer saves rank 0's), so `resume_from_checkpoint` goes on with the same bits on
    as many ranks; with `save_only_model=True` they do not.

    Each train() is a LocalSGD of its own. Where train() ends with an exception the Trainer calls no callback: the other ranks
    get PeerError when that process ends or trains again.

    What still joins the ranks at every optimizer step is the Trainer's count of tokens:
    `TrainingArguments(average_tokens_across_devices=False)` leaves each rank its own.

    Args:
        local_sgd_steps: see `LocalSGD`; here every step is an optimizer step, however many batches it accumulates.
        options: the keyword arguments of `LocalSGD`.

    Attributes:
        local_sgd: the LocalSGD of the current or last train(); None before.

    Raises:
        TypeError, ValueError: an argument is not allowed; the message says what is. Some are looked at when training begins.
        NotImplementedError: when training begins, under DeepSpeed, Megatron-LM, FSDP, tensor parallelism or XLA.

        In training, on every rank: what `LocalSGD` raises.
    """

    def __init__(self, local_sgd_steps: int | Schedule, **options: Any) -> None:
        check_options(local_sgd_steps, options)
        self.local_sgd: LocalSGD | None = None
        self._local_sgd_steps = local_sgd_steps
        self._options = options
        self._average: Average | None = None  # while training goes on
        self._trainer: Any = None  # the one that is training
        self._trial: Any = None  # of a search for hyperparameters, which has a folder for each
        self._undo_log: Callable[[], None] = nothing
        # Whose ranks have trained apart: the Trainer keeps their optimizers for the next train(), and these differ.
        self._apart: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._leave(LocalSGDError("its last train() ended with an exception"))
        trainer, called_with = _find_trainer(self)
        check_whole(trainer.model_wrapped)
        local_sgd = LocalSGD(trainer.accelerator, trainer.model_wrapped, self._local_sgd_steps, **self._options)
        local_sgd._gradient_sync.was_off |= trainer.model_wrapped in self._apart
        if (folder := called_with.get("resume_from_checkpoint")) is not None:
            self._load(local_sgd, trainer, Path(folder))
        self._trainer, self._trial = trainer, called_with.get("trial")
        self.local_sgd = local_sgd.__enter__()
        self._average = Average(local_sgd)
        # Last of all, so that it sees every other callback's wish to evaluate, to save and to stop. Another list: this one is
        # being walked through.
        handler = trainer.callback_handler
        handler.callbacks = [*(each for each in handler.callbacks if each is not self), self]
        self._undo_log = replace_method(trainer, "log", functools.partial(self._log, trainer.log))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        with self._telling():
            if self.local_sgd is not None and self.local_sgd.is_inside:
                self.local_sgd.step()
        self._make_average(control)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if control.should_training_stop:
            self._leave()  # before load_best_model_at_end loads weights, which the closing averaging would take for trained ones
        self._make_average(control)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if control.should_training_stop:  # early stopping after an epoch, whose end is past
            self._leave()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._trainer is None or self.local_sgd is None or args.save_only_model:
            return
        folder = Path(self._trainer._get_output_dir(trial=self._trial), f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        folder.mkdir(parents=True, exist_ok=True)
        with self._telling():
            if self._average is not None:
                self._average.make()  # an evaluation may have changed buffers
            if args.should_save:
                torch.save(self.local_sgd.state_dict(), folder / STATE)
            torch.save({name: each.state_dict() for name, each in _own(self._trainer).items()}, _of_rank(folder, args))

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.local_sgd is not None and self.local_sgd.is_inside:
            # No callback saw the end of training coming. The best weights may have been loaded meanwhile, on all ranks alike.
            with _kept(self._trainer.model) if args.load_best_model_at_end else contextlib.nullcontext():
                self._leave()
        self._release()

    def _make_average(self, control: TrainerControl) -> None:
        """If somebody wants to evaluate or save it."""
        with self._telling():
            if self._average is not None and (control.should_evaluate or control.should_save):
                self._average.make()

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Leave the LocalSGD block with the error that is raised here: the other ranks are told."""
        try:
            yield
        except BaseException as error:
            self._leave(error)
            raise

    def _leave(self, error: BaseException | None = None) -> None:
        """End the LocalSGD block, if it was entered; with an error, the other ranks are told and nothing is averaged."""
        trainer = self._trainer
        if error is not None:
            self._release()
        if self.local_sgd is not None and self.local_sgd.is_inside:
            if self.local_sgd._gradient_sync.was_off and trainer is not None:
                self._apart.add(trainer.model_wrapped)
            self.local_sgd.__exit__(None if error is None else type(error), error, None)

    def _release(self) -> None:
        self._undo_log()
        self._undo_log, self._average, self._trainer, self._trial = nothing, None, None, None

    def _log(self, log: Callable[..., None], logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """`Trainer.log` with our numbers: on_log comes when its history has been written, and trackers have been told."""
        if "loss" in logs:  # not of an evaluation, nor the summary
            with self._telling():
                logs.update({} if self._average is None else self._average.metrics())
        log(logs, *args, **kwargs)

    def _load(self, local_sgd: LocalSGD, trainer: Any, folder: Path) -> None:
        """Go on from a checkpoint; the Trainer has loaded the weights, and rank 0's optimizer."""
        if not (folder / STATE).is_file():
            local_sgd.load_state_dict({})  # warns
            return
        local_sgd.load_state_dict(torch.load(folder / STATE, map_location="cpu", weights_only=True))
        path = _of_rank(folder, trainer.args)
        if not path.is_file():
            warnings.warn(
                f"{folder} was saved by fewer ranks: rank {trainer.args.process_index} goes on with the optimizer state of rank 0",
                stacklevel=3,
            )
            return
        states = torch.load(path, map_location="cpu", weights_only=True)
        for name, each in _own(trainer).items():
            if name in states:
                each.load_state_dict(states[name])


def _find_trainer(callback: TrainerCallback) -> tuple[Any, Mapping[str, Any]]:
    """The Trainer that is calling `callback`, and the arguments of its training loop.

    It passes neither itself nor the folder it resumes from, and a callback given to its constructor or to `add_callback` hears
    of it only when it is called. But it is there, in the frames of the call: the innermost one that belongs to a Trainer with
    this callback. No frame further out is looked into, since that would keep alive what is deleted there later.
    """
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Trainer) and any(each is callback for each in owner.callback_handler.callbacks):
            return owner, {name: frame.f_locals.get(name) for name in ("resume_from_checkpoint", "trial")}
        frame = frame.f_back
    raise LocalSGDError("LocalSGDCallback was called by something else than the transformers.Trainer that it was given to")


def _own(trainer: Any) -> dict[str, Any]:
    """What differs between ranks that train apart, beside the weights. The schedule and the scaler do where a rank skips a step
    (float16)."""
    scaler = getattr(trainer.accelerator, "scaler", None)
    own = {"optimizer": trainer.optimizer, "lr_scheduler": trainer.lr_scheduler, "scaler": scaler}
    return {name: each for name, each in own.items() if each is not None}


def _of_rank(folder: Path, args: TrainingArguments) -> Path:
    return folder / f"local_sgd_rank_{args.process_index}.bin"


@contextlib.contextmanager
def _kept(model: torch.nn.Module) -> Iterator[None]:
    """Whatever the block does to the weights, those of now are there again after it."""
    state = model.state_dict()
    copies = {name: tensor.clone() for name, tensor in state.items()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, tensor in state.items():
                tensor.copy_(copies[name])
