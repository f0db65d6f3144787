"""``headwise bench report``: one HTML page of the results in a folder, and of what changed since another revision."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.text import Text

from headwise.benchmark import html_page, regression, report
from headwise.cli import _terminal

DEFAULT_PAGE = Path("headwise-bench.html")
_PASSED_ON = ("suite", "group", "filter", "without", "threads", "repeats")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        nargs="?",
        choices=("run", "report"),
        default="run",
        help="run measures (the default); report writes one HTML page of the results in --out",
    )
    parser.add_argument("--page", type=Path, metavar="FILE", help=f"with report: the page (default: {DEFAULT_PAGE})")
    parser.add_argument(
        "--base",
        metavar="REV",
        help="with report: measure the suite at this revision of the repository and as it is now, in turns",
    )


def write(args: argparse.Namespace, folder: Path) -> int:
    suites = {path.stem: rows for path in sorted(folder.glob("*.csv")) if (rows := report.read_csv(path))}
    if not suites and args.base is None:
        raise _terminal.UsageError(f"report: {folder} holds no results of headwise bench; --out names another folder")
    changes: list[regression.Change] = []
    if args.base is not None:
        try:
            changes = regression.measure(args.base, options(args))
        except RuntimeError as error:
            raise _terminal.UsageError(f"--base {args.base}: {error}") from error
    page = args.page or DEFAULT_PAGE
    html_page.write(page, suites, changes, args.base or "")
    slower = [" ".join(change.case) for change in changes if change.verdict == "slower"]
    if args.json:
        _terminal.print_json({"written": str(page), "suites": list(suites), "compared": len(changes), "slower": slower})
    else:
        console = _terminal.console()
        if args.base is not None:
            said = f"{len(slower)} of {len(changes)} cases are slower than at {args.base}"
            console.print(Text(said, "red" if slower else "green"))
        for case in slower:
            console.print(Text(f"✗ {case}", "red"))
        console.print(f"wrote {page}")
    return 0


def options(args: argparse.Namespace) -> list[str]:
    """What was asked for, as `headwise bench` takes it."""
    given = ["--quick"] * args.quick
    for name in _PASSED_ON:
        value = getattr(args, name)
        for one in value if isinstance(value, list) else [value]:
            given += [] if one is None else [f"--{name}", str(one)]
    return given
