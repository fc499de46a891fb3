"""The contestants of `benchmarks.features`, each with its own training loop, in processes that may hang, die or be killed."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

OURS, ACCELERATE, TORCH, TORCHFT = CONTESTANTS = ("localsgd_ext", "Accelerate", "torch", "torchft")

LIMIT = 25.0
"""Seconds after which a probe that is not over counts as one that hangs: all of them take less than ten where nothing does."""

TORCHFT_TIMEOUT = timedelta(seconds=5)
"""torchft bounds every wait by timeouts of its own, by default a minute; shorter ones show what it does after them."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "accelerate", "localsgd_ext"])


@dataclass
class World:
    """Where a process is. lighthouse: its address, for contestants that are torchft's."""

    contestant: str
    rank: int
    ranks: int
    folder: Path
    barrier: Barrier
    failed_at: Any
    lighthouse: str | None = None

    def fails_now(self) -> None:
        self.failed_at.value = time.time()

    def since(self) -> float:
        """Seconds since a rank has failed."""
        return time.time() - self.failed_at.value

    def mark(self, name: str) -> None:
        (self.folder / name).touch()

    def wait_for(self, name: str) -> None:
        """Until another rank has set that mark, or for as long as a probe may take."""
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline and not (self.folder / name).exists():
            time.sleep(0.02)


@dataclass
class Outcome:
    """What became of a rank. kind: "result", "error", "hangs" or "dies"; with it the result, the error's text or the exit
    code."""

    kind: str
    value: Any = None


