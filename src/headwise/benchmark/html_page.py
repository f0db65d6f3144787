"""One HTML page of everything that was measured: rooflines, ratios to peers, growth with S, memory, regression.

Made from the rows of the CSVs alone; nothing in it is loaded from elsewhere.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path

from headwise.benchmark import html_charts, means
from headwise.benchmark.case import OURS
from headwise.benchmark.html_charts import Point, Series
from headwise.benchmark.plot import Row
from headwise.benchmark.plot_roofline import roofs
from headwise.benchmark.regression import LIMIT, Change
from headwise.benchmark.report import ROOFS, order_of_sums
from headwise.benchmark.suites import SUITES, load

_LENGTH = re.compile(r"\bS (\d+)")
_SHRINKS = re.compile(r"\b[BH] \d+")  # batch and heads, which get fewer as S grows
_COUNTED_IN_FULL = ("features", "masks")  # work that a mask hides is counted there: no rates to hold under a roof


def write(path: Path, suites: dict[str, list[Row]], changes: Sequence[Change] = (), base: str = "") -> None:
    """The page of suites by file name, and of what changed since the revision ``base``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(suites, changes, base), encoding="utf-8")


def page(suites: dict[str, list[Row]], changes: Sequence[Change] = (), base: str = "") -> str:
    style = files("headwise.benchmark").joinpath("html_page.css").read_text(encoding="utf-8")
    sections = {name: section(name, rows) for name, rows in suites.items() if rows}
    links = "".join(f'<a href="#{name}">{html.escape(name)}</a>' for name in sections)
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>headwise bench report</title><style>{style}</style><h1>headwise bench report</h1>",
        "<p class=dim>Ratios are their time over ours within one round, the median over rounds. A result that failed its "
        f"error budget was not timed.</p><nav>{links}</nav>",
    ]
    if base:
        parts.append(regression(changes, base))
    return "\n".join([*parts, *sections.values()]) + "\n"


def section(name: str, rows: list[Row]) -> str:
    newest = max(rows, key=lambda r: r["date"])
    where = [newest["device_name"] or newest["cpu"], f"torch {newest['torch']}", f"suite {newest['suite']}"]
    where += [f"{newest['threads']} threads"] if newest["device"] == "cpu" else []
    dates = sorted({row["date"][:10] for row in rows})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    outcomes = [outcome for row in rows for outcome in row["outcome"].split("; ")]
    judged = f"targets: {outcomes.count('met')} met, {outcomes.count('missed')} missed"
    quick = (
        "<p class=missed>Quick sizes: these numbers say nothing about speed.</p>" if newest["quick"] == "True" else ""
    )
    parts = [
        f'<h2 id="{name}">{html.escape(where[0])} · {html.escape(newest["suite"])}</h2>',
        f"<p class=dim>{html.escape(' · '.join(where[1:]))} · measured {when} · {judged}</p>{quick}",
        *(f"<p>{html.escape(str(mean))}</p>" for mean in _means(rows)),
        _titled("Ratios to peers", _ratios(rows)),
        _titled("Growth with the sequence", _growth(rows)),
        _titled("Roofline", _roofline(rows)),
        _titled("Extra memory of a call, MiB", _memory(rows)),
        f"<details><summary>Every row</summary>{_every_row(rows)}</details>",
    ]
    return "\n".join(parts)


def _means(rows: list[Row]) -> list[means.Found]:
    suite = rows[0]["suite"]
    return means.found(load(suite).means, rows) if suite in SUITES else []


def _titled(title: str, body: str) -> str:
    return f"<h3>{title}</h3>{body}" if body else ""


def _ratios(rows: list[Row]) -> str:
    lines: dict[str, list[Point]] = {}
    for row in rows:
        against = f"{row['contender']} (another task)" if row["role"] == "yardstick" else row["contender"]
        for text, of in ((row["ratio"], ""), (row["ratio_any_order"], ", ours in any order")):
            if text:
                name = f"{row['case']}, {row['direction']}: {float(text):.2f}× ({row['outcome'] or 'not judged'})"
                point = Point(float(text), 1.0, name, row["direction"] == "forward")
                lines.setdefault(f"{row['group']} · {against}{of}", []).append(point)
    return f'<div class="wide">{html_charts.ratios(list(lines.items()))}</div>' if lines else ""


def _growth(rows: list[Row]) -> str:
    """Rates over S, one panel for each kind of case that was measured at three lengths or more."""
    panels: dict[str, dict[str, list[Point]]] = {}
    unit = "TFLOP/s"
    for row in rows:
        length = _LENGTH.search(row["case"])
        if length is None or not row["gflops_per_s"] or row["role"] not in ("ours", "peer"):
            continue
        kind = " ".join([row["group"], _SHRINKS.sub("", _LENGTH.sub("", row["case"])), row["direction"]])
        rate = float(row["gflops_per_s"]) / (1.0 if row["device"] == "cpu" else 1e3)
        unit = "GFLOP/s" if row["device"] == "cpu" else "TFLOP/s"
        name = f"{row['contender']}, {row['case']}: {rate:.4g} {unit}"
        points = panels.setdefault(" ".join(kind.split()), {}).setdefault(row["contender"], [])
        points.append(Point(float(length[1]), rate, name))
    drawn = []
    for kind, found in panels.items():
        if len({point.x for point in found.get(OURS, [])}) < 3:
            continue
        series = [Series(who, sorted(of), lines=True, dashed=who != OURS) for who, of in found.items()]
        chart = html_charts.scatter(series, "S", unit, width=440, height=250)
        drawn.append(f"<div><h4>{html.escape(kind)}</h4>{chart}</div>")
    return f'<div class="panels">{"".join(drawn)}</div>' if drawn else ""


