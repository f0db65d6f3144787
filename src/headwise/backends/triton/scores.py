"""What attention kernels share: the logits of a tile, who sees whom, and where a tile of a packed batch lies.

Exponentials are powers of two (one instruction). Logits are kept in units of 1/UNIT: for 16-bit inputs UNIT is log2(e),
multiplied in together with the scale, and a weight is `exp2` of a difference of logits. For float32 UNIT is 1 and the
difference is multiplied by log2(e): large logits lose no digits to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from headwise.config import settings

if TYPE_CHECKING:
    from headwise.ops.attention._arguments import Flags

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tanh(u):
    """By way of exp(-2|u|), which cannot overflow; a polynomial where u is small and digits would go."""
    e = tl.exp2(-2.0 * LOG2E * tl.abs(u))
    large = (1.0 - e) / (1.0 + e)
    u2 = u * u
    small = tl.abs(u) * (1.0 + u2 * (-0.33333333 + u2 * (0.13333333 + u2 * (-0.053968254 + u2 * 0.021869489))))
    t = tl.where(tl.abs(u) < 0.25, small, large)
    return tl.where(u < 0.0, -t, t)


@triton.jit
def tile_logits(products, scale, softcap, HAS_CAP: tl.constexpr, UNIT: tl.constexpr):
    """Logits of a tile, capped, times UNIT, from the products q·k."""
    if HAS_CAP:
        return (softcap * UNIT) * tanh(products * (scale / softcap))
    return products * (scale * UNIT)


@triton.jit
def cap_slope(logits, softcap, UNIT: tl.constexpr):
    """The derivative of the cap where it gave ``logits`` (times UNIT, before any bias)."""
    t = logits / (softcap * UNIT)
    return 1.0 - t * t


@triton.jit
def power(difference, UNIT: tl.constexpr):
    """exp of a difference of logits times UNIT."""
    if UNIT == 1.0:
        return tl.exp2(difference * LOG2E)
    else:
        return tl.exp2(difference)


def logit_unit(dtype: torch.dtype) -> float:
    return 1.0 if dtype == torch.float32 else 1.4426950408889634


@triton.jit
def in_band(position, key, keys, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """bool: may a query at ``position`` see ``key`` of ``keys``? The two broadcast against each other."""
    seen = (key < keys) & (position == position)  # true, and of the shape of both
    if HAS_LEFT:
        seen = seen & (key >= position - left)
    if HAS_RIGHT:
        seen = seen & (key <= position + right)
    return seen


@triton.jit
def first_key(position, left, HAS_LEFT: tl.constexpr):
    """The first key that a query at ``position`` sees."""
    if HAS_LEFT:
        return tl.maximum(position - left, 0)
    return position * 0


@triton.jit
def past_last_key(position, keys, right, HAS_RIGHT: tl.constexpr):
    """One past the last key that a query at ``position`` sees."""
    if HAS_RIGHT:
        return tl.maximum(tl.minimum(position + right + 1, keys), 0)
    return position * 0 + keys


@triton.jit
def visible_keys(
    tile, rows, offset, keys, left, right,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """What a tile of queries sees: (first, past, start, whole, whole_past).

    Keys [first, past) are seen by some row. Blocks of keys begin at ``start``; all rows see all of those in
    [whole, whole_past).
    """
    top, bottom = tile * QUERIES + offset, tl.minimum(tile * QUERIES + QUERIES, rows) - 1 + offset  # positions
    first = first_key(top, left, HAS_LEFT)
    past = past_last_key(bottom, keys, right, HAS_RIGHT)
    start = first // KEYS * KEYS
    whole = tl.maximum(start, (first_key(bottom, left, HAS_LEFT) + KEYS - 1) // KEYS * KEYS)
    whole_past = past_last_key(top, keys, right, HAS_RIGHT) // KEYS * KEYS
    if whole_past < whole:
        whole, whole_past = start, start
    return first, past, start, whole, whole_past


@triton.jit
def packed_tile(
    entry, cu, other_cu, sequences, total, other_total, longest, other_longest, TILE: tl.constexpr, SEARCH: tl.constexpr
):
    """Where the ``entry``-th tile of TILE tokens of a packed batch lies; the cu_seqlens are searched in blocks.

    Returns (start, length, other_start, other_length, tile, bad): the sequence on this side and on the other, and the
    number of the tile in it. Tokens past the last sequence are one more sequence that has nothing on the other side. If
    any of the two cu_seqlens makes no sense, all tokens are such a sequence, and ``bad`` says so.
    """
    finished = tl.full((), 0, tl.int32)  # sequences that end before this tile
    tiles_before = tl.full((), 0, tl.int32)
    tiles = tl.full((), 0, tl.int32)
    wrong = ((tl.load(cu) != 0) | (tl.load(other_cu) != 0)).to(tl.int32)
    for first in range(0, sequences, SEARCH):
        i = first + tl.arange(0, SEARCH)
        there = i < sequences
        stop, other_stop = tl.load(cu + i + 1, mask=there, other=0), tl.load(other_cu + i + 1, mask=there, other=0)
        length = stop - tl.load(cu + i, mask=there, other=0)
        other = other_stop - tl.load(other_cu + i, mask=there, other=0)
        odd = (length < 0) | (other < 0) | (length > longest) | (other > other_longest)
        odd |= (stop < 0) | (stop > total) | (other_stop < 0) | (other_stop > other_total)
        wrong = tl.maximum(wrong, tl.max(odd.to(tl.int32), 0))
        ends = tiles + tl.cumsum(((tl.maximum(length, 0) + TILE - 1) // TILE).to(tl.int32), 0)
        done = there & (ends <= entry)
        finished += tl.sum(done.to(tl.int32), 0)
        tiles_before = tl.maximum(tiles_before, tl.max(tl.where(done, ends, 0), 0))
        tiles = tl.max(ends, 0)
    used = tl.load(cu + sequences).to(tl.int64)
    bad = wrong > 0
    past = finished >= sequences
    at = tl.where(past, 0, finished)
    start = tl.where(past, used, tl.load(cu + at).to(tl.int64))
    stop = tl.where(past, total, tl.load(cu + at + (sequences > 0).to(tl.int32)).to(tl.int64))
    other_start = tl.load(other_cu + at).to(tl.int64)
    other_stop = tl.load(other_cu + at + (sequences > 0).to(tl.int32)).to(tl.int64)
    other_length = tl.where(past | bad, 0, other_stop - other_start)
    start = tl.where(bad, 0, start)
    length = tl.where(bad, total, stop - start)
    tile = tl.where(bad, entry, entry - tiles_before)
    return start, length.to(tl.int32), other_start, other_length.to(tl.int32), tile, bad


@triton.jit
def product(a, b, acc, PRECISION: tl.constexpr):
    """``acc + a @ b`` in float32, of a rounded to b's dtype; acc may be None."""
    if PRECISION == "interpreted":  # which cannot multiply bfloat16, and cuts digits off where a GPU rounds
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        return tl.dot(a.to(b.dtype), b, acc, input_precision=PRECISION)


def band_of(flags: Flags, q_length: int, k_length: int) -> tuple[int, int]:
    """The two sides of the band, no larger than any distance in the call: kernels add them to positions in 32 bits."""
    farthest = q_length + k_length
    return min(flags.left, farthest), min(flags.right, farthest)


def dot_precision(dtype: torch.dtype, widest: int = 0) -> str:
    """How float32 operands are multiplied: as float32, unless the user turned TF32 on in PyTorch.

    Kernels whose tile asks for parts take those in place of three TF32 products (`parts.tile_precision`).

    ``widest`` is the head dim of a gradient. At 512, three TF32 products were over the error budget in the largest element,
    and their operands spill 4000 to 7000 bytes a thread (plain float32: none for dk and dv, 1900 for dq).
    """
    if settings.triton_interpret:
        return "interpreted"
    if dtype != torch.float32:
        return "ieee"  # of no meaning for 16-bit operands
    if torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "tf32"
    return "tf32x3" if torch.version.hip is None and widest <= 256 else "ieee"
