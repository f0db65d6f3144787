"""``headwise bench report``: one HTML page of the results in a folder, and of what changed since another revision."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.text import Text

from headwise.benchmark import html_page, regression, report
from headwise.benchmark.suites import SUITES
from headwise.cli import _terminal

DEFAULT_FOLDER = Path("bench/results")
DEFAULT_PAGE = Path("headwise-bench.html")
DISTRIBUTED = "distributed"  # processes, not contenders: no case of the other suites
_PASSED_ON = ("suite", "group", "filter", "without", "threads", "repeats")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``report`` as a command with a parser of its own."""
    commands = parser.add_subparsers(metavar="[command]", title="commands", dest="action")
    report = commands.add_parser(
        "report",
        help="write one HTML page of the results",
        description="Write one HTML page of the results in a folder. With --base, first measure a suite at that "
        "revision of the repository and as it is now, in turns, and show which cases became slower.",
    )
    report.add_argument("--out", type=Path, metavar="DIR", help=f"folder of the results (default: {DEFAULT_FOLDER})")
    report.add_argument(
        "--page", type=Path, metavar="FILE", default=DEFAULT_PAGE, help=f"the page (default: {DEFAULT_PAGE})"
    )
    report.add_argument("--json", action="store_true", help="machine-readable output")
    measured = report.add_argument_group("what became slower")
    measured.add_argument("--base", metavar="REV", help="the revision to compare with")
    add_choice(measured)


def add_choice(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Which cases are measured, and how: the options that ``report --base`` passes on to ``headwise bench``."""
    parser.add_argument("--suite", default="cpu", help=f"one of: {', '.join((*SUITES, DISTRIBUTED))} (default: cpu)")
    parser.add_argument("--group", action="append", metavar="NAME", help="only this group (may be repeated)")
    parser.add_argument("--filter", metavar="TEXT", help="only cases whose name has every word of TEXT")
    parser.add_argument(
        "--without", action="append", metavar="PEER", help="skip this peer (for example a slow compiler)"
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes: proves that it runs; its times mean nothing")
    parser.add_argument("--threads", type=int, help="of PyTorch on the CPU (default: what the suite's targets are for)")
    parser.add_argument(
        "--repeats", type=int, metavar="N", help="rounds per case (default: 7 to 30 by time, 3 for long ones)"
    )


def write(args: argparse.Namespace) -> int:
    folder = args.out or DEFAULT_FOLDER
    suites = {path.stem: rows for path in sorted(folder.glob("*.csv")) if (rows := report.read_csv(path))}
    if not suites and args.base is None:
        raise _terminal.UsageError(f"report: {folder} holds no results of headwise bench; --out names another folder")
    changes: list[regression.Change] = []
    if args.base is not None:
        try:
            changes = regression.measure(args.base, options(args))
        except RuntimeError as error:
            raise _terminal.UsageError(f"--base {args.base}: {error}") from error
    page = args.page
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
