"""Calls of layer_norm and add_rms_norm: good ones, and what each wrong one says. Part of the table in bad_calls.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

F16, I64 = torch.float16, torch.int64
T, V = TypeError, ValueError


def good_norm_calls(m: Any) -> dict[str, dict[str, Any]]:
    return {
        "layer_norm": {"x": m.f(3, 5), "weight": m.f(5), "bias": m.f(5)},
        "layer_norm_backward": {"grad": m.f(3, 5), "x": m.f(3, 5), "weight": m.f(5), "bias": m.f(5)},
        "add_rms_norm": {"x": m.f(3, 5), "residual": m.f(3, 5), "weight": m.f(5)},
        "add_rms_norm_backward": {"grad": m.f(3, 5), "grad_h": m.f(3, 5), "h": m.f(3, 5), "weight": m.f(5)},
    }


def bad_norm_calls(rows: Callable[..., Any], shape: Callable[..., str]) -> list[Any]:
    return [
        *rows(
            "layer_norm",
            ("x of ints", lambda m: {"x": m.f(3, 5, dtype=I64)}, T, ("x", "int64", "float32")),
            ("x of no dims", lambda m: {"x": m.f(), "weight": None, "bias": None}, V, ("x", r"\(\)", "1")),
            ("weight of another length", lambda m: {"weight": m.f(6)}, V, ("weight", r"\(6,\)", r"\(5,\)")),
            ("bias of 2 dims", lambda m: {"bias": m.f(1, 5)}, V, ("bias", shape(1, 5), shape(5))),
            ("bias of another dtype", lambda m: {"bias": m.f(5, dtype=F16)}, T, ("bias", "float16", "float32")),
            ("bias elsewhere", lambda m: {"bias": m.f(5, device="meta")}, V, ("bias", "meta")),
            ("eps negative", lambda m: {"eps": -1e-5}, V, ("eps", "-1e-05", "positive")),
        ),
        *rows(
            "layer_norm_backward",
            ("grad of another shape", lambda m: {"grad": m.f(3, 4)}, V, ("grad", shape(3, 4), shape(3, 5))),
            ("weight is a number", lambda m: {"weight": 1.0}, T, ("weight", "float", "Tensor")),
        ),
        *rows(
            "add_rms_norm",
            ("residual of another shape", lambda m: {"residual": m.f(1, 5)}, V, ("residual", shape(1, 5), shape(3, 5))),
            ("residual of another dtype", lambda m: {"residual": m.f(3, 5, dtype=F16)}, T, ("residual", "float16")),
            ("no residual", lambda m: {"residual": None}, T, ("residual", "NoneType", "Tensor")),
            ("residual elsewhere", lambda m: {"residual": m.f(3, 5, device="meta")}, V, ("residual", "meta")),
            ("weight of another length", lambda m: {"weight": m.f(6)}, V, ("weight", r"\(6,\)", r"\(5,\)")),
            ("eps NaN", lambda m: {"eps": math.nan}, V, ("eps", "nan", "finite")),
            ("weight_offset infinite", lambda m: {"weight_offset": math.inf}, V, ("weight_offset", "inf", "finite")),
        ),
        *rows(
            "add_rms_norm_backward",
            ("grad of another shape", lambda m: {"grad": m.f(3, 4)}, V, ("grad", shape(3, 4), shape(3, 5))),
            ("grad_h of another dtype", lambda m: {"grad_h": m.f(3, 5, dtype=F16)}, T, ("grad_h", "float16")),
            ("h of no dims", lambda m: {"h": m.f()}, V, ("h", r"\(\)", "1")),
            ("rstd of another shape", lambda m: {"rstd": m.f(3, 1)}, V, ("rstd", shape(3, 1), shape(3))),
        ),
    ]
