"""Tensors of rows in several layouts, weights for their columns, the cases of all norms, and the tag of small cases."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.testing import Case, Maker

QUICK = frozenset({"quick"})

# Of every norm: widths around and across block sizes, many rows, values of several sizes, no elements.
NORM_CASES = (
    Case("width 1", {"shape": (5, 1)}, QUICK),
    Case("width 111", {"shape": (7, 111)}, QUICK),
    Case("width 128, three dims", {"shape": (3, 5, 128)}, QUICK),
    Case("width 4096", {"shape": (33, 4096)}, QUICK),
    Case("width 50257", {"shape": (3, 50257)}),
    Case("many rows", {"shape": (4, 1500, 96)}),
    Case("many rows and wide", {"shape": (700, 2048)}),
    Case("one row", {"shape": (320,)}, QUICK),
    Case("no weight", {"shape": (9, 130), "weight": "none"}, QUICK),
    Case("large eps", {"shape": (12, 96), "eps": 0.5}, QUICK),
    Case("small values", {"shape": (12, 96), "scale": 1e-3}, QUICK),
    Case("large values", {"shape": (12, 96), "scale": 200.0}, QUICK),
    Case("every second column", {"shape": (6, 5, 77), "layout": "strided"}, QUICK),
    Case("no rows", {"shape": (0, 16)}, QUICK),
    Case("no columns", {"shape": (4, 0)}, QUICK),
)


def rows(maker: Maker, shape: tuple[int, ...], layout: str = "contiguous", scale: float = 1.0) -> Tensor:
    """A normal tensor: contiguous, "strided" (every second column), or "turned" (the first two dims exchanged)."""
    if layout == "strided":
        return maker.normal(*shape[:-1], 2 * shape[-1], scale=scale)[..., ::2]
    if layout == "turned":
        return maker.normal(shape[1], shape[0], *shape[2:], scale=scale).transpose(0, 1)
    return maker.normal(*shape, scale=scale)


def column_weight(maker: Maker, width: int, kind: str, around: float = 1.0) -> Tensor | None:
    """A factor for each column, normal around a number. kind: "as x" (its dtype), "float32", or "none"."""
    if kind == "none":
        return None
    weight = maker.normal(width, dtype=torch.float32 if kind == "float32" else None)
    return (weight * 0.5 + around).to(weight.dtype)
