"""Hours of training in minutes: small steps without a pause, everything switched on, stragglers, kills and resumes; and nothing
may grow, hang or differ.

    python -m benchmarks.soak [--minutes 10] [--ranks 4] [--json FILE]

A small model with BatchNorm is averaged every 2 steps in 2 fragments, in the background, over int8. Every rank now and then
takes up to 50 ms longer for a step. Every few hundred steps all ranks compare their weights, buffers included, after a
`synchronize()`. Every minute the run is saved and resumed: in the same processes, with a new model, optimizer and LocalSGD (so
that what these leave behind shows in the memory); and in the middle of the time, right after such a save, all processes are
killed and new ones take up the checkpoint. A simulated step is 250 ms. The memory's slope is that of each process' resident
anonymous memory, by least squares, once it has resumed for the first time.

Fails where ranks differ, where a resumed run is not what was saved, where a minute passes without a check, or where memory
grows by more than 1 MB a minute.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn

from localsgd_ext import LocalSGD

from .record import machine, save

CHECK_STEPS = 250
RESUME_SECONDS = 60.0
HANG_SECONDS = 60.0
STEP_SECONDS = 0.25
GROWTH_MB_PER_MINUTE = 1.0
SETTLED_SECONDS = RESUME_SECONDS + 30
"""Before that a process still loads code and fills its pools, and resumes for the first time."""


class Trainer:
    """The model, its optimizer and a LocalSGD, as a training script makes them."""

    def __init__(self, accelerator: Accelerator) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        self.local_sgd = LocalSGD(accelerator, self.model, 2, wire="int8", overlap_steps=1, fragments=2)
        accelerator.register_for_checkpointing(self.local_sgd)

    def step(self, accelerator: Accelerator, generator: torch.Generator) -> None:
        inputs = torch.randn(8, 32, generator=generator)
        accelerator.backward(nn.functional.cross_entropy(self.model(inputs), inputs[:, :4].argmax(1)))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.local_sgd.step()

    def digest(self) -> str:
        """Of all weights and buffers of this rank."""
        found = hashlib.sha256()
        for tensor in self.model.state_dict().values():
            found.update(tensor.numpy().tobytes())
        return found.hexdigest()


def _resident_mb() -> float:
    """What the process holds: without pages of files, which the kernel takes back as it likes, and without what was freed,
    which the allocator gives back or keeps, 4 MB at a time, by how it happens to lie."""
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) * 1024 / 1e6


def train(folder: str, seconds: float, generation: int) -> None:
    """What every rank runs, from the checkpoint in `folder` if there is one. Rank 0's word on the clock counts for all."""
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    checkpoint, log = Path(folder) / "checkpoint", (Path(folder) / f"rank_{rank}.log").open("a", buffering=1)
    draw, generator = random.Random(1000 * generation + rank), torch.Generator().manual_seed(1000 * generation + rank)
    begun = saved = time.monotonic()
    ending = resuming = False
    while not ending:
        trainer = Trainer(accelerator)
        if checkpoint.is_dir():
            accelerator.load_state(str(checkpoint))
            if trainer.digest() != (checkpoint / "digest").read_text():
                raise SystemExit(f"rank {rank}: what was loaded is not what was saved")
        resuming = False
        with trainer.local_sgd:
            while not (ending or resuming):
                for _ in range(CHECK_STEPS):
                    if draw.random() < 0.01:
                        time.sleep(draw.uniform(0, 0.05))
                    trainer.step(accelerator, generator)
                trainer.local_sgd.synchronize()
                digests: list[Any] = [None] * accelerator.num_processes
                dist.all_gather_object(digests, trainer.digest())
                if len(set(digests)) > 1:
                    raise SystemExit(
                        f"rank {rank}: weights differ between ranks at step {trainer.local_sgd.num_steps}: {digests}"
                    )
                now = time.monotonic()
                orders = [now - begun > seconds, now - saved > RESUME_SECONDS]
                dist.broadcast_object_list(orders, 0)
                ending, resuming = orders
                if ending or resuming:
                    accelerator.save_state(str(checkpoint))
                    if rank == 0:
                        (checkpoint / "digest").write_text(digests[0])
                    dist.barrier()
                    saved = now
                state = {
                    "steps": trainer.local_sgd.num_steps,
                    "averagings": trainer.local_sgd.num_syncs,
                    "saved": ending or resuming,
                }
                log.write(json.dumps({"seconds": now - begun, "mb": _resident_mb(), "generation": generation, **state}) + "\n")
        accelerator.free_memory()
        accelerator._custom_objects.clear()  # which free_memory() leaves, so that the old LocalSGD would be saved as well
        del trainer
    dist.barrier()
    os._exit(0)  # see benchmarks/training.py


