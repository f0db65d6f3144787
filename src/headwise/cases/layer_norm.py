"""Cases of layer_norm: widths around and across block sizes, many rows, weights and biases, means far from zero."""

from __future__ import annotations

from torch import Tensor

import headwise as hw
from headwise.cases.row_inputs import NORM_CASES, QUICK, column_weight, rows
from headwise.reference.layer_norm import layer_norm
from headwise.testing import Arguments, Case, Maker, Outputs, Suite


def make(
    maker: Maker,
    *,
    shape: tuple[int, ...],
    eps: float = 1e-5,
    weight: str = "as x",  # or "float32", "none"
    bias: str = "as x",
    mean: float = 0.0,
    scale: float = 1.0,
    layout: str = "contiguous",
) -> Arguments:
    x = rows(maker, shape, layout, scale)
    if mean:
        x = (x.float() + mean).to(x.dtype)
    factor, summand = column_weight(maker, shape[-1], weight), column_weight(maker, shape[-1], bias, around=0.0)
    return {"x": x, "weight": factor, "bias": summand, "eps": eps}


def run(arguments: Arguments, backend: str | None = None) -> Outputs:
    return {"y": hw.layer_norm(**arguments, backend=backend)}


def reference(arguments: Arguments) -> Outputs:
    return {"y": layer_norm(**arguments)}


def explicit(arguments: Arguments, outputs: Outputs, grads: dict[str, Tensor], backend: str | None) -> Outputs:
    dx, dweight, dbias = hw.layer_norm_backward(grads["y"], **arguments, backend=backend)
    found = {"x": dx, "weight": dweight, "bias": dbias}
    return {name: grad for name, grad in found.items() if grad is not None}


CASES = (
    *NORM_CASES,
    Case("width 2", {"shape": (300, 2)}, QUICK),
    Case("width 10000", {"shape": (9, 10000)}),
    Case("width 65536", {"shape": (5, 65536)}),
    Case("no weight, no bias", {"shape": (9, 130), "weight": "none", "bias": "none"}, QUICK),
    Case("no bias, many rows", {"shape": (2000, 300), "bias": "none"}),
    Case("weight and bias in float32", {"shape": (40, 257), "weight": "float32", "bias": "float32"}, QUICK),
    Case("bias in float32", {"shape": (40, 200), "bias": "float32"}, QUICK),
    Case("mean far from zero", {"shape": (12, 200), "mean": 100.0}, QUICK),
    Case("mean a million deviations away", {"shape": (12, 1100), "mean": 1e4, "scale": 1e-2}, QUICK),
    Case("mean a million deviations away, long rows", {"shape": (5, 50257), "mean": 1e4, "scale": 1e-2}),
    Case("constant rows", {"shape": (6, 333), "mean": 1000.3, "scale": 0.0}, QUICK),
    Case("constant rows, long", {"shape": (4, 40000), "mean": 1000.3, "scale": 0.0}),
    Case("leading dims turned", {"shape": (6, 5, 77), "layout": "turned"}, QUICK),
    Case("leading dims turned, many rows", {"shape": (30, 50, 1024), "layout": "turned"}),
)

SUITE = Suite("layer_norm", CASES, make, run, reference, explicit=explicit, differentiable=("x", "weight", "bias"))
