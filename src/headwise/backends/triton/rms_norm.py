"""RMSNorm in Triton. Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019. How rows are cut: rows.py.

Backward, rows that are held: a fixed number of programs share the rows; each keeps its part of dweight in registers, and
the parts are added up in order, so the bits do not depend on timing. Longer rows: dweight is a sum over columns and dx
needs a sum over rows, so x and the gradient are read twice, once for each: the rows' sums first, then a program per
block of columns, which has everything for both results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwise import layout
from headwise.backends.triton.launch import Plan, launch
from headwise.backends.triton.rows import (
    Block,
    aligned_rows,
    as_rows,
    block_columns,
    empty_rows_like,
    few,
    held_tile,
    holds,
    long_block,
    multiprocessors,
    power_of_two,
    walkers,
)


@triton.jit
def _gain(weight, column, inside, weight_offset, HAS_WEIGHT: tl.constexpr):
    gain = tl.full(column.shape, 1.0, tl.float32)
    if HAS_WEIGHT:
        gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) + weight_offset
    return gain


@triton.jit(do_not_specialize=["rows"])
def _forward_held(
    x, weight, y, rstd, rows, width, x_stride, eps, weight_offset,
    HAS_WEIGHT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    column = tl.arange(0, COLUMNS)  # [COLUMNS]
    inside = (row < rows)[:, None] & (column < width)[None, :]
    a = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    gain = _gain(weight, column, column < width, weight_offset, HAS_WEIGHT)
    r = tl.rsqrt(tl.sum(a * a, 1) / width + eps)  # [ROWS]
    if rstd is not None:
        tl.store(rstd + row, r, mask=row < rows)
    result = a * r[:, None] * gain[None, :]
    tl.store(y + row[:, None] * width + column[None, :], result.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _forward_walk(
    x, weight, y, rstd, rows, width, x_stride, eps, weight_offset,
    HAS_WEIGHT: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    last = tl.cdiv(width, LINES * LINE) - 1
    for i in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.full((), 0, tl.int64) + i
        squares = tl.zeros([LINES], tl.float32)
        for block in tl.range(0, last, num_stages=STAGES):
            column, inside = block_columns(block, width, LINES, LINE)
            a = tl.load(x + row * x_stride + column, inside, 0.0, eviction_policy="evict_last").to(tl.float32)
            squares += tl.sum(a * a, 1)
        column, inside = block_columns(last, width, LINES, LINE)
        held = tl.load(x + row * x_stride + column, inside, 0.0, eviction_policy="evict_first").to(tl.float32)
        r = tl.rsqrt(tl.sum(squares + tl.sum(held * held, 1), 0) / width + eps)
        tl.store(rstd + row, r)
        # Only now: it takes as many registers as the row.
        gain = _gain(weight, column, inside, weight_offset, HAS_WEIGHT)
        result = (held * r * gain).to(y.dtype.element_ty)
        tl.store(y + row * width + column, result, inside, eviction_policy="evict_first")
        for back in tl.range(1, last + 1, num_stages=STAGES):
            column, inside = block_columns(last - back, width, LINES, LINE)
            a = tl.load(x + row * x_stride + column, inside, 0.0, eviction_policy="evict_first").to(tl.float32)
            result = (a * r * _gain(weight, column, inside, weight_offset, HAS_WEIGHT)).to(y.dtype.element_ty)
            tl.store(y + row * width + column, result, inside, eviction_policy="evict_first")


@triton.jit
def _forward_parts(x, squares, width, x_stride, LINES: tl.constexpr, LINE: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column, inside = block_columns(part, width, LINES, LINE)
    a = tl.load(x + row * x_stride + column, inside, 0.0, eviction_policy="evict_last").to(tl.float32)
    tl.store(squares + row * tl.num_programs(1) + part, tl.sum(tl.sum(a * a, 1), 0))


@triton.jit(do_not_specialize=["count"])
def _forward_join(
    x, weight, squares, y, rstd, width, x_stride, count, eps, weight_offset,
    HAS_WEIGHT: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column, inside = block_columns(tl.program_id(1), width, LINES, LINE)
    a = tl.load(x + row * x_stride + column, inside, 0.0, eviction_policy="evict_first").to(tl.float32)
    gain = _gain(weight, column, inside, weight_offset, HAS_WEIGHT)
    part = tl.arange(0, PARTS)
    r = tl.rsqrt(tl.sum(tl.load(squares + row * count + part, part < count, 0.0), 0) / width + eps)
    tl.store(rstd + row, r, mask=tl.program_id(1) == 0)
    result = (a * r * gain).to(y.dtype.element_ty)
    tl.store(y + row * width + column, result, inside, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["rows"])
def _backward_held(
    x, grad, weight, rstd, dx, parts, rows, width, x_stride, grad_stride, weight_offset,
    HAS_WEIGHT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SHARES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Of SHARES programs with the same rows each has its own columns, and reads the others' only for the sum of a row.

    They run side by side, so what one reads from memory the others find in the second-level cache.
    """
    share, program = tl.program_id(0), tl.program_id(1)
    column = share * COLUMNS + tl.arange(0, COLUMNS)  # [COLUMNS]
    gain = _gain(weight, column, column < width, weight_offset, HAS_WEIGHT)
    dweight = tl.zeros([COLUMNS], tl.float32)
    for first in tl.range(program * ROWS, rows, tl.num_programs(1) * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS).to(tl.int64)  # [ROWS]
        inside = (row < rows)[:, None] & (column < width)[None, :]
        a = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad + row[:, None] * grad_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        r = tl.load(rstd + row, mask=row < rows, other=0.0)
        normal = a * r[:, None]
        dnormal = g * gain[None, :]
        products = tl.sum(normal * dnormal, 1)
        for step in tl.static_range(1, SHARES):
            other = (share + step) % SHARES * COLUMNS + tl.arange(0, COLUMNS)
            there = (row < rows)[:, None] & (other < width)[None, :]
            b = tl.load(x + row[:, None] * x_stride + other[None, :], mask=there, other=0.0).to(tl.float32)
            h = tl.load(grad + row[:, None] * grad_stride + other[None, :], mask=there, other=0.0).to(tl.float32)
            h = h * _gain(weight, other, other < width, weight_offset, HAS_WEIGHT)[None, :]
            products += tl.sum(b * h, 1) * r
        mean = products / width
        result = (dnormal - normal * mean[:, None]) * r[:, None]
        tl.store(dx + row[:, None] * width + column[None, :], result.to(dx.dtype.element_ty), mask=inside)
        if HAS_WEIGHT:
            dweight += tl.sum(g * normal, 0)
    if HAS_WEIGHT:
        tl.store(parts + program.to(tl.int64) * width + column, dweight, mask=column < width)


