"""How the Hopper kernels read a packed mask: the list of a tile, the words of its blocks, whether nobody sees a key.

`mask_tiles` makes both, and says how bits lie in a word.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from headwise.backends.triton.hopper.gluon_names import gl, gluon

LIST_HEADER = gl.constexpr(2)  # numbers before the entries of a list


class Mask(NamedTuple):
    """A packed mask, and the steps to a head's part of it."""

    bits: Any
    lists: Any
    bits_batch: Any
    bits_head: Any
    bits_block: Any  # to the next 128 columns; 0 where the mask is broadcast over them
    bits_row: Any
    lists_batch: Any
    lists_head: Any
    lists_tile: Any
    seen_at: Any  # where the bits of keys visible to any query begin, behind the lists of a head


@gluon.jit
def mask_of(bits, lists, steps, X: gl.constexpr):
    """The `Mask` of a launch, or None; ``steps``: its other members."""
    mask = None
    if X.masked:
        mask = Mask(bits, lists, *steps)
    return mask


@gluon.jit
def bits_of(mask, batch, head):
    """Where the bits of a head begin."""
    return mask.bits + (batch.to(gl.int64) * mask.bits_batch + head.to(gl.int64) * mask.bits_head)


@gluon.jit
def lists_of(mask, batch, head):
    """Where the lists of a head begin."""
    return mask.lists + (batch.to(gl.int64) * mask.lists_batch + head.to(gl.int64) * mask.lists_head)


@gluon.jit
def entry_at(list_at, i):
    return gl.load(list_at + LIST_HEADER + i)


@gluon.jit
def load_words(mask, bits, block, row, rows, there, LIKE: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """The words ``[ROWS, 4]`` of a block of COLUMNS columns, for rows from ``row`` on; zeros past the ``rows``.

    LIKE: the layout of scores; their lanes hold the words that they need. With 64 columns the lower half of a word counts.
    """
    FOUR: gl.constexpr = gl.zeros([ROWS, COLUMNS], gl.int32, LIKE).reshape([ROWS, COLUMNS // 8, 4, 2]).type.layout
    WORDS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, FOUR))
    lane = row + gl.arange(0, ROWS, gl.SliceLayout(1, WORDS))[:, None]
    word = gl.arange(0, 4, gl.SliceLayout(0, WORDS))[None, :]
    at = bits + ((block * COLUMNS) // 128).to(gl.int64) * mask.bits_block
    words = gl.load(at + lane * mask.bits_row + word, mask=(lane < rows) & (word >= 0) & there, other=0)
    if COLUMNS == 64:
        words = words >> (block % 2 * 16)
    return words


@gluon.jit
def only_visible(x, words, other):
    """``x [ROWS, COLUMNS]`` where a bit is set, ``other`` elsewhere."""
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    LAYOUT: gl.constexpr = x.type.layout
    four = x.reshape([ROWS, COLUMNS // 8, 4, 2])
    FOUR: gl.constexpr = four.type.layout
    eight = gl.arange(0, COLUMNS // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, FOUR))))
    pair = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, FOUR))))
    bit = 1 << (2 * eight[None, :, None, None] + pair[None, None, None, :])
    four = gl.where((words[:, None, :, None] & bit) != 0, four, other)
    return gl.convert_layout(four.reshape([ROWS, COLUMNS]), LAYOUT, assert_trivial=True)


@gluon.jit
def some_unseen(seen, half, members, step, KEYS: gl.constexpr):
    """bool: are there keys in a block that no head sees?

    ``seen``: the four words of its 128 keys; ``half``: which 64 of them, where a block has no more. ``members``: heads, one
    ``step`` after the other.
    """
    common = gl.to_tensor(-1)
    for i in gl.static_range(4):
        word = gl.load(seen + i)
        for member in range(1, members):
            word = word | gl.load(seen + member * step + i)
        common = common & word
    if KEYS == 64:
        common = (common >> (half * 16)) | -65536
    return common != -1


@gluon.jit
def seen_words(mask, lists, block, KEYS: gl.constexpr):
    """``(seen, half)`` of a block of keys."""
    return lists + mask.seen_at + block * KEYS // 128 * 4, block * (KEYS // 64) % 2
