"""Cases of cross_entropy: vocabularies of odd sizes, many rows, every option, ignored and bad targets, strides."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import headwise as hw
from headwise.cases.row_inputs import QUICK, rows
from headwise.reference.cross_entropy import cross_entropy
from headwise.testing import Arguments, Case, Maker, Outputs, Suite


def make(
    maker: Maker,
    *,
    shape: tuple[int, ...],
    scale: float = 3.0,
    shift: float = 0.0,
    ignored: str = "none",  # or "some", "all"
    ignore_index: int = -100,
    poison: bool = False,  # NaN and infinities in ignored rows
    outside: bool = False,
    masked_classes: bool = False,
    target_dtype: torch.dtype = torch.int64,
    at_the_ends: bool = False,  # targets near both ends of a row
    layout: str = "contiguous",
    padding: int = 0,  # NaN between a row and the next
    **options: Any,
) -> Arguments:
    *leading, classes = shape
    logits = rows(maker, (*leading, classes + padding), layout, scale)
    if padding:
        logits[..., classes:] = torch.nan
        logits = logits[..., :classes]
    if shift:
        logits = logits + shift
    targets = maker.integers(0, max(classes, 1), *leading, dtype=target_dtype)
    if at_the_ends:
        targets[:7] = torch.tensor([0, classes - 1, 7, 8, classes - 8, classes - 9, 1])
    if ignored == "some":
        targets = targets.masked_fill(maker.coin(*leading, chance=0.4), ignore_index)
    elif ignored == "all":
        targets = torch.full_like(targets, ignore_index)
    if poison:
        logits = logits.masked_fill((targets == ignore_index).unsqueeze(-1), torch.nan)
    if masked_classes:
        logits[..., ::3] = -torch.inf
        targets = torch.where(targets % 3 == 0, (targets + 1) % classes, targets)
    if outside:
        targets[1::5], targets[2::7] = -1, classes
    return {"logits": logits, "targets": targets, "ignore_index": ignore_index, **options}


def run(arguments: Arguments, backend: str | None = None) -> Outputs:
    return {"loss": hw.cross_entropy(**arguments, backend=backend)}


def reference(arguments: Arguments) -> Outputs:
    return {"loss": cross_entropy(**arguments)}


def explicit(arguments: Arguments, outputs: Outputs, grads: dict[str, Tensor], backend: str | None) -> Outputs:
    _, dlogits = hw.cross_entropy_forward_backward(**arguments, backend=backend)
    # The explicit form returns the gradient for a gradient of one at the loss.
    return {"logits": (grads["loss"].unsqueeze(-1) * dlogits).to(dlogits.dtype)}


EVERYTHING = {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 20.0, "ignored": "some"}

CASES = (
    Case("1 class", {"shape": (5, 1)}, QUICK),
    Case("2 classes", {"shape": (9, 2)}, QUICK),
    Case("111 classes", {"shape": (7, 111)}, QUICK),
    Case("4096 classes", {"shape": (20, 4096)}, QUICK),
    Case("1029 classes", {"shape": (11, 1029), "at_the_ends": True}, QUICK),
    Case("2047 classes, every option", {"shape": (19, 2047), "at_the_ends": True, **EVERYTHING}, QUICK),
    Case("1027 classes of 1035", {"shape": (11, 1027), "at_the_ends": True, "padding": 8}, QUICK),
    Case("1027 classes of 1032", {"shape": (11, 1027), "at_the_ends": True, "padding": 5}, QUICK),
    Case("50257 classes", {"shape": (21, 50257)}),
    Case("131072 classes", {"shape": (6, 131072)}),
    Case("600000 classes", {"shape": (2, 600000)}),
    Case("many rows", {"shape": (3, 2100, 130)}),
    Case("sum", {"shape": (30, 257), "reduction": "sum"}, QUICK),
    Case("none", {"shape": (4, 9, 257), "reduction": "none"}, QUICK),
    Case("none, many rows", {"shape": (2500, 300), "reduction": "none", "ignored": "some"}),
    Case("no leading dims", {"shape": (40,)}, QUICK),
    Case("targets in int32", {"shape": (9, 130), "target_dtype": torch.int32}, QUICK),
    Case("some ignored", {"shape": (40, 130), "ignored": "some"}, QUICK),
    Case("some ignored, none", {"shape": (40, 130), "ignored": "some", "reduction": "none"}, QUICK),
    Case("all ignored", {"shape": (12, 130), "ignored": "all"}, QUICK),
    Case("all ignored, none", {"shape": (12, 130), "ignored": "all", "reduction": "none", "z_loss": 0.1}, QUICK),
    Case("NaN in ignored rows", {"shape": (40, 130), "ignored": "some", "poison": True}, QUICK),
    Case("NaN in ignored rows, every option", {"shape": (40, 130), "poison": True, **EVERYTHING}, QUICK),
    Case("ignored class in range", {"shape": (60, 7), "ignore_index": 3}, QUICK),
    Case("targets outside", {"shape": (40, 70), "outside": True, "ignored": "some"}, QUICK),
    Case("targets outside, none", {"shape": (40, 70), "outside": True, "reduction": "none"}, QUICK),
    Case("label smoothing", {"shape": (30, 257), "label_smoothing": 0.1}, QUICK),
    Case("label smoothing 1", {"shape": (30, 257), "label_smoothing": 1.0}, QUICK),
    Case("z-loss", {"shape": (30, 257), "z_loss": 1e-2}, QUICK),
    Case("softcap", {"shape": (30, 257), "softcap": 5.0}, QUICK),
    Case("softcap 30", {"shape": (30, 257), "softcap": 30.0, "scale": 20.0}, QUICK),
    Case("every option", {"shape": (30, 257), **EVERYTHING}, QUICK),
    Case("every option, none", {"shape": (30, 257), "reduction": "none", **EVERYTHING}, QUICK),
    Case("every option, 50257 classes", {"shape": (23, 50257), **EVERYTHING}),
    Case("large logits", {"shape": (30, 130), "scale": 50.0}, QUICK),
    Case("logits far from zero", {"shape": (30, 130), "shift": 100.0}, QUICK),
    Case("logits far below zero", {"shape": (30, 130), "shift": -100.0}, QUICK),
    Case("classes masked with -inf", {"shape": (30, 130), "masked_classes": True}, QUICK),
    Case("every second class", {"shape": (6, 5, 77), "layout": "strided"}, QUICK),
    Case("leading dims turned", {"shape": (6, 5, 77), "layout": "turned"}, QUICK),
    Case("leading dims turned, many rows", {"shape": (20, 31, 5000), "layout": "turned"}),
    Case("no rows", {"shape": (0, 16)}, QUICK),
    Case("no rows, none", {"shape": (3, 0, 16), "reduction": "none"}, QUICK),
    Case("no classes, all ignored", {"shape": (4, 0), "ignored": "all"}, QUICK),
    Case("no classes", {"shape": (4, 0), "reduction": "none"}, QUICK),
)

SUITE = Suite("cross_entropy", CASES, make, run, reference, explicit=explicit, differentiable=("logits",))
