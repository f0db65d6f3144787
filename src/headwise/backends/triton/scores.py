"""What attention kernels share: which rows and keys exist, who sees whom, and the logits of a tile.

Exponentials are powers of two (one instruction). Logits are kept in units of 1/UNIT: for 16-bit inputs UNIT is log2(e),
multiplied in together with the scale, and a weight is `exp2` of a difference of logits. For float32 UNIT is 1 and the
difference is multiplied by log2(e): large logits lose no digits to it.

In the signatures, ``n`` is a plain `Sizes`, ``p`` are the `Parameters` and ``V`` is the `Variant` of parameters.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from headwise.backends.triton.blocks import load_scores

if TYPE_CHECKING:
    from headwise.ops.attention._arguments import Flags

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


class Band(NamedTuple):
    """A query at position p sees key j if ``first <= j < keys`` and ``p - left <= j <= p + right``."""

    first: Any
    keys: Any
    left: Any
    right: Any


class Extent(NamedTuple):
    """What exists of a batch entry, or of a sequence of a packed batch."""

    q_start: Any  # its first row in memory, from the beginning of the batch entry
    k_start: Any
    rows: Any  # queries that exist
    all_rows: Any  # rows in memory: those that do not exist get zeros
    all_keys: Any
    offset: Any  # a query's position is its row plus this
    band: Any
    bad: Any  # a length makes no sense: all results are NaN
    number: Any  # of the batch entry, or of the sequence


@triton.jit
def batch_extent(lengths, batch, first_row, n):
    """The extent of a dense batch entry for rows from ``first_row`` on; if none of them exists, they see no key.

    lengths: ``(q_lengths, kv_lengths, kv_starts)``, each of them or None.
    """
    q_lengths, kv_lengths, kv_starts = lengths
    rows, keys, first, bad = n.queries, n.keys, tl.full((), 0, tl.int32), tl.full((), 0, tl.int1)
    if q_lengths is not None:
        rows, bad = checked_length(q_lengths + batch, n.queries, bad)
    if kv_lengths is not None:
        keys, bad = checked_length(kv_lengths + batch, n.keys, bad)
    if kv_starts is not None:
        first, bad = checked_length(kv_starts + batch, n.keys, bad)
    rows, keys = tl.where(bad, n.queries, rows), tl.where(bad, 0, keys)
    offset, zero = keys - rows, tl.full((), 0, tl.int64)
    if q_lengths is not None:
        keys = tl.where(first_row < rows, keys, 0)
    return Extent(zero, zero, rows, n.queries, n.keys, offset, Band(first, keys, n.left, n.right), bad, batch)


@triton.jit
def checked_length(at, most, bad):
    """A length, and whether it or one before it is bad: outside 0 … ``most``."""
    length = tl.load(at).to(tl.int64)
    bad |= (length < 0) | (length > most)
    return tl.where(bad, 0, length).to(tl.int32), bad


@triton.jit
def query_tile(tile, lengths, cu_q, cu_k, batch, n, V: tl.constexpr):
    """``(extent, tile)``: what the ``tile``-th tile of queries of a batch entry belongs to, and its number therein."""
    if cu_q is None:
        return batch_extent(lengths, batch, tile * V.QUERIES, n), tile
    else:
        q_start, length, k_start, keys, tile, bad, number = packed_tile_and_number(
            tile, cu_q, cu_k, n.sequences, n.queries, n.keys, n.longest_q, n.longest_k, V.QUERIES, V.SEARCH
        )
        trailing = (q_start >= tl.load(cu_q + n.sequences)) & (bad == 0)  # tokens past the last sequence do not exist
        rows = tl.where(trailing, 0, length)
        band = Band(tl.full((), 0, tl.int32), keys, n.left, n.right)
        return Extent(q_start, k_start, rows, length, keys, keys - rows, band, bad, number), tile


@triton.jit
def key_tile(tile, lengths, cu_q, cu_k, batch, n, V: tl.constexpr):
    """As `query_tile`, of a tile of keys."""
    if cu_q is None:
        return batch_extent(lengths, batch, 0, n), tile
    else:
        k_start, keys, q_start, rows, tile, bad, number = packed_tile_and_number(
            tile, cu_k, cu_q, n.sequences, n.keys, n.queries, n.longest_k, n.longest_q, V.KEYS, V.SEARCH
        )
        band = Band(tl.full((), 0, tl.int32), keys, n.left, n.right)
        return Extent(q_start, k_start, rows, rows, keys, keys - rows, band, bad, number), tile


@triton.jit
def key_exists(key, band, V: tl.constexpr):
    if V.STARTS:
        return (key >= band.first) & (key < band.keys)
    return key < band.keys


@triton.jit
def in_band(position, key, band, V: tl.constexpr):
    """bool: may a query at ``position`` see ``key``? The two broadcast against each other."""
    seen = key_exists(key, band, V) & (position == position)  # true, and of the shape of both
    if V.LEFT:
        seen = seen & (key >= position - band.left)
    if V.RIGHT:
        seen = seen & (key <= position + band.right)
    return seen


@triton.jit
def first_key(position, band, V: tl.constexpr):
    """The first key that a query at ``position`` sees."""
    if V.LEFT:
        return tl.maximum(position - band.left, band.first)
    return position * 0 + band.first


@triton.jit
def past_last_key(position, band, V: tl.constexpr):
    """One past the last key that a query at ``position`` sees."""
    if V.RIGHT:
        return tl.maximum(tl.minimum(position + band.right + 1, band.keys), 0)
    return position * 0 + band.keys


@triton.jit
def sees_some_key(row, extent, V: tl.constexpr):
    """bool: does a row that exists see any key, as far as the band goes?"""
    position = row + extent.offset
    return first_key(position, extent.band, V) < past_last_key(position, extent.band, V)


@triton.jit
def visible_keys(tile, extent, V: tl.constexpr):
    """What a tile of queries sees: (first, past, start, whole, whole_past).

    Keys [first, past) are seen by some row. Blocks of keys begin at ``start``; all rows see all of those in
    [whole, whole_past).
    """
    top = tile * V.QUERIES
    bottom = tl.minimum(top + V.QUERIES, extent.rows) - 1
    first = first_key(top + extent.offset, extent.band, V)
    past = past_last_key(bottom + extent.offset, extent.band, V)
    start = first // V.KEYS * V.KEYS
    whole = tl.maximum(start, (first_key(bottom + extent.offset, extent.band, V) + V.KEYS - 1) // V.KEYS * V.KEYS)
    whole_past = past_last_key(top + extent.offset, extent.band, V) // V.KEYS * V.KEYS
    if whole_past < whole:
        whole, whole_past = start, start
    return first, past, start, whole, whole_past


@triton.jit
def visible_rows(tile, extent, V: tl.constexpr):
    """`visible_keys` the other way round: the rows that see some key of a tile, and within them those that see all."""
    low = tl.maximum(tile * V.KEYS, extent.band.first)
    high = tl.minimum(tile * V.KEYS + V.KEYS, extent.band.keys) - 1
    first, whole = extent.rows * 0, extent.rows * 0
    past, whole_past = extent.rows, extent.rows
    if V.RIGHT:
        first = tl.maximum(low - extent.band.right - extent.offset, 0)
        whole = tl.maximum(high - extent.band.right - extent.offset, 0)
    if V.LEFT:
        past = tl.minimum(high + extent.band.left - extent.offset + 1, extent.rows)
        whole_past = tl.minimum(low + extent.band.left - extent.offset + 1, extent.rows)
    past = tl.where(high < low, first, past)  # no key of this tile exists
    start = first // V.QUERIES * V.QUERIES
    whole = tl.maximum(start, (whole + V.QUERIES - 1) // V.QUERIES * V.QUERIES)
    whole_past = whole_past // V.QUERIES * V.QUERIES
    if (whole_past < whole) | (past <= first):
        whole, whole_past = start, start
    return first, past, start, whole, whole_past


@triton.jit
def packed_tile(
    entry, cu, other_cu, sequences, total, other_total, longest, other_longest, TILE: tl.constexpr, SEARCH: tl.constexpr
):
    """`packed_tile_and_number` without the number."""
    start, length, other_start, other_length, tile, bad, _ = packed_tile_and_number(
        entry, cu, other_cu, sequences, total, other_total, longest, other_longest, TILE, SEARCH
    )
    return start, length, other_start, other_length, tile, bad


@triton.jit
def packed_tile_and_number(
    entry, cu, other_cu, sequences, total, other_total, longest, other_longest, TILE: tl.constexpr, SEARCH: tl.constexpr
):
    """Where the ``entry``-th tile of TILE tokens of a packed batch lies; the cu_seqlens are searched in blocks.

    Returns (start, length, other_start, other_length, tile, bad, number): the sequence on this side and on the other, the
    number of the tile in it, and that of the sequence. Tokens past the last sequence are one more sequence that has nothing
    on the other side. If any of the two cu_seqlens makes no sense, all tokens are such a sequence, and ``bad`` says so.
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
    return start, length.to(tl.int32), other_start, other_length.to(tl.int32), tile, bad, at


