"""The first kernel of attention backward: delta, dq and what each tile adds to the gradient of the sink.

A program owns a tile of queries and walks over the keys that it sees, as in the forward. It keeps each row's lse and delta
for the kernels that follow.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headwise.backends.triton.bf16x3 import as_float32, as_operand, load_operand, multiply, transposed, with_rows
from headwise.backends.triton.blocks import head_start, load_rows, store_rows
from headwise.backends.triton.dropout import dropout_of, kept_tile
from headwise.backends.triton.parameters import Parameters, Sizes
from headwise.backends.triton.scores import cap_slope, power, query_tile, sees_some_key, tile_logits, visible_keys


@triton.jit
def _add_to_dq(
    dq, found, q_tile, do_tile, own_lse, delta, k, v, mask, bias, batch, head, first_row, row, begin, stop, gap_at, gap,
    first, past, extent, p, dropout, FIND: tl.constexpr, PARTIAL: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """dq over the blocks of keys from ``begin`` to ``stop``; from ``gap_at`` on, ``gap`` keys are left out.

    FIND: ``found`` becomes 1 for the rows that see some of these keys. PARTIAL: some rows do not see some of these keys.
    """
    lane = tl.arange(0, V.KEYS)
    exists = row < extent.rows
    for at in range(begin, stop, V.KEYS):
        block = at + tl.where(at >= gap_at, gap, 0)
        key = block + lane
        inside = (key >= first) & (key < past)
        start = tl.full((), 0, tl.int64) + block
        k_tile = load_operand(k + start * p.row.k, lane, p.row.k, inside, V.D, V.BLOCK_D, PARTIAL, V)
        v_tile = load_operand(v + start * p.row.v, lane, p.row.v, inside, V.DV, V.BLOCK_DV, PARTIAL, V)
        products = multiply(q_tile, transposed(k_tile, V), None, V)  # [QUERIES, KEYS]
        dweights = multiply(do_tile, transposed(v_tile, V), None, V)
        there = exists[:, None] & inside[None, :]
        logits, capped, seen = tile_logits(
            products, mask, bias, batch, head, row[:, None], key[None, :], there, extent, p, PARTIAL, V
        )
        weights = power(logits - own_lse[:, None], V.UNIT)
        if dropout is not None:
            keep = kept_tile(dropout, first_row, block, V.QUERIES, V.KEYS, False)
            dweights = tl.where(keep, dweights * dropout.scale, 0.0)
        dlogits = weights * (dweights - delta[:, None])
        if V.CAP:
            dlogits *= cap_slope(capped, p.softcap, V.UNIT)
        if PARTIAL or mask is not None or bias is not None:
            dlogits = tl.where(seen, dlogits, 0.0)
            if mask is not None or bias is not None:
                # A key that is hidden from every row may hold NaN, and zero times NaN is NaN.
                k_tile = with_rows(k_tile, tl.max((there & seen).to(tl.int32), 0) > 0, V)
            if FIND:
                found = tl.maximum(found, tl.max((there & seen).to(tl.int32), 1))
        dq = multiply(as_operand(dlogits, V), k_tile, dq, V)
    return dq, found


@triton.jit(do_not_specialize=Sizes._fields)
def backward_queries(
    q, k, v, mask, bias, sink, q_lengths, kv_lengths, kv_starts, cu_q, cu_k, seed, grad_out, grad_lse, out, lse, dq,
    stats, sink_partials,
    queries, keys, heads, group, tiles, sequences, longest_q, longest_k, left, right,
    batch_strides, head_strides, row_strides, key_strides, scale, softcap, dropping, V: tl.constexpr,
):  # fmt: skip
    """stats: ``[B, Hq, Sq, 4]``, of which two are used; sink_partials: ``[B, Hq, tiles]``."""
    QUERIES: tl.constexpr = V.QUERIES
    BLOCK_D: tl.constexpr = V.BLOCK_D
    # With a sink, the lse of a row that sees nothing is finite: only the scores tell.
    FIND: tl.constexpr = sink is not None and (mask is not None or bias is not None)
    n = Sizes(queries, keys, heads, group, tiles, sequences, longest_q, longest_k, left, right)
    p = Parameters(batch_strides, head_strides, row_strides, key_strides, scale, softcap)
    program = tl.program_id(0)
    tile = n.tiles - 1 - program % n.tiles  # under a causal mask the last tiles have most to do: they go first
    head = (program // n.tiles) % n.heads
    batch = (program // n.tiles // n.heads).to(tl.int64)
    extent, tile = query_tile(tile, (q_lengths, kv_lengths, kv_starts), cu_q, cu_k, batch, n, V)
    of_sink = tl.full((), 0.0, tl.float32)
    if tile * QUERIES < extent.all_rows:
        lane = tl.arange(0, QUERIES)
        row = tile * QUERIES + lane
        exists = row < extent.rows
        start = extent.q_start + tile * QUERIES
        at_row = (batch * n.heads + head) * n.queries + start + lane

        row_lse = tl.load(lse + at_row, mask=exists, other=-float("inf"))
        counts = exists & (row_lse != -float("inf"))  # a row with no denominator has no gradient at all
        alive = counts  # a row that sees no key has none but that of the sink, whatever q and grad_out hold
        if sink is not None:
            alive &= sees_some_key(row, extent, V)
        o_base = head_start(out, p.batch.out, p.head.out, batch, head, V.ALIGN) + start * p.row.out
        g_base = head_start(grad_out, p.batch.grad, p.head.grad, batch, head, V.ALIGN) + start * p.row.grad
        q_base = head_start(q, p.batch.q, p.head.q, batch, head, V.ALIGN) + start * p.row.q
        out_tile = load_rows(o_base, lane, p.row.out, alive, V.DV, V.BLOCK_DV, True)  # [QUERIES, BLOCK_DV]
        do_tile = load_operand(g_base, lane, p.row.grad, alive, V.DV, V.BLOCK_DV, True, V)
        delta = tl.sum(out_tile.to(tl.float32) * as_float32(do_tile, V), 1)
        dlse = tl.zeros([QUERIES], tl.float32)
        if grad_lse is not None:
            dlse = tl.load(grad_lse + at_row, mask=counts, other=0.0)
            delta -= tl.where(alive, dlse, 0.0)
        own_lse = tl.where(alive, row_lse * V.UNIT, float("inf"))  # its weights become zeros
        # A row's lse and delta lie side by side in 16 bytes: one load that is wide enough for the compiler to spread over
        # all threads. Two loads of a number per row each were held sixteen times over, in registers.
        column = tl.arange(0, 4)[None, :]
        pair = tl.where(column == 0, own_lse[:, None], tl.where(column == 1, delta[:, None], 0.0))
        tl.store(stats + at_row[:, None] * 4 + column, pair, mask=exists[:, None])

        q_tile = load_operand(q_base, lane, p.row.q, alive, V.D, BLOCK_D, True, V)  # [QUERIES, BLOCK_D]
        k_base = head_start(k, p.batch.k, p.head.k, batch, head // n.group, V.ALIGN) + extent.k_start * p.row.k
        v_base = head_start(v, p.batch.v, p.head.v, batch, head // n.group, V.ALIGN) + extent.k_start * p.row.v
        first, past, blocks, whole, whole_past = visible_keys(tile, extent, V)
        gap = whole_past - whole
        sum_ = tl.zeros([QUERIES, BLOCK_D], tl.float32)
        found = tl.zeros([QUERIES], tl.int32)
        dropout = dropping
        if seed is not None:
            dropout = dropout_of(dropping, seed, extent.number, head)
        sum_, found = _add_to_dq(
            sum_, found, q_tile, do_tile, own_lse, delta, k_base, v_base, mask, bias, batch, head, tile * QUERIES, row,
            whole, whole_past, whole, 0, first, past, extent, p, dropout, FIND, False, V,
        )  # fmt: skip
        sum_, found = _add_to_dq(
            sum_, found, q_tile, do_tile, own_lse, delta, k_base, v_base, mask, bias, batch, head, tile * QUERIES, row,
            blocks, past - gap, whole, gap, first, past, extent, p, dropout, FIND, True, V,
        )  # fmt: skip
        if FIND:
            tl.store(stats + at_row * 4, float("inf"), mask=alive & (found == 0))
            alive &= found > 0
        if sink is not None:
            share = power((tl.load(sink + head).to(tl.float32) - row_lse) * V.UNIT, V.UNIT)
            of_sink = tl.sum(tl.where(counts, share * tl.where(alive, -delta, dlse), 0.0), 0)
            of_sink = tl.where(extent.bad, float("nan"), of_sink)
        sum_ *= p.scale
        if V.LEFT or V.RIGHT or mask is not None or bias is not None or q_lengths is not None:
            sum_ = tl.where(alive[:, None], sum_, 0.0)  # zero times a NaN that other rows of the tile see
        sum_ = tl.where(extent.bad, float("nan"), sum_)
        dq_base = head_start(dq, p.batch.dq, p.head.dq, batch, head, V.ALIGN) + start * p.row.dq
        store_rows(dq_base, lane, p.row.dq, row < extent.all_rows, sum_, V.D, BLOCK_D)
    if sink_partials is not None:
        tl.store(sink_partials + program, of_sink)
