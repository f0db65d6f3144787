"""Layer normalisation, written as its formula."""

from __future__ import annotations

import torch
from torch import Tensor


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    deviation = x - x.mean(-1, keepdim=True)
    y = deviation * torch.rsqrt(deviation.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return y.to(x.dtype)
