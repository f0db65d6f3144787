"""What the row kernels share: tensors as matrices of rows, and how the work is cut, from sizes alone.

Short rows are held: a program reads a few whole rows into registers. Where one row fills a multiprocessor, the next are
fetched meanwhile (softmax). Long rows are walked: one program per multiprocessor goes through a row forwards for its
statistics, keeps the last block, and goes backwards to use them, so that the second reading meets the second-level cache.
A few long rows are split: a kernel for the statistics of each part, then one that combines them in order.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LONGEST_HELD_ROW = 65536  # bytes; longer ones do not fit the registers of 32 warps
LOWEST = tl.constexpr(
    -3.4028234663852886e38
)  # of float32: a maximum to start from that is finite, so that no exp is NaN
STAGES_AHEAD = 3  # of a loop over rows that fetches two ahead, into shared memory
FOR_REDUCTIONS = 4096  # bytes of shared memory beside those rows, for what warps tell each other
_CACHE = 36 << 20  # bytes of the second-level one that may be counted on
_TILE = 2048  # elements per program where rows are short and several share one


def as_rows(x: Tensor) -> tuple[Tensor, int]:
    """A tensor whose memory is that of ``(rows, width)`` with contiguous rows, and the step from row to row.

    Nothing is copied wherever the strides allow.
    """
    width = x.shape[-1]
    if x.is_contiguous():
        return x, width
    rows = x.reshape(-1, width)
    rows = rows if width <= 1 or rows.stride(1) == 1 else rows.contiguous()
    return rows, rows.stride(0)


def empty_rows_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def held_tile(width: int, per_warp: int = 1024) -> tuple[int, int, int]:
    """``(rows, columns, warps)`` of a program that holds whole rows; ``per_warp``: elements, where rows are long."""
    columns = max(16, power_of_two(width))
    rows = max(1, _TILE // columns)
    return rows, columns, min(32, max(4 if columns < 4096 else 8, rows * columns // per_warp))


class Block(NamedTuple):
    """A block of a long row: lines of neighbours that one thread reads at once, so that it reduces them alone."""

    lines: int
    line: int
    warps: int
    stages: int  # blocks on their way from memory at once


def holds(width: int, x: Tensor) -> bool:
    return width * x.element_size() <= LONGEST_HELD_ROW


def fetches_ahead(rows: int, width: int, stride: int, x: Tensor) -> bool:
    """Is a held row so long that a multiprocessor holds no second one, and has it shared memory for the next two?

    Measured on an H200 to be worth it in 16 bits, with many rows for each multiprocessor. Triton fetches only what it knows
    to begin and end at multiples of 16 elements.
    """
    if x.element_size() != 2 or width % 16 or stride % 16 or rows < 8 * multiprocessors(x):
        return False
    row = power_of_two(width) * x.element_size()
    return row > LONGEST_HELD_ROW // 2 and 2 * row + FOR_REDUCTIONS <= _shared_memory(x)


def long_block(
    elements: int, warps: int, stages: int, width: int, *tensors: tuple[Tensor, int], shifted: bool = False
) -> Block:
    """``tensors``: what is read, with the steps from row to row; they decide how long a line may be.

    ``shifted``: the kernel begins at the line in which a row begins, and takes care of what is not the row's.
    """
    x = tensors[0][0]
    aligned = shifted or aligned_rows(width, *tensors)
    if not aligned:  # elements one by one need an address and a statistic each: several small programs instead of one
        elements, warps, stages = max(2048, elements // 8), max(4, warps // 4), 1
    line = 16 // x.element_size() if aligned else 1
    return Block(min(elements, max(1024, power_of_two(width))) // line, line, warps, stages)


def aligned_rows(width: int, *tensors: tuple[Tensor, int]) -> bool:
    """Does every row begin where a line may begin, and end where one may end?"""
    return width % 16 == 0 and all(t.data_ptr() % 16 == 0 and stride % 16 == 0 for t, stride in tensors)


def walkers(rows: int, row_bytes: int, block: Block, x: Tensor) -> int:
    """How many programs walk at once: so many that the rows under way fit the second-level cache, one per multiprocessor
    at least. ``row_bytes``: what is read of a row."""
    processors = multiprocessors(x)
    per_processor = min(_CACHE // (row_bytes * processors), 32 // block.warps)
    return min(rows, processors * max(1, per_processor))


def few(rows: int, x: Tensor) -> bool:
    """Too few rows to give every multiprocessor one."""
    return 2 * rows <= multiprocessors(x)


def multiprocessors(x: Tensor) -> int:
    # Under the interpreter there is no device: any small number shows the same code.
    return _multiprocessors(x.get_device()) if x.is_cuda else 3


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _shared_memory(x: Tensor) -> int:
    """Bytes that a program may have; under the interpreter as many as on an H200."""
    return _shared_memory_of(x.get_device()) if x.is_cuda else 228 << 10


@functools.cache
def _shared_memory_of(device: int) -> int:
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)


@triton.jit
def block_columns(block, width, LINES: tl.constexpr, LINE: tl.constexpr):
    """Columns [LINES, LINE] of a row's block, and which lines [LINES, 1] lie inside the row."""
    first = (block * LINES + tl.arange(0, LINES)) * LINE
    return first[:, None] + tl.arange(0, LINE)[None, :], (first < width)[:, None]


@triton.jit
def online_softmax(z, top, total):
    """Each line's highest value so far and total of exp(z - highest), with the values z [LINES, LINE] added.

    Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
    """
    higher = tl.maximum(top, tl.max(z, 1))
    return higher, total * tl.exp(top - higher) + tl.sum(tl.exp(z - higher[:, None]), 1)


@triton.jit
def join_softmax(top, total):
    """The highest value and total of a row from those of its lines or parts."""
    highest = tl.max(top, 0)
    return highest, tl.sum(total * tl.exp(top - highest), 0)
