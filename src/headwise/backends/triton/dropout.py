"""Which probabilities dropout drops, in Triton kernels: Philox 4x32-10 over a tile of scores.

docs/contract.md has the mapping. One counter serves eight entries: queries i and i + 8, keys j, j + 1, j + 8 and j + 9.
A thread holds all eight in its registers where a tile of scores comes from the matrix units with keys across, and four of
them (without j + 1) where the tile is transposed. So the counter of every entry is written down, and the compiler sees that
those of a thread are the same: `kept_tile` keeps the lanes of a tile apart from where the tile begins for that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

    from headwise.ops.attention._arguments import Flags


class DropoutNumbers(NamedTuple):
    """What a launch is given, or None in its place."""

    below: Any  # 32 random bits are dropped below this unsigned number, of which the lower half is 0
    scale: Any  # of what is kept
    elsewhere: Any = None  # 1: behind the seed are the numbers of the first batch entry and head
    shifted: Any = None  # 1: and those of the first query and key
    aligned: Any = None  # 1: which are multiples of 16


class Dropout(NamedTuple):
    """Of one head of a batch entry, in a kernel."""

    key_low: Any  # Philox's key: the seed
    key_high: Any
    batch: Any
    head: Any
    below: Any
    scale: Any


class Shifted(NamedTuple):
    """The same of a call whose first query and key are others of a larger one."""

    key_low: Any
    key_high: Any
    batch: Any
    head: Any
    below: Any
    scale: Any
    row: Any  # the first query and key
    key: Any


class Aligned(NamedTuple):
    """A `Shifted` whose row and key are multiples of 16. A kernel tells these three apart by their lengths."""

    key_low: Any
    key_high: Any
    batch: Any
    head: Any
    below: Any
    scale: Any
    row: Any
    key: Any
    unused: Any


def dropout_numbers(flags: Flags, seed: Tensor | None) -> DropoutNumbers | None:
    if seed is None:
        return None
    below = flags.dropped_below << 16
    below -= (1 << 32) * (below >> 31)  # always one kind of int32
    return DropoutNumbers(below, flags.kept_scale, *(1 if seed.numel() >= count else None for count in (3, 5, 6)))


@triton.jit
def dropout_of(numbers, seed, batch, head):
    """``numbers``: a `DropoutNumbers`; ``batch``: the number of the batch entry or of the packed sequence."""
    key = tl.load(seed).to(tl.uint64, bitcast=True)
    batch, head = batch.to(tl.uint32), head.to(tl.uint32)
    if numbers.elsewhere is not None:
        batch, head = batch + tl.load(seed + 1).to(tl.uint32), head + tl.load(seed + 2).to(tl.uint32)
    below = numbers.below.to(tl.uint32, bitcast=True)
    low, high = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    if numbers.shifted is None:
        return Dropout(low, high, batch, head, below, numbers.scale)
    elif numbers.aligned is None:
        row, first = tl.load(seed + 3).to(tl.int32), tl.load(seed + 4).to(tl.int32)
        return Shifted(low, high, batch, head, below, numbers.scale, row, first)
    else:
        row, first = tl.load(seed + 3).to(tl.int32), tl.load(seed + 4).to(tl.int32)
        return Aligned(low, high, batch, head, below, numbers.scale, row, first, row)


@triton.jit
def _round(c0, c1, c2, c3, k0, k1):
    # A product of 64 bits is one instruction; its two halves by themselves would be two.
    first = c0.to(tl.uint64) * 0xD2511F53
    second = c2.to(tl.uint64) * 0xCD9E8D57
    high_first, high_second = (first >> 32).to(tl.uint32), (second >> 32).to(tl.uint32)
    return high_second ^ c1 ^ k0, second.to(tl.uint32), high_first ^ c3 ^ k1, first.to(tl.uint32)


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Four words of random bits; all are uint32 and broadcast against each other."""
    for turn in tl.static_range(10):
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, k0, k1)
        if turn < 9:
            k0, k1 = (k0 + 0x9E3779B9).to(tl.uint32), (k1 + 0xBB67AE85).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def kept_tile(dropout, first_row, first_key, QUERIES: tl.constexpr, KEYS: tl.constexpr, KEYS_DOWN: tl.constexpr):
    """bool ``[QUERIES, KEYS]``, or ``[KEYS, QUERIES]``: what dropout keeps of a tile that begins at multiples of 16.

    In a call that lies elsewhere it may begin anywhere: then every entry has a counter of its own.
    """
    row, key = tl.arange(0, QUERIES), tl.arange(0, KEYS)
    if len(dropout) == 8:  # a `Shifted`
        row, key = row + (first_row + dropout.row), key + (first_key + dropout.key)
        i, j = row & -9, key & -10
    else:
        if len(dropout) == 9:  # an `Aligned`
            first_row, first_key = first_row + dropout.row, first_key + dropout.key
        # The same lanes, and a tile more: the compiler folds bits away only from numbers that nothing else uses.
        i = (tl.arange(QUERIES, 2 * QUERIES) & -9) + (first_row - QUERIES)
        j = (tl.arange(KEYS, 2 * KEYS) & -10) + (first_key - KEYS)
    if KEYS_DOWN:
        return _kept(dropout, i[None, :], row[None, :], j[:, None], key[:, None])
    else:
        return _kept(dropout, i[:, None], row[:, None], j[None, :], key[None, :])


@triton.jit
def kept_of_rows(dropout, row, first_key, KEYS: tl.constexpr):
    """bool ``[rows, KEYS]``: the same for rows anywhere."""
    key = tl.arange(0, KEYS)[None, :]
    return _kept(dropout, (row & -9)[:, None], row[:, None], (key & -10) + first_key, key)


@triton.jit
def _kept(dropout, i, row, j, key):
    """i, j: the counters; row, key: their lower four bits are those of the entries. All broadcast against each other."""
    i, j = i.to(tl.uint32), j.to(tl.uint32)
    w0, w1, w2, w3 = philox(j, dropout.head, i, dropout.batch, dropout.key_low, dropout.key_high)
    second_row, second_key = (row & 8) != 0, (key & 8) != 0
    word = tl.where(second_row, tl.where(second_key, w3, w2), tl.where(second_key, w1, w0))
    half = tl.where((key & 1) != 0, word, word << 16)  # what is below it does not matter
    return half >= dropout.below
