"""The forward of every norm in Triton: of a tensor, or of the sum of two; about zero, or about the mean.

How rows are divided among programs: row_tiling.py. What a kernel is not given (None) is not compiled in.

    residual, h   the norm is of h = x + residual, rounded to their dtype, and h is stored
    CENTRE        about the mean: statistics are (mean, what its rounding left, rstd) of each row; else rstd alone

Variance: deviations are taken from a mean that was computed before, never as a difference of two means of squares. In a
row that a program holds, that is the mean of the row; in a longer one each line begins with the mean of its first block,
which costs no digits that the spread of the line does not give back. What rounding left of the mean is subtracted as well:
in a row of equal numbers it would be all that is seen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwise.backends.norm import Norm
from headwise.backends.triton.blocks import power_of_two
from headwise.backends.triton.row_tiling import (
    Block,
    Rows,
    aligned_rows,
    as_rows,
    block_columns,
    few_rows,
    fits_one_pass,
    long_block,
    most_warps,
    one_pass_tile,
    persistent_programs,
)

if TYPE_CHECKING:
    from headwise.backends.triton.gpu import Gpu


@triton.jit
def gain_of(weight, column, inside, weight_offset):
    gain = tl.full(column.shape, 1.0, tl.float32)
    if weight is not None:
        gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) + weight_offset
    return gain


@triton.jit
def _plus_bias(result, bias, column, inside):
    if bias is not None:
        result += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    return result


@triton.jit
def _load(
    x, residual, h, row, column, inside, width, x_stride, residual_stride, AGAIN: tl.constexpr, ONCE: tl.constexpr
):
    """Elements of x; or of h = x + residual, which is stored. AGAIN, ONCE: eviction policies, by what is read again."""
    if residual is None:
        return tl.load(x + row * x_stride + column, inside, 0.0, eviction_policy=AGAIN).to(tl.float32)
    else:
        a = tl.load(x + row * x_stride + column, inside, 0.0, eviction_policy=ONCE).to(tl.float32)
        b = tl.load(residual + row * residual_stride + column, inside, 0.0, eviction_policy=ONCE).to(tl.float32)
        rounded = (a + b).to(h.dtype.element_ty)
        tl.store(h + row * width + column, rounded, inside, eviction_policy=AGAIN)
        return rounded.to(tl.float32)


@triton.jit
def _moments(mean, rest, squares, count, width):
    """Of a row, from those of its parts [PARTS]: its mean as the sum of two numbers, and its squared deviations.

    mean, rest, squares, count: of each part its mean as the sum of two numbers, the sum of squared deviations from it, its
    number of elements.
    """
    pivot = tl.sum((mean + rest) * count, 0) / width
    deviation = mean - pivot + rest
    sums = tl.sum(deviation * count, 0)
    squares = tl.sum(squares + deviation * deviation * count, 0)
    rest = sums / width
    return pivot, rest, squares - rest * sums


@triton.jit
def _line_moments(pivot, sums, squares, count):
    """Of lines, the mean and the rest of it and squared deviations, from sums of deviations from a pivot and of squares."""
    rest = sums / tl.maximum(count, 1.0)
    return pivot, rest, tl.maximum(squares - rest * sums, 0.0)


@triton.jit
def _rstd(squares, width, eps):
    return tl.rsqrt(tl.maximum(squares, 0.0) / width + eps)


@triton.jit
def _store_statistics(statistics, row, mean, rest, rstd, mask, CENTRE: tl.constexpr):
    if CENTRE:
        tl.store(statistics + row * 3, mean, mask=mask)
        tl.store(statistics + row * 3 + 1, rest, mask=mask)
        tl.store(statistics + row * 3 + 2, rstd, mask=mask)
    else:
        tl.store(statistics + row, rstd, mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _forward_one_pass(
    x, residual, weight, bias, y, h, statistics, rows, width, x_stride, residual_stride, eps, weight_offset,
    CENTRE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    column = tl.arange(0, COLUMNS)  # [COLUMNS]
    inside = (row < rows)[:, None] & (column < width)[None, :]
    a = _load(
        x, residual, h, row[:, None], column[None, :], inside, width, x_stride, residual_stride, "", ""
    )  # fmt: skip
    if CENTRE:
        mean = tl.sum(a, 1) / width  # [ROWS]
        a = tl.where(inside, a - mean[:, None], 0.0)
        sums, squares = tl.sum(a, 1), tl.sum(a * a, 1)
        rest = sums / width
        r = _rstd(squares - rest * sums, width, eps)
        a -= rest[:, None]
        gain = gain_of(weight, column, column < width, weight_offset)  # only now: the statistics need the registers
    else:
        gain = gain_of(weight, column, column < width, weight_offset)
        mean, rest, r = None, None, tl.rsqrt(tl.sum(a * a, 1) / width + eps)  # [ROWS]
    if statistics is not None:
        _store_statistics(statistics, row, mean, rest, r, row < rows, CENTRE)
    result = _plus_bias(a * r[:, None] * gain[None, :], bias, column[None, :], (column < width)[None, :])
    tl.store(y + row[:, None] * width + column[None, :], result.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _forward_two_pass(
    x, residual, weight, bias, y, h, statistics, rows, width, x_stride, residual_stride, eps, weight_offset,
    CENTRE: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """The first reading leaves h, and the second reads it: x and residual are read once."""
    last = tl.cdiv(width, LINES * LINE) - 1
    for i in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.full((), 0, tl.int64) + i
        squares = tl.zeros([LINES], tl.float32)
        sums, pivot = squares, squares
        for block in tl.range(0, last, num_stages=1):
            column, inside = block_columns(block, width, LINES, LINE)
            a = _load(
                x, residual, h, row, column, inside, width, x_stride, residual_stride, "evict_last", "evict_first"
            )  # fmt: skip
            if CENTRE:
                pivot = tl.where(block == 0, tl.sum(a, 1) / LINE, pivot)
                a -= pivot[:, None]
                sums += tl.sum(a, 1)
            squares += tl.sum(a * a, 1)
        column, inside = block_columns(last, width, LINES, LINE)
        held = _load(
            x, residual, h, row, column, inside, width, x_stride, residual_stride, "evict_first", "evict_first"
        )  # fmt: skip
        if residual is not None:
            tl.debug_barrier()  # other threads of this program read what this one stored
        if CENTRE:
            deviation = tl.where(inside, held - pivot[:, None], 0.0)
            count = LINE * (last + tl.sum(inside.to(tl.float32), 1))  # [LINES]
            sums, squares = sums + tl.sum(deviation, 1), squares + tl.sum(deviation * deviation, 1)
            means, rests, squares = _line_moments(pivot, sums, squares, count)
            mean, rest, squares_of_row = _moments(means, rests, squares, count, width)
            r = _rstd(squares_of_row, width, eps)
            held = held - mean - rest
        else:
            mean, rest = None, None
            r = tl.rsqrt(tl.sum(squares + tl.sum(held * held, 1), 0) / width + eps)
        if statistics is not None:
            _store_statistics(statistics, row, mean, rest, r, None, CENTRE)
        # Only now: it takes as many registers as the row.
        gain = gain_of(weight, column, inside, weight_offset)
        result = _plus_bias(held * r * gain, bias, column, inside).to(y.dtype.element_ty)
        tl.store(y + row * width + column, result, inside, eviction_policy="evict_first")
        for back in tl.range(1, last + 1, num_stages=1):
            column, inside = block_columns(last - back, width, LINES, LINE)
            at = x + row * x_stride + column if residual is None else h + row * width + column
            a = tl.load(at, inside, 0.0, eviction_policy="evict_first").to(tl.float32)
            if CENTRE:
                a = a - mean - rest
            result = a * r * gain_of(weight, column, inside, weight_offset)
            result = _plus_bias(result, bias, column, inside).to(y.dtype.element_ty)
            tl.store(y + row * width + column, result, inside, eviction_policy="evict_first")


@triton.jit
def _forward_partials(
    x, residual, h, partials, width, x_stride, residual_stride,
    CENTRE: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """partials (rows, splits): the sum of squares; about the mean (rows, splits, 3): as _moments."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column, inside = block_columns(split, width, LINES, LINE)
    a = _load(
        x, residual, h, row, column, inside, width, x_stride, residual_stride, "evict_last", "evict_first"
    )  # fmt: skip
    at = row * tl.num_programs(1) + split
    if CENTRE:
        pivot = tl.sum(a, 1) / LINE
        count = LINE * tl.sum(inside.to(tl.float32), 1)  # [LINES]
        a = tl.where(inside, a - pivot[:, None], 0.0)
        means, rests, squares = _line_moments(pivot, tl.sum(a, 1), tl.sum(a * a, 1), count)
        elements = tl.minimum(width - split * LINES * LINE, LINES * LINE)
        mean, rest, squares_of_split = _moments(means, rests, squares, count, elements)
        tl.store(partials + at * 3, mean)
        tl.store(partials + at * 3 + 1, rest)
        tl.store(partials + at * 3 + 2, squares_of_split)
    else:
        tl.store(partials + at, tl.sum(tl.sum(a * a, 1), 0))


