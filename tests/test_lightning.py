"""`LocalSGDCallback` in the Trainer of PyTorch Lightning, on two ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from localsgd_ext import DiLoCo, LocalSGD, PeerError

from .local_steps import check_resumed
from .ranks import run_ranks
from .tensors import bits

try:
    import lightning.pytorch as pl
    from lightning.pytorch.loggers.logger import Logger
except ImportError:
    pl = pytest.importorskip("pytorch_lightning", reason="NOT RUN: lightning is not installed")
    from pytorch_lightning.loggers.logger import Logger

from localsgd_ext.integrations.lightning import LocalSGDCallback

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "DiLoCo with int8": {"outer": DiLoCo(), "wire": "int8"},
    "in the background": {"overlap_steps": 1, "fragments": 2, "wire": "int4"},
}
EXAMPLES, BATCH = 48, 2  # 12 batches on each of 2 ranks: an epoch


def _data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(EXAMPLES, 6, generator=generator), torch.randn(EXAMPLES, 2, generator=generator))


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2))


class _Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = _net()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


class _Memory(Logger):
    """What a tracker would be told."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[int, dict[str, float]]] = []

    name, version = "memory", 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.logged.append((step, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


def _trainer(folder: str, *callbacks: Any, **options: Any) -> Any:
    devices = dist.get_world_size()
    settings = {
        "accelerator": "cpu",
        "devices": devices,
        "strategy": "ddp" if devices > 1 else "auto",
        "max_epochs": 2,
        "logger": False,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    } | options
    return pl.Trainer(callbacks=list(callbacks), **settings)


def _batches() -> DataLoader:
    # One process would shuffle by the random numbers' state, which Lightning does not save; with several there is the epoch's
    # seed.
    return DataLoader(_data(), batch_size=BATCH, shuffle=dist.get_world_size() > 1)


def _weights(module: nn.Module) -> list[bytes]:
    return [bits(each) for each in module.state_dict().values()]


def _equal_on_all_ranks(weights: list[bytes]) -> bool:
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, weights)
    return said[0] == said[1]


# The same steps, written by hand.


def _by_hand(options: dict[str, Any]) -> list[bytes]:
    """What the Trainer does in two epochs, with gradients accumulated over two batches, in a loop of our own."""
    net = _net()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    sampler = DistributedSampler(_data(), shuffle=True)
    with LocalSGD(None, model, 4, **options) as local_sgd:
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for number, (inputs, targets) in enumerate(DataLoader(_data(), batch_size=BATCH, sampler=sampler)):
                (nn.functional.mse_loss(model(inputs), targets) / 2).backward()
                if number % 2 == 1:
                    optimizer.step()
                    optimizer.zero_grad()
                    local_sgd.step()
            scheduler.step()
    assert local_sgd.num_steps == 12
    return _weights(net)


def _as_by_hand(rank: int, folder: str) -> list[list[bytes]]:
    ends = []
    for options in OPTIONS.values():
        callback, memory, module = LocalSGDCallback(4, **options), _Memory(), _Module()
        trainer = _trainer(folder, callback, accumulate_grad_batches=2, logger=memory)
        trainer.fit(module, _batches())
        assert callback.local_sgd.num_steps == trainer.global_step == 12
        assert "save_checkpoint" not in vars(trainer), "as it was"
        ends.append(_weights(module.net))
        assert ends[-1] == _by_hand(options)
        assert trainer.logged_metrics["local_sgd/drift"] > 0
        if rank == 0 and not options:
            logged = {metrics["local_sgd/step"] for _, metrics in memory.logged if "local_sgd/drift" in metrics}
            assert logged == {4, 8, 12}
            assert all(metrics["local_sgd/seconds"] > 0 for _, metrics in memory.logged if "local_sgd/seconds" in metrics)
    return ends


def test_trains_as_a_loop_written_by_hand(tmp_path: Path) -> None:
    first, second = run_ranks(_as_by_hand, 2, str(tmp_path), limit=120)
    assert first == second


# Validations and checkpoints.


class _Average(pl.Callback):
    """Works out what the average must be, and compares. Called before the callback that makes it. saves_at: a step at which it
    saves itself."""

    def __init__(self, saves_at: int = 0) -> None:
        self.saves_at, self.means, self.validated, self.differed = saves_at, {}, [], True

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        mean = []
        for tensor in _averaged(pl_module.net):
            both = [torch.empty_like(tensor) for _ in range(2)]
            dist.all_gather(both, tensor)
            mean.append(bits((both[0] + both[1]) / 2))
        self.differed &= mean != [bits(each) for each in _averaged(pl_module.net)]
        self.means[trainer.global_step] = mean
        if trainer.global_step == self.saves_at:
            trainer.save_checkpoint(f"{trainer.default_root_dir}/step={self.saves_at}.ckpt")

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        assert [bits(each) for each in _averaged(pl_module.net)] == self.means[trainer.global_step], trainer.global_step
        self.validated.append(trainer.global_step)


def _averaged(net: nn.Module) -> list[torch.Tensor]:
    return [each.detach() for each in net.state_dict().values() if each.is_floating_point()]


def _saved(path: Path) -> list[bytes]:
    state = torch.load(path, weights_only=True)["state_dict"]
    return [bits(each) for each in state.values() if each.is_floating_point()]


def _checkpoints(folder: str, **options: Any) -> Any:
    return pl.callbacks.ModelCheckpoint(folder, filename="{step}", save_top_k=-1, **options)


def _averages(rank: int, folder: str) -> None:
    for weights_only in (False, True):
        where = f"{folder}/{weights_only}"
        average, callback, module = _Average(saves_at=7), LocalSGDCallback(3), _Module()
        saving = _checkpoints(where, every_n_train_steps=5, save_weights_only=weights_only)
        trainer = _trainer(where, average, saving, callback, enable_checkpointing=True, val_check_interval=4)
        trainer.fit(module, _batches(), DataLoader(_data(), batch_size=8))
        assert sorted(set(average.validated)) == [4, 8, 12, 16, 20, 24]
        assert average.differed, "each rank had weights of its own"
        assert callback.local_sgd.num_syncs == len({*range(3, 25, 3), *range(4, 25, 4), *range(5, 25, 5), 7})
        assert {each.name for each in Path(where).glob("*.ckpt")} == {f"step={step}.ckpt" for step in (5, 7, 10, 15, 20)}
        for path in Path(where).glob("*.ckpt"):
            assert _saved(path) == average.means[int(path.stem.removeprefix("step="))], path
        assert _equal_on_all_ranks(_weights(module))
        trainer.save_checkpoint(f"{where}/last.ckpt")  # after training
        assert _saved(Path(where, "last.ckpt")) == [bits(each) for each in _averaged(module.net)]
        assert torch.load(f"{where}/last.ckpt", weights_only=True)["local_sgd"]["state"]["num_steps"] == 24
        assert ("local_sgd" in torch.load(f"{where}/step=5.ckpt", weights_only=True)) != weights_only


def test_validations_and_checkpoints_hold_the_average(tmp_path: Path) -> None:
    run_ranks(_averages, 2, str(tmp_path), limit=120)


# Resuming.


def _resumable(kind: str, folder: str, **options: Any) -> tuple[Any, LocalSGDCallback]:
    callback = LocalSGDCallback(5, **OPTIONS[kind])
    saving = _checkpoints(f"{folder}/{kind}", every_n_epochs=1, save_on_train_epoch_end=True)
    return _trainer(folder, callback, saving, max_epochs=3, enable_checkpointing=True, **options), callback


def _fit(trainer: Any, callback: LocalSGDCallback, path: str | None = None) -> list[Any]:
    module = _Module()
    trainer.fit(module, _batches(), DataLoader(_data(), batch_size=8), ckpt_path=path)
    moments = [bits(value) for state in trainer.optimizers[0].state.values() for value in state.values()]
    state = {key: bits(value) for key, value in callback.local_sgd.state_dict().items() if key != "report.seconds"}
    return [_weights(module), moments, state]


def _whole(rank: int, folder: str) -> list[Any]:
    return [_fit(*_resumable(kind, folder)) for kind in OPTIONS]


def _resumed(rank: int, folder: str) -> list[Any]:
    ends = []
    for kind in OPTIONS:
        trainer, callback = _resumable(kind, folder)
        trainer.validate(_Module(), DataLoader(_data(), batch_size=8), ckpt_path=f"{folder}/{kind}/step=24.ckpt", verbose=False)
        ends.append(_fit(trainer, callback, f"{folder}/{kind}/step=12.ckpt"))
    return ends


def test_resumes_with_the_same_bits(tmp_path: Path) -> None:
    whole = run_ranks(_whole, 2, str(tmp_path), limit=120)
    check_resumed(whole, run_ranks(_resumed, 2, str(tmp_path), limit=120))


def _alone(rank: int, folder: str) -> None:
    """One process: nothing to average, and everything works."""
    trainer, callback = _resumable("DiLoCo with int8", folder)
    end = _fit(trainer, callback)
    assert (callback.local_sgd.num_steps, callback.local_sgd.num_syncs) == (72, 0)
    assert _fit(*_resumable("DiLoCo with int8", folder), f"{folder}/DiLoCo with int8/step=24.ckpt") == end


def _on_more_ranks(rank: int, folder: str) -> None:
    trainer, callback = _resumable("DiLoCo with int8", folder)
    path = f"{folder}/DiLoCo with int8/step=24.ckpt"
    if rank == 1:
        with pytest.warns(UserWarning, match="saved by fewer ranks: rank 1 goes on with the optimizer state of rank 0"):
            _fit(trainer, callback, path)
    else:
        _fit(trainer, callback, path)
    assert _equal_on_all_ranks(_weights(trainer.lightning_module))

    path = f"{folder}/without.ckpt"  # from before the callback
    trainer = _trainer(folder, max_epochs=1)
    trainer.fit(_Module(), _batches())
    trainer.save_checkpoint(path)
    trainer, callback = _resumable("plain", folder)
    with pytest.warns(UserWarning, match="holds no state of LocalSGD"):
        _fit(trainer, callback, path)
    assert _equal_on_all_ranks(_weights(trainer.lightning_module))


def test_one_process_and_then_two(tmp_path: Path) -> None:
    run_ranks(_alone, 1, str(tmp_path))
    run_ranks(_on_more_ranks, 2, str(tmp_path), limit=120)


# In trouble.


class _Raises(pl.Callback):
    def __init__(self) -> None:
        self.batch: int | None = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch:
            raise ZeroDivisionError("as planned")


def _again(rank: int, folder: str) -> None:
    callback, raises = LocalSGDCallback(3, outer=DiLoCo()), _Raises()
    for _ in range(2):
        module = _Module()
        trainer = _trainer(folder, callback, raises)
        trainer.fit(module, _batches())
        assert (callback.local_sgd.num_steps, callback.local_sgd.num_syncs) == (24, 8)
        assert _equal_on_all_ranks(_weights(module))
    raises.batch = 4
    with pytest.raises(ZeroDivisionError):
        _trainer(folder, callback, raises).fit(_Module(), _batches())
    assert not callback.local_sgd.is_inside
    raises.batch = None
    _trainer(folder, callback, raises).fit(module, _batches())
    assert _equal_on_all_ranks(_weights(module))
    raises.batch = 4 if rank == 1 else None
    with pytest.raises(PeerError if rank == 0 else ZeroDivisionError, match=r"rank 1.*as planned|as planned"):
        _trainer(folder, callback, raises).fit(module, _batches())
    assert not callback.local_sgd.is_inside


def test_trains_again_after_training_and_peers_are_told_of_exceptions(tmp_path: Path) -> None:
    run_ranks(_again, 2, str(tmp_path))


def _refuses(rank: int, folder: str) -> None:
    class Other(pl.strategies.DDPStrategy):
        def configure_ddp(self) -> None:
            pass

    with pytest.raises(NotImplementedError, match="does not work with Other; use strategy='ddp'"):
        _trainer(folder, LocalSGDCallback(3), strategy=Other()).fit(_Module(), _batches())
    with pytest.raises(TypeError, match="no option 'overlap'; those of LocalSGD are enabled, count, wire"):
        LocalSGDCallback(3, overlap=2)


def test_refuses_what_it_cannot_train(tmp_path: Path) -> None:
    run_ranks(_refuses, 2, str(tmp_path))


def test_says_what_to_install() -> None:
    script = (
        "import sys\n"
        "sys.modules['lightning'] = sys.modules['lightning.pytorch'] = sys.modules['pytorch_lightning'] = None\n"
        "import localsgd_ext.integrations.lightning"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert "ImportError: localsgd_ext.integrations.lightning needs PyTorch Lightning; pip install lightning" in done.stderr
