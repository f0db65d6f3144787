"""Cases of add_rms_norm: those of rms_norm, with a second input that is laid out in its own way."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import headwise as hw
from headwise.cases import rms_norm
from headwise.cases.row_inputs import NORM_CASES, QUICK, rows
from headwise.reference.add_rms_norm import add_rms_norm
from headwise.testing import Arguments, Case, Maker, Outputs, Suite


def make(
    maker: Maker, *, shape: tuple[int, ...], scale: float = 1.0, residual_layout: str = "contiguous", **options: Any
) -> Arguments:
    arguments = rms_norm.make(maker, shape=shape, scale=scale, **options)
    return {**arguments, "residual": rows(maker, shape, residual_layout, 2 * scale)}


def run(arguments: Arguments, backend: str | None = None) -> Outputs:
    y, h = hw.add_rms_norm(**arguments, backend=backend)
    return {"y": y, "h": h}


def reference(arguments: Arguments) -> Outputs:
    y, h = add_rms_norm(**arguments)
    return {"y": y, "h": h}


def explicit(arguments: Arguments, outputs: Outputs, grads: dict[str, Tensor], backend: str | None) -> Outputs:
    options = {name: arguments[name] for name in ("weight", "eps", "weight_offset")}
    dx, dresidual, dweight = hw.add_rms_norm_backward(grads["y"], grads["h"], outputs["h"], **options, backend=backend)
    found = {"x": dx, "residual": dresidual, "weight": dweight}
    return {name: grad for name, grad in found.items() if grad is not None}


CASES = (
    *NORM_CASES,
    Case("width 10000", {"shape": (9, 10000)}),
    Case("width 65536", {"shape": (5, 65536)}),
    Case("weight in float32", {"shape": (40, 257), "weight": "float32"}, QUICK),
    Case("weight offset 1", {"shape": (40, 200), "weight_offset": 1.0}, QUICK),
    Case("residual of another layout", {"shape": (6, 5, 78), "residual_layout": "turned"}, QUICK),
    Case("both turned, many rows", {"shape": (30, 50, 1024), "layout": "turned", "residual_layout": "turned"}),
)

SUITE = Suite(
    "add_rms_norm", CASES, make, run, reference, explicit=explicit, differentiable=("x", "residual", "weight"),
    side_outputs=("h",),
)  # fmt: skip
