"""Tensors of rows in several layouts, weights for their columns, and the tag of small cases."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.testing import Maker

QUICK = frozenset({"quick"})


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
