"""Cases of add_rms_norm: those of rms_norm, with a second input that is laid out in its own way."""

from __future__ import annotations

from torch import Tensor

import headwise as hw
from headwise.cases.row_inputs import QUICK, column_weight, rows
from headwise.reference.add_rms_norm import add_rms_norm
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
    residual_layout: str = "contiguous",
) -> Arguments:
    x, residual = rows(maker, shape, layout, scale), rows(maker, shape, residual_layout, 2 * scale)
    gain = column_weight(maker, shape[-1], weight, 1 - weight_offset)
    return {"x": x, "residual": residual, "weight": gain, "eps": eps, "weight_offset": weight_offset}


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
    Case("width 1", {"shape": (5, 1)}, QUICK),
    Case("width 111", {"shape": (7, 111)}, QUICK),
    Case("width 128, three dims", {"shape": (3, 5, 128)}, QUICK),
    Case("width 4096", {"shape": (33, 4096)}, QUICK),
    Case("width 10000", {"shape": (9, 10000)}),
    Case("width 50257", {"shape": (3, 50257)}),
    Case("width 65536", {"shape": (5, 65536)}),
    Case("many rows", {"shape": (4, 1500, 96)}),
    Case("many rows and wide", {"shape": (700, 2048)}),
    Case("one row", {"shape": (320,)}, QUICK),
    Case("no weight", {"shape": (9, 130), "weight": "none"}, QUICK),
    Case("weight in float32", {"shape": (40, 257), "weight": "float32"}, QUICK),
    Case("weight offset 1", {"shape": (40, 200), "weight_offset": 1.0}, QUICK),
    Case("large eps", {"shape": (12, 96), "eps": 0.5}, QUICK),
    Case("small values", {"shape": (12, 96), "scale": 1e-3}, QUICK),
    Case("large values", {"shape": (12, 96), "scale": 200.0}, QUICK),
    Case("every second column", {"shape": (6, 5, 77), "layout": "strided"}, QUICK),
    Case("residual of another layout", {"shape": (6, 5, 78), "residual_layout": "turned"}, QUICK),
    Case("both turned, many rows", {"shape": (30, 50, 1024), "layout": "turned", "residual_layout": "turned"}),
    Case("no rows", {"shape": (0, 16)}, QUICK),
    Case("no columns", {"shape": (4, 0)}, QUICK),
)

SUITE = Suite(
    "add_rms_norm", CASES, make, run, reference, explicit=explicit, differentiable=("x", "residual", "weight"),
    side_outputs=("h",),
)  # fmt: skip
