"""A Trainer of Transformers for the tests, with a GPT of two layers and random tokens. Whatever imports this is skipped without
Transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from .tensors import bits

transformers = pytest.importorskip("transformers", reason="NOT RUN: transformers is not installed")

from localsgd_ext.integrations.transformers import LocalSGDCallback  # noqa: E402

__all__ = ["LocalSGDCallback", "equal_on_all_ranks", "saved_in", "tiny_gpt", "trainer_for", "transformers", "weights_of"]

LENGTH, EXAMPLES, BATCH = 8, 48, 2  # 12 batches on each of 2 ranks: an epoch


def tiny_gpt(dropout: float = 0.1) -> Any:
    torch.manual_seed(0)
    dropouts = {f"{part}_pdrop": dropout for part in ("resid", "embd", "attn")}
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=LENGTH, bos_token_id=0, eos_token_id=0, **dropouts
    )
    return transformers.GPT2LMHeadModel(config)


def data(seed: int = 1, examples: int = EXAMPLES) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(64, (examples, LENGTH), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in tokens]


def trainer_for(folder: str, *callbacks: Any, trainer: Any = None, dropout: float = 0.1, **arguments: Any) -> Any:
    settings = {
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": BATCH,
        "learning_rate": 5e-3,
        "num_train_epochs": 2,
        "optim": "adamw_torch",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    } | arguments
    return (trainer or transformers.Trainer)(
        model=tiny_gpt(dropout),
        args=transformers.TrainingArguments(output_dir=folder, **settings),
        train_dataset=data(),
        eval_dataset=data(2, 8),
        callbacks=list(callbacks),
    )


def weights_of(module: Any) -> list[bytes]:
    return [bits(each) for each in module.parameters()]


def saved_in(folder: Path | str) -> list[bytes]:
    return weights_of(transformers.GPT2LMHeadModel.from_pretrained(folder))


def equal_on_all_ranks(weights: list[bytes]) -> bool:
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, weights)
    return said[0] == said[1]
