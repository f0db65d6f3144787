"""Softmax on the CPU: PyTorch's kernel, with rows of nothing but -inf set to zero."""

from __future__ import annotations

import torch
from torch import Tensor

_LONG_ROW = 2048


def softmax_forward(x: Tensor) -> Tensor:
    if x.numel() == 0:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    probs = torch.softmax(x, -1).contiguous()
    if x.shape[-1] > _LONG_ROW and x.dtype in (torch.float32, torch.float64):
        # The kernel adds a row up in order; over a long row that costs digits. torch.sum adds pairwise.
        probs /= probs.sum(-1, keepdim=True)
    empty = x.amax(-1, keepdim=True) == -torch.inf
    if empty.any():
        probs.masked_fill_(empty, 0.0)
    return probs


def softmax_backward(probs: Tensor, grad: Tensor) -> Tensor:
    # The kernel behind torch.softmax's own backward: accumulates in float32 for the 16-bit types.
    return torch.ops.aten._softmax_backward_data(grad, probs, -1, probs.dtype).contiguous()
