"""One averaging with the installed package: alone, or as a rank that torch.distributed.run started. Prints the engine that did
it."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

import localsgd_ext
from localsgd_ext.averager import Averager, Item


def main() -> None:
    package = Path(localsgd_ext.__file__)
    assert package.is_relative_to(sys.prefix), f"not the installed package: {package}"
    with tempfile.TemporaryDirectory() as folder:
        if "RANK" in os.environ:
            dist.init_process_group("gloo")
        else:
            dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        rank, size = dist.get_rank(), dist.get_world_size()
        tensors = [torch.full((3000,), rank + 1.0), torch.full((7, 5), 2.0 * rank, dtype=torch.bfloat16)]
        items = [Item(f"tensor {index}", tensor) for index, tensor in enumerate(tensors)]
        report = Averager(dist.group.WORLD, "parameter", "auto", None).average(items, step=0, round=1, interval=0).result()
        for tensor, mean in zip(tensors, ((size + 1) / 2, size - 1.0), strict=True):
            assert torch.equal(tensor, torch.full_like(tensor, mean)), (rank, tensor)
        dist.destroy_process_group()
    print(f"rank {rank} of {size} averaged with backend {report.backend}")
    time.sleep(0.3)  # torch aborts if the interpreter exits while a Gloo thread still runs (pytorch#190489)


if __name__ == "__main__":
    main()
