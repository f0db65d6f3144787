"""Cases of the attention probabilities: whole and by rows."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import headwise as hw
from headwise import reference as oracle
from headwise.cases import attention
from headwise.cases.row_inputs import QUICK
from headwise.testing import Arguments, Case, Maker, Outputs, Suite


def make(maker: Maker, *, rows: list[int] | None = None, **params: Any) -> Arguments:
    arguments = attention.make(maker, **params)
    del arguments["v"]
    return arguments if rows is None else {**arguments, "rows": rows}


def run(arguments: Arguments, backend: str | None = None) -> Outputs:
    return {"probs": hw.attention_probs(**arguments, backend=backend)}


def reference(arguments: Arguments) -> Outputs:
    return {"probs": oracle.attention_probs(**arguments)}


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


CASES = (
    Case("full", {"b": 2, "sq": 150, "sk": 170, "d": 32}, QUICK),
    Case("causal, grouped", {"sq": 300, "hq": 4, "hk": 2, "d": 64, "causal": True}),
    Case("rows", {"sq": 120, "d": 32, "causal": True, "rows": [0, 7, -1, 7, 119]}, QUICK),
    Case("no rows", {"sq": 20, "d": 32, "rows": []}, QUICK),
    Case("window and lengths", {"b": 3, "sq": 90, "d": 32, "window": (10, 2), "lengths": [90, 0, 40]}, QUICK),
    Case(
        "right-padded batch",
        {"b": 3, "sq": 70, "d": 32, **attention.both([70, 0, 33]), "causal": True, "sink": True},
        QUICK,
    ),
    Case(
        "q_lengths and rows",
        {"b": 2, "sq": 60, "sk": 90, "d": 32, "q_lengths": [60, 20], "rows": [0, 19, 20, -1]},
        QUICK,
    ),
    Case("kv_starts", {"b": 3, "sq": 50, "sk": 80, "d": 32, "kv_starts": [0, 33, 80], "window": (40, 0)}, QUICK),
    Case(
        "kv_starts and kv_lengths",
        {"b": 3, "sq": 50, "d": 32, "kv_starts": [7, 40, 10], "lengths": [50, 30, 45], "bias": (50,), "sink": True},
        QUICK,
    ),
    Case("mask with empty rows", {"sq": 100, "d": 32, "mask": (100, 100), "empty_rows": True, "chance": 0.1}, QUICK),
    Case(
        "all flags, rows",
        {
            "b": 2, "sq": 80, "sk": 110, "hq": 4, "hk": 2, "d": 32, "layout": "bshd", "causal": True,
            "mask": (2, 1, 80, 110), "bias": (4, 80, 1), "softcap": 10.0, "sink": True, "rows": [3, -2, 50],
        },
        QUICK,
    ),
    Case(
        "dropout",
        {"b": 2, "sq": 90, "sk": 110, "hq": 4, "hk": 2, "d": 32, "sink": True, "causal": True, **attention.dropping(0.2)},
        QUICK,
    ),
    Case(
        "dropout of rows",
        {"sq": 60, "sk": 75, "d": 32, "bias": (60, 75), "softcap": 9.0, "rows": [3, -1, 9, 3], **attention.dropping(0.4)},
        QUICK,
    ),
    Case("sink", {"sq": 60, "sk": 40, "d": 32, "sink": True, "causal": True}, QUICK),
    Case("no keys", {"sq": 5, "sk": 0, "d": 16}, QUICK),
    Case("no queries", {"sq": 0, "sk": 5, "d": 16}, QUICK),
)  # fmt: skip

SUITE = Suite(
    "attention_probs", CASES, make, run, reference, explicit=explicit, differentiable=("q", "k", "bias", "sink")
)
