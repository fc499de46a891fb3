"""Who averages with whom. A model may be spread over several ranks, which hold one replica of it between them; those that hold
the same part of it in all replicas average that."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.nn.parallel import DistributedDataParallel

from .dtensors import is_spread, reshard
from .errors import LocalSGDError

REPLICATE_DIM = "dp_replicate"
"""What Accelerate calls that dimension of its device mesh."""

_calls = itertools.count()
"""Of host_groups(), as many on every rank."""


class Replicas:
    """group: the ranks that hold the same part of the model as this one, one in each replica. inside: the ranks of this rank's
    replica, with itself, sorted. mesh: over which the model is spread."""

    def __init__(self, group: dist.ProcessGroup, inside: Sequence[int] = (), mesh: _Grid | None = None) -> None:
        self.group = group
        self.inside = tuple(inside) or (dist.get_rank(),)
        self._mesh = mesh
        self._all_cut = frozenset() if mesh is None else mesh.away(self.inside)

    @property
    def part(self) -> tuple[int, int] | None:
        """Which part of its replica this rank holds, counted from 0, and of how many; None where it holds all of it."""
        return None if self._mesh is None else (self.inside.index(dist.get_rank()), len(self.inside))

    def holders(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """Which ranks of this replica hold the same part of this tensor, with this rank, sorted; empty where it is this rank
        alone."""
        if len(self.inside) == 1:
            return ()
        if self._mesh is None:  # DDP inside
            return self.inside
        alike = self._mesh.alike(self._all_cut - self._mesh.cut(tensor))
        return () if len(alike) == 1 else tuple(alike)


def find_replicas(model: torch.nn.Module, group: dist.ProcessGroup | None, accelerator: Any = None) -> Replicas | None:
    """None where torch.distributed is not initialised.

    group: as the user gives it; None for what the model says: the dimension of its device mesh along which no tensor is cut,
    the group of DDP, else the world. Raises LocalSGDError where there is none, or more than one.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    reshard(model)
    spread: list[Any] = [t for t in itertools.chain(model.parameters(), model.buffers()) if is_spread(t)]
    if not spread:
        ddp = find_ddp(model)
        if group is None and ddp is not None:
            group = ddp.process_group
        group = resolve_group(group)
        assert group is not None
        beside = set() if ddp is None else ranks_of(ddp.process_group)
        return Replicas(group, sorted(beside) if beside & ranks_of(group) == {dist.get_rank()} else ())
    mesh = _Grid(max((_root(t.device_mesh) for t in spread), key=lambda each: each.size()))
    cut = frozenset().union(*map(mesh.cut, spread))
    if group is None:
        group = _of_accelerator(accelerator) or mesh.only_group(cut)
    group = resolve_group(group)
    assert group is not None
    # With those that FSDP reduces gradients with at every step, if it does so along more dimensions than those that cut.
    reduced = frozenset().union(*(mesh.away(t.device_mesh.mesh.flatten().tolist()) for t in spread))
    inside = mesh.alike(cut | (reduced - mesh.away(ranks_of(group) & mesh.ranks)))
    if others := sorted((ranks_of(group) & set(mesh.alike(cut))) - {dist.get_rank()}):
        raise LocalSGDError(
            f"rank {dist.get_rank()} was asked to average with {others}, which hold other parts of the same replica of the model; process_group "
            "must have one rank of each replica: those that hold the same part"
        )
    return Replicas(group, inside, mesh)


def find_ddp(model: torch.nn.Module) -> DistributedDataParallel | None:
    """The DDP wrapper of a model, also where torch.compile wrapped that in turn."""
    model = getattr(model, "_orig_mod", model)
    return model if isinstance(model, DistributedDataParallel) else None


def ranks_of(group: dist.ProcessGroup) -> set[int]:
    """Global ranks; those of a group that torch.distributed does not know are counted from 0."""
    try:
        return set(dist.get_process_group_ranks(group))
    except (KeyError, RuntimeError, ValueError):
        return set(range(group.size()))


def resolve_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The given group, else the world, else None where torch.distributed is not initialised."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            raise TypeError(f"the process group must be a torch.distributed.ProcessGroup or None; got a {type(group).__name__}")
        raise LocalSGDError(f"rank {dist.get_rank()} is not a member of the process group it was asked to average over")
    return group


