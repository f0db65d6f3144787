"""The command line: ``headwise env | explain | check | bench | tune | tour | demo | view | web``.

One module per subcommand, each with ``add_parser(subparsers)`` and ``run(args) -> int`` (the exit code). Only the
module of the subcommand asked for is imported.
"""

from __future__ import annotations

import argparse
import importlib
import io
import sys
from collections.abc import Sequence
from types import ModuleType

import headwise
from headwise.cli._terminal import UsageError

# The module of the same name in this package -> what it is for.
COMMANDS = {
    "env": "this machine: hardware, versions, and which backends run or why not",
    "explain": "every backend's verdict on a call, and which one is chosen",
    "check": "run the conformance cases on this machine, against the error budget",
    "bench": "measure speed and memory against other implementations",
    "tune": "measure tile sizes on this GPU and write them to a table",
    "tour": "a short tour of the ops, with their results",
    "demo": "train a small transformer, let it speak, and look at its attention",
    "view": "open the report of a demo",
    "web": "serve the page that runs the kernels in a browser",
}

OK, FAILED, BAD_USAGE, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = next((a for a in arguments if not a.startswith("-")), None)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that has no ✓ shows ?
    try:
        parser, module = _parser(command)
        args = parser.parse_args(arguments)
        if module is None:
            parser.print_help()
            return BAD_USAGE
        code: int = module.run(args)
        return code
    except UsageError as error:
        print(f"headwise {command}: {error}", file=sys.stderr)
        return BAD_USAGE
    except KeyboardInterrupt:
        return INTERRUPTED


def _parser(command: str | None) -> tuple[argparse.ArgumentParser, ModuleType | None]:
    parser = argparse.ArgumentParser(prog="headwise", description=headwise.__doc__)
    parser.add_argument("--version", action="version", version=f"headwise {headwise.__version__}")
    subparsers = parser.add_subparsers(metavar="command", title="commands")
    module = None
    for name, summary in COMMANDS.items():
        if name == command:
            module = importlib.import_module(f"headwise.cli.{name}")
            module.add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=summary)
    return parser, module
