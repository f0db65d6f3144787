"""The speed of Headwise in ten rows and one chart, chosen from bench/results by rules, not by result.

Every row compares one kind of call with one peer (or, where it says so, with the fastest peer of each case), and takes all
cases of its groups: lowest to highest. A row that was not measured says so.
"""

from __future__ import annotations

import math
import re
import statistics
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from headwise.benchmark import report

Row = dict[str, str]
FASTEST = "the fastest peer"


class Line(NamedTuple):
    """Which rows of which suites make one line of the summary."""

    label: str
    suites: tuple[str, ...]
    device: str  # part of the device's name: the newest file that matches is taken
    group: str  # regular expressions, searched in the group and in the case
    case: str
    peer: str
    not_case: str = "(?!)"


_MASKED = r"mask|bias|padding|documents"
_TRAINING = r"^(rms_norm|other norms|softmax|training ops|linear loss)$"
LINES = (
    Line("attention bf16", ("hopper",), "H200", r"^attention D", "", "cuDNN", _MASKED),
    Line("attention bf16", ("hopper",), "H200", r"^attention D", "", "FA4", _MASKED),
    Line("attention bf16", ("cuda",), "H200", r"^attention D", "", "FA2"),
    Line("mask or bias, bf16, D 64 and 128", ("hopper", "cuda"), "H200", "", _MASKED, FASTEST),
    Line("attention float32", ("cuda",), "H200", r"^attention float32", "", "SDPA efficient"),
    Line("decoding, CUDA graphs", ("cuda",), "H200", r"^decode as CUDA graphs", "", "cuDNN"),
    Line("norms, softmax, losses, rope, glu", ("cuda",), "H200", _TRAINING, "", "PyTorch"),
    Line("host cost of small calls", ("cuda",), "H200", r"^host$", "", FASTEST),
    Line("attention, WebGPU", ("webgpu",), "H200", r"^attention (float32|float16)$", "", "ONNX Runtime"),
    Line("attention float32", ("cpu",), "", r"^(attention|grouped|mask|bias)", "", "SDPA"),
)


class Summary(NamedTuple):
    line: Line
    device: str
    peers: tuple[str, ...]  # those that were measured
    ratios: dict[str, list[float]]  # by direction; forward+backward counts as backward

    @property
    def measured(self) -> bool:
        return any(self.ratios.values())

    @property
    def against(self) -> str:
        if self.line.peer != FASTEST or not self.peers:
            return self.line.peer
        if len(self.peers) == 1:
            return self.peers[0]
        return f"the {'faster' if len(self.peers) == 2 else 'fastest'} of {', '.join(self.peers)}"


def read(results: Path) -> list[Row]:
    """The rows of all files, older ones with what they lack left empty."""
    rows = [row | {"file": path.name} for path in sorted(results.glob("*.csv")) for row in report.read_csv(path)]
    return [row for row in rows if row["quick"] != "True"]


def summarise(rows: list[Row]) -> list[Summary]:
    return [_summary(line, rows) for line in LINES]


def _summary(line: Line, rows: list[Row]) -> Summary:
    of_suite = [r for r in rows if r["suite"] in line.suites and line.device in _device(r)]
    chosen = [
        r
        for r in of_suite
        if r["role"] == "peer"
        and r["ratio"]
        and re.search(line.group, r["group"])
        and re.search(line.case, f"{r['group']} {r['case']}")
        and not re.search(line.not_case, f"{r['group']} {r['case']}")
        and line.peer in (FASTEST, r["contender"])
    ]
    by_case: dict[tuple[str, str, str, str], float] = {}
    for row in chosen:  # more than one peer: the fastest of each case
        key = row["suite"], row["group"], row["case"], row["direction"]
        by_case[key] = min(by_case.get(key, math.inf), float(row["ratio"]))
    ratios: dict[str, list[float]] = {"forward": [], "backward": []}
    for (*_, direction), ratio in by_case.items():
        ratios["forward" if direction == "forward" else "backward"].append(ratio)
    device = _device(max(chosen or of_suite, key=lambda r: r["date"])) if of_suite else line.device
    peers = tuple(dict.fromkeys(row["contender"] for row in chosen))
    return Summary(line, device.removesuffix(" Vulkan"), peers, ratios)


