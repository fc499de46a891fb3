"""`localsgd-ext demo`: local SGD at work on this machine, next to a baseline. Here: arguments, launching, table and plot.

What each process does is in `demo_training`, which only these processes import.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BASELINES = {
    "accelerate": "Accelerate's LocalSGD",
    "ddp": "plain DDP, gradients all-reduced at every step",
    "none": "no second run",
}
PLOT_NAME = "localsgd-demo.png"

# What every rank executes. Being first, it lets an interrupt end the rank at once and in silence, and an import that fails say
# so in one line. Modules are found where this process found them.
_RANK_CODE = """
import json, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
sys.tracebacklimit = 0
sys.path[:] = json.loads(sys.argv[1])
from localsgd_ext.cli.demo_training import main
main(sys.argv[2])
"""


@dataclass(frozen=True)
class Config:
    """What every rank is told. result: path of the file in which rank 0 leaves its runs, a JSON list of `Run`."""

    steps: int
    local_sgd_steps: int
    baseline: str
    cpu: bool
    launcher_pid: int
    result: str


@dataclass(frozen=True)
class Run:
    """What one training run gave, as seen by rank 0.

    tokens_per_second: of all ranks together, without evaluations. averaging_seconds: None where it hides in the backward pass.
    held_out_loss: of the final model, nats per byte. losses: training loss per step. evaluations: (step, held-out loss).
    """

    name: str
    evaluated: str  # which weights the evaluations on the way used, for the legend
    tokens_per_step: int
    tokens_per_second: float
    averaging_seconds: float | None
    held_out_loss: float
    megabytes_sent: float
    identical: bool
    losses: list[float]
    evaluations: list[tuple[int, float]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `demo`."""
    parser.add_argument("--processes", type=_at_least_one, default=2, metavar="N", help="ranks to start (default: %(default)s)")
    parser.add_argument(
        "--steps", type=_at_least_one, default=320, metavar="N", help="optimizer steps of each run (default: %(default)s)"
    )
    parser.add_argument(
        "--local-sgd-steps",
        type=_at_least_one,
        default=8,
        metavar="H",
        help="local steps between two averagings (default: %(default)s)",
    )
    parser.add_argument(
        "--baseline",
        choices=BASELINES,
        default="accelerate",
        help="the second run: " + "; ".join(f"{name} = {text}" for name, text in BASELINES.items()) + " (default: %(default)s)",
    )
    parser.add_argument(
        "--output", type=_folder, default=Path(), metavar="DIR", help=f"where {PLOT_NAME} goes (default: the current directory)"
    )


def _at_least_one(text: str) -> int:
    with contextlib.suppress(ValueError):
        if int(text) >= 1:
            return int(text)
    raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {text!r}")


def _folder(text: str) -> Path:
    """The folder, made if it was not there, so that a wrong path is found out before the training rather than after it."""
    folder = Path(text)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot make the directory {text!r}: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"no permission to write to the directory {text!r}")
    return folder


def run(args: argparse.Namespace) -> int:
    """Train, print the table, write the plot; gives the exit status. Raises KeyboardInterrupt once all ranks are gone."""
    import torch
    from torch.distributed.elastic.multiprocessing import SignalException

    cpu = torch.cuda.device_count() < args.processes
    ranks = "1 process" if args.processes == 1 else f"{args.processes} processes"
    print(
        f"Training a byte-level GPT (1.9 M parameters) on the source of Python's standard library: {ranks} on "
        f"{'CPU' if cpu else 'GPU'}, {args.steps} steps, averaging every {args.local_sgd_steps}; "
        + (f"then again with {BASELINES[args.baseline]}." if args.baseline != "none" else "no baseline."),
        flush=True,
    )
    try:
        with tempfile.TemporaryDirectory(prefix="localsgd-demo-") as folder:
            runs = _launch(args, cpu, Path(folder))
        if runs is None:
            return 1
        print("\n" + _table(runs) + "\n")
        return _plot(runs, args.processes, args.local_sgd_steps, args.output / PLOT_NAME)
    except SignalException as ended:  # from the handlers that the launcher installs, and leaves installed
        if ended.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        print(f"ended by {ended.sigval.name}", file=sys.stderr)
        return 128 + ended.sigval