def run(folder: Path, ranks: int, seconds: float, generation: int, kill: bool) -> None:
    """One generation of processes. kill: end them right after a save, when their time is up. Raises SystemExit if they fail or
    stand still."""
    # Those that are killed would go on for ever.
    code = f"from benchmarks.soak import train; train({str(folder)!r}, {1e9 if kill else seconds}, {generation})"
    common = {
        "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29560 + generation), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)
    ]
    log, moved = folder / "rank_0.log", time.monotonic()
    size = log.stat().st_size if log.exists() else 0
    begun = time.monotonic()
    try:
        while any(process.poll() is None for process in processes):
            time.sleep(0.2)
            if log.exists() and log.stat().st_size > size:
                size, moved = log.stat().st_size, time.monotonic()
                if kill and moved - begun > seconds and json.loads(log.read_text().splitlines()[-1])["saved"]:
                    time.sleep(random.uniform(0.5, 1.5))  # somewhere in training, or in an averaging
                    return
            if time.monotonic() - moved > HANG_SECONDS:
                raise SystemExit(f"nothing has moved for {HANG_SECONDS:.0f} s")
            if failed := {rank: p.returncode for rank, p in enumerate(processes) if p.poll()}:
                raise SystemExit(f"ranks failed (exit status of each: {failed}); their errors are above")
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.wait()


def slope(points: list[tuple[float, float]]) -> float:
    """MB a minute, by least squares over (seconds, MB)."""
    line = statistics.linear_regression([seconds for seconds, _ in points], [mb for _, mb in points])
    return 60 * line.slope


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    half = 30 * options.minutes
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        run(folder, options.ranks, half, 0, kill=True)
        run(folder, options.ranks, half, 1, kill=False)
        lines = {
            rank: [json.loads(line) for line in (folder / f"rank_{rank}.log").read_text().splitlines()]
            for rank in range(options.ranks)
        }
    own = lines[0]
    growth = {
        f"rank {rank}, processes {generation + 1}": slope([(at["seconds"], at["mb"]) for at in settled])
        for rank, all_lines in lines.items()
        for generation in (0, 1)
        if len(settled := [at for at in all_lines if at["generation"] == generation and at["seconds"] > SETTLED_SECONDS]) > 2
    }
    result = {
        **machine(), "minutes": options.minutes, "ranks": options.ranks, "steps": own[-1]["steps"], "averagings": own[-1]["averagings"],
        "simulated_hours": own[-1]["steps"] * STEP_SECONDS / 3600, "checks": len(own), "resumes": sum(at["saved"] for at in own[:-1]), "kills": 1,
        "mb": own[-1]["mb"], "mb_per_minute": max(growth.values(), default=0.0), "growth": growth,
    }  # fmt: skip
    for name in ("steps", "simulated_hours", "averagings", "checks", "resumes", "kills", "mb", "mb_per_minute"):
        print(f"{name:16}{result[name]:>12,.2f}".removesuffix(".00"))
    if options.json:
        save(options.json, result)
    if result["mb_per_minute"] > GROWTH_MB_PER_MINUTE:
        raise SystemExit(f"memory grows: {growth}")


if __name__ == "__main__":
    main()
