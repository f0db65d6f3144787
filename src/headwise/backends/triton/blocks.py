"""Loads of tiles that attention kernels share, and what the launchers need to call them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwise.backends.triton.rows import power_of_two


@triton.jit
def load_rows(base, row, stride, inside, D: tl.constexpr, BLOCK: tl.constexpr, CHECK: tl.constexpr):
    """``[rows, BLOCK]``: rows ``base + row · stride`` of D elements, zeros beyond D and, if CHECKed, where not inside."""
    d = tl.arange(0, BLOCK)
    at = base + row[:, None] * stride + d[None, :]
    if CHECK and D != BLOCK:
        return tl.load(at, mask=inside[:, None] & (d < D)[None, :], other=0.0)
    elif CHECK:
        return tl.load(at, mask=inside[:, None], other=0.0)
    elif D != BLOCK:
        return tl.load(at, mask=(d < D)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def store_rows(base, row, stride, inside, values, D: tl.constexpr, BLOCK: tl.constexpr):
    d = tl.arange(0, BLOCK)
    at = base + row[:, None] * stride + d[None, :]
    tl.store(at, values.to(base.dtype.element_ty), mask=inside[:, None] & (d < D)[None, :])


@triton.jit
def load_scores(base, row, key, row_stride, key_stride, inside):
    """A tile of a mask or a bias at these rows and keys; the two broadcast against each other."""
    return tl.load(base + row.to(tl.int64) * row_stride + key.to(tl.int64) * key_stride, mask=inside, other=0)


Strides = tuple[int, ...]
_NO_STRIDES = (0, 0, 0, 0)


def block_of(dim: int) -> int:
    """The power of two that a head dim is padded to; 16 is the least that the matrix units take."""
    return max(16, power_of_two(dim))


def aligned_elements(*tensors: Tensor | None) -> int:
    """How many elements all strides but the last are a multiple of: a power of two, up to 16 bytes of them."""
    there = [t for t in tensors if t is not None]
    return common_alignment(there[0].element_size(), *(t.stride() for t in there))


def common_alignment(element: int, *strides: tuple[int, ...]) -> int:
    wanted = 16 // element
    while wanted > 1 and any(s % wanted for of_tensor in strides for s in of_tensor[:-1]):
        wanted //= 2
    return wanted


def check_row_strides(tile: int, *strides: tuple[int, ...]) -> None:
    """Inside a tile rows are found with 32-bit offsets, which is enough for any layout but the strangest."""
    longest = max(s[2] for s in strides)
    if longest * tile >= 2**31:
        raise ValueError(
            f"attention: a step of {longest} elements from token to token is more than the Triton kernels reach inside a "
            f"tile of {tile}; call .contiguous(), or use backend='cpu'"
        )


def in_order(x: Tensor | None) -> Tensor | None:
    """A vector that the kernels index without a stride."""
    return x if x is None else x.contiguous()


def as_bytes(mask: Tensor | None) -> Tensor | None:
    """A boolean mask as numbers: Triton 3.6 cannot compile loads of single bits in nested loops for AMD."""
    return mask if mask is None else mask.view(torch.uint8)


def score_strides(x: Tensor | None) -> tuple[int, int, int, int]:
    """Strides of a mask or bias ``(B, Hq, Sq, Sk)``; 0 where it is broadcast."""
    if x is None:
        return _NO_STRIDES
    b, h, q, k = (0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return b, h, q, k
