"""Rows of the table of bad calls: linear_cross_entropy, whose good call has hidden (3, 8), weight (5, 8), targets (3,)."""

from __future__ import annotations

import math

from bad_calls import BF16, F16, I32, I64, Bad, T, V, rows, shape, with_values

_OPTIONS = (
    ("unknown reduction", lambda m: {"reduction": "average"}, V, ("reduction", "average", "mean")),
    ("label_smoothing above 1", lambda m: {"label_smoothing": 1.5}, V, ("label_smoothing", r"1\.5", "1")),
    ("z_loss NaN", lambda m: {"z_loss": math.nan}, V, ("z_loss", "nan", "finite")),
    ("softcap 0", lambda m: {"softcap": 0.0}, V, ("softcap", "0", "positive")),
    ("ignore_index is a float", lambda m: {"ignore_index": -1.0}, T, ("ignore_index", r"-1\.0", "whole")),
)
LINEAR: list[Bad] = [
    *rows(
        "linear_cross_entropy",
        ("hidden of ints", lambda m: {"hidden": m.f(3, 8, dtype=I32)}, T, ("hidden", "int32", "float32")),
        ("hidden of 0 dims", lambda m: {"hidden": m.f()}, V, ("hidden", r"\(\)")),
        ("hidden of another width", lambda m: {"hidden": m.f(3, 7)}, V, ("weight", shape(5, 8), shape(5, 7))),
        ("weight of one dim", lambda m: {"weight": m.f(8)}, V, ("weight", shape(8), "2 dimensions")),
        ("weight transposed", lambda m: {"weight": m.f(8, 5)}, V, ("weight", shape(8, 5), shape(8, 8))),
        ("weight of another dtype", lambda m: {"weight": m.f(5, 8, dtype=BF16)}, T, ("weight", "bfloat16", "float32")),
        ("weight elsewhere", lambda m: {"weight": m.f(5, 8, device="meta")}, V, ("weight", "meta")),
        ("targets of another shape", lambda m: {"targets": m.i(0, 1, dtype=I64)}, V, ("targets", shape(2), shape(3))),
        ("targets of floats", lambda m: {"targets": m.f(3)}, T, ("targets", "float32", "int64")),
        ("bias of another shape", lambda m: {"bias": m.f(8)}, V, ("bias", shape(8), shape(5))),
        ("bias of another dtype", lambda m: {"bias": m.f(5, dtype=F16)}, T, ("bias", "float16", "float32")),
        (
            "token_weights of another shape",
            lambda m: {"token_weights": m.f(5)},
            V,
            ("token_weights", shape(5), shape(3)),
        ),
        ("token_weights of ints", lambda m: {"token_weights": m.i(1, 1, 1)}, T, ("token_weights", "int32", "float32")),
        ("token_weights of float16", lambda m: {"token_weights": m.f(3, dtype=F16)}, T, ("token_weights", "float16")),
        ("return_logprobs is a number", lambda m: {"return_logprobs": 1}, T, ("return_logprobs", "1", "True")),
        ("return_entropy is None", lambda m: {"return_entropy": None}, T, ("return_entropy", "None", "True")),
        *_OPTIONS,
    ),
    *rows(
        "linear_cross_entropy_forward_backward",
        ("targets of another shape", lambda m: {"targets": m.i(0, dtype=I64)}, V, ("targets", shape(1), shape(3))),
        *_OPTIONS,
    ),
]
LINEAR_VALUES: list[Bad] = [
    *rows(
        "linear_cross_entropy",
        ("target past the end", with_values("targets", 0, 1, 5, dtype=I64), V, ("targets", r"\[2\]", "5")),
        ("target negative", with_values("targets", 0, -7, 1, dtype=I64), V, ("targets", r"\[1\]", "-7")),
    ),
    *rows(
        "linear_cross_entropy_forward_backward",
        ("target past the end", with_values("targets", 9, 0, 0, dtype=I64), V, ("targets", r"\[0\]", "9")),
    ),
]
