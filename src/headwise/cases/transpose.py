"""Cases of transpose: matrices around and across tile sizes, batches, strides."""

from __future__ import annotations

import headwise as hw
from headwise.cases.row_inputs import QUICK
from headwise.reference.transpose import transpose
from headwise.testing import Arguments, Case, Maker, Outputs, Suite


def make(maker: Maker, *, shape: tuple[int, ...], layout: str = "contiguous") -> Arguments:
    if layout == "every second column":
        return {"x": maker.normal(*shape[:-1], 2 * shape[-1])[..., ::2]}
    if layout == "turned":
        return {"x": maker.normal(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)}
    if layout == "batch turned":
        return {"x": maker.normal(shape[1], shape[0], *shape[2:]).transpose(0, 1)}
    return {"x": maker.normal(*shape)}


def run(arguments: Arguments, backend: str | None = None) -> Outputs:
    return {"y": hw.transpose(**arguments, backend=backend)}


def reference(arguments: Arguments) -> Outputs:
    return {"y": transpose(**arguments)}


CASES = (
    Case("one element", {"shape": (1, 1)}, QUICK),
    Case("one row", {"shape": (1, 77)}, QUICK),
    Case("one column", {"shape": (77, 1)}, QUICK),
    Case("odd sizes", {"shape": (33, 65)}, QUICK),
    Case("111 by 257", {"shape": (111, 257)}, QUICK),
    Case("many tiles", {"shape": (1031, 519)}),
    Case("batch of small", {"shape": (50, 7, 9)}, QUICK),
    Case("batch of large", {"shape": (2, 3, 130, 70)}, QUICK),
    Case("batch of many tiles", {"shape": (5, 300, 256)}),
    Case("every second column", {"shape": (3, 40, 35), "layout": "every second column"}, QUICK),
    Case("already turned", {"shape": (3, 80, 75), "layout": "turned"}, QUICK),
    Case("batch dims turned", {"shape": (4, 3, 80, 75), "layout": "batch turned"}, QUICK),
    Case("no rows", {"shape": (3, 0, 8)}, QUICK),
    Case("no columns", {"shape": (8, 0)}, QUICK),
    Case("no batch", {"shape": (0, 80, 90)}, QUICK),
)

SUITE = Suite("transpose", CASES, make, run, reference, differentiable=("x",))
