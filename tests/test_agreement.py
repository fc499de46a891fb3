"""What has to be equal on all ranks is checked on entry, and the error says what differs and where."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from localsgd_ext import LayoutMismatchError, LocalSGD, agreement

from .ranks import run_ranks
from .tensors import bits, values


def _model(kind: str, odd: bool) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    if odd:
        if kind == "width":
            model[0] = nn.Linear(4, 7)
        elif kind == "dtype":
            model[1].to(torch.float64)
        elif kind == "extra":
            model.append(nn.Linear(2, 2))
        elif kind == "frozen":
            model[0].bias.requires_grad_(False)
        elif kind == "strides":
            model[0].weight.data = model[0].weight.data.t().contiguous().t()
        elif kind == "order":
            model[0]._parameters["weight"] = model[0]._parameters.pop("weight")
    if kind == "tied":
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        if odd:
            model[1].weight = model[0].weight
    return model


def _mismatch(rank: int, kind: str, odd_rank: int, options: dict[str, Any]) -> str:
    model = _model(kind, rank == odd_rank)
    before = [bits(p) for p in model.parameters()]
    chosen = {"local_sgd_steps": 4} | (options if rank == odd_rank else {})
    with pytest.raises(LayoutMismatchError) as caught, LocalSGD(None, model, **chosen):
        raise AssertionError("entered")
    assert [bits(p) for p in model.parameters()] == before
    return str(caught.value)


CASES = {
    "width": ("ranks 0, 1: tensor 0.weight: float32 of shape [6, 4]", "rank 2: tensor 0.weight: float32 of shape [7, 4]"),
    "dtype": ("tensor 1.weight: float32", "rank 2: tensor 1.weight: float64"),
    "extra": ("ranks 0, 1: nothing more", "rank 2: tensor 2.weight"),
    "frozen": ("ranks 0, 1: tensor 0.bias: float32 of shape [6], trainable", "rank 2: tensor 1.weight"),
    "strides": ("strides [4, 1]", "rank 2: tensor 0.weight: float32 of shape [6, 4], trainable, strides [1, 6]"),
    "order": ("ranks 0, 1: tensor 0.weight", "rank 2: tensor 0.bias"),
    "tied": ("ranks 0, 1: tensor 1.weight", "rank 2: tensor 1.bias"),
}


@pytest.mark.parametrize("kind", CASES)
def test_other_tensors_are_an_error_on_every_rank(kind: str) -> None:
    texts = run_ranks(_mismatch, 3, kind, 2, {})
    assert texts == [texts[0]] * 3
    for part in CASES[kind]:
        assert part in texts[0]


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("local_sgd_steps", 8, "local_sgd_steps: 8"),
        ("wire", "float32", "wire: float32"),
        ("buffers", "keep", "buffers: keep"),
        ("bucket_mb", 1.5, "bucket_mb: 1.5"),
        ("nonfinite", "ignore", "nonfinite: ignore"),
    ],
)
def test_other_options_are_an_error_on_every_rank(option: str, value: object, said: str) -> None:
    texts = run_ranks(_mismatch, 2, "", 0, {option: value})
    assert texts == [texts[0]] * 2
    assert f"rank 0: option {said}; rank 1: option {option}: " in texts[0]


def _other_seeds(rank: int, frozen: bool) -> tuple[list[str], list[bytes], list[bytes]]:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    with torch.no_grad():
        for salt, parameter in enumerate(model.parameters()):
            parameter.copy_(values(tuple(parameter.shape), torch.float32, salt, rank if not frozen or salt == 1 else 0))
    model[0].bias.requires_grad_(not frozen)
    own = [bits(t) for t in model.state_dict().values()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with LocalSGD(None, model, 4):
            inside = [bits(t) for t in model.state_dict().values()]
    return [str(w.message) for w in caught], own, inside


@pytest.mark.parametrize("frozen", [False, True], ids=["all", "a frozen one"])
def test_other_weights_are_a_warning_and_rank_0s_are_taken(engine: str, frozen: bool) -> None:
    results = run_ranks(_other_seeds, 3, frozen)
    for messages, _, inside in results:
        assert len(messages) == 1
        assert messages[0].startswith("the weights of ranks 1, 2 differ from rank 0's")
        assert inside == results[0][1]


def _twice(rank: int) -> list[str]:
    """Equal weights, trained, and entered again: nothing to say."""
    model = _model("", False)
    local_sgd = LocalSGD(None, model, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with local_sgd:
                for _ in range(3):
                    with torch.no_grad():
                        model[0].weight += values((6, 4), torch.float32, 7, rank)
                    local_sgd.step()
    return [str(w.message) for w in caught]


def test_equal_weights_are_silent_also_when_entered_again(engine: str) -> None:
    assert run_ranks(_twice, 2) == [[], []]


def _changed_inside(rank: int, change: str) -> str:
    """Alike on entry; then rank 1 alone changes its model."""
    model = _model("", False)
    with pytest.raises(LayoutMismatchError) as caught, LocalSGD(None, model, 2) as local_sgd:
        for step in range(6):
            if step == 3 and rank == 1:
                if change == "added":
                    model.append(nn.Linear(2, 2))
                elif change == "strides":
                    model[0].weight.data = model[0].weight.data.t().contiguous().t()
                else:
                    model[1].to(torch.bfloat16)
            local_sgd.step()
    assert local_sgd.num_syncs == 1
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("added", "rank 0: nothing more; rank 1: tensor 2.weight"),
        ("dtype", "rank 1: tensor 1.weight: bfloat16"),
        ("strides", "trainable, strides [1, 6]"),
    ],
)
def test_a_model_that_changes_on_one_rank_is_an_error_on_every_rank(engine: str, change: str, said: str) -> None:
    texts = run_ranks(_changed_inside, 2, change)
    assert texts[0] == texts[1]
    assert said in texts[0]


@given(st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.uint8, torch.bool]), st.data())
def test_a_checksum_sees_every_bit(dtype: torch.dtype, data: st.DataObject) -> None:
    tensor = torch.zeros(3, 5, dtype=dtype) if dtype is torch.bool else values((3, 5), torch.float32, 3, 0).to(dtype)
    other = tensor.clone()
    as_bytes = other.view(-1).view(torch.uint8)
    at = data.draw(st.integers(0, as_bytes.numel() - 1))
    as_bytes[at] ^= 1
    first, second = agreement.checksums([tensor, other])
    assert first != second
    assert agreement.checksums([tensor.t().contiguous().t()]) == [first]