def _roofline(rows: list[Row]) -> str:
    measured = roofs(rows)
    if measured is None:
        return ""
    bandwidth, peak = measured
    families: dict[str, list[Point]] = {}
    for row in rows:
        timed = row["role"] == "ours" and row["gflops_per_s"] and float(row["bytes"] or 0) > 0
        if timed and row["timed"] in ("device", "graph") and row["group"] not in (ROOFS, *_COUNTED_IN_FULL):
            intensity, rate = float(row["flops"]) / float(row["bytes"]), float(row["gflops_per_s"]) * 1e9
            share = rate / min(intensity * bandwidth, peak)
            name = (
                f"{row['group']}, {row['case']}, {row['direction']}: {rate / 1e12:.3g} TFLOP/s, {share:.0%} of the roof"
            )
            families.setdefault(row["group"], []).append(
                Point(intensity, rate / 1e12, name, row["direction"] == "forward")
            )
    if not families:
        return ""
    series = [Series(name, points) for name, points in families.items()]
    said = f"Copy {bandwidth / 1e12:.2f} TB/s, 16-bit product {peak / 1e12:.0f} TFLOP/s, both measured by the suite."
    chart = html_charts.scatter(
        series, "operations per byte that must move", "TFLOP/s", log_y=True, width=900, height=420,
        roof=lambda x: min(x * bandwidth, peak) / 1e12,
    )  # fmt: skip
    return f'<p class=dim>{said}</p><div class="wide">{chart}</div>'


def _memory(rows: list[Row]) -> str:
    """Cases with a peer's memory beside ours, or a limit on it; those that need the most first.

    On WebGPU only the pool of our own buffers is counted: what a peer takes there is not seen.
    """
    cases: dict[tuple[str, ...], dict[str, float | None]] = {}
    limited = {_case(row) for row in rows if "memory" in row["requirement"] or "extra" in row["requirement"]}
    for row in rows:
        if row["peak_extra_bytes"] and row["role"] in ("ours", "peer"):
            seen = row["device"] != "webgpu" or row["role"] == "ours"
            amount = float(row["peak_extra_bytes"]) / 2**20 if seen else None
            cases.setdefault(_case(row), {})[row["contender"]] = amount
    shown = {case: of for case, of in cases.items() if OURS in of and (len(of) > 1 or case in limited)}
    peers = list(dict.fromkeys(who for of in shown.values() for who in of if who != OURS))
    body = [
        [*case, _mebibytes(of[OURS]), *(_mebibytes(of[who]) if who in of else "" for who in peers)]
        for case, of in sorted(shown.items(), key=lambda item: -(item[1][OURS] or 0.0))
    ]
    if not body:
        return ""
    table = _table(["group", "case", "direction", OURS, *peers], body, numbers=3)
    return table if len(body) <= 12 else f"<details><summary>{len(body)} cases</summary>{table}</details>"


def _mebibytes(amount: float | None) -> str:
    if amount is None:
        return "not seen"
    return f"{amount:,.0f}" if amount >= 100 else f"{amount:.3g}"


def _every_row(rows: list[Row]) -> str:
    body = [
        [
            *_case(row),
            row["contender"],
            f"{float(row['median_ms']):.4g}" if row["median_ms"] else row["status"],
            f"{float(row['ratio']):.2f}×" if row["ratio"] else "",
            row["requirement"],
            row["outcome"],
            order_of_sums(row),
        ]
        for row in rows
    ]
    names = ["group", "case", "direction", "contender", "ms", "ratio", "target", "outcome", "sums"]
    return _table(names, body, numbers=4)


def regression(changes: Sequence[Change], base: str) -> str:
    if not changes:
        return f"<h2>Against {html.escape(base)}</h2><p>No case was measured on both sides.</p>"
    slower = [change for change in changes if change.verdict == "slower"]
    body = [
        [*change.case, f"{change.before:.4g}", f"{change.now:.4g}", f"{change.ratio:.3f}×",
         f"{change.low:.3f} to {change.high:.3f}", change.verdict]
        for change in sorted(changes, key=lambda change: change.ratio)
    ]  # fmt: skip
    points = [Point(c.ratio, 1.0, f"{' '.join(c.case)}: {c.ratio:.3f}×", "backward" not in c.case[-1]) for c in changes]
    table = _table(["group", "case", "direction", "ms before", "ms now", "before / now", "over the pairs", ""], body, 3)
    said = f"{len(slower)} of {len(changes)} cases are slower than at {html.escape(base)}"
    return (
        f'<h2 id="regression">Against {html.escape(base)}</h2><p class="{"missed" if slower else "met"}">{said}.</p>'
        f"{html_charts.ratios([('all cases', points)], 'time before / time now')}{table}"
        "<p class=dim>Both revisions took turns on this machine. A case is slower or faster if every pair of turns says "
        f"so by more than a factor of {LIMIT}.</p>"
    )


def _case(row: Row) -> tuple[str, ...]:
    return row["group"], row["case"], row["direction"]


def _table(head: Sequence[str], body: Iterable[Sequence[str]], numbers: int) -> str:
    """``numbers``: from this column on they stand to the right."""

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{_class(text, at >= numbers)}>{html.escape(text)}</{tag}>" for at, text in enumerate(row)
        )

    lines = "".join(f"<tr>{cells('td', row)}</tr>" for row in body)
    return f'<div class="wide"><table><tr>{cells("th", head)}</tr>{lines}</table></div>'


def _class(text: str, number: bool) -> str:
    marks = [*(["number"] if number else [])]
    marks += (
        ["missed"] if text in ("missed", "slower", "refused", "error") else ["met"] if text in ("met", "faster") else []
    )
    return f' class="{" ".join(marks)}"' if marks else ""
