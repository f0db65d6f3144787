"""A sum and its RMS normalisation, written as their formulas."""

from __future__ import annotations

from torch import Tensor

from headwise.reference.rms_norm import rms_norm


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    h = x + residual
    return rms_norm(h, weight, eps, weight_offset), h
