"""All cases under the two roofs of the machine, its copy and its matmul, both measured in the same run.

Williams, Waterman, Patterson, "Roofline: An Insightful Visual Performance Model for Multicore Architectures", 2009.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from headwise.benchmark.plot import Row, new_figure, save, title_of
from headwise.benchmark.report import ROOFS


def roofs(rows: list[Row]) -> tuple[float, float] | None:
    """Bytes per second of a copy and operations per second of a matmul, where both were measured."""
    of_kind = {
        kind: float(row[kind]) * 1e9
        for row in rows
        if row["group"] == ROOFS
        for kind in ("gbytes_per_s", "gflops_per_s")
        if row[kind]
    }
    return (of_kind["gbytes_per_s"], of_kind["gflops_per_s"]) if len(of_kind) == 2 else None


class _Point(NamedTuple):
    family: str
    direction: str
    label: str
    intensity: float  # operations per byte
    rate: float  # TFLOP/s
    share: float  # of the roof at this intensity


# A case belongs to the family that its group begins with; colour and marker.
_FAMILIES = {
    "attention D 64": ("#1b9e77", "o"),
    "attention D 128": ("#2a6f97", "o"),
    "attention D 256": ("#7b3f9e", "o"),
    "attention float32": ("#c8553d", "s"),
    "packed": ("#b7791f", "D"),
    "window": ("#8a5a00", "D"),
    "decode": ("#d6336c", "^"),
    "rms_norm": ("#4d7c0f", "v"),
    "softmax": ("#0c8599", "v"),
    "training ops": ("#555555", "P"),
    "memory": ("#111111", "*"),
}
_BY_CASE_ALONE = ("rms_norm", "softmax", "training ops", "window")  # labelled by the name of the case alone


def save_roofline(rows: list[Row], path: Path) -> bool:
    """Operations per second over operations per byte: all cases, and on the right the compute-bound ones, larger."""
    measured = roofs(rows)
    points = _points(rows, *measured) if measured is not None else []
    if measured is None or not points:
        return False
    bandwidth, peak = measured[0] / 1e12, measured[1] / 1e12
    ridge = peak / bandwidth
    above = [p for p in points if p.intensity > ridge / 4]
    below = [p for p in points if p.intensity <= ridge / 4]
    figure = new_figure(16 if above else 9, 7.4, title_of(rows))
    panels = figure.subplots(1, 2 if above else 1, squeeze=False, width_ratios=[1.0, 1.25] if above else None)[0]
    _draw(panels[0], points, bandwidth, peak, low=min(p.rate for p in points) / 2, high=peak * 2)
    panels[0].set_yscale("log")
    panels[0].set_title("all cases", loc="left", fontsize=10, fontweight="bold")
    _legend(panels[0], points)
    if above:
        _draw(panels[1], above, bandwidth, peak, low=0.0, high=peak * 1.12)
        panels[1].set_title("attention: the right end of it, linear", loc="left", fontsize=10, fontweight="bold")
    figure.canvas.draw()  # labels are placed in pixels, which are known now
    _label_ends(panels[0], below, points)
    if above:
        _label_ends(panels[1], above, above)
    save(figure, path)
    return True


def _points(rows: list[Row], bandwidth: float, peak: float) -> list[_Point]:
    found = []
    for row in rows:
        timed = row["role"] == "ours" and row["gflops_per_s"] and row["timed"] in ("device", "graph")
        family = next((f for f in _FAMILIES if row["group"].startswith(f)), None)
        if not timed or family is None or not float(row["bytes"] or 0):
            continue
        intensity = float(row["flops"]) / float(row["bytes"])
        rate = float(row["gflops_per_s"]) * 1e9
        label = row["case"] if family in _BY_CASE_ALONE else f"{row['group'].removeprefix('attention ')} {row['case']}"
        share = rate / min(intensity * bandwidth, peak)
        found.append(_Point(family, row["direction"], label, intensity, rate / 1e12, share))
    return found


def _draw(panel: Any, points: list[_Point], bandwidth: float, peak: float, low: float, high: float) -> None:
    """The roofs, and the points beneath them."""
    ridge = peak / bandwidth
    left = min(p.intensity for p in points) / 2.2
    right = max(*(p.intensity for p in points), ridge) * 2.2
    across = [left * (right / left) ** (i / 200) for i in range(201)]
    roof = [min(x * bandwidth, peak) for x in across]
    panel.plot(across, roof, color="#222222", linewidth=1.6)
    panel.fill_between(across, roof, low or 0.0, color="#f6f7f9", zorder=0)
    for point in points:
        colour, marker = _FAMILIES[point.family]
        face = "white" if point.direction == "backward" else colour
        panel.plot(
            point.intensity, point.rate, marker, color=colour, markerfacecolor=face, markersize=6.5, markeredgewidth=1.4,
            alpha=0.9, zorder=3,
        )  # fmt: skip
    panel.set_xscale("log")
    panel.set_xlim(left, right)
    panel.set_ylim(low, high)
    panel.set_xlabel("operations per byte that must move", fontsize=9)
    panel.set_ylabel("TFLOP/s", fontsize=9)
    panel.grid(color="#e3e3e3", linewidth=0.7)
    panel.set_axisbelow(True)
    panel.tick_params(labelsize=8)
    panel.spines[["top", "right"]].set_visible(False)
    name = f"copy {bandwidth:.2f} TB/s, bf16 matmul {peak:.0f} TFLOP/s"
    panel.annotate(name, (right, peak), (-4, 5), textcoords="offset points", ha="right", fontsize=8.5)


def _legend(panel: Any, points: list[_Point]) -> None:
    from matplotlib.lines import Line2D

    present = {p.family for p in points}
    handles = [
        Line2D([], [], marker=marker, linewidth=0, color=colour, markersize=7, label=family)
        for family, (colour, marker) in _FAMILIES.items()
        if family in present
    ]
    for direction, face in (("filled: forward", "#555555"), ("open: backward", "white")):
        dot = Line2D([], [], marker="o", linewidth=0, color="#555555", markersize=7, label=direction)
        dot.set_markerfacecolor(face)
        handles.append(dot)
    panel.legend(handles=handles, loc="lower right", fontsize=8, framealpha=0.95, edgecolor="#dddddd")


Box = tuple[float, float, float, float]  # left, bottom, right, top, in pixels

# Offsets of a label from its point, in typographic points, the nearest first.
_PLACES = [(side * 9, up) for up in (0, 11, -11, 22, -22, 33, -33, 46, -46, 60, -60, 80, -80) for side in (1, -1)]


def _label_ends(panel: Any, points: list[_Point], drawn: list[_Point]) -> None:
    """Label the cases nearest to the roof and farthest from it, of every family and direction, where there is room.

    The number is the share of the roof that is reached.
    """
    chosen: list[_Point] = []
    for family in _FAMILIES:
        for direction in ("forward", "backward", "forward+backward"):
            of_both = sorted(
                (p for p in points if (p.family, p.direction) == (family, direction)), key=lambda p: p.share
            )
            chosen += dict.fromkeys([*of_both[-1:], *of_both[:1]])
    at = {p: tuple(panel.transData.transform((p.intensity, p.rate))) for p in drawn}
    taken = [_around(x, y, 9, 9) for x, y in at.values()]
    # Labels do not cover the roof either.
    for line in panel.get_lines()[:1]:
        taken += [_around(x, y, 6, 6) for x, y in panel.transData.transform(line.get_xydata())]
    taken += [_extent(text) for text in panel.texts]
    if panel.get_legend() is not None:
        taken.append(_extent(panel.get_legend()))
    frame, per_point = panel.bbox, panel.figure.dpi / 72
    for point in chosen:
        text = f"{point.label} · {100 * point.share:.0f} %"
        x, y = at[point]
        wide, high = 4.1 * len(text) * per_point, 9 * per_point
        for right, up in _PLACES:
            side = 1 if right > 0 else -1
            box = _around(x + right * per_point + side * wide / 2, y + up * per_point, wide, high)
            inside = frame.x0 < box[0] and box[2] < frame.x1 and frame.y0 < box[1] and box[3] < frame.y1
            if not inside or any(_overlap(box, other) for other in taken):
                continue
            colour = _FAMILIES[point.family][0]
            leader = {
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.5,
                "alpha": 0.7,
                "relpos": ((1 - side) / 2, 0.5),
            }
            panel.annotate(
                text, (point.intensity, point.rate), (right, up), textcoords="offset points",
                ha="left" if side > 0 else "right", va="center", fontsize=7, color=colour, zorder=4,
                arrowprops=leader if abs(up) > 11 else None,
            )  # fmt: skip
            taken.append(box)
            break


def _extent(artist: Any) -> Box:
    box = artist.get_window_extent()
    return box.x0, box.y0, box.x1, box.y1


def _around(x: float, y: float, wide: float, high: float) -> Box:
    return x - wide / 2, y - high / 2, x + wide / 2, y + high / 2


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
