"""The command line, `localsgd-ext`: a table of sub-commands, and how their errors are shown."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

from .._version import __version__
from . import demo, doctor


class Command(NamedTuple):
    """A sub-command: its line in --help, the arguments it takes, and what it does with them (giving the exit status)."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


COMMANDS = {
    "demo": Command(demo.HELP, demo.add_arguments, demo.run),
    "doctor": Command(doctor.HELP, doctor.add_arguments, doctor.run),
}


class _Parser(argparse.ArgumentParser):
    """Tells the user about a mistake in one line; argparse would print the usage above it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and give its exit status: 0 done, 1 failed, 130 interrupted; a wrong argument exits with 2."""
    parser = _Parser(
        prog="localsgd-ext",
        description="Fast, safe parameter averaging for local SGD with PyTorch and Accelerate.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=command.help, description=command.help, allow_abbrev=False)
        command.add_arguments(subparser)

    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        return COMMANDS[args.command].run(args)
    except KeyboardInterrupt:
        # The progress bar leaves the cursor in its own line.
        print("\ninterrupted" if sys.stderr.isatty() else "interrupted", file=sys.stderr)
        return 130
