"""How results lie in memory: the rules that fake kernels and launchers share.

An output has the layout of q: heads inside (a transposed view of ``(B, S, H, D)``, as models that never copy have it) or
heads outside (plain ``(B, H, S, D)``). So ``out.transpose(1, 2).reshape(B, S, H * D)`` after a model's own
``transpose(1, 2)`` stays free. Gradients of q, k and v lie heads inside, as the projections before them want it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def empty_like_heads(x: Tensor, last: int, dtype: torch.dtype | None = None) -> Tensor:
    """Uninitialised ``(B, H, S, last)`` in the layout of x ``(B, H, S, D)``, and in its dtype if no other is given."""
    return x.new_empty_strided((*x.shape[:3], last), strides_like_heads(x, last), dtype=dtype)


def strides_like_heads(x: Tensor, last: int) -> tuple[int, ...]:
    """Strides of a ``(B, H, S, last)`` in the layout of x ``(B, H, S, D)``; of a packed x ``(T, H, D)``, contiguous."""
    if x.dim() == 3:
        return x.shape[1] * last, last, 1
    _, heads, length, dim = x.shape
    if not (dim == last and x.is_contiguous()) and x.stride(1) < x.stride(2):
        return _inside(heads, length, last)
    return heads * length * last, length * last, last, 1


def empty_heads_inside(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Uninitialised, in the shape of x ``(B, H, S, D)`` and its dtype or another, stored as ``(B, S, H, D)``."""
    # Not as a view of (B, S, H, D): autograd forbids changes in place to views that an op returns.
    return x.new_empty_strided(x.shape, _inside(*x.shape[1:]), dtype=dtype)


def _inside(heads: int, length: int, last: int) -> tuple[int, int, int, int]:
    return length * heads * last, last, heads * last, 1


def four_dims(x: Tensor | None) -> Any:
    """A mask or bias with its leading dims, of size 1, written out. ``x`` is anything with a shape and `reshape`."""
    return x if x is None or len(x.shape) == 4 else x.reshape((1,) * (4 - len(x.shape)) + tuple(x.shape))


def as_integers(x: Tensor) -> Tensor:
    """The same memory as integers of the same size, for kernels that only move elements."""
    return x.view(INTEGERS[x.dtype.itemsize])


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of log-sum-exps, losses and other statistics: float32, float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32
