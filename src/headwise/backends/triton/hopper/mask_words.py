"""How the Hopper kernels read a packed mask: the list of a tile, the words of its blocks, keys that nobody sees.

`mask_tiles` makes both, and says how bits lie in a word.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from headwise.backends.triton.hopper.gluon_names import gl, gluon, reinterpret

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
    seen_at: Any  # where the bits of keys that somebody sees begin, behind the lists of a head


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
def blank_unseen(values, at, seen, half, members, step, KEYS: gl.constexpr, D: gl.constexpr):
    """Zero the keys of a block in shared memory that nobody sees.

    ``seen``, ``half``, ``members``, ``step``: as for `some_unseen`. Shared memory holds columns of 64 elements (or all, if
    fewer), in groups of eight rows.
    """
    WIDTH: gl.constexpr = D if D < 64 else 64
    GROUPS: gl.constexpr = KEYS // 8
    TILE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [1, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(2 * WIDTH, 16, 2)
    groups = reinterpret(values, [values.shape[0] * D // WIDTH * GROUPS, 8, WIDTH], SHARED)
    row = gl.arange(0, 8, gl.SliceLayout(1, TILE))
    words = gl.load(seen + row // 2)
    for member in range(1, members):
        words = words | gl.load(seen + member * step + row // 2)
    words = words >> (half * 16)
    for group in range(0, GROUPS):
        here = (((words >> (2 * group + row % 2)) & 1) != 0)[:, None]
        for column in gl.static_range(D // WIDTH):
            piece = groups.index((at * (D // WIDTH) + column) * GROUPS + group)
            x = piece.load(TILE)
            piece.store(gl.where(here, x, 0.0).to(x.dtype))


@gluon.jit
def blank_blind(values, at, lse, ROWS: gl.constexpr, D: gl.constexpr):
    """Zero the queries of a block in shared memory, or their gradients, that see nothing: their ``lse`` is +inf."""
    WIDTH: gl.constexpr = D if D < 64 else 64
    GROUPS: gl.constexpr = ROWS // 8
    TILE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [1, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(2 * WIDTH, 16, 2)
    groups = reinterpret(values, [values.shape[0] * D // WIDTH * GROUPS, 8, WIDTH], SHARED)
    row = gl.arange(0, 8, gl.SliceLayout(1, TILE))
    for group in range(0, GROUPS):
        here = (gl.load(lse + group * 8 + row) != float("inf"))[:, None]
        for column in gl.static_range(D // WIDTH):
            piece = groups.index((at * (D // WIDTH) + column) * GROUPS + group)
            x = piece.load(TILE)
            piece.store(gl.where(here, x, 0.0).to(x.dtype))


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
