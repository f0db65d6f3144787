"""The command line: ``headwise env | explain | check | bench | tune | warm | tour | demo | view | web | run``.

One module per subcommand, each with ``add_arguments(parser)`` and ``run(args) -> int`` (the exit code). Only the module
of the subcommand asked for is imported; its docstring is the description in its help.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import io
import sys
import textwrap
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import headwise
from headwise.cli._terminal import UsageError

# Command, which is also the name of its module -> what it is for.
COMMANDS = {
    "env": "this machine: hardware, versions, and which backends run or why not",
    "explain": "every backend's verdict on a call, and which one is chosen",
    "check": "run the conformance cases on this machine, against the error budget",
    "bench": "measure speed and memory against other implementations",
    "tune": "measure tile sizes on this GPU and write them to a table",
    "warm": "compile the kernels of some calls before a run, on all cores",
    "tour": "a short tour of the ops, with their results",
    "demo": "train a small transformer, generate text with it, look at its attention",
    "view": "open the report of a demo",
    "web": "serve the page that runs the kernels in a browser",
    "run": "run a program whose import of flash_attn finds Headwise",
}

BAD_USAGE, INTERRUPTED = 2, 130


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


class _Formatter(argparse.HelpFormatter):
    """Keeps the paragraphs of a description apart, and names with a hyphen together."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(super(_Formatter, self)._fill_text(p, width, indent) for p in text.split("\n\n"))

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)


class _Parser(argparse.ArgumentParser):
    """Reports unknown options of a subcommand with its own usage; argparse would show that of the main parser."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, formatter_class=_Formatter)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed, unknown


def _parser(command: str | None) -> tuple[_Parser, ModuleType | None]:
    parser = _Parser(prog="headwise", description=headwise.__doc__)
    parser.add_argument("--version", action="version", version=f"headwise {headwise.__version__}")
    subparsers = parser.add_subparsers(metavar="command", title="commands")
    module = None
    for name, summary in COMMANDS.items():
        if name == command:
            module = importlib.import_module(f"headwise.cli.{name}")
            module.add_arguments(subparsers.add_parser(name, help=summary, description=_description(module)))
        else:
            subparsers.add_parser(name, help=summary)
    return parser, module


def _description(module: ModuleType) -> str:
    """The docstring of a command's module, without its name and without markup."""
    _, _, text = inspect.cleandoc(module.__doc__ or "").partition(": ")
    return text[:1].upper() + text[1:].replace("`", "")
