"""Cases of dense attention: many tiles, every flag, every layout. The other attention tables build on its inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import headwise as hw
from headwise import reference as oracle
from headwise.cases.row_inputs import QUICK
from headwise.testing import Arguments, Case, Maker, Outputs, Suite


def heads(maker: Maker, b: int, h: int, s: int, d: int, layout: str = "bhsd") -> Tensor:
    """A normal ``(B, H, S, D)`` tensor: plain, a view of ``(B, S, H, D)``, or rows of a wider storage."""
    if layout == "bshd":
        return maker.normal(b, s, h, d).transpose(1, 2)
    if layout == "padded":
        return maker.normal(b, h, s + 3, d + 5)[:, :, 1 : s + 1, 2 : d + 2]
    return maker.normal(b, h, s, d)


def make(
    maker: Maker, *, b: int = 1, hq: int = 2, hk: int | None = None, sq: int, sk: int | None = None, d: int = 64,
    dv: int | None = None, layout: str = "bhsd", mask: tuple[int, ...] | None = None,
    bias: tuple[int, ...] | None = None, lengths: list[int] | None = None, q_lengths: list[int] | None = None,
    kv_starts: list[int] | None = None, sink: bool = False, chance: float = 0.6, empty_rows: bool = False, **flags: Any,
) -> Arguments:  # fmt: skip
    hk, sk, dv = hk or hq, sq if sk is None else sk, dv or d
    arguments: Arguments = {
        "q": heads(maker, b, hq, sq, d, layout),
        "k": heads(maker, b, hk, sk, d, layout),
        "v": heads(maker, b, hk, sk, dv, layout),
        **flags,
    }
    if mask is not None:
        arguments["mask"] = maker.coin(*mask, chance=chance)
        if empty_rows:
            arguments["mask"][..., ::5, :] = False
    if bias is not None:
        arguments["bias"] = maker.normal(*bias)
    # Padding may hold anything.
    for name, values, poisoned in (
        ("q_lengths", q_lengths, "q"), ("kv_lengths", lengths, "kv"), ("kv_starts", kv_starts, "kv")
    ):  # fmt: skip
        if values is not None:
            arguments[name] = maker.tensor(values, torch.int32)
            for x in poisoned:
                poison(arguments[x], values, before=name == "kv_starts")
    if sink:
        arguments["sink"] = maker.normal(hq)
    return arguments


def poison(x: Tensor, bounds: list[int], before: bool = False) -> None:
    """NaN in the positions of x ``(B, H, S, D)`` from each batch entry's bound on, or before it."""
    for entry, bound in zip(x, bounds, strict=True):
        entry[:, slice(bound) if before else slice(bound, None)] = torch.nan


def run(arguments: Arguments, backend: str | None = None) -> Outputs:
    out, lse = hw.attention(**arguments, return_lse=True, backend=backend)
    return {"out": out, "lse": lse}


def reference(arguments: Arguments) -> Outputs:
    out, lse = oracle.attention(**meaning(arguments))
    return {"out": out, "lse": lse}


def meaning(arguments: Arguments) -> Arguments:
    """The arguments without those that only change the order of sums."""
    return {name: value for name, value in arguments.items() if name not in ("deterministic", "num_splits")}


def explicit(arguments: Arguments, outputs: Outputs, grads: dict[str, Tensor], backend: str | None) -> Outputs:
    extra = [name for name in ("bias", "sink") if name in arguments]
    found = hw.attention_backward(
        grads["out"],
        out=outputs["out"],
        lse=outputs["lse"],
        grad_lse=grads["lse"],
        need_bias_grad="bias" in extra,
        need_sink_grad="sink" in extra,
        backend=backend,
        **arguments,
    )
    return dict(zip(("q", "k", "v", *extra), found, strict=True))


def dropping(chance: float, seed: int = 0x0123_4567_89AB_CDEF) -> dict[str, Any]:
    return {"dropout": chance, "dropout_seed": seed}


def both(lengths: list[int]) -> dict[str, Any]:
    return {"lengths": lengths, "q_lengths": lengths}


