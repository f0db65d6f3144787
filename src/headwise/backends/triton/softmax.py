"""Softmax in Triton. How rows are divided among programs: row_tiling.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwise.backends.triton.blocks import power_of_two
from headwise.backends.triton.row_tiling import (
    LOWEST,
    PREFETCH_STAGES,
    Block,
    Rows,
    as_rows,
    block_columns,
    combine_softmax,
    few_rows,
    fits_one_pass,
    long_block,
    one_pass_tile,
    online_softmax,
    persistent_programs,
    prefetches,
)

if TYPE_CHECKING:
    from headwise.backends.triton.gpu import Gpu
    from headwise.ops.softmax import Softmax, SoftmaxBackward

_LONGEST_ONE_PASS_BACKWARD = 16384  # elements: two inputs are held


@triton.jit
def _softmax_of(a):
    """Of whole rows [ROWS, COLUMNS] in float32."""
    highest = tl.maximum(tl.max(a, 1), LOWEST)  # a row of -inf: weights of zero, not NaN
    weights = tl.exp(a - highest[:, None])
    total = tl.sum(weights, 1)
    return weights * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]


@triton.jit(do_not_specialize=["rows"])
def _forward_one_pass(x, y, rows, width, x_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    column = tl.arange(0, COLUMNS)  # [COLUMNS]
    inside = (row < rows)[:, None] & (column < width)[None, :]
    a = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=-float("inf")).to(tl.float32)
    tl.store(y + row[:, None] * width + column[None, :], _softmax_of(a).to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _forward_prefetch(x, y, rows, width, x_stride, COLUMNS: tl.constexpr, STAGES: tl.constexpr):
    """Persistent programs for rows of which a multiprocessor holds one: the next two are prefetched."""
    column = tl.arange(0, COLUMNS)[None, :]
    for i in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
        row = tl.full((), 0, tl.int64) + i
        a = tl.load(x + row * x_stride + column, mask=column < width, other=-float("inf")).to(tl.float32)
        tl.store(y + row * width + column, _softmax_of(a).to(y.dtype.element_ty), mask=column < width)


@triton.jit(do_not_specialize=["rows"])
def _forward_two_pass(x, y, rows, width, x_stride, LINES: tl.constexpr, LINE: tl.constexpr):
    last = tl.cdiv(width, LINES * LINE) - 1
    for i in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.full((), 0, tl.int64) + i
        maxima = tl.full([LINES], LOWEST, tl.float32)
        totals = tl.zeros([LINES], tl.float32)
        for block in tl.range(0, last, num_stages=1):
            column, inside = block_columns(block, width, LINES, LINE)
            a = tl.load(x + row * x_stride + column, inside, -float("inf"), eviction_policy="evict_last")
            maxima, totals = online_softmax(a.to(tl.float32), maxima, totals)
        column, inside = block_columns(last, width, LINES, LINE)
        held = tl.load(x + row * x_stride + column, inside, -float("inf"), eviction_policy="evict_first")
        maxima, totals = online_softmax(held.to(tl.float32), maxima, totals)
        highest, total = combine_softmax(maxima, totals)
        scale = 1.0 / tl.where(total == 0.0, 1.0, total)
        probs = tl.exp(held.to(tl.float32) - highest) * scale
        tl.store(y + row * width + column, probs.to(y.dtype.element_ty), inside, eviction_policy="evict_first")
        for back in tl.range(1, last + 1, num_stages=1):
            column, inside = block_columns(last - back, width, LINES, LINE)
            a = tl.load(x + row * x_stride + column, inside, 0.0, eviction_policy="evict_first")
            probs = tl.exp(a.to(tl.float32) - highest) * scale
            tl.store(y + row * width + column, probs.to(y.dtype.element_ty), inside, eviction_policy="evict_first")


@triton.jit
def _forward_partials(x, stats, width, x_stride, LINES: tl.constexpr, LINE: tl.constexpr):
    """Maximum and total of the weights of a split. stats: (2, rows, splits)."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column, inside = block_columns(split, width, LINES, LINE)
    a = tl.load(x + row * x_stride + column, inside, -float("inf"), eviction_policy="evict_last").to(tl.float32)
    highest = tl.maximum(tl.max(tl.max(a, 1), 0), LOWEST)
    place = row * tl.num_programs(1) + split
    tl.store(stats + place, highest)
    tl.store(stats + tl.num_programs(0) * tl.num_programs(1) + place, tl.sum(tl.sum(tl.exp(a - highest), 1), 0))


