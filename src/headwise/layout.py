"""How results lie in memory: the rules that fake kernels and launchers share.

An output has the layout of q: heads inside (a transposed view of ``(B, S, H, D)``, as models that never copy have it) or
heads outside (plain ``(B, H, S, D)``). So ``out.transpose(1, 2).reshape(B, S, H * D)`` after a model's own
``transpose(1, 2)`` stays free. Gradients of q, k and v lie heads inside, as the projections before them want it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def empty_like_heads(x: Tensor, last: int) -> Tensor:
    """Uninitialised ``(B, H, S, last)`` in the layout of x ``(B, H, S, D)``."""
    batch, heads, length, dim = x.shape
    if dim == last and x.is_contiguous():
        return torch.empty_like(x)
    if x.stride(1) < x.stride(2):
        return _heads_inside(x, last)
    return x.new_empty((batch, heads, length, last))


def empty_heads_inside(x: Tensor) -> Tensor:
    """Uninitialised, in the shape of x ``(B, H, S, D)``, stored as ``(B, S, H, D)``."""
    return _heads_inside(x, x.shape[3])


def _heads_inside(x: Tensor, last: int) -> Tensor:
    # Not as a view of (B, S, H, last): autograd forbids changes in place to views that an op returns.
    batch, heads, length, _ = x.shape
    return x.new_empty_strided((batch, heads, length, last), (length * heads * last, last, heads * last, 1))


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Log-sum-exps and other statistics are float32, float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32
