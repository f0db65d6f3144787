"""A run of the demo made up for tests: small, known to the last digit, and with text that tries to break out of a page."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from headwise.demo import colours, report
from headwise.demo.record import (
    AttentionSample,
    Curve,
    DecodeCheck,
    LayerAttention,
    Run,
    save_attention,
    save_run,
)

TEXT = b"if a < 'b':\n\tx = \"</script>\" # \xc3\xa9 &\x00!\n<!--<script> $y$"
SIZE, WINDOW, HEADS = len(TEXT), 9, 3
HOSTILE = (
    '</script><script>document.title = "taken"</script><!-- "\'&\\ \u2028 é \ufffd \x07\n\t<img src=x onerror=alert(1)>'
)


def made_run() -> Run:
    losses = [math.log(256) * math.exp(-step / 40) + 0.01 * math.sin(3 * step) + 1 for step in range(60)]
    plain = [loss + (3e-5 if step == 7 else 1e-6) for step, loss in enumerate(losses[:12])]
    return Run(
        backend="cpu", device="a <b>CPU</b> (2 threads)", versions={"headwise": "1.2.3", "torch": "9.8.7"},
        options={"steps": 60, "seed": 17, "text": ["a_file_with_a_very_long_name_" * 4, "$x$"]}, parameters=123456,
        text="three <i>files</i>", seconds=12.5, interrupted=False, curve=Curve("Headwise (cpu)", losses, 4000.0),
        plain=Curve("plain PyTorch", plain, 1000.0), prompt="</mark>def", generated=HOSTILE,
        decode=DecodeCheck(48, 3e-6, 2e-4), held_out_loss=2.718,
    )  # fmt: skip


def made_sample() -> AttentionSample:
    generator = torch.Generator().manual_seed(0)
    distance = torch.arange(SIZE)[:, None] - torch.arange(SIZE)
    layers = []
    for name, window in (("layer 1, window 9", WINDOW), ("layer 2, global", None)):
        scores = 3 * torch.randn(HEADS, SIZE, SIZE, generator=generator)
        seen = (distance >= 0) & (distance < (window or SIZE))
        probs = scores.masked_fill(~seen, -math.inf).softmax(-1)
        q, k = torch.randn(HEADS, SIZE, 4, generator=generator), torch.randn(1, SIZE, 4, generator=generator)
        layers.append(LayerAttention(name, window, 0.5, None, q, k, probs))
    return AttentionSample(list(TEXT), layers)


SAMPLE = made_sample()


def write(folder: Path, run: Run, sample: AttentionSample | None = SAMPLE) -> Path:
    folder.mkdir(exist_ok=True)
    save_run(run, folder)
    if sample is not None:
        save_attention(sample, folder)
    return report.write_report(folder)


def colour_of(weight: float, stops: tuple[str, ...] = colours.LIGHT) -> tuple[int, ...]:
    """The ramp, written down a second time."""
    place = math.sqrt(weight) * (len(stops) - 1)
    i = min(int(place), len(stops) - 2)
    pair = [[int(stop[at : at + 2], 16) for at in (1, 3, 5)] for stop in stops[i : i + 2]]
    return tuple(round(low + (high - low) * (place - i)) for low, high in zip(*pair, strict=True))
