"""A training script as a user writes it, started by the launchers in test_launchers.py: `python launched.py OUTPUT_FOLDER`."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator

from localsgd_ext import LocalSGD


def train(output: str) -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
    model, optimizer, dataloader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=4))
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2, enabled=True) as local_sgd:
        for batch in dataloader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().sum())
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()
    Path(output, f"{os.environ.get('RANK', accelerator.process_index)}.json").write_text(
        json.dumps(
            {
                "world_size": accelerator.num_processes,
                "steps": local_sgd.num_steps,
                "syncs": local_sgd.num_syncs,
                "weights": [p.flatten().tolist() for p in model.parameters()],
            }
        )
    )
    accelerator.end_training()
    time.sleep(
        0.3
    )  # torch aborts if the interpreter exits while a Gloo thread still lets go of the last barrier (pytorch#190489)


if __name__ == "__main__":
    train(sys.argv[1])