@triton.jit
def _forward_combine(
    x, weight, bias, partials, y, statistics, width, x_stride, eps, weight_offset,
    CENTRE: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column, inside = block_columns(tl.program_id(1), width, LINES, LINE)
    a = tl.load(x + row * x_stride + column, inside, 0.0, eviction_policy="evict_first").to(tl.float32)
    gain = gain_of(weight, column, inside, weight_offset)
    split, splits = tl.arange(0, SPLITS), tl.num_programs(1)
    there = split < splits
    if CENTRE:
        known = partials + (row * splits + split) * 3  # [SPLITS]
        means, rests = tl.load(known, there, 0.0), tl.load(known + 1, there, 0.0)
        squares = tl.load(known + 2, there, 0.0)
        count = tl.minimum(tl.maximum(width - split * LINES * LINE, 0), LINES * LINE).to(tl.float32)
        mean, rest, squares_of_row = _moments(means, rests, squares, count, width)
        r = _rstd(squares_of_row, width, eps)
        a = a - mean - rest
    else:
        mean, rest = None, None
        r = tl.rsqrt(tl.sum(tl.load(partials + row * splits + split, there, 0.0), 0) / width + eps)
    if statistics is not None:
        _store_statistics(statistics, row, mean, rest, r, tl.program_id(1) == 0, CENTRE)
    result = _plus_bias(a * r * gain, bias, column, inside).to(y.dtype.element_ty)
    tl.store(y + row * width + column, result, inside, eviction_policy="evict_first")


def forward(gpu: Gpu, norm: Norm[Tensor], with_statistics: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """y, h where there is a residual, and the statistics where they are wanted."""
    x, residual = norm.x, norm.residual
    y = gpu.empty(x.shape, x.dtype)
    h = None if residual is None else gpu.empty(x.shape, x.dtype)
    if x.numel() == 0:
        return y, h, gpu.zeros(norm.statistics_shape, torch.float32) if with_statistics else None
    statistics = gpu.empty(norm.statistics_shape, torch.float32) if with_statistics else None
    width, source = x.shape[-1], as_rows(gpu, x)
    added = None if residual is None else as_rows(gpu, residual)
    inputs = (source,) if added is None else (source, added)
    rows, other, other_stride = x.numel() // width, added and added.tensor, added and added.stride
    gain, shift = (None if p is None else gpu.contiguous(p) for p in (norm.weight, norm.bias))
    tensors = (source.tensor, other, gain, shift, y, h, statistics)
    numbers = (rows, width, source.stride, other_stride, norm.eps, norm.weight_offset)
    if fits_one_pass(width, x):
        *tile, warps, registers = _one_pass_tile(gpu, norm.centre, width, *inputs)
        grid = (triton.cdiv(rows, tile[0]),)
        gpu.launch(
            _forward_one_pass, grid, tensors, numbers, (norm.centre, *tile), warps=warps, registers=registers
        )  # fmt: skip
    elif few_rows(gpu, rows):
        block = long_block(gpu, 4096, 4, width, *inputs)
        splits = triton.cdiv(width, block.columns)
        partials = gpu.empty((rows, splits, 3) if norm.centre else (rows, splits), torch.float32)
        gpu.launch(
            _forward_partials, (rows, splits), (source.tensor, other, h, partials),
            (width, source.stride, other_stride), (norm.centre, *block.constants), warps=block.warps,
        )  # fmt: skip
        summed = source if h is None else Rows(h, width)
        gpu.launch(
            _forward_combine, (rows, splits), (summed.tensor, gain, shift, partials, y, statistics),
            (width, summed.stride, norm.eps, norm.weight_offset),
            (norm.centre, *block.constants, power_of_two(splits)), warps=block.warps,
        )  # fmt: skip
    else:
        block = two_pass_block(gpu, width, *inputs, centre=norm.centre)
        grid = (persistent_programs(gpu, rows, width * x.element_size(), block),)
        gpu.launch(_forward_two_pass, grid, tensors, numbers, (norm.centre, *block.constants), warps=block.warps)
    return y, h, statistics


def _one_pass_tile(gpu: Gpu, centre: bool, width: int, *inputs: Rows) -> tuple[int, int, int, int]:
    """``(rows, columns, warps, registers)`` of a program.

    About the mean three sums wait for each other: 32 elements a thread, so that few warps meet, and registers for as many
    programs as hide the waiting. An H200 holds two programs of 16384 elements with 64 registers, and one with the 81 that
    the compiler would take.
    """
    if not (centre and aligned_rows(gpu, width, *inputs)):
        return *one_pass_tile(gpu, width), 0
    columns = max(16, power_of_two(width))
    rows = max(1, 4096 // columns)
    warps = min(max(4, columns // 1024), most_warps(gpu))
    limited = rows == 1 and inputs[0].tensor.element_size() == 2 and not gpu.hip  # float32 would spill
    return rows, columns, warps, 64 if limited else 0


def two_pass_block(gpu: Gpu, width: int, *inputs: Rows, centre: bool = False) -> Block:
    """As much of a row as the registers hold; less where elements are read one by one, and each has an address."""
    element = inputs[0].tensor.element_size()
    elements = 65536 // element if aligned_rows(gpu, width, *inputs) else 16384
    if centre or (len(inputs) > 1 and element == 2):  # registers for the statistics of lines, or for what is added
        elements //= 2
    return long_block(gpu, elements, 32, width, *inputs)
