"""RMSNorm in Triton. Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.

Forward: a program holds a few rows, or walks a long one twice. Backward: a fixed number of programs share the rows; each
keeps its part of dweight in registers, and the parts are added up in order, so the bits do not depend on timing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwise.backends.triton.rows import LONGEST_HELD_ROW, as_rows, held_tile, multiprocessors, power_of_two

_LONG_BLOCK = 8192
_LONGEST_BACKWARD_ROW = 8192  # x, the gradient, the weight and the part of dweight are all held


@triton.jit
def _gain(weight, column, inside, weight_offset, HAS_WEIGHT: tl.constexpr):
    gain = tl.full(column.shape, 1.0, tl.float32)
    if HAS_WEIGHT:
        gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) + weight_offset
    return gain


@triton.jit
def _forward_held(
    x, weight, y, rstd, rows, width, x_stride, eps, weight_offset,
    HAS_WEIGHT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    column = tl.arange(0, COLUMNS)  # [COLUMNS]
    inside = (row < rows)[:, None] & (column < width)[None, :]
    a = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(a * a, 1) / width + eps)  # [ROWS]
    tl.store(rstd + row, r, mask=row < rows)
    gain = _gain(weight, column, column < width, weight_offset, HAS_WEIGHT)
    result = a * r[:, None] * gain[None, :]
    tl.store(y + row[:, None] * width + column[None, :], result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _forward_long(
    x, weight, y, rstd, width, x_stride, eps, weight_offset, HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        a = tl.load(x + row * x_stride + start + lane, mask=start + lane < width, other=0.0).to(tl.float32)
        squares += a * a
    r = tl.rsqrt(tl.sum(squares, 0) / width + eps)
    tl.store(rstd + row, r)
    for start in range(0, width, BLOCK):
        inside = start + lane < width
        a = tl.load(x + row * x_stride + start + lane, mask=inside, other=0.0).to(tl.float32)
        gain = _gain(weight, start + lane, inside, weight_offset, HAS_WEIGHT)
        tl.store(y + row * width + start + lane, (a * r * gain).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _backward_held(
    x, grad, weight, rstd, dx, parts, rows, width, x_stride, grad_stride, weight_offset,
    HAS_WEIGHT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, COLUMNS)  # [COLUMNS]
    gain = _gain(weight, column, column < width, weight_offset, HAS_WEIGHT)
    dweight = tl.zeros([COLUMNS], tl.float32)
    for first in tl.range(program * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS).to(tl.int64)  # [ROWS]
        inside = (row < rows)[:, None] & (column < width)[None, :]
        a = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad + row[:, None] * grad_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        r = tl.load(rstd + row, mask=row < rows, other=0.0)
        normal = a * r[:, None]
        dnormal = g * gain[None, :]
        mean = tl.sum(normal * dnormal, 1) / width
        result = (dnormal - normal * mean[:, None]) * r[:, None]
        tl.store(dx + row[:, None] * width + column[None, :], result.to(dx.dtype.element_ty), mask=inside)
        if HAS_WEIGHT:
            dweight += tl.sum(g * normal, 0)
    if HAS_WEIGHT:
        tl.store(parts + program.to(tl.int64) * width + column, dweight, mask=column < width)


@triton.jit
def _backward_long(
    x, grad, weight, rstd, dx, width, x_stride, grad_stride, weight_offset,
    HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    r = tl.load(rstd + row)
    products = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        inside = start + lane < width
        a = tl.load(x + row * x_stride + start + lane, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad + row * grad_stride + start + lane, mask=inside, other=0.0).to(tl.float32)
        products += a * r * g * _gain(weight, start + lane, inside, weight_offset, HAS_WEIGHT)
    mean = tl.sum(products, 0) / width
    for start in range(0, width, BLOCK):
        inside = start + lane < width
        a = tl.load(x + row * x_stride + start + lane, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad + row * grad_stride + start + lane, mask=inside, other=0.0).to(tl.float32)
        dnormal = g * _gain(weight, start + lane, inside, weight_offset, HAS_WEIGHT)
        result = (dnormal - a * r * mean) * r
        tl.store(dx + row * width + start + lane, result.to(dx.dtype.element_ty), mask=inside)


@triton.jit
def _dweight_parts(x, grad, rstd, parts, rows, width, x_stride, grad_stride, BLOCK: tl.constexpr):
    """dweight of the long rows: a program per block of columns and every num_programs(1)-th row."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.program_id(1)
    inside = column < width
    dweight = tl.zeros([BLOCK], tl.float32)
    for i in range(part, rows, tl.num_programs(1)):
        row = tl.full((), 0, tl.int64) + i
        a = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
        dweight += g * a * tl.load(rstd + row)
    tl.store(parts + part.to(tl.int64) * width + column, dweight, mask=inside)


