"""Cases of rms_norm: widths around and across block sizes, many rows, weights of two dtypes and none, strides."""

from __future__ import annotations

from torch import Tensor

import headwise as hw
from headwise.cases.row_inputs import NORM_CASES, QUICK, column_weight, rows
from headwise.reference.rms_norm import rms_norm
from headwise.testing import Arguments, Case, Maker, Outputs, Suite


def make(
    maker: Maker,
    *,
    shape: tuple[int, ...],
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    weight: str = "as x",  # or "float32", "none"
    scale: float = 1.0,
    layout: str = "contiguous",
) -> Arguments:
    x = rows(maker, shape, layout, scale)
    gain = column_weight(maker, shape[-1], weight, 1 - weight_offset)
    return {"x": x, "weight": gain, "eps": eps, "weight_offset": weight_offset}


def run(arguments: Arguments, backend: str | None = None) -> Outputs:
    return {"y": hw.rms_norm(**arguments, backend=backend)}


def reference(arguments: Arguments) -> Outputs:
    return {"y": rms_norm(**arguments)}


def explicit(arguments: Arguments, outputs: Outputs, grads: dict[str, Tensor], backend: str | None) -> Outputs:
    dx, dweight = hw.rms_norm_backward(grads["y"], **arguments, backend=backend)
    return {"x": dx} if dweight is None else {"x": dx, "weight": dweight}


CASES = (
    *NORM_CASES,
    Case("no weight, many rows", {"shape": (2000, 300), "weight": "none"}),
    Case("weight in float32", {"shape": (40, 257), "weight": "float32"}, QUICK),
    Case("weight offset 1", {"shape": (40, 200), "weight_offset": 1.0}, QUICK),
    Case("weight offset 1 in float32", {"shape": (600, 640), "weight_offset": 1.0, "weight": "float32"}),
    Case("leading dims turned", {"shape": (6, 5, 77), "layout": "turned"}, QUICK),
    Case("leading dims turned, many rows", {"shape": (30, 50, 1024), "layout": "turned"}),
)

SUITE = Suite("rms_norm", CASES, make, run, reference, explicit=explicit, differentiable=("x", "weight"))