def _device(row: Row) -> str:
    return row["device_name"] or row["cpu"]


def table(rows: list[Row]) -> str:
    lines = ["| Calls | Device | Against | Forward | Backward |", "| --- | --- | --- | --- | --- |"]
    for summary in summarise(rows):
        cells = (_span(summary.ratios["forward"]), _span(summary.ratios["backward"]))
        if not summary.measured:
            cells = ("not measured yet", "")
        lines.append(f"| {summary.line.label} | {summary.device} | {summary.against} | {cells[0]} | {cells[1]} |")
    dates = sorted(row["date"][:10] for row in rows if row["ratio"])
    lines += [
        "",
        "Their time over ours, lowest – highest of all cases in `bench/results` (above 1×, Headwise is faster), "
        f"measured {dates[0]} to {dates[-1]}. {_orders(rows)}",
    ]
    return "\n".join(line.rstrip() for line in lines)


def _orders(rows: list[Row]) -> str:
    """What has to be said of the order of sums in the backward."""
    if any(report.order_of_sums(row) == report.WHERE_FASTER for row in rows):
        return (
            "The backward of plain bf16 attention was timed when sums in any order were the default. The fixed order, the "
            "default since, costs up to 12 %."
        )
    return "Our backward sums in a fixed order, the default."


def below_one(rows: list[Row]) -> dict[tuple[str, str], list[Row]]:
    """Where a peer is faster: for a device and a peer, the lowest row of each group, the lowest first."""
    lowest: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        if row["role"] == "peer" and row["ratio"] and round(float(row["ratio"]), 2) < 1:
            groups = lowest.setdefault((_device(row).removesuffix(" Vulkan"), row["contender"]), {})
            groups[row["group"]] = min(groups.get(row["group"], row), row, key=_ratio)
    return {key: sorted(groups.values(), key=_ratio) for key, groups in lowest.items()}


def below_one_in_short(rows: list[Row]) -> str:
    """The lowest ratio to each peer."""
    found = sorted(below_one(rows).items(), key=lambda item: _ratio(item[1][0]))
    if not found:
        return "No peer is faster in any case."
    of_cpu = {_device(row) for row in rows if row["device"] == "cpu"}
    lowest = ", ".join(
        f"{peer}{f' on {device}' if device in of_cpu else ''} {_ratio(row):.2f} ({_in_words_of(row)})"
        for (device, peer), (row, *_) in found
    )
    return (
        f"**Below 1×**, the lowest against each peer: {lowest} ([all groups](docs/speed.md#where-others-are-faster))."
    )


def below_one_table(rows: list[Row]) -> str:
    lines = ["| Device | Peer | Lowest ratio of each group below 1× |", "| --- | --- | --- |"]
    for (device, peer), of_groups in below_one(rows).items():
        lines.append(f"| {device} | {peer} | {'; '.join(map(_plainly, of_groups))} |")
    return "\n".join(lines)


def _ratio(row: Row) -> float:
    return float(row["ratio"])


def _plainly(row: Row) -> str:
    return f"{_in_words_of(row)} {_ratio(row):.2f}"


def _in_words_of(row: Row) -> str:
    """A group in words, with the op where it has several."""
    words = {"features": "masks", "host": "host cost of small calls", "linear loss": "linear_cross_entropy"}
    several = re.search(r"\bops\b|norms|host", row["group"])
    op = f", {re.split(r'[ ,]', row['case'])[0]}" if several else ""
    return f"{words.get(row['group'], row['group'].replace(',', ''))}{op}"


