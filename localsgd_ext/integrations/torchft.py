"""LocalSGD over a torchft manager: a replica that is lost does not end the run, and one that returns heals."""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist

from ..anchors import Anchors
from ..arguments import check_bucket_mb, check_choices
from ..collectives import Terms, wait
from ..dtensors import is_spread
from ..errors import LayoutMismatchError, LocalSGDError
from ..items import check_in_place
from ..models import Selection, check_model, check_parts
from ..outer import OuterSGD, check_outer
from ..replicas import find_ddp
from ..wire import Mode
from .staged import ENGINE, WIRE, StagedBinding, SummingGroup

try:
    from torchft import Manager
except ImportError as error:
    raise ImportError(
        f"localsgd_ext.integrations.torchft needs torchft, which cannot be imported ({error}); pip install torchft"
    ) from error

KEY = "localsgd_ext"
"""Under which the state is registered with the manager."""


class LocalSGD:
    """Train a copy of the model in every replica group of a torchft manager and average those that are alive every few steps::

        with LocalSGD(manager, model, optimizer, local_sgd_steps=8) as local_sgd:
            while manager.current_step() < rounds:
                ...
                optimizer.step()
                local_sgd.step()

    At each averaging the live replicas form a quorum; what they send travels in flat buckets, and only when the manager has
    committed the round are the means copied to the tensors, in place. A collective that fails changes nothing: each replica
    goes on with its own weights, and its progress counts in the next average. A replica that was lost and returns, or has
    missed an average, takes over model, inner optimizer, outer state and counters of a live one, contributes nothing to that
    average, and receives it. The first `with` averages on entry, so that all begin alike, and one that returns begins with the
    others' next round; after n rounds `manager.current_step()` is therefore n + 1.

    Local SGD: Stich 2019, arXiv 1805.09767. DiLoCo: Douillard et al. 2023, arXiv 2311.08105.

    Args:
        manager: a `torchft.Manager`, of synchronous or asynchronous quorum. Its `load_state_dict` and `state_dict` may be None:
            this object registers what it needs, once for each manager; register only what goes beside it, such as a learning
            rate schedule. The lighthouse's join timeout should be longer than replicas may arrive apart, and `quorum_timeout`
            longer than a round besides: one that returns waits for the others' next averaging. The process group's own timeout
            bounds how long a collective is waited for.
        model: a module, or a DDP model over the ranks inside a replica group; the same in all groups.
        optimizer: the inner optimizer.
        local_sgd_steps: average every so many step() calls, a whole number >= 1.
        outer: None for taking the mean, or `OuterSGD`, `DiLoCo`, `SlowMo`. Anchor and momentum are float32 (float64 for
            float64), and equal in all live replicas.
        buffers: what happens to float buffers in the state dict: "average", "broadcast" (follow one replica) or "keep"; integer
            buffers follow one replica unless "keep". Healing takes over all of them in any case.
        bucket_mb: size of one bucket in MiB; None for the device's default.

    Since nothing may be written before the commit, all that is averaged is staged at once: memory for one copy of what is
    trained. Values travel in the parameters' own dtype (in float32 for 16-bit ones with `outer`); lossy wires, overlap,
    fragments, schedules and a look for NaN are not offered here.

    Replicas should leave after the same round, as above. Shut the manager down after the block: as long as it gives signs of
    life, the others' averagings wait for this replica until the lighthouse's join timeout.

    Attributes:
        num_steps: counted steps. num_syncs: averages received. num_participants: of how many replicas' weights the last one is
        the mean.

    Raises:
        TypeError, ValueError: an argument is not allowed; the message says what is.
        NotImplementedError: other outer optimizers, FSDP, DTensors.
        LocalSGDError: the manager has a LocalSGD already, or a tensor has no mean.
        LayoutMismatchError: in an averaging, where this replica's tensors or options differ from the first live one's. The
            others go on.
        Whatever the manager raises: TimeoutError where no quorum comes together, RuntimeError after its `max_retries`.
    """

    def __init__(
        self,
        manager: Manager,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        local_sgd_steps: int,
        *,
        outer: OuterSGD | None = None,
        buffers: str = "average",
        bucket_mb: float | None = None,
    ) -> None:
        if not isinstance(manager, Manager):
            raise TypeError(f"manager must be a torchft.Manager; got a {type(manager).__name__}")
        check_model(model)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer; got a {type(optimizer).__name__}")
        if type(local_sgd_steps) is not int:
            raise TypeError(
                f"local_sgd_steps must be a whole number >= 1 (schedules are not offered with torchft); got {local_sgd_steps!r}"
            )
        if local_sgd_steps < 1:
            raise ValueError(f"local_sgd_steps must be a whole number >= 1; got {local_sgd_steps}")
        described = check_outer(outer)
        if not isinstance(outer, OuterSGD | None):
            raise NotImplementedError(f"with torchft outer must be None, OuterSGD(...), DiLoCo() or SlowMo(); got {described}")
        check_choices(wire=WIRE, backend=ENGINE, buffers=buffers)
        check_bucket_mb(bucket_mb)
        check_parts(model)
        for name, parameter in model.named_parameters():
            if is_spread(parameter):
                raise NotImplementedError(f"parameter {name!r} is a DTensor, which LocalSGD over torchft does not average")

        self.num_steps = self.num_syncs = self.num_participants = 0
        self._manager, self._optimizer, self._outer, self._bucket_mb = manager, optimizer, outer, bucket_mb
        self._interval = local_sgd_steps
        ddp = find_ddp(model)
        self._module = model if ddp is None else ddp.module
        self._selection = Selection(model, buffers)
        for item in self._selection.items():
            check_in_place(item)
        self._options = f"{described} {buffers} {bucket_mb} {local_sgd_steps}"
        self._group = SummingGroup(manager)
        self._bindings: dict[Mode, StagedBinding] = {}
        self._anchors: Anchors | None = None
        self._phase = 0  # steps since the last averaging, also one that was not committed
        self._since = 0  # steps since the last average was received
        self._inside = self._begun = self._healed = False
        self._failed: list[dist.Work] = []  # may go on writing to their buffers until the process group is made anew
        self._bind(Mode.WIRE)  # says at once what cannot be averaged
        try:
            manager.register_state_dict_fn(KEY, self._heal, self.state_dict)
        except AssertionError:
            raise LocalSGDError("this manager has a LocalSGD already; enter that one again, or make another manager") from None

    def __enter__(self) -> LocalSGD:
        if self._inside:
            raise LocalSGDError("this LocalSGD was entered again inside its own `with` block; leave the block first")
        if not self._begun:
            self.synchronize()
            self._begun = True
        self._inside = True
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, *_: object) -> None:
        """Average what was not averaged yet, once; warn where that was not committed. After an exception start nothing."""
        self._inside = False
        if exc is None and self._since and not self.synchronize():
            warnings.warn(
                "the closing averaging was not committed: these are this replica's own weights; synchronize() tries again",
                stacklevel=2,
            )

    def step(self) -> None:
        """Count a step, and average if one is due. Call it once after each optimizer.step(), in all replicas alike.

        Raises LocalSGDError outside the `with` block.
        """
        if not self._inside:
            raise LocalSGDError("step() was called outside the `with LocalSGD(...)` block")
        self.num_steps += 1
        self._phase += 1
        self._since += 1
        if self._phase >= self._interval:
            self.synchronize()

    def synchronize(self) -> bool:
        """Average now, in all live replicas alike; the next round begins here. Gives whether the average was committed.

        Where it was not (a replica was lost meanwhile, a collective failed), this replica keeps its weights, and a new round
        begins all the same, as in torchft's own LocalSGD. The steps are not undone: they are as good a part of the next mean,
        or of an outer step's progress from the anchor, which has not moved. Nor is it tried again at once: replicas may
        disagree on what was committed, and one that tried again in a step of its own would wait for the others for most of a
        round. One that alone did not commit is a step behind, and heals at the next averaging.
        """
        manager, self._healed, self._phase = self._manager, False, 0
        # Buffers made inside inference_mode() could never be used outside it again.
        with torch.inference_mode(False), torch.no_grad():
            committed, sent = False, None
            try:
                manager.start_quorum()  # here a synchronous quorum heals
                # Nobody trains meanwhile, so a state that is being sent to a healing replica stays as it is, and needs no copy.
                manager.wait_quorum()
                sent = self._exchange()
            except LayoutMismatchError as mismatch:
                manager.report_error(mismatch)
                with contextlib.suppress(Exception):
                    manager.should_commit()  # the other ranks of this replica wait for its vote
                raise
            finally:
                if sent is None:
                    self._bindings = {}  # collectives that failed may still write to the staging buffers
            committed = manager.should_commit()  # here an asynchronous quorum heals: the tensors are another's then
            self._phase = 0
            if committed:
                assert sent is not None
                self._apply(*sent)
        return committed

    def _exchange(self) -> tuple[StagedBinding, Terms] | None:
        """Send and receive; None where something failed. Writes to no tensor of the model."""
        manager, binding = self._manager, self._bind(Mode.WIRE)
        if manager.errored():
            return None
        rows = self._tell(binding)
        if rows is None:
            return None
        active = [row for row, (counts, *_) in enumerate(rows) if counts]
        if not active:
            manager.report_error(LocalSGDError("no replica in the quorum has weights to average"))
            return None
        root, contributes = active[0], self._contributes()
        if rows[root][1] != self._digest(binding):
            raise LayoutMismatchError(
                "this replica's tensors (names, shapes, strides, dtypes) or options (outer, buffers, bucket_mb, "
                "local_sgd_steps) differ from those of the first live replica; all replicas need the same"
            )
        if self._anchors is not None:
            trained = any(rows[row][2] for row in active)
            if trained and contributes and not self._anchors.agreed:
                raise LayoutMismatchError(
                    "the other replicas have outer state, and this one, at the same manager step, has none: load the "
                    "LocalSGD's state with the manager's"
                )
            if not trained:  # the mean is where all begin, and no progress for an outer step
                binding = self._bind(Mode.VALUES)
        terms = Terms(contributes, len(active), root)
        group = cast("dist.ProcessGroup", self._group)
        binding.take(1)
        works = [bucket.start(group, terms) for bucket in binding.staged]
        for number, work in enumerate(works):
            wait(work)
            if manager.errored():
                self._failed = works[number:]
                return None
        return binding, terms

    def _tell(self, binding: StagedBinding) -> list[list[int]] | None:
        """For each participant whether it contributes, its layout, and whether it has trained since all held the same weights.

        The manager's own division is by all participants, also ones that are healing and send zeros: at the first step, at
        which all take over the first one's weights, the mean would be a fraction of them. So sums travel, to be divided by the
        number of those that contribute.
        """
        manager, device = self._manager, binding.device
        header = torch.zeros(max(1, manager.num_participants()), 3, dtype=torch.int64)
        self._group.row = -1
        if self._contributes():
            self._group.row = row = cast("int", manager.participating_rank())
            agreed = self._anchors is None or self._anchors.agreed
            header[row] = torch.tensor([1, self._digest(binding), self._since if agreed else 0])
        header = header.to(device)
        wait(self._group.allreduce([header], None))
        return None if manager.errored() else header.tolist()

    def _contributes(self) -> bool:
        """A replica that has just healed holds a copy of another's weights, which would count twice."""
        manager = self._manager
        return manager.is_participating() and manager.participating_rank() is not None and not self._healed

    def _apply(self, binding: StagedBinding, terms: Terms) -> None:
        group = cast("dist.ProcessGroup", self._group)
        for bucket in binding.staged:
            bucket.finish(group, terms)
        binding.give(1)
        if self._anchors is not None and binding.mode is Mode.VALUES:
            del self._bindings[Mode.VALUES]  # seldom needed
            self._bindings[Mode.WIRE].agree()
        self._failed = []
        self._since = 0
        self.num_syncs += 1
        self.num_participants = terms.divisor

    def state_dict(self) -> dict[str, Any]:
        """Model, inner optimizer, outer state and counters: what a healing replica takes over.

        It holds the live tensors: copy or save it at once. For a checkpoint save it, and the manager's `state_dict()`, in any
        replica right after an averaging.
        """
        binding, anchors = self._bind(Mode.WIRE), self._anchors
        return {
            "layout": binding.layout,
            "model": self._module.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "num_steps": self.num_steps,
            "num_syncs": self.num_syncs,
            "phase": self._phase,
            "since": self._since,
            "anchor": [] if anchors is None else anchors.anchor,
            "momentum": [] if anchors is None else anchors.momentum,
            "agreed": anchors is not None and anchors.agreed,
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave, in place. Before the block in all replicas alike, with the manager's own state.

        Raises LayoutMismatchError where it is of other tensors or of another kind of outer optimizer; nothing has been loaded
        then.
        """
        binding, anchors = self._bind(Mode.WIRE), self._anchors
        pairs = []
        if anchors is not None:
            kept, saved = [*anchors.anchor, *anchors.momentum], [*state.get("anchor", ()), *state.get("momentum", ())]
            if [each.shape for each in kept] != [each.shape for each in saved]:
                raise LayoutMismatchError("the state was saved with other outer state than outer= asks for")
            pairs = list(zip(kept, saved, strict=True))
        if state.get("layout") != binding.layout:
            raise LayoutMismatchError(
                "the state is not one of this LocalSGD: names, shapes, strides or dtypes of the tensors differ"
            )
        self._module.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        for mine, theirs in pairs:
            mine.copy_(theirs)
        if anchors is not None:
            anchors.agreed = state["agreed"]
        self.num_steps, self.num_syncs = state["num_steps"], state["num_syncs"]
        self._phase, self._since = state["phase"], state["since"]

    def _heal(self, state: Mapping[str, Any]) -> None:
        self.load_state_dict(state)
        self._healed = True

    def _bind(self, mode: Mode) -> StagedBinding:
        items = self._selection.items()
        binding = self._bindings.get(mode)
        if binding is None or not binding.fits(items):
            with torch.inference_mode(False), torch.no_grad():
                binding = StagedBinding(items, mode, self._group, self._bucket_mb, self._outer, self._anchors)
            self._bindings[mode] = binding
            if mode is Mode.WIRE:
                self._anchors = binding.anchors
        return binding

    def _digest(self, binding: StagedBinding) -> int:
        digest = hashlib.sha256(f"{binding.layout} {self._options}".encode()).digest()
        return int.from_bytes(digest[:8], "little", signed=True)
