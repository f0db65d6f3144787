"""float32 multiplied on the matrix units at their 16-bit rate: three bfloat16 parts per number, six products.

    x = high + middle + low      x y = low·high + high·low + middle·middle + middle·high + high·middle + high·high

The sum is exact, for numbers below 1e-33 to within 1e-40. The products left out are together no more than float32 rounds
off one product. A block's products are added up in a sum of their own, smallest first, and then to what there was, in
float32: the matrix units cut digits off whenever they add, and would do so thousands of times over. What a kernel only
reads is split once, by a kernel before it, into 6 bytes per number; the main loop then moves 16-bit tiles straight into
shared memory, and multiplies them in either orientation.
Henry, Tang, Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype for Higher-Precision Computations", 2019.

A tile is one tensor or, where PRECISION is "parts", three.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwise.backends.triton.blocks import Strides, load_rows
from headwise.backends.triton.launch import Plan
from headwise.backends.triton.rows import power_of_two
from headwise.backends.triton.scores import product
from headwise.backends.triton.tile_sizes import Tile
from headwise.config import settings

_OF_PARTS = tl.constexpr("interpreted" if settings.triton_interpret else "ieee")  # how two parts are multiplied


@triton.constexpr_function
def pitch(dim: int) -> int:
    """From part to part of a row: every part begins at a multiple of 32 bytes."""
    return -(-dim // 16) * 16


@triton.jit
def load_tile(
    base, row, stride, inside, D: tl.constexpr, BLOCK: tl.constexpr, CHECK: tl.constexpr, PRECISION: tl.constexpr
):
    """As `blocks.load_rows`; of parts, a row holds one after the other."""
    if PRECISION == "parts":
        PITCH: tl.constexpr = pitch(D)  # the stride is known, which saves many registers
        high = load_rows(base, row, 3 * PITCH, inside, D, BLOCK, CHECK)
        middle = load_rows(base + PITCH, row, 3 * PITCH, inside, D, BLOCK, CHECK)
        low = load_rows(base + 2 * PITCH, row, 3 * PITCH, inside, D, BLOCK, CHECK)
        return high, middle, low
    else:
        return load_rows(base, row, stride, inside, D, BLOCK, CHECK)


@triton.jit
def tile_of(x, PRECISION: tl.constexpr):
    """What was computed, as a tile to multiply; of an infinity it makes NaN."""
    if PRECISION == "parts":
        high = x.to(tl.bfloat16)
        rest = x - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)
    else:
        return x


@triton.jit
def whole(x, PRECISION: tl.constexpr):
    """The float32 numbers of a tile."""
    if PRECISION == "parts":
        return x[2].to(tl.float32) + x[1].to(tl.float32) + x[0].to(tl.float32)
    else:
        return x.to(tl.float32)


@triton.jit
def turned(x, PRECISION: tl.constexpr):
    if PRECISION == "parts":
        return tl.trans(x[0]), tl.trans(x[1]), tl.trans(x[2])
    else:
        return tl.trans(x)


@triton.jit
def rows_kept(x, kept, PRECISION: tl.constexpr):
    """Zeros in all rows but those ``kept``."""
    if PRECISION == "parts":
        return _rows_kept(x[0], kept), _rows_kept(x[1], kept), _rows_kept(x[2], kept)
    else:
        return _rows_kept(x, kept)


@triton.jit
def _rows_kept(x, kept):
    return tl.where(kept[:, None], x, 0.0).to(x.dtype)


@triton.jit
def tile_product(a, b, acc, PRECISION: tl.constexpr):
    """``acc + a @ b`` in float32, of two tiles; acc may be None."""
    if PRECISION == "parts":
        sum_ = product(a[2], b[0], None, _OF_PARTS)
        sum_ = product(a[0], b[2], sum_, _OF_PARTS)
        sum_ = product(a[1], b[1], sum_, _OF_PARTS)
        sum_ = product(a[1], b[0], sum_, _OF_PARTS)
        sum_ = product(a[0], b[1], sum_, _OF_PARTS)
        sum_ = product(a[0], b[0], sum_, _OF_PARTS)
        if acc is not None:
            sum_ = acc + sum_
        return sum_
    else:
        return product(a, b, acc, PRECISION)


@triton.jit(do_not_specialize=["rows", "length", "heads", "x_b", "x_h"])
def _split(x, out, rows, length, heads, x_b, x_h, x_s, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    PITCH: tl.constexpr = pitch(D)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (d < D)[None, :]
    batch, head, token = row // length // heads, row // length % heads, row % length
    value = tl.load(x + (batch * x_b + head * x_h + token * x_s)[:, None] + d[None, :], mask=inside, other=0.0)
    high = value.to(tl.bfloat16).to(tl.float32)
    cut_off = (value.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    high = tl.where(tl.abs(high) == float("inf"), cut_off, high)  # the largest numbers are not rounded to infinity
    # An infinity is all in the low part, which meets nothing but the high part of the other number: their product is
    # infinite, or NaN with zero, as it should be. Times a middle or low part it could have the other sign. With another
    # infinity it is NaN, as it should not be: the high part of that one is zero.
    infinite = tl.abs(value) == float("inf")
    high = tl.where(infinite, 0.0, high)
    rest = value - high
    middle = tl.where(infinite, 0.0, rest).to(tl.bfloat16)
    to = out + row[:, None] * (3 * PITCH) + d[None, :]
    tl.store(to, high.to(tl.bfloat16), mask=inside)
    tl.store(to + PITCH, middle, mask=inside)
    tl.store(to + 2 * PITCH, (rest - middle.to(tl.float32)).to(tl.bfloat16), mask=inside)


@functools.lru_cache(maxsize=4096)
def _plan(shape: tuple[int, ...], strides: Strides) -> Plan:
    batch, heads, length, dim = shape
    count, block = batch * heads * length, power_of_two(dim)
    rows = max(1, 4096 // block)
    return Plan(_split, (-(-count // rows), 1, 1), (count, length, heads, *strides[:3]), (dim, block, rows), 4, 1)


def split(x: Tensor) -> Tensor:
    """``(B, H, S, D)`` in parts: ``(B, H, S, 3 · pitch)``, expanded over the batch or the heads if x is, else contiguous."""
    (batch, heads, length, dim), strides = x.shape, x.stride()
    once = (*_written(x.shape, strides), length, dim)
    out = x.new_empty((*once[:3], 3 * pitch(dim)), dtype=torch.bfloat16)
    if out.numel():
        _plan(once, strides).launch(x, out)
    return out if once[:2] == (batch, heads) else out.expand(batch, heads, -1, -1)


def _written(shape: tuple[int, ...], strides: Strides) -> tuple[int, int]:
    """Batch entries and heads that differ: one where all are the same memory."""
    batch, heads = (min(size, 1) if stride == 0 else size for size, stride in zip(shape[:2], strides[:2], strict=True))
    return batch, heads


def split_strides(shape: tuple[int, ...], strides: Strides, dim: int) -> Strides:
    """Of the parts of a ``(B, H, S, dim)`` with these strides; of the shape, B, H and S count."""
    batch, heads = _written(shape, strides)
    row = 3 * pitch(dim)
    of_head = shape[2] * row
    return heads * of_head if batch == shape[0] else 0, of_head if heads == shape[1] else 0, row, 1


def tile_precision(precision: str, dtype: torch.dtype, *tiles: Tile) -> str:
    """ "parts" where all of the tiles ask for them and float32 is to be multiplied as float32 by the matrix units."""
    able = dtype == torch.float32 and precision in ("tf32x3", "interpreted")
    return "parts" if able and all(tile.parts == 3 for tile in tiles) else precision
