"""The command line, `localsgd-ext`: a table of sub-commands, and how their errors are shown."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from .._version import __version__

COMMANDS = {
    "demo": "train a small GPT with local SGD and with a baseline on this machine, and compare them",
    "doctor": "show what was found on this machine, and which engine is used and why",
    "plan": "predict time per step, share of communication and memory for DDP, Accelerate's LocalSGD and this package",
    "bench": "measure links and averagings between running ranks, and suggest settings (start it with torchrun)",
}
"""Each is a module here, which has add_arguments(parser) and run(arguments), giving the exit status. Only the one that is
called is imported: torch takes longer than some of them."""


class _Parser(argparse.ArgumentParser):
    """Tells the user about a mistake in one line; argparse would print the usage above it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and give its exit status: 0 done, 1 failed, 130 interrupted, 141 where nobody reads on; a wrong
    argument exits with 2."""
    parser = _Parser(
        prog="localsgd-ext",
        description="Fast, safe parameter averaging for local SGD with PyTorch and Accelerate.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    given = list(sys.argv[1:] if argv is None else argv)
    command = next((each for each in given if not each.startswith("-")), None)
    module: Any = None
    for name, text in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=text, description=text, allow_abbrev=False)
        if name == command:
            module = importlib.import_module(f".{name}", __name__)
            module.add_arguments(subparser)
            subparser.set_defaults(error=subparser.error)  # for mistakes that only show later

    args = parser.parse_args(given)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        status = int(module.run(args))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing is left for the interpreter to stumble over
        return 141
    except KeyboardInterrupt:
        # The progress bar leaves the cursor in its own line.
        print("\ninterrupted" if sys.stderr.isatty() else "interrupted", file=sys.stderr)
        return 130