def run(
    contestant: str,
    function: Callable[..., Any],
    *args: Any,
    ranks: int = 2,
    min_replicas: int | None = None,
    per_replica: int = 1,
) -> list[Outcome]:
    """Call function(world, *args) in `ranks` processes. min_replicas: with a lighthouse of torchft that goes on with so
    many."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        address = stack.enter_context(_lighthouse(min_replicas)) if min_replicas else None
        barrier, failed_at = _context.Barrier(ranks), _context.Value("d", 0.0)
        started: list[tuple[BaseProcess, Any]] = []
        for rank in range(ranks):
            ours, theirs = _context.Pipe(duplex=False)
            world = World(contestant, rank, ranks, Path(folder), barrier, failed_at, address)
            process: BaseProcess = _context.Process(
                target=_main, args=(theirs, function, world, args, per_replica), daemon=True
            )
            process.start()
            theirs.close()
            started.append((process, ours))
        deadline = time.monotonic() + LIMIT
        outcomes = [_outcome(process, pipe, deadline) for process, pipe in started]
        for process, _ in started:
            process.kill()
            process.join()
        return outcomes


def _outcome(process: BaseProcess, pipe: Any, deadline: float) -> Outcome:
    if not pipe.poll(max(0.0, deadline - time.monotonic())):
        return Outcome("hangs")
    try:
        return pipe.recv()
    except EOFError:
        process.join()
        return Outcome("dies", process.exitcode)


def _main(pipe: Any, function: Callable[..., Any], world: World, args: tuple[Any, ...], per_replica: int) -> None:
    os.environ.update(
        RANK=str(world.rank), LOCAL_RANK=str(world.rank), WORLD_SIZE=str(world.ranks), LOCAL_WORLD_SIZE=str(world.ranks),
        MASTER_ADDR="127.0.0.1", MASTER_PORT="29500",  # not used: the group meets at a file before anybody looks
        ACCELERATE_USE_CPU="true", GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1",
    )  # fmt: skip
    if not os.environ.get("FEATURES_STDERR"):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    socket.gethostname = lambda: "localhost"  # by which torchft tells others where to find it
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        # A replica of torchft's is a job of its own: the manager is all that joins it to others.
        if not world.lighthouse:
            dist.init_process_group("gloo", init_method=f"file://{world.folder}/store", rank=world.rank, world_size=world.ranks)
        elif per_replica > 1:
            store = f"file://{world.folder}/store-{world.rank // per_replica}"
            dist.init_process_group("gloo", init_method=store, rank=world.rank % per_replica, world_size=per_replica)
        outcome = Outcome("result", function(world, *args))
    except BaseException as error:
        if os.environ.get("FEATURES_STDERR"):
            logging.disable(logging.NOTSET)
            logging.exception("rank %d", world.rank)
        outcome = Outcome("error", f"{type(error).__name__}: {error}")
    pipe.send(outcome)
    os._exit(0)  # as at the end of any script its connections close now; threads of torchft would go on


@contextlib.contextmanager
def _lighthouse(min_replicas: int) -> Iterator[str]:
    """A replica is dead a second and a half after its last sign of life; one that lives is waited for, for five seconds."""
    os.environ.setdefault("RUST_LOG", "error")
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=min_replicas, join_timeout_ms=5_000, quorum_tick_ms=20, heartbeat_timeout_ms=1500
    )
    try:
        yield f"http://127.0.0.1:{server.address().rsplit(':', 1)[1]}"
    finally:
        server.shutdown()


def manager(
    world: World, model: nn.Module, optimizer: torch.optim.Optimizer | None, min_replicas: int = 1, size: int = 1
) -> Any:
    """A manager of torchft. optimizer: what heals with the model, None where the loop registers that itself. size: ranks of a
    replica."""
    from torchft import Manager, ProcessGroupGloo

    inside, port = world.rank % size, world.folder / f"port-{world.rank // size}"
    if inside == 0:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        port.write_text(str(store.port))
    world.barrier.wait()
    state: dict[str, Any] = {"load_state_dict": None, "state_dict": None}
    if optimizer is not None:

        def load(saved: dict[str, Any]) -> None:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])

        state = {
            "load_state_dict": load,
            "state_dict": lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        }
    made = Manager(
        pg=ProcessGroupGloo(timeout=TORCHFT_TIMEOUT), min_replica_size=min_replicas, use_async_quorum=False, timeout=TORCHFT_TIMEOUT,
        quorum_timeout=2 * TORCHFT_TIMEOUT, connect_timeout=TORCHFT_TIMEOUT, rank=inside, world_size=size, store_addr="127.0.0.1",
        store_port=int(port.read_text()), lighthouse_addr=world.lighthouse, replica_id=f"replica_{world.rank // size}",
        hostname="localhost", **state,
    )  # fmt: skip
    if inside == 0:
        made.kept = store
    world.barrier.wait()
    time.sleep(0.5)  # some heartbeats: the lighthouse begins with all of them
    return made


class Loop:
    """A contestant's training loop as its documentation shows it, over a model with one input of `shape`.

    lr: 0 leaves the weights as a probe has set them. ddp: False for a plain module, where the contestant takes one.
    """

    def __init__(
        self, world: World, model: nn.Module, interval: int, lr: float = 0.0, ddp: bool = True, shape: tuple[int, ...] = (4, 4)
    ) -> None:
        self.world, self.interval, self.shape = world, interval, shape
        self.model: Any = model  # indexed where it is a Sequential
        self.wrapped: Any = model
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer: Any = torch.optim.SGD(trained, lr=lr)
        self.inputs = torch.Generator().manual_seed(world.rank)
        self.context: Any = contextlib.nullcontext()
        self.set_up(ddp)

    def set_up(self, ddp: bool) -> None:
        raise NotImplementedError

    def after_step(self) -> None:
        """What follows optimizer.step()."""

    def __enter__(self) -> Loop:
        self.context.__enter__()
        return self

    def warmed_up(self) -> Loop:
        """Enter and average once: from then on all are at the same step, and torchft's replicas have healed."""
        self.__enter__()
        for _ in range(self.interval):
            self.step()
        return self

    def __exit__(self, *exc: Any) -> None:
        self.context.__exit__(*exc)

    def step(self) -> None:
        self.local_step()
        self.after_step()

    def local_step(self) -> None:
        self.optimizer.zero_grad()
        self.wrapped(torch.randn(self.shape, generator=self.inputs)).square().mean().backward()
        self.optimizer.step()

    @torch.no_grad()
    def fill(self, value: float) -> None:
        for parameter in self.model.parameters():
            parameter.fill_(value)

    def weights(self) -> list[float]:
        return torch.cat([each.detach().flatten() for each in self.model.parameters()]).tolist()

    def end(self) -> None:
        """At the end of the script, after training."""