def host_groups(local_world_size: int | None = None) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Two process groups of this rank: the ranks of its host, and those with the same local rank on all hosts.

    For two levels: DDP inside each host at every step, averaging between hosts::

        inside, between = host_groups()
        model = DistributedDataParallel(model, process_group=inside)
        with LocalSGD(None, model, 8, process_group=between) as local_sgd:

    To be called on all ranks of the world. local_world_size: ranks of a host, the same on all; default LOCAL_WORLD_SIZE, as
    torchrun sets it. Ranks of a host must follow each other, as torchrun numbers them. Raises LocalSGDError where hosts do not
    have equally many, and without a process group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise LocalSGDError("host_groups() needs torch.distributed; call init_process_group() first")
    world = dist.get_world_size()
    size = local_world_size
    if size is None:
        given = os.environ.get("LOCAL_WORLD_SIZE", "")
        size = int(given) if given.isdecimal() else 0
    # Compared without a collective, in which ranks that know better would not take part.
    store = PrefixStore(f"localsgd_ext/hosts/{next(_calls)}/", dist.distributed_c10d._get_default_store())
    store.set(str(dist.get_rank()), str(size))
    sizes = [int(store.get(str(rank))) for rank in range(world)]
    if size < 1 or world % size or len(set(sizes)) > 1:
        said = "; ".join(
            f"{each or 'no LOCAL_WORLD_SIZE'} on that of rank {sizes.index(each)}" for each in dict.fromkeys(sizes)
        )
        raise LocalSGDError(
            f"host_groups() needs hosts of equally many ranks: {world} ranks, and by host {said}; start with torchrun, or pass local_world_size"
        )
    hosts = [list(range(first, first + size)) for first in range(0, world, size)]
    # All ranks make all groups, in the same order.
    inside, _ = dist.new_subgroups_by_enumeration(hosts)
    between, _ = dist.new_subgroups_by_enumeration([list(each) for each in zip(*hosts, strict=True)])
    return inside, between


class _Grid:
    """The ranks of a device mesh, by their place in it."""

    def __init__(self, mesh: Any) -> None:
        self._mesh = mesh
        ranks = mesh.mesh
        places = itertools.product(*map(range, ranks.shape))
        self._place = dict(zip(ranks.flatten().tolist(), places, strict=True))
        self._mine = self._place[dist.get_rank()]
        self.ranks = set(self._place)
        self._known: dict[tuple[Any, Any], frozenset[int]] = {}

    def cut(self, tensor: torch.Tensor) -> frozenset[int]:
        """The dimensions along which a tensor is cut into parts. Raises LocalSGDError where it is a sum that is still to be
        taken."""
        if not is_spread(tensor):
            return frozenset()
        mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
        if (mesh, placements) not in self._known:
            if any(placement.is_partial() for placement in placements):
                raise LocalSGDError(f"a DTensor is placed as {placements}, a sum that was never taken: it cannot be averaged")
            dims = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
            # A dimension of its mesh may be several of this one, flattened.
            ranks = itertools.chain.from_iterable(dist.get_process_group_ranks(mesh.get_group(dim)) for dim in dims)
            self._known[mesh, placements] = self.away(list(ranks))
        return self._known[mesh, placements]

    def away(self, ranks: Collection[int]) -> frozenset[int]:
        """The dimensions along which one has to go from this rank to get to these."""
        if unknown := [rank for rank in ranks if rank not in self._place]:
            raise LocalSGDError(
                f"the model's DTensors lie on device meshes that do not belong together: ranks {unknown} are not in {self._mesh}; make one mesh with "
                "init_device_mesh and take the others from it by name, as mesh['shard']"
            )
        pairs = (zip(self._place[rank], self._mine, strict=True) for rank in ranks)
        return frozenset(dim for pair in pairs for dim, (there, here) in enumerate(pair) if there != here)

    def alike(self, but: Collection[int]) -> list[int]:
        """The ranks at the same place as this one, but for these dimensions; sorted."""
        same = [dim for dim in range(len(self._mine)) if dim not in but]
        return sorted(rank for rank, place in self._place.items() if all(place[dim] == self._mine[dim] for dim in same))

    def only_group(self, cut: Collection[int]) -> dist.ProcessGroup:
        """Of the dimension along which nothing is cut, if there is one; one of several ranks, if there are more."""
        sizes = self._mesh.mesh.shape
        free = [dim for dim in range(len(sizes)) if dim not in cut]
        if not free:
            raise LocalSGDError(
                f"all {self._mesh.size()} ranks of the model's {self._mesh} hold parts of one replica, so there is no other to average with. For FSDP2 "
                "make the mesh of two dimensions, init_device_mesh(device, (replicas, shards), mesh_dim_names=('replicate', 'shard')), and pass "
                "it to fully_shard; else pass process_group, the ranks that hold the same part in all replicas"
            )
        wide = [dim for dim in free if sizes[dim] > 1]
        if len(wide) > 1:
            raise LocalSGDError(
                f"along dimensions {wide} of the model's {self._mesh} nothing is cut, and replicas lie along one of them only; say which: "
                "process_group=mesh['replicate'].get_group()"
            )
        group: dist.ProcessGroup = self._mesh.get_group((wide or free)[0])
        return group


def _root(mesh: Any) -> Any:
    """The mesh that it was taken from."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed.device_mesh import _mesh_resources  # before torch 2.9

    return _mesh_resources.get_root_mesh(mesh)


def _of_accelerator(accelerator: Any) -> dist.ProcessGroup | None:
    mesh = getattr(accelerator, "torch_device_mesh", None)
    if mesh is None or REPLICATE_DIM not in (mesh.mesh_dim_names or ()):
        return None
    group: dist.ProcessGroup = mesh.get_group(REPLICATE_DIM)
    return group
