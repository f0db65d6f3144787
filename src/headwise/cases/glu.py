"""Cases of glu: every activation, sizes around and across blocks, halves of one tensor, strides, tails, special values."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import headwise as hw
from headwise.cases.row_inputs import QUICK, rows
from headwise.reference.glu import glu
from headwise.testing import Arguments, Case, Maker, Outputs, Suite

# Where activations overflow, cancel or vanish if they are written carelessly; 16-bit numbers all.
SPECIAL = (0.0, -0.0, 1e4, -1e4, 100.0, -100.0, 20.0, -20.0, -5.0, -1.28125, 6e-5, -6e-5, math.nan, math.inf, -math.inf)


def make(
    maker: Maker,
    *,
    shape: tuple[int, ...],
    activation: str = "silu",
    layout: str = "contiguous",  # "halves" (one tensor), "turned halves", "chunks" (two views), "strided", "turned"
    scale: float = 1.0,
    shift: float = 0.0,
    special: int = 0,  # of SPECIAL, those that take turns as gates
) -> Arguments:
    options: dict[str, Any] = {"activation": activation}
    if layout in ("halves", "turned halves", "chunks"):
        both = rows(maker, (*shape[:-1], 2 * shape[-1]), "turned" if "turned" in layout else "contiguous", scale)
        gate, up = both.chunk(2, -1)
        options |= {"gate": gate, "up": up} if layout == "chunks" else {"gate": both, "up": None}
    else:
        gate = rows(maker, shape, layout, scale)
        options |= {"gate": gate, "up": rows(maker, shape, layout)}
    if shift:
        gate += shift
    if special:
        values = maker.tensor(SPECIAL[:special], torch.float32).to(gate.dtype)
        gate.copy_(values.repeat(-(-gate.numel() // len(values)))[: gate.numel()].view(shape))
    return options


def run(arguments: Arguments, backend: str | None = None) -> Outputs:
    return {"y": hw.glu(**arguments, backend=backend)}


def reference(arguments: Arguments) -> Outputs:
    return {"y": glu(**arguments)}


def explicit(arguments: Arguments, outputs: Outputs, grads: dict[str, Tensor], backend: str | None) -> Outputs:
    found = hw.glu_backward(grads["y"], **arguments, backend=backend)
    return {"gate": found} if isinstance(found, Tensor) else {"gate": found[0], "up": found[1]}


CASES = (
    Case("silu", {"shape": (33, 77)}, QUICK),
    Case("gelu", {"shape": (33, 77), "activation": "gelu", "scale": 2.0}, QUICK),
    Case("gelu_tanh", {"shape": (33, 77), "activation": "gelu_tanh", "scale": 2.0}, QUICK),
    Case("relu", {"shape": (33, 77), "activation": "relu"}, QUICK),
    Case("relu2", {"shape": (33, 77), "activation": "relu2"}, QUICK),
    Case("sigmoid", {"shape": (33, 77), "activation": "sigmoid", "scale": 4.0}, QUICK),
    Case("identity", {"shape": (33, 77), "activation": "identity"}, QUICK),
    Case("halves of one tensor", {"shape": (9, 5, 96), "layout": "halves"}, QUICK),
    Case("halves, odd width, gelu", {"shape": (7, 33), "layout": "halves", "activation": "gelu"}, QUICK),
    *(
        Case(f"turned halves, {name}", {"shape": (7, 34), "layout": "turned halves", "activation": name})
        for name in ("silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "identity")
    ),
    Case("halves, width 1", {"shape": (5, 1), "layout": "halves", "activation": "sigmoid"}, QUICK),
    Case("chunks, relu2", {"shape": (11, 40), "layout": "chunks", "activation": "relu2"}, QUICK),
    Case("chunks, odd width", {"shape": (3, 5, 51), "layout": "chunks"}, QUICK),
    Case("one element", {"shape": (1,)}, QUICK),
    Case("one dim", {"shape": (1000,), "activation": "gelu_tanh"}, QUICK),
    Case("several blocks", {"shape": (13, 1024)}, QUICK),
    Case("every second column", {"shape": (6, 5, 77), "layout": "strided"}, QUICK),
    Case("leading dims turned", {"shape": (6, 5, 80), "layout": "turned", "activation": "gelu"}, QUICK),
    Case("large gates", {"shape": (20, 64), "scale": 50.0}, QUICK),
    Case("tail of gelu", {"shape": (20, 64), "shift": -5.0, "scale": 0.5, "activation": "gelu"}, QUICK),
    Case("tail of gelu_tanh", {"shape": (20, 64), "shift": -5.0, "scale": 0.5, "activation": "gelu_tanh"}, QUICK),
    Case("tail of silu", {"shape": (20, 64), "shift": -12.0}, QUICK),
    Case("special gates, silu", {"shape": (10, 45), "special": 15}, QUICK),
    # PyTorch's own gelu(inf) is inf or NaN, by dtype.
    Case("special gates, gelu", {"shape": (10, 45), "special": 13, "activation": "gelu"}, QUICK),
    Case("special gates, gelu_tanh", {"shape": (10, 45), "special": 15, "activation": "gelu_tanh"}, QUICK),
    Case("special gates, relu", {"shape": (10, 45), "special": 15, "activation": "relu"}, QUICK),
    Case("special gates, sigmoid", {"shape": (10, 45), "special": 15, "activation": "sigmoid"}, QUICK),
    Case("no rows", {"shape": (0, 16)}, QUICK),
    Case("no columns", {"shape": (4, 0), "layout": "halves"}, QUICK),
    Case("many rows", {"shape": (4, 1500, 96), "activation": "gelu_tanh"}),
    Case("wide halves", {"shape": (70, 14336), "layout": "halves"}),
    Case("many elements, gelu", {"shape": (300, 11008), "activation": "gelu"}),
)

SUITE = Suite("glu", CASES, make, run, reference, explicit=explicit, differentiable=("gate", "up"))
