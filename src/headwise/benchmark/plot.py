"""Ratios as a picture: one panel per group, one line per case and peer. Drawn from the rows of a CSV."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, str]  # a row of `headwise.benchmark.report`, as text

_COLOURS = {"met": "#2a7f62", "missed": "#c8553d", "not judged": "#4a6fa5"}
_LABELS = {"met": "target met", "missed": "target missed", "not judged": "not judged"}
_LINE_INCHES, _TITLE_INCHES = 0.25, 0.4


@dataclass(frozen=True)
class _Line:
    label: str
    ratio: float
    low: float
    high: float
    target: float | None
    outcome: str


def title_of(rows: list[Row]) -> str:
    """Suite, machine and date of the newest row."""
    row = max(rows, key=lambda r: r["date"])
    threads = f" · {row['threads']} threads" if row["device"] == "cpu" else ""
    triton = f" · triton {row['triton']}" if row["triton"] and row["device"] != "cpu" else ""
    quick = " (quick sizes)" if row["quick"] == "True" else ""
    where = f"{row['device_name']}{threads} · torch {row['torch']}{triton} · {row['date'][:10]}"
    return f"headwise {row['headwise']} · suite {row['suite']}{quick}\n{where}"


def new_figure(width: float, height: float, title: str) -> Any:
    """A light figure with a title, drawn without a display."""
    # Imported here: matplotlib is optional.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    return figure


def save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def save_ratios(rows: list[Row], path: Path) -> bool:
    """Write a PNG of every ratio; False where there is none to draw."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    groups = _groups(rows)
    if not groups:
        return False
    heights = [len(lines) + 0.2 for lines in groups.values()]  # in lines, without the titles
    height = sum(heights) * _LINE_INCHES + len(groups) * _TITLE_INCHES + 1.3
    figure = new_figure(9, height, title_of(rows))
    panels = figure.subplots(len(groups), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for panel, (group, lines) in zip(panels, groups.items(), strict=True):
        for y, line in enumerate(lines):
            colour = _COLOURS[line.outcome]
            panel.plot([line.low, line.high], [y, y], color=colour, linewidth=5, alpha=0.35, solid_capstyle="round")
            panel.plot(line.ratio, y, "o", color=colour, markersize=5)
            if line.target is not None:
                panel.plot(line.target, y, marker="|", color="#222222", markersize=11, markeredgewidth=1.6)
            panel.annotate(
                f"{line.ratio:.2f}×",
                (1.01, y),
                xycoords=("axes fraction", "data"),
                va="center",
                fontsize=8,
                color=colour,
                annotation_clip=False,
            )
        panel.axvline(1.0, color="#999999", linewidth=0.9, zorder=0)
        panel.set_yticks(range(len(lines)), [line.label for line in lines], fontsize=8)
        panel.set_ylim(len(lines) - 0.4, -0.6)
        panel.set_title(group, loc="left", fontsize=10, fontweight="bold")
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_locator(LogLocator(base=2))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}×"))
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.grid(axis="x", color="#e6e6e6", linewidth=0.7)
        panel.set_axisbelow(True)
        panel.tick_params(length=0, labelsize=8)
        panel.spines[["top", "right", "left"]].set_visible(False)
    # Room around 1× even if all ratios are alike.
    low, high = panels[0].get_xlim()
    panels[0].set_xlim(min(low, 0.5), max(high, 2.0))
    panels[-1].set_xlabel("their time / our time: right of 1×, Headwise is faster", fontsize=9)
    present = {line.outcome for lines in groups.values() for line in lines}
    handles = [
        Line2D([], [], marker="o", linewidth=5, alpha=0.8, markersize=5, color=_COLOURS[o], label=_LABELS[o])
        for o in _COLOURS
        if o in present
    ]
    handles.append(Line2D([], [], marker="|", linewidth=0, markersize=11, color="#222222", label="target"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    save(figure, path)
    return True


def _groups(rows: Iterable[Row]) -> dict[str, list[_Line]]:
    groups: dict[str, list[_Line]] = {}
    for row in rows:
        if row["ratio"]:
            line = _Line(
                label=f"{row['case']}, {row['direction']}  vs {row['contender']}",
                ratio=float(row["ratio"]),
                low=float(row["ratio_p20"]),
                high=float(row["ratio_p80"]),
                target=float(row["required_ratio"]) if row["required_ratio"] else None,
                outcome=row["outcome"] or "not judged",
            )
            groups.setdefault(row["group"], []).append(line)
    return groups
