"""What each way of averaging does in answer to a user's questions, found out by running it.

    python -m benchmarks.features [--json FILE] [--rows TEXT ...] [--contestants NAME ...]

Every answer is that of real processes on this machine, over Gloo on the loopback interface; a probe that is not over after 25 s
"hangs". Bytes are counted on the interface, where other programs' count as well: `unshare -n sh -c "ip link set lo up && python
-m benchmarks.features"` (as root) has one of its own. Each contestant is set up as its documentation shows:

localsgd_ext: LocalSGD(None, DDP(model), H); with torchft, localsgd_ext.integrations.torchft.
Accelerate: accelerate.local_sgd.LocalSGD.
torch: DDP with post_localSGD_hook and PeriodicModelAverager. The hook gets subgroups of one rank, so that no gradients travel.
torchft: torchft.local_sgd.LocalSGD and DiLoCo, with a real Manager and LighthouseServer, synchronous quorum, and timeouts of 5
s (10 s for the quorum; the lighthouse waits 5 s for a replica that lives, and takes one for dead after 1.5 s). Its own are up
to a minute.

No launcher watches the processes here: torchrun would end the others once one has failed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from localsgd_ext.dtensors import local_part

from . import contestants, probes
from .averaging import everyone
from .contestants import ACCELERATE, CONTESTANTS, OURS, TORCH, TORCHFT, World
from .record import machine, save

NOT_OFFERED = "not offered"


# What is saved, sent, and made of the mean


def _saved(world: World) -> str:
    with_accelerate = world.contestant in (OURS, ACCELERATE)
    kind: Any = contestants.Prepared if with_accelerate else contestants.LOOPS[world.contestant]
    looped = kind(world, probes.two_layers(), 4).warmed_up()
    looped.fill(2 * world.rank)
    looped.step()
    held = looped.weights()
    if with_accelerate:
        from safetensors.torch import load_file

        looped.accelerator.save_state(str(world.folder / "state"))
        world.barrier.wait()  # rank 0 writes
        held = torch.cat([each.flatten() for each in load_file(world.folder / "state" / "model.safetensors").values()]).tolist()
    found = {0.0: "rank 0's own", 1.0: "the average"}.get(held[0], "something else")
    if with_accelerate:
        return f"{found} (save_state)"
    world.barrier.wait()
    if world.contestant == TORCH:
        from torch.distributed.algorithms.model_averaging.utils import average_parameters

        average_parameters(looped.model.parameters(), everyone())
        asked = "average_parameters()"
    else:
        looped.context.sync()
        asked = "sync()"
    return f"{found}; {'the average' if looped.weights()[0] == 1.0 else 'not the average'} after {asked}"


def _wire(world: World, code: bool) -> float:
    model = nn.Linear(1000, 1000)
    kind: Any
    if world.contestant == OURS:
        kind = type("Coded", (contestants.Ours,), {"options": {"wire": "int8"} if code else {}})
    else:
        kind = type("Coded", (contestants.Diloco,), {"options": {"should_quantize": code}})
    looped = kind(world, model, 1, shape=(1, 1000)).warmed_up()
    return probes.bytes_sent(world, looped.step, model)


def _offers(contestant: str, ours: str, torchfts: str) -> bool:
    """Whether the constructor has an argument for it."""
    where = {
        OURS: ("localsgd_ext", "LocalSGD"),
        ACCELERATE: ("accelerate.local_sgd", "LocalSGD"),
        TORCH: ("torch.distributed.algorithms.model_averaging.averagers", "PeriodicModelAverager"),
        TORCHFT: ("torchft.local_sgd", "DiLoCo"),
    }
    module, name = where[contestant]
    return not {ours, torchfts}.isdisjoint(inspect.signature(getattr(importlib.import_module(module), name)).parameters)


def if_offered(function: Callable[[World], str], ours: str, torchfts: str) -> Callable[[str], str]:
    return lambda contestant: probes.answer(contestant, function) if _offers(contestant, ours, torchfts) else NOT_OFFERED


def fewer_bytes(contestant: str) -> str:
    if not _offers(contestant, "wire", "should_quantize"):
        return NOT_OFFERED
    outcomes = [probes.ask(contestant, _wire, code)[0] for code in (False, True)]
    if found := probes.problem(outcomes):
        return found
    share = outcomes[1].value / outcomes[0].value
    if share < 0.9:
        return f"yes: {share:.2f} of float32"
    without = contestant == TORCHFT and importlib.util.find_spec("triton") is None  # torchft goes on without a word then
    return f"{'not without Triton, as on CPUs' if without else 'no'}: {share:.2f} of float32"


def _outer(world: World) -> str:
    from localsgd_ext import OuterSGD

    if world.contestant == OURS:
        kind = type("Outer", (contestants.Ours,), {"options": {"outer": OuterSGD(lr=0.5, momentum=0.0)}})
    else:
        kind = type("Outer", (contestants.Diloco,), {"outer_lr": 0.5})
    looped = kind(world, probes.two_layers(), 1).warmed_up()
    before = torch.tensor(looped.weights())
    with torch.no_grad():
        for parameter in looped.model.parameters():
            parameter.add_(1 + 2 * world.rank)
    looped.step()
    moved = torch.tensor(looped.weights()) - before
    return "yes" if torch.allclose(moved, torch.ones_like(moved), atol=1e-5) else f"no: {moved.mean():.2f} in place of 1"


def _background(world: World, late: str) -> float:
    """The seconds of the step at which an averaging is due, where rank 1 comes to it, or sends, two seconds late."""
    if world.contestant == OURS:
        kind = type("Overlapping", (contestants.Ours,), {"options": {"overlap_steps": 2}})
        between = 2  # steps until the first has arrived; the next is due another two after it
    else:
        kind = type("Overlapping", (contestants.Diloco,), {"options": {"fragment_sync_delay": 2}})
        between = 4
    looped = kind(world, probes.two_layers(), 4).warmed_up()
    for _ in range(between):
        looped.step()
    looped.fill(world.rank)
    looped.step()
    world.barrier.wait()
    if world.rank == 1 and late == "comes":
        time.sleep(2)
    if world.rank == 1 and late == "sends":
        whole, pauses = looped.manager.allreduce, iter([2.0])

        def late_allreduce(*args: Any, **kwargs: Any) -> Any:
            time.sleep(next(pauses, 0.0))
            return whole(*args, **kwargs)

        looped.manager.allreduce = late_allreduce
    begun = time.perf_counter()
    looped.step()
    seconds = time.perf_counter() - begun
    looped.step()
    looped.step()
    weights = torch.tensor(looped.weights())
    assert torch.allclose(weights, torch.full_like(weights, 0.5)), "not averaged"
    return seconds


def background(contestant: str) -> str:
    if not _offers(contestant, "overlap_steps", "fragment_sync_delay"):
        return NOT_OFFERED
    seconds = {}
    for late in ("comes", "sends") if contestant == TORCHFT else ("comes",):
        outcomes = probes.ask(contestant, _background, late)
        if found := probes.problem(outcomes):
            return found
        seconds[late] = outcomes[0].value
    if seconds["comes"] < 1:
        return "yes, also while it waits for a rank that is late"
    return "yes, but waits for a rank that is late" if seconds["sends"] < 1 else "no"


def _sharded(world: World) -> str:
    """Two replicas, each of two shards. lr=0: weights are the replica's number, and 0.5 once averaged."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = probes.two_layers()
    if world.contestant == ACCELERATE:
        from accelerate import Accelerator, DistributedType
        from accelerate.local_sgd import LocalSGD as AcceleratesLocalSGD

        accelerator = Accelerator(cpu=True)
        accelerator.state.distributed_type = DistributedType.FSDP  # it has no FSDP on CPUs: what one on GPUs shows
        AcceleratesLocalSGD(accelerator, model, 1)
        return "not refused"
    replica, group = world.rank // 2, None
    if world.contestant == TORCHFT:
        mesh = init_device_mesh("cpu", (2,))  # a replica knows nothing of the other
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    if world.contestant == TORCH:
        mesh, group = mesh["shard"], mesh.get_group("replicate")
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def train() -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 4)).square().mean().backward()
        optimizer.step()

    def fill() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(replica)

    if world.contestant == OURS:
        from localsgd_ext import LocalSGD

        with LocalSGD(None, model, 1) as local_sgd:
            fill()
            train()
            local_sgd.step()
    elif world.contestant == TORCH:
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

        fill()
        train()
        PeriodicModelAverager(1, process_group=group).average_parameters(model.parameters())
    else:
        from torchft.local_sgd import LocalSGD as TorchftsLocalSGD

        with TorchftsLocalSGD(contestants.manager(world, model, optimizer, size=2), model, optimizer, 1):
            train()
            fill()
            train()
    values = {value for each in model.parameters() for value in local_part(each).flatten().tolist()}
    train()  # whether it can still be trained
    return "yes" if values == {0.5} else f"no: {sorted(values)} in place of 0.5"


