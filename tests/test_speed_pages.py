"""What `make readme` writes of bench/results: dates, units, the order of sums, and where others are faster."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from headwise.benchmark import report

ROOT = Path(__file__).resolve().parent.parent
CSV = ROOT / "bench" / "results" / "x.csv"


@pytest.fixture(scope="module")
def scripts() -> tuple[ModuleType, ModuleType]:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        return importlib.import_module("update_readme"), importlib.import_module("speed_summary")
    finally:
        sys.path.remove(str(ROOT / "scripts"))


def row(**changes: str) -> dict[str, str]:
    known = dict.fromkeys(report.COLUMNS, "") | {
        "suite": "hopper", "group": "attention D 64", "case": "full S 512", "direction": "backward", "role": "peer",
        "contender": "FA4", "device": "cuda", "device_name": "NVIDIA H200", "dtype": "bfloat16", "ratio": "1.5",
        "rounds": "9", "date": "2026-12-03T12:00:00+00:00", "median_ms": "1", "gflops_per_s": "500000",
        "torch": "2.11", "triton": "3.6",
    }  # fmt: skip
    return known | changes


OURS = row(role="ours", contender="headwise", ratio="", deterministic="True")
LOOSE = row(role="variant", contender="headwise, any order", ratio="0.9", gflops_per_s="550000", deterministic="False")
PEER = row(
    ratio="0.97", ratio_any_order="1.08", requirement="≥ 1× as fast as FA4, in any order", outcome="met",
    date="2026-12-01T12:00:00+00:00",
)  # fmt: skip


def test_a_table_says_from_when_to_when_it_was_measured_and_in_which_order(scripts):
    table = scripts[0]._speed_table(CSV, [LOOSE, PEER], [OURS, LOOSE, PEER])
    assert "2026-12-01 to 2026-12-03: their time over ours" in table
    assert "| attention D 64 | backward | FA4 | 0.97× |  |" in table
    assert "| attention D 64 | backward, any order | FA4 | 1.08× | 1 of 1 |" in table
    older = [r | {"deterministic": "", "date": "2026-11-15T12:00:00", "ratio_any_order": ""} for r in (OURS, PEER)]
    table = scripts[0]._speed_table(CSV, older[1:], older)
    assert "| attention D 64 | backward, any order where faster | FA4 | 0.97× |" in table


def test_the_table_of_shapes_has_both_orders_where_both_were_timed(scripts):
    lines = scripts[0].hopper_table([OURS, LOOSE, PEER], "backward").splitlines()
    assert lines[0] == "| | TFLOP/s | of FA4 | in any order, TFLOP/s | of FA4 |"
    assert lines[1].count("---") == 5
    assert lines[2] == "| D 64, full S 512 | 500 | 0.97× | 550 | 1.08× |"
    assert "sums in a fixed order" in lines[-1]


@pytest.mark.parametrize(
    ("requirement", "milliseconds", "shown"),
    [("≤ 39700 µs", "50.527", "50.5 ms"), ("≤ 600 µs", "0.4567", "457 µs"), ("≤ 2.5 s", "2345.6", "2.35 s"),
     ("≤ 1.04e+06 µs", "1500", "1.5 s")],
)  # fmt: skip
def test_times_are_in_the_unit_that_suits_them(scripts, requirement, milliseconds, shown):
    made = scripts[0]._own_table([OURS | {"requirement": requirement, "outcome": "missed", "median_ms": milliseconds}])
    assert made.splitlines()[2] == f"| attention D 64 | backward | {shown} | 0 of 1 |"


def test_every_target_of_ours_has_a_line(scripts):
    both = {"requirement": "≥ 450 TFLOP/s; extra memory ≤ 2 GB", "outcome": "met; missed", "peak_extra_bytes": "3e9"}
    assert scripts[0]._own_table([OURS | both]).splitlines()[2:] == [
        "| attention D 64 | backward | 500 TFLOP/s | 1 of 1 |",
        "| attention D 64 | backward | 2.79 GiB extra memory | 0 of 1 |",
    ]


def test_where_others_are_faster_is_worked_out_from_the_rows(scripts):
    rows = [
        PEER, row(ratio="0.91", case="causal S 512"), row(contender="FA2"),
        row(ratio="0.5", contender="PyTorch", group="host", case="softmax, recorded"),
        row(ratio="0.996", contender="SDPA"),
        row(ratio="0.1", role="yardstick", contender="our plain"),
    ]  # fmt: skip
    assert (
        scripts[1]
        .below_one_in_short(rows)
        .startswith(
            "**Below 1×**, the lowest against each peer: PyTorch 0.50 (host cost of small calls, softmax), "
            "FA4 0.91 (attention D 64) ("
        )
    )
    assert scripts[1].below_one_table(rows).splitlines()[2:] == [
        "| NVIDIA H200 | FA4 | attention D 64 0.91 |",
        "| NVIDIA H200 | PyTorch | host cost of small calls, softmax 0.50 |",
    ]
    assert scripts[1].below_one_in_short([row()]) == "No peer is faster in any case."


def test_the_note_on_older_rows_goes_with_them(scripts):
    old = OURS | {"deterministic": "", "date": "2026-11-15T12:00:00"}
    assert "any order were the default" in scripts[1].table([old, PEER])
    assert "Our backward sums in a fixed order" in scripts[1].table([OURS, PEER])