def _backward_tile(width: int, element: int) -> tuple[int, int, int, int]:
    """``(rows, columns, warps, programs per multiprocessor)``: 16 KB of x a step, the best of a sweep on an H200."""
    columns = max(16, power_of_two(width))
    rows = max(1, min(32, 16384 // (columns * element)))
    return rows, columns, 4 if columns < 4096 else 8, max(1, min(8, 1024 // columns))


def rms_norm_forward(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> tuple[Tensor, Tensor]:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        return y, rstd.zero_()
    flat = as_rows(x)
    rows, width = flat.shape
    gain = weight if weight is None else weight.contiguous()
    has_weight = weight is not None
    if width <= LONGEST_HELD_ROW:
        per_program, columns, warps = held_tile(width)
        _forward_held[(triton.cdiv(rows, per_program),)](
            flat, gain, y, rstd, rows, width, flat.stride(0), eps, weight_offset, has_weight, per_program, columns,
            num_warps=warps,
        )  # fmt: skip
    else:
        _forward_long[(rows,)](
            flat, gain, y, rstd, width, flat.stride(0), eps, weight_offset, has_weight, _LONG_BLOCK, num_warps=16
        )
    return y, rstd


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor | None, eps: float, weight_offset: float
) -> tuple[Tensor, Tensor | None]:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    has_weight = weight is not None
    if x.numel() == 0:
        return dx, torch.zeros_like(weight) if weight is not None else None
    if rstd is None:
        rstd = rms_norm_forward(x, None, eps, 0.0)[1]
    flat, g = as_rows(x), as_rows(grad)
    rows, width = flat.shape
    r = rstd.reshape(-1).contiguous()
    gain = weight if weight is None else weight.contiguous()
    if width <= _LONGEST_BACKWARD_ROW:
        per_step, columns, warps, per_processor = _backward_tile(width, x.element_size())
        programs = min(triton.cdiv(rows, per_step), multiprocessors(x) * per_processor)
        parts = torch.empty((programs if has_weight else 0, width), dtype=torch.float32, device=x.device)
        _backward_held[(programs,)](
            flat, g, gain, r, dx, parts, rows, width, flat.stride(0), g.stride(0), weight_offset, has_weight,
            per_step, columns, 3, num_warps=warps,
        )  # fmt: skip
    else:
        _backward_long[(rows,)](
            flat, g, gain, r, dx, width, flat.stride(0), g.stride(0), weight_offset, has_weight, _LONG_BLOCK,
            num_warps=16,
        )  # fmt: skip
        blocks = triton.cdiv(width, 1024)
        shares = min(rows, max(1, 4 * multiprocessors(x) // blocks))
        parts = torch.empty((shares if has_weight else 0, width), dtype=torch.float32, device=x.device)
        if has_weight:
            _dweight_parts[(blocks, shares)](
                flat, g, r, parts, rows, width, flat.stride(0), g.stride(0), 1024, num_warps=4
            )
    return dx, None if weight is None else parts.sum(0).to(weight.dtype)
