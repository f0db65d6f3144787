"""How the row kernels (softmax, rms_norm, cross_entropy) divide rows among programs, by sizes and alignment alone.

One pass: a program holds whole rows in registers. Two passes, for longer rows: persistent programs read a row forwards for
its statistics, keep the last block and read backwards to use them, so that the second read hits the L2 cache. Split, for
a few long rows: one kernel leaves partial statistics of each split, a second one combines them in order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from headwise.backends.triton.blocks import power_of_two

if TYPE_CHECKING:
    from headwise.backends.triton.gpu import Gpu

LONGEST_ONE_PASS = 65536  # bytes; a longer row does not fit the registers of 32 warps
LOWEST = tl.constexpr(-3.4028234663852886e38)  # of float32: a finite maximum to start from, so that no exp gives NaN
PREFETCH_STAGES = 3  # of a loop over rows that prefetches two of them into shared memory
REDUCTION_BYTES = 4096  # of shared memory beside those rows, for reductions across warps
_L2_BYTES = 36 << 20  # of the L2 cache that may be counted on
_TILE = 2048  # elements per program where rows are short


class Rows(NamedTuple):
    """A tensor read as contiguous rows that begin ``stride`` elements apart."""

    tensor: Tensor
    stride: int


def as_rows(gpu: Gpu, x: Tensor) -> Rows:
    """Over the last dimension. Nothing is copied where the strides allow it."""
    width = x.shape[-1]
    if x.is_contiguous():
        return Rows(x, width)
    rows = reshaped(gpu, x, -1, width)
    if width > 1 and rows.stride(1) != 1:
        rows = gpu.contiguous(rows)
    return Rows(rows, rows.stride(0))


def reshaped(gpu: Gpu, x: Tensor, *shape: int) -> Tensor:
    """A view, or a copy where the strides allow none."""
    try:
        return x.view(shape)
    except RuntimeError:
        return gpu.contiguous(x).view(shape)


def fits_one_pass(width: int, x: Tensor) -> bool:
    return width * x.element_size() <= LONGEST_ONE_PASS


def most_warps(gpu: Gpu) -> int:
    """A program has at most 1024 threads, 32 in a warp or, on AMD, 64."""
    return 16 if gpu.hip else 32


def one_pass_tile(gpu: Gpu, width: int, elements_per_warp: int = 1024) -> tuple[int, int, int]:
    """``(rows, columns, warps)`` of a program."""
    columns = max(16, power_of_two(width))
    rows = max(1, _TILE // columns)
    warps = max(4 if columns < 4096 else 8, rows * columns // elements_per_warp)
    return rows, columns, min(warps, most_warps(gpu))


def prefetches(gpu: Gpu, rows: int, width: int, x: Rows) -> bool:
    """Is a row so long that a multiprocessor holds no second one, and is there shared memory for the next two?

    On an H200 this paid in 16 bits, with many rows for each multiprocessor. Triton prefetches only what it knows to begin
    and end at multiples of 16 elements.
    """
    element = x.tensor.element_size()
    if element != 2 or width % 16 or x.stride % 16 or rows < 8 * gpu.multiprocessors:
        return False
    row_bytes = power_of_two(width) * element
    fills = LONGEST_ONE_PASS // 2 < row_bytes <= LONGEST_ONE_PASS
    return fills and 2 * row_bytes + REDUCTION_BYTES <= gpu.shared_memory


class Block(NamedTuple):
    """A block of a long row: ``lines`` of ``line`` neighbours, which one thread reads at once and reduces by itself."""

    lines: int
    line: int
    warps: int

    @property
    def columns(self) -> int:
        return self.lines * self.line

    @property
    def constants(self) -> tuple[int, int]:
        """LINES and LINE of the kernels."""
        return self.lines, self.line


def long_block(gpu: Gpu, elements: int, warps: int, width: int, *inputs: Rows, shifted: bool = False) -> Block:
    """The alignment of the inputs decides how long a line may be.

    shifted: the kernel starts at the line in which a row begins, and masks what is not the row's.
    """
    aligned = shifted or aligned_rows(gpu, width, *inputs)
    if not aligned:  # each element needs its own address and statistic: several small programs instead of one
        elements, warps = max(2048, elements // 8), max(4, warps // 4)
    line = 16 // inputs[0].tensor.element_size() if aligned else 1
    return Block(min(elements, max(1024, power_of_two(width))) // line, line, min(warps, most_warps(gpu)))


def aligned_rows(gpu: Gpu, width: int, *inputs: Rows) -> bool:
    """Does every row begin and end at a line's boundary?"""
    return width % 16 == 0 and all(gpu.aligned(x.tensor) and x.stride % 16 == 0 for x in inputs)


def persistent_programs(gpu: Gpu, rows: int, row_bytes: int, block: Block) -> int:
    """As many as keep the rows under way in the L2 cache, one per multiprocessor at least. row_bytes: of all inputs."""
    resident = min(_L2_BYTES // (row_bytes * gpu.multiprocessors), 32 // block.warps)
    return min(rows, gpu.multiprocessors * max(1, resident))


def few_rows(gpu: Gpu, rows: int) -> bool:
    """Too few to give every other multiprocessor one: their rows are split."""
    return 2 * rows <= gpu.multiprocessors


@triton.jit
def block_columns(block, width, LINES: tl.constexpr, LINE: tl.constexpr):
    """Columns [LINES, LINE] of a row's block, and which lines [LINES, 1] lie inside the row."""
    first = (block * LINES + tl.arange(0, LINES)) * LINE
    return first[:, None] + tl.arange(0, LINE)[None, :], (first < width)[:, None]


@triton.jit
def online_softmax(z, highest, total):
    """Running maximum and sum of exp(z - maximum) of each line, with z [LINES, LINE] added.

    Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
    """
    higher = tl.maximum(highest, tl.max(z, 1))
    return higher, total * tl.exp(highest - higher) + tl.sum(tl.exp(z - higher[:, None]), 1)


@triton.jit
def combine_softmax(highest, total):
    """The softmax statistics of a row from those of its lines or splits."""
    of_row = tl.max(highest, 0)
    return of_row, tl.sum(total * tl.exp(highest - of_row), 0)
