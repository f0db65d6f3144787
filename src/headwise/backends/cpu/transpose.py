"""Transpose on the CPU: PyTorch's tiled copy, which it has for single matrices only."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

# A matrix from this many elements on is worth a call of its own.
_LARGE = 64 * 64


def transpose_forward(x: Tensor) -> Tensor:
    y = torch.empty((*x.shape[:-2], x.shape[-1], x.shape[-2]), dtype=x.dtype)
    turned = x.transpose(-1, -2)
    if x.dim() == 2 or y.shape[-1] * y.shape[-2] < _LARGE:
        return y.copy_(turned)
    matrices = y.view(-1, *y.shape[-2:])
    for i, index in enumerate(itertools.product(*map(range, x.shape[:-2]))):
        matrices[i].copy_(turned[index])
    return y
