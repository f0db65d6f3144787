"""Loads and stores of tiles that attention kernels share, and what launchers need to know about strides."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

Strides = tuple[int, ...]


@triton.jit
def head_start(x, batch_stride, head_stride, batch, head, ALIGN: tl.constexpr):
    """Where a head of a batch entry begins; ``batch`` is int64."""
    return x + tl.multiple_of(batch * batch_stride + head.to(tl.int64) * head_stride, ALIGN)


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
def load_scores(x, batch_stride, head_stride, row_stride, key_stride, batch, head, row, key, inside):
    """A tile of a mask or bias; row and key broadcast against each other."""
    at = x + batch * batch_stride + head.to(tl.int64) * head_stride
    return tl.load(at + row.to(tl.int64) * row_stride + key.to(tl.int64) * key_stride, mask=inside, other=0)


def power_of_two(n: int) -> int:
    """The least one that is not below n."""
    return 1 << max(0, n - 1).bit_length()


def block_of(dim: int) -> int:
    """The power of two that a head dim is padded to; 16 is the least that the matrix units take."""
    return max(16, power_of_two(dim))


def aligned_elements(*tensors: Tensor | None) -> int:
    """How many elements all strides but the last are a multiple of: a power of two, up to 16 bytes of them."""
    there = [t for t in tensors if t is not None]
    return common_alignment(there[0].element_size(), *(t.stride() for t in there))


def common_alignment(element: int, *strides: Strides) -> int:
    wanted = 16 // element
    while wanted > 1 and any(s % wanted for of_tensor in strides for s in of_tensor[:-1]):
        wanted //= 2
    return wanted


def check_row_strides(tile: int, *tensors: Tensor) -> None:
    """Inside a tile rows are found with 32-bit offsets: 2³¹ elements over the tile are the longest step between tokens."""
    longest = max(x.stride(2) for x in tensors)
    if longest * tile >= 2**31:
        raise ValueError(
            f"attention: a step of {longest} elements from token to token is more than the Triton kernels reach inside a "
            f"tile of {tile}; call .contiguous(), or use backend='cpu'"
        )


def score_strides(x: Tensor) -> Strides:
    """Strides of a mask or bias ``(B, Hq, Sq, Sk)``; 0 where it is broadcast."""
    return tuple(0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True))
