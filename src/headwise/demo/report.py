"""A run of the demo as one self-contained HTML file: no network, no fonts, no other files.

The page itself is in ``page/``: ES modules, style sheets and the HTML around them. Numbers are stored as JSON,
attention weights as 16-bit integers in base64.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from headwise.demo import colours
from headwise.demo.record import (
    ATTENTION,
    REPORT,
    RUN,
    AttentionSample,
    Curve,
    Run,
    load_attention,
    load_run,
    write_whole,
)

T = TypeVar("T")

PAGE = Path(__file__).parent / "page"
STYLES = ("report.css", "attention.css")
MODULES = (
    "glyphs.js",
    "colours.js",
    "elements.js",
    "theme.js",
    "weights.js",
    "facts.js",
    "loss.js",
    "map.js",
    "strip.js",
    "attention.js",
    "report.js",
)

# A weight p is stored as round(p * WHOLE); NOT_A_WEIGHT marks a value that is none.
WHOLE, NOT_A_WEIGHT = 65534, 65535
_ROUNDING = 1e-3  # how far outside of 0 to 1 a weight may be


class UnreadableRun(ValueError):
    """A file of the run cannot be used. The message names the file."""


def write_report(folder: Path) -> Path:
    """Write ``report.html`` from the other files of the folder."""
    path = folder / REPORT
    page = compose(read_run(folder), read_attention(folder))
    write_whole(path, lambda part: part.write_text(page, encoding="utf-8", newline="\n"))
    return path


def write_pictures(folder: Path) -> list[Path]:
    """Write ``loss.png`` and ``attention.png``; an interrupted run may have no attention."""
    from headwise.demo import pictures

    return pictures.write(read_run(folder), read_attention(folder), folder)


def read_run(folder: Path) -> Run:
    return _read(load_run, folder, _problem_of_run, f"{RUN} does not hold a run of the demo")


def read_attention(folder: Path) -> AttentionSample | None:
    """None if the run left none."""
    if not (folder / ATTENTION).exists():
        return None
    from safetensors import SafetensorError

    message = f"{ATTENTION} does not hold the attention of a run"
    return _read(load_attention, folder, _problem_of_attention, message, SafetensorError)


def _read(
    load: Callable[[Path], T],
    folder: Path,
    problem_of: Callable[[T], str | None],
    message: str,
    library_error: type[Exception] = ValueError,
) -> T:
    try:
        found = load(folder)
        problem = problem_of(found)
    except (ValueError, TypeError, KeyError, AttributeError, library_error) as error:
        problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if problem is not None:
        raise UnreadableRun(f"{message}: {problem}")
    return found


def compose(run: Run, sample: AttentionSample | None) -> str:
    """The page as text."""
    style = "\n".join((PAGE / name).read_text(encoding="utf-8") for name in STYLES)
    script = bundle()
    data = {
        "run": asdict(run) | {"decode": run.decode and asdict(run.decode) | {"passed": run.decode.passed}},
        "sample": sample and _packed_sample(sample),
        "colours": {"light": colours.LIGHT, "dark": colours.DARK, "not_a_weight": colours.NOT_A_WEIGHT},
    }
    # Only this style and this script run, whatever text the model writes.
    policy = f"default-src 'none'; img-src data:; style-src '{_digest(style)}'; script-src '{_digest(script)}'"
    parts = {"policy": policy, "style": style, "script": script, "data": json_for_html(data)}
    frame = with_attention((PAGE / "report.html").read_text(encoding="utf-8"))
    return re.sub(r"<!--(policy|style|script|data)-->", lambda found: parts[found[1]], frame)


def with_attention(frame: str) -> str:
    """A page with the HTML of the attention view, which the report and the browser page share."""
    return frame.replace("<!--attention-->", (PAGE / "attention.html").read_text(encoding="utf-8"))


def bundle() -> str:
    """The modules of the page as one script: each comes after those it imports from."""
    texts = [(PAGE / name).read_text(encoding="utf-8") for name in MODULES]
    without_imports = (re.sub(r'^import [^;]* from "[^"]*";\n', "", text, flags=re.MULTILINE) for text in texts)
    return "\n".join(re.sub(r"^export ", "", text, flags=re.MULTILINE) for text in without_imports)


def json_for_html(value: Any) -> str:
    """JSON that can stand between <script> and </script>: no character of it can begin a tag or a comment."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return re.sub("[<>&]", lambda found: f"\\u{ord(found[0]):04x}", text)


def pack(weights: Tensor) -> str:
    """Weights as 16-bit little-endian integers in base64."""
    fit = (weights >= -_ROUNDING) & (weights <= 1 + _ROUNDING)  # NaN does not
    codes = (weights.double().clamp(0, 1) * WHOLE).round().where(fit, float(NOT_A_WEIGHT)).to(torch.int32)
    both_bytes = torch.stack((codes & 255, codes >> 8), dim=-1)
    return base64.b64encode(bytes(both_bytes.flatten().tolist())).decode("ascii")


def _packed_sample(sample: AttentionSample) -> dict[str, Any]:
    layers = [
        {"name": layer.name, "window": layer.window, "heads": len(layer.probs), "weights": pack(layer.probs)}
        for layer in sample.layers
    ]
    return {"tokens": sample.tokens, "whole": WHOLE, "layers": layers}


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")


def _problem_of_run(run: Run) -> str | None:
    kinds: dict[str, type | tuple[type, ...]] = {
        "backend": str, "device": str, "versions": dict, "options": dict, "parameters": int, "text": str,
        "seconds": (int, float), "interrupted": bool, "curve": Curve, "prompt": str, "generated": str,
    }  # fmt: skip
    for field, kind in kinds.items():
        if not isinstance(getattr(run, field), kind):
            return f"{field} is {getattr(run, field)!r:.60}"
    for curve in (run.curve, run.plain):
        if curve is not None and not all(
            isinstance(number, int | float) and math.isfinite(number)
            for number in (*curve.losses, curve.tokens_per_second, curve.first_step)
        ):
            return f"the curve {curve.name!r:.60} holds something that is not a number"
    if not isinstance(run.held_out_loss, int | float | None):
        return f"held_out_loss is {run.held_out_loss!r:.60}"
    if run.decode is not None and not all(isinstance(number, int | float) for number in asdict(run.decode).values()):
        return f"decode is {run.decode!r:.60}"
    return None


def _problem_of_attention(sample: AttentionSample) -> str | None:
    length = len(sample.tokens)
    if not all(isinstance(token, int) and 0 <= token < 256 for token in sample.tokens):
        return "its tokens are not bytes"
    if not sample.layers or length == 0:
        return "it is empty"
    for layer in sample.layers:
        shape = tuple(layer.probs.shape)
        if len(shape) != 3 or shape[0] == 0 or shape[1:] != (length, length):
            return f"{layer.name} has probabilities of shape {shape}, and there are {length} tokens"
    return None
