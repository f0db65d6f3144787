"""Ratios as a picture: one panel per group, one line per case and direction, a marker per peer.

Drawn from the rows of a CSV.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, str]  # a row of `headwise.benchmark.report`, as text

_COLOURS = {"met": "#2a7f62", "missed": "#c8553d", "not judged": "#4a6fa5"}
_LABELS = {"met": "target met", "missed": "target missed", "not judged": "not judged"}
_MARKERS = {"o": "●", "s": "■", "D": "◆", "^": "▲", "v": "▼", "P": "✚"}  # of a group's peers, and as text
_LINE_INCHES, _TITLE_INCHES, _COLUMN_INCHES = 0.25, 0.5, 9.5
_MOST_LINES = 50  # of one column of panels
_FIGURE_POINTS = 68  # from one column of figures to the next


@dataclass(frozen=True)
class _Line:
    label: str
    peer: str
    ratio: float
    low: float
    high: float
    target: float | None
    outcome: str


Group = dict[str, list[_Line]]  # by label: the peers of one case and direction


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
    groups = _groups(rows)
    if not groups:
        return False
    columns = _columns(groups)
    tall = max(_inches(column) for column in columns)
    title = f"{title_of(rows)}\ntheir time / our time: right of 1×, Headwise is faster"
    figure = new_figure(_COLUMN_INCHES * len(columns), tall + 1.3, title)
    # Room around 1× even if all ratios are alike.
    every = [
        x for group in groups.values() for lines in group.values() for line in lines for x in (line.low, line.high)
    ]
    limits = min(0.5, 0.9 * min(every)), max(2.0, 1.1 * max(every))
    for part, column in zip(figure.subfigures(1, len(columns), squeeze=False)[0], columns, strict=True):
        heights = [_inches({name: column[name]}) for name in column]
        heights.append(max(tall - sum(heights), 0.01))  # nothing is drawn there
        panels = part.subplots(len(heights), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
        panels[-1].set_axis_off()
        for panel, (name, group) in zip(panels, column.items(), strict=False):
            _draw(panel, name, group, limits)
    _legend(figure, groups)
    save(figure, path)
    return True


def _columns(groups: dict[str, Group]) -> list[dict[str, Group]]:
    """One column of panels, or two of about the same height."""
    if sum(map(len, groups.values())) <= _MOST_LINES:
        return [groups]
    names = list(groups)
    splits = [[{n: groups[n] for n in names[:i]}, {n: groups[n] for n in names[i:]}] for i in range(1, len(names))]
    return min(splits, key=lambda split: max(map(_inches, split)), default=[groups])


def _inches(groups: dict[str, Group]) -> float:
    return sum(len(group) * _LINE_INCHES + _TITLE_INCHES for group in groups.values())


def _draw(panel: Any, name: str, group: Group, limits: tuple[float, float]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    peers = dict(zip(_peers(group), itertools.cycle(_MARKERS)))
    places = {peer: 8 + _FIGURE_POINTS * i for i, peer in enumerate(peers)}  # of their figures, right of the panel
    for peer, marker in peers.items():
        panel.annotate(
            f"{_MARKERS[marker]} {peer}", (1.0, -0.6), (places[peer], 3), xycoords=("axes fraction", "data"),
            textcoords="offset points", fontsize=7, color="#555555", annotation_clip=False,
        )  # fmt: skip
    for y, lines in enumerate(group.values()):
        for line in lines:
            colour = _COLOURS[line.outcome]
            panel.plot([line.low, line.high], [y, y], color=colour, linewidth=5, alpha=0.35, solid_capstyle="round")
            panel.plot(line.ratio, y, peers[line.peer], color=colour, markersize=5)
            if line.target is not None:
                panel.plot(line.target, y, marker="|", color="#222222", markersize=11, markeredgewidth=1.6)
            panel.annotate(
                f"{line.ratio:.2f}×", (1.0, y), (places[line.peer], 0), xycoords=("axes fraction", "data"),
                textcoords="offset points", va="center", fontsize=8, color=colour, annotation_clip=False,
            )  # fmt: skip
    panel.axvline(1.0, color="#999999", linewidth=0.9, zorder=0)
    panel.set_yticks(range(len(group)), list(group), fontsize=8)
    panel.set_ylim(len(group) - 0.4, -0.6)
    panel.set_title(name, loc="left", fontsize=10, fontweight="bold")
    panel.set_xscale("log", base=2)
    panel.set_xlim(*limits)
    panel.xaxis.set_major_locator(LogLocator(base=2))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}×"))
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.grid(axis="x", color="#e6e6e6", linewidth=0.7)
    panel.set_axisbelow(True)
    panel.tick_params(length=0, labelsize=8)
    panel.tick_params(axis="x", labelsize=7)
    panel.spines[["top", "right", "left"]].set_visible(False)


def _legend(figure: Any, groups: dict[str, Group]) -> None:
    from matplotlib.lines import Line2D

    present = {line.outcome for group in groups.values() for lines in group.values() for line in lines}
    handles = [
        Line2D([], [], linewidth=5, alpha=0.8, color=_COLOURS[o], label=_LABELS[o]) for o in _COLOURS if o in present
    ]
    handles.append(Line2D([], [], marker="|", linewidth=0, markersize=11, color="#222222", label="target"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8, frameon=False)


def _peers(group: Group) -> list[str]:
    return list(dict.fromkeys(line.peer for lines in group.values() for line in lines))


def _groups(rows: Iterable[Row]) -> dict[str, Group]:
    groups: dict[str, Group] = {}
    for row in rows:
        if row["ratio"]:
            line = _Line(
                label=f"{row['case']}, {row['direction']}",
                peer=row["contender"],
                ratio=float(row["ratio"]),
                low=float(row["ratio_p20"]),
                high=float(row["ratio_p80"]),
                target=float(row["required_ratio"]) if row["required_ratio"] else None,
                outcome=row["outcome"] or "not judged",
            )
            groups.setdefault(row["group"], {}).setdefault(line.label, []).append(line)
    return groups
