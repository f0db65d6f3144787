"""``headwise warm CALL …``: compile the Triton kernels of these calls before a run, on all cores.

A CALL is what `headwise explain` takes, in quotes: "attention --dtype bf16 --d 128 --causal --gradient". "@FILE" stands for
the calls of a file, one in each line. The kernels go to Triton's cache on disk, where later processes find them;
`headwise env` says where that is. With --arch no GPU is needed.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from headwise.backends.registry import ARCHITECTURES, Planned
from headwise.cli import _terminal, explain
from headwise.ops import _warm


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("calls", nargs="+", metavar="CALL", help="an op and its options, or @FILE")
    parser.add_argument("--arch", choices=ARCHITECTURES, metavar="ARCH", help=f"a GPU: {', '.join(ARCHITECTURES)}")
    parser.add_argument("--workers", type=int, metavar="N", help="processes that compile at once (default: all cores)")
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def run(args: argparse.Namespace) -> int:
    if args.workers is not None and args.workers < 0:
        raise _terminal.UsageError(f"--workers is {args.workers}; it needs to be a whole number from 0")
    planned = Planned([], [])
    try:
        for call in _calls(args.calls):
            more = _plan(call)
            planned.calls.extend(more.calls)
            planned.launchers.extend(more.launchers)
        with _progress() as bar:
            task = bar.add_task("", total=None)

            def report(done: int, count: int, kernel: str) -> None:
                bar.update(task, completed=done, total=count, description=kernel)

            warmed = _warm.compile_planned(planned, args.arch, args.workers, report)
    except (TypeError, ValueError) as error:
        raise _terminal.UsageError(str(error)) from error
    if args.json:
        _terminal.print_json(warmed._asdict())
    else:
        said = f"{warmed.compiled} kernels compiled, {warmed.found} were there: {warmed.seconds:.1f} s"
        _terminal.console().print(said)
    return 0


def _progress() -> Progress:
    return Progress(
        BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"),
        console=_terminal.progress_console(), transient=True,
    )  # fmt: skip


def _calls(given: list[str]) -> Iterator[str]:
    for call in given:
        if not call.startswith("@"):
            yield call
            continue
        try:
            lines = Path(call[1:]).read_text().splitlines()
        except OSError as error:
            raise _terminal.UsageError(f"{call} cannot be read: {error.strerror}") from error
        yield from (line for line in map(str.strip, lines) if line and not line.startswith("#"))


def _plan(call: str) -> Planned:
    op, positional, keywords = explain.call_of(shlex.split(call), "headwise warm")
    return _warm.plan(op, *positional, **keywords)
