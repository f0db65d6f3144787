"""Write the tables and charts of README.md and docs that stand between marks anew, from the files in bench/results.

    python scripts/update_readme.py              (or: make readme) tables, chart, and the pictures in bench/results
    python scripts/update_readme.py --check      exit with 1 if a table or the chart shows something else
    python scripts/update_readme.py --measure    first run the conformance cases of the CPU here and keep their outcome

Nothing in these tables is written by hand: a cell is filled because its cases passed, a ratio stands there because it was
measured, with the device named.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import speed_summary

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
SPEED_PAGE = ROOT / "docs" / "speed.md"
CHART = ROOT / "docs" / "images" / "speed.svg"
RESULTS = ROOT / "bench" / "results"
HOPPER_PAGES = {"forward": "hopper-attention.md", "backward": "hopper-attention-backward.md"}


def ops_table(reports: list[dict]) -> str:
    """Op × backend, from the last `headwise check --json` of every machine it was run on."""
    backends = [b["name"] for b in reports[0]["environment"]["backends"]]
    results = {(r["op"], r["backend"]): r for report in reports for r in report["results"]}
    ops = list(dict.fromkeys(op for op, _ in results))
    lines = ["| Op | " + " | ".join(backends) + " |", "| --- " * (len(backends) + 1) + "|"]
    for op in ops:
        lines.append(f"| `{op}` | " + " | ".join(_cell(results.get((op, backend))) for backend in backends) + " |")
    where = "; ".join(_machine(report) for report in reports)
    empty = any(not _cell(results.get((op, backend))) for op in ops for backend in backends)
    lines += [
        "",
        "A tick: all cases of `headwise check`, forward and backward, in float32, float16 and bfloat16, are within their "
        f"error budget. {'An empty cell: not run on that device yet. ' if empty else ''}Run on: {where}.",
        *(f"{_machine(report)}: {report['note']}" for report in reports if "note" in report),
    ]
    return "\n".join(lines)


def _machine(report: dict) -> str:
    environment = report["environment"]
    tested = sorted({r["backend"] for r in report["results"] if r["runs"]})
    device = environment["gpus"][0]["name"] if tested in (["triton"], ["webgpu"]) else environment["cpu"]["model"]
    through = " through Vulkan" if tested == ["webgpu"] else ""
    return f"{', '.join(tested)} on {device}{through} with PyTorch {environment['versions']['torch']}"


def check_this_machine() -> None:
    """Run the CPU's conformance cases here and keep the outcome beside the benchmark results.

    Those of a GPU are kept as `headwise check --backend … --json` gave them there.
    """
    jobs = str(os.cpu_count() or 1)
    command = [sys.executable, "-m", "headwise", "check", "--backend", "cpu", "--jobs", jobs, "--json"]
    check = subprocess.run(command, check=False, capture_output=True, text=True)
    report = json.loads(check.stdout)
    for name in ("system", "kernels"):  # the operating system and a cache folder say nothing about results
        del report["environment"][name]
    device = report["environment"]["cpu"]["model"]
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    (RESULTS / f"check-{slug}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _cell(result: dict | None) -> str:
    if result is None or not result["runs"]:
        return ""
    failed = len({failure["case"] for failure in result["failures"]})
    return f"✓ {result['cases']}" if result["ok"] else f"✗ {failed} of {result['cases']}"


def speed_tables() -> str:
    parts = []
    for path in sorted(RESULTS.glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            every_row = [row for row in csv.DictReader(file) if "role" in row]  # not those of ranks
        rows = [row for row in every_row if row["role"] in ("peer", "yardstick") and row["ratio"]]
        if rows:
            parts.append(_speed_table(path, rows))
        own = [row for row in every_row if row["role"] == "ours" and row["requirement"] and row["median_ms"]]
        if own:
            parts.append(_own_table(own))
    return "\n\n".join(parts)


def _speed_table(path: Path, rows: list[dict[str, str]]) -> str:
    first = rows[0]
    device = first["device_name"] or first["cpu"]
    threads = f" {first['threads']} threads," if first["device"] == "cpu" else ""
    dates = sorted({row["date"][:10] for row in rows})
    lines = [
        f"**{device}**,{threads} PyTorch {first['torch']}, suite {first['suite']}, {dates[-1]}: how many times faster than "
        f"the peer, lowest and highest over the cases of a group ([all rows](../{path.relative_to(ROOT).as_posix()})).",
        "",
        "| Group | Direction | Against | Ratio | Targets met |",
        "| --- | --- | --- | --- | --- |",
    ]
    groups: dict[tuple[str, str, str], list[dict[str, str]]] = {}
    for row in rows:
        groups.setdefault((row["group"], row["direction"], row["contender"]), []).append(row)
    for (group, direction, peer), of_group in groups.items():
        ratios = [float(row["ratio"]) for row in of_group]
        span = f"{min(ratios):.2f}×" if len(ratios) == 1 else f"{min(ratios):.2f} – {max(ratios):.2f}×"
        outcomes = [row["outcome"] for row in of_group if row["outcome"] in ("met", "missed")]
        met = f"{outcomes.count('met')} of {len(outcomes)}" if outcomes else ""
        lines.append(f"| {group} | {direction} | {peer} | {span} | {met} |")
    return "\n".join(lines)


def _own_table(rows: list[dict[str, str]]) -> str:
    """What is required of ours alone: a rate, a time, an amount of memory."""
    lines = ["| Group | Direction | Ours, lowest and highest | Targets met |", "| --- | --- | --- | --- |"]
    groups: dict[tuple[str, str, str], list[tuple[float, str]]] = {}
    for row in rows:
        unit, value = _measured(row)
        groups.setdefault((row["group"], row["direction"], unit), []).append((value, row["outcome"]))
    for (group, direction, unit), of_group in groups.items():
        values, outcomes = zip(*of_group, strict=True)
        span = f"{min(values):.3g}" if len(values) == 1 else f"{min(values):.3g} – {max(values):.3g}"
        lines.append(f"| {group} | {direction} | {span} {unit} | {outcomes.count('met')} of {len(outcomes)} |")
    return "\n".join(lines)


def _measured(row: dict[str, str]) -> tuple[str, float]:
    if "TFLOP/s" in row["requirement"]:
        return "TFLOP/s", float(row["gflops_per_s"]) / 1e3
    if "TB/s" in row["requirement"]:
        return "TB/s", float(row["gbytes_per_s"]) / 1e3
    if "µs" in row["requirement"]:
        return "µs", float(row["median_ms"]) * 1e3
    return "GiB extra memory", float(row["peak_extra_bytes"]) / 2**30


def hopper_table(rows: list[dict[str, str]], direction: str) -> str:
    """Our rate in every case of the Hopper suite, and how many times as fast as each peer that is.

    Masked and biased calls have a table of their own, of times: how much work is left of one depends on its mask.
    """
    of = [row for row in rows if row["direction"] == direction and row["median_ms"]]
    plain = [row for row in of if row["group"] not in ("features", "roofs")]
    masked = [row for row in of if row["group"] == "features"]
    tables = [_hopper_rows(plain, "TFLOP/s", lambda row: f"{float(row['gflops_per_s']) / 1e3:.0f}")]
    if masked:
        tables.append(_hopper_rows(masked, "ms", lambda row: f"{float(row['median_ms']):.3g}"))
    return "\n\n".join(tables)


def _hopper_rows(rows: list[dict[str, str]], unit: str, figure: Callable[[dict[str, str]], str]) -> str:
    peers = list(dict.fromkeys(row["contender"] for row in rows if row["role"] == "peer"))
    lines = [f"| | {unit} | " + " | ".join(f"of {peer}" for peer in peers) + " |", "| --- " * (len(peers) + 2) + "|"]
    for ours in (row for row in rows if row["role"] == "ours"):
        same = {row["contender"]: row for row in rows if (row["group"], row["case"]) == (ours["group"], ours["case"])}
        ratios = [f"{float(same[peer]['ratio']):.2f}×" if peer in same else "" for peer in peers]
        group = ours["group"].removeprefix("attention ")
        name = ours["case"] if group == "features" else f"{group}, {ours['case']}"
        lines.append(f"| {name} | {figure(ours)} | " + " | ".join(ratios) + " |")
    first = rows[0]
    rounds = sorted({int(row["rounds"]) for row in rows})
    lines += [
        "",
        f"{first['device_name']}, PyTorch {first['torch']}, Triton {first['triton']}, "
        f"{_span_of(sorted({row['date'][:10] for row in rows}))}; medians of {_span_of(rounds)} shuffled rounds "
        "([all rows](../bench/results/hopper-nvidia-h200.csv)).",
    ]
    return "\n".join(lines)


def _span_of(values: list[Any]) -> str:
    return f"{values[0]}" if len(values) == 1 else f"{values[0]} to {values[-1]}"


def pages() -> dict[Path, str]:
    """Every page with tables of ours, as it should be."""
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("check-*.json"))]
    summary = speed_summary.table(speed_summary.read(RESULTS))
    with (RESULTS / "hopper-nvidia-h200.csv").open(newline="", encoding="utf-8") as file:
        hopper = list(csv.DictReader(file))
    sections = {
        README: {"ops": ops_table(reports), "speed": summary},
        SPEED_PAGE: {"summary": summary, "speed": speed_tables()},
        **{ROOT / "docs" / name: {"standing": hopper_table(hopper, d)} for d, name in HOPPER_PAGES.items()},
    }
    made = {}
    for page, bodies in sections.items():
        text = page.read_text(encoding="utf-8")
        for name, body in bodies.items():
            text = replace_section(text, name, body)
        made[page] = text
    return made


def draw_pictures() -> None:
    """The pictures of every CSV, as `headwise bench --plot-csv` draws them."""
    from headwise.benchmark import plot_rates, report

    for path in sorted(RESULTS.glob("*.csv")):
        rows = report.read_csv(path)
        drawn = {picture.name for picture in RESULTS.glob(f"{path.stem}-*.png")}
        if rows and drawn:  # a suite without pictures gets none
            plot_rates.save_all(rows, RESULTS, path.stem)


def replace_section(text: str, name: str, body: str) -> str:
    pattern = re.compile(rf"(<!-- {name}: [^>]*-->\n).*?(<!-- /{name} -->)", re.DOTALL)
    assert pattern.search(text), f"the page has no section {name}"
    return pattern.sub(lambda m: f"{m[1]}{body}\n{m[2]}", text)


def stale() -> list[str]:
    """What `make readme` would change: pages, and the chart, which says in words what it shows."""
    found = [page for page, text in pages().items() if page.read_text(encoding="utf-8") != text]
    if not speed_summary.shows(CHART, speed_summary.read(RESULTS)):
        found.append(CHART)
    return [path.relative_to(ROOT).as_posix() for path in found]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing: name what is not current")
    parser.add_argument("--measure", action="store_true", help="run the conformance cases of the CPU here first")
    args = parser.parse_args()
    if args.check:
        found = stale()
        for name in found:
            print(f"{name} does not show what is in bench/results: make readme")
        return int(bool(found))
    if args.measure:
        check_this_machine()
    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")
    speed_summary.chart(speed_summary.read(RESULTS), CHART)
    draw_pictures()
    return 0


if __name__ == "__main__":
    sys.exit(main())
