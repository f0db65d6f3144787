"""The backward of every norm in Triton, in the words of norm_forward.py.

In one pass: a fixed number of persistent programs; each keeps its partial sums of dweight and dbias in registers, and the
partial sums are added in order, so the bits do not depend on timing. Longer rows: dweight is a sum over rows and dx needs
a sum over columns, so x and the gradient are read twice: first for the sums of the rows, then by a program per block of
columns, which has everything for all results.

    added           a gradient that reaches the normalised tensor on another way; it is added before dx is rounded
    dweight, dbias  partial sums (programs, width); None where they are not wanted
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwise.backends.norm import Norm
from headwise.backends.triton.blocks import power_of_two
from headwise.backends.triton.norm_forward import forward, gain_of
from headwise.backends.triton.row_tiling import REDUCTION_BYTES, as_rows, block_columns, long_block

if TYPE_CHECKING:
    from headwise.backends.triton.gpu import Gpu


@triton.jit
def _load_statistics(statistics, row, inside, CENTRE: tl.constexpr):
    """mean, the rest of it, and rstd; the mean of a norm about zero is 0."""
    if CENTRE:
        mean, rest = tl.load(statistics + row * 3, inside, 0.0), tl.load(statistics + row * 3 + 1, inside, 0.0)
        return mean, rest, tl.load(statistics + row * 3 + 2, inside, 0.0)
    else:
        return 0.0, 0.0, tl.load(statistics + row, inside, 0.0)


@triton.jit
def _row_sums(h, normal, CENTRE: tl.constexpr):
    """Of each row: the sum of h, if the norm is about the mean, and that of h · normal."""
    if CENTRE:
        return tl.sum(h, 1), tl.sum(normal * h, 1)
    else:
        return 0.0, tl.sum(normal * h, 1)


@triton.jit(do_not_specialize=["rows"])
def _backward_one_pass(
    x, grad, added, weight, statistics, dx, dweight, dbias, rows, width, x_stride, grad_stride, added_stride,
    weight_offset, CENTRE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """SPLITS programs have the same rows; each has its own columns, and reads the others' only for the sums of a row.

    They run side by side, so what one reads from memory the others find in the L2 cache. APART: sums of dweight stay apart
    for each of ROWS until the end, and no step ends with a sum across warps.
    """
    split, program = tl.program_id(0), tl.program_id(1)
    column = split * COLUMNS + tl.arange(0, COLUMNS)  # [COLUMNS]
    gain = gain_of(weight, column, column < width, weight_offset)
    of_weight = tl.zeros([ROWS, COLUMNS] if APART else [COLUMNS], tl.float32)
    of_bias = of_weight
    for first in tl.range(program * ROWS, rows, tl.num_programs(1) * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS).to(tl.int64)  # [ROWS]
        inside = (row < rows)[:, None] & (column < width)[None, :]
        a = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad + row[:, None] * grad_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        mean, rest, r = _load_statistics(statistics, row, row < rows, CENTRE)
        if CENTRE:
            a = a - mean[:, None] - rest[:, None]
        normal = a * r[:, None]
        dnormal = g * gain[None, :]
        sums, products = _row_sums(dnormal, normal, CENTRE)
        for step in tl.static_range(1, SPLITS):
            other = (split + step) % SPLITS * COLUMNS + tl.arange(0, COLUMNS)
            there = (row < rows)[:, None] & (other < width)[None, :]
            b = tl.load(x + row[:, None] * x_stride + other[None, :], mask=there, other=0.0).to(tl.float32)
            h = tl.load(grad + row[:, None] * grad_stride + other[None, :], mask=there, other=0.0).to(tl.float32)
            h = h * gain_of(weight, other, other < width, weight_offset)[None, :]
            if CENTRE:
                b = b - mean[:, None] - rest[:, None]
            more, product = _row_sums(h, b, CENTRE)
            sums += more
            products += product * r
        result = _of_rows(dnormal, normal, sums, products / width, r, width, CENTRE)
        _store_rows(dx, added, result, row, column, inside, width, added_stride)
        of_weight, of_bias = _add_rows(of_weight, of_bias, dweight, dbias, g, normal, APART)
    if APART:
        of_weight, of_bias = tl.sum(of_weight, 0), tl.sum(of_bias, 0)
    _store_partials(dweight, dbias, program, column, width, of_weight, of_bias)


@triton.jit
def _of_rows(dnormal, normal, sums, mean_product, r, width, CENTRE: tl.constexpr):
    result = dnormal - normal * mean_product[:, None]
    if CENTRE:
        result -= (sums / width)[:, None]
    return result * r[:, None]


@triton.jit
def _store_rows(dx, added, result, row, column, inside, width, added_stride):
    if added is not None:
        result += tl.load(added + row[:, None] * added_stride + column[None, :], mask=inside, other=0.0)
    tl.store(dx + row[:, None] * width + column[None, :], result.to(dx.dtype.element_ty), mask=inside)


@triton.jit
def _add_rows(of_weight, of_bias, dweight, dbias, g, normal, APART: tl.constexpr):
    if dweight is not None:
        of_weight += g * normal if APART else tl.sum(g * normal, 0)
    if dbias is not None:
        of_bias += g if APART else tl.sum(g, 0)
    return of_weight, of_bias


@triton.jit
def _store_partials(dweight, dbias, program, column, width, of_weight, of_bias):
    if dweight is not None:
        tl.store(dweight + program.to(tl.int64) * width + column, of_weight, mask=column < width)
    if dbias is not None:
        tl.store(dbias + program.to(tl.int64) * width + column, of_bias, mask=column < width)


@triton.jit(do_not_specialize=["splits"])
def _backward_row_sums(
    x, grad, weight, statistics, products, width, x_stride, grad_stride, splits, weight_offset,
    CENTRE: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """products (rows, splits): the sum of x · grad · gain over one of the ``splits`` of a long row.

    About the mean (rows, splits, 2): the sums of grad · gain and of (x - mean) · grad · gain.
    """
    program = tl.program_id(0).to(tl.int64)
    row = program // splits
    column, inside = block_columns((program % splits).to(tl.int32), width, LINES, LINE)
    a = tl.load(x + row * x_stride + column, inside, 0.0).to(tl.float32)
    g = tl.load(grad + row * grad_stride + column, inside, 0.0).to(tl.float32)
    gain = gain_of(weight, column, inside, weight_offset)
    if CENTRE:
        a = a - tl.load(statistics + row * 3) - tl.load(statistics + row * 3 + 1)
        tl.store(products + program * 2, tl.sum(tl.sum(g * gain, 1), 0))
        tl.store(products + program * 2 + 1, tl.sum(tl.sum(a * g * gain, 1), 0))
    else:
        tl.store(products + program, tl.sum(tl.sum(a * g * gain, 1), 0))


@triton.jit(do_not_specialize=["rows", "splits"])
def _backward_columns(
    x, grad, added, weight, statistics, products, dx, dweight, dbias, rows, width, x_stride, grad_stride, added_stride,
    splits, weight_offset,
    CENTRE: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx, dweight and dbias of a block of columns, in every num_programs(1)-th group of rows."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)  # [COLUMNS]
    program = tl.program_id(1)
    gain = gain_of(weight, column, column < width, weight_offset)
    of_weight = tl.zeros([COLUMNS], tl.float32)
    of_bias = of_weight
    split = tl.arange(0, SPLITS)  # [SPLITS]
    for first in tl.range(program * ROWS, rows, tl.num_programs(1) * ROWS, num_stages=STAGES):
        # From the last row, which was read last and may still be in the L2 cache.
        row = rows - 1 - (first + tl.arange(0, ROWS).to(tl.int64))  # [ROWS]
        inside = (row >= 0)[:, None] & (column < width)[None, :]
        a = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad + row[:, None] * grad_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        mean, rest, r = _load_statistics(statistics, row, row >= 0, CENTRE)
        known = (row >= 0)[:, None] & (split < splits)[None, :]
        at = row[:, None] * splits + split[None, :]
        if CENTRE:
            a = a - mean[:, None] - rest[:, None]
            sums = tl.sum(tl.load(products + at * 2, mask=known, other=0.0), 1)
            mean_product = tl.sum(tl.load(products + at * 2 + 1, mask=known, other=0.0), 1) * r / width
        else:
            sums = 0.0
            mean_product = tl.sum(tl.load(products + at, mask=known, other=0.0), 1) * r / width
        normal = a * r[:, None]
        result = _of_rows(g * gain[None, :], normal, sums, mean_product, r, width, CENTRE)
        _store_rows(dx, added, result, row, column, inside, width, added_stride)
        of_weight, of_bias = _add_rows(of_weight, of_bias, dweight, dbias, g, normal, False)
    _store_partials(dweight, dbias, program, column, width, of_weight, of_bias)


@triton.jit
def _sum_rows(partials, sums, count, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, count, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < count)[:, None] & (column < width)[None, :]
        total += tl.sum(tl.load(partials + row[:, None] * width + column[None, :], mask=inside, other=0.0), 0)
    tl.store(sums + column, total.to(sums.dtype.element_ty), mask=column < width)


@triton.jit(do_not_specialize=["count"])
def _add_partials(partials, sums, others, other_sums, count, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Column sums of the partial sums of ``count`` programs, of one array or of two."""
    if others is None or tl.program_id(1) == 0:
        _sum_rows(partials, sums, count, width, ROWS, COLUMNS)
    else:
        _sum_rows(others, other_sums, count, width, ROWS, COLUMNS)


