"""The codes of the lossy wires, block by block, in the engine that defines them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from localsgd_ext.backends.coded import decode, encode
from localsgd_ext.wire import BLOCK, Chunks, Code, exchange_bytes, travels_as

INTEGERS = {Code.INT8: 127, Code.INT4: 7}
SCALED = (Code.FLOAT16, Code.INT8, Code.INT4)
TINY = torch.finfo(torch.float32).tiny


def coded(v: torch.Tensor, code: Code) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Decoded and dropped values, codes and scales of blocks, shape (blocks, 256)."""
    codes = torch.empty(len(v), BLOCK * code.bits // 8, dtype=torch.uint8)
    scales = torch.empty(len(v) if code.scaled else 0, 1, dtype=torch.bfloat16)
    dropped = v.clone()
    encode(dropped, code, codes, scales)
    return decode(code, codes, scales), dropped, codes, scales


def blocks(seed: int, exponent: int, count: int = 3) -> torch.Tensor:
    """Normally distributed values times 2^exponent, each block of another size."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.tensor([[1.0], [3e-4], [77.0]])[torch.arange(count) % 3]
    return torch.randn(count, BLOCK, generator=generator) * sizes * 2.0**exponent


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.integers(-100, 100), st.sampled_from(Code))
def test_what_is_sent_and_what_is_dropped_make_the_value(seed: int, exponent: int, code: Code) -> None:
    v = blocks(seed, exponent).double()
    sent, dropped, _, _ = coded(v, code)
    assert torch.equal(sent.double() + dropped, v.double())
    largest = v.abs().amax(1, keepdim=True)
    # A scale is a bfloat16 that was rounded up.
    step = {
        Code.FLOAT64: v * 0,
        Code.FLOAT32: v.abs() * 2**-23,
        Code.BFLOAT16: v.abs() * 2**-7,
        Code.FLOAT16: (v.abs() * 2**-10).maximum(largest * 2**-37),
        Code.INT8: largest / 127 * (1 + 2**-7),
        Code.INT4: largest / 7 * (1 + 2**-7),
    }[code]
    assert (dropped.abs() <= step / 2).all()


@pytest.mark.parametrize("code", INTEGERS)
def test_integers_use_their_whole_range_and_round_half_to_even(code: Code) -> None:
    levels = INTEGERS[code]
    v = torch.zeros(1, BLOCK)
    v[0, : 2 * levels + 1] = torch.arange(-levels, levels + 1.0)
    sent, dropped, _, scales = coded(v * 0.25, code)
    assert scales.item() == 0.25
    assert torch.equal(sent, v * 0.25)
    assert not dropped.any()
    v[0, : 2 * levels - 1] = torch.arange(-levels, levels - 1.0) + 0.5
    assert torch.equal(coded(v, code)[0][0, : 2 * levels], torch.round(v)[0, : 2 * levels])  # torch's own rounds half to even


@pytest.mark.parametrize("code", INTEGERS)
def test_the_largest_value_is_never_clipped(code: Code) -> None:
    for seed in range(200):
        v = blocks(seed, 0)
        sent, _, _, scales = coded(v, code)
        assert ((sent / scales.float()).abs() <= INTEGERS[code]).all()
        assert ((sent - v).abs() <= scales.float() / 2).all()


def test_the_bytes_on_the_wire() -> None:
    """Ranks with other engines, and other versions one day, read them."""
    v = (torch.arange(BLOCK) % 15 - 7.0)[None]
    _, _, codes, scales = coded(v, Code.INT4)
    low, high = v[0, :128].to(torch.int8), v[0, 128:].to(torch.int8)
    assert codes[0].tolist() == [int(a) % 16 + 16 * (int(b) % 16) for a, b in zip(low, high, strict=True)]
    assert scales.tolist() == [[1.0]]
    _, _, codes, scales = coded(v * 127 / 7, Code.INT8)
    assert codes.view(torch.int8)[0].tolist() == (v * 127 / 7).round().to(torch.int8)[0].tolist()
    _, _, codes, scales = coded(v, Code.FLOAT16)
    assert scales.tolist() == [[2.0**-12]], "7 becomes 7 * 2^12, just below 2^15"
    assert codes.view(torch.float16)[0].tolist() == (v * 2**12)[0].tolist()


@pytest.mark.parametrize("code", SCALED)
def test_blocks_that_are_hardly_there(code: Code) -> None:
    v = torch.zeros(3, BLOCK)
    v[0, 3] = -0.0
    v[1, :] = TINY / 8  # subnormal: travels as zeros, and stays to be sent
    v[2, :] = TINY * 2
    v[2, 0] = 1e-30
    sent, dropped, codes, scales = coded(v, code)
    assert not sent[:2].any()
    assert not codes[:2].any()
    assert scales[:2].tolist() == [[0.0], [0.0]]
    assert torch.equal(dropped[1], v[1])
    assert sent[2, 0] == pytest.approx(1e-30, rel=2e-2)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("code", Code)
def test_what_is_not_finite_is_seen_by_all_and_kept_by_none(code: Code, bad: float) -> None:
    v = blocks(1, 0)
    v[1, 200] = bad
    sent, dropped, _, _ = coded(v, code)
    healthy = torch.ones_like(v, dtype=torch.bool)
    if code.scaled:
        healthy[1] = False  # a block with one such value has no scale
        assert sent[1].isnan().all()
    else:
        healthy[1, 200] = False
        assert torch.equal(sent[1, 200], torch.tensor(bad)) or math.isnan(bad)
        assert sent[1, 200].isnan() == math.isnan(bad)
    assert dropped.isfinite().all()
    assert not dropped[~healthy].any()
    assert sent[healthy].isfinite().all()


@pytest.mark.parametrize("code", SCALED)
def test_values_beside_a_huge_one_are_kept_for_later(code: Code) -> None:
    v = blocks(2, 0, 1)
    v[0, 77] = 1e30
    sent, dropped, _, _ = coded(v, code)
    others = torch.arange(BLOCK) != 77
    assert sent[0, 77] == pytest.approx(1e30, rel=1e-2)
    assert torch.equal(dropped[0, others], v[0, others])
    again, _, _, _ = coded(torch.where(others, dropped, 0.0), code)
    assert (again[0, others] - v[0, others]).abs().max() <= v[0, others].abs().max() / 7


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 10**9), st.integers(2, 300), st.sampled_from(Code))
def test_chunks_hold_the_bucket_and_little_more(numel: int, world_size: int, code: Code) -> None:
    chunks = Chunks.of(numel, code, world_size)
    assert chunks.count == (1 if world_size == 2 else world_size)
    assert chunks.blocks * chunks.count * BLOCK >= numel
    assert (chunks.blocks - 1) * chunks.count * BLOCK < numel
    scales = 2 * chunks.blocks if code.scaled else 0
    assert 0 <= chunks.nbytes - (chunks.blocks * BLOCK * code.bits // 8 + scales) < 16
    assert chunks.nbytes % 16 == 0
    hops = 1 if world_size == 2 else 2 * (world_size - 1)
    assert exchange_bytes(chunks, world_size) == hops * chunks.nbytes


@pytest.mark.parametrize(
    ("dtype", "wire", "expected"),
    [
        (torch.float32, "parameter", torch.float32),
        (torch.float64, "parameter", torch.float64),
        (torch.bfloat16, "float32", torch.float32),
        (torch.float64, "float32", Code.FLOAT32),
        (torch.bfloat16, "bfloat16", torch.bfloat16),
        (torch.float16, "bfloat16", Code.BFLOAT16),
        (torch.float16, "float16", torch.float16),
        (torch.float32, "float16", Code.FLOAT16),
        (torch.bfloat16, "int8", Code.INT8),
        (torch.float64, "int4", Code.INT4),
        (torch.float16, "exact", torch.float32),
        (torch.float64, "exact", torch.float64),
    ],
)
def test_values_travel_wherever_they_fit(dtype: torch.dtype, wire: str, expected: object) -> None:
    assert travels_as(dtype, wire, is_parameter=True) == expected
    buffer = travels_as(dtype, wire, is_parameter=False)
    assert isinstance(buffer, torch.dtype), "buffers never travel in codes"
    assert buffer.itemsize >= dtype.itemsize
