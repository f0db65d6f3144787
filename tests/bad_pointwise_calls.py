"""Bad calls of rope and glu; what a row is, and the good calls behind them, are in `bad_calls`."""

from __future__ import annotations

from bad_calls import BF16, F16, F64, I32, T, V, rows, shape, with_values, word

POINTWISE = [
    *rows(
        "glu",
        ("gate of ints", lambda m: {"gate": m.f(3, 6, dtype=I32)}, T, ("gate", "int32", "float32")),
        ("gate is a list", lambda m: {"gate": [1.0]}, T, ("gate", "list", r"torch\.tensor\(gate\)")),
        ("gate of no dims", lambda m: {"gate": m.f(), "up": None}, V, ("gate", r"\(\)", "1")),
        ("up of another shape", lambda m: {"up": m.f(3, 5)}, V, ("up", shape(3, 5), shape(3, 6))),
        ("up that would broadcast", lambda m: {"up": m.f(6)}, V, ("up", shape(6), shape(3, 6))),
        ("up of another dtype", lambda m: {"up": m.f(3, 6, dtype=F16)}, T, ("up", "float16", "float32")),
        ("up elsewhere", lambda m: {"up": m.f(3, 6, device="meta")}, V, ("up", "meta")),
        ("up is the activation", lambda m: {"up": "silu"}, T, ("up", "str", "Tensor")),
        ("halves of an odd width", lambda m: {"gate": m.f(3, 7), "up": None}, V, ("gate", shape(3, 7), "even")),
        ("unknown activation", lambda m: {"activation": "swish"}, V, ("activation", "swish", "silu", "gelu_tanh")),
        ("activation is a function", lambda m: {"activation": abs}, V, ("activation", "abs", "silu")),
        ("activation is None", lambda m: {"activation": None}, V, ("activation", "None", "identity")),
    ),
    *rows(
        "glu_backward",
        ("grad of another shape", lambda m: {"grad": m.f(3, 5)}, V, ("grad", shape(3, 5), shape(3, 6))),
        ("grad of both halves", lambda m: {"up": None}, V, ("grad", shape(3, 6), shape(3, 3))),
        ("grad of another dtype", lambda m: {"grad": m.f(3, 6, dtype=BF16)}, T, ("grad", "bfloat16", "float32")),
        ("grad elsewhere", lambda m: {"grad": m.f(3, 6, device="meta")}, V, ("grad", "meta")),
        ("unknown activation", lambda m: {"activation": "tanh"}, V, ("activation", "tanh", "silu")),
    ),
    *rows(
        "rope",
        ("x of ints", lambda m: {"x": m.f(2, 4, 5, 8, dtype=I32)}, T, ("x", "int32", "float32")),
        ("x of 2 dims", lambda m: {"x": m.f(5, 8)}, V, ("x", shape(5, 8), r"\(B, H, S, D\)", r"\(T, H, D\)")),
        ("x is None", lambda m: {"x": None}, T, ("x", "NoneType", "Tensor")),
        ("x of three", lambda m: {"x": (m.f(5, 4, 8),) * 3}, V, ("x", "tuple of 3", "pair")),
        ("x of one in a list", lambda m: {"x": [m.f(5, 4, 8)]}, V, ("x", "list of 1", "pair")),
        (
            "k of another length",
            lambda m: {"x": (m.f(2, 4, 5, 8), m.f(2, 2, 6, 8))},
            V,
            (r"x\[1\]", shape(2, 2, 6, 8), shape(2, 2, 5, 8), "heads"),
        ),
        ("k packed", lambda m: {"x": (m.f(2, 4, 5, 8), m.f(5, 2, 8))}, V, (r"x\[1\]", shape(5, 2, 8), r"x\[0\]")),
        (
            "k of another dtype",
            lambda m: {"x": (m.f(2, 4, 5, 8), m.f(2, 2, 5, 8, dtype=F16))},
            T,
            (r"x\[1\]", "float16", "float32"),
        ),
        ("cos of 3 dims", lambda m: {"cos": m.f(1, 9, 3)}, V, ("cos", shape(1, 9, 3), "2 dimensions", r"\(P, R\)")),
        ("cos of bfloat16", lambda m: {"cos": m.f(9, 3, dtype=BF16)}, T, ("cos", "bfloat16", "float32")),
        ("sin of float64", lambda m: {"sin": m.f(9, 3, dtype=F64)}, T, ("sin", "float64", "float32")),
        ("sin of another shape", lambda m: {"sin": m.f(9, 2)}, V, ("sin", shape(9, 2), shape(9, 3), "cos")),
        ("cos elsewhere", lambda m: {"cos": m.f(9, 3, device="meta")}, V, ("cos", "meta")),
        (
            "tables of a whole head",  # each angle twice, as some models keep them
            lambda m: {"cos": m.f(9, 8), "sin": m.f(9, 8)},
            V,
            ("cos", shape(9, 8), word("16"), word("8"), "R at most 4"),
        ),
        ("cos wants a gradient", lambda m: {"cos": m.f(9, 3).requires_grad_()}, V, ("cos", "gradient", r"detach\(\)")),
        ("positions of floats", lambda m: {"positions": m.f(5)}, T, ("positions", "float32", "int32")),
        ("positions of another length", lambda m: {"positions": m.i(0, 1)}, V, ("positions", shape(2), shape(2, 5))),
        (
            "positions of one batch entry",
            lambda m: {"positions": m.i(0, 1, 2, 3, 4)[None]},
            V,
            ("positions", shape(1, 5), shape(2, 5), r"\(S,\)"),
        ),
        (
            "positions of a padded batch for packed x",
            lambda m: {"x": m.f(10, 4, 8), "positions": m.i(*range(8)).view(2, 4)},
            V,
            ("positions", shape(2, 4), shape(10), r"\(T,\)"),
        ),
        ("positions is a list", lambda m: {"positions": [0, 1]}, T, ("positions", "list", "Tensor")),
        (
            "more tokens than rows",
            lambda m: {"x": m.f(2, 4, 10, 8), "positions": None},
            V,
            ("cos", "9 rows", "10 tokens", "0 to 9", "positions"),
        ),
        ("interleaved is a number", lambda m: {"interleaved": 1}, T, ("interleaved", "1", "True")),
    ),
    *rows(
        "rope_backward",
        ("grad of 2 dims", lambda m: {"grad": m.f(5, 8)}, V, ("grad", shape(5, 8), r"\(T, H, D\)")),
        ("grad of another length", lambda m: {"grad": m.f(6, 4, 8)}, V, ("positions", shape(5), shape(6))),
        ("more tokens than rows", lambda m: {"grad": m.f(10, 4, 8), "positions": None}, V, ("cos", "10 tokens")),
        ("grad of three", lambda m: {"grad": (m.f(5, 4, 8),) * 3}, V, ("grad", "tuple of 3", "pair")),
    ),
]

POINTWISE_VALUES = [
    *rows(
        "rope",
        ("position past the end", with_values("positions", 0, 1, 9, 3, -1), V, ("positions", r"\[2\]", "9", "0 to 8")),
        ("position negative", with_values("positions", -3, 1, 2, 3, 4), V, ("positions", r"\[0\]", "-3")),
    ),
    *rows(
        "rope_backward",
        ("position past the end", with_values("positions", 0, 1, 2, 3, 99), V, ("positions", r"\[4\]", "99", "0 to 8")),
    ),
]