@triton.jit(do_not_specialize=["sums"])
def _backward_rows(
    x, grad, weight, products, width, x_stride, grad_stride, sums, weight_offset,
    HAS_WEIGHT: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """Sums of x · grad · gain over a part of a long row; there are ``sums`` of a row."""
    program = tl.program_id(0).to(tl.int64)
    row = program // sums
    column, inside = block_columns((program % sums).to(tl.int32), width, LINES, LINE)
    a = tl.load(x + row * x_stride + column, inside, 0.0).to(tl.float32)
    g = tl.load(grad + row * grad_stride + column, inside, 0.0).to(tl.float32)
    gain = _gain(weight, column, inside, weight_offset, HAS_WEIGHT)
    tl.store(products + program, tl.sum(tl.sum(a * g * gain, 1), 0))


@triton.jit(do_not_specialize=["rows", "sums"])
def _backward_columns(
    x, grad, weight, rstd, products, dx, parts, rows, width, x_stride, grad_stride, sums, weight_offset,
    HAS_WEIGHT: tl.constexpr, SUMS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx and dweight of a block of columns, in every num_programs(1)-th group of rows."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)  # [COLUMNS]
    share = tl.program_id(1)
    gain = _gain(weight, column, column < width, weight_offset, HAS_WEIGHT)
    dweight = tl.zeros([COLUMNS], tl.float32)
    part = tl.arange(0, SUMS)  # [SUMS]
    for first in tl.range(share * ROWS, rows, tl.num_programs(1) * ROWS, num_stages=STAGES):
        # From the last row, which was read last and may still be in the second-level cache.
        row = rows - 1 - (first + tl.arange(0, ROWS).to(tl.int64))  # [ROWS]
        inside = (row >= 0)[:, None] & (column < width)[None, :]
        a = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad + row[:, None] * grad_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        r = tl.load(rstd + row, mask=row >= 0, other=0.0)
        known = (row >= 0)[:, None] & (part < sums)[None, :]
        mean = tl.sum(tl.load(products + row[:, None] * sums + part[None, :], mask=known, other=0.0), 1) * r / width
        normal = a * r[:, None]
        result = (g * gain[None, :] - normal * mean[:, None]) * r[:, None]
        tl.store(dx + row[:, None] * width + column[None, :], result.to(dx.dtype.element_ty), mask=inside)
        if HAS_WEIGHT:
            dweight += tl.sum(g * normal, 0)
    if HAS_WEIGHT:
        tl.store(parts + share.to(tl.int64) * width + column, dweight, mask=column < width)


@triton.jit(do_not_specialize=["count"])
def _add_parts(parts, dweight, count, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """dweight from the parts of it that ``count`` programs left."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, count, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < count)[:, None] & (column < width)[None, :]
        total += tl.sum(tl.load(parts + row[:, None] * width + column[None, :], mask=inside, other=0.0), 0)
    tl.store(dweight + column, total.to(dweight.dtype.element_ty), mask=column < width)


def _walk_block(width: int, *tensors: tuple[Tensor, int]) -> Block:
    """As much of a row as the registers hold; less where elements are read one by one, and each has an address."""
    elements = 65536 // tensors[0][0].element_size() if aligned_rows(width, *tensors) else 16384
    return long_block(elements, 32, 1, width, *tensors)


def _split_block(width: int, *tensors: tuple[Tensor, int]) -> Block:
    return long_block(4096, 4, 1, width, *tensors)


class _Held(NamedTuple):
    rows: int
    columns: int
    shares: int
    stages: int
    warps: int
    programs: int  # per multiprocessor


def _backward_tile(width: int, element: int) -> _Held | None:
    """16 KB of x a step, the best of a sweep on an H200; None where a row is too long to hold.

    Each step ends with a sum over the rows that crosses warps: where many short rows make a step, longer steps have fewer
    of them, and more programs instead of a deeper pipeline hide the loads.
    """
    columns = max(16, power_of_two(width))
    if columns * element > 32768:
        return None
    if columns > 8192:
        return _Held(1, 8192, 2, 3, 8, 1)
    if columns <= 256 and element == 2:
        return _Held(min(256, 16384 // columns), columns, 1, 2, 8, 4)
    rows = max(1, min(32, 16384 // (columns * element)))
    return _Held(rows, columns, 1, 3, 4 if columns < 4096 else 8, max(1, min(8, 1024 // columns)))


def _rows_block(width: int, *tensors: tuple[Tensor, int]) -> Block:
    return long_block(8192, 8, 1, width, *tensors)


def _columns_tile(element: int) -> tuple[int, int, int, int, int]:
    """``(rows, columns, stages, warps, programs per multiprocessor)`` of the second kernel for long rows."""
    return 4, 2048 // element, 4, 4, 2


def rms_norm_forward(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> tuple[Tensor, Tensor]:
    return prepare_rms_norm_forward(x, weight, eps, weight_offset)(x, weight)


def prepare_rms_norm_forward(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float
) -> Callable[..., tuple[Tensor, Tensor]]:
    return _prepare(True, x, weight, eps, weight_offset)


rms_norm_forward.prepare = prepare_rms_norm_forward  # type: ignore[attr-defined]


def rms_norm_output(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> Tensor:
    """Without rstd, where nobody will ask for a gradient."""
    return prepare_rms_norm_output(x, weight, eps, weight_offset)(x, weight)


def prepare_rms_norm_output(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float
) -> Callable[..., Tensor]:
    both = _prepare(False, x, weight, eps, weight_offset)
    return lambda x, weight: both(x, weight)[0]


rms_norm_output.prepare = prepare_rms_norm_output  # type: ignore[attr-defined]


def _prepare(
    keeps_rstd: bool, x: Tensor, weight: Tensor | None, eps: float, weight_offset: float
) -> Callable[..., tuple[Tensor, Any]]:
    """What is left to do for calls that differ from this one in data and addresses alone, given their tensors."""
    shape, in_order = tuple(x.shape), x.is_contiguous()
    width = shape[-1]
    if x.numel() == 0 or not holds(width, x):  # how long rows are cut depends on their addresses too
        return lambda x, weight: _forward_long(x, weight, eps, weight_offset)
    plan = _held_plan(x.numel() // width, width, as_rows(x)[1], eps, weight_offset, weight is not None)
    of_weight, of_rstd = None if weight is None else weight.dtype, torch.float32 if keeps_rstd else None
    launch = plan.bound(x.get_device(), x.dtype, of_weight, x.dtype, of_rstd)
    make_y, make_rstd = layout.maker_of_empty(x, shape, x.dtype), layout.maker_of_empty(x, shape[:-1], torch.float32)

    def run(x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
        y, rstd = make_y(), make_rstd() if keeps_rstd else None
        launch(x if in_order else as_rows(x)[0], weight if weight is None else weight.contiguous(), y, rstd)
        return y, rstd

    return run


@functools.lru_cache(maxsize=4096)
def _held_plan(rows: int, width: int, stride: int, eps: float, weight_offset: float, has_weight: bool) -> Plan:
    per_program, columns, warps = held_tile(width)
    grid = (triton.cdiv(rows, per_program), 1, 1)
    numbers = (rows, width, stride, eps, weight_offset)
    return Plan(_forward_held, grid, numbers, (has_weight, per_program, columns), warps, 3)


def _forward_long(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> tuple[Tensor, Tensor]:
    y = empty_rows_like(x)
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        return y, rstd.zero_()
    width = x.shape[-1]
    rows = x.numel() // width
    flat, stride = as_rows(x)
    gain = weight if weight is None else weight.contiguous()
    has_weight = weight is not None
    if few(rows, x):
        lines, line, warps, _ = _split_block(width, (flat, stride))
        parts = triton.cdiv(width, lines * line)
        squares = torch.empty((rows, parts), dtype=torch.float32, device=x.device)
        launch(_forward_parts, (rows, parts), (flat, squares), (width, stride), (lines, line), warps)
        launch(
            _forward_join, (rows, parts), (flat, gain, squares, y, rstd), (width, stride, parts, eps, weight_offset),
            (has_weight, lines, line, power_of_two(parts)), warps,
        )  # fmt: skip
    else:
        lines, line, warps, stages = block = _walk_block(width, (flat, stride))
        grid = (walkers(rows, width * x.element_size(), block, x),)
        numbers = (rows, width, stride, eps, weight_offset)
        launch(_forward_walk, grid, (flat, gain, y, rstd), numbers, (has_weight, lines, line, stages), warps)
    return y, rstd


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor | None, eps: float, weight_offset: float
) -> tuple[Tensor, Tensor | None]:
    dx = empty_rows_like(x)
    has_weight = weight is not None
    if x.numel() == 0:
        return dx, torch.zeros_like(weight) if weight is not None else None
    if rstd is None:
        rstd = rms_norm_forward(x, None, eps, 0.0)[1]
    width = x.shape[-1]
    rows = x.numel() // width
    (flat, stride), (g, grad_stride) = inputs = as_rows(x), as_rows(grad)
    r = rstd.contiguous()
    gain = weight if weight is None else weight.contiguous()
    numbers = (rows, width, stride, grad_stride)
    held = _backward_tile(width, x.element_size())
    if held is not None:
        most = max(1, multiprocessors(x) * held.programs // held.shares)
        count = min(triton.cdiv(rows, held.rows), most)
        parts = torch.empty((count if has_weight else 0, width), dtype=torch.float32, device=x.device)
        launch(
            _backward_held, (held.shares, count), (flat, g, gain, r, dx, parts), (*numbers, weight_offset),
            (has_weight, held.rows, held.columns, held.shares, held.stages), held.warps,
        )  # fmt: skip
    else:
        lines, line, warps, _ = _rows_block(width, *inputs)
        sums = triton.cdiv(width, lines * line)
        products = torch.empty((rows, sums), dtype=torch.float32, device=x.device)
        launch(
            _backward_rows, (rows * sums,), (flat, g, gain, products),
            (width, stride, grad_stride, sums, weight_offset), (has_weight, lines, line), warps,
        )  # fmt: skip
        per_step, columns, stages, warps, per_processor = _columns_tile(x.element_size())
        blocks = triton.cdiv(width, columns)
        most = max(1, multiprocessors(x) * per_processor // blocks)
        count = min(triton.cdiv(rows, per_step), most)
        parts = torch.empty((count if has_weight else 0, width), dtype=torch.float32, device=x.device)
        launch(
            _backward_columns, (blocks, count), (flat, g, gain, r, products, dx, parts),
            (*numbers, sums, weight_offset), (has_weight, power_of_two(sums), per_step, columns, stages), warps,
        )  # fmt: skip
    if weight is None:
        return dx, None
    dweight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    height = min(1024, power_of_two(most))  # not of count: no new kernel because of a number of rows
    across = max(8, min(64, 8192 // height))
    launch(_add_parts, (triton.cdiv(width, across),), (parts, dweight), (count, width), (height, across), 8)
    return dx, dweight
