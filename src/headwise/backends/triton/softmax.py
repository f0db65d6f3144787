"""Softmax in Triton. How rows are cut: rows.py."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwise import layout
from headwise.backends.triton.launch import Plan, launch
from headwise.backends.triton.rows import (
    LOWEST,
    STAGES_AHEAD,
    Block,
    as_rows,
    block_columns,
    empty_rows_like,
    fetches_ahead,
    few,
    held_tile,
    holds,
    join_softmax,
    long_block,
    multiprocessors,
    online_softmax,
    power_of_two,
    walkers,
)

_LONGEST_HELD_BACKWARD = 16384  # elements: two inputs are held


@triton.jit
def _softmax_of(a):
    """Of whole rows [ROWS, COLUMNS] in float32."""
    highest = tl.maximum(tl.max(a, 1), LOWEST)  # a row of -inf: weights of zero, not NaN
    weights = tl.exp(a - highest[:, None])
    total = tl.sum(weights, 1)
    return weights * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]


@triton.jit(do_not_specialize=["rows"])
def _forward_held(x, y, rows, width, x_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    column = tl.arange(0, COLUMNS)  # [COLUMNS]
    inside = (row < rows)[:, None] & (column < width)[None, :]
    a = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=-float("inf")).to(tl.float32)
    tl.store(y + row[:, None] * width + column[None, :], _softmax_of(a).to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _forward_ahead(x, y, rows, width, x_stride, COLUMNS: tl.constexpr, STAGES: tl.constexpr):
    """Rows of which a multiprocessor holds one: the next ones are on their way while it is computed."""
    column = tl.arange(0, COLUMNS)[None, :]
    for i in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
        row = tl.full((), 0, tl.int64) + i
        a = tl.load(x + row * x_stride + column, mask=column < width, other=-float("inf")).to(tl.float32)
        tl.store(y + row * width + column, _softmax_of(a).to(y.dtype.element_ty), mask=column < width)


@triton.jit(do_not_specialize=["rows"])
def _forward_walk(x, y, rows, width, x_stride, LINES: tl.constexpr, LINE: tl.constexpr, STAGES: tl.constexpr):
    last = tl.cdiv(width, LINES * LINE) - 1
    for i in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.full((), 0, tl.int64) + i
        top = tl.full([LINES], LOWEST, tl.float32)
        total = tl.zeros([LINES], tl.float32)
        for block in tl.range(0, last, num_stages=STAGES):
            column, inside = block_columns(block, width, LINES, LINE)
            a = tl.load(x + row * x_stride + column, inside, -float("inf"), eviction_policy="evict_last")
            top, total = online_softmax(a.to(tl.float32), top, total)
        column, inside = block_columns(last, width, LINES, LINE)
        held = tl.load(x + row * x_stride + column, inside, -float("inf"), eviction_policy="evict_first")
        top, total = online_softmax(held.to(tl.float32), top, total)
        highest, sum_of_row = join_softmax(top, total)
        scale = 1.0 / tl.where(sum_of_row == 0.0, 1.0, sum_of_row)
        probs = tl.exp(held.to(tl.float32) - highest) * scale
        tl.store(y + row * width + column, probs.to(y.dtype.element_ty), inside, eviction_policy="evict_first")
        for back in tl.range(1, last + 1, num_stages=STAGES):
            column, inside = block_columns(last - back, width, LINES, LINE)
            a = tl.load(x + row * x_stride + column, inside, 0.0, eviction_policy="evict_first")
            probs = tl.exp(a.to(tl.float32) - highest) * scale
            tl.store(y + row * width + column, probs.to(y.dtype.element_ty), inside, eviction_policy="evict_first")


@triton.jit
def _forward_parts(x, stats, width, x_stride, LINES: tl.constexpr, LINE: tl.constexpr):
    """The highest value of a part of a row and the total of its weights: all the highest first, then all the totals."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column, inside = block_columns(part, width, LINES, LINE)
    a = tl.load(x + row * x_stride + column, inside, -float("inf"), eviction_policy="evict_last").to(tl.float32)
    top = tl.maximum(tl.max(tl.max(a, 1), 0), LOWEST)
    place = row * tl.num_programs(1) + part
    tl.store(stats + place, top)
    tl.store(stats + tl.num_programs(0) * tl.num_programs(1) + place, tl.sum(tl.sum(tl.exp(a - top), 1), 0))


