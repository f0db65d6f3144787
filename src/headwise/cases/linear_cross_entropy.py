"""Cases of linear_cross_entropy: odd sizes, many tiles, every option, ignored and bad targets, strides, zero sizes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import headwise as hw
from headwise.cases.row_inputs import QUICK, rows
from headwise.reference.linear_cross_entropy import linear_cross_entropy
from headwise.testing import Arguments, Case, Maker, Outputs, Suite


def make(
    maker: Maker,
    *,
    tokens: tuple[int, ...],
    width: int,
    classes: int,
    scale: float = 3.0,  # of the logits
    ignored: str = "none",  # or "some", "all"
    ignore_index: int = -100,
    outside: bool = False,
    target_dtype: torch.dtype = torch.int64,
    bias: bool = False,
    weights: str = "none",  # or "float32", "own" (of hidden's dtype), "zero", "mask" (0 and 1)
    layout: str = "contiguous",  # of hidden
    weight_layout: str = "contiguous",  # or "turned" (stored as (H, V)), "strided"
    **options: Any,
) -> Arguments:
    hidden = rows(maker, (*tokens, width), layout)
    size = scale / math.sqrt(max(width, 1))
    if weight_layout == "turned":
        weight = maker.normal(width, classes, scale=size).transpose(0, 1)
    else:
        weight = rows(maker, (classes, width), weight_layout, size)
    targets = maker.integers(0, max(classes, 1), *tokens, dtype=target_dtype)
    if ignored == "some":
        targets = targets.masked_fill(maker.coin(*tokens, chance=0.4), ignore_index)
    elif ignored == "all":
        targets = torch.full_like(targets, ignore_index)
    if outside:
        targets[1::5], targets[2::7] = -1, classes
    arguments = {"hidden": hidden, "weight": weight, "targets": targets, "ignore_index": ignore_index, **options}
    if bias:
        arguments["bias"] = maker.normal(classes)
    if weights != "none":
        token_weights = maker.normal(*tokens, dtype=None if weights == "own" else torch.float32).abs()
        if weights == "mask":
            token_weights = (token_weights > 0.5).float()
        arguments["token_weights"] = token_weights * 0 if weights == "zero" else token_weights
    return arguments


def run(arguments: Arguments, backend: str | None = None) -> Outputs:
    return _named(arguments, hw.linear_cross_entropy(**arguments, backend=backend))


def reference(arguments: Arguments) -> Outputs:
    return _named(arguments, linear_cross_entropy(**arguments))


def _named(arguments: Arguments, results: Tensor | tuple[Tensor, ...]) -> Outputs:
    asked = [name for name in ("logprobs", "entropy") if arguments.get(f"return_{name}")]
    return dict(zip(["loss", *asked], results if isinstance(results, tuple) else (results,), strict=True))


def explicit(arguments: Arguments, outputs: Outputs, grads: dict[str, Tensor], backend: str | None) -> Outputs:
    """The explicit form returns the gradient for a gradient of one at the loss: others are multiplied into the weights."""
    if len(outputs) > 1:
        return {}  # the explicit form takes no gradients of log-probabilities and entropies
    options = dict(arguments)
    grad, targets = grads["loss"].float(), arguments["targets"]
    if arguments.get("reduction") == "none":
        weights = arguments.get("token_weights")
        options["token_weights"] = grad if weights is None else grad * weights
    _, dhidden, dweight, dbias = hw.linear_cross_entropy_forward_backward(**options, backend=backend)
    factor = 1.0 if targets.dim() and grad.dim() else grad
    found = {"hidden": dhidden, "weight": dweight} | ({} if dbias is None else {"bias": dbias})
    return {name: (x * factor).to(x.dtype) for name, x in found.items()}


EVERYTHING = {
    "label_smoothing": 0.1,
    "z_loss": 1e-3,
    "softcap": 20.0,
    "ignored": "some",
    "bias": True,
    "weights": "own",
}
BOTH = {"return_logprobs": True, "return_entropy": True}
SMALL = {"tokens": (30,), "width": 24, "classes": 257}

CASES = (
    Case("plain", {"tokens": (37,), "width": 40, "classes": 300}, QUICK),
    Case("multiples of everything", {"tokens": (64,), "width": 64, "classes": 512}, QUICK),
    Case("1 class", {"tokens": (5,), "width": 8, "classes": 1}, QUICK),
    Case("1 column", {"tokens": (9,), "width": 1, "classes": 7}, QUICK),
    Case("odd sizes", {"tokens": (3, 11), "width": 23, "classes": 131}, QUICK),
    Case("50257 classes", {"tokens": (45,), "width": 33, "classes": 50257}),
    Case("many tokens", {"tokens": (3, 700), "width": 72, "classes": 130}),
    Case("many of all", {"tokens": (700,), "width": 264, "classes": 4104}),
    Case("many of all, every option", {"tokens": (520,), "width": 136, "classes": 2051, **EVERYTHING}),
    Case("sum", {**SMALL, "reduction": "sum"}, QUICK),
    Case("none", {"tokens": (4, 9), "width": 24, "classes": 257, "reduction": "none"}, QUICK),
    Case("none, many tokens", {"tokens": (900,), "width": 40, "classes": 700, "reduction": "none", "ignored": "some"}),
    Case("one token without a dim", {"tokens": (), "width": 24, "classes": 40}, QUICK),
    Case("targets in int32", {**SMALL, "target_dtype": torch.int32, "ignored": "some"}, QUICK),
    Case("some ignored", {**SMALL, "ignored": "some"}, QUICK),
    Case("some ignored, none", {**SMALL, "ignored": "some", "reduction": "none"}, QUICK),
    Case("all ignored", {**SMALL, "ignored": "all", "bias": True}, QUICK),
    Case("all ignored, none", {**SMALL, "ignored": "all", "reduction": "none", "z_loss": 0.1}, QUICK),
    Case("ignored class in range", {"tokens": (60,), "width": 16, "classes": 7, "ignore_index": 3}, QUICK),
    Case("targets outside", {**SMALL, "outside": True, "ignored": "some"}, QUICK),
    Case("targets outside, none", {**SMALL, "outside": True, "reduction": "none", **BOTH}, QUICK),
    Case("bias", {**SMALL, "bias": True}, QUICK),
    Case("label smoothing", {**SMALL, "label_smoothing": 0.1}, QUICK),
    Case("z-loss", {**SMALL, "z_loss": 1e-2}, QUICK),
    Case("softcap", {**SMALL, "softcap": 5.0}, QUICK),
    Case("softcap 30", {**SMALL, "softcap": 30.0, "scale": 20.0, "reduction": "none"}, QUICK),
    Case("every option", {**SMALL, **EVERYTHING}, QUICK),
    Case("every option, none", {**SMALL, "reduction": "none", **EVERYTHING}, QUICK),
    Case("every option and result", {**SMALL, "reduction": "none", **EVERYTHING, **BOTH}, QUICK),
    Case("token weights", {**SMALL, "weights": "float32", "ignored": "some"}, QUICK),
    Case("token weights of 0 and 1, sum", {**SMALL, "weights": "mask", "reduction": "sum"}, QUICK),
    Case("token weights, none", {**SMALL, "weights": "own", "reduction": "none"}, QUICK),
    Case("token weights of 0", {**SMALL, "weights": "zero", "bias": True}, QUICK),
    Case("log-probabilities", {**SMALL, "return_logprobs": True}, QUICK),
    Case("entropy", {**SMALL, "return_entropy": True, "ignored": "some"}, QUICK),
    Case("both, softcap", {**SMALL, **BOTH, "softcap": 5.0, "reduction": "sum"}, QUICK),
    Case("both, many of all", {"tokens": (530,), "width": 72, "classes": 1111, "weights": "float32", **BOTH}),
    Case("large logits", {**SMALL, "scale": 40.0, **BOTH}, QUICK),
    Case("every second column", {"tokens": (6, 5), "width": 24, "classes": 77, "layout": "strided"}, QUICK),
    Case("leading dims turned", {"tokens": (6, 5), "width": 24, "classes": 77, "layout": "turned"}, QUICK),
    Case("weight turned", {**SMALL, "weight_layout": "turned"}, QUICK),
    Case("every second column of weight", {**SMALL, "weight_layout": "strided", "reduction": "none"}, QUICK),
    Case("no tokens", {"tokens": (0,), "width": 16, "classes": 9, "bias": True}, QUICK),
    Case("no tokens, none", {"tokens": (3, 0), "width": 16, "classes": 9, "reduction": "none", **BOTH}, QUICK),
    Case("no columns", {"tokens": (7,), "width": 0, "classes": 9, "bias": True}, QUICK),
    Case("no classes, all ignored", {"tokens": (4,), "width": 16, "classes": 0, "ignored": "all"}, QUICK),
    Case("no classes", {"tokens": (4,), "width": 16, "classes": 0, "reduction": "none"}, QUICK),
)

SUITE = Suite(
    "linear_cross_entropy", CASES, make, run, reference, explicit=explicit, differentiable=("hidden", "weight", "bias"),
    side_outputs=("logprobs", "entropy"),
)  # fmt: skip
