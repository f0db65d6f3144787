"""Results as rows, one per case and contender: CSV that reads back, and JSON."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from headwise.benchmark.case import OURS, concerned
from headwise.benchmark.requirements import Measurement, PeerRequirement
from headwise.benchmark.roofs import Roof
from headwise.benchmark.runner import CaseResult
from headwise.benchmark.timing import Spread


@dataclass(frozen=True)
class Machine:
    """Where and when it was measured; part of every row, so that a row can be read alone."""

    device: str
    device_name: str
    cpu: str
    threads: int
    torch: str
    headwise: str
    python: str
    date: str
    triton: str = ""


@dataclass(frozen=True, kw_only=True)
class Row(Machine):
    suite: str
    group: str
    case: str
    direction: str
    contender: str
    # ours; variant: ours with other options; peer; yardstick: it computes something else; roof: what the machine can do
    role: str
    status: str  # ok; refused: the result fails its error budget; error: it raised; absent: this machine lacks the peer
    detail: str = ""
    quick: bool
    rounds: int | None = None
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    gflops_per_s: float | None = None
    gbytes_per_s: float | None = None
    peak_extra_bytes: int | None = None
    ratio: float | None = None  # its time over ours: above 1, ours is faster
    ratio_p20: float | None = None
    ratio_p80: float | None = None
    error_budget_share: float | None = None  # of our worst tensor; 1 is all that is allowed
    requirement: str = ""
    outcome: str = ""
    flops: float
    bytes: float
    dtype: str
    timed: str = "device"  # or graph, calls, host: see headwise.benchmark.timing
    required_ratio: float | None = None  # what `ratio` must reach, where that is required
    # Does the contender sum in a fixed order? Empty: not known. `order_of_sums` reads it, older rows included.
    deterministic: bool | None = None
    ratio_any_order: float | None = None  # its time over ours with deterministic=False, where that was timed as well


_MACHINE_COLUMNS = [field.name for field in fields(Machine)]
COLUMNS = [field.name for field in fields(Row) if field.name not in _MACHINE_COLUMNS] + _MACHINE_COLUMNS
CASE_COLUMNS = ("suite", "group", "case", "direction")
ROOFS = "roofs"  # the group of the rows that say what the machine can do


def rows(result: CaseResult, suite: str, dtype: str, machine: Machine, quick: bool) -> list[Row]:
    """The rows of one case. A refused or broken case has one, without measurements."""
    case = result.case

    def row(contender: str, role: str, status: str, detail: str, **measured: Any) -> Row:
        verdicts = [v for v in result.verdicts if concerned(v.requirement) == contender]
        return Row(
            suite=suite,
            group=case.group,
            case=case.name,
            direction=case.direction,
            contender=contender,
            role=role,
            status=status,
            detail=detail,
            quick=quick,
            requirement="; ".join(str(v.requirement) for v in verdicts),
            outcome="; ".join(v.outcome for v in verdicts),
            dtype=dtype,
            timed=case.timed,
            **{"flops": case.flops, "bytes": case.bytes, **measured},
            **asdict(machine),
        )

    if result.status != "ok":
        return [row(OURS, "ours", result.status, result.detail)]
    made = [
        row(
            m.contender,
            "ours" if m.contender == OURS else "variant" if m.variant else "yardstick" if m.yardstick else "peer",
            "ok",
            result.note if m.contender == OURS else "",
            **_numbers(result, m),
        )
        for m in result.measurements
    ]
    return made + [row(name, "peer", "absent", why) for name, why in result.absent.items()]


def roof_row(roof: Roof, suite: str, machine: Machine, quick: bool) -> Row:
    return Row(
        suite=suite,
        group=ROOFS,
        case=roof.name,
        direction="forward",
        contender="PyTorch",
        role="roof",
        status="ok",
        quick=quick,
        dtype=roof.dtype,
        flops=roof.flops,
        bytes=roof.bytes,
        rounds=roof.rounds,
        **_speed(roof.seconds, roof.flops, roof.bytes),
        **asdict(machine),
    )


def required_ratio(result: CaseResult, measured: Measurement) -> float | None:
    """What the ratio to this contender must reach."""
    ours = result.measurement(OURS)
    for requirement in result.case.requirements:
        if ours is None or not isinstance(requirement, PeerRequirement) or requirement.peer != measured.contender:
            continue
        if requirement.any_order:  # of another ratio
            continue
        needed = requirement.needed_ratio(ours, measured)
        if needed is not None:
            return needed
    return None


def _numbers(result: CaseResult, measured: Measurement) -> dict[str, Any]:
    # The bytes of a yardstick with its own work are not known.
    moved = result.case.bytes if measured.flops == result.case.flops else 0.0
    ratio = measured.ratio
    return {
        **_speed(measured.seconds, measured.flops, moved),
        "rounds": measured.rounds,
        "flops": measured.flops,
        "bytes": moved,
        "peak_extra_bytes": measured.peak_extra_bytes,
        "ratio": ratio and ratio.median,
        "ratio_p20": ratio and ratio.low,
        "ratio_p80": ratio and ratio.high,
        "error_budget_share": result.budget_share if measured.contender == OURS else None,
        "required_ratio": required_ratio(result, measured),
        "deterministic": measured.deterministic,
        "ratio_any_order": measured.ratio_any_order and measured.ratio_any_order.median,
    }


def _speed(seconds: Spread, flops: float, moved: float) -> dict[str, Any]:
    return {
        "median_ms": seconds.median * 1e3,
        "p20_ms": seconds.low * 1e3,
        "p80_ms": seconds.high * 1e3,
        "gflops_per_s": flops / seconds.median / 1e9 if flops else None,
        "gbytes_per_s": moved / seconds.median / 1e9 if moved else None,
    }


def csv_path(folder: Path, suite: str, machine: Machine) -> Path:
    """``cpu-amd-epyc.csv``: one file per suite and device, so that machines do not overwrite each other."""
    slug = re.sub(r"[^a-z0-9]+", "-", machine.device_name.lower()).strip("-")
    return folder / f"{suite}-{slug}.csv"


def write_csv(path: Path, new: list[Row], known_cases: Iterable[tuple[str, ...]]) -> None:
    """Write the rows, keeping those of an earlier run for cases that still exist and were not run this time.

    All contenders of a case are from one run, so no ratio mixes two.
    """
    fresh = {_case_of(asdict(row)) for row in new}
    known = set(known_cases)
    old = [r for r in read_csv(path) if _case_of(r) in known - fresh] if path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(old)
        writer.writerows(as_text(row) for row in new)


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows as text. Columns that an older file lacks are empty; a file of another kind has no rows."""
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        known = set(CASE_COLUMNS) <= set(reader.fieldnames or ()) <= set(COLUMNS)
        return [{name: row.get(name) or "" for name in COLUMNS} for row in reader] if known else []


FIXED_ORDER, ANY_ORDER_OF_SUMS, WHERE_FASTER = "fixed order", "any order", "any order where faster"
# Until then a backward of 16-bit attention on a GPU took any order where that was faster. Rows did not say so.
_FIXED_SINCE = "2026-11-18T15:47"
_OF_HOPPER_KERNELS = re.compile(r"attention D \d+|grouped heads|window|packed|memory")


def order_of_sums(row: dict[str, str]) -> str:
    """In which order a row's contender summed; empty where that is not known."""
    if row["deterministic"]:
        return FIXED_ORDER if row["deterministic"] == "True" else ANY_ORDER_OF_SUMS
    if row["role"] != "ours" or row["suite"] == "models":
        return ""
    sixteen_bits = row["device"] == "cuda" and row["dtype"] in ("float16", "bfloat16")
    hopper = sixteen_bits and row["direction"] != "forward" and _OF_HOPPER_KERNELS.fullmatch(row["group"])
    return WHERE_FASTER if hopper and row["date"] < _FIXED_SINCE else FIXED_ORDER


def _case_of(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in CASE_COLUMNS)


def as_text(row: Row) -> dict[str, str]:
    """As in the CSV."""
    return {name: _text(getattr(row, name)) for name in COLUMNS}


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
