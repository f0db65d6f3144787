"""RMS normalisation, written as its formula."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float = 1e-6, weight_offset: float = 0.0) -> Tensor:
    normalised = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return normalised
    return (normalised * (weight + weight_offset)).to(x.dtype)
