"""How results lie in memory: one rule that fake kernels, launchers and gradients share.

A result has the layout of the tensor it answers: heads inside (a transposed view of ``(B, S, H, D)``, as models that
never copy have it) or heads outside (plain ``(B, H, S, D)``). So ``out.transpose(1, 2).reshape(B, S, H * D)`` after a
model's own ``transpose(1, 2)`` stays free.
"""

from __future__ import annotations

import torch
from torch import Tensor


def empty_like_heads(x: Tensor, last: int, dtype: torch.dtype | None = None) -> Tensor:
    """Uninitialised ``(B, H, S, last)`` in the layout of x ``(B, H, S, D)``."""
    batch, heads, length, _ = x.shape
    if x.stride(1) < x.stride(2):
        return x.new_empty((batch, length, heads, last), dtype=dtype).transpose(1, 2)
    return x.new_empty((batch, heads, length, last), dtype=dtype)


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Log-sum-exps and other statistics are float32, float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32
