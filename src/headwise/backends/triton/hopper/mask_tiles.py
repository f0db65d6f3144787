"""A bool mask as the Hopper kernels read it: packed to bits, and for each tile a list of the blocks that it sees.

Forward kernels have queries down and keys across, backward kernels keys down and queries across; what is across is packed.
Three things are made of a mask, none of them for more heads or batch entries than the mask has:

    bits:    a row of 128 columns is four words. A lane of a warpgroup holds columns 8j + 2t and 8j + 2t + 1 of a product,
             t being its number in a group of four lanes: they are bits 2j and 2j + 1 of word t. So every lane loads what
             it needs, and nothing else. Laid out by blocks of 128 columns, then rows: a warp reads 128 bytes in a row.
    states:  of every 64 × 64 scores: is some of them seen, are all?
    lists:   of every tile: the blocks that it sees. Those of which nothing is seen are not there. In the forward, how many
             need the mask, how many are seen whole, and the former first. In the backward, how many there are; they keep
             their order, so that tiles that take turns follow each other through the blocks. Behind the lists of a head:
             which keys are seen by anybody, as bits in the order of above. The others may hold NaN.
"""

# ruff: noqa: SIM102  (constants have an `if` of their own)

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwise.backends.triton.blocks import score_strides
from headwise.backends.triton.hopper.coverage import unexpanded
from headwise.backends.triton.hopper.lengths import extent

if TYPE_CHECKING:
    from headwise.backends.triton.gpu import Gpu

HEADER = 2  # numbers before the entries of a list
NO_STEPS = (0,) * 8  # of a call without a mask
_CHUNK = 128  # blocks that a list is made of in one go
_LEAST_STEPS = 4  # that a program packs, where there are enough programs


