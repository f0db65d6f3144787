"""Rotary position embedding, written as its formula."""

from __future__ import annotations

import torch
from torch import Tensor


def rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None, interleaved: bool = False) -> Tensor:
    """x ``(B, H, S, D)`` or packed ``(T, H, D)``; a token whose position is outside the tables is NaN."""
    packed = x.dim() == 3
    known, rotated = cos.shape
    if positions is None:
        positions = torch.arange(x.shape[0] if packed else x.shape[2], device=x.device)
    bad = (positions < 0) | (positions >= known)
    rows = positions.masked_fill(bad, known).long()  # a row of NaN after the last one
    heads = 1 if packed else -3  # tokens come before heads, or after them
    c, s = (torch.cat([t, t.new_full((1, rotated), torch.nan)])[rows].to(x.dtype).unsqueeze(heads) for t in (cos, sin))
    turned, rest = x[..., : 2 * rotated], x[..., 2 * rotated :]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    ya, yb = a * c - b * s, b * c + a * s
    turned = torch.stack([ya, yb], -1).flatten(-2) if interleaved else torch.cat([ya, yb], -1)
    one = torch.ones(bad.shape, dtype=x.dtype, device=x.device).masked_fill(bad, torch.nan)
    return torch.cat([turned, rest * one.unsqueeze(-1).unsqueeze(heads)], -1)
