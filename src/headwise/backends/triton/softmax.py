"""Softmax in Triton: one pass with the row in registers, or two passes over a long row with an online maximum.

Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwise.backends.triton.rows import LONGEST_HELD_ROW, as_rows, held_tile

_LONG_BLOCK = 8192


@triton.jit
def _forward_held(x, y, rows, width, x_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    column = tl.arange(0, COLUMNS)  # [COLUMNS]
    inside = (row < rows)[:, None] & (column < width)[None, :]
    a = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=-float("inf")).to(tl.float32)
    highest = tl.max(a, 1)
    highest = tl.where(highest == -float("inf"), 0.0, highest)  # a row of -inf: weights of zero, not NaN
    weights = tl.exp(a - highest[:, None])
    total = tl.sum(weights, 1)
    probs = weights / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(y + row[:, None] * width + column[None, :], probs.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _forward_long(x, y, width, x_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], -float("inf"), tl.float32)  # each lane keeps a maximum and a total of its own
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        inside = start + column < width
        a = tl.load(x + row * x_stride + start + column, mask=inside, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(highest, a)
        reference = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(highest - reference) + tl.exp(a - reference)
        highest = higher
    top = tl.max(highest, 0)
    top = tl.where(top == -float("inf"), 0.0, top)
    total_of_row = tl.sum(total * tl.exp(highest - top), 0)
    scale = 1.0 / tl.where(total_of_row == 0.0, 1.0, total_of_row)
    for start in range(0, width, BLOCK):
        inside = start + column < width
        a = tl.load(x + row * x_stride + start + column, mask=inside, other=-float("inf")).to(tl.float32)
        tl.store(y + row * width + start + column, (tl.exp(a - top) * scale).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _backward_held(p, g, dx, rows, width, p_stride, g_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    probs = tl.load(p + row[:, None] * p_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(g + row[:, None] * g_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    result = probs * (grad - tl.sum(probs * grad, 1)[:, None])
    tl.store(dx + row[:, None] * width + column[None, :], result.to(dx.dtype.element_ty), mask=inside)


@triton.jit
def _backward_long(p, g, dx, width, p_stride, g_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    products = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        inside = start + column < width
        probs = tl.load(p + row * p_stride + start + column, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(g + row * g_stride + start + column, mask=inside, other=0.0).to(tl.float32)
        products += probs * grad
    delta = tl.sum(products, 0)
    for start in range(0, width, BLOCK):
        inside = start + column < width
        probs = tl.load(p + row * p_stride + start + column, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(g + row * g_stride + start + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + row * width + start + column, (probs * (grad - delta)).to(dx.dtype.element_ty), mask=inside)


def softmax_forward(x: Tensor) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return y
    flat = as_rows(x)
    rows, width = flat.shape
    if width <= LONGEST_HELD_ROW:
        per_program, columns, warps = held_tile(width)
        _forward_held[(triton.cdiv(rows, per_program),)](
            flat, y, rows, width, flat.stride(0), per_program, columns, num_warps=warps
        )
    else:
        _forward_long[(rows,)](flat, y, width, flat.stride(0), _LONG_BLOCK, num_warps=16)
    return y


def softmax_backward(probs: Tensor, grad: Tensor) -> Tensor:
    dx = torch.empty(probs.shape, dtype=probs.dtype, device=probs.device)
    if probs.numel() == 0:
        return dx
    p, g = as_rows(probs), as_rows(grad)
    rows, width = p.shape
    if width <= LONGEST_HELD_ROW:
        per_program, columns, warps = held_tile(width)
        _backward_held[(triton.cdiv(rows, per_program),)](
            p, g, dx, rows, width, p.stride(0), g.stride(0), per_program, columns, num_warps=warps
        )
    else:
        _backward_long[(rows,)](p, g, dx, width, p.stride(0), g.stride(0), _LONG_BLOCK, num_warps=16)
    return dx
