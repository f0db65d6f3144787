"""Cases of the attention probabilities: whole and by rows."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import headwise as hw
from headwise.cases import attention
from headwise.reference import attention as reference_attention
from headwise.testing import Arguments, Case, Maker, Outputs, Suite

QUICK = frozenset({"quick"})


def make(maker: Maker, *, rows: list[int] | None = None, **params: Any) -> Arguments:
    arguments = attention.make(maker, **params)
    del arguments["v"]
    return arguments if rows is None else {**arguments, "rows": rows}


def run(arguments: Arguments, backend: str | None = None) -> Outputs:
    return {"probs": hw.attention_probs(**arguments, backend=backend)}


def reference(arguments: Arguments) -> Outputs:
    return {"probs": reference_attention.attention_probs(**arguments)}


def explicit(arguments: Arguments, outputs: Outputs, grads: dict[str, Tensor], backend: str | None) -> Outputs:
    extra = [name for name in ("bias", "sink") if name in arguments]
    found = hw.attention_probs_backward(
        grads["probs"],
        outputs["probs"],
        need_bias_grad="bias" in extra,
        need_sink_grad="sink" in extra,
        backend=backend,
        **arguments,
    )
    return dict(zip(("q", "k", *extra), found, strict=True))


SUITE = Suite(
    op="attention_probs",
    cases=(
        Case("full", {"b": 2, "sq": 150, "sk": 170, "d": 32}, QUICK),
        Case("causal, grouped", {"sq": 300, "hq": 4, "hk": 2, "d": 64, "causal": True}),
        Case("rows", {"sq": 120, "d": 32, "causal": True, "rows": [0, 7, -1, 7, 119]}, QUICK),
        Case("no rows", {"sq": 20, "d": 32, "rows": []}, QUICK),
        Case("window and lengths", {"b": 3, "sq": 90, "d": 32, "window": (10, 2), "lengths": [90, 0, 40]}, QUICK),
        Case("mask with empty rows", {"sq": 100, "d": 32, "mask": (100, 100), "empty_rows": True, "chance": 0.1}, QUICK),
        Case(
            "all flags, rows",
            {
                "b": 2, "sq": 80, "sk": 110, "hq": 4, "hk": 2, "d": 32, "layout": "bshd", "causal": True,
                "mask": (2, 1, 80, 110), "bias": (4, 80, 1), "softcap": 10.0, "sink": True, "rows": [3, -2, 50],
            },
            QUICK,
        ),
        Case("sink", {"sq": 60, "sk": 40, "d": 32, "sink": True, "causal": True}, QUICK),
        Case("no keys", {"sq": 5, "sk": 0, "d": 16}, QUICK),
        Case("no queries", {"sq": 0, "sk": 5, "d": 16}, QUICK),
    ),
    make=make,
    run=run,
    reference=reference,
    explicit=explicit,
    differentiable=("q", "k", "bias", "sink"),
)  # fmt: skip
