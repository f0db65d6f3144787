"""More rows for the table of bad calls: dropout."""

from __future__ import annotations

import math

from bad_calls import F32, I32, I64, T, V, rows, shape

_SEED = {"dropout": 0.5}

DROPOUT = [
    *rows(
        "attention",
        ("dropout 1", lambda m: {"dropout": 1.0}, V, ("dropout", "1.0", "below 1")),
        ("dropout negative", lambda m: {"dropout": -0.1}, V, ("dropout", r"-0\.1", "at least 0")),
        ("dropout above 1", lambda m: {"dropout": 2}, V, ("dropout", "2", "below 1")),
        ("dropout NaN", lambda m: {"dropout": math.nan}, V, ("dropout", "nan", "finite")),
        ("dropout is True", lambda m: {"dropout": True}, T, ("dropout", "True", "number")),
        ("dropout is False", lambda m: {"dropout": False}, T, ("dropout", "False", "number")),
        ("dropout is None", lambda m: {"dropout": None}, T, ("dropout", "None", "number")),
        ("dropout is text", lambda m: {"dropout": "0.1"}, T, ("dropout", r"0\.1", "number")),
        ("dropout is a tensor", lambda m: {"dropout": m.f(1)}, T, ("dropout", "number")),
        ("seed is a float", lambda m: {**_SEED, "dropout_seed": 1.5}, T, ("dropout_seed", r"1\.5", "whole number")),
        ("seed is True", lambda m: {**_SEED, "dropout_seed": True}, T, ("dropout_seed", "True", "whole number")),
        ("seed of 65 bits", lambda m: {**_SEED, "dropout_seed": 2**63}, V, ("dropout_seed", str(2**63), "64 bits")),
        ("seed far below 0", lambda m: {**_SEED, "dropout_seed": -(2**63) - 1}, V, ("dropout_seed", "64 bits")),
        ("seed of int32", lambda m: {**_SEED, "dropout_seed": m.i(1)}, T, ("dropout_seed", "int32", "int64")),
        ("seed of floats", lambda m: {**_SEED, "dropout_seed": m.f(1, dtype=F32)}, T, ("dropout_seed", "float32")),
        (
            "two seeds",
            lambda m: {**_SEED, "dropout_seed": m.i(1, 2, dtype=I64)},
            V,
            ("dropout_seed", shape(2), "one element"),
        ),
        (
            "seed elsewhere",
            lambda m: {**_SEED, "dropout_seed": m.i(1, dtype=I64, device="meta")},
            V,
            ("dropout_seed", "meta", "device"),
        ),
    ),
    *rows(
        "attention_varlen",
        ("dropout 1", lambda m: {"dropout": 1.0}, V, ("attention_varlen", "dropout", "1.0", "below 1")),
        ("seed of int32", lambda m: {**_SEED, "dropout_seed": m.i(1, dtype=I32)}, T, ("dropout_seed", "int64")),
    ),
    *rows(
        "attention_probs",
        ("dropout 1", lambda m: {"dropout": 1.0}, V, ("attention_probs", "dropout", "1.0", "below 1")),
        ("seed is text", lambda m: {**_SEED, "dropout_seed": "7"}, T, ("dropout_seed", "7", "whole number")),
    ),
    *rows(
        "attention_backward",
        ("dropout without a seed", lambda m: {"dropout": 0.5}, V, ("dropout", r"0\.5", "dropout_seed", "forward")),
        ("seed of int32", lambda m: {**_SEED, "dropout_seed": m.i(1)}, T, ("dropout_seed", "int32", "int64")),
    ),
    *rows(
        "attention_probs_backward",
        ("dropout without a seed", lambda m: {"dropout": 0.5}, V, ("dropout_seed", "None", "forward")),
    ),
]
