"""What every rank of `localsgd-ext demo` runs: a small GPT, real text, and the loop of Accelerate's local SGD tutorial."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import sysconfig
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD as AccelerateLocalSGD
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DataLoader, Dataset

from localsgd_ext import LocalSGD
from localsgd_ext.backends import pick
from localsgd_ext.wire import allreduce_bytes

from .demo import Config, Run, end_with_launcher

CONTEXT = 128  # bytes that the model sees at once
WIDTH, LAYERS, HEADS = 192, 4, 6
BATCH = 4  # windows per rank and step
LEARNING_RATE = 1.5e-3
EVALUATION_WINDOWS = 32
EVALUATIONS = 5  # on the way; the final model is evaluated in addition
TEXT_BYTES = 4_000_000
SEED = 20


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm_mlp = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm_attention(x)).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    """A byte-level GPT: (batch, length) bytes as int64 to (batch, length, 256) logits of the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(256, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.size(1), device=tokens.device)
        logits: Tensor = self.head(self.norm(self.blocks(self.token(tokens) + self.position(positions))))
        return logits


def loss_function(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy, a mean in nats per byte."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """`count` random windows of a text, the same ones for the same seed, each as (inputs, the same shifted by one byte)."""

    def __init__(self, text: Tensor, count: int, seed: int) -> None:
        self._text = text
        self._starts = torch.randint(len(text) - CONTEXT, (count,), generator=torch.Generator().manual_seed(seed)).tolist()

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self._text[self._starts[index] : self._starts[index] + CONTEXT + 1].long()
        return window[:-1], window[1:]


def read_text() -> tuple[Tensor, Tensor]:
    """The source files of Python's standard library as bytes: nine of ten to train on, every tenth held out."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}  # the last: tables, not text
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    size = 0
    paths = sorted(path for path in root.rglob("*.py") if skipped.isdisjoint(path.relative_to(root).parts))
    for index, path in enumerate(paths):
        if size >= TEXT_BYTES:
            break
        content = path.read_bytes()
        size += len(content)
        parts[index % 10 == 9].append(content)
    train, held_out = (torch.frombuffer(bytearray(b"".join(part) or b"\n"), dtype=torch.uint8) for part in parts)
    if min(len(train), len(held_out)) <= 10 * CONTEXT:
        raise FileNotFoundError(f"this Python's standard library holds no source files to train on ({root})")
    return train, held_out


class Meter:
    """The runs differ in how the ranks' weights meet. The classes below are used like a LocalSGD and meter what that takes.

    seconds: host time in averagings, None where it cannot be told apart. bytes_sent: by this rank, by a ring's arithmetic.
    """

    evaluated = "rank 0's own weights"
    seconds: float | None = 0.0
    bytes_sent = 0

    def evaluation(self) -> contextlib.AbstractContextManager[Any]:
        """The weights inside are those to evaluate on the way. What it takes is not part of the training, and not metered."""
        return contextlib.nullcontext()

    def count(self, seconds: float, bytes_sent: int) -> None:
        self.seconds = (self.seconds or 0.0) + seconds
        self.bytes_sent += bytes_sent


class OurLocalSGD(Meter, LocalSGD):
    """localsgd_ext.LocalSGD, its reports added up."""

    evaluated = "averaged weights"

    def evaluation(self) -> contextlib.AbstractContextManager[Any]:
        return self.averaged()

    def step(self) -> None:
        with self._counting():
            super().step()

    def __exit__(self, *exc: Any) -> None:
        with self._counting():
            super().__exit__(*exc)

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        before = self.num_syncs
        yield
        if self.num_syncs > before and (report := self.report) is not None:
            self.count(report.seconds, report.wire_bytes)


class TheirLocalSGD(Meter, AccelerateLocalSGD):
    """accelerate.local_sgd.LocalSGD with a clock around its averaging."""

    def _sync_and_avg_model_params(self) -> None:
        begun = time.perf_counter()
        super()._sync_and_avg_model_params()
        seconds = time.perf_counter() - begun
        self.count(seconds, allreduce_bytes(parameter_bytes(self.model), self.accelerator.num_processes))


class PlainDDP(Meter, contextlib.nullcontext[Any]):
    """No local SGD: DDP all-reduces the gradients inside every backward pass."""

    seconds = None

    def __init__(self, accelerator: Accelerator, model: nn.Module, local_sgd_steps: int, enabled: bool) -> None:
        super().__init__(self)  # `with` gives the object itself
        self._bytes_per_step = allreduce_bytes(parameter_bytes(model), accelerator.num_processes)

    def step(self) -> None:
        self.bytes_sent += self._bytes_per_step


KINDS: dict[str, Any] = {"localsgd_ext": OurLocalSGD, "accelerate": TheirLocalSGD, "ddp": PlainDDP}


def parameter_bytes(model: nn.Module) -> int:
    """Bytes of all parameters, and so of all gradients."""
    return sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())


