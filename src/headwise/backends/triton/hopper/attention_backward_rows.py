"""What happens around the Hopper backward kernel: delta and lse go in, sums of dQ come out, packed tiles are found.

Inside, the rows of a head lie in whole blocks: the last block of a sequence is filled up with rows of weight zero, whose lse
is +inf.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headwise.backends.triton.scores import LOG2E, packed_tile

RECORD = tl.constexpr(8)  # numbers that tell of a tile of keys, or of a block of rows, of a packed batch


@triton.jit
def _rows_of(block, batch, records, rows, row_blocks):
    """(first row of a sequence, its rows, number of the block in it, its place among all blocks, bad offsets?)

    Rows at the beginning that see nothing are left out: of a dense call, by the host, and of a packed batch, in `records`.
    """
    first = tl.full((), 0, tl.int64)
    place = batch * row_blocks + block
    bad = False
    if records is not None:
        record = records + block * RECORD
        first = tl.load(record).to(tl.int64)
        rows = tl.load(record + 1)
        block = tl.load(record + 2)
        bad = tl.load(record + 3) != 0
    return first, rows, block, place, bad


@triton.jit(
    do_not_specialize=[
        "rows", "heads", "row_blocks", "all_blocks", "lse_rows", "lse_first", "o_b", "o_h", "g_b", "g_h",
    ]
)  # fmt: skip
def prepare(
    grad_out, grad_lse, out, lse, sink, records, stats, sums, turns, ticket, sink_parts,
    rows, heads, row_blocks, all_blocks, lse_rows, lse_first, o_b, o_h, o_s, g_b, g_h, g_s,
    D: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, SUMS: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """A block of rows of a head: (lse · log2 e, delta) for the kernel; its turn set to 0, or its sums of dQ to zeros.

    lse has ``lse_rows`` rows per head; those of the call begin at ``lse_first``.
    """
    program = tl.program_id(0)
    head = (program // row_blocks) % heads
    batch = (program // row_blocks // heads).to(tl.int64)
    start, rows, block, place, _ = _rows_of(program % row_blocks, batch, records, rows, row_blocks)
    lane = tl.arange(0, ROWS)
    row = block * ROWS + lane
    inside = row < rows
    at_row = (batch * heads + head) * lse_rows + lse_first + start + row
    row_lse = tl.load(lse + at_row, mask=inside, other=-float("inf"))
    alive = inside & (row_lse != -float("inf"))  # an empty row has no gradient, whatever its inputs hold
    d = tl.arange(0, BLOCK_D)
    there = alive[:, None] & (d < D)[None, :]
    first = start + block.to(tl.int64) * ROWS
    o_base = out + tl.multiple_of(batch * o_b + head * o_h.to(tl.int64), ALIGN) + first * o_s
    g_base = grad_out + tl.multiple_of(batch * g_b + head * g_h.to(tl.int64), ALIGN) + first * g_s
    out_tile = tl.load(o_base + lane.to(tl.int64)[:, None] * o_s + d[None, :], mask=there, other=0.0)
    do_tile = tl.load(g_base + lane.to(tl.int64)[:, None] * g_s + d[None, :], mask=there, other=0.0)
    delta = tl.sum(out_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    if grad_lse is not None:
        delta -= tl.load(grad_lse + at_row, mask=alive, other=0.0)
    own_lse = tl.where(alive, row_lse * LOG2E, float("inf"))  # its weights become zeros
    padded = head.to(tl.int64) * all_blocks + place
    tl.store(stats + padded * (2 * ROWS) + lane, own_lse)
    tl.store(stats + padded * (2 * ROWS) + ROWS + lane, delta)
    if program == 0:
        tl.store(ticket, 0)
    if turns is not None:
        tl.store(turns + padded, 0)
    else:
        i = tl.arange(0, SUMS)
        for part in tl.static_range(0, ROWS * WIDTH, SUMS):
            tl.store(sums + padded * (ROWS * WIDTH) + part + i, tl.zeros([SUMS], tl.float32))
    if sink_parts is not None:
        share = tl.exp2(tl.load(sink + head).to(tl.float32) * LOG2E - own_lse)
        of_sink = -tl.sum(tl.where(alive, share * delta, 0.0), 0)
        tl.store(sink_parts + program, of_sink)  # [B, Hq, blocks]


@triton.jit(do_not_specialize=["rows", "heads", "row_blocks", "all_blocks", "dq_b", "dq_h"])
def finish(
    sums, turns, records, dq,
    rows, heads, row_blocks, all_blocks, dq_b, dq_h, dq_s, scale,
    D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PIECES: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """A piece of a block of dQ: ``[64, COLUMNS]`` sums, in the order of a warpgroup's registers, as rows in dq's dtype."""
    program = tl.program_id(0)
    piece = program % PIECES
    head = (program // PIECES // row_blocks) % heads
    batch = (program // PIECES // row_blocks // heads).to(tl.int64)
    start, rows, block, place, bad = _rows_of((program // PIECES) % row_blocks, batch, records, rows, row_blocks)
    if block * ROWS < rows:
        padded = head.to(tl.int64) * all_blocks + place
        flat = tl.load(sums + (padded * PIECES + piece) * (64 * COLUMNS) + tl.arange(0, 64 * COLUMNS))
        if turns is not None:
            flat = tl.where(tl.load(turns + padded) > 0, flat, 0.0)  # nobody has stored there
        if records is not None:
            flat = tl.where(bad, float("nan"), flat)
        tile = tl.reshape(flat * scale, [4, COLUMNS // 8, 8, 4, 2, 2])
        tile = tl.reshape(tl.permute(tile, (0, 4, 2, 1, 3, 5)), [64, COLUMNS])
        lane, d = tl.arange(0, 64), tl.arange(0, COLUMNS)
        row = block * ROWS + lane
        if ROWS == 128:
            row += piece * 64
        else:
            d += piece * COLUMNS
        base = dq + tl.multiple_of(batch * dq_b + head * dq_h.to(tl.int64), ALIGN)
        at = base + (start + row)[:, None] * dq_s + d[None, :]
        tl.store(at, tile.to(dq.dtype.element_ty), mask=(row < rows)[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["tiles", "sequences", "q_total", "k_total", "longest_q", "longest_k", "left", "right"])
def place(
    cu_q, cu_k, records,
    tiles, sequences, q_total, k_total, longest_q, longest_k, left, right,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """Where the ``tiles`` tiles of keys of a packed batch lie, and after them its blocks of rows: a record each."""
    program = tl.program_id(0)
    if program < tiles:
        _place_tile(
            program, cu_q, cu_k, records + program * RECORD, sequences, q_total, k_total, longest_q, longest_k, left, right,
            HAS_LEFT, HAS_RIGHT, ROWS, KEYS, SEARCH,
        )  # fmt: skip
    else:
        _place_rows(
            program - tiles, cu_q, cu_k, records + program * RECORD, sequences, q_total, k_total, longest_q, longest_k,
            right, HAS_RIGHT, ROWS, SEARCH,
        )  # fmt: skip


@triton.jit
def _place_rows(
    block, cu_q, cu_k, record, sequences, q_total, k_total, longest_q, longest_k, right,
    HAS_RIGHT: tl.constexpr, ROWS: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """Without the rows that see nothing: (first row, rows, number of the block, bad offsets?)"""
    first, rows, _, keys, block, bad = packed_tile(
        block, cu_q, cu_k, sequences, q_total, k_total, longest_q, longest_k, ROWS, SEARCH
    )
    if HAS_RIGHT:
        empty = tl.where(bad | (keys == 0), 0, tl.maximum(rows - keys - right, 0))
        first += empty
        rows -= empty
    tl.store(record, first.to(tl.int32))
    tl.store(record + 1, rows)
    tl.store(record + 2, block.to(tl.int32))
    tl.store(record + 3, bad.to(tl.int32))


@triton.jit
def _place_tile(
    entry, cu_q, cu_k, record, sequences, q_total, k_total, longest_q, longest_k, left, right,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """Without the rows that see nothing and the keys that nothing sees:

    (first row, rows, first key, keys, number of the tile, first block of rows, zero or NaN as bits)
    """
    k_start, keys, q_start, rows, n, bad = packed_tile(
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
            k_start += hidden
            keys -= hidden
    tl.store(record, q_start.to(tl.int32))
    tl.store(record + 1, tl.where(keys > 0, rows, 0))
    tl.store(record + 2, k_start.to(tl.int32))
    tl.store(record + 3, keys)
    tl.store(record + 4, n.to(tl.int32))
    tl.store(record + 5, blocks)
    tl.store(record + 6, tl.where(bad, 0x7FC00000, 0))