@triton.jit(do_not_specialize=["count"])
def _forward_join(x, stats, y, width, x_stride, count, LINES: tl.constexpr, LINE: tl.constexpr, PARTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column, inside = block_columns(tl.program_id(1), width, LINES, LINE)
    a = tl.load(x + row * x_stride + column, inside, 0.0, eviction_policy="evict_first").to(tl.float32)
    part = tl.arange(0, PARTS)
    top = tl.load(stats + row * count + part, part < count, LOWEST)
    totals = tl.load(stats + tl.num_programs(0) * count + row * count + part, part < count, 0.0)
    highest, total = join_softmax(top, totals)
    probs = tl.exp(a - highest) * (1.0 / tl.where(total == 0.0, 1.0, total))
    tl.store(y + row * width + column, probs.to(y.dtype.element_ty), inside, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["rows"])
def _backward_held(p, g, dx, rows, width, p_stride, g_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    probs = tl.load(p + row[:, None] * p_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(g + row[:, None] * g_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    result = probs * (grad - tl.sum(probs * grad, 1)[:, None])
    tl.store(dx + row[:, None] * width + column[None, :], result.to(dx.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _backward_walk(
    p, g, dx, rows, width, p_stride, g_stride, LINES: tl.constexpr, LINE: tl.constexpr, STAGES: tl.constexpr
):
    last = tl.cdiv(width, LINES * LINE) - 1
    for i in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.full((), 0, tl.int64) + i
        products = tl.zeros([LINES], tl.float32)
        for block in tl.range(0, last, num_stages=STAGES):
            column, inside = block_columns(block, width, LINES, LINE)
            probs = tl.load(p + row * p_stride + column, inside, 0.0, eviction_policy="evict_last").to(tl.float32)
            grad = tl.load(g + row * g_stride + column, inside, 0.0, eviction_policy="evict_last").to(tl.float32)
            products += tl.sum(probs * grad, 1)
        column, inside = block_columns(last, width, LINES, LINE)
        probs = tl.load(p + row * p_stride + column, inside, 0.0, eviction_policy="evict_first").to(tl.float32)
        grad = tl.load(g + row * g_stride + column, inside, 0.0, eviction_policy="evict_first").to(tl.float32)
        delta = tl.sum(products + tl.sum(probs * grad, 1), 0)
        result = (probs * (grad - delta)).to(dx.dtype.element_ty)
        tl.store(dx + row * width + column, result, inside, eviction_policy="evict_first")
        for back in tl.range(1, last + 1, num_stages=STAGES):
            column, inside = block_columns(last - back, width, LINES, LINE)
            probs = tl.load(p + row * p_stride + column, inside, 0.0, eviction_policy="evict_first").to(tl.float32)
            grad = tl.load(g + row * g_stride + column, inside, 0.0, eviction_policy="evict_first").to(tl.float32)
            result = (probs * (grad - delta)).to(dx.dtype.element_ty)
            tl.store(dx + row * width + column, result, inside, eviction_policy="evict_first")


@triton.jit
def _backward_parts(p, g, products, width, p_stride, g_stride, LINES: tl.constexpr, LINE: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column, inside = block_columns(part, width, LINES, LINE)
    probs = tl.load(p + row * p_stride + column, inside, 0.0, eviction_policy="evict_last").to(tl.float32)
    grad = tl.load(g + row * g_stride + column, inside, 0.0, eviction_policy="evict_last").to(tl.float32)
    tl.store(products + row * tl.num_programs(1) + part, tl.sum(tl.sum(probs * grad, 1), 0))


@triton.jit(do_not_specialize=["count"])
def _backward_join(
    p, g, products, dx, width, p_stride, g_stride, count,
    LINES: tl.constexpr, LINE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column, inside = block_columns(tl.program_id(1), width, LINES, LINE)
    probs = tl.load(p + row * p_stride + column, inside, 0.0, eviction_policy="evict_first").to(tl.float32)
    grad = tl.load(g + row * g_stride + column, inside, 0.0, eviction_policy="evict_first").to(tl.float32)
    part = tl.arange(0, PARTS)
    delta = tl.sum(tl.load(products + row * count + part, part < count, 0.0), 0)
    result = (probs * (grad - delta)).to(dx.dtype.element_ty)
    tl.store(dx + row * width + column, result, inside, eviction_policy="evict_first")


def _walk_block(width: int, *tensors: tuple[Tensor, int]) -> Block:
    """As much of a row at once as the registers hold: what is kept is not read again, and one step has enough loads
    under way that a pipeline of smaller ones was slower on an H200. Backward has two inputs, and waits less for exp."""
    if len(tensors) == 1:
        return long_block(65536 // tensors[0][0].element_size(), 32, 1, width, *tensors)
    return long_block(16384, 16, 1, width, *tensors)


def _split_block(width: int, *tensors: tuple[Tensor, int]) -> Block:
    return long_block(4096, 4, 1, width, *tensors)


def softmax_forward(x: Tensor) -> Tensor:
    return prepare_softmax_forward(x)(x)


def prepare_softmax_forward(x: Tensor) -> Callable[[Tensor], Tensor]:
    """What is left to do for calls that differ from this one in data and addresses alone, given their tensors."""
    shape, in_order = tuple(x.shape), x.is_contiguous()
    width = shape[-1]
    if x.numel() == 0 or not holds(width, x):  # how long rows are cut depends on their addresses too
        return _forward_long
    rows, stride = x.numel() // width, as_rows(x)[1]
    plan = _held_plan(rows, width, stride, multiprocessors(x) if fetches_ahead(rows, width, stride, x) else 0)
    launch = plan.bound(x.get_device(), x.dtype, x.dtype)
    make = layout.maker_of_empty(x, shape, x.dtype)

    def run(x: Tensor) -> Tensor:
        y = make()
        launch(x if in_order else as_rows(x)[0], y)
        return y

    return run


softmax_forward.prepare = prepare_softmax_forward  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=4096)
def _held_plan(rows: int, width: int, stride: int, processors: int) -> Plan:
    """``processors``: how many of them fetch rows ahead; 0 where none does."""
    if processors:
        grid = (min(rows, processors), 1, 1)
        return Plan(_forward_ahead, grid, (rows, width, stride), (power_of_two(width), STAGES_AHEAD), 16, 3)
    per_program, columns, warps = held_tile(width, 512)  # exp keeps more warps busy
    grid = (triton.cdiv(rows, per_program), 1, 1)
    return Plan(_forward_held, grid, (rows, width, stride), (per_program, columns), warps, 3)


def _forward_long(x: Tensor) -> Tensor:
    y = empty_rows_like(x)
    if x.numel() == 0:
        return y
    width = x.shape[-1]
    rows = x.numel() // width
    flat, stride = as_rows(x)
    if few(rows, x):
        lines, line, warps, _ = _split_block(width, (flat, stride))
        parts = triton.cdiv(width, lines * line)
        stats = torch.empty((2, rows, parts), dtype=torch.float32, device=x.device)
        grid2 = (rows, parts)
        launch(_forward_parts, grid2, (flat, stats), (width, stride), (lines, line), warps)
        constants = (lines, line, power_of_two(parts))
        launch(_forward_join, grid2, (flat, stats, y), (width, stride, parts), constants, warps)
    else:
        lines, line, warps, stages = block = _walk_block(width, (flat, stride))
        grid = (walkers(rows, width * x.element_size(), block, x),)
        launch(_forward_walk, grid, (flat, y), (rows, width, stride), (lines, line, stages), warps)
    return y


def softmax_backward(probs: Tensor, grad: Tensor) -> Tensor:
    dx = empty_rows_like(probs)
    if probs.numel() == 0:
        return dx
    width = probs.shape[-1]
    rows = probs.numel() // width
    (p, p_stride), (g, g_stride) = inputs = as_rows(probs), as_rows(grad)
    strides = p_stride, g_stride
    if width <= _LONGEST_HELD_BACKWARD:
        per_program, columns, warps = held_tile(width)
        grid = (triton.cdiv(rows, per_program),)
        launch(_backward_held, grid, (p, g, dx), (rows, width, *strides), (per_program, columns), warps)
    elif few(rows, probs):
        lines, line, warps, _ = _split_block(width, *inputs)
        parts = triton.cdiv(width, lines * line)
        products = torch.empty((rows, parts), dtype=torch.float32, device=p.device)
        grid2 = (rows, parts)
        launch(_backward_parts, grid2, (p, g, products), (width, *strides), (lines, line), warps)
        constants = (lines, line, power_of_two(parts))
        launch(_backward_join, grid2, (p, g, products, dx), (width, *strides, parts), constants, warps)
    else:
        lines, line, warps, stages = block = _walk_block(width, *inputs)
        grid = (walkers(rows, 2 * width * p.element_size(), block, p),)
        launch(_backward_walk, grid, (p, g, dx), (rows, width, *strides), (lines, line, stages), warps)
    return dx
