"""What one host of tests/test_network.py runs: averages a large tensor again and again, and prints what comes of it."""

from __future__ import annotations

import datetime
import sys
import time

import torch
import torch.distributed as dist

from localsgd_ext import LocalSGD, LocalSGDError


def main(numel: int, steps: int, timeout: float) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(numel))])
    averaging = LocalSGD(None, model, 1, timeout=datetime.timedelta(seconds=timeout))
    begun = time.monotonic()
    try:
        with averaging as local_sgd:
            for step in range(steps):
                with torch.no_grad():
                    model[0].add_(1 + rank)
                begun = time.monotonic()
                print(f"step {step}", flush=True)
                local_sgd.step()
        print(f"done {model[0].unique().tolist()}", flush=True)
    except LocalSGDError as error:
        print(f"{type(error).__name__} {list(getattr(error, 'ranks', ()))} {time.monotonic() - begun:.1f} {error}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
