"""`plan` against figures worked out by hand and against what wires really send; `bench` as its users start it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from localsgd_ext import costs
from localsgd_ext.anchors import Anchors
from localsgd_ext.cli import quantities
from localsgd_ext.costs import Job, Link, Setting
from localsgd_ext.wire import WIRES, Chunks, Code, allreduce_bytes, exchange_bytes, travels_as

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "localsgd_ext"]


def _run(*arguments: object, launcher: tuple[str, ...] = (), limit: float = 120) -> subprocess.CompletedProcess[str]:
    command = [*(launcher or COMMAND), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=limit, env=environment, check=False)


def _plan(*arguments: object) -> dict[str, Any]:
    done = _run("plan", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_largest_plans_are_printed_at_once() -> None:
    """1000 ranks, 70 B parameters; nothing that takes long is imported."""
    begun = time.monotonic()
    links = ("--link", "1Gbit/s", "--link", "400Gbit/s")
    done = _run(
        "plan", "--params", "70B", "--ranks", 1000, *links, "--step-time", 10, "--dtype", "bfloat16", "--device", "cuda"
    )
    seconds = time.monotonic() - begun
    assert done.returncode == 0, done.stderr
    assert "70 B parameters (bfloat16, 140 GB) on cuda, 1000 ranks, 10 s a step" in done.stdout
    assert "1 Gbit/s for each rank" in done.stdout
    assert "400 Gbit/s for each rank" in done.stdout
    assert seconds < 20  # it imports no torch: that is what is asserted next, since this machine may be busy
    code = "import sys; from localsgd_ext.cli import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    small = ("plan", "--params", "1M", "--link", "1Gbit", "--step-time", "1")
    assert _run(*small, launcher=(sys.executable, "-c", code)).returncode == 0


def test_70_billion_parameters_by_hand() -> None:
    """1 Gbit/s: 2 * 999/1000 * 140e9 bytes at 0.9 * 125e6 a second are 2486.4 s; 4173 buckets of 32 MiB, 20 hops each, three at
    once: 13.9 s, hidden in that. A value has 0.02 ns of passes: 1.4 s. int8 is 8.0625 bits of 16."""
    plan = _plan(
        "--params", "70B", "--ranks", 1000, "--link", "1Gbit", "--step-time", 10, "--dtype", "bfloat16", "--device", "cuda"
    )["plans"][0]
    averaging = 2486.4 + 20 * 5e-4 + 1.4 + 0.0007
    assert plan["steps"]["1"]["parameter"]["seconds"] == pytest.approx(10 + averaging, rel=1e-6)
    assert plan["steps"]["64"]["parameter"]["seconds"] == pytest.approx(10 + averaging / 64, rel=1e-6)
    assert plan["steps"]["64"]["parameter"]["share"] == pytest.approx(1 - 10 / (10 + averaging / 64), rel=1e-6)
    assert plan["steps"]["1"]["DDP"]["seconds"] == pytest.approx(10 / 3 + 2486.4 + 20 * 5e-4, rel=1e-6)
    coded = 2486.4 * 8.0625 / 16 + 2 * 5e-4 + 2.8 + 0.0007
    assert plan["steps"]["1"]["int8"]["seconds"] == pytest.approx(10 + coded, rel=1e-6)
    quarter = 2486.4 * 8.0625 / 64 + 2 * 5e-4 + 0.7 + 0.0007
    hidden = plan["steps"]["8"]["int8, overlap 1, 4 fragments"]
    assert hidden["seconds"] == pytest.approx(10 + 4 * (quarter - 10) / 8, rel=1e-6)
    assert plan["smallest_steps"]["parameter"] == math.ceil(averaging * 0.95 / (0.05 * 10))
    assert plan["memory_bytes"]["parameter"] == 4 * 2**25
    assert plan["memory_bytes"]["int8"] == 8 * 70e9 + 4 * 2**26


def test_at_400_gigabits_by_hand() -> None:
    """All-reduces of 32 MiB that wait for 20 hops of 0.5 ms: 4173 of them, three at once, are 13.91 s; the bytes alone would be
    6.2 s."""
    plan = _plan(
        "--params", "70B", "--ranks", 1000, "--link", "400Gbit", "--step-time", 10, "--dtype", "bfloat16", "--device", "cuda"
    )["plans"][0]
    assert plan["steps"]["1"]["parameter"]["seconds"] == pytest.approx(
        10 + 4173 * 20 * 5e-4 / 3 + 0.01 + 1.4 + 0.0007, rel=1e-6
    )


def test_two_ranks_by_hand() -> None:
    """124 M float32 on CPUs at 100 Mbit/s: 496e6 bytes at 11.25e6 a second."""
    plan = _plan("--params", "124M", "--link", "100Mbit", "--latency", 0, "--step-time", "250ms", "--tensors", 148)["plans"][0]
    sent = 496e6 / 11.25e6
    assert plan["steps"]["8"]["parameter"]["seconds"] == pytest.approx(0.25 + (sent + 0.0002 + 0.9e-9 * 124e6) / 8, rel=1e-6)
    assert plan["steps"]["8"]["Accelerate's"]["seconds"] == pytest.approx(0.25 + (sent + 3.4e-9 * 124e6) / 8, rel=1e-6)
    assert plan["steps"]["8"]["DDP"]["seconds"] == pytest.approx(0.25 / 3 + sent, rel=1e-6)
    assert plan["steps"]["8"]["int4"]["seconds"] == pytest.approx(
        0.25 + (sent * 4.0625 / 32 + 0.0002 + 1.5e-9 * 124e6) / 8, rel=1e-6
    )
    assert plan["steps"]["2"]["int8, overlap 1, 4 fragments"] is None, "no round of two steps has four averagings"


@pytest.mark.parametrize("dtype", costs.DTYPES)
@pytest.mark.parametrize("ranks", [2, 3, 16])
def test_bytes_are_those_that_travel(dtype: str, ranks: int) -> None:
    values = 256 * 3 * 16 * 1000
    for wire in WIRES:
        if costs.DTYPES[dtype] == 16 and wire in ("bfloat16", "float16") and wire != dtype:
            continue  # of another 16 bits: rounded to 16 bits with a scale, as from float32
        travels = travels_as(getattr(torch, dtype), wire, is_parameter=True)
        if isinstance(travels, Code):
            sent = exchange_bytes(Chunks.of(values, travels, ranks), ranks)
        else:
            sent = allreduce_bytes(values * travels.itemsize, ranks)
        assert costs.carries_values(wire, dtype) == (not isinstance(travels, Code))
        assert costs.sent_bytes(values, costs.bits(wire, dtype), ranks) == pytest.approx(sent, rel=1e-6), wire


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("wire", ["parameter", "int8"])
def test_memory_is_what_is_kept(wire: str, outer: bool) -> None:
    from localsgd_ext import DiLoCo
    from localsgd_ext.items import Item
    from localsgd_ext.layout import Rule, TensorSpec, plan

    numel = 100_000
    tensor = torch.zeros(numel)
    code = travels_as(torch.float32, wire, True, outer)
    tables = plan([TensorSpec(numel, torch.float32, code, tensor.device, Rule.MEAN, True, tensor.data_ptr())], 2**20)
    kept = 0
    if isinstance(code, Code):
        anchors = Anchors(tables, [Item("x", tensor)], DiLoCo() if outer else None, None)
        kept = sum(t.nbytes for t in (*anchors.anchor, *anchors.residual, *anchors.momentum))
    job = Job(numel, 2, 1.0)
    expected = costs.memory_bytes(job, Setting(8, wire, outer=outer)) - costs.memory_bytes(Job(numel, 2, 1.0), Setting(8))
    staging = costs.memory_bytes(job, Setting(8, wire)) - 8 * numel * (wire == "int8") - costs.memory_bytes(job, Setting(8))
    assert kept == expected - staging


def test_the_smallest_h_is_the_smallest() -> None:
    job, link = Job(124e6, 4, 0.25), Link(125e6, 1e-3)
    for setting in (Setting(1), Setting(1, "int4"), Setting(1, "int8", 2, 3)):
        steps = costs.smallest_steps(job, link, setting, 0.05)
        assert steps is not None

        def overhead(n: int, setting: Setting = setting) -> float:
            at = Setting(n, setting.wire, setting.overlap_steps, setting.fragments)
            return costs.share(job.step_seconds, costs.ours_seconds(job, link, at))

        assert overhead(steps) <= 0.05 < overhead(steps - 1)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--params", "12x", "--link", "1Gbit", "--step-time", "1"), "'12x' is not a number such as"),
        (("--params", "12M", "--link", "fast", "--step-time", "1"), "'fast' is not a speed such as"),
        (("--params", "12M", "--link", "1Gbit", "--step-time", "-1"), "--step-time"),
        (("--params", "12M", "--step-time", "1"), "either --link or --measured"),
        (("--link", "1Gbit", "--step-time", "1"), "--params"),
        (("--params", "12M", "--link", "1Gbit", "--step-time", "1", "--overhead", "2"), "share between 0 and 1"),
        (("--params", "12M", "--measured", "nowhere.json", "--step-time", "1"), "nowhere.json cannot be read"),
        (
            ("--params", "12M", "--measured", "pyproject.toml", "--step-time", "1"),
            "is not what `localsgd-ext bench --json` writes",
        ),
        (("--params", "12M", "--link", "1Gbit", "--step-time", "1", "--plot", "nowhere/x.png"), "nowhere"),
        (("--params", "12M", "--link", "1Gbit", "--step-time", "1", "--plot", "."), "name of a picture"),
        (("--params", "1e300", "--link", "1Gbit", "--step-time", "1"), "'1e300' is not a number"),
        (("--params", "12M", "--link", "1Gbit", "--step-time", "1e-300"), "is not a time"),
        (("--params", "12M", "--link", "1Gbit", "--step-time", "1", "--ranks", "9" * 400), "whole number from 1 to a million"),
        (("--params", "12M", "--link", "1Gbit", "--step-time", "1", "--ranks", "1"), "2 or more"),
        (("--params", "12M", "--link", "1Gbit", "--step-time", "1", "--fragments", "63"), "at most 62"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(arguments: tuple[str, ...], named: str) -> None:
    done = _run("plan", *arguments)
    assert done.returncode == 2
    assert named in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_bench_without_a_launcher_says_how() -> None:
    done = _run("bench")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "torchrun" in done.stderr


def test_bench_under_torchrun_feeds_plan(tmp_path: Path) -> None:
    file = tmp_path / "measured.json"
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "localsgd_ext")
    options = (
        "--mb",
        1,
        "--rounds",
        2,
        "--wires",
        "parameter",
        "int8",
        "--params",
        "124M",
        "--step-time",
        "250ms",
        "--json",
        file,
    )
    done = _run("bench", *options, launcher=launcher)
    assert done.returncode == 0, done.stderr
    for said in ("2 ranks, cpu", "wire='int8'", "bucket_mb=4", "suggested: "):
        assert said in done.stdout
    plan = _plan("--measured", file, "--params", "124M", "--step-time", "250ms")
    assert plan["job"]["ranks"] == 2
    measured = json.loads(file.read_text())
    sizes, seconds = measured["wires"]["int8"]["values"], measured["wires"]["int8"]["seconds"]
    base, each = costs.line(sizes, seconds)
    found = plan["plans"][0]["steps"]["4"]["int8"]["seconds"]
    assert found == pytest.approx(0.25 + (base + each * 124e6) / 4, rel=1e-6)
    other = _run("plan", "--measured", file, "--params", "1M", "--step-time", "1", "--ranks", 8)
    assert other.returncode == 2
    assert "was measured with 2 ranks" in other.stderr


def test_a_plot_and_a_model_on_disk(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="NOT RUN: matplotlib is not installed")
    pytest.importorskip("transformers", reason="NOT RUN: transformers is not installed")
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 100, "n_positions": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = _plan("--model", tmp_path, "--link", "1Gbit", "--step-time", "1s", "--plot", tmp_path / "plan.png")
    # Token and place embeddings, two blocks, the last norm; the output layer is tied.
    block = 2 * 128 + (64 * 192 + 192) + (64 * 64 + 64) + (64 * 256 + 256) + (256 * 64 + 64)
    assert plan["job"]["values"] == 100 * 64 + 32 * 64 + 2 * block + 128
    assert plan["job"]["tensors"] == 2 + 2 * 12 + 2
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


MEASURED: dict[str, Any] = {
    "ranks": 2, "dtype": "float32", "device": "cpu", "latency": 1e-3, "bytes_per_second": 1e8,
    "all_reduce": {"bytes": [1e6, 1e7], "seconds": [0.1, 1.0]}, "wires": {"int8": {"values": [1e6, 1e7], "seconds": [0.1, 1.0]}},
}  # fmt: skip


@pytest.mark.parametrize(
    "wrong",
    [
        {"ranks": 0}, {"ranks": None}, {"ranks": 2.5}, {"dtype": "int8"}, {"device": "tpu"}, {"wires": {}}, {"wires": []}, {"wires": {"int8": {}}},
        {"wires": {"fp8": {"values": [1, 2], "seconds": [1, 2]}}}, {"all_reduce": None}, {"all_reduce": {"bytes": [1, 1], "seconds": [1, 2]}},
        {"latency": "fast"}, {"latency": -1}, {"bytes_per_second": 0},
    ],
)  # fmt: skip
def test_a_measurement_that_bench_never_wrote(
    wrong: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from localsgd_ext.cli import main

    file = tmp_path / "measured.json"
    arguments = ["plan", "--params", "1M", "--step-time", "1", "--measured", str(file)]
    file.write_text(json.dumps(MEASURED))
    assert main(arguments) == 0
    capsys.readouterr()
    file.write_text(json.dumps(MEASURED | wrong))
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "is not what `localsgd-ext bench --json` writes" in capsys.readouterr().err


def test_noise_makes_no_size_free() -> None:
    assert costs.line([1e6, 8e6], [0.02, 0.01]) == (0.0, 0.01 / 8e6)
    base, each = costs.line([1e6, 8e6], [0.01, 0.045])
    assert (base, each) == (pytest.approx(0.005), pytest.approx(5e-9))


def test_quantities() -> None:
    assert [quantities.count(each) for each in ("124e6", "124M", "70B", "1.5k")] == [124e6, 124e6, 70e9, 1500]
    assert [quantities.seconds(each) for each in ("0.25", "250ms", "50us", "2 s")] == pytest.approx([0.25, 0.25, 5e-5, 2])
    assert [quantities.rate(each) for each in ("1Gbit/s", "100Mbit", "12.5GB/s", "1Gbps")] == [125e6, 12.5e6, 12.5e9, 125e6]
    assert [quantities.spoken_seconds(each) for each in (5e-5, 0.25, 90, 600, 90000)] == [
        "50 us",
        "250 ms",
        "90 s",
        "10 min",
        "25 h",
    ]
