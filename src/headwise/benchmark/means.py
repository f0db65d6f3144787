"""What is required of many cases together: geometric means, from the rows of a CSV."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headwise.benchmark.case import OURS
from headwise.benchmark.report import ANY_ORDER_OF_SUMS, FIXED_ORDER, WHERE_FASTER, order_of_sums
from headwise.benchmark.requirements import Mean

Row = dict[str, str]


@dataclass(frozen=True)
class Found:
    mean: Mean
    ratio: float
    cases: int
    peers: tuple[str, ...]  # those that were measured
    order: str  # of our sums

    @property
    def against(self) -> str:
        return f"the best of {', '.join(self.peers)}" if len(self.peers) > 1 else self.peers[0]

    @property
    def outcome(self) -> str:
        """Not judged where a peer is missing."""
        if set(self.peers) != set(self.mean.peers):
            return "not judged"
        return "met" if self.ratio >= self.mean.bound else "missed"

    def __str__(self) -> str:
        return (
            f"{self.mean.name}, {self.mean.direction}, {self.order}: geometric mean {self.ratio:.2f}× of {self.against} "
            f"over {self.cases} cases (≥ {self.mean.bound:g}×: {self.outcome})"
        )


def found(means: Iterable[Mean], rows: Sequence[Row]) -> list[Found]:
    """The means of which every case that the rows know was measured in that order of sums."""
    return [one for mean in means if (one := _found(mean, rows)) is not None]


def _found(mean: Mean, rows: Sequence[Row]) -> Found | None:
    of = [row for row in rows if row["group"] in mean.groups and row["direction"] == mean.direction]
    ours = {_case(row): order_of_sums(row) for row in of if row["contender"] == OURS and row["median_ms"]}
    if {group for group, _ in ours} != set(mean.groups):
        return None
    best: dict[tuple[str, str], float] = {}
    for row in of:
        ratio = _ratio(mean, row, ours.get(_case(row), ""))
        if ratio and row["contender"] in mean.peers:
            best[_case(row)] = min(best.get(_case(row), math.inf), ratio)
    if set(best) != set(ours):
        return None
    peers = tuple(name for name in mean.peers if any(row["contender"] == name and row["ratio"] for row in of))
    orders = set(ours.values())
    order = FIXED_ORDER if not mean.any_order else WHERE_FASTER if WHERE_FASTER in orders else ANY_ORDER_OF_SUMS
    return Found(mean, statistics.geometric_mean(best.values()), len(best), peers, order)


def _ratio(mean: Mean, row: Row, ours: str) -> float | None:
    """Of a peer to ours in the order that the mean is about."""
    if ours == WHERE_FASTER:  # an older row, of one call in any order
        return float(row["ratio"]) if mean.any_order and row["ratio"] else None
    text = row["ratio_any_order"] if mean.any_order else row["ratio"]
    return float(text) if text else None


def _case(row: Row) -> tuple[str, str]:
    return row["group"], row["case"]