SUITE = Suite(
    op="attention",
    cases=(
        Case("full", {"sq": 640, "hq": 2}),
        Case("full, one tile", {"sq": 48, "hq": 2, "d": 32}, QUICK),
        Case("full, ragged tiles", {"sq": 201, "sk": 333, "d": 40}, QUICK),
        Case("causal", {"sq": 700, "causal": True}),
        Case("causal, small", {"sq": 150, "d": 32, "causal": True}, QUICK),
        Case("causal, 2100 tokens", {"sq": 2100, "hq": 1, "d": 32, "causal": True}),
        # A sum of thousands of products in one chain loses a digit of float32.
        Case("many keys", {"sq": 24, "sk": 4200, "hq": 1, "d": 32}),
        Case("causal, fewer queries than keys", {"sq": 100, "sk": 413, "causal": True, "d": 32}, QUICK),
        Case("causal, more queries than keys", {"sq": 200, "sk": 90, "causal": True, "d": 32}, QUICK),
        Case("window (100, 0)", {"sq": 530, "d": 32, "causal": True, "window": (100, 0)}),
        Case("window (0, 0)", {"sq": 130, "d": 32, "window": (0, 0)}, QUICK),
        Case("window (7, 3)", {"sq": 170, "d": 16, "window": (7, 3)}, QUICK),
        Case("window (None, 5)", {"sq": 170, "d": 16, "window": (None, 5)}, QUICK),
        Case("window (3, 2³¹ - 1)", {"sq": 70, "d": 16, "window": (3, 2**31 - 1)}, QUICK),
        Case("window (300, None)", {"sq": 900, "d": 16, "window": (300, None)}),
        Case("window (300, 0), 1500 tokens", {"sq": 1500, "hq": 1, "d": 32, "window": (300, 0)}),
        Case("window of fewer queries", {"sq": 65, "sk": 400, "d": 32, "causal": True, "window": (50, -1)}, QUICK),
        Case("grouped heads 4:1", {"sq": 260, "hq": 8, "hk": 2, "d": 32, "causal": True}),
        Case("grouped heads 3:1, head dim 80", {"b": 2, "sq": 140, "hq": 3, "hk": 1, "d": 80}, QUICK),
        Case("one key head", {"b": 2, "sq": 300, "hq": 4, "hk": 1, "d": 64}),
        Case("transposed view", {"b": 2, "sq": 210, "hq": 3, "d": 32, "layout": "bshd", "causal": True}, QUICK),
        Case("padded storage", {"b": 2, "sq": 133, "hq": 2, "d": 24, "layout": "padded"}, QUICK),
        Case("head dims 111 and 57", {"sq": 190, "d": 111, "dv": 57, "causal": True}, QUICK),
        Case("head dims 40 and 96", {"sq": 190, "d": 40, "dv": 96}, QUICK),
        Case("head dim 1", {"sq": 100, "d": 1}, QUICK),
        Case("head dim 192", {"sq": 260, "d": 192, "dv": 128, "causal": True}),
        Case("head dim 256", {"sq": 270, "d": 256}),
        Case("mask per query", {"sq": 300, "d": 32, "mask": (300, 300)}),
        Case("mask per head", {"b": 2, "sq": 100, "hq": 4, "hk": 2, "d": 32, "mask": (1, 4, 100, 100)}, QUICK),
        Case("mask of keys", {"b": 2, "sq": 120, "d": 32, "mask": (2, 1, 1, 120), "causal": True}, QUICK),
        Case("mask with empty rows", {"sq": 140, "d": 32, "mask": (140, 140), "empty_rows": True, "chance": 0.1}, QUICK),
        Case("sparse mask", {"sq": 600, "d": 16, "mask": (600, 600), "chance": 0.003}),
        Case("bias", {"b": 2, "sq": 150, "d": 32, "bias": (2, 2, 150, 150)}, QUICK),
        Case("bias of keys", {"b": 2, "sq": 260, "d": 32, "bias": (260,), "causal": True}),
        Case("bias per head", {"b": 2, "sq": 270, "hq": 4, "hk": 2, "d": 32, "bias": (4, 1, 270)}),
        Case("bias and mask", {"sq": 130, "d": 32, "bias": (130, 1), "mask": (130, 130)}, QUICK),
        Case("lengths", {"b": 4, "sq": 90, "sk": 170, "d": 32, "lengths": [170, 0, 33, 100], "causal": True}, QUICK),
        Case("lengths, full", {"b": 3, "sq": 300, "d": 32, "lengths": [299, 1, 150]}),
        Case("lengths and a window", {"b": 2, "sq": 40, "sk": 300, "d": 32, "lengths": [300, 77], "window": (30, 4)}, QUICK),
        # A right-padded batch: every row is that of the packed call.
        Case("right-padded batch", {"b": 4, "sq": 150, "d": 32, **both([150, 0, 33, 100]), "causal": True}, QUICK),
        Case("right-padded batch, 700 tokens", {"b": 3, "sq": 700, "d": 32, "hq": 4, "hk": 2, **both([700, 129, 401])}),
        Case("q_lengths", {"b": 3, "sq": 90, "sk": 130, "d": 32, "q_lengths": [90, 0, 41], "causal": True}, QUICK),
        Case(
            "q_lengths, kv_lengths and a window",
            {"b": 3, "sq": 90, "sk": 130, "d": 32, "q_lengths": [7, 90, 60], "lengths": [130, 70, 60], "window": (20, 4)},
            QUICK,
        ),
        Case("kv_starts", {"b": 3, "sq": 110, "d": 32, "kv_starts": [0, 37, 110], "causal": True}, QUICK),
        Case(
            "kv_starts and kv_lengths",
            {"b": 4, "sq": 60, "sk": 170, "d": 32, "kv_starts": [30, 0, 77, 120], "lengths": [170, 90, 40, 120]},
            QUICK,
        ),
        Case("left-padded batch, 600 tokens", {"b": 2, "sq": 600, "d": 32, "kv_starts": [70, 333], "window": (150, 0)}),
        Case("softcap", {"sq": 300, "d": 64, "softcap": 5.0, "scale": 0.5}),
        Case("softcap, causal, grouped", {"sq": 150, "hq": 4, "hk": 2, "d": 32, "softcap": 30.0, "causal": True}, QUICK),
        Case("softcap of large logits", {"sq": 140, "d": 32, "softcap": 2.0, "scale": 40.0}, QUICK),
        Case("sink", {"sq": 270, "hq": 4, "hk": 2, "d": 32, "sink": True, "causal": True}),
        Case("sink and empty rows", {"sq": 90, "sk": 50, "hq": 8, "hk": 4, "d": 32, "sink": True, "causal": True}, QUICK),
        Case(
            "sink and a mask with empty rows",
            {"b": 2, "sq": 100, "d": 32, "sink": True, "mask": (100, 100), "empty_rows": True, "chance": 0.1},
            QUICK,
        ),
        Case(
            "sink, padding on every side",
            {
                "b": 4, "sq": 70, "sk": 100, "d": 32, "sink": True, "q_lengths": [70, 33, 0, 20], "causal": True,
                "lengths": [100, 33, 100, 50], "kv_starts": [9, 20, 4, 60],
            },
            QUICK,
        ),
        Case("scale 1", {"sq": 200, "d": 64, "scale": 1.0}, QUICK),
        Case(
            "everything at once",
            {
                "b": 2, "sq": 140, "sk": 200, "hq": 4, "hk": 2, "d": 48, "dv": 40, "layout": "bshd", "causal": True,
                "window": (90, 10), "mask": (2, 1, 140, 200), "bias": (4, 1, 200), "lengths": [200, 151],
                "softcap": 10.0, "sink": True, "chance": 0.9,
            },
            QUICK,
        ),
        Case(
            "everything at once, padded",
            {
                "b": 3, "sq": 120, "sk": 150, "hq": 4, "hk": 2, "d": 48, "dv": 40, "layout": "bshd", "causal": True,
                "window": (60, 0), "mask": (3, 1, 120, 150), "bias": (4, 1, 150), "lengths": [150, 111, 60],
                "q_lengths": [100, 120, 90], "kv_starts": [20, 0, 50], "softcap": 10.0, "sink": True,
            },
            QUICK,
        ),
        Case("dropout", {"b": 2, "sq": 700, "d": 64, "causal": True, **dropping(0.1)}),
        Case("dropout, small", {"b": 2, "sq": 130, "sk": 201, "hq": 4, "hk": 2, "d": 32, **dropping(0.25, -3)}, QUICK),
        Case("dropout, bias, mask and sink", {
            "b": 2, "sq": 100, "sk": 75, "d": 32, "bias": (2, 100, 75), "mask": (100, 75), "sink": True, **dropping(0.5),
        }, QUICK),
        Case("dropout of padded batches", {
            "b": 3, "sq": 90, "sk": 120, "d": 32, "q_lengths": [90, 20, 55], "lengths": [101, 120, 60],
            "kv_starts": [0, 37, 9], "window": (40, 7), "softcap": 10.0, **dropping(0.3),
        }, QUICK),
        Case("dropout of nearly everything", {"sq": 150, "d": 32, "causal": True, **dropping(0.97)}, QUICK),
        Case("sums in any order", {"sq": 600, "hq": 4, "hk": 2, "causal": True, "deterministic": False}),
        Case(
            "sums in any order, bias and sink",
            {"b": 2, "sq": 130, "d": 32, "bias": (130, 130), "sink": True, "deterministic": False},
            QUICK,
        ),
        Case("no batch", {"b": 0, "sq": 8, "d": 16}, QUICK),
        Case("no queries", {"sq": 0, "sk": 8, "d": 16}, QUICK),
        Case("no keys", {"sq": 8, "sk": 0, "d": 16, "sink": True}, QUICK),
    ),
    make=make,
    run=run,
    reference=reference,
    explicit=explicit,
    differentiable=("q", "k", "v", "bias", "sink"),
    side_outputs=("lse",),
)  # fmt: skip
