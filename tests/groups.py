"""Process groups that watch or break the collectives of an averaging, whichever engine makes them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work


class Broken(Work):
    """A collective that ends in an error, as on a broken connection."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work

    def wait(self, *timeout: object) -> bool:
        self._work.wait()
        raise ConnectionError("connection reset by peer")


class WatchedGroup(dist.ProcessGroup):
    """The world, with `watch(call number, tensor, work)` deciding what each all-reduce and each all-to-all gives back.

    Both engines reach it through the same virtual call: the PyTorch one from Python, the native one from C++.
    """

    def __init__(self, watch: Callable[[int, torch.Tensor, Work], Work]) -> None:
        self._world = dist.group.WORLD
        super().__init__(self._world.rank(), self._world.size())
        self._watch = watch
        self.given: list[Work] = []  # C++ does not keep the Python half of a work object alive

    def allreduce(self, tensors: list[torch.Tensor], options: object = None) -> Work:
        return self._given(tensors[0], self._world.allreduce(tensors, dist.AllreduceOptions()))

    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        options: object = None,
    ) -> Work:
        work = self._world.alltoall_base(output, input, output_splits, input_splits, dist.AllToAllOptions())
        return self._given(output, work)

    def _given(self, tensor: torch.Tensor, work: Work) -> Work:
        self.given.append(self._watch(len(self.given) + 1, tensor, work))
        return self.given[-1]


def failing_group(fail_at: int) -> WatchedGroup:
    """Collective number `fail_at`, counted from 1, raises ConnectionError when it is waited for."""
    return WatchedGroup(lambda call, tensor, work: Broken(work) if call == fail_at else work)


class LateGroup(WatchedGroup):
    """All-reduce number `fail_at` fails, and those after it go on travelling: each is done once the test does it, on `late`.

    sent: the buffers of all calls. waited: the late calls that were waited for.
    """

    def __init__(self, fail_at: int) -> None:
        super().__init__(lambda call, tensor, work: Broken(work) if call == fail_at else work)
        self._fail_at = fail_at
        self.sent: list[torch.Tensor] = []
        self.waited: list[int] = []

    @property
    def late(self) -> list[torch.Tensor]:
        return self.sent[self._fail_at :]

    def allreduce(self, tensors: list[torch.Tensor], options: object = None) -> Work:
        self.sent.append(tensors[0])
        if len(self.sent) <= self._fail_at:
            return super().allreduce(tensors, options)
        self.given.append(_Late(len(self.sent), self.waited))
        return self.given[-1]


class _Late(Work):
    def __init__(self, call: int, waited: list[int]) -> None:
        super().__init__()
        self._call, self._waited = call, waited

    def wait(self, *timeout: object) -> bool:
        self._waited.append(self._call)
        return True
