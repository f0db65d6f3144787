"""Cases of softmax: row lengths around and across block sizes, empty rows, strides."""

from __future__ import annotations

import torch
from torch import Tensor

import headwise as hw
from headwise.cases.row_inputs import QUICK, rows
from headwise.reference.softmax import softmax
from headwise.testing import Arguments, Case, Maker, Outputs, Suite


def make(maker: Maker, *, shape: tuple[int, ...], empty_rows: bool = False, strided: bool = False) -> Arguments:
    x = rows(maker, shape, "strided" if strided else "contiguous", scale=3.0)
    if empty_rows:
        x[::3] = -torch.inf
        x[1, : shape[-1] // 2] = -torch.inf
    return {"x": x}


def run(arguments: Arguments, backend: str | None = None) -> Outputs:
    return {"probs": hw.softmax(**arguments, backend=backend)}


def reference(arguments: Arguments) -> Outputs:
    return {"probs": softmax(**arguments)}


def explicit(arguments: Arguments, outputs: Outputs, grads: dict[str, Tensor], backend: str | None) -> Outputs:
    return {"x": hw.softmax_backward(outputs["probs"], grads["probs"], backend=backend)}


CASES = (
    Case("rows of 1", {"shape": (5, 1)}, QUICK),
    Case("rows of 111", {"shape": (7, 111)}, QUICK),
    Case("rows of 4096", {"shape": (64, 4096)}, QUICK),
    Case("many rows of 20000", {"shape": (25, 20000)}),
    Case("rows of 50257", {"shape": (3, 50257)}),
    Case("many rows", {"shape": (4, 300, 96)}),
    Case("rows of -inf", {"shape": (10, 130), "empty_rows": True}, QUICK),
    Case("strided", {"shape": (6, 5, 77), "strided": True}, QUICK),
    Case("no rows", {"shape": (0, 16)}, QUICK),
    Case("rows of 0", {"shape": (4, 0)}, QUICK),
)

SUITE = Suite("softmax", CASES, make, run, reference, explicit=explicit, differentiable=("x",))