def _span(ratios: list[float]) -> str:
    if not ratios:
        return "–"
    low, high = min(ratios), max(ratios)
    return f"{low:.2f}×" if len(ratios) == 1 else f"{low:.2f} – {high:.2f}×"


# ----------------------------------------------------------------------------------------------------------- the chart

_INK, _GRID, _COLOURS = "#1f2328", "#e4e7eb", {"forward": "#0b7285", "backward": "#c2410c"}


def chart(rows: list[Row], path: Path) -> None:
    """One line per row of the table: from the lowest to the highest ratio, a dot at the median."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

    summaries = summarise(rows)
    with matplotlib.rc_context({"svg.hashsalt": "headwise", "font.family": "DejaVu Sans"}):
        figure = Figure(figsize=(9, 0.52 * len(summaries) + 1.35), layout="constrained", facecolor="white")
        FigureCanvasSVG(figure)
        panel = figure.subplots()
        panel.axvspan(1.0, 64, color="#f1f8f4", zorder=0)
        panel.axvline(1.0, color=_INK, linewidth=1.1, zorder=1)
        for y, summary in enumerate(summaries):
            _draw_line(panel, y, summary)
        names = [f"{s.line.label} · {s.device}\nagainst {s.against}" for s in summaries]
        panel.set_yticks(range(len(names)), names, fontsize=8.5, color=_INK)
        panel.set_ylim(len(names) - 0.4, -0.6)
        panel.set_xscale("log", base=2)
        every = [ratio for s in summaries for of in s.ratios.values() for ratio in of]
        low, high = min(0.5, *every) / 1.1, max(2.0, *every) * 1.15
        panel.set_xlim(low, high)
        panel.xaxis.set_major_locator(
            FixedLocator([t for t in (0.25, 0.5, 0.75, 1, 1.5, 2, 4, 8, 16) if low < t < high])
        )
        panel.xaxis.set_minor_locator(NullLocator())
        panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}×"))
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.grid(axis="x", color=_GRID, linewidth=0.8)
        panel.set_axisbelow(True)
        panel.tick_params(length=0, labelsize=8.5)
        panel.spines[["top", "right", "left"]].set_visible(False)
        panel.set_xlabel("their time / our time, all cases: right of 1× Headwise is faster", fontsize=9, color=_INK)
        _legend(figure)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None, "Creator": None, "Description": _in_words(summaries)})


def shows(path: Path, rows: list[Row]) -> bool:
    """Does the picture show these rows? Its bytes depend on matplotlib's version too."""
    return f"<dc:description>{escape(_in_words(summarise(rows)))}</dc:description>" in path.read_text(encoding="utf-8")


def _in_words(summaries: list[Summary]) -> str:
    def line(s: Summary) -> str:
        spans = ", ".join(f"{direction} {_span(ratios)}" for direction, ratios in s.ratios.items() if ratios)
        return f"{s.line.label} on {s.device} against {s.against}: {spans or 'not measured yet'}"

    return "; ".join(map(line, summaries))


def _draw_line(panel: Any, y: int, summary: Summary) -> None:
    if not summary.measured:
        panel.annotate("not measured yet", (1.0, y), (6, 0), textcoords="offset points", va="center", fontsize=8)
        return
    for offset, (direction, ratios) in zip((-0.16, 0.16), summary.ratios.items(), strict=True):
        if ratios:
            colour = _COLOURS[direction]
            ends = [min(ratios), max(ratios)]
            panel.plot(ends, [y + offset] * 2, color=colour, linewidth=6, alpha=0.3, solid_capstyle="round", zorder=2)
            panel.plot(statistics.median(ratios), y + offset, "o", color=colour, markersize=5.5, zorder=3)


def _legend(figure: Any) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D(
            [], [], color=colour, marker="o", linewidth=6, alpha=0.8, label=f"{direction}: all cases, dot at the median"
        )
        for direction, colour in _COLOURS.items()
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=2, fontsize=8.5, frameon=False)
