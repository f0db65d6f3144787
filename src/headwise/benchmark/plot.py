"""Ratios as a picture: one panel per group, one line per case and peer."""

from __future__ import annotations

from pathlib import Path

from headwise.benchmark.case import AtLeast, Within
from headwise.benchmark.runner import CaseResult, Measurement, Outcome

_COLOURS: dict[Outcome, str] = {"met": "#2a7f62", "missed": "#c8553d", "not judged": "#4a6fa5"}
_LABELS: dict[Outcome, str] = {"met": "target met", "missed": "target missed", "not judged": "not judged"}
_LINE_INCHES, _TITLE_INCHES = 0.25, 0.4


def save_plot(results: list[CaseResult], path: Path, title: str) -> bool:
    """Write a PNG of every ratio; False where there is none to draw."""
    # Here and not above: only those who plot need matplotlib.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    groups = _groups(results)
    if not groups:
        return False
    heights = [len(rows) + 0.2 for rows in groups.values()]  # in lines; titles come on top
    figure = Figure(figsize=(9, sum(heights) * _LINE_INCHES + len(groups) * _TITLE_INCHES + 1.3), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(groups), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for panel, (group, rows) in zip(panels, groups.items(), strict=True):
        for y, (result, measured) in enumerate(rows):
            ratio = measured.ratio
            assert ratio is not None
            target, outcome = _target(result, measured)
            colour = _COLOURS[outcome]
            panel.plot([ratio.low, ratio.high], [y, y], color=colour, linewidth=5, alpha=0.35, solid_capstyle="round")
            panel.plot(ratio.median, y, "o", color=colour, markersize=5)
            if target is not None:
                panel.plot(target, y, marker="|", color="#222222", markersize=11, markeredgewidth=1.6)
            panel.annotate(
                f"{ratio.median:.2f}×",
                (1.01, y),
                xycoords=("axes fraction", "data"),
                va="center",
                fontsize=8,
                color=colour,
                annotation_clip=False,
            )
        panel.axvline(1.0, color="#999999", linewidth=0.9, zorder=0)
        panel.set_yticks(range(len(rows)), [_label(r, m) for r, m in rows], fontsize=8)
        panel.set_ylim(len(rows) - 0.4, -0.6)
        panel.set_title(group, loc="left", fontsize=10, fontweight="bold")
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_locator(LogLocator(base=2))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}×"))
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.grid(axis="x", color="#e6e6e6", linewidth=0.7)
        panel.set_axisbelow(True)
        panel.tick_params(length=0, labelsize=8)
        for side in ("top", "right", "left"):
            panel.spines[side].set_visible(False)
    # Room around 1× even where all ratios are alike.
    low, high = panels[0].get_xlim()
    panels[0].set_xlim(min(low, 0.5), max(high, 2.0))
    panels[-1].set_xlabel("their time / our time: right of 1×, Headwise is faster", fontsize=9)
    present = {_target(r, m)[1] for rows in groups.values() for r, m in rows}
    handles = [
        Line2D([], [], marker="o", linewidth=5, alpha=0.8, markersize=5, color=_COLOURS[o], label=_LABELS[o])
        for o in _COLOURS
        if o in present
    ]
    handles.append(Line2D([], [], marker="|", linewidth=0, markersize=11, color="#222222", label="target"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return True


def _groups(results: list[CaseResult]) -> dict[str, list[tuple[CaseResult, Measurement]]]:
    groups: dict[str, list[tuple[CaseResult, Measurement]]] = {}
    for result in results:
        for measured in result.measurements:
            if measured.ratio is not None:
                groups.setdefault(result.case.group, []).append((result, measured))
    return groups


def _target(result: CaseResult, measured: Measurement) -> tuple[float | None, Outcome]:
    """The ratio required against this contender, and whether it was reached."""
    for verdict in result.verdicts:
        match verdict.requirement:
            case AtLeast(ratio, measured.contender):
                return ratio, verdict.outcome
            case Within(factor, measured.contender):
                return 1 / factor, verdict.outcome
    return None, "not judged"


def _label(result: CaseResult, measured: Measurement) -> str:
    return f"{result.case.name}, {result.case.direction}  vs {measured.contender}"
