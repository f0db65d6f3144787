"""Gated linear units, written as their formula."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda a: F.gelu(a, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda a: F.relu(a).square(),
    "sigmoid": torch.sigmoid,
    "identity": lambda a: a,
}


def glu(gate: Tensor, up: Tensor | None = None, activation: str = "silu") -> Tensor:
    if up is None:
        gate, up = gate.chunk(2, -1)
    return _ACTIVATIONS[activation](gate) * up