@triton.jit
def _words(x, N: tl.constexpr):
    """``[M, N]`` zeros and ones as ``[M, 4]`` words, N / 4 bits each, in the order of a product's registers."""
    M: tl.constexpr = x.shape[0]
    shift = 2 * tl.arange(0, N // 8)[:, None, None] + tl.arange(0, 2)[None, None, :]
    bits = tl.reshape(x, [M, N // 8, 4, 2]) << shift[None]
    return tl.sum(tl.sum(bits, 3), 1)


class Folded(NamedTuple):
    """What is packed with a mask that has a number for each batch entry: lengths, and a band that shifts with them."""

    q_lengths: Tensor | None
    kv_lengths: Tensor | None
    kv_starts: Tensor | None
    band: tuple[int, int]


_NOT_FOLDED = Folded(None, None, None, (-1, -1))


@triton.jit
def _exists(
    x, d, a, rows, past, start, left, right,
    ONE_QUERY: tl.constexpr, KEYS_DOWN: tl.constexpr, FOLD_LEFT: tl.constexpr, FOLD_RIGHT: tl.constexpr,
):  # fmt: skip
    """x ``[D, A]``, zero where there is no such query or key, or where the band of a sequence of these lengths ends."""
    if KEYS_DOWN:
        key, query = d[:, None], a[None, :]
    else:
        key, query = a[None, :], d[:, None]
    there = (key >= start) & (key < past)
    if not ONE_QUERY:
        there = there & (query < rows)
        position = query + past - rows
        if FOLD_LEFT:
            there = there & (key >= position - left)
        if FOLD_RIGHT:
            there = there & (key <= position + right)
    return tl.where(there, x, 0)


@triton.jit(
    do_not_specialize=[
        "down", "across", "strips", "steps", "parts", "heads", "offset", "left", "right", "bits_head", "bits_block",
        "states_head", "states_down", "lists_head", "seen_at",
    ]
)  # fmt: skip
def pack_mask(
    mask, bits, states, lists, q_lengths, kv_lengths, kv_starts,
    down, across, strips, steps, parts, heads, offset, left, right, m_b, m_h, m_d, m_a, bits_head, bits_block, states_head,
    states_down, lists_head, seen_at,
    ONE_DOWN: tl.constexpr, ONE_ACROSS: tl.constexpr, KEYS_DOWN: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, FOLD_LEFT: tl.constexpr, FOLD_RIGHT: tl.constexpr,
):  # fmt: skip
    """A strip of keys (64 down or 128 across) of a head of the mask, and a part of all queries.

    ``ONE_DOWN``, ``ONE_ACROSS``: the mask is broadcast, and packed for one row or for one block of columns. What
    lengths hide is hidden, too, and what is outside a band that shifts with them (FOLD_LEFT, FOLD_RIGHT).
    """
    program = tl.program_id(0)
    strip = program % strips
    part = (program // strips) % parts
    entry = (program // strips // parts).to(tl.int64)
    mask += (entry // heads) * m_b + (entry % heads) * m_h
    bits += entry * bits_head
    states += entry * states_head
    one_query: tl.constexpr = ONE_ACROSS if KEYS_DOWN else ONE_DOWN
    lane_d, lane_a, word = tl.arange(0, 64), tl.arange(0, 128), tl.arange(0, 4)
    half = tl.arange(0, 2)
    FOLDED: tl.constexpr = (q_lengths is not None) or (kv_lengths is not None) or (kv_starts is not None)
    if FOLDED:
        queries, keys = (across, down) if KEYS_DOWN else (down, across)
        rows, past, start, _ = extent(q_lengths, kv_lengths, kv_starts, entry // heads, queries, keys)
    anybody = tl.zeros([64 if KEYS_DOWN else 128], tl.int32)
    each = tl.cdiv(steps, parts)
    for step in range(part * each, tl.minimum(part * each + each, steps)):
        if KEYS_DOWN:
            d_block, a_block = strip, step
        else:
            d_block, a_block = step, strip
        d, a = d_block * 64 + lane_d, a_block * 128 + lane_a
        inside = (d < down)[:, None] & (a < across)[None, :]
        at = mask + d.to(tl.int64)[:, None] * m_d + a.to(tl.int64)[None, :] * m_a
        # Bytes of a whole block come sixteen at a time: a load that asks for each of them takes one at a time.
        if (d_block * 64 + 64 <= down) & (a_block * 128 + 128 <= across):
            found = tl.load(at)
        else:
            found = tl.load(at, mask=inside, other=0)
        x = (found != 0).to(tl.int32)
        if FOLDED:
            x = _exists(x, d, a, rows, past, start, left, right, one_query, KEYS_DOWN, FOLD_LEFT, FOLD_RIGHT)
        own_rows = d < (1 if ONE_DOWN else down)
        own_block = (a_block == 0) | (not ONE_ACROSS)
        to = bits + (entry * 0 + a_block) * bits_block + d[:, None] * 4 + word[None, :]
        tl.store(to, _words(x, 128), mask=own_rows[:, None] & own_block)
        halves = tl.reshape(x, [64, 2, 64])
        there = tl.reshape(inside.to(tl.int32), [64, 2, 64])
        some = tl.max(tl.max(halves, 2), 0)
        whole = tl.min(tl.min(halves | (1 - there), 2), 0)
        column = 2 * a_block + half
        own = (column < (1 if ONE_ACROSS else tl.cdiv(across, 64))) & ((d_block == 0) | (not ONE_DOWN))
        own &= d_block * 64 < down
        tl.store(states + d_block * states_down + column, (some + 2 * whole).to(tl.int8), mask=own)
        seen = x
        if (HAS_LEFT or HAS_RIGHT) and not one_query:
            if KEYS_DOWN:
                distance = d[:, None] - (a[None, :] + offset)
            else:
                distance = a[None, :] - (d[:, None] + offset)
            if HAS_LEFT:
                seen = tl.where(distance >= -left, seen, 0)
            if HAS_RIGHT:
                seen = tl.where(distance <= right, seen, 0)
        anybody |= tl.max(seen, 1 if KEYS_DOWN else 0)
    if KEYS_DOWN:
        anybody |= (strip * 64 + lane_d >= down).to(tl.int32)
        seen_words = _words(anybody[None, :], 64) << (strip % 2 * 16)
        block = strip // 2
    else:
        anybody |= (strip * 128 + lane_a >= across).to(tl.int32)
        seen_words = _words(anybody[None, :], 128)
        block = strip
    to = lists + entry * lists_head + seen_at + block * 4 + word[None, :]
    tl.atomic_or(to, seen_words, sem="relaxed")


@triton.jit
def _seen(
    states, tile, block, down, across, offset, left, right, states_down,
    ONE_DOWN: tl.constexpr, ONE_ACROSS: tl.constexpr, KEYS_DOWN: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """(some, whole), bool: is some of the scores of a tile and of blocks seen, and are all keys there and seen by all?"""
    some, whole = block < 0, block >= 0
    for i in tl.static_range(DOWN // 64):
        for j in tl.static_range(ACROSS // 64):
            d, a = tile * (DOWN // 64) + i, block * (ACROSS // 64) + j
            there = (d * 64 < down) & (a * 64 < across) & (block >= 0)
            at_d, at_a = (0 if ONE_DOWN else d), (block * 0 if ONE_ACROSS else a)
            state = tl.load(states + at_d * states_down + at_a, mask=there, other=2)
            some |= (state & 1) != 0
            whole &= (state & 2) != 0
    first_d, first_a = tile * DOWN, block * ACROSS
    last_d, last_a = tl.minimum(first_d + DOWN, down) - 1, tl.minimum(first_a + ACROSS, across) - 1
    if KEYS_DOWN:
        first_key, last_key, first_query, last_query = first_d, last_d, first_a, last_a
        whole &= first_d + DOWN <= down
    else:
        first_key, last_key, first_query, last_query = first_a, last_a, first_d, last_d
        whole &= first_a + ACROSS <= across
    some &= (first_d < down) & (first_a < across)
    if HAS_LEFT:
        some &= last_key >= first_query + offset - left
        whole &= first_key >= last_query + offset - left
    if HAS_RIGHT:
        some &= first_key <= last_query + offset + right
        whole &= last_key <= first_query + offset + right
    return some, whole & some


@triton.jit(
    do_not_specialize=[
        "down", "across", "tiles", "blocks", "offset", "left", "right", "states_head", "states_down", "lists_head",
        "lists_tile", "seen_at",
    ]
)  # fmt: skip
def list_blocks(
    states, lists,
    down, across, tiles, blocks, offset, left, right, states_head, states_down, lists_head, lists_tile, seen_at,
    ONE_DOWN: tl.constexpr, ONE_ACROSS: tl.constexpr, KEYS_DOWN: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr, UPWARDS: tl.constexpr, CHUNK: tl.constexpr,
    HEADER: tl.constexpr,
):  # fmt: skip
    """The list of a tile (DOWN) of a head of the mask: the blocks (ACROSS) that it sees some of.

    An entry of the forward (keys across) is a block times two, plus one if nobody sees some of its keys; a tile that sees
    nothing visits the first block. An entry of the backward is a block in the low 15 bits, then whether it needs the mask,
    then how many tiles before this one add to it. UPWARDS: the first blocks come first, and the last tiles are before the
    others.
    """
    program = tl.program_id(0)
    tile = program % tiles
    entry = (program // tiles).to(tl.int64)
    states += entry * states_head
    seen_words = lists + entry * lists_head + seen_at
    list_at = lists + entry * lists_head + tile * lists_tile
    lane = tl.arange(0, CHUNK)
    in_part = tl.zeros([CHUNK], tl.int32)
    for first in range(0, blocks, CHUNK):
        block = first + lane
        some, whole = _seen(
            states, tile, block, down, across, offset, left, right, states_down, ONE_DOWN, ONE_ACROSS, KEYS_DOWN, HAS_LEFT,
            HAS_RIGHT, DOWN, ACROSS,
        )  # fmt: skip
        if KEYS_DOWN:
            in_part += some.to(tl.int32)
        else:
            in_part += tl.where(whole, 0, some.to(tl.int32))
    part_at, whole_at = tl.full((), 0, tl.int32), tl.sum(in_part, 0)
    parts = whole_at
    for first in range(0, blocks, CHUNK):
        block = first + lane
        if not UPWARDS:
            block = blocks - 1 - block
        some, whole = _seen(
            states, tile, block, down, across, offset, left, right, states_down, ONE_DOWN, ONE_ACROSS, KEYS_DOWN, HAS_LEFT,
            HAS_RIGHT, DOWN, ACROSS,
        )  # fmt: skip
        some &= block >= 0
        whole &= block >= 0
        needs_mask = tl.where(whole, 0, some.to(tl.int32))
        if KEYS_DOWN:
            whole = block < 0
        is_part, is_whole = tl.where(whole, 0, some.to(tl.int32)), (whole & some).to(tl.int32)
        number = tl.where(whole, whole_at + tl.cumsum(is_whole, 0), part_at + tl.cumsum(is_part, 0)) - 1
        if KEYS_DOWN:
            rank = tl.zeros([CHUNK], tl.int32)
            before, past = tl.full((), 0, tl.int32), tile
            if UPWARDS:
                before, past = tile + 1, tiles
            for other in range(before, past):
                visits, _ = _seen(
                    states, other, block, down, across, offset, left, right, states_down, ONE_DOWN, ONE_ACROSS, KEYS_DOWN,
                    HAS_LEFT, HAS_RIGHT, DOWN, ACROSS,
                )  # fmt: skip
                rank += visits.to(tl.int32)
            value = block | (needs_mask << 15) | (rank << 16)
        else:
            block_words = seen_words + (block * ACROSS // 128)[:, None] * 4 + tl.arange(0, 4)[None, :]
            words = tl.load(block_words, mask=some[:, None], other=-1)
            if ACROSS == 64:
                words = (words >> (block % 2 * 16)[:, None]) | -65536
            value = 2 * block + (tl.min((words == -1).to(tl.int32), 1) == 0).to(tl.int32)
        tl.store(list_at + HEADER + number, value, mask=some)
        part_at += tl.sum(is_part, 0)
        whole_at += tl.sum(is_whole, 0)
    if not KEYS_DOWN:
        if whole_at == 0:
            parts += 1
            whole_at += 1
            tl.store(list_at + HEADER, 0)
    tl.store(list_at, parts)
    tl.store(list_at + 1, whole_at - parts)


class PackedMask(NamedTuple):
    """Of a call: the tensors, and the steps in them by which a kernel finds its place."""

    bits: Tensor
    lists: Tensor
    steps: tuple[int, ...]  # bits: batch, head, block, row; lists: batch, head, tile; where keys that are seen begin
    one_across: bool  # the bits know no end of the columns


def packed_mask(
    gpu: Gpu, mask: Tensor, queries: int, keys: int, band: tuple[int, int], tile: tuple[int, int], *,
    keys_down: bool = False, upwards: bool = False, folded: Folded | None = None,
) -> PackedMask:  # fmt: skip
    """Pack a mask that broadcasts to ``(B, H, queries, keys)``; ``tile``: down and across.

    ``band``: what the kernels themselves leave out. ``folded``: what they do not know.
    """
    mask = unexpanded(mask).view(torch.uint8)
    if keys_down:
        mask = mask.transpose(2, 3)
    m_b, m_h, m_d, m_a = score_strides(mask)
    batch, heads, own_down, own_across = mask.shape
    (down, across), (left, right) = ((keys, queries) if keys_down else (queries, keys)), band
    one_down, one_across = own_down == 1, own_across == 1
    tiles, blocks = -(-down // tile[0]), -(-across // tile[1])
    one_list = one_down and not keys_down and left < 0 and right < 0  # all tiles see the same
    if one_list:
        tiles = 1
    bits_block = own_down * 4
    bits_head = -(-own_across // 128) * bits_block
    states_down = -(-own_across // 64)
    states_head = -(-own_down // 64) * states_down
    key_blocks = -(-keys // 128)
    lists_tile = HEADER + blocks
    seen_at = tiles * lists_tile
    lists_head = seen_at + 4 * key_blocks
    entries = batch * heads
    bits = gpu.empty((entries * bits_head,), torch.int32)
    states = gpu.empty((entries * states_head,), torch.int8)
    lists = gpu.zeros((entries * lists_head,), torch.int32)
    if keys_down:
        strips, steps = 2 * key_blocks, 1 if one_across else -(-queries // 128)
    else:
        strips, steps = key_blocks, 1 if one_down else -(-queries // 64)
    parts = max(1, min(steps // _LEAST_STEPS, 16 * gpu.multiprocessors // (strips * entries)))
    constants = one_down, one_across, keys_down, left >= 0, right >= 0
    assert folded is None or band == (-1, -1)
    *lengths, packed_band = folded or _NOT_FOLDED
    sides = band if folded is None else packed_band
    gpu.launch(
        pack_mask, (strips * parts * entries,), (mask, bits, states, lists, *lengths),
        (
            down, across, strips, steps, parts, heads, keys - queries, *sides, m_b, m_h, m_d, m_a, bits_head,
            bits_block, states_head, states_down, lists_head, seen_at,
        ),
        (*constants, packed_band[0] >= 0, packed_band[1] >= 0),
    )  # fmt: skip
    gpu.launch(
        list_blocks, (tiles * entries,), (states, lists),
        (
            down, across, tiles, blocks, keys - queries, left, right, states_head, states_down, lists_head, lists_tile,
            seen_at,
        ),
        (*constants, *tile, upwards, _CHUNK, HEADER),
    )  # fmt: skip

    def per_head(step: int) -> tuple[int, int]:
        return (step * heads if batch > 1 else 0), (step if heads > 1 else 0)

    steps_of_kernel = (
        *per_head(bits_head), 0 if one_across else bits_block, 0 if one_down else 4, *per_head(lists_head),
        0 if one_list else lists_tile, seen_at,
    )  # fmt: skip
    return PackedMask(bits, lists, steps_of_kernel, one_across)
