"""LocalSGD over torchft, without any replica: its arguments, its state, and what is imported when."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from localsgd_ext import DiLoCo, LayoutMismatchError, LocalSGDError

from .local_steps import everything
from .tensors import bits, values

pytest.importorskip("torchft", reason="NOT RUN: torchft is not installed")


def _small_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def _offline(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, steps: Any = 1, **options: Any) -> Any:
    """A LocalSGD of a manager that reaches nobody."""
    from torchft import Manager

    from localsgd_ext.integrations.torchft import LocalSGD

    manager = mock.create_autospec(Manager, instance=True)
    return LocalSGD(manager, model, optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), steps, **options)


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: _offline(nn.Linear(2, 2), steps=0), ValueError, "local_sgd_steps must be a whole number >= 1; got 0"),
        (lambda: _offline(nn.Linear(2, 2), steps=True), TypeError, "schedules are not offered"),
        (lambda: _offline(nn.Linear(2, 2), steps=lambda _: 4), TypeError, "schedules are not offered"),
        (lambda: _offline(nn.Linear(2, 2), buffers="drop"), ValueError, "'average', 'broadcast', 'keep'"),
        (lambda: _offline(nn.Linear(2, 2), bucket_mb=0), ValueError, "bucket_mb must be a number of MiB"),
        (lambda: _offline(nn.Linear(2, 2), outer=DiLoCo), TypeError, "wants to be called"),
        (lambda: _offline(nn.Linear(2, 2), outer=torch.optim.AdamW), NotImplementedError, "OuterSGD"),
        (lambda: _offline(nn.Linear(2, 2), optimizer=nn.Linear(2, 2)), TypeError, "optimizer must be a torch.optim.Optimizer"),
        (lambda: _local_sgd_of("no manager"), TypeError, "manager must be a torchft.Manager; got a str"),
        (lambda: _offline(nn.Linear(2, 2)).step(), LocalSGDError, "outside the `with"),
    ],
    ids=[
        "0",
        "a bool",
        "a schedule",
        "buffers",
        "bucket_mb",
        "a class",
        "an optimizer of torch",
        "no optimizer",
        "no manager",
        "outside",
    ],
)
def test_wrong_arguments(make: Callable[[], object], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=re.escape(says)):
        make()


def _local_sgd_of(manager: Any) -> Any:
    from localsgd_ext.integrations.torchft import LocalSGD

    model = nn.Linear(2, 2)
    return LocalSGD(manager, model, torch.optim.SGD(model.parameters(), lr=0.1), 4)


def test_without_torchft() -> None:
    code = "import sys; sys.modules['torchft'] = None; import localsgd_ext; import localsgd_ext.integrations.torchft"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "pip install torchft" in done.stderr.splitlines()[-1]
    code = "import sys; import localsgd_ext; sys.exit('torchft' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_state_dict() -> None:
    def trained(seed: int) -> tuple[Any, nn.Module]:
        torch.manual_seed(seed)
        model = _small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        local_sgd = _offline(model, optimizer, outer=DiLoCo())
        model(values((4, 6), torch.float32, seed, 0)).square().mean().backward()
        optimizer.step()
        return local_sgd, model

    (one, one_model), (other, other_model) = trained(1), trained(2)
    one.num_steps, one.num_syncs, one._anchors.agreed = 7, 3, True
    for number, each in enumerate([*one._anchors.anchor, *one._anchors.momentum]):
        each.copy_(values(each.shape, torch.float32, number, 5))
    places = [tensor.data_ptr() for tensor in other_model.state_dict().values()]
    other.load_state_dict(pickle.loads(pickle.dumps(one.state_dict())))
    assert places == [tensor.data_ptr() for tensor in other_model.state_dict().values()]
    assert everything(one_model) == everything(other_model)
    first, second = one.state_dict(), other.state_dict()
    for key in ("anchor", "momentum"):
        assert len(first[key]) == 1
        assert bits(first[key][0]) == bits(second[key][0])
    momenta = [[s["momentum_buffer"] for s in state["optimizer"]["state"].values()] for state in (first, second)]
    assert all(bits(a) == bits(b) for a, b in zip(*momenta, strict=True))
    assert (second["num_steps"], second["num_syncs"], second["agreed"]) == (7, 3, True)

    before = everything(other_model)
    with pytest.raises(LayoutMismatchError, match="other outer state"):
        other.load_state_dict(_offline(_small_model()).state_dict())
    with pytest.raises(LayoutMismatchError, match="names, shapes"):
        _offline(nn.Linear(2, 2)).load_state_dict(_offline(nn.Linear(3, 2)).state_dict())
    assert before == everything(other_model)


def test_an_exception_starts_no_averaging() -> None:
    local_sgd = _offline(nn.Linear(2, 2), steps=4)
    local_sgd._begun = True
    with pytest.raises(ZeroDivisionError), local_sgd:
        local_sgd.step()
        _ = 1 / 0
    local_sgd._manager.start_quorum.assert_not_called()


def test_a_closing_averaging_that_fails_is_told() -> None:
    model = nn.Linear(2, 2)
    local_sgd = _offline(model, steps=4)
    local_sgd._begun = True
    before = everything(model)
    local_sgd._manager.should_commit.return_value = False  # and errored() is something, too
    with pytest.warns(UserWarning, match="closing averaging was not committed"), local_sgd:
        local_sgd.step()
    local_sgd._manager.allreduce.assert_not_called()
    assert everything(model) == before
    assert (local_sgd.num_steps, local_sgd.num_syncs) == (1, 0)


def test_one_for_each_manager() -> None:
    local_sgd = _offline(nn.Linear(2, 2))
    manager = local_sgd._manager
    manager.register_state_dict_fn.side_effect = AssertionError
    with pytest.raises(LocalSGDError, match="has a LocalSGD already"):
        _local_sgd_of(manager)
