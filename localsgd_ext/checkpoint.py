"""What Accelerate's save_state and load_state need beside the state dict: an averaging first, and every rank's own inner
optimizer.

Between averagings the ranks' inner optimizers differ, and Accelerate saves those of rank 0 alone; a run goes on bit by bit only
with all of them.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from accelerate import Accelerator

    from .local_sgd import LocalSGD


class AccelerateHooks:
    """Registered with an Accelerator as long as the LocalSGD lives. rank: in the world, as files are named by it. part: which
    part of a replica this rank holds, and of how many; None where each rank holds all of it."""

    def __init__(self, local_sgd: LocalSGD, accelerator: Accelerator, rank: int, part: tuple[int, int] | None = None) -> None:
        self._local_sgd = weakref.ref(local_sgd)
        self._accelerator = accelerator
        self._rank, self._part = rank, part
        self._folder: Path | None = None
        self._without = False  # whether the last checkpoint loaded had no state of ours
        for handle in (
            accelerator.register_save_state_pre_hook(self._before_save),
            accelerator.register_load_state_pre_hook(self._before_load),
        ):
            weakref.finalize(local_sgd, handle.remove)

    def own_state(self, state: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Of a checkpoint that is being loaded, where Accelerate gives the main process's: of a model in parts that of this
        rank's part."""
        if self._folder is None or self._part is None:
            return state
        path = self._part_path(self._folder)
        if path.is_file():
            return torch.load(path, map_location="cpu", weights_only=True)
        warnings.warn(
            f"the checkpoint was not saved by a model in {self._part[1]} parts: what the outer optimizer keeps starts anew",
            stacklevel=4,
        )
        return {key: value for key, value in state.items() if not key.startswith(("anchor.", "momentum.", "outer."))}

    def _part_path(self, folder: str | Path) -> Path:
        assert self._part is not None
        return Path(folder) / "local_sgd_part_{}_of_{}.bin".format(*self._part)

    def load_optimizers(self) -> None:
        """Give this rank's inner optimizers their own state, after Accelerate has given them rank 0's."""
        if self._folder is None:
            return
        path, self._folder = self._path(self._folder), None
        if not path.is_file():
            warnings.warn(
                f"the checkpoint was saved by fewer ranks: rank {self._rank} goes on with the inner optimizer state of rank 0",
                stacklevel=4,
            )
            return
        states = torch.load(path, map_location="cpu", weights_only=True)
        for optimizer, state in zip(self._accelerator._optimizers, states, strict=True):
            optimizer.load_state_dict(state)

    def _path(self, folder: str | Path) -> Path:
        return Path(folder) / f"local_sgd_optimizers_{self._rank}.bin"

    def _is_registered(self) -> bool:
        return any(each is self._local_sgd() for each in self._accelerator._custom_objects)

    def _before_save(self, models: list[Any], weights: list[Any], folder: str) -> None:
        local_sgd = self._local_sgd()
        if local_sgd is None:
            return
        if self._without:
            self._accelerator._custom_objects.append(local_sgd)
            self._without = False
        if local_sgd.is_inside:
            local_sgd.settle()  # in place, so that the weights already gathered are the averaged ones
        if self._is_registered():
            Path(folder).mkdir(parents=True, exist_ok=True)
            torch.save([optimizer.state_dict() for optimizer in self._accelerator._optimizers], self._path(folder))
            if self._part is not None:
                # The same in all replicas, which may share the folder or not.
                path = self._part_path(folder)
                torch.save(local_sgd.state_dict(), own := path.with_suffix(f".{self._rank}"))
                own.replace(path)

    def _before_load(self, models: list[Any], folder: str) -> None:
        local_sgd = self._local_sgd()
        if local_sgd is None or not self._is_registered():
            return
        objects = self._accelerator._custom_objects
        index = next(number for number, each in enumerate(objects) if each is local_sgd)
        if (Path(folder) / f"custom_checkpoint_{index}.pkl").is_file():
            self._folder = Path(folder)
            return
        # Accelerate refuses a checkpoint with fewer states than objects.
        warnings.warn(f"{folder} holds no state of LocalSGD: its counters and momentum start anew", stacklevel=4)
        del objects[index]
        self._without = True
