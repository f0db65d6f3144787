"""Write the tables and charts of README.md and docs that stand between marks anew, from the files in bench/results.

    python scripts/update_readme.py              (or: make readme) tables, chart, and the pictures in bench/results
    python scripts/update_readme.py --check      exit with 1 if a table or the chart shows something else
    python scripts/update_readme.py --measure    first run the conformance cases of the CPU here and keep their outcome

Nothing in these tables is written by hand: a cell is filled because its cases passed, a ratio stands there because it was
measured, with the device named.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import speed_summary

from headwise.benchmark import means, report, suites
from headwise.benchmark.case import ANY_ORDER

Row = dict[str, str]
ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
SPEED_PAGE = ROOT / "docs" / "speed.md"
CHART = ROOT / "docs" / "images" / "speed.svg"
RESULTS = ROOT / "bench" / "results"
TRITON_PAGE = ROOT / "docs" / "triton-attention.md"
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
        every_row = report.read_csv(path)  # none of a file of another kind
        rows = [row for row in every_row if row["role"] in ("peer", "variant", "yardstick") and row["ratio"]]
        if rows:
            parts.append(_speed_table(path, rows, every_row))
        own = [row for row in every_row if row["role"] == "ours" and row["requirement"] and row["median_ms"]]
        if own:
            parts.append(_own_table(own))
    return "\n\n".join(parts)


def _speed_table(path: Path, rows: list[Row], every_row: list[Row]) -> str:
    """Groups of ratios by direction, order of our sums and contender; then the means that the suite asks for."""
    first = rows[0]
    device = first["device_name"] or first["cpu"]
    threads = f" {first['threads']} threads," if first["device"] == "cpu" else ""
    dates = _dates(rows)
    lines = [
        f"**{device}**,{threads} PyTorch {first['torch']}, suite {first['suite']}, {_span_of(dates)}: their time over ours, "
        f"lowest and highest over the cases of a group ([all rows](../{path.relative_to(ROOT).as_posix()})).",
        "",
        "| Group | Direction | Against | Ratio | Targets met |",
        "| --- | --- | --- | --- | --- |",
    ]
    ours = {_case(row): report.order_of_sums(row) for row in every_row if row["role"] == "ours"}
    groups: dict[tuple[str, str, str], list[tuple[float, list[str]]]] = {}
    for row in rows:
        order, of_ratio, of_any_order = ours[_case(row)], [], []
        for requirement, outcome in zip(row["requirement"].split("; "), row["outcome"].split("; "), strict=False):
            (of_any_order if requirement.endswith(", in any order") else of_ratio).append(outcome)
        for text, summed, outcomes in (
            (row["ratio"], order, of_ratio), (row["ratio_any_order"], report.ANY_ORDER_OF_SUMS, of_any_order)
        ):  # fmt: skip
            if text:
                key = row["group"], _direction(row["direction"], summed), row["contender"]
                groups.setdefault(key, []).append((float(text), outcomes))
    for (group, direction, peer), of_group in groups.items():
        ratios, outcomes = [ratio for ratio, _ in of_group], [outcome for _, of in of_group for outcome in of]
        span = f"{min(ratios):.2f}×" if len(ratios) == 1 else f"{min(ratios):.2f} – {max(ratios):.2f}×"
        lines.append(f"| {group} | {direction} | {peer} | {span} | {_met(outcomes)} |")
    for mean in _means(first["suite"], every_row):
        direction = _direction(mean.mean.direction, mean.order)
        name = f"{mean.mean.name}, geometric mean"
        lines.append(f"| {name} | {direction} | {mean.against} | {mean.ratio:.2f}× | {_met([mean.outcome])} |")
    return "\n".join(lines)


def _case(row: Row) -> tuple[str, str, str]:
    return row["group"], row["case"], row["direction"]


def _direction(direction: str, order: str) -> str:
    """With the order of our sums, where it is not the default."""
    return direction if order in ("", report.FIXED_ORDER) else f"{direction}, {order}"


def _means(suite: str, rows: list[Row]) -> list[means.Found]:
    return means.found(suites.load(suite).means, rows) if suite in suites.SUITES else []


def _met(outcomes: list[str]) -> str:
    judged = [outcome for outcome in outcomes if outcome in ("met", "missed")]
    return f"{judged.count('met')} of {len(judged)}" if judged else ""


def _own_table(rows: list[Row]) -> str:
    """What is required of ours alone: a rate, a time, an amount of memory."""
    lines = ["| Group | Direction | Ours, lowest and highest | Targets met |", "| --- | --- | --- | --- |"]
    groups: dict[tuple[str, str, str], list[tuple[float, str]]] = {}
    for row in rows:
        for requirement, outcome in zip(row["requirement"].split("; "), row["outcome"].split("; "), strict=True):
            unit, value = _measured(requirement, row)
            groups.setdefault((row["group"], row["direction"], unit), []).append((value, outcome))
    for (group, direction, unit), of_group in groups.items():
        values, outcomes = [value for value, _ in of_group], [outcome for _, outcome in of_group]
        lines.append(f"| {group} | {direction} | {_values(unit, values)} | {_met(outcomes)} |")
    return "\n".join(lines)


def _measured(requirement: str, row: Row) -> tuple[str, float]:
    """The unit and the value that a requirement is about."""
    if "TFLOP/s" in requirement:
        return "TFLOP/s", float(row["gflops_per_s"]) / 1e3
    if "TB/s" in requirement:
        return "TB/s", float(row["gbytes_per_s"]) / 1e3
    if re.fullmatch(r"≤ [\d.e+]+ (µs|s)", requirement):
        return "s", float(row["median_ms"]) / 1e3
    return "GiB extra memory", float(row["peak_extra_bytes"]) / 2**30


def _values(unit: str, values: list[float]) -> str:
    """Three digits, without exponents: times in the unit that suits the longest."""
    if unit == "s":
        unit, factor = next(scale for scale in _TIMES if max(values) * scale[1] >= 1 or scale is _TIMES[-1])
        values = [value * factor for value in values]
    low, high = (f"{value:.0f}" if value >= 100 else f"{value:.3g}" for value in (min(values), max(values)))
    return f"{low if low == high else f'{low} – {high}'} {unit}"


_TIMES = (("s", 1.0), ("ms", 1e3), ("µs", 1e6))


def host_table(rows: list[Row]) -> str:
    """What a call costs in Python, beside PyTorch."""
    lines = ["| | Ours, µs | | µs | Their time over ours | Target |", "| --- | --- | --- | --- | --- | --- |"]
    host = [row for row in rows if row["group"] == "host" and row["median_ms"]]
    for ours in (row for row in host if row["role"] == "ours"):
        for other in (row for row in host if _case(row) == _case(ours) and row["role"] != "ours"):
            target = f"{other['requirement']}: {other['outcome']}" if other["requirement"] else "none"
            lines.append(
                f"| {ours['case']} | {float(ours['median_ms']) * 1e3:.1f} | {other['contender']} | "
                f"{float(other['median_ms']) * 1e3:.1f} | {float(other['ratio']):.2f}× | {target} |"
            )
    first = host[0]
    lines += ["", f"{first['device_name']}, {first['cpu']}, PyTorch {first['torch']}, {_span_of(_dates(host))}."]
    return "\n".join(lines)


def hopper_table(rows: list[Row], direction: str) -> str:
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


def _hopper_rows(rows: list[Row], unit: str, figure: Callable[[Row], str]) -> str:
    peers = list(dict.fromkeys(row["contender"] for row in rows if row["role"] == "peer"))
    lines = [f"| | {unit} | " + " | ".join(f"of {peer}" for peer in peers) + " |", "| --- " * (len(peers) + 2) + "|"]
    for ours in (row for row in rows if row["role"] == "ours"):
        same = {row["contender"]: row for row in rows if (row["group"], row["case"]) == (ours["group"], ours["case"])}
        ratios = [f"{float(same[peer]['ratio']):.2f}×" if peer in same else "" for peer in peers]
        group = ours["group"].removeprefix("attention ")
        name = ours["case"] if group == "features" else f"{group}, {ours['case']}"
        lines.append(
            f"| {name} | {figure(ours)} | " + " | ".join([*ratios, *_in_any_order(same, peers, figure)]) + " |"
        )
    if any(row["role"] == "variant" for row in rows):
        lines[0] = lines[0] + f" in any order, {unit} | " + " | ".join(f"of {peer}" for peer in peers) + " |"
        lines[1] = lines[1] + " --- |" * (1 + len(peers))
    first = rows[0]
    orders = sorted(
        {report.order_of_sums(row) for row in rows if row["role"] == "ours" and row["direction"] == "backward"}
    )
    summed = f"sums in {' or '.join(_article(order) for order in orders)}; " if orders else ""
    rounds = sorted({int(row["rounds"]) for row in rows})
    lines += [
        "",
        f"{first['device_name']}, PyTorch {first['torch']}, Triton {first['triton']}, "
        f"{_span_of(_dates(rows))}; {summed}medians of "
        f"{_span_of(rounds)} shuffled rounds ([all rows](../bench/results/hopper-nvidia-h200.csv)).",
    ]
    return "\n".join(lines)


def _in_any_order(same: dict[str, Row], peers: list[str], figure: Callable[[Row], str]) -> list[str]:
    """The columns of ours with deterministic=False, where it was timed."""
    if ANY_ORDER not in same:
        return []
    ratios = [same[peer]["ratio_any_order"] if peer in same else "" for peer in peers]
    return [figure(same[ANY_ORDER]), *(f"{float(ratio):.2f}×" if ratio else "" for ratio in ratios)]


def _article(order: str) -> str:
    return {report.FIXED_ORDER: "a fixed order", report.WHERE_FASTER: "any order where that was faster"}.get(
        order, order
    )


def _dates(rows: list[Row]) -> list[str]:
    return sorted({row["date"][:10] for row in rows})


def _span_of(values: list[Any]) -> str:
    return f"{values[0]}" if len(values) == 1 else f"{values[0]} to {values[-1]}"


def pages() -> dict[Path, str]:
    """Every page with tables of ours, as it should be."""
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("check-*.json"))]
    of_summary = speed_summary.read(RESULTS)
    summary = speed_summary.table(of_summary)
    hopper, cuda = (report.read_csv(RESULTS / f"{suite}-nvidia-h200.csv") for suite in ("hopper", "cuda"))
    sections = {
        README: {
            "ops": ops_table(reports),
            "speed": f"{summary}\n\n{speed_summary.below_one_in_short(of_summary)}",
        },
        SPEED_PAGE: {
            "summary": summary,
            "below": speed_summary.below_one_table(of_summary),
            "speed": speed_tables(),
        },
        TRITON_PAGE: {"host": host_table(cuda)},
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
    from headwise.benchmark import plot_rates

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
