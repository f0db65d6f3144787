"""``checkpoint.safetensors``: weights, the optimizer's moments, the losses so far, and the recipe.

Written under a temporary name and then renamed: the last good one stays if the disk is full.

===================================  ================================================================================
``model.<parameter>``                a weight
``optimizer.<moment>.<parameter>``   its ``exp_avg``, ``exp_avg_sq`` and ``step``
``losses``                           float64, one per step
metadata ``headwise demo``           JSON: the format's number, the recipe, the text's fingerprint, the time it took
===================================  ================================================================================
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.demo.model import make_model
from headwise.demo.record import write_whole
from headwise.demo.train import Recipe, Training

FORMAT = 2
_KEY = "headwise demo"


class CheckpointError(Exception):
    """A checkpoint that cannot be read, written or resumed from. The message says which file and why."""


@dataclass(frozen=True)
class Checkpoint:
    recipe: Recipe
    text: str  # its fingerprint
    backend: str
    seconds: float
    tokens_per_second: float
    weights: dict[str, Tensor]
    optimizer_state: dict[str, dict[str, Tensor]]
    losses: list[float]

    @property
    def step(self) -> int:
        return len(self.losses)


def write(training: Training, backend: str, path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = {f"model.{name}": value for name, value in training.model.state_dict().items()}
    for parameter, state in training.optimizer_state().items():
        tensors.update({f"optimizer.{moment}.{parameter}": value for moment, value in state.items()})
    tensors["losses"] = torch.tensor(training.losses, dtype=torch.float64)
    about = {
        "format": FORMAT,
        "recipe": training.recipe.options(),
        "text": training.text.fingerprint(),
        "backend": backend,
        "seconds": training.seconds,
        "tokens_per_second": training.tokens_per_second,
    }
    tensors = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    try:
        write_whole(path, lambda temporary: save_file(tensors, temporary, {_KEY: json.dumps(about)}))
    except (OSError, SafetensorError) as error:
        kept = "; the last one that could be is still there" if path.exists() else ""
        raise CheckpointError(f"{path} could not be written{kept}: {_reason(error)}") from error


def set_aside(path: Path) -> Path | None:
    """Before a new run: rename an existing checkpoint. Returns its new path, or None if there was none."""
    if not path.exists():
        return None
    kept = path.with_name(f"{path.stem}-before{path.suffix}")
    try:
        path.replace(kept)
    except OSError as error:
        raise CheckpointError(f"{path} could not be kept as {kept.name}: {_reason(error)}") from error
    return kept


def read(path: Path) -> Checkpoint:
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        raise CheckpointError(f"there is no {path} to resume from")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {_reason(error)}") from error
    if _KEY not in metadata:
        raise CheckpointError(f"{path} is no checkpoint of this demo")
    try:
        about = json.loads(metadata[_KEY])
        if about["format"] != FORMAT:
            raise CheckpointError(f"{path} has format {about['format']}; this version reads format {FORMAT}")
        checkpoint = _unpack(tensors, about)
        problem = _broken_tensor(checkpoint)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is broken: {type(error).__name__}: {_reason(error)}") from error
    if problem is not None:
        raise CheckpointError(f"{path} is broken: {problem}")
    return checkpoint


def _unpack(tensors: dict[str, Tensor], about: dict[str, Any]) -> Checkpoint:
    weights: dict[str, Tensor] = {}
    optimizer_state: dict[str, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        kind, _, rest = name.partition(".")
        if kind == "model":
            weights[rest] = value
        elif kind == "optimizer":
            moment, _, parameter = rest.partition(".")
            optimizer_state.setdefault(parameter, {})[moment] = value
    return Checkpoint(
        recipe=Recipe.from_options(about["recipe"]),
        text=about["text"],
        backend=about["backend"],
        seconds=about["seconds"],
        tokens_per_second=about["tokens_per_second"],
        weights=weights,
        optimizer_state=optimizer_state,
        losses=[float(loss) for loss in tensors["losses"].tolist()],
    )


def _broken_tensor(checkpoint: Checkpoint) -> str | None:
    """Checks weights and moments against the recipe in the same file, and their steps against the losses."""
    with torch.device("meta"):
        model = make_model(checkpoint.recipe.shape, "cpu", seed=None)
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    moments = [
        {name: state[moment] for name, state in checkpoint.optimizer_state.items()}
        for moment in ("exp_avg", "exp_avg_sq")
    ]
    steps = {int(state["step"]) for state in checkpoint.optimizer_state.values()}
    if steps != {checkpoint.step}:
        return f"it has {checkpoint.step} losses, and moments of {', '.join(map(str, sorted(steps)))} steps"
    for name, weight in checkpoint.weights.items():
        if not weight.isfinite().all():
            return f"{name} is not finite"
    for tensors in (checkpoint.weights, *moments):
        found = {name: tuple(value.shape) for name, value in tensors.items()}
        for name in sorted(expected.keys() | found.keys()):
            if expected.get(name) != found.get(name):
                return f"{name} is {found.get(name, 'missing')}, where its recipe needs {expected.get(name, 'none')}"
    return None


def differences(checkpoint: Checkpoint, asked: dict[str, Any], text: str) -> list[str]:
    """Where the options asked for differ from the checkpoint's, in words: resuming would not be the same run.

    ``steps`` may differ: only the rest of the learning rate schedule changes.
    """
    has = checkpoint.recipe.options()
    found = [
        f"{name} is {has[name]} there and {value} here"
        for name, value in asked.items()
        if name != "steps" and value != has[name]
    ]
    if text != checkpoint.text:
        found.append("it was trained on another text")
    return found


def _reason(error: Exception) -> str:
    """One line."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split()) or type(error).__name__
