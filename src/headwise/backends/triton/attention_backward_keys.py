"""The second kernel of attention backward: dk and dv.

A program owns a tile of keys and walks over the queries that see it, of all heads that share the key head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headwise.backends.triton.bf16x3 import as_operand, load_operand, multiply, transposed
from headwise.backends.triton.blocks import head_start, store_rows
from headwise.backends.triton.dropout import dropout_of, kept_tile
from headwise.backends.triton.parameters import Parameters, Sizes
from headwise.backends.triton.scores import cap_slope, key_exists, key_tile, power, tile_logits, visible_rows


@triton.jit
def _add_to_dkdv(
    dk, dv, k_tile, v_tile, grad_out, q, stats, mask, bias, batch, head, first_key, key, begin, stop, gap_at, gap, first,
    past, extent, p, dropout, PARTIAL: tl.constexpr, WANT_DK: tl.constexpr, WANT_DV: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Everything transposed, keys down and queries across, so that the weights feed the products as they are."""
    QUERIES: tl.constexpr = V.QUERIES
    # The whole rows need no check of their place, but an empty row may hold NaN wherever a mask or bias can make one.
    MAY_BE_EMPTY: tl.constexpr = mask is not None or bias is not None
    lane = tl.arange(0, QUERIES)
    for at in range(begin, stop, QUERIES):
        block = at + tl.where(at >= gap_at, gap, 0)
        row = block + lane
        inside = (row >= first) & (row < past)
        start = tl.full((), 0, tl.int64) + block
        at_stats = stats + (start + lane)[:, None] * 4 + tl.arange(0, 4)[None, :]
        if PARTIAL:
            four = tl.load(at_stats, mask=inside[:, None], other=0.0)
        else:
            four = tl.load(at_stats)
        first_and_third, second_and_fourth = tl.split(tl.reshape(four, [QUERIES, 2, 2]))
        own_lse, _ = tl.split(first_and_third)
        delta, _ = tl.split(second_and_fourth)
        if MAY_BE_EMPTY:
            inside &= own_lse != float("inf")
        if PARTIAL or MAY_BE_EMPTY:
            own_lse = tl.where(inside, own_lse, float("inf"))
        CHECK: tl.constexpr = PARTIAL or MAY_BE_EMPTY
        q_tile = load_operand(q + start * p.row.q, lane, p.row.q, inside, V.D, V.BLOCK_D, CHECK, V)
        do_tile = load_operand(grad_out + start * p.row.grad, lane, p.row.grad, inside, V.DV, V.BLOCK_DV, CHECK, V)
        products = multiply(k_tile, transposed(q_tile, V), None, V)  # [KEYS, QUERIES]
        there = inside[None, :] & key_exists(key, extent.band, V)[:, None]
        logits, capped, seen = tile_logits(
            products, mask, bias, batch, head, row[None, :], key[:, None], there, extent, p, PARTIAL, V
        )
        weights = power(logits - own_lse[None, :], V.UNIT)
        if CHECK:
            weights = tl.where(seen, weights, 0.0)
        dropped = weights
        if dropout is not None:
            keep = kept_tile(dropout, block, first_key, QUERIES, V.KEYS, True)
            dropped = tl.where(keep, weights, 0.0)
        if WANT_DV:
            dv = multiply(as_operand(dropped, V), do_tile, dv, V)
        if WANT_DK:
            dweights = multiply(v_tile, transposed(do_tile, V), None, V)
            if dropout is not None:
                dweights = tl.where(keep, dweights * dropout.scale, 0.0)
            dlogits = weights * (dweights - delta[None, :])
            if V.CAP:
                dlogits *= cap_slope(capped, p.softcap, V.UNIT)
            if CHECK:
                dlogits = tl.where(seen, dlogits, 0.0)
            dk = multiply(as_operand(dlogits, V), q_tile, dk, V)
    return dk, dv