def search_block(sequences: int) -> int:
    """How many cu_seqlens a program looks at in one go: few variants, so that few kernels are compiled."""
    return 128 if sequences <= 128 else 1024


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
def capped_logits(products, scale, softcap, CAP: tl.constexpr, UNIT: tl.constexpr):
    """Logits of a tile, capped, times UNIT, from the products q·k."""
    if CAP:
        return (softcap * UNIT) * tanh(products * (scale / softcap))
    return products * (scale * UNIT)


@triton.jit
def tile_logits(products, mask, bias, batch, head, row, key, there, extent, p, PARTIAL: tl.constexpr, V: tl.constexpr):
    """``(logits, capped, seen)`` from products q·k: with bias; before it; and whether the row sees the key.

    row, key and ``there`` (the scores that exist) broadcast to the shape of the products, keys down or across.
    PARTIAL: the band hides some of these keys from some of these rows. What is not seen may be NaN.
    """
    capped = capped_logits(products, p.scale, p.softcap, V.CAP, V.UNIT)
    logits = capped
    if bias is not None:
        strides = (p.batch.bias, p.head.bias, p.row.bias, p.key.bias)
        added = load_scores(bias, *strides, batch, head, row, key, there).to(tl.float32) * V.UNIT
        logits = tl.where(added == -float("inf"), -float("inf"), logits + added)  # hides a NaN, as a mask does
    seen = logits != -float("inf")
    if PARTIAL:
        seen &= in_band(row + extent.offset, key, extent.band, V)
    if mask is not None:
        strides = (p.batch.mask, p.head.mask, p.row.mask, p.key.mask)
        seen &= load_scores(mask, *strides, batch, head, row, key, there) != 0
    return logits, capped, seen


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
    return 1.0 if dtype == torch.float32 else LOG2E.value


def band_of(flags: Flags, q_length: int, k_length: int) -> tuple[int, int]:
    """The two sides of the band, no larger than any distance in the call: kernels add them to positions in 32 bits."""
    farthest = q_length + k_length
    return min(flags.left, farthest), min(flags.right, farthest)