class Ours(Loop):
    options: dict[str, Any] = {}  # noqa: RUF012

    def set_up(self, ddp: bool) -> None:
        from localsgd_ext import LocalSGD

        if ddp:
            self.wrapped = DistributedDataParallel(self.model)
        self.context = LocalSGD(None, self.wrapped, self.interval, **self.options)

    def after_step(self) -> None:
        self.context.step()


class Prepared(Loop):
    """With an Accelerator: Accelerate's helper, or ours in its place."""

    def set_up(self, ddp: bool) -> None:
        from accelerate import Accelerator

        self.accelerator = Accelerator(cpu=True)
        self.wrapped, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
        from accelerate.local_sgd import LocalSGD as Theirs

        from localsgd_ext import LocalSGD as Ours

        kind: Any = Ours if self.world.contestant == OURS else Theirs
        self.context = kind(accelerator=self.accelerator, model=self.wrapped, local_sgd_steps=self.interval)
        if self.world.contestant == OURS:
            self.accelerator.register_for_checkpointing(self.context)

    def after_step(self) -> None:
        self.context.step()


class Torch(Loop):
    """Post-local SGD as the documentation of PeriodicModelAverager has it. Subgroups of one rank, so that no gradients
    travel."""

    def set_up(self, ddp: bool) -> None:
        import torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook as post_local_sgd
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

        if ddp:
            wrapped = self.wrapped = DistributedDataParallel(self.model)
            alone, _ = dist.new_subgroups(1)
            state = post_local_sgd.PostLocalSGDState(process_group=None, subgroup=alone, start_localSGD_iter=0)
            wrapped.register_comm_hook(state, post_local_sgd.post_localSGD_hook)
        # It averages first right after the warm-up: so after every `interval` steps, as the others do.
        self.averager = PeriodicModelAverager(self.interval, warmup_steps=self.interval - 1)

    def after_step(self) -> None:
        self.averager.average_parameters(self.model.parameters())


class Torchft(Loop):
    min_replicas = 1

    def set_up(self, ddp: bool) -> None:
        from torchft.local_sgd import LocalSGD

        self.manager = manager(self.world, self.model, self.optimizer, self.min_replicas)
        self.context = LocalSGD(self.manager, self.model, self.optimizer, self.interval)

    def end(self) -> None:
        self.manager.shutdown(wait=False)


class OursOverTorchft(Torchft):
    def set_up(self, ddp: bool) -> None:
        from localsgd_ext.integrations.torchft import LocalSGD

        self.manager = manager(self.world, self.model, None, self.min_replicas)
        self.context = LocalSGD(self.manager, self.model, self.optimizer, self.interval)

    def after_step(self) -> None:
        self.context.step()


class Diloco(Torchft):
    options: dict[str, Any] = {}  # noqa: RUF012
    outer_lr = 1.0

    def set_up(self, ddp: bool) -> None:
        from torchft.local_sgd import DiLoCo

        self.manager = manager(self.world, self.model, self.optimizer)
        outer = torch.optim.SGD(self.model.parameters(), lr=self.outer_lr)
        self.context = DiLoCo(self.manager, [self.model], self.optimizer, outer, self.interval, **self.options)


LOOPS: dict[str, type[Loop]] = {OURS: Ours, ACCELERATE: Prepared, TORCH: Torch, TORCHFT: Torchft}


def loop(world: World, model: nn.Module, interval: int, **settings: Any) -> Loop:
    return LOOPS[world.contestant](world, model, interval, **settings)