@triton.jit(do_not_specialize=Sizes._fields)
def backward_keys(
    q, k, v, mask, bias, sink, q_lengths, kv_lengths, kv_starts, cu_q, cu_k, seed, grad_out, stats, dk, dv,
    queries, keys, heads, group, tiles, sequences, longest_q, longest_k, left, right,
    batch_strides, head_strides, row_strides, key_strides, scale, softcap, dropping,
    GROUPED: tl.constexpr, WANT_DK: tl.constexpr, WANT_DV: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    KEYS: tl.constexpr = V.KEYS
    BLOCK_D: tl.constexpr = V.BLOCK_D
    BLOCK_DV: tl.constexpr = V.BLOCK_DV
    n = Sizes(queries, keys, heads, group, tiles, sequences, longest_q, longest_k, left, right)
    p = Parameters(batch_strides, head_strides, row_strides, key_strides, scale, softcap)
    program = tl.program_id(0)
    tile = program % n.tiles  # under a causal mask the first tiles have most to do
    key_heads = n.heads // n.group
    key_head = (program // n.tiles) % key_heads
    batch = (program // n.tiles // key_heads).to(tl.int64)
    extent, tile = key_tile(tile, (q_lengths, kv_lengths, kv_starts), cu_q, cu_k, batch, n, V)
    if tile * KEYS < extent.all_keys:
        lane = tl.arange(0, KEYS)
        key = tile * KEYS + lane
        exists = key_exists(key, extent.band, V)
        start = extent.k_start + tile * KEYS
        k_base = head_start(k, p.batch.k, p.head.k, batch, key_head, V.ALIGN) + start * p.row.k
        v_base = head_start(v, p.batch.v, p.head.v, batch, key_head, V.ALIGN) + start * p.row.v
        k_tile = load_operand(k_base, lane, p.row.k, exists, V.D, BLOCK_D, True, V)  # [KEYS, BLOCK_D]
        v_tile = load_operand(v_base, lane, p.row.v, exists, V.DV, BLOCK_DV, True, V)  # [KEYS, BLOCK_DV]
        first, past, blocks, whole, whole_past = visible_rows(tile, extent, V)
        gap = whole_past - whole
        shift = 0
        if BLOCK_D >= 256:
            # Every tile starts at rows of its own and comes round to the first: programs of one head that read the same
            # rows at the same time wait for each other at the same part of the cache.
            shift = tl.where(gap > 0, tile * KEYS // V.QUERIES * V.QUERIES % tl.maximum(gap, 1), 0)
        sum_dk = tl.zeros([KEYS, BLOCK_D], tl.float32)
        sum_dv = tl.zeros([KEYS, BLOCK_DV], tl.float32)
        members = 1  # as a constant, it leaves no loop behind
        if GROUPED:
            members = n.group
        for member in range(0, members):
            head = key_head * n.group + member
            q_base = head_start(q, p.batch.q, p.head.q, batch, head, V.ALIGN) + extent.q_start * p.row.q
            g_base = head_start(grad_out, p.batch.grad, p.head.grad, batch, head, V.ALIGN) + extent.q_start * p.row.grad
            stats_base = stats + ((batch * n.heads + head) * n.queries + extent.q_start) * 4
            dropout = dropping
            if seed is not None:
                dropout = dropout_of(dropping, seed, extent.number, head)
            sum_dk, sum_dv = _add_to_dkdv(
                sum_dk, sum_dv, k_tile, v_tile, g_base, q_base, stats_base, mask, bias, batch, head, tile * KEYS, key,
                whole + shift, whole_past + shift, whole_past, -gap, first, past, extent, p, dropout, False, WANT_DK,
                WANT_DV, V,
            )  # fmt: skip
            sum_dk, sum_dv = _add_to_dkdv(
                sum_dk, sum_dv, k_tile, v_tile, g_base, q_base, stats_base, mask, bias, batch, head, tile * KEYS, key,
                blocks, past - gap, whole, gap, first, past, extent, p, dropout, True, WANT_DK, WANT_DV, V,
            )  # fmt: skip
        # Keys that do not exist have no gradient; the sums of their lanes mean nothing.
        if WANT_DK:
            sum_dk = tl.where(exists[:, None], sum_dk * p.scale, 0.0)
            sum_dk = tl.where(extent.bad, float("nan"), sum_dk)
            dk_base = head_start(dk, p.batch.dk, p.head.dk, batch, key_head, V.ALIGN) + start * p.row.dk
            store_rows(dk_base, lane, p.row.dk, key < extent.all_keys, sum_dk, V.D, BLOCK_D)
        if WANT_DV:
            if seed is not None:
                sum_dv *= dropping.scale
            sum_dv = tl.where(exists[:, None], sum_dv, 0.0)
            sum_dv = tl.where(extent.bad, float("nan"), sum_dv)
            dv_base = head_start(dv, p.batch.dv, p.head.dv, batch, key_head, V.ALIGN) + start * p.row.dv
            store_rows(dv_base, lane, p.row.dv, key < extent.all_keys, sum_dv, V.DV, BLOCK_DV)
