"""Charts of the report as SVG text: points under a roofline, ratios to peers, rates as sequences grow.

Drawn without a library, so that one page holds everything, follows the reader's colours, and names each point on hover.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

COLOURS = (
    "#0b8f86", "#c2410c", "#4263eb", "#9c36b5", "#b7791f", "#2f9e44", "#e03131", "#74c0fc", "#868e96", "#f783ac",
    "#5c940d", "#495057", "#ffa94d", "#6741d9", "#1864ab", "#a61e4d", "#94d82d", "#15aabf",
)  # fmt: skip
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 14, 40


class Point(NamedTuple):
    x: float
    y: float
    name: str
    filled: bool = True


class Series(NamedTuple):
    name: str
    points: Sequence[Point]
    lines: bool = False
    dashed: bool = False
    colour: str = ""


class Axis(NamedTuple):
    """A range of numbers and where they lie, in pixels."""

    low: float
    high: float
    begin: float
    end: float
    logarithmic: bool

    def at(self, value: float) -> float:
        low, high, value = (math.log(x) if self.logarithmic else x for x in (self.low, self.high, value))
        return self.begin + (self.end - self.begin) * (value - low) / (high - low)

    def ticks(self) -> list[float]:
        if not self.logarithmic:
            step = 10 ** math.floor(math.log10((self.high - self.low) / 3))
            step *= next(f for f in (1, 2, 5, 10) if (self.high - self.low) / (step * f) <= 6)
            return [step * i for i in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        base = 2.0 if self.high / self.low < 512 else 10.0
        first, last = math.ceil(math.log(self.low, base) - 1e-9), math.floor(math.log(self.high, base) + 1e-9)
        return [base**i for i in range(first, last + 1)]


def _axis(values: Iterable[float], begin: float, end: float, logarithmic: bool, margin: float = 1.25) -> Axis:
    found = [v for v in values if math.isfinite(v) and (v > 0 or not logarithmic)]
    if logarithmic:
        return Axis(min(found) / margin, max(found) * margin, begin, end, True)
    return Axis(0.0, max(found) * 1.08 or 1.0, begin, end, False)


def scatter(
    series: Sequence[Series], x_label: str, y_label: str, *, log_y: bool = False, width: int = 640, height: int = 360,
    roof: Callable[[float], float] | None = None, reference: float | None = None,
) -> str:  # fmt: skip
    """Points or lines over a logarithmic x axis; ``roof``: a line above them; ``reference``: a level line."""
    points = [point for one in series for point in one.points]
    across = _axis((p.x for p in points), _LEFT, width - _RIGHT, True)
    heights = [p.y for p in points] + ([roof(across.high)] if roof else []) + ([reference] if reference else [])
    up = _axis(heights, height - _BOTTOM, _TOP, log_y)
    parts = [_frame(across, up, x_label, y_label, width, height)]
    if roof is not None:
        xs = [across.low * (across.high / across.low) ** (i / 120) for i in range(121)]
        line = " ".join(f"{across.at(x):.1f},{up.at(max(roof(x), up.low)):.1f}" for x in xs)
        parts.append(f'<polyline class="roof" points="{line}"/>')
    if reference is not None:
        parts.append(_line("one", across.begin, up.at(reference), across.end, up.at(reference)))
    for number, one in enumerate(series):
        parts += _marks(one, across, up, one.colour or COLOURS[number % len(COLOURS)])
    return _svg(width, height, parts) + legend(series)


def _marks(one: Series, across: Axis, up: Axis, colour: str) -> list[str]:
    places = [(across.at(p.x), up.at(p.y), p) for p in one.points if p.y > 0]
    parts = []
    if one.lines and len(places) > 1:
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
        dash = ' stroke-dasharray="5 4"' if one.dashed else ""
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.8"{dash}/>')
    for x, y, point in places:
        fill = colour if point.filled else "var(--paper)"
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.6" fill="{fill}" stroke="{colour}" stroke-width="1.4">'
            f"<title>{html.escape(point.name)}</title></circle>"
        )
    return parts


def ratios(rows: Sequence[tuple[str, Sequence[Point]]], label: str = "their time / our time", width: int = 900) -> str:
    """One line per name, its points by their x: 1 is level, to the right ours is faster."""
    left, step = 330, 22
    height = _TOP + step * len(rows) + _BOTTOM
    every = [p.x for _, points in rows for p in points]
    across = _axis([0.5, 2.0, *every], left, width - _RIGHT, True, 1.1)
    bottom = height - _BOTTOM
    parts = [f'<rect class="faster" x="{across.at(1):.1f}" y="{_TOP}" width="{across.end - across.at(1):.1f}" '
             f'height="{bottom - _TOP}"/>']  # fmt: skip
    for tick in across.ticks():
        parts += [_line("grid", across.at(tick), _TOP, across.at(tick), bottom),
                  _text(across.at(tick), bottom + 16, f"{tick:g}×", "middle")]  # fmt: skip
    parts.append(_line("one", across.at(1), _TOP, across.at(1), bottom))
    for number, (name, points) in enumerate(rows):
        y = _TOP + step * (number + 0.5)
        parts.append(_text(left - 10, y + 4, name, "end"))
        low, high = min(p.x for p in points), max(p.x for p in points)
        parts.append(_line("span", across.at(low), y, across.at(high), y))
        parts += _marks(
            Series(name, [p._replace(y=1.0) for p in points]), across, Axis(1, 2, y, y + 1, False), COLOURS[0]
        )
    parts.append(_text(left, height - 6, f"{label}; filled: forward, open: backward", "start"))
    return _svg(width, height, parts)


def legend(series: Sequence[Series]) -> str:
    if len(series) < 2:
        return ""
    items = "".join(
        f'<span><i style="background:{one.colour or COLOURS[number % len(COLOURS)]}"></i>{html.escape(one.name)}</span>'
        for number, one in enumerate(series)
    )
    return f'<p class="legend">{items}</p>'


def _frame(across: Axis, up: Axis, x_label: str, y_label: str, width: int, height: int) -> str:
    parts = []
    for tick in across.ticks():
        x = across.at(tick)
        parts += [_line("grid", x, up.end, x, up.begin), _text(x, up.begin + 15, _number(tick), "middle")]
    for tick in up.ticks():
        y = up.at(tick)
        parts += [_line("grid", across.begin, y, across.end, y), _text(across.begin - 6, y + 4, _number(tick), "end")]
    parts += [_text((across.begin + across.end) / 2, height - 6, x_label, "middle"), _text(4, 10, y_label, "start")]
    return "".join(parts)


def _number(value: float) -> str:
    return f"{value / 1024:g}k" if value >= 1024 and value % 1024 == 0 else f"{value:g}"


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _svg(width: int, height: int, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">{"".join(parts)}</svg>'
