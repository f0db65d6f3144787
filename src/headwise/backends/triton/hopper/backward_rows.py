"""What happens around the Hopper backward kernel: delta and lse go in, sums of dQ come out, packed tiles are found.

Rows at the beginning of a sequence that see nothing, and keys at its beginning that nothing sees, stay outside of that
kernel: what they hold never meets a product. The other rows of a head lie in whole blocks; the last one of a sequence is
filled up with rows of weight zero, whose lse is +inf.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from headwise.backends.triton.blocks import head_start, load_rows
from headwise.backends.triton.scores import LOG2E, packed_tile

RECORD = tl.constexpr(8)  # numbers that tell of a tile of keys, or of a block of rows, of a packed batch
_ZEROS = tl.constexpr(4096)  # that a program writes at once


class Block(NamedTuple):
    """A block of rows of a sequence."""

    place: Any  # among the blocks of a head
    number: Any  # in its sequence
    first: Any  # row of the sequence that sees a key, in the batch entry
    rows: Any  # of the sequence, from there on
    empty: Any  # rows before it, which see nothing
    bad: Any  # offsets that make no sense: gradients are NaN


@triton.jit
def _block_of(number, batch, records, rows, empty, row_blocks):
    """The block of a program; of a packed batch, `find_tiles` says where it lies."""
    place = batch * row_blocks + number
    first = tl.full((), 0, tl.int64) + empty
    bad = False
    if records is not None:
        record = records + number * RECORD
        first = tl.load(record).to(tl.int64)
        rows = tl.load(record + 1)
        number = tl.load(record + 2)
        empty = tl.load(record + 3)
        bad = tl.load(record + 4) != 0
    return Block(place, number, first, rows, empty, bad)


@triton.jit
def _statistics(
    first, lane, inside, grad_out, grad_lse, out, lse, o_s, g_s,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """(lse in base 2, delta) of rows; +inf and 0 for those that are not there or have no denominator.

    Pointers are those of a head. delta = rowsum(dO · O) - dlse.
    """
    row = first + lane
    row_lse = tl.load(lse + row, mask=inside, other=-float("inf"))
    alive = inside & (row_lse != -float("inf"))
    out_tile = load_rows(out, row, o_s, alive, D, BLOCK_D, True).to(tl.float32)
    do_tile = load_rows(grad_out, row, g_s, alive, D, BLOCK_D, True).to(tl.float32)
    # The output of a row that sees nothing is zero: then its gradient does not matter, not even if it is NaN.
    delta = tl.sum(tl.where(out_tile == 0.0, 0.0, out_tile * do_tile), 1)
    if grad_lse is not None:
        delta -= tl.load(grad_lse + row, mask=alive, other=0.0)
    return tl.where(alive, row_lse * LOG2E, float("inf")), delta


@triton.jit
def _sink_gradient(sink, own_lse, delta):
    """What rows add to the gradient of the sink. The share of the sink in a row that sees nothing is 1."""
    return -tl.sum(tl.exp2(sink * LOG2E - own_lse) * delta, 0)


@triton.jit(
    do_not_specialize=["rows", "empty", "heads", "row_blocks", "all_blocks", "o_b", "o_h", "g_b", "g_h"]
)  # fmt: skip
def prepare_rows(
    grad_out, grad_lse, out, lse, sink, records, stats, sums, turns, sink_partials, row_stats, blind,
    rows, empty, heads, row_blocks, all_blocks, o_b, o_h, o_s, g_b, g_h, g_s,
    D: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """A block of rows of a head: (lse · log2 e, delta) for the kernel; its turn set to 0, or its sums of dQ to zeros.

    rows: of a sequence, without the ``empty`` ones before them. sink_partials: ``[Hq, all_blocks]``. row_stats: the same
    statistics ``[B, Hq, rows, 4]`` for the gradient of a bias, or None. blind: does a block have rows that see nothing,
    though the band would let them? With a mask or a bias; None without. Their lse becomes +inf.
    """
    program = tl.program_id(0)
    head = (program // row_blocks) % heads
    batch = (program // row_blocks // heads).to(tl.int64)
    block = _block_of(program % row_blocks, batch, records, rows, empty, row_blocks)
    head_rows = (batch * heads + head) * (rows + empty)
    lse_base = lse + head_rows
    grad_lse_base = grad_lse
    if grad_lse is not None:
        grad_lse_base = grad_lse + head_rows
    o_base = head_start(out, o_b, o_h, batch, head, ALIGN)
    g_base = head_start(grad_out, g_b, g_h, batch, head, ALIGN)
    lane = tl.arange(0, ROWS)
    row = block.number * ROWS + lane
    own_lse, delta = _statistics(
        block.first, row, row < block.rows, g_base, grad_lse_base, o_base, lse_base, o_s, g_s, D, BLOCK_D
    )
    padded = head.to(tl.int64) * all_blocks + block.place
    known_lse = own_lse
    if blind is not None:
        if sink is not None:  # the rest of such a row's denominator, if there is one, is lost in rounding
            known_lse = tl.where(own_lse == tl.load(sink + head).to(tl.float32) * LOG2E, float("inf"), own_lse)
        is_blind = (known_lse == float("inf")) & (row < block.rows)
        tl.store(blind + padded, tl.max(is_blind.to(tl.int32), 0))
    tl.store(stats + padded * (2 * ROWS) + lane, known_lse)
    tl.store(stats + padded * (2 * ROWS) + ROWS + lane, delta)
    if row_stats is not None:
        at = row_stats + (head_rows + block.first + row) * 4
        tl.store(at, known_lse, mask=row < block.rows)
        tl.store(at + 1, delta, mask=row < block.rows)
        nothing = row_stats + (head_rows + block.first - block.empty + row) * 4
        tl.store(nothing, float("inf"), mask=row < block.empty)
    if turns is not None:
        tl.store(turns + padded, 0)
    else:
        i = tl.arange(0, _ZEROS)
        for first in tl.static_range(0, ROWS * WIDTH, _ZEROS):
            tl.store(sums + padded * (ROWS * WIDTH) + first + i, tl.zeros([_ZEROS], tl.float32))
    if sink_partials is not None:
        of_head = tl.load(sink + head).to(tl.float32)
        of_sink = _sink_gradient(of_head, own_lse, delta)
        if block.number * ROWS < block.empty:  # as many programs as there are blocks with these rows
            own_lse, delta = _statistics(
                block.first - block.empty, row, row < block.empty, g_base, grad_lse_base, o_base, lse_base, o_s, g_s, D,
                BLOCK_D,
            )  # fmt: skip
            of_sink += _sink_gradient(of_head, own_lse, delta)
        if records is not None:
            of_sink = tl.where(block.bad, float("nan"), of_sink)
        tl.store(sink_partials + padded, of_sink)


@triton.jit(do_not_specialize=["rows", "empty", "heads", "row_blocks", "all_blocks", "dq_b", "dq_h"])
def finish_dq(
    sums, turns, records, blind, stats, dq,
    rows, empty, heads, row_blocks, all_blocks, dq_b, dq_h, dq_s, scale,
    D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PIECES: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """A piece of a block of dQ: ``[64, COLUMNS]`` sums, in the order of a warpgroup's registers, as rows in dq's dtype.

    Rows that see nothing get zeros. stats: as the kernel had them, if `prepare_rows` was given ``blind``.
    """
    program = tl.program_id(0)
    piece = program % PIECES
    head = (program // PIECES // row_blocks) % heads
    batch = (program // PIECES // row_blocks // heads).to(tl.int64)
    block = _block_of((program // PIECES) % row_blocks, batch, records, rows, empty, row_blocks)
    base = head_start(dq, dq_b, dq_h, batch, head, ALIGN)
    lane, d = tl.arange(0, 64), tl.arange(0, COLUMNS)
    row = block.number * ROWS + lane
    if ROWS == 128:
        row += piece * 64
    else:
        d += piece * COLUMNS
    if block.number * ROWS < block.rows:
        padded = head.to(tl.int64) * all_blocks + block.place
        flat = tl.load(sums + (padded * PIECES + piece) * (64 * COLUMNS) + tl.arange(0, 64 * COLUMNS))
        if turns is not None:
            flat = tl.where(tl.load(turns + padded) > 0, flat, 0.0)  # nobody has stored there
        if records is not None:
            flat = tl.where(block.bad, float("nan"), flat)
        tile = tl.reshape(flat * scale, [4, COLUMNS // 8, 8, 4, 2, 2])
        tile = tl.reshape(tl.permute(tile, (0, 4, 2, 1, 3, 5)), [64, COLUMNS])
        if blind is not None:
            own_lse = tl.load(stats + padded * (2 * ROWS) + row - block.number * ROWS)
            tile = tl.where((own_lse == float("inf"))[:, None], 0.0, tile)
        at = base + (block.first + row)[:, None] * dq_s + d[None, :]
        tl.store(at, tile.to(dq.dtype.element_ty), mask=(row < block.rows)[:, None] & (d < D)[None, :])
    if block.number * ROWS < block.empty:
        at = base + (block.first - block.empty + row)[:, None] * dq_s + d[None, :]
        zeros = tl.zeros([64, COLUMNS], dq.dtype.element_ty)
        tl.store(at, zeros, mask=(row < block.empty)[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["tiles", "sequences", "q_total", "k_total", "longest_q", "longest_k", "left", "right"])
def find_tiles(
    cu_q, cu_k, records, dk, dv,
    tiles, sequences, q_total, k_total, longest_q, longest_k, left, right, k_token, v_token,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """Where the ``tiles`` tiles of keys of a packed batch lie, and after them its blocks of rows: a record each.

    Keys that nothing sees get their zeros here; ``k_token`` and ``v_token`` are the strides of dk and dv.
    """
    program = tl.program_id(0)
    record = records + program * RECORD
    if program < tiles:
        _find_tile(
            program, cu_q, cu_k, record, dk, dv, sequences, q_total, k_total, longest_q, longest_k, left, right, k_token,
            v_token, HAS_LEFT, HAS_RIGHT, ROWS, KEYS, SEARCH,
        )  # fmt: skip
    else:
        first, rows, _, keys, number, bad = packed_tile(
            program - tiles, cu_q, cu_k, sequences, q_total, k_total, longest_q, longest_k, ROWS, SEARCH
        )
        empty = rows * 0
        if HAS_RIGHT:
            empty = tl.where(bad | (keys == 0), 0, tl.maximum(rows - keys - right, 0))
        tl.store(record, (first + empty).to(tl.int32))
        tl.store(record + 1, rows - empty)
        tl.store(record + 2, number.to(tl.int32))
        tl.store(record + 3, empty)
        tl.store(record + 4, bad.to(tl.int32))


@triton.jit
def _find_tile(
    entry, cu_q, cu_k, record, dk, dv, sequences, q_total, k_total, longest_q, longest_k, left, right, k_token, v_token,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """Without the rows that see nothing and the keys that nothing sees:

    (first row, rows, first key, keys, number of the tile, first block of rows, zero or NaN as bits)
    """
    k_start, keys, q_start, rows, number, bad = packed_tile(
        entry, cu_k, cu_q, sequences, k_total, q_total, longest_k, longest_q, KEYS, SEARCH
    )
    blocks = tl.full((), 0, tl.int32)  # of rows, of the sequences before this one
    tiles = tl.full((), 0, tl.int32)
    for first in range(0, sequences, SEARCH):
        i = first + tl.arange(0, SEARCH)
        there = i < sequences
        k_length = tl.load(cu_k + i + 1, mask=there, other=0) - tl.load(cu_k + i, mask=there, other=0)
        q_length = tl.load(cu_q + i + 1, mask=there, other=0) - tl.load(cu_q + i, mask=there, other=0)
        ends = tiles + tl.cumsum(((tl.maximum(k_length, 0) + KEYS - 1) // KEYS).to(tl.int32), 0)
        before = there & (ends <= entry)
        blocks += tl.sum(tl.where(before, (tl.maximum(q_length, 0) + ROWS - 1) // ROWS, 0).to(tl.int32), 0)
        tiles = tl.max(ends, 0)
    if not bad:
        if HAS_RIGHT:
            empty = tl.where(keys > 0, tl.maximum(rows - keys - right, 0), 0)
            q_start += empty
            rows -= empty
        if HAS_LEFT:
            hidden = tl.where(rows > 0, tl.maximum(keys - rows - left, 0), 0)
            low = tl.minimum(number * KEYS, hidden)
            high = tl.minimum(number * KEYS + KEYS, hidden)
            _clear(dk, (k_start + low) * k_token, (k_start + high) * k_token)
            _clear(dv, (k_start + low) * v_token, (k_start + high) * v_token)
            k_start += hidden
            keys -= hidden
    tl.store(record, q_start.to(tl.int32))
    tl.store(record + 1, tl.where(keys > 0, rows, 0))
    tl.store(record + 2, k_start.to(tl.int32))
    tl.store(record + 3, keys)
    tl.store(record + 4, number.to(tl.int32))
    tl.store(record + 5, blocks)
    tl.store(record + 6, tl.where(bad, 0x7FC00000, 0))


@triton.jit
def _clear(x, begin, end):
    for first in range(begin, end, _ZEROS):
        i = first + tl.arange(0, _ZEROS)
        tl.store(x + i, tl.zeros([_ZEROS], x.dtype.element_ty), mask=i < end)
