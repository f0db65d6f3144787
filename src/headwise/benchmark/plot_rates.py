"""Pictures of the rates on a GPU: attention beside its peers, decode bandwidth, row ops by width.

Like `plot`, drawn from the rows of a CSV.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headwise.benchmark.case import ANY_ORDER, OURS
from headwise.benchmark.plot import Row, new_figure, save, save_ratios, title_of
from headwise.benchmark.plot_roofline import roofs, save_roofline

_ATTENTION = re.compile(r"attention D (\d+)")
_DECODE = {"decode as CUDA graphs": "CUDA graphs", "decode as plain calls": "plain calls", "decode paged": "paged"}
_ROWS = ("rms_norm", "softmax")
_GROWTH = "growth"
_LENGTH = re.compile(r"(\w+) S (\d+) D (\d+)")
_SHAPE = re.compile(r"(\w+) (\d+) × (\d+)")
_OUR_COLOUR = "#2a7f62"
_COLOURS = {
    OURS: _OUR_COLOUR,
    "FA2": "#b8bfc9",
    "cuDNN": "#4a6fa5",
    "FlexAttention": "#e0a63c",
    "our contiguous": "#9fcdbb",
    ANY_ORDER: "#9fcdbb",
    "ONNX Runtime": "#4a6fa5",
    "PyTorch": "#c98a3a",
}
_OTHERS = ("#8c6bb1", "#c8553d", "#5ab4ac")


def save_all(rows: list[Row], folder: Path, stem: str) -> list[Path]:
    """Every picture that can be drawn from these rows, as ``folder/stem-<what>.png``."""
    elsewhere = {r["group"] for r in rows if _ATTENTION.fullmatch(r["group"])} | {*_DECODE, *_ROWS}
    elsewhere.add(_GROWTH)
    if rows[0]["device"] == "cpu":
        elsewhere = set()  # the pictures of rates are for GPUs
    drawn: dict[str, Callable[[Path], bool]] = {
        "ratios": lambda path: save_ratios([r for r in rows if r["group"] not in elsewhere], path),
        "attention": lambda path: save_attention(rows, path),
        "growth": lambda path: save_growth(rows, path),
        "decode": lambda path: save_decode(rows, path),
        "rows": lambda path: save_rows(rows, path),
        "roofline": lambda path: save_roofline(rows, path),
    }
    paths = {folder / f"{stem}-{what}.png": draw for what, draw in drawn.items()}
    return [path for path, draw in paths.items() if draw(path)]


def save_attention(rows: list[Row], path: Path) -> bool:
    """TFLOP/s per shape: a panel per head dim and direction, a bar per contender."""
    shown = [r for r in rows if r["gflops_per_s"] and _ATTENTION.fullmatch(r["group"])]
    if not shown:
        return False
    groups = sorted({r["group"] for r in shown}, key=lambda g: int(g.split()[-1]))
    directions = [d for d in ("forward", "backward") if any(r["direction"] == d for r in shown)]
    figure = new_figure(7.2 * len(directions), 3.1 * len(groups) + 1.0, title_of(shown))
    panels = figure.subplots(len(groups), len(directions), squeeze=False, sharey=True)
    contenders = _contenders(shown)
    highest = roofs(rows)
    for line, group in enumerate(groups):
        for column, direction in enumerate(directions):
            panel = panels[line][column]
            of_panel = [r for r in shown if r["group"] == group and r["direction"] == direction]
            values = {(r["case"], r["contender"]): float(r["gflops_per_s"]) / 1e3 for r in of_panel}
            _bars(panel, list(dict.fromkeys(r["case"] for r in of_panel)), contenders, values, "{:.0f}")
            panel.set_title(
                f"{group.removeprefix('attention ')} · {direction}", loc="left", fontsize=10, fontweight="bold"
            )
            if highest is not None:
                _roof_line(panel, highest[1] / 1e12, "bf16 matmul")
            if column == 0:
                panel.set_ylabel("TFLOP/s", fontsize=9)
    fastest = max(float(r["gflops_per_s"]) / 1e3 for r in shown)
    panels[0][0].set_ylim(0, 1.1 * max(fastest, (highest or (0, 0))[1] / 1e12))  # room for the numbers on the bars
    _legend(figure, contenders)
    save(figure, path)
    return True


def save_growth(rows: list[Row], path: Path) -> bool:
    """Time and TFLOP/s against the length of the sequence: a line per contender and pattern."""
    shown = [r for r in rows if r["group"] == _GROWTH and r["median_ms"] and _LENGTH.fullmatch(r["case"])]
    if not shown:
        return False
    figure = new_figure(12, 4.4, title_of(shown))
    contenders = _contenders(shown)
    colours = _colours(contenders)
    wanted = {"milliseconds": ("median_ms", 1.0), "TFLOP/s": ("gflops_per_s", 1e-3)}
    for panel, (label, (column, unit)) in zip(figure.subplots(1, 2), wanted.items(), strict=True):
        lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
        for row in shown:
            found = _LENGTH.fullmatch(row["case"])
            assert found is not None
            lines.setdefault((row["contender"], found[1]), []).append((int(found[2]), unit * float(row[column])))
        for (contender, pattern), points in lines.items():
            style = "--" if pattern == "causal" else "-"
            panel.plot(*zip(*sorted(points), strict=True), style, marker="o", markersize=4, color=colours[contender])
        panel.set_xscale("log", base=2)
        if column == "median_ms":
            panel.set_yscale("log", base=10)
        else:
            panel.set_ylim(bottom=0)
        panel.set_xticks(lengths := sorted({length for line in lines.values() for length, _ in line}))
        panel.set_xticklabels([str(length) for length in lengths], fontsize=8)
        panel.minorticks_off()
        panel.set_xlabel("S · solid: full, dashed: causal", fontsize=9)
        panel.set_title(f"attention forward, {label}", loc="left", fontsize=10, fontweight="bold")
        panel.grid(color="#e6e6e6", linewidth=0.7)
        panel.spines[["top", "right"]].set_visible(False)
    _legend(figure, contenders)
    save(figure, path)
    return True


def save_decode(rows: list[Row], path: Path) -> bool:
    """TB/s of the cache per shape: as CUDA graphs, as plain calls, and paged."""
    shown = [r for r in rows if r["gbytes_per_s"] and r["group"] in _DECODE]
    if not shown:
        return False
    groups = [g for g in _DECODE if any(r["group"] == g for r in shown)]
    figure = new_figure(9.5, 2.7 * len(groups) + 1.0, title_of(shown))
    panels = figure.subplots(len(groups), 1, squeeze=False, sharey=True)[:, 0]
    contenders = _contenders(shown)
    highest = roofs(rows)
    for panel, group in zip(panels, groups, strict=True):
        of_panel = [r for r in shown if r["group"] == group]
        values = {(r["case"], r["contender"]): float(r["gbytes_per_s"]) / 1e3 for r in of_panel}
        here = [c for c in contenders if any(r["contender"] == c for r in of_panel)]
        _bars(panel, list(dict.fromkeys(r["case"] for r in of_panel)), here, values, "{:.2f}")
        panel.set_title(f"decode · {_DECODE[group]}", loc="left", fontsize=10, fontweight="bold")
        panel.set_ylabel("TB/s of cache", fontsize=9)
        if highest is not None:
            _roof_line(panel, highest[0] / 1e12, "copy")
    _legend(figure, contenders)
    save(figure, path)
    return True


def save_rows(rows: list[Row], path: Path) -> bool:
    """TB/s of rms_norm and softmax against the width of a row; a dot alone is a tensor of another size."""
    shown = [r for r in rows if r["gbytes_per_s"] and r["group"] in _ROWS]
    if not shown:
        return False
    groups = [g for g in _ROWS if any(r["group"] == g for r in shown)]
    figure = new_figure(6.6 * len(groups), 4.4, title_of(shown))
    panels = figure.subplots(1, len(groups), squeeze=False, sharey=True)[0]
    highest = roofs(rows)
    contenders = _contenders(shown)
    colours = _colours(contenders)
    for panel, group in zip(panels, groups, strict=True):
        lines: dict[tuple[str, str], list[tuple[int, int, float]]] = {}
        for row in shown:
            shape = _SHAPE.fullmatch(row["case"])
            if row["group"] == group and shape is not None:
                at = (int(shape[2]) * int(shape[3]), int(shape[3]), float(row["gbytes_per_s"]) / 1e3)
                lines.setdefault((row["contender"], row["direction"]), []).append(at)
        for (contender, direction), points in lines.items():
            style = {"forward": "-", "backward": "--"}[direction]
            most = statistics.mode(elements for elements, _, _ in points)  # the size that was measured at every width
            line = sorted((width, rate) for elements, width, rate in points if elements == most)
            others = [(width, rate) for elements, width, rate in points if elements != most]
            colour = colours[contender]
            panel.plot(*zip(*line, strict=True), style, marker="o", markersize=4, color=colour, linewidth=1.6)
            if others:
                panel.plot(*zip(*others, strict=True), "o", color=colour, markerfacecolor="white", markersize=6)
        panel.set_xscale("log", base=2)
        panel.set_xticks(widths := sorted({width for line in lines.values() for _, width, _ in line}))
        panel.set_xticklabels([str(width) for width in widths], rotation=45, fontsize=8)
        panel.minorticks_off()
        panel.set_xlabel("width of a row; a dot alone: a tensor of another size", fontsize=9)
        panel.set_title(f"{group} · solid: forward, dashed: backward", loc="left", fontsize=10, fontweight="bold")
        panel.grid(color="#e6e6e6", linewidth=0.7)
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
        if highest is not None:
            _roof_line(panel, highest[0] / 1e12, "copy")
    panels[0].set_ylabel("TB/s", fontsize=9)
    panels[0].set_ylim(0, 1.06 * max(panels[0].get_ylim()[1], (highest or (0, 0))[0] / 1e12))
    _legend(figure, contenders)
    save(figure, path)
    return True


def _contenders(rows: list[Row]) -> list[str]:
    found = dict.fromkeys(r["contender"] for r in rows)
    return [OURS] * (OURS in found) + [c for c in found if c != OURS]


def _colours(contenders: list[str]) -> dict[str, str]:
    spare = iter(_OTHERS * len(contenders))
    return {c: _COLOURS[c] if c in _COLOURS else next(spare) for c in contenders}


def _bars(
    panel: Any, cases: list[str], contenders: list[str], values: dict[tuple[str, str], float], written: str
) -> None:
    """Bars grouped by case; ours comes first and has its number on top."""
    colours, width = _colours(contenders), 0.84 / len(contenders)
    for i, contender in enumerate(contenders):
        found = [(x, values[case, contender]) for x, case in enumerate(cases) if (case, contender) in values]
        at = [x - 0.42 + (i + 0.5) * width for x, _ in found]
        panel.bar(at, [value for _, value in found], width * 0.94, color=colours[contender], zorder=2)
        if contender == OURS:
            for x, (_, value) in zip(at, found, strict=True):
                label = written.format(value)
                panel.annotate(label, (x, value), (0, 2), textcoords="offset points", ha="center", fontsize=7)
    panel.set_xticks(range(len(cases)), [case.replace(" S ", "\nS ").replace(" length", "\nlength") for case in cases])
    panel.tick_params(length=0, labelsize=8)
    panel.grid(axis="y", color="#e6e6e6", linewidth=0.7, zorder=0)
    panel.margins(x=0.01, y=0.12)
    panel.spines[["top", "right", "left"]].set_visible(False)


def _roof_line(panel: Any, height: float, label: str) -> None:
    panel.axhline(height, color="#888888", linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    text = f"{label}: {height:.3g}"
    panel.annotate(
        text, (0.0, height), (2, 2), xycoords=("axes fraction", "data"), textcoords="offset points", ha="left",
        va="bottom", fontsize=7, color="#555555",
    )  # fmt: skip


def _legend(figure: Any, contenders: list[str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=name) for name, colour in _colours(contenders).items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=9, frameon=False)