class _BackwardTile(NamedTuple):
    rows: int
    columns: int
    splits: int  # of a row's columns
    stages: int
    apart: bool
    warps: int
    programs: int  # per multiprocessor


def _backward_tile(gpu: Gpu, width: int, element: int, centre: bool, tensors: int) -> _BackwardTile | None:
    """The best of two sweeps on an H200; None where a row is too long for one pass. tensors: how many are read.

    16 KB of x a step. Where rows are so short that a sum over the rows of a step would cross warps, 4096 elements a step
    whose rows are added at the end, and more programs instead of a deeper pipeline; or, where the norm has few numbers to
    hold, longer steps.
    """
    columns = max(16, power_of_two(width))
    if columns * element > 32768:
        return None
    if columns > 8192:
        # Beside its own half of a row each program fetches the other half ahead: 160 KB at three stages, 32 more with
        # a third tensor.
        stages = 3 if gpu.shared_memory > (96 + 32 * tensors) << 10 else 1
        return _BackwardTile(1, 8192, 2, stages, False, 8, 1)
    few_numbers = not centre and tensors == 2
    if columns <= 1024 and not few_numbers:
        rows = (2048 if centre and columns <= 128 else 4096) // columns
        warps = 8 if columns <= 256 and not centre else 4
        tile = _BackwardTile(rows, columns, 1, 3, True, warps, 4 if columns <= 256 else 2)
    elif columns <= 256 and element == 2:
        tile = _BackwardTile(min(256, 16384 // columns), columns, 1, 2, False, 8, 4)
    else:
        rows = max(1, min(32, 16384 // (columns * element)))
        # A mean or a third tensor takes more registers than 128 threads have.
        warps = 4 if columns < 4096 and few_numbers else 8
        tile = _BackwardTile(rows, columns, 1, 3, False, warps, max(1, min(8, 1024 // columns)))
    ahead = tensors * tile.rows * columns * element  # bytes that a stage holds
    room = max(0, gpu.shared_memory - REDUCTION_BYTES * 2) // ahead
    return tile._replace(stages=min(tile.stages, 1 + room))


def backward(
    gpu: Gpu, norm: Norm[Tensor], grad: Tensor, added: Tensor | None, statistics: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dx, dweight and dbias; statistics that are None are computed again. norm: of what was normalised, x or h."""
    weight, bias, dx = norm.weight, norm.bias, gpu.empty(norm.x.shape, norm.x.dtype)
    if dx.numel() == 0:
        return dx, *_in_places([gpu.zeros(p.shape, p.dtype) for p in (weight, bias) if p is not None], weight, bias)
    if statistics is None:
        _, _, statistics = forward(gpu, norm._replace(weight=None, bias=None, weight_offset=0.0), with_statistics=True)
    assert statistics is not None
    width, element = dx.shape[-1], dx.element_size()
    rows, x, g = dx.numel() // width, as_rows(gpu, norm.x), as_rows(gpu, grad)
    more = None if added is None else as_rows(gpu, added)
    gain = None if weight is None else gpu.contiguous(weight)
    inputs, known = (x.tensor, g.tensor, more and more.tensor, gain), gpu.contiguous(statistics)
    strides = (x.stride, g.stride, more and more.stride)
    wanted = [p for p in (weight, bias) if p is not None]
    tile = _backward_tile(gpu, width, element, norm.centre, 2 if more is None else 3)
    if tile is not None:
        most = max(1, gpu.multiprocessors * tile.programs // tile.splits)
        programs = min(triton.cdiv(rows, tile.rows), most)
        partials = [gpu.empty((programs, width), torch.float32) for _ in wanted]
        dweight, dbias = _in_places(partials, weight, bias)
        gpu.launch(
            _backward_one_pass, (tile.splits, programs), (*inputs, known, dx, dweight, dbias),
            (rows, width, *strides, norm.weight_offset), (norm.centre, *tile[:5]), warps=tile.warps,
        )  # fmt: skip
    else:
        block = long_block(gpu, 8192, 8, width, x, g)
        splits = triton.cdiv(width, block.columns)
        products = gpu.empty((rows, splits, 2) if norm.centre else (rows, splits), torch.float32)
        gpu.launch(
            _backward_row_sums, (rows * splits,), (x.tensor, g.tensor, gain, known, products),
            (width, *strides[:2], splits, norm.weight_offset), (norm.centre, *block.constants), warps=block.warps,
        )  # fmt: skip
        per_step, columns = 4, 2048 // element
        most = max(1, 2 * gpu.multiprocessors // triton.cdiv(width, columns))
        programs = min(triton.cdiv(rows, per_step), most)
        partials = [gpu.empty((programs, width), torch.float32) for _ in wanted]
        dweight, dbias = _in_places(partials, weight, bias)
        gpu.launch(
            _backward_columns, (triton.cdiv(width, columns), programs), (*inputs, known, products, dx, dweight, dbias),
            (rows, width, *strides, splits, norm.weight_offset),
            (norm.centre, power_of_two(splits), per_step, columns, 4), warps=4,
        )  # fmt: skip
    if not wanted:
        return dx, None, None
    sums = [gpu.empty(p.shape, p.dtype) for p in wanted]
    height = min(1024, power_of_two(most))  # not of programs: the number of rows must not ask for another kernel
    across = max(8, min(64, 8192 // height))
    pairs = [t for pair in zip(partials, sums, strict=True) for t in pair]
    gpu.launch(
        _add_partials, (triton.cdiv(width, across), len(wanted)), (*pairs, *[None] * (4 - len(pairs))),
        (programs, width), (height, across), warps=8,
    )  # fmt: skip
    return dx, *_in_places(sums, weight, bias)


def _in_places(made: list[Tensor], weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """What was made for those of weight and bias that are there, each in its place."""
    left = iter(made)
    return None if weight is None else next(left), None if bias is None else next(left)
