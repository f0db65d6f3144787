"""A suite at two revisions, in turns on one machine: which cases became slower.

The revisions run in processes of their own (their modules have the same names), base, now, now, base, so that a drift of
the machine hits both alike. What is compared is our own time.
"""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from headwise.benchmark.plot import Row
from headwise.benchmark.report import read_csv

LIMIT = 1.05  # what every pair of turns has to differ by
_RUN = "import sys; sys.path.insert(0, sys.argv.pop(1)); from headwise.cli import main; sys.exit(main(sys.argv[1:]))"

Times = dict[tuple[str, ...], float]  # case -> our milliseconds, of one turn


class Change(NamedTuple):
    case: tuple[str, ...]  # group, case, direction
    before: float
    now: float
    ratio: float  # before over now: below 1 it became slower
    low: float  # over all pairs of turns
    high: float

    @property
    def verdict(self) -> str:
        return "slower" if self.high < 1 / LIMIT else "faster" if self.low > LIMIT else ""


def changes(before: Sequence[Times], now: Sequence[Times]) -> list[Change]:
    """Cases that every turn measured."""
    common = set.intersection(*(set(times) for times in [*before, *now])) if before and now else set()
    found = []
    for case in sorted(common):
        pairs = [a[case] / b[case] for a in before for b in now]
        olds, news = [a[case] for a in before], [b[case] for b in now]
        middle = math.exp(statistics.mean(map(math.log, pairs)))
        found.append(Change(case, statistics.median(olds), statistics.median(news), middle, min(pairs), max(pairs)))
    return found


def measure(base: str, options: Sequence[str], root: Path | None = None) -> list[Change]:
    """Run ``headwise bench`` with these options at the revision ``base`` and as it is here, in turns.

    root: the repository; None: the one that this module is in.
    """
    root = root or Path(_git(Path(__file__).resolve().parent, "rev-parse", "--show-toplevel"))
    with tempfile.TemporaryDirectory(prefix="headwise-bench-") as folder:
        tree = Path(folder) / "base"
        _git(root, "worktree", "add", "--detach", str(tree), base)
        try:
            turns: dict[str, list[Times]] = {"base": [], "now": []}
            for number, side in enumerate(("base", "now", "now", "base")):
                out = Path(folder) / f"{number}-{side}"
                _run((tree if side == "base" else root) / "src", options, out)
                turns[side].append(times(row for path in out.glob("*.csv") for row in read_csv(path)))
            return changes(turns["base"], turns["now"])
        finally:
            _git(root, "worktree", "remove", "--force", str(tree))


def times(rows: Iterable[Row]) -> Times:
    ours = (row for row in rows if row["role"] == "ours" and row["median_ms"])
    return {(row["group"], row["case"], row["direction"]): float(row["median_ms"]) for row in ours}


def _run(source: Path, options: Sequence[str], out: Path) -> None:
    command = [sys.executable, "-c", _RUN, str(source), "bench", *options, "--out", str(out)]
    result = subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
    if result.returncode not in (0, 1):  # 1: a case was refused, and has no time
        raise RuntimeError(f"headwise bench of {source} ended with {result.returncode}")


def _git(folder: Path, *arguments: str) -> str:
    try:
        result = subprocess.run(["git", "-C", str(folder), *arguments], check=False, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise RuntimeError("--base needs git, and there is none") from error
    if result.returncode:
        raise RuntimeError(f"git {' '.join(arguments)}: {result.stderr.strip().splitlines()[-1]}")
    return result.stdout.strip()
