"""A float32 as the sum of three bfloat16 numbers: float32 products on the matrix units at their 16-bit rate.

    x = high + middle + low      x y = low·high + high·low + middle·middle + middle·high + high·middle + high·high

The sum is exact, for numbers below 1e-33 to within 1e-40. The products left out are together no more than float32 rounds
off one product. A block's products are added up in a sum of their own, smallest first, and then to what there was, in
float32: the matrix units cut digits off whenever they add, and would do so thousands of times over. What a kernel only
reads is split once, by a kernel before it, into 6 bytes per number; the main loop then moves 16-bit tiles straight into
shared memory, and multiplies them in either orientation.
Henry, Tang, Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype for Higher-Precision Computations", 2019.

An operand is one tile or, where V.PRECISION is "bf16x3", three. V is the variant of the kernel (parameters.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwise.backends.triton.blocks import load_rows, power_of_two
from headwise.backends.triton.products import product
from headwise.backends.triton.tile_sizes import AttentionTile
from headwise.config import settings

if TYPE_CHECKING:
    from headwise.backends.triton.gpu import Gpu

_OF_BF16 = tl.constexpr("interpreted" if settings.triton_interpret else "ieee")  # how two bfloat16 are multiplied


@triton.constexpr_function
def pitch(dim: int) -> int:
    """From high to middle to low of a row: each begins at a multiple of 32 bytes."""
    return -(-dim // 16) * 16


@triton.jit
def load_operand(base, row, stride, inside, D: tl.constexpr, BLOCK: tl.constexpr, CHECK: tl.constexpr, V: tl.constexpr):
    """As `blocks.load_rows`; a row that was split holds high, middle and low one after the other."""
    if V.PRECISION == "bf16x3":
        PITCH: tl.constexpr = pitch(D)  # the stride is known, which saves many registers
        high = load_rows(base, row, 3 * PITCH, inside, D, BLOCK, CHECK)
        middle = load_rows(base + PITCH, row, 3 * PITCH, inside, D, BLOCK, CHECK)
        low = load_rows(base + 2 * PITCH, row, 3 * PITCH, inside, D, BLOCK, CHECK)
        return high, middle, low
    else:
        return load_rows(base, row, stride, inside, D, BLOCK, CHECK)


@triton.jit
def as_operand(x, V: tl.constexpr):
    """A computed tile as an operand; an infinity becomes NaN."""
    if V.PRECISION == "bf16x3":
        high = x.to(tl.bfloat16)
        rest = x - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)
    else:
        return x


@triton.jit
def as_float32(x, V: tl.constexpr):
    if V.PRECISION == "bf16x3":
        return x[2].to(tl.float32) + x[1].to(tl.float32) + x[0].to(tl.float32)
    else:
        return x.to(tl.float32)


@triton.jit
def transposed(x, V: tl.constexpr):
    if V.PRECISION == "bf16x3":
        return tl.trans(x[0]), tl.trans(x[1]), tl.trans(x[2])
    else:
        return tl.trans(x)


@triton.jit
def with_rows(x, kept, V: tl.constexpr):
    """The operand with zeros in all rows but those ``kept``."""
    if V.PRECISION == "bf16x3":
        return _with_rows(x[0], kept), _with_rows(x[1], kept), _with_rows(x[2], kept)
    else:
        return _with_rows(x, kept)


@triton.jit
def _with_rows(x, kept):
    return tl.where(kept[:, None], x, 0.0).to(x.dtype)


@triton.jit
def multiply(a, b, acc, V: tl.constexpr):
    """``acc + a @ b`` in float32, of two operands; acc may be None."""
    if V.PRECISION == "bf16x3":
        sum_ = product(a[2], b[0], None, _OF_BF16)
        sum_ = product(a[0], b[2], sum_, _OF_BF16)
        sum_ = product(a[1], b[1], sum_, _OF_BF16)
        sum_ = product(a[1], b[0], sum_, _OF_BF16)
        sum_ = product(a[0], b[1], sum_, _OF_BF16)
        sum_ = product(a[0], b[0], sum_, _OF_BF16)
        if acc is not None:
            sum_ = acc + sum_
        return sum_
    else:
        PRECISION: tl.constexpr = V.PRECISION
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
    # An infinity is all in the low number, which meets nothing but the high one of the other factor: their product is
    # infinite, or NaN with zero, as it should be. Times a middle or low number it could have the other sign. With another
    # infinity it is NaN, as it should not be: the high number of that one is zero.
    infinite = tl.abs(value) == float("inf")
    high = tl.where(infinite, 0.0, high)
    rest = value - high
    middle = tl.where(infinite, 0.0, rest).to(tl.bfloat16)
    to = out + row[:, None] * (3 * PITCH) + d[None, :]
    tl.store(to, high.to(tl.bfloat16), mask=inside)
    tl.store(to + PITCH, middle, mask=inside)
    tl.store(to + 2 * PITCH, (rest - middle.to(tl.float32)).to(tl.bfloat16), mask=inside)


def split(gpu: Gpu, x: Tensor) -> Tensor:
    """``(B, H, S, D)`` as ``(B, H, S, 3 · pitch)``, expanded over the batch or the heads if x is, else contiguous."""
    (batch, heads, length, dim), strides = x.shape, x.stride()
    # Where all batch entries, or all heads, are the same memory, one of them is written.
    batches, own_heads = (min(n, 1) if stride == 0 else n for n, stride in zip((batch, heads), strides, strict=False))
    out = gpu.empty((batches, own_heads, length, 3 * pitch(dim)), torch.bfloat16)
    count, block = batches * own_heads * length, power_of_two(dim)
    rows = max(1, 4096 // block)
    if count:
        numbers = (count, length, own_heads, *strides[:3])
        gpu.launch(_split, (-(-count // rows),), (x, out), numbers, (dim, block, rows), stages=1)
    return out.expand(batch, heads, -1, -1)


def tile_precision(precision: str, dtype: torch.dtype, *tiles: AttentionTile) -> str:
    """ "bf16x3" where all of the tiles ask for it and float32 is to be multiplied as float32 by the matrix units."""
    able = dtype == torch.float32 and precision in ("tf32x3", "interpreted")
    return "bf16x3" if able and all(tile.bf16x3 for tile in tiles) else precision
