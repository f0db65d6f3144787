"""``headwise view``: open the report that a demo has left in its folder."""

from __future__ import annotations

import argparse
import sys
import webbrowser
from pathlib import Path

from headwise.cli import _terminal
from headwise.cli._terminal import UsageError
from headwise.demo.record import DEFAULT_FOLDER, REPORT, RUN


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", metavar="DIR", type=Path, nargs="?", default=Path(DEFAULT_FOLDER),
        help=f"the folder that headwise demo --out DIR wrote to (default: {DEFAULT_FOLDER})",
    )  # fmt: skip
    parser.add_argument("--no-open", action="store_true", help="say where the report is, open no browser")
    parser.add_argument("--rebuild", action="store_true", help="write the report anew from the files of the run")
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def run(args: argparse.Namespace) -> int:
    report, written = _report(args.folder, args.rebuild)
    address = report.resolve().as_uri()
    opened = not args.no_open and webbrowser.open(address)
    if args.json:
        _terminal.print_json({"report": str(report), "address": address, "written": written, "opened": opened})
    else:
        print(address)
    if not opened and not args.no_open:
        print("headwise view: no browser could be started here; open the address above in one", file=sys.stderr)
        return 1
    return 0


def _report(folder: Path, rebuild: bool) -> tuple[Path, bool]:
    """The report's path, and whether it had to be written."""
    if not folder.is_dir():
        raise UsageError(
            f"{folder} is {'not a folder' if folder.exists() else 'not there'}; `headwise demo --out {folder}` makes it"
        )
    report = folder / REPORT
    if report.is_file() and not rebuild:
        return report, False
    if not (folder / RUN).is_file():
        raise UsageError(f"{folder} holds no run: there is no {RUN} in it; `headwise demo --out {folder}` writes one")
    try:
        from headwise.demo.report import write_report

        return write_report(folder), True
    except ValueError as error:
        raise UsageError(f"{folder}: {error}") from error
    except OSError as error:
        raise UsageError(f"the report of {folder} cannot be written: {error}") from error
    except ModuleNotFoundError as error:
        raise UsageError(f"{error}; pip install 'headwise[demo]' brings it") from error
