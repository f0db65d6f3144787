"""The loss and the attention of a run as PNGs, for pages that cannot hold the report."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

from headwise.benchmark.plot import new_figure
from headwise.demo import colours
from headwise.demo.record import AttentionSample, Curve, Run, write_whole

LOSS, ATTENTION = "loss.png", "attention.png"
_GREY, _GRID = "#5d666d", "#e6e6e6"


def write(run: Run, sample: AttentionSample | None, folder: Path) -> list[Path]:
    """Draw what there is to draw; the paths of the pictures."""
    figures: dict[str, Any] = {}
    if run.curve.losses:
        figures[LOSS] = loss_figure(run)
    if sample is not None:
        figures[ATTENTION] = attention_figure(run, sample)
    for name, figure in figures.items():
        write_whole(folder / name, partial(figure.savefig, dpi=130, format="png"))
    return [folder / name for name in figures]


def loss_figure(run: Run) -> Any:
    """Our loss as a thin line over the broad one of plain PyTorch; on the right the steps of both, enlarged."""
    what = f"Headwise demo · {run.parameters:,} parameters · {run.text}"
    title = _plain_text(f"{what}\n{run.device} · {run.seconds:.0f} s of training")
    plain = run.plain if run.plain is not None and run.plain.losses else None
    closer = plain is not None and len(plain.losses) < len(run.curve.losses)
    figure = new_figure(9, 4.2, title)
    panels = figure.subplots(1, 2 if closer else 1, squeeze=False, width_ratios=[8, 5] if closer else None)[0]
    for panel in panels:
        if plain is not None:
            _line(panel, plain, colours.PLAIN, 8 if len(plain.losses) > 1 else 13, alpha=0.6)
        thin = 1.6 if panel is not panels[0] or len(run.curve.losses) < 200 else 1.0
        _line(panel, run.curve, colours.OURS, thin if len(run.curve.losses) > 1 else 6)
        panel.axhline(math.log(256), color="#999999", linewidth=0.9, linestyle=(0, (2, 3)), zorder=0)
        panel.set_xlabel("step", fontsize=9)
        panel.grid(axis="y", color=_GRID, linewidth=0.7)
        panel.set_axisbelow(True)
        panel.tick_params(length=0, labelsize=8)
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.spines[["top", "right", "left"]].set_visible(False)
    panels[0].set_ylabel("nats per byte", fontsize=9)
    panels[0].annotate(
        "ln 256: every byte alike", (1.0, math.log(256)), (0, -3), xycoords=("axes fraction", "data"),
        textcoords="offset points", ha="right", va="top", fontsize=8, color=_GREY,
    )  # fmt: skip
    panels[0].set_title("the whole run", loc="left", fontsize=10, fontweight="bold")
    if closer and plain is not None:
        first, last = plain.first_step, plain.first_step + len(plain.losses) - 1
        panels[1].set_title(f"steps {first} to {last}, closer", loc="left", fontsize=10, fontweight="bold")
        panels[1].set_xlim(first - 0.5, last + 0.5)
        low, high = min(plain.losses), max(*plain.losses, math.log(256))
        panels[1].set_ylim(low - 0.06 * (high - low), high + 0.06 * (high - low))
    lines = [line for line in panels[0].get_lines() if not line.get_label().startswith("_")]
    figure.legend(handles=lines[::-1], loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    return figure


def _plain_text(text: str) -> str:
    """Escapes dollars: matplotlib reads text between two of them as a formula."""
    return text.replace("$", r"\$")


def _line(panel: Any, curve: Curve, colour: str, width: float, alpha: float = 1.0) -> None:
    steps = range(curve.first_step, curve.first_step + len(curve.losses))
    alone = len(curve.losses) == 1
    panel.plot(
        steps, curve.losses, "o" if alone else "-", color=colour, linewidth=width, markersize=width, alpha=alpha,
        label=_plain_text(curve.name), solid_capstyle="round", solid_joinstyle="round",
    )  # fmt: skip


def attention_figure(run: Run, sample: AttentionSample) -> Any:
    """A row per layer, a column per head: queries down, keys across. Grey: masked."""
    import torch
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm

    colour_map = LinearSegmentedColormap.from_list("weights", colours.LIGHT).with_extremes(
        bad=colours.NOT_A_WEIGHT, over=colours.NOT_A_WEIGHT, under="#ffffff00"
    )
    norm = PowerNorm(0.5, vmin=0.0, vmax=1.0)
    length = len(sample.tokens)
    heads = max(len(layer.probs) for layer in sample.layers)
    title = f"Headwise demo · attention over {length} bytes, by layer and head\n{run.text} · {run.backend} backend"
    figure = new_figure(max(1.75 * heads + 1.5, 5.5), 1.85 * len(sample.layers) + 1.0, _plain_text(title))
    panels = figure.subplots(len(sample.layers), heads, squeeze=False)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    image = None
    for row, layer in zip(panels, sample.layers, strict=True):
        seen = (distance >= 0) & (distance < (layer.window or length))
        for panel in row[len(layer.probs) :]:
            panel.set_visible(False)
        for head, (panel, probs) in enumerate(zip(row, layer.probs, strict=False)):
            weights = probs.double().clamp(0, 1)
            # A weight on a masked key is wrong, and drawn as such.
            weights = weights.where(seen, torch.where(probs == 0, -1.0, torch.nan).double())
            panel.set_facecolor("#eeeeee")
            image = panel.imshow(weights.tolist(), cmap=colour_map, norm=norm, interpolation="nearest")
            panel.set_xticks([])
            panel.set_yticks([])
            for spine in panel.spines.values():
                spine.set_color("#d5d5d5")
            if panel in panels[0]:
                panel.set_title(f"head {head + 1}", fontsize=9, color=_GREY)
        row[0].set_ylabel(_plain_text(layer.name).replace(", ", "\n"), fontsize=9)
    bar = figure.colorbar(
        image, ax=panels, shrink=min(1.0, 2.2 / len(sample.layers)), aspect=16, ticks=[0, 0.01, 0.05, 0.2, 0.5, 1]
    )
    bar.ax.set_yticklabels(["0", "1 %", "5 %", "20 %", "50 %", "100 %"], fontsize=8)
    bar.outline.set_visible(False)
    return figure
