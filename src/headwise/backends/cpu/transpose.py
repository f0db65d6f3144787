"""Transpose on the CPU: PyTorch's tiled copy, which it has for single matrices only."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwise.backends.cpu.memory import huge_pages

if TYPE_CHECKING:
    from headwise.ops.transpose import Transpose

_LARGE = 64 * 64  # elements from which a matrix is worth a call of its own


def transpose_forward(args: Transpose) -> Tensor:
    x = args.x
    y = huge_pages(torch.empty((*x.shape[:-2], x.shape[-1], x.shape[-2]), dtype=x.dtype))
    transposed = x.transpose(-1, -2)
    if x.dim() == 2 or y.shape[-1] * y.shape[-2] < _LARGE:
        return y.copy_(transposed)
    matrices = y.view(-1, *y.shape[-2:])
    for i, index in enumerate(itertools.product(*map(range, x.shape[:-2]))):
        matrices[i].copy_(transposed[index])
    return y
