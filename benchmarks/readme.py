"""The figures of README.md, written there from benchmarks/results/: none of them is typed.

Between `<!-- figures: NAME -->` and `<!-- /NAME -->` stands what FIGURES[NAME]() gives. `python -m benchmarks readme` writes
it; a test compares.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .record import load

README = Path(__file__).parents[1] / "README.md"
MARKED = re.compile(r"(<!-- figures: ([\w-]+) -->)(.*?)(<!-- /\2 -->)", re.DOTALL)

RIVALS = ("raw", "sliced", "passes", "native", "reference", "torch", "torchft", "accelerate")
FAMILY = ("ddp", "local-8", "local-32", "slowmo-32", "diloco-32", "diloco-128", "qsr")
THEIRS = "Accelerate's LocalSGD"
ALL_OF_OURS = "ours, overlap, 4 fragments, int8"

FIGURES: dict[str, Callable[[], str]] = {}


def figures(function: Callable[[], str]) -> Callable[[], str]:
    FIGURES[function.__name__.replace("_", "-")] = function
    return function


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n\n"


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


def between(low: float, high: float) -> str:
    """The range of two shares in percent."""
    return f"{100 * low:.0f} to {100 * high:.0f}"


def signed(share: float) -> str:
    return f"{100 * share:+.2f} %"


@figures
def machine() -> str:
    run = load("training-2-hosts")
    versions = f"torch {run['torch']}, accelerate {run['accelerate']}, torchft {run['torchft']}, Python {run['python']}"
    return f"{run['cores']} cores of an {run['cpu']}, shared with others; {run['system']}, {versions}"


@figures
def link_speed() -> str:
    """The sentence under the first plot."""
    rows = load("training-2-hosts")["mbit"]

    def shares(name: str) -> str:
        return " / ".join(f"{100 * rows[rate][name]['share']:.0f}" for rate in rows)

    return (
        f"{' / '.join(rows)} Mbit/s: DDP {shares('DDP')} %, Accelerate's helper {shares(THEIRS)} %, "
        f'`LocalSGD` as it comes {shares("ours")} %, with `wire="int8", overlap_steps=1, fragments=4` {shares(ALL_OF_OURS)} %'
    )


@figures
def wire_cost() -> str:
    """Of int8, against float32."""
    results = load("convergence-wires")["ranks"]
    each = (f"{signed(result['int8']['relative_mean'])} with {ranks} ranks" for ranks, result in results.items())
    return " and ".join(each)


@figures
def interval_cost() -> str:
    """Of longer rounds, against DDP."""
    results = load("convergence-family")["ranks"]["4"]
    return f"{signed(results['local-8']['relative_mean'])} of held-out loss against DDP at H = 8, {signed(results['local-32']['relative_mean'])} at 32"


@figures
def training() -> str:
    """Throughput at 100 Mbit/s beside what it costs in loss."""
    result = load("training-2-hosts")["mbit"]["100"]
    loss = load("convergence-overlap")["ranks"]["2"]
    settings = [
        ("DDP", "DDP", None),
        ("Accelerate's helper", "Accelerate's LocalSGD", None),
        ("ours", "ours", None),
        ('ours, `wire="int8"`', "ours, int8", "int8-8"),
        ("ours, `overlap_steps=4`", "ours, overlap", "overlap-8"),
        ('ours, `overlap_steps=1, fragments=4, wire="int8"`', ALL_OF_OURS, "fragments-8"),
    ]
    rows = []
    for title, name, variant in settings:
        row = result[name]
        cost = "" if variant is None else relative(loss[variant])
        rows.append([title, f"{percent(row['share'])} ({between(row['min'], row['max'])})", cost])
    return table(
        ["", "tokens/s, share of training without communication", "held-out loss against `ours`, mean (worst seed)"], rows
    )


def relative(row: dict[str, Any]) -> str:
    return f"{signed(row['relative_mean'])} ({signed(row['relative_worst'])})"


@figures
def averaging_steps() -> str:
    """How many local steps one plain averaging takes as long as, from how much it slows training down."""
    result = load("training-2-hosts")
    return f"{result['interval'] * (1 / result['mbit']['100']['ours']['share'] - 1):.0f}"


@figures
def two_levels() -> str:
    result = load("training-2-hosts-of-2")["mbit"]["100"]
    titles = {
        "DDP": "DDP over all four",
        "ours between hosts": "ours between the hosts",
        "ours between hosts, int8": 'ours, `wire="int8"`',
        "ours between hosts, overlap, 4 fragments, int8": 'ours, `overlap_steps=1, fragments=4, wire="int8"`',
    }
    rows = [
        [title, f"{percent(result[n]['share'])} ({between(result[n]['min'], result[n]['max'])})"] for n, title in titles.items()
    ]
    return table(["", "tokens/s, share of DDP inside each host alone"], rows)


@figures
def averaging() -> str:
    sets = {
        "gpt2": "GPT-2, 124 M in 148 tensors",
        "resnet50": "ResNet-50, 25.6 M in 161 tensors",
        "tiny": "4.2 M in 2000 tensors",
        "large": "100 M in 2 tensors",
        "lora": "300 M frozen, 6 M trained in 192 tensors",
    }
    rows = []
    for ranks in (2, 4):
        result = load(f"averaging-{ranks}-ranks")["sets"]
        for name, title in sets.items():
            if name in result:
                raw = result[name]["raw"]["ms"]
                cells = [result[name][method] for method in RIVALS[1:]]
                rows.append([f"{title}, {ranks} ranks", f"{raw:.0f} ms", *(_times(cell, raw) for cell in cells)])
    titles = [
        "",
        "raw",
        "slices",
        "passes",
        "ours, native",
        "ours, PyTorch",
        "torch `average_parameters`",
        "torchft",
        "Accelerate's helper",
    ]
    return table(titles, rows)


def _times(cell: dict[str, Any], raw: float) -> str:
    digits = 2 if cell["ms"] < 10 * raw else 0
    return f"{cell['ms'] / raw:.{digits}f} ({cell['min'] / raw:.{digits}f} to {cell['max'] / raw:.{digits}f})"


@figures
def memory() -> str:
    gpt2 = load("averaging-2-ranks")["sets"]["gpt2"]
    names = {
        "native": "ours",
        "reference": "ours in PyTorch",
        "torch": "torch's",
        "torchft": "torchft's",
        "accelerate": "Accelerate's",
    }
    return ", ".join(f"{title} {gpt2[name]['extra_mb']:.0f} MB" for name, title in names.items())


def _codes(method: str) -> str:
    gpt2 = load("averaging-codes")["sets"]["gpt2"]
    return f"{gpt2[method]['ms'] / gpt2['native']['ms']:.2f}"


@figures
def codes() -> str:
    return f"int8 {_codes('int8')} of the time of float32, int4 {_codes('int4')}, bfloat16 {_codes('bfloat16')}"


@figures
def outer() -> str:
    return f"{_codes('outer')} times"


@figures
def checked() -> str:
    return f"{_codes('checked')} times"


@figures
def handshake() -> str:
    ratios = load("handshake")["microseconds"]
    return " and ".join(f"{ratios[ranks]['ratio']:.2f}" for ranks in ("2", "4"))


@figures
def planned() -> str:
    ratios = [row["ratio"] for link in load("planned")["mbit"].values() for row in link["rows"].values()]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


@figures
def wires() -> str:
    columns = [(hosts, mbit) for hosts in (2, 4) for mbit in ("100", "1000")]
    results = {hosts: load(f"wires-{hosts}-hosts")["mbit"] for hosts in (2, 4)}
    titles = ["wire", "bytes", *(f"{hosts} hosts, {'100 Mbit/s' if mbit == '100' else '1 Gbit/s'}" for hosts, mbit in columns)]
    rows = []
    for name in ("float32", "bfloat16", "float16", "int8", "int4", "accelerate"):
        cells = []
        for hosts, mbit in columns:
            row = results[hosts][mbit][name]
            seconds = f"{row['ms'] / 1e3:.2f} s ({row['min'] / 1e3:.2f} to {row['max'] / 1e3:.2f})"
            cells.append(seconds if name == "accelerate" else f"{seconds}, {row['x_accelerate']:.2f} x")
        title = "Accelerate's helper" if name == "accelerate" else name
        rows.append([title, f"{results[2]['100'][name]['x_float32_bytes']:.3f}", *cells])
    return table(titles, rows)


def _loss(row: dict[str, Any]) -> str:
    return f"{row['mean']:.4f} ({row['min']:.4f} to {row['max']:.4f})"


@figures
def convergence_wires() -> str:
    results = load("convergence-wires")["ranks"]
    titles = [""]
    for ranks in results:
        titles += [f"{ranks} ranks: held-out loss", "vs float32, mean (worst seed)", "MB sent"]
    rows = []
    for name in ("float32", "int8", "int4"):
        cells = [name]
        for result in results.values():
            row = result[name]
            cells += [_loss(row), "-" if name == "float32" else relative(row), f"{row['bytes_sent'] / 1e6:.0f}"]
        rows.append(cells)
    return table(titles, rows)


@figures
def convergence_family() -> str:
    results = load("convergence-family")["ranks"]["4"]
    titles = {
        "ddp": "DDP, every step",
        "local-8": "mean every 8 steps",
        "local-32": "mean every 32",
        "slowmo-32": "`SlowMo()`, every 32",
        "diloco-32": "`DiLoCo()`, every 32",
        "diloco-128": "`DiLoCo()`, every 128",
        "qsr": "`QSR(optimizer, base=4, alpha=2 * peak lr)`",
    }
    rows = [
        [
            titles[name],
            _loss(results[name]),
            "-" if name == "ddp" else relative(results[name]),
            f"{results[name]['bytes_sent'] / 1e6:.0f}",
        ]
        for name in FAMILY
    ]
    return table(["", "held-out loss", "vs DDP, mean (worst seed)", "MB"], rows)


@figures
def features() -> str:
    result = load("features")
    names = {"localsgd_ext": "localsgd_ext", "Accelerate": "accelerate", "torch": "torch", "torchft": "torchft"}
    titles = ["", *(f"{name} {result[version]}" for name, version in names.items())]
    titles[3] += ", `PeriodicModelAverager`"
    return table(titles, [[title, *(row[name] for name in names)] for title, row in result["rows"].items()])


@figures
def soak() -> str:
    result = load("soak")
    return (
        f"{result['ranks']} ranks, {result['steps']} steps in {result['minutes']:.0f} minutes, {result['averagings']} averagings, {result['resumes']} resumes "
        f"({result['kills']} after all processes were killed), {result['checks']} checks with the same bits on every rank, memory {result['mb_per_minute']:+.2f} MB a minute"
    )


def render(text: str) -> str:
    """`text` with its figures from benchmarks/results/. Raises KeyError for a name that is not in FIGURES."""
    return MARKED.sub(lambda found: found[1] + FIGURES[found[2]]() + found[4], text)


def write() -> None:
    README.write_text(render(README.read_text()))
