"""Local SGD in the Trainer of PyTorch Lightning."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..errors import LocalSGDError
from ..local_sgd import LocalSGD
from ..replicas import find_ddp
from ..schedules import Schedule
from .shared import Average, check_options, check_whole, nothing, replace_method

try:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        from pytorch_lightning import Callback
except ImportError as error:
    raise ImportError(
        f"localsgd_ext.integrations.lightning needs PyTorch Lightning; pip install lightning ({error})"
    ) from error

STATE = "local_sgd"
"""The key of a checkpoint under which the states lie."""


class LocalSGDCallback(Callback):
    """Makes a Lightning Trainer train by local SGD: `Trainer(strategy="ddp", callbacks=[LocalSGDCallback(8)])`.

    The ranks' gradients are no longer averaged, but their weights every `local_sgd_steps` optimizer steps, and once more where
    training ends. What is validated and saved is the average: at a validation or a checkpoint between two averagings there is
    one more, which with `outer` is a step of the outer optimizer, too. The numbers of the last averaging (`local_sgd/drift`,
    `local_sgd/seconds`, ...) are logged every `log_every_n_steps`. Checkpoints hold the state of LocalSGD and every rank's own
    optimizers, learning rate schedules and gradient scaler, which differ between ranks, unless they hold weights alone; rank 0
    needs the memory for all of them while it saves. So `fit(ckpt_path=...)` on as many ranks goes on with the same bits, as far
    as Lightning itself does: it keeps neither the random numbers' state nor, in the middle of an epoch, the place in the data.

    Each fit() is a LocalSGD of its own. Lightning itself still makes the ranks meet once per batch, to learn of a SIGTERM.

    Args:
        local_sgd_steps: see `LocalSGD`; here every step is an optimizer step, however many batches it accumulates. With several
            optimizers (manual optimization) it is a batch in which any of them stepped.
        options: the keyword arguments of `LocalSGD`.

    Attributes:
        local_sgd: the LocalSGD of the current or last fit(); None before.

    Raises:
        TypeError, ValueError: an argument is not allowed; the message says what is. Some are looked at when training begins.
        NotImplementedError: when training begins, with several processes under another strategy than DDP.

        In training, on every rank: what `LocalSGD` raises, and PeerError where another rank failed.
    """

    def __init__(self, local_sgd_steps: int | Schedule, **options: Any) -> None:
        check_options(local_sgd_steps, options)
        self.local_sgd: LocalSGD | None = None
        self._local_sgd_steps = local_sgd_steps
        self._options = options
        self._average: Average | None = None  # while training goes on
        self._global_step = 0  # of the Trainer, when it was last looked at
        self._new_steps = 0  # of optimizers in the current batch
        self._loaded: tuple[dict[str, torch.Tensor], dict[str, Any] | None] | None = (
            None  # of a checkpoint: ours, and this rank's own
        )
        self._gathering: dist.ProcessGroup | None = None  # what the ranks' states travel in; None for all there is
        self._failed = False
        self._undo_save: Callable[[], None] = nothing

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._loaded = None  # what a validate() or test() has loaded

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        ours = checkpoint.get(STATE, {"state": {}, "ranks": []})
        ranks = ours["ranks"]
        self._loaded = ours["state"], ranks[trainer.global_rank] if trainer.global_rank < len(ranks) else None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._leave(LocalSGDError("its last fit() ended with an exception"))
        self._failed = False
        model = trainer.strategy.model
        if trainer.world_size > 1 and find_ddp(model) is None:
            raise NotImplementedError(
                f"LocalSGDCallback does not work with {type(trainer.strategy).__name__}; use strategy='ddp' if the model fits on one device"
            )
        check_whole(model)
        local_sgd = LocalSGD(None, model, self._local_sgd_steps, **self._options)
        if self._loaded is not None:
            self._load(local_sgd, trainer)
        self._end_gathering()  # of a fit() that failed
        if trainer.world_size > 1 and dist.get_backend() != "gloo":
            self._gathering = dist.new_group(backend="gloo")  # from host to host: a GPU may not have room for all ranks' states
        self._global_step = trainer.global_step
        self._undo_save = replace_method(
            trainer, "save_checkpoint", functools.partial(self._save, trainer, trainer.save_checkpoint)
        )
        self.local_sgd = local_sgd.__enter__()
        self._average = Average(local_sgd)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._count(trainer)
        steps, self._new_steps = self._new_steps, 0
        # No more often than it is looked at: the drift of an averaging arrives later. Each of several optimizers counts for the
        # Trainer.
        if steps and (trainer.global_step // steps % max(1, trainer.log_every_n_steps) == 0 or trainer.should_stop):
            pl_module.log_dict(
                {} if self._average is None else self._average.metrics(), on_step=True, on_epoch=False, batch_size=1
            )

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._make_average(trainer)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if self.local_sgd is None or self._failed:  # after a failure nothing joins the ranks any more
            return
        self._make_average(trainer)  # a validation may have changed buffers
        own = {
            "optimizers": [trainer.strategy.optimizer_state(each) for each in trainer.optimizers],
            "lr_schedulers": [each.scheduler.state_dict() for each in trainer.lr_scheduler_configs],
            "precision": trainer.precision_plugin.state_dict(),
        }
        ranks: list[Any] = [own]
        if trainer.world_size > 1:
            ranks = [None] * trainer.world_size
            dist.gather_object(_on_host(own), ranks if trainer.is_global_zero else None, group=self._gathering)
        if trainer.is_global_zero:
            checkpoint[STATE] = {"state": self.local_sgd.state_dict(), "ranks": ranks}

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._leave()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._end_gathering()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._failed = True
        self._leave(exception)

    def _leave(self, error: BaseException | None = None) -> None:
        """End the LocalSGD block, if it was entered; with an error, the other ranks are told and nothing is averaged."""
        self._undo_save()
        self._undo_save, self._average = nothing, None
        if self.local_sgd is not None and self.local_sgd.is_inside:
            self.local_sgd.__exit__(None if error is None else type(error), error, None)

    def _end_gathering(self) -> None:
        """Later than the block: Lightning may save once more after its end."""
        group, self._gathering = self._gathering, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    def _count(self, trainer: Any) -> None:
        """A step, if optimizers have stepped since."""
        steps, self._global_step = trainer.global_step - self._global_step, trainer.global_step
        if steps and self.local_sgd is not None and self.local_sgd.is_inside:
            self._new_steps = steps
            self.local_sgd.step()

    def _make_average(self, trainer: Any) -> None:
        if self._average is not None:
            self._count(trainer)  # a callback before this one may be saving
            self._average.make()

    def _save(self, trainer: Any, save_checkpoint: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """`Trainer.save_checkpoint`, of the average: no hook comes before each of its calls, and none at all where weights
        alone are saved."""
        self._make_average(trainer)
        save_checkpoint(*args, **kwargs)

    def _load(self, local_sgd: LocalSGD, trainer: Any) -> None:
        """Go on from a checkpoint; the Trainer has loaded the weights, and rank 0's optimizers."""
        assert self._loaded is not None
        (state, own), self._loaded = self._loaded, None
        local_sgd.load_state_dict(state)
        if own is None:
            if state:
                warnings.warn(
                    f"the checkpoint was saved by fewer ranks: rank {trainer.global_rank} goes on with the optimizer state of rank 0",
                    stacklevel=3,
                )
            return
        for optimizer, each in zip(trainer.optimizers, own["optimizers"], strict=True):
            optimizer.load_state_dict(each)
        for config, each in zip(trainer.lr_scheduler_configs, own["lr_schedulers"], strict=True):
            config.scheduler.load_state_dict(each)
        if own["precision"]:
            trainer.precision_plugin.load_state_dict(own["precision"])


def _on_host(value: Any) -> Any:
    """The same with its tensors in host memory."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: _on_host(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_on_host, value))
    return value