@triton.jit
def _forward_combine(x, stats, y, width, x_stride, LINES: tl.constexpr, LINE: tl.constexpr, SPLITS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column, inside = block_columns(tl.program_id(1), width, LINES, LINE)
    a = tl.load(x + row * x_stride + column, inside, 0.0, eviction_policy="evict_first").to(tl.float32)
    split, splits = tl.arange(0, SPLITS), tl.num_programs(1)
    maxima = tl.load(stats + row * splits + split, split < splits, LOWEST)
    totals = tl.load(stats + tl.num_programs(0) * splits + row * splits + split, split < splits, 0.0)
    highest, total = combine_softmax(maxima, totals)
    probs = tl.exp(a - highest) * (1.0 / tl.where(total == 0.0, 1.0, total))
    tl.store(y + row * width + column, probs.to(y.dtype.element_ty), inside, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["rows"])
def _backward_one_pass(p, g, dx, rows, width, p_stride, g_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    probs = tl.load(p + row[:, None] * p_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(g + row[:, None] * g_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    result = probs * (grad - tl.sum(probs * grad, 1)[:, None])
    tl.store(dx + row[:, None] * width + column[None, :], result.to(dx.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _backward_two_pass(p, g, dx, rows, width, p_stride, g_stride, LINES: tl.constexpr, LINE: tl.constexpr):
    last = tl.cdiv(width, LINES * LINE) - 1
    for i in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.full((), 0, tl.int64) + i
        products = tl.zeros([LINES], tl.float32)
        for block in tl.range(0, last, num_stages=1):
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
        for back in tl.range(1, last + 1, num_stages=1):
            column, inside = block_columns(last - back, width, LINES, LINE)
            probs = tl.load(p + row * p_stride + column, inside, 0.0, eviction_policy="evict_first").to(tl.float32)
            grad = tl.load(g + row * g_stride + column, inside, 0.0, eviction_policy="evict_first").to(tl.float32)
            result = (probs * (grad - delta)).to(dx.dtype.element_ty)
            tl.store(dx + row * width + column, result, inside, eviction_policy="evict_first")


@triton.jit
def _backward_partials(p, g, products, width, p_stride, g_stride, LINES: tl.constexpr, LINE: tl.constexpr):
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column, inside = block_columns(split, width, LINES, LINE)
    probs = tl.load(p + row * p_stride + column, inside, 0.0, eviction_policy="evict_last").to(tl.float32)
    grad = tl.load(g + row * g_stride + column, inside, 0.0, eviction_policy="evict_last").to(tl.float32)
    tl.store(products + row * tl.num_programs(1) + split, tl.sum(tl.sum(probs * grad, 1), 0))


@triton.jit
def _backward_combine(
    p, g, products, dx, width, p_stride, g_stride, LINES: tl.constexpr, LINE: tl.constexpr, SPLITS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column, inside = block_columns(tl.program_id(1), width, LINES, LINE)
    probs = tl.load(p + row * p_stride + column, inside, 0.0, eviction_policy="evict_first").to(tl.float32)
    grad = tl.load(g + row * g_stride + column, inside, 0.0, eviction_policy="evict_first").to(tl.float32)
    split, splits = tl.arange(0, SPLITS), tl.num_programs(1)
    delta = tl.sum(tl.load(products + row * splits + split, split < splits, 0.0), 0)
    result = (probs * (grad - delta)).to(dx.dtype.element_ty)
    tl.store(dx + row * width + column, result, inside, eviction_policy="evict_first")


def _two_pass_block(gpu: Gpu, width: int, *inputs: Rows) -> Block:
    """As much of a row at once as the registers hold: what is kept is not read again, and one step has enough loads
    under way that a pipeline of smaller ones was slower on an H200. Backward has two inputs, and waits less for exp."""
    if len(inputs) == 1:
        return long_block(gpu, 65536 // inputs[0].tensor.element_size(), 32, width, *inputs)
    return long_block(gpu, 16384, 16, width, *inputs)


def softmax_forward(gpu: Gpu, args: Softmax) -> Tensor:
    y = gpu.empty(args.x.shape, args.x.dtype)
    if y.numel() == 0:
        return y
    width = y.shape[-1]
    rows, x = y.numel() // width, as_rows(gpu, args.x)
    tensors, numbers = (x.tensor, y), (rows, width, x.stride)
    if prefetches(gpu, rows, width, x):
        constants = (power_of_two(width), PREFETCH_STAGES)
        gpu.launch(_forward_prefetch, (min(rows, gpu.multiprocessors),), tensors, numbers, constants, warps=16)
    elif fits_one_pass(width, y):
        per_program, columns, warps = one_pass_tile(gpu, width, 512)  # exp keeps more warps busy
        grid = (triton.cdiv(rows, per_program),)
        gpu.launch(_forward_one_pass, grid, tensors, numbers, (per_program, columns), warps=warps)
    elif few_rows(gpu, rows):
        block = long_block(gpu, 4096, 4, width, x)
        splits = triton.cdiv(width, block.columns)
        stats = gpu.empty((2, rows, splits), torch.float32)
        _split(gpu, (rows, splits), block, (x,), stats, y, _forward_partials, _forward_combine)
    else:
        block = _two_pass_block(gpu, width, x)
        grid = (persistent_programs(gpu, rows, width * y.element_size(), block),)
        gpu.launch(_forward_two_pass, grid, tensors, numbers, block.constants, warps=block.warps)
    return y


def softmax_backward(gpu: Gpu, args: SoftmaxBackward) -> Tensor:
    dx = gpu.empty(args.probs.shape, args.probs.dtype)
    if dx.numel() == 0:
        return dx
    width = dx.shape[-1]
    rows, p, g = dx.numel() // width, as_rows(gpu, args.probs), as_rows(gpu, args.grad)
    tensors, numbers = (p.tensor, g.tensor, dx), (rows, width, p.stride, g.stride)
    if width <= _LONGEST_ONE_PASS_BACKWARD:
        per_program, columns, warps = one_pass_tile(gpu, width)
        grid = (triton.cdiv(rows, per_program),)
        gpu.launch(_backward_one_pass, grid, tensors, numbers, (per_program, columns), warps=warps)
    elif few_rows(gpu, rows):
        block = long_block(gpu, 4096, 4, width, p, g)
        splits = triton.cdiv(width, block.columns)
        products = gpu.empty((rows, splits), torch.float32)
        _split(gpu, (rows, splits), block, (p, g), products, dx, _backward_partials, _backward_combine)
    else:
        block = _two_pass_block(gpu, width, p, g)
        grid = (persistent_programs(gpu, rows, 2 * width * dx.element_size(), block),)
        gpu.launch(_backward_two_pass, grid, tensors, numbers, block.constants, warps=block.warps)
    return dx


def _split(
    gpu: Gpu, grid: tuple[int, int], block: Block, inputs: tuple[Rows, ...], partials: Tensor, result: Tensor,
    first: Any, second: Any,
) -> None:  # fmt: skip
    """Two kernels on a grid of (rows, splits): ``first`` leaves the partials, ``second`` combines them."""
    tensors, numbers = [x.tensor for x in inputs], (result.shape[-1], *[x.stride for x in inputs])
    gpu.launch(first, grid, (*tensors, partials), numbers, block.constants, warps=block.warps)
    constants = (*block.constants, power_of_two(grid[1]))
    gpu.launch(second, grid, (*tensors, partials, result), numbers, constants, warps=block.warps)