def _launch(args: argparse.Namespace, cpu: bool, folder: Path) -> list[Run] | None:
    """Start the ranks, wait for them and read what they found; None after a failure, which is then on stderr."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _set_environment(cpu)
    logs = folder / "logs"
    result = folder / "runs.json"
    # Rank 0 keeps stderr for its progress bar; torch's own notes on stdout, and all that other ranks say, go to files.
    redirects = {rank: Std.ALL if rank else Std.OUT for rank in range(args.processes)}
    # An interrupt ends the ranks by SIGTERM, which is silent; passed on as it is, it could meet a Python that is just starting.
    signals: dict[str, Any] = {"signals_to_handle": "SIGTERM,SIGHUP,SIGQUIT"}
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=args.processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",  # port 0: the store takes a free one
        local_addr="127.0.0.1",  # else the machine's full name, which need not resolve
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=redirects),
        **(signals if hasattr(LaunchConfig, "signals_to_handle") else {}),  # older torch lacks it
    )
    config = Config(args.steps, args.local_sgd_steps, args.baseline, cpu, os.getpid(), str(result))
    try:
        with _quiet_logging():
            # A command rather than a function: each rank then has a session of its own, out of reach of the terminal's Ctrl-C.
            elastic_launch(launch, sys.executable)("-c", _RANK_CODE, json.dumps(sys.path), json.dumps(asdict(config)))
    except ChildFailedError as error:
        if sys.stderr.isatty():
            print(file=sys.stderr)  # the progress bar leaves the cursor in its own line
        for line in _failure_lines(error, logs):
            print(f"localsgd-ext demo: {line}", file=sys.stderr)
        return None
    return [Run(**run) for run in json.loads(result.read_text())]


def end_with_launcher(launcher_pid: int) -> None:
    """For a thread of each rank: end the rank when the launcher is gone, killed perhaps, instead of training on unseen."""
    while os.getppid() == launcher_pid:
        time.sleep(1)
    os._exit(1)


def _set_environment(cpu: bool) -> None:
    """What the ranks inherit, unless the user has set it."""
    if cpu:
        # Else every rank would want all cores. The model is too small for more than one, also where a rank is alone.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    if sys.platform == "linux" and any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else Gloo resolves the machine's name
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


@contextlib.contextmanager
def _quiet_logging() -> Iterator[None]:
    """The launcher logs every signal it sends, and a rank's traceback in addition to handing it over."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _failure_lines(error: Any, logs: Path) -> list[str]:
    """One line for each rank that failed of itself, the earliest first; equal ones once."""
    lines: dict[str, str] = {}
    for rank, failure in sorted(error.failures.items(), key=lambda item: item[1].timestamp):
        if failure.exitcode == -signal.SIGTERM and len(error.failures) > 1:
            continue  # ended by the launcher because another had failed
        message = failure.message["message"] if isinstance(failure.message, dict) else failure.message
        if failure.exitcode > 0 and not isinstance(failure.message, dict):  # it failed before it could report
            said = [text for path in logs.rglob(f"{rank}/stderr.log") for text in path.read_text().splitlines() if text.strip()]
            message = said[-1] if said else f"exit status {failure.exitcode}"
        first = next((text for text in message.splitlines() if text.strip()), f"exit status {failure.exitcode}")
        lines.setdefault(first, f"rank {rank} failed: {first}")
    return list(lines.values())


def _table(runs: Sequence[Run]) -> str:
    rows = [("", "tokens/s", "averaging s", "held-out loss", "MB sent/rank", "identical")]
    rows += [
        (
            each.name,
            f"{each.tokens_per_second:.0f}",
            "-" if each.averaging_seconds is None else f"{each.averaging_seconds:.2f}",
            f"{each.held_out_loss:.4f}",
            f"{each.megabytes_sent:.1f}",
            "yes" if each.identical else "no",
        )
        for each in runs
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    lines.insert(1, "-" * len(lines[0]))
    lines.append("tokens/s: all ranks; loss: nats per byte, final model; identical: every rank ends with the same bits")
    return "\n".join(lines)


def _plot(runs: Sequence[Run], processes: int, local_sgd_steps: int, path: Path) -> int:
    """Write the loss curves, if matplotlib is there; gives the exit status."""
    if importlib.util.find_spec("matplotlib") is None:
        print('No plot without matplotlib: pip install "localsgd_ext[demo]"')
        return 0
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    # At 2 ranks the runs of localsgd_ext and of Accelerate agree to the bit: the first must show under the second.
    for each, color, width, dash, marker in zip(
        runs, ("tab:blue", "tab:orange"), (4.0, 1.5), ("-", "--"), ("o", "x"), strict=False
    ):
        tokens = [each.tokens_per_step * (step + 1) / 1000 for step in range(len(each.losses))]
        label = f"{each.name}: training loss of rank 0, smoothed"
        axes.plot(tokens, each.losses, color=color, alpha=0.2, linewidth=0.8)
        axes.plot(tokens, _smoothed(each.losses), color=color, linewidth=width, linestyle=dash, label=label)
        at = [each.tokens_per_step * step / 1000 for step, _ in each.evaluations]
        held_out = [loss for _, loss in each.evaluations]
        label = f"{each.name}: held-out loss, {each.evaluated}"
        axes.plot(at, held_out, color=color, linestyle="none", marker=marker, markersize=9, zorder=3, label=label)
    ranks = "1 rank" if processes == 1 else f"{processes} ranks"
    axes.set_title(f"Local SGD on {ranks}, averaging every {local_sgd_steps} steps")
    axes.set_xlabel("tokens seen by all ranks, thousands (a token is a byte)")
    axes.set_ylabel("loss, nats per byte")
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        print(f"localsgd-ext demo: cannot write {path}: {error.strerror}", file=sys.stderr)
        return 1
    print(f"Loss curves: {path}")
    return 0


def _smoothed(values: Sequence[float]) -> list[float]:
    """The mean of each value and its neighbours, over a fifteenth of the run."""
    reach = len(values) // 30
    windows = (values[max(0, at - reach) : at + reach + 1] for at in range(len(values)))
    return [sum(window) / len(window) for window in windows]
