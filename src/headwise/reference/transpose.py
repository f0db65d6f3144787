"""Transpose of the last two dimensions."""

from __future__ import annotations

from torch import Tensor


def transpose(x: Tensor) -> Tensor:
    return x.transpose(-1, -2).contiguous()