def train(kind: str, accelerator: Accelerator, config: Config, text: Tensor, held_out: Windows, bar: Any) -> Run:
    """One run, from the same weights and over the same data as every other run."""
    torch.manual_seed(SEED)
    model: nn.Module = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    total = config.steps * accelerator.num_processes  # what prepare() makes of a scheduler moves on by num_processes at a step
    scheduler = torch.optim.lr_scheduler.LambdaLR(  # warmup over a twentieth of the run, then half a cosine down to zero
        optimizer, lambda at: min(1.0, (20 * at + 1) / total) * 0.5 * (1 + math.cos(math.pi * at / total))
    )
    dataloader = DataLoader(Windows(text, total * BATCH, SEED), batch_size=BATCH)
    model, optimizer, training_dataloader, scheduler = accelerator.prepare(model, optimizer, dataloader, scheduler)
    losses: list[Tensor] = []
    evaluations: list[tuple[int, float]] = []
    aside = 0.0  # seconds spent on evaluations
    accelerator.wait_for_everyone()
    begun = time.perf_counter()

    with KINDS[kind](accelerator, model, config.local_sgd_steps, enabled=accelerator.num_processes > 1) as local_sgd:
        for batch in training_dataloader:
            with accelerator.accumulate(model):
                inputs, targets = batch
                loss = loss_function(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                local_sgd.step()
            losses.append(loss.detach())
            if len(losses) % math.ceil(config.steps / EVALUATIONS) == 0:
                paused = time.perf_counter()
                with local_sgd.evaluation():
                    evaluations.append((len(losses), evaluate(accelerator, model, held_out)))
                aside += time.perf_counter() - paused
            if bar is not None:
                if len(losses) % 5 == 1:  # not more often: reading a loss waits for the device
                    bar.set_description(kind, refresh=False)
                    bar.set_postfix(loss=loss.item(), held_out=evaluations[-1][1] if evaluations else "-", refresh=False)
                bar.update()

    training_losses = torch.stack(losses).tolist()  # waits for the device
    seconds = time.perf_counter() - begun - aside
    tokens_per_step = BATCH * CONTEXT * accelerator.num_processes
    return Run(
        name=kind,
        evaluated=local_sgd.evaluated,
        tokens_per_step=tokens_per_step,
        tokens_per_second=tokens_per_step * config.steps / seconds,
        averaging_seconds=local_sgd.seconds,
        held_out_loss=evaluate(accelerator, model, held_out),
        megabytes_sent=local_sgd.bytes_sent / 1e6,
        identical=ranks_are_identical(model),
        losses=training_losses,
        evaluations=evaluations,
    )


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, held_out: Windows) -> float:
    """Mean loss over all held-out windows, nats per byte, with the weights as they are."""
    model = accelerator.unwrap_model(model)
    batches = ((x.to(accelerator.device), y.to(accelerator.device)) for x, y in DataLoader(held_out, batch_size=16))
    return sum(loss_function(model(x), y).item() * len(x) for x, y in batches) / len(held_out)


def ranks_are_identical(model: nn.Module) -> bool:
    """Whether all ranks hold the same bits in every parameter and buffer."""
    tensors = (tensor.detach().cpu().contiguous() for tensor in (*model.parameters(), *model.buffers()))
    digest = hashlib.sha256(b"".join(tensor.flatten().view(torch.uint8).numpy().tobytes() for tensor in tensors))
    return len(set(gather_object([digest.hexdigest()]))) == 1


@record  # leaves an error in a file for the launcher
def run_all(config: Config) -> None:
    """Train with ours, then with the baseline; rank 0 writes the results."""
    warnings.filterwarnings("ignore", category=UserWarning, module=r"(accelerate|torch)\.")
    accelerator = Accelerator(cpu=config.cpu)
    text, held_out_text = read_text()
    held_out = Windows(held_out_text, EVALUATION_WINDOWS, SEED + 1)
    kinds = [kind for kind in ("localsgd_ext", config.baseline) if kind in KINDS]
    # What happens once per process (connections, kernels, thread pools) should not count for whichever run comes first.
    inputs, targets = (tensors.to(accelerator.device) for tensors in next(iter(DataLoader(held_out, batch_size=BATCH))))
    accelerator.backward(loss_function(accelerator.prepare(GPT())(inputs), targets))
    pick("auto", {accelerator.device.type})  # builds the native engine if it has to be
    bar: Any = None
    with contextlib.suppress(ImportError):
        from tqdm import tqdm

        hidden = None if accelerator.is_main_process else True  # None: on a terminal only
        bar = tqdm(total=len(kinds) * config.steps, unit="step", disable=hidden)
    runs = [train(kind, accelerator, config, text, held_out, bar) for kind in kinds]
    if bar is not None:
        bar.close()
    if accelerator.is_main_process:
        Path(config.result).write_text(json.dumps([asdict(run) for run in runs]))
    accelerator.end_training()


def main(config: str) -> None:
    """One rank. config: a `Config` as JSON."""
    arguments = Config(**json.loads(config))
    threading.Thread(target=end_with_launcher, args=(arguments.launcher_pid,), daemon=True).start()
    status = 1
    with contextlib.suppress(Exception):
        run_all(arguments)
        status = 0
    # The interpreter's shutdown can wait for ranks that wait for this one, and Gloo's thread can abort in it.
    os._exit(status)