def sharded(contestant: str) -> str:
    ft = contestant == TORCHFT
    outcomes = contestants.run(contestant, _sharded, ranks=4, min_replicas=1 if ft else None, per_replica=2 if ft else 1)
    found = probes.problem(outcomes) or outcomes[0].value
    return "NotImplementedError" if "NotImplementedError" in found else found


ROWS: dict[str, Callable[[str], str]] = {
    "a view of a parameter and its data_ptr stay valid": probes.simple(probes.view),
    "channels_last strides are kept": probes.simple(probes.strides),
    "40 MB of frozen weights stay off the wire, 40 kB are trained": probes.simple(probes.frozen),
    "BatchNorm statistics are equal after an averaging": probes.simple(probes.batch_norm),
    "ranks have 10, 5 and 10 batches": lambda contestant: probes.uneven(contestant, False),
    "the same, and who is done first evaluates": lambda contestant: probes.uneven(contestant, True),
    "another rank raises": lambda contestant: probes.failing(contestant, "raises"),
    "another rank is killed": lambda contestant: probes.failing(contestant, "killed"),
    "the others go on when one of three is killed": probes.goes_on,
    "gradient sync of DDP after an exception in the block": probes.gradient_sync,
    "a rank alone loads other weights before training": probes.simple(probes.other_weights),
    "the model of a rank has one more layer": probes.other_model,
    "NaN in the weights of another rank": probes.simple(probes.nan),
    "what rank 0 saves between averagings": probes.simple(_saved),
    "fewer bytes than float32: int8": fewer_bytes,
    "outer optimizer": if_offered(_outer, "outer", "outer_optimizer"),
    "averages in the background": background,
    "FSDP2, two replicas of two shards": sharded,
}
"""The question, and what answers it for a contestant."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the answers here")
    parser.add_argument("--rows", nargs="+", default=[""], help="only those that hold one of these texts")
    parser.add_argument("--contestants", nargs="+", default=list(CONTESTANTS), choices=CONTESTANTS)
    options = parser.parse_args()
    result: dict[str, Any] = machine()
    result["rows"] = {}
    print("| | " + " | ".join(options.contestants) + " |\n|" + "---|" * (1 + len(options.contestants)))
    for title, function in ROWS.items():
        if any(text in title for text in options.rows):
            row = {contestant: function(contestant) for contestant in options.contestants}
            print(f"| {title} | " + " | ".join(row.values()) + " |", flush=True)
            result["rows"][title] = row
    if options.json:
        save(options.json, result)


if __name__ == "__main__":
    main()
