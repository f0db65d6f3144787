"""What a run of the demo leaves in its folder, for the report and the browser page to read.

``run.json``                the options, the loss curves, the speeds, the generated text, the check of decoding
``attention.safetensors``   one text, and per layer the queries, keys and attention probabilities of every head
``checkpoint.safetensors``  the weights (see ``checkpoint.py``)

Files are written under a temporary name and then renamed: the last good one survives a full disk or an interruption.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

RUN, ATTENTION, CHECKPOINT, REPORT = "run.json", "attention.safetensors", "checkpoint.safetensors", "report.html"
DEFAULT_FOLDER = "headwise-demo"  # where `headwise demo` writes and `headwise view` looks, in the current directory


@dataclass(frozen=True)
class Curve:
    """A training run, step by step. losses[i] is the mean loss of step first_step + i, in nats per byte."""

    name: str  # "Headwise (cpu)", "plain PyTorch"
    losses: list[float]
    tokens_per_second: float
    first_step: int = 0


@dataclass(frozen=True)
class DecodeCheck:
    """How far the logits of decoding token by token over a cache are from those of one full forward pass."""

    positions: int
    largest_difference: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.largest_difference <= self.allowed  # NaN does not pass


@dataclass(frozen=True)
class Run:
    backend: str
    device: str  # in words: "AMD EPYC (2 threads)", "NVIDIA H200"
    versions: dict[str, str]  # headwise, torch, …
    options: dict[str, Any]  # of the command line and the model: steps, layers, width, seed, …
    parameters: int
    text: str  # what it was trained on, in words: "pydoc_data.topics, 79 documents, 612 kB"
    seconds: float  # training alone
    interrupted: bool
    curve: Curve
    plain: Curve | None  # the first steps of the same model on plain PyTorch ops
    prompt: str
    generated: str
    decode: DecodeCheck | None
    held_out_loss: float | None = None  # nats per byte on text that it was not trained on


@dataclass(frozen=True)
class LayerAttention:
    """One layer of the model looking at the text. Positions are already rotated into q and k."""

    name: str  # "layer 1, window 64", "layer 2, global"
    window: int | None  # keys that a query sees, its own included; None: all before it
    scale: float
    softcap: float | None
    q: Tensor  # (Hq, S, D) float32
    k: Tensor  # (Hk, S, D) float32
    probs: Tensor  # (Hq, S, S) float32, from attention_probs


@dataclass(frozen=True)
class AttentionSample:
    tokens: list[int]  # S bytes of text
    layers: list[LayerAttention]


def save_run(run: Run, folder: Path) -> None:
    text = json.dumps(asdict(run), indent=1, ensure_ascii=False, allow_nan=False)
    write_whole(folder / RUN, lambda path: path.write_text(text, encoding="utf-8"))


def load_run(folder: Path) -> Run:
    fields = json.loads((folder / RUN).read_text(encoding="utf-8"))
    for name, kind in (("curve", Curve), ("plain", Curve), ("decode", DecodeCheck)):
        fields[name] = None if fields[name] is None else kind(**fields[name])
    return Run(**fields)


def save_attention(sample: AttentionSample, folder: Path) -> None:
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    about = []
    for i, layer in enumerate(sample.layers):
        for part in ("q", "k", "probs"):
            tensors[f"{i}.{part}"] = getattr(layer, part).detach().cpu().contiguous()
        about.append({field: getattr(layer, field) for field in ("name", "window", "scale", "softcap")})
    metadata = {"tokens": json.dumps(sample.tokens), "layers": json.dumps(about)}
    write_whole(folder / ATTENTION, lambda path: save_file(tensors, path, metadata))


def load_attention(folder: Path) -> AttentionSample:
    from safetensors import safe_open

    with safe_open(folder / ATTENTION, "pt") as file:
        metadata = file.metadata()
        layers = [
            LayerAttention(**about, **{part: file.get_tensor(f"{i}.{part}") for part in ("q", "k", "probs")})
            for i, about in enumerate(json.loads(metadata["layers"]))
        ]
    return AttentionSample(json.loads(metadata["tokens"]), layers)


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file completely or not at all."""
    temporary = path.with_name(path.name + ".part")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
