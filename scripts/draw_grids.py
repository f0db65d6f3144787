"""Draw who sees whom, as small grids of queries and keys, from the oracle itself: docs/images/grids/*.svg.

    python scripts/draw_grids.py            write them
    python scripts/draw_grids.py --check    exit with 1 if a file shows something else

No grid is drawn by rule: the oracle is called with the flags in the title, with values that are the unit vectors, so that
the output of a query is its row of probabilities. A cell is filled where that is above zero; its shade is the probability.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from headwise import reference

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "images" / "grids"
CELL, GAP, LEFT, TOP = 24, 46, 30, 46
SEEN, HIDDEN, EMPTY, INK = "#0b8f86", "#8c96a3", "#d9480f", "#76808d"  # readable on white and on dark


class Panel(NamedTuple):
    title: str
    probs: Tensor  # (queries, keys)
    sink: bool = False  # draw what the sink takes as one more column


def dense(queries: int, keys: int, **flags: object) -> Tensor:
    """The probabilities of one head whose scores are all alike."""
    q, k = torch.zeros(1, 1, queries, 1, dtype=torch.float64), torch.zeros(1, 1, keys, 1, dtype=torch.float64)
    units = torch.eye(keys, dtype=torch.float64)[None, None]
    return reference.attention(q, k, units, **flags)[0][0, 0]


def packed(lengths: list[int], **flags: object) -> Tensor:
    total = sum(lengths)
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    q = torch.zeros(total, 1, 1, dtype=torch.float64)
    units = torch.eye(total, dtype=torch.float64)[:, None]
    return reference.attention_varlen(q, q, units, ends, ends, max(lengths), max(lengths), **flags)[0][:, 0]


def only(length: int) -> Tensor:
    return torch.tensor([length])


def document_mask() -> Tensor:
    document = torch.tensor([0, 0, 0, 1, 1, 1])
    return document[:, None] == document[None, :]


def slope() -> Tensor:
    return 0.5 * torch.arange(6, dtype=torch.float64)[None, None, None, :]


# File -> its panels.
PICTURES: dict[str, Callable[[], list[Panel]]] = {
    "causal": lambda: [
        Panel("no flags", dense(6, 6)),
        Panel("causal=True", dense(6, 6, causal=True)),
    ],
    "corner": lambda: [
        Panel("causal, 2 queries, 6 keys", dense(2, 6, causal=True)),
        Panel("causal, 1 query, 6 keys", dense(1, 6, causal=True)),
        Panel("causal, 6 queries, 3 keys", dense(6, 3, causal=True)),
    ],
    "window": lambda: [
        Panel("window=(2, 0)", dense(6, 6, window=(2, 0))),
        Panel("window=(2, 1)", dense(6, 6, window=(2, 1))),
        Panel("window=(0, None)", dense(6, 6, window=(0, None))),
        Panel("window=(2, 3), causal=True", dense(6, 6, window=(2, 3), causal=True)),
    ],
    "lengths": lambda: [
        Panel("causal, kv_lengths=[4] alone", dense(6, 6, causal=True, kv_lengths=only(4))),
        Panel("causal, q_lengths=kv_lengths=[4]", dense(6, 6, causal=True, kv_lengths=only(4), q_lengths=only(4))),
        Panel("causal, kv_starts=[2]", dense(6, 6, causal=True, kv_starts=only(2))),
    ],
    "packed": lambda: [
        Panel("lengths 3, 1, 3", packed([3, 1, 3])),
        Panel("lengths 3, 1, 3, causal=True", packed([3, 1, 3], causal=True)),
    ],
    "mask": lambda: [
        Panel("mask (6, 6): two documents", dense(6, 6, mask=document_mask())),
        Panel("and causal=True", dense(6, 6, mask=document_mask(), causal=True)),
        Panel("mask (1, 1, 1, 6): padding", dense(6, 6, mask=torch.tensor([True] * 4 + [False] * 2)[None, None, None])),
    ],
    "bias": lambda: [
        Panel("causal", dense(6, 6, causal=True)),
        Panel("causal, bias (1, 1, 1, 6): 0.5 · j", dense(6, 6, causal=True, bias=slope())),
        Panel("causal, sink=[1.0]", dense(6, 6, causal=True, sink=torch.ones(1, dtype=torch.float64)), sink=True),
    ],
}  # fmt: skip


def svg(panels: list[Panel]) -> str:
    columns = [panel.probs.shape[1] + panel.sink for panel in panels]
    widths = [max(CELL * count, 7 * len(panel.title)) for count, panel in zip(columns, panels, strict=True)]
    width = sum(widths) + (LEFT + GAP) * len(panels)
    height = TOP + CELL * max(panel.probs.shape[0] for panel in panels) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="11" fill="{INK}" role="img" aria-label="queries against keys">'
    ]
    x = 0.0
    for panel, panel_width in zip(panels, widths, strict=True):
        parts += _panel(panel, x + LEFT)
        x += panel_width + LEFT + GAP
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel, x: float) -> list[str]:
    queries, keys = panel.probs.shape
    parts = [f'<text x="{x:g}" y="14" font-size="12.5" font-weight="600">{panel.title}</text>']
    parts += [_label(x + CELL * (j + 0.5), TOP - 8, f"k{j}") for j in range(keys)]
    highest = float(panel.probs.max())
    if panel.sink:
        highest = max(highest, float(1.0 - panel.probs.sum(-1).min()))
    for i in range(queries):
        y = TOP + CELL * i
        parts.append(_label(x - 13, y + CELL * 0.66, f"q{i}"))
        row = panel.probs[i]
        sees_nothing = not bool((row > 0).any())
        for j in range(keys):
            share = float(row[j]) / highest if highest else 0.0
            parts.append(_cell(x + CELL * j, y, float(row[j]), share, EMPTY if sees_nothing else HIDDEN))
        if panel.sink:
            rest = 1.0 - float(row.sum())
            parts.append(_cell(x + CELL * keys + 6, y, rest, rest / highest, HIDDEN, colour="#7048e8"))
    if panel.sink:
        parts.append(_label(x + CELL * (keys + 0.5) + 6, TOP - 8, "sink"))
    return parts


def _label(x: float, y: float, text: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="middle" font-size="9.5">{text}</text>'


def _cell(x: float, y: float, probability: float, share: float, hidden: str, colour: str = SEEN) -> str:
    fill, opacity = (colour, 0.35 + 0.65 * share) if probability > 0 else (hidden, 0.16)
    size = CELL - 3
    named = f"<title>{probability:.3f}</title>"
    box = f'<rect x="{x:g}" y="{y:g}" width="{size}" height="{size}" rx="3" fill="{fill}" fill-opacity="{opacity:.2f}">'
    return f"{box}{named}</rect>"


def main() -> int:
    check = "--check" in sys.argv[1:]
    stale = []
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, make in PICTURES.items():
        path, text = FOLDER / f"{name}.svg", svg(make())
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(path.name)
            if not check:
                path.write_text(text, encoding="utf-8")
    if check and stale:
        print(f"not what the oracle says: {', '.join(stale)}; python scripts/draw_grids.py draws them anew")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
