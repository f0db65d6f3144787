"""Embedding, written as indexing."""

from __future__ import annotations

import torch
from torch import Tensor


def embedding(ids: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    rows = weight.shape[0]
    ids = ids.long()
    outside = (ids < 0) | (ids >= rows)
    if rows == 0:
        return weight.new_full((*ids.shape, weight.shape[1]), torch.nan) + 0 * weight.sum()
    picked = weight[ids.masked_fill(outside, 0)]
    if padding_idx is not None:
        picked = torch.where((ids == padding_idx % rows).unsqueeze(-1), picked.detach(), picked)
    return picked.masked_fill(outside.unsqueeze(-1), torch.nan)
