"""Cases of packed attention: uneven, empty and single-token sequences, rows past the end."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

import headwise as hw
from headwise import reference as oracle
from headwise.cases.attention import dropping, meaning
from headwise.cases.row_inputs import QUICK
from headwise.testing import Arguments, Case, Maker, Outputs, Suite


def make(
    maker: Maker, *, q_lengths: list[int], k_lengths: list[int] | None = None, trailing: int = 0, hq: int = 2,
    hk: int | None = None, d: int = 32, dv: int | None = None, sink: bool = False, strided: bool = False, **flags: Any,
) -> Arguments:  # fmt: skip
    hk, dv, k_lengths = hk or hq, dv or d, k_lengths or q_lengths

    def packed(rows: int, heads: int, dim: int) -> Tensor:
        if strided:
            return maker.normal(heads, rows, dim + 4).transpose(0, 1)[..., :dim]
        return maker.normal(rows, heads, dim)

    used = sum(k_lengths)
    arguments: Arguments = {
        "q": packed(sum(q_lengths) + trailing, hq, d),
        "k": packed(used + trailing, hk, d),
        "v": packed(used + trailing, hk, dv),
        "cu_seqlens_q": maker.tensor(list(accumulate(q_lengths, initial=0)), torch.int32),
        "cu_seqlens_k": maker.tensor(list(accumulate(k_lengths, initial=0)), torch.int32),
        "max_seqlen_q": max(q_lengths, default=0),
        "max_seqlen_k": max(k_lengths, default=0),
        **flags,
    }
    for name in ("k", "v"):  # rows of no sequence
        arguments[name][used:] = torch.nan
    if sink:
        arguments["sink"] = maker.normal(hq)
    return arguments


def run(arguments: Arguments, backend: str | None = None) -> Outputs:
    out, lse = hw.attention_varlen(**arguments, return_lse=True, backend=backend)
    return {"out": out, "lse": lse}


def reference(arguments: Arguments) -> Outputs:
    out, lse = oracle.attention_varlen(**meaning(arguments))
    return {"out": out, "lse": lse}


def explicit(arguments: Arguments, outputs: Outputs, grads: dict[str, Tensor], backend: str | None) -> Outputs:
    with_sink = "sink" in arguments
    found = hw.attention_varlen_backward(
        grads["out"],
        out=outputs["out"],
        lse=outputs["lse"],
        grad_lse=grads["lse"],
        need_sink_grad=with_sink,
        backend=backend,
        **arguments,
    )
    return dict(zip(("q", "k", "v", "sink") if with_sink else ("q", "k", "v"), found, strict=True))


SUITE = Suite(
    op="attention_varlen",
    cases=(
        Case("uneven", {"q_lengths": [200, 3, 77, 150], "causal": True}, QUICK),
        Case("full", {"q_lengths": [300, 129, 600], "d": 64}),
        Case("empty sequences", {"q_lengths": [0, 60, 0, 0, 70, 0], "causal": True}, QUICK),
        Case("no keys for some", {"q_lengths": [20, 30, 10], "k_lengths": [40, 0, 10]}, QUICK),
        Case("no queries for some", {"q_lengths": [20, 0, 10], "k_lengths": [40, 25, 10], "causal": True}, QUICK),
        Case("fewer queries than keys", {"q_lengths": [1, 9, 33], "k_lengths": [70, 9, 150], "causal": True}, QUICK),
        Case("rows past the end", {"q_lengths": [50, 20], "trailing": 30, "causal": True}, QUICK),
        Case("window", {"q_lengths": [400, 90, 250], "window": (60, 0)}),
        Case("grouped heads", {"q_lengths": [130, 20, 300], "hq": 6, "hk": 2, "causal": True}),
        Case("softcap and sink", {"q_lengths": [130, 0, 90], "softcap": 10.0, "sink": True, "causal": True}, QUICK),
        Case(
            "sink and empty rows",
            {"q_lengths": [40, 30, 50], "k_lengths": [40, 0, 20], "trailing": 15, "sink": True, "causal": True},
            QUICK,
        ),
        Case("sums in any order", {"q_lengths": [130, 300, 20], "hq": 4, "hk": 2, "deterministic": False}),
        Case("dropout", {"q_lengths": [150, 3, 0, 77], "hq": 4, "hk": 2, "causal": True, **dropping(0.2)}, QUICK),
        Case("dropout, 700 tokens", {"q_lengths": [300, 700], "trailing": 20, "sink": True, **dropping(0.1)}),
        Case("head dims 72 and 24", {"q_lengths": [90, 100], "d": 72, "dv": 24}, QUICK),
        Case("strided", {"q_lengths": [120, 45], "strided": True, "causal": True}, QUICK),
        Case("no sequences", {"q_lengths": [], "trailing": 5}, QUICK),
        Case("nothing at all", {"q_lengths": []}, QUICK),
    ),
    make=make,
    run=run,
    reference=reference,
    explicit=explicit,
    differentiable=("q", "k", "v", "sink"),
    side_outputs=("lse",),
)
