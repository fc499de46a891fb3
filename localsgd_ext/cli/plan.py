"""`localsgd-ext plan`: what training will cost on given links, before it is started. The formulas are in
`localsgd_ext.costs`."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..costs import (
    DTYPES,
    Job,
    Link,
    Setting,
    accelerate_seconds,
    carries_values,
    ddp_seconds,
    line,
    memory_bytes,
    ours_seconds,
    share,
    smallest_steps,
)
from ..standing import MAX_FRAGMENTS
from . import quantities
from .quantities import spoken_bytes, spoken_count, spoken_rate, spoken_seconds

STEPS = tuple(2**power for power in range(9))
WIRES = ("parameter", "float32", "bfloat16", "float16", "int8", "int4")
DEFAULT_WIRES = ("parameter", "bfloat16", "int8", "int4")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `plan`."""
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--params", type=quantities.count, metavar="N", help="trained parameters, as 124e6, 124M or 70B")
    size.add_argument(
        "--model", type=Path, metavar="PATH", help="a Hub config on disk (config.json, or its folder); needs transformers"
    )
    parser.add_argument("--step-time", type=quantities.seconds, required=True, metavar="T", help="of a local step, as 250ms")
    parser.add_argument("--ranks", type=quantities.whole, help="how many average with each other (default: 2, or as measured)")
    parser.add_argument(
        "--link", type=quantities.rate, action="append", metavar="SPEED", help="as 1Gbit/s; may be given several times"
    )
    parser.add_argument("--latency", type=quantities.seconds_or_0, default=5e-4, metavar="T", help="one way (default: 0.5ms)")
    parser.add_argument(
        "--measured", type=Path, metavar="FILE", help="what `localsgd-ext bench --json FILE` measured, in place of --link"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of the parameters (default: float32, or as measured)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="where they are (default: cpu, or as measured)")
    parser.add_argument("--tensors", type=quantities.whole, help="in how many tensors (default: 150, or as --model has)")
    parser.add_argument(
        "--wires",
        nargs="+",
        choices=WIRES,
        help=f"'parameter' is their own dtype (default: {' '.join(DEFAULT_WIRES)}, or as measured)",
    )
    parser.add_argument("--overlap-steps", type=quantities.whole, default=1, help="of the last column (default: 1)")
    parser.add_argument("--fragments", type=quantities.whole, default=4, help="of the last column (default: 4)")
    parser.add_argument("--outer", action="store_true", help="with an outer optimizer, for the memory it takes")
    parser.add_argument(
        "--overhead", type=quantities.fraction, default=0.05, help="share of communication to aim at (default: 5%%)"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the shares over H; needs matplotlib")
    parser.add_argument("--json", action="store_true", help="print JSON, in seconds, bytes and shares")


def run(args: argparse.Namespace) -> int:
    """Print the tables; a mistake of the user's ends in one line and status 2."""
    if args.ranks == 1:
        args.error("one rank has nobody to average with; --ranks is 2 or more")
    if args.fragments > MAX_FRAGMENTS:
        args.error(f"--fragments is at most {MAX_FRAGMENTS}")
    if args.plot and not args.plot.suffix:
        args.error(f"--plot needs the name of a picture, as plan.png; got {args.plot}")
    measured = _read(args) if args.measured else None
    if (measured is None) == (not args.link):
        args.error("give either --link or --measured")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        args.error("--plot needs matplotlib: pip install matplotlib")
    values, tensors = _size(args)
    given = measured or {}
    if measured and args.ranks not in (None, measured["ranks"]):
        args.error(f"{args.measured} was measured with {measured['ranks']} ranks; plan with as many, or with --link")
    job = Job(
        values,
        args.ranks or given.get("ranks", 2),
        args.step_time,
        args.dtype or given.get("dtype", "float32"),
        tensors,
        args.device or given.get("device", "cpu"),
    )
    default = [wire for wire in DEFAULT_WIRES if wire == "parameter" or not carries_values(wire, job.dtype)]
    wires = tuple(dict.fromkeys(args.wires or (given["wires"] if measured else default)))
    if measured and (missing := set(wires) - set(measured["wires"])):
        args.error(f"{args.measured} has no measurement of {', '.join(sorted(missing))}")
    if measured and job.device != measured["device"]:
        args.error(f"{args.measured} was measured on {measured['device']}; got --device {job.device}")
    if measured and job.dtype != measured["dtype"]:
        args.error(f"{args.measured} was measured with {measured['dtype']} parameters; got --dtype {job.dtype}")
    links = [measured_link(measured)] if measured else [Link(speed, args.latency) for speed in args.link]
    plans = [make_plan(job, link, wires, args) for link in links]
    if args.plot:
        try:
            plot(args.plot, job, plans)
        except (OSError, ValueError) as error:  # no such folder, or no such kind of picture
            args.error(f"{args.plot} cannot be written: {error}")
        print(f"written to {args.plot}", file=sys.stderr)
    if args.json:
        print(json.dumps({"job": vars(job), "plans": plans}, indent=1))
    else:
        print(
            f"{spoken_count(values)} parameters ({job.dtype}, {spoken_bytes(values * DTYPES[job.dtype] / 8)}) on {job.device}, {job.ranks} ranks, {spoken_seconds(job.step_seconds)} a step"
        )
        for each in plans:
            print("\n" + table(each, args))
    return 0


def measured_link(measured: dict[str, Any]) -> Link:
    """From what `bench` wrote."""
    averaging = {wire: line(each["values"], each["seconds"]) for wire, each in measured["wires"].items()}
    raw = measured["all_reduce"]
    return Link(measured["bytes_per_second"], measured["latency"], averaging, line(raw["bytes"], raw["seconds"]))


def make_plan(job: Job, link: Link, wires: Sequence[str], args: argparse.Namespace) -> dict[str, Any]:
    """Everything about one link, in seconds, bytes and shares."""
    last = wires[-1] if "int8" not in wires else "int8"
    settings = {wire: Setting(1, wire, outer=args.outer) for wire in wires}
    settings[f"{last}, overlap {args.overlap_steps}, {args.fragments} fragments"] = Setting(
        1, last, args.overlap_steps, args.fragments, args.outer
    )
    ddp = ddp_seconds(job, link)
    rows = {}
    for steps in STEPS:
        row: dict[str, dict[str, float] | None] = {
            "DDP": _cell(job, ddp),
            "Accelerate's": _cell(job, accelerate_seconds(job, link, steps)),
        }
        for name, setting in settings.items():
            at = Setting(steps, setting.wire, setting.overlap_steps, setting.fragments, args.outer)
            row[name] = _cell(job, ours_seconds(job, link, at)) if at.is_possible else None
        rows[steps] = row
    return {
        "bytes_per_second": link.bytes_per_second,
        "latency": link.latency,
        "measured": bool(link.averaging),
        "steps": rows,
        "smallest_steps": {name: smallest_steps(job, link, setting, args.overhead) for name, setting in settings.items()},
        "memory_bytes": {name: memory_bytes(job, setting) for name, setting in settings.items()},
        "lossy": [name for name, setting in settings.items() if not carries_values(setting.wire, job.dtype)],
    }


def table(plan: dict[str, Any], args: argparse.Namespace) -> str:
    """As text."""
    names = list(plan["steps"][1])
    widths = [max(len(name), 15) for name in names]
    source = f", as measured in {args.measured}" if plan["measured"] else ""
    lines = [
        f"{spoken_rate(plan['bytes_per_second'])} for each rank, {spoken_seconds(plan['latency'])} latency{source}: time per step, and the share of it that is communication",
        "    H  " + "  ".join(name.rjust(width) for name, width in zip(names, widths, strict=True)),
    ]
    for steps, row in plan["steps"].items():
        cells = [
            "-" if row[name] is None else f"{spoken_seconds(row[name]['seconds'])} {row[name]['share']:4.0%}" for name in names
        ]
        lines.append(f"{steps:>5}  " + "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)))
    lines.append(
        f"smallest H with at most {args.overhead:.0%} communication, and memory beside the model and its optimizer on each rank:"
    )
    for name, steps in plan["smallest_steps"].items():
        least = "none up to 2^20" if steps is None else str(steps)
        lines.append(f"  {name:<{max(map(len, names))}}  H = {least:<16} {spoken_bytes(plan['memory_bytes'][name])}")
    return "\n".join(lines)


def plot(path: Path, job: Job, plans: Sequence[dict[str, Any]]) -> None:
    """Share of communication over H, a panel for each link."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(plans), figsize=(6 * len(plans), 4), squeeze=False, layout="constrained")
    for axis, plan in zip(axes[0], plans, strict=True):
        for name in plan["steps"][1]:
            points = [(steps, row[name]["share"]) for steps, row in plan["steps"].items() if row[name] is not None]
            axis.plot(*zip(*points, strict=True), label=name, marker=".", linestyle=":" if name == "DDP" else "-")
        axis.set(xscale="log", xlabel="H, local steps", ylabel="share of communication", ylim=(-0.02, 1.02))
        axis.set_xticks(STEPS, list(map(str, STEPS)))
        axis.set_title(f"{spoken_rate(plan['bytes_per_second'])}, {job.ranks} ranks")
    axes[0][-1].legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _cell(job: Job, seconds: float) -> dict[str, float]:
    return {"seconds": seconds, "share": share(job.step_seconds, seconds)}


def _read(args: argparse.Namespace) -> dict[str, Any]:
    try:
        measured: dict[str, Any] = json.loads(args.measured.read_text())
        numbers = [
            measured["bytes_per_second"],
            measured["latency"],
            *measured["all_reduce"]["bytes"],
            *measured["all_reduce"]["seconds"],
        ]
        for wire in measured["wires"].values():
            numbers += [*wire["values"], *wire["seconds"]]
        known = measured["dtype"] in DTYPES and measured["device"] in ("cpu", "cuda") and set(measured["wires"]) <= set(WIRES)
        if not (
            known
            and measured["wires"]
            and measured["ranks"] in range(2, 10**6)
            and all(0 < each < math.inf for each in numbers)
        ):
            raise ValueError
        measured_link(measured)
    except OSError as error:
        args.error(f"{args.measured} cannot be read: {error.strerror}")
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError):
        args.error(f"{args.measured} is not what `localsgd-ext bench --json` writes")
    return measured


def _size(args: argparse.Namespace) -> tuple[float, int]:
    """Parameters and tensors."""
    if args.model is None:
        return args.params, args.tensors or 150
    if importlib.util.find_spec("transformers") is None:
        args.error("--model needs transformers: pip install transformers; or pass --params")
    path = args.model.parent if args.model.name == "config.json" else args.model
    if not (path / "config.json").is_file():
        args.error(f"{args.model} holds no config.json")
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            try:
                model = AutoModelForCausalLM.from_config(config)
            except ValueError:  # no language model
                model = AutoModel.from_config(config)
    except Exception as error:
        args.error(f"no model can be made of {path / 'config.json'}: {(str(error).splitlines() or [type(error).__name__])[0]}")
    parameters = list(model.parameters())
    return float(sum(p.numel() for p in parameters)), args.tensors or len(parameters)
