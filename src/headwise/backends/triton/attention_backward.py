"""Attention backward in Triton, dense and packed: two kernels, no atomics, every sum in a fixed order.

    p_ij = exp(s_ij - lse_i)      delta_i = dO_i · O_i - dlse_i      ds_ij = p_ij (dO_i · v_j - delta_i)
    dq_i = scale Σ_j ds_ij k_j    dk_j = scale Σ_i ds_ij q_i         dv_j = Σ_i p_ij dO_i

The first kernel owns a tile of queries: it computes delta, keeps it for the second, and sums dq over the keys. The second
owns a tile of keys and sums dk and dv over the queries of all heads that share the key head. Both compute the scores
anew: seven matrix products where five would do with atomics. Dao, "FlashAttention-2", 2023.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwise import layout
from headwise.backends.triton import hopper, tile_sizes
from headwise.backends.triton.attention_bias import bias_gradient
from headwise.backends.triton.attention_forward import packed_tiles, search_block
from headwise.backends.triton.blocks import (
    Strides,
    as_bytes,
    block_of,
    check_row_strides,
    common_alignment,
    in_order,
    load_rows,
    load_scores,
    score_strides,
    store_rows,
)
from headwise.backends.triton.launch import Plan
from headwise.backends.triton.parts import (
    load_tile,
    rows_kept,
    split,
    split_strides,
    tile_of,
    tile_precision,
    tile_product,
    turned,
)
from headwise.backends.triton.parts import whole as whole_tile
from headwise.backends.triton.scores import (
    band_of,
    cap_slope,
    dot_precision,
    in_band,
    logit_unit,
    packed_tile,
    power,
    tile_logits,
    visible_keys,
)
from headwise.backends.triton.tile_sizes import Tile

if TYPE_CHECKING:
    from headwise.ops.attention._arguments import Flags


@triton.jit
def _add_to_dq(
    dq, q_tile, do_tile, own_lse, delta, k, v, mask, bias, begin, stop, gap_at, gap, first, past, row, rows_inside,
    offset, keys, left, right, k_s, v_s, m_q, m_k, b_q, b_k, scale, softcap,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_CAP: tl.constexpr, PARTIAL: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, KEYS)
    for at in range(begin, stop, KEYS):
        n = at + tl.where(at >= gap_at, gap, 0)
        key = n + lane
        inside = (key >= first) & (key < past)
        key_base = tl.full((), 0, tl.int64) + n
        k_tile = load_tile(k + key_base * k_s, lane, k_s, inside, D, BLOCK_D, PARTIAL, PRECISION)  # [KEYS, BLOCK_D]
        v_tile = load_tile(v + key_base * v_s, lane, v_s, inside, DV, BLOCK_DV, PARTIAL, PRECISION)  # [KEYS, BLOCK_DV]
        products = tile_product(q_tile, turned(k_tile, PRECISION), None, PRECISION)  # [QUERIES, KEYS]
        dweights = tile_product(do_tile, turned(v_tile, PRECISION), None, PRECISION)
        capped = tile_logits(products, scale, softcap, HAS_CAP, UNIT)
        logits = capped
        if bias is not None:
            there = rows_inside[:, None] & inside[None, :]
            added = load_scores(bias, row[:, None], key[None, :], b_q, b_k, there).to(tl.float32) * UNIT
            logits = tl.where(added == -float("inf"), -float("inf"), logits + added)
        weights = power(logits - own_lse[:, None], UNIT)
        dlogits = weights * (dweights - delta[:, None])
        if HAS_CAP:
            dlogits *= cap_slope(capped, softcap, UNIT)
        if PARTIAL or mask is not None or bias is not None:
            seen = logits > -float("inf")
            if PARTIAL:
                seen &= in_band((row + offset)[:, None], key[None, :], keys, left, right, HAS_LEFT, HAS_RIGHT)
            if mask is not None:
                there = rows_inside[:, None] & inside[None, :]
                seen &= load_scores(mask, row[:, None], key[None, :], m_q, m_k, there) != 0
            dlogits = tl.where(seen, dlogits, 0.0)
            if mask is not None or bias is not None:
                # A key that is hidden from every row may hold NaN, and zero times NaN is NaN.
                used = tl.max((rows_inside[:, None] & seen).to(tl.int32), 0) > 0
                k_tile = rows_kept(k_tile, used, PRECISION)
        dq = tile_product(tile_of(dlogits, PRECISION), k_tile, dq, PRECISION)
    return dq


@triton.jit(
    do_not_specialize=[
        "q_length", "k_length", "heads", "group", "tiles", "sequences", "longest_q", "longest_k", "left", "right", "q_b",
        "q_h", "k_b", "k_h", "v_b", "v_h", "o_b", "o_h", "g_b", "g_h", "dq_b", "dq_h", "m_b", "m_h", "m_q", "b_b", "b_h",
        "b_q",
    ]
)  # fmt: skip
def _backward_queries(
    grad_out, grad_lse, q, k, v, out, lse, mask, bias, lengths, sink, cu_q, cu_k, dq, stats, sink_parts,
    q_length, k_length, heads, group, tiles, sequences, longest_q, longest_k, left, right,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, o_b, o_h, o_s, g_b, g_h, g_s, dq_b, dq_h, dq_s, m_b, m_h, m_q, m_k,
    b_b, b_h, b_q, b_k, scale, softcap,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_CAP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, ALIGN: tl.constexpr,
    SEARCH: tl.constexpr, PRECISION: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    tile = tiles - 1 - program % tiles  # under a causal mask the last tiles have most to do: they go first
    head = (program // tiles) % heads
    batch = (program // tiles // heads).to(tl.int64)
    key_head = head // group
    rows, keys, bad = q_length, k_length, False
    q_start, k_start = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    if cu_q is not None:
        q_start, rows, k_start, keys, tile, bad = packed_tile(
            tile, cu_q, cu_k, sequences, q_length, k_length, longest_q, longest_k, QUERIES, SEARCH
        )
    if lengths is not None:
        length = tl.load(lengths + batch).to(tl.int64)
        bad = (length < 0) | (length > k_length)
        keys = tl.where(bad, 0, length).to(tl.int32)
    of_sink = tl.full((), 0.0, tl.float32)
    if tile * QUERIES < rows:
        lane = tl.arange(0, QUERIES)
        row = tile * QUERIES + lane
        rows_inside = row < rows
        offset = keys - rows
        tile_start = q_start + tile * QUERIES
        o_base = out + tl.multiple_of(batch * o_b + head * o_h.to(tl.int64), ALIGN) + tile_start * o_s
        g_base = grad_out + tl.multiple_of(batch * g_b + head * g_h.to(tl.int64), ALIGN) + tile_start * g_s
        q_base = q + tl.multiple_of(batch * q_b + head * q_h.to(tl.int64), ALIGN) + tile_start * q_s
        at_row = (batch * heads + head) * q_length + tile_start + lane

        row_lse = tl.load(lse + at_row, mask=rows_inside, other=-float("inf"))
        alive = rows_inside & (row_lse != -float("inf"))  # an empty row has no gradient, whatever its inputs hold
        out_tile = load_rows(o_base, lane, o_s, alive, DV, BLOCK_DV, True)  # [QUERIES, BLOCK_DV]
        do_tile = load_tile(g_base, lane, g_s, alive, DV, BLOCK_DV, True, PRECISION)
        row_delta = tl.sum(out_tile.to(tl.float32) * whole_tile(do_tile, PRECISION), 1)
        if grad_lse is not None:
            row_delta -= tl.load(grad_lse + at_row, mask=alive, other=0.0)
        own_lse = tl.where(alive, row_lse * UNIT, float("inf"))  # its weights become zeros
        column = tl.arange(0, 4)[None, :]
        pair = tl.where(column == 0, own_lse[:, None], tl.where(column == 1, row_delta[:, None], 0.0))
        tl.store(stats + at_row[:, None] * 4 + column, pair, mask=rows_inside[:, None])
        if sink is not None:
            share = power(tl.load(sink + head).to(tl.float32) * UNIT - own_lse, UNIT)
            of_sink = -tl.sum(tl.where(alive, share * row_delta, 0.0), 0)

        q_tile = load_tile(q_base, lane, q_s, alive, D, BLOCK_D, True, PRECISION)  # [QUERIES, BLOCK_D]
        k_base = k + tl.multiple_of(batch * k_b + key_head * k_h.to(tl.int64), ALIGN) + k_start * k_s
        v_base = v + tl.multiple_of(batch * v_b + key_head * v_h.to(tl.int64), ALIGN) + k_start * v_s
        mask_base, bias_base = mask, bias
        if mask is not None:
            mask_base = mask + batch * m_b + head * m_h.to(tl.int64)
        if bias is not None:
            bias_base = bias + batch * b_b + head * b_h.to(tl.int64)
        first, past, start, whole, whole_past = visible_keys(
            tile, rows, offset, keys, left, right, HAS_LEFT, HAS_RIGHT, QUERIES, KEYS
        )

        sum_ = tl.zeros([QUERIES, BLOCK_D], tl.float32)
        gap = whole_past - whole
        sum_ = _add_to_dq(
            sum_, q_tile, do_tile, own_lse, row_delta, k_base, v_base, mask_base, bias_base, whole, whole_past, whole, 0,
            first, past, row, rows_inside, offset, keys, left, right, k_s, v_s, m_q, m_k, b_q, b_k, scale, softcap,
            HAS_LEFT, HAS_RIGHT, HAS_CAP, False, D, DV, BLOCK_D, BLOCK_DV, KEYS, PRECISION, UNIT,
        )  # fmt: skip
        sum_ = _add_to_dq(
            sum_, q_tile, do_tile, own_lse, row_delta, k_base, v_base, mask_base, bias_base, start, past - gap, whole, gap,
            first, past, row, rows_inside, offset, keys, left, right, k_s, v_s, m_q, m_k, b_q, b_k, scale, softcap,
            HAS_LEFT, HAS_RIGHT, HAS_CAP, True, D, DV, BLOCK_D, BLOCK_DV, KEYS, PRECISION, UNIT,
        )  # fmt: skip
        sum_ *= scale
        if cu_q is not None or lengths is not None:
            sum_ = tl.where(bad, float("nan"), sum_)
            of_sink = tl.where(bad, float("nan"), of_sink)
        dq_base = dq + tl.multiple_of(batch * dq_b + head * dq_h.to(tl.int64), ALIGN) + tile_start * dq_s
        store_rows(dq_base, lane, dq_s, rows_inside, sum_, D, BLOCK_D)
    if sink_parts is not None:
        tl.store(sink_parts + program, of_sink)  # [B, Hq, tiles]


@triton.jit
def _add_to_dkdv(
    dk, dv, k_tile, v_tile, grad_out, q, stats, mask, bias, begin, stop, gap_at, gap, first, past, key,
    offset, keys, left, right,
    q_s, g_s, m_q, m_k, b_q, b_k, scale, softcap,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_CAP: tl.constexpr, PARTIAL: tl.constexpr,
    WANT_DK: tl.constexpr, WANT_DV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, QUERIES: tl.constexpr, PRECISION: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Everything transposed, keys down and queries across, so that the weights feed the products as they are."""
    lane = tl.arange(0, QUERIES)
    for at in range(begin, stop, QUERIES):
        m = at + tl.where(at >= gap_at, gap, 0)
        row = m + lane
        inside = (row >= first) & (row < past)
        row_base = tl.full((), 0, tl.int64) + m
        # The whole rows need no check of their place, but an empty row may hold NaN wherever a mask or bias can make one.
        MAY_BE_EMPTY: tl.constexpr = mask is not None or bias is not None
        at_stats = stats + (row_base + lane)[:, None] * 4 + tl.arange(0, 4)[None, :]
        if PARTIAL:
            four = tl.load(at_stats, mask=inside[:, None], other=0.0)
        else:
            four = tl.load(at_stats)
        first_and_third, second_and_fourth = tl.split(tl.reshape(four, [QUERIES, 2, 2]))
        own_lse, _ = tl.split(first_and_third)
        row_delta, _ = tl.split(second_and_fourth)
        if MAY_BE_EMPTY:
            inside &= own_lse != float("inf")
        if PARTIAL or MAY_BE_EMPTY:
            own_lse = tl.where(inside, own_lse, float("inf"))
        q_tile = load_tile(q + row_base * q_s, lane, q_s, inside, D, BLOCK_D, PARTIAL or MAY_BE_EMPTY, PRECISION)
        do_tile = load_tile(
            grad_out + row_base * g_s, lane, g_s, inside, DV, BLOCK_DV, PARTIAL or MAY_BE_EMPTY, PRECISION
        )
        products = tile_product(k_tile, turned(q_tile, PRECISION), None, PRECISION)  # [KEYS, QUERIES]
        capped = tile_logits(products, scale, softcap, HAS_CAP, UNIT)
        logits = capped
        if bias is not None:
            there = inside[None, :] & (key < keys)[:, None]
            added = load_scores(bias, row[None, :], key[:, None], b_q, b_k, there).to(tl.float32) * UNIT
            logits = tl.where(added == -float("inf"), -float("inf"), logits + added)
        weights = power(logits - own_lse[None, :], UNIT)
        if PARTIAL or MAY_BE_EMPTY:
            seen = logits > -float("inf")
            if PARTIAL:
                seen &= in_band((row + offset)[None, :], key[:, None], keys, left, right, HAS_LEFT, HAS_RIGHT)
            if mask is not None:
                there = inside[None, :] & (key < keys)[:, None]
                seen &= load_scores(mask, row[None, :], key[:, None], m_q, m_k, there) != 0
            weights = tl.where(seen, weights, 0.0)
        if WANT_DV:
            dv = tile_product(tile_of(weights, PRECISION), do_tile, dv, PRECISION)
        if WANT_DK:
            dweights = tile_product(v_tile, turned(do_tile, PRECISION), None, PRECISION)
            dlogits = weights * (dweights - row_delta[None, :])
            if HAS_CAP:
                dlogits *= cap_slope(capped, softcap, UNIT)
            if PARTIAL or MAY_BE_EMPTY:
                dlogits = tl.where(seen, dlogits, 0.0)
            dk = tile_product(tile_of(dlogits, PRECISION), q_tile, dk, PRECISION)
    return dk, dv


@triton.jit(
    do_not_specialize=[
        "q_length", "k_length", "heads", "group", "tiles", "sequences", "longest_q", "longest_k", "left", "right", "q_b",
        "q_h", "k_b", "k_h", "v_b", "v_h", "g_b", "g_h", "dk_b", "dk_h", "dv_b", "dv_h", "m_b", "m_h", "m_q", "b_b",
        "b_h", "b_q",
    ]
)  # fmt: skip
def _backward_keys(
    grad_out, q, k, v, stats, mask, bias, lengths, cu_q, cu_k, dk, dv,
    q_length, k_length, heads, group, tiles, sequences, longest_q, longest_k, left, right,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, g_b, g_h, g_s, dk_b, dk_h, dk_s, dv_b, dv_h, dv_s, m_b, m_h, m_q, m_k,
    b_b, b_h, b_q, b_k, scale, softcap,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_CAP: tl.constexpr, GROUPED: tl.constexpr, WANT_DK: tl.constexpr,
    WANT_DV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, ALIGN: tl.constexpr,
    SEARCH: tl.constexpr, PRECISION: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    tile = program % tiles  # under a causal mask the first tiles have most to do
    key_heads = heads // group
    key_head = (program // tiles) % key_heads
    batch = (program // tiles // key_heads).to(tl.int64)
    rows, keys, all_keys, bad = q_length, k_length, k_length, False
    q_start, k_start = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    if cu_q is not None:
        k_start, keys, q_start, rows, tile, bad = packed_tile(
            tile, cu_k, cu_q, sequences, k_length, q_length, longest_k, longest_q, KEYS, SEARCH
        )
        all_keys = keys
    if lengths is not None:
        length = tl.load(lengths + batch).to(tl.int64)
        bad = (length < 0) | (length > k_length)
        keys = tl.where(bad, 0, length).to(tl.int32)
    if tile * KEYS < all_keys:
        lane = tl.arange(0, KEYS)
        key = tile * KEYS + lane
        offset = keys - rows
        tile_start = k_start + tile * KEYS
        k_base = k + tl.multiple_of(batch * k_b + key_head * k_h.to(tl.int64), ALIGN) + tile_start * k_s
        v_base = v + tl.multiple_of(batch * v_b + key_head * v_h.to(tl.int64), ALIGN) + tile_start * v_s
        k_tile = load_tile(k_base, lane, k_s, key < keys, D, BLOCK_D, True, PRECISION)  # [KEYS, BLOCK_D]
        v_tile = load_tile(v_base, lane, v_s, key < keys, DV, BLOCK_DV, True, PRECISION)  # [KEYS, BLOCK_DV]

        # The rows that see some key of this tile, and within them those that see all of it.
        low, high = tile * KEYS, tl.minimum(tile * KEYS + KEYS, keys) - 1
        first, whole = rows * 0, rows * 0
        past, whole_past = rows, rows
        if HAS_RIGHT:
            first = tl.maximum(low - right - offset, 0)
            whole = tl.maximum(high - right - offset, 0)
        if HAS_LEFT:
            past = tl.minimum(high + left - offset + 1, rows)
            whole_past = tl.minimum(low + left - offset + 1, rows)
        past = tl.where(high < low, first, past)  # a tile past the last key
        start = first // QUERIES * QUERIES
        whole = tl.maximum(start, (whole + QUERIES - 1) // QUERIES * QUERIES)
        whole_past = whole_past // QUERIES * QUERIES
        if (whole_past < whole) | (past <= first):
            whole, whole_past = start, start

        gap = whole_past - whole
        shift = 0
        if BLOCK_D >= 256:
            # Every tile starts at rows of its own and comes round to the first: programs of one head that read the same
            # rows at the same time wait for each other at the same part of the cache.
            shift = tl.where(gap > 0, tile * KEYS // QUERIES * QUERIES % tl.maximum(gap, 1), 0)
        sum_dk = tl.zeros([KEYS, BLOCK_D], tl.float32)
        sum_dv = tl.zeros([KEYS, BLOCK_DV], tl.float32)
        members = 1  # as a constant, it leaves no loop behind
        if GROUPED:
            members = group
        for member in range(0, members):
            head = key_head * group + member
            q_base = q + tl.multiple_of(batch * q_b + head * q_h.to(tl.int64), ALIGN) + q_start * q_s
            g_base = grad_out + tl.multiple_of(batch * g_b + head * g_h.to(tl.int64), ALIGN) + q_start * g_s
            stats_base = stats + ((batch * heads + head) * q_length + q_start) * 4
            mask_base, bias_base = mask, bias
            if mask is not None:
                mask_base = mask + batch * m_b + head * m_h.to(tl.int64)
            if bias is not None:
                bias_base = bias + batch * b_b + head * b_h.to(tl.int64)
            sum_dk, sum_dv = _add_to_dkdv(
                sum_dk, sum_dv, k_tile, v_tile, g_base, q_base, stats_base, mask_base, bias_base, whole + shift,
                whole_past + shift, whole_past, -gap, first, past, key, offset, keys, left, right, q_s, g_s, m_q, m_k,
                b_q, b_k, scale, softcap,
                HAS_LEFT, HAS_RIGHT, HAS_CAP, False, WANT_DK, WANT_DV, D, DV, BLOCK_D, BLOCK_DV, QUERIES, PRECISION,
                UNIT,
            )  # fmt: skip
            sum_dk, sum_dv = _add_to_dkdv(
                sum_dk, sum_dv, k_tile, v_tile, g_base, q_base, stats_base, mask_base, bias_base, start, past - gap,
                whole, gap, first, past, key, offset, keys, left, right, q_s, g_s, m_q, m_k, b_q, b_k, scale, softcap,
                HAS_LEFT, HAS_RIGHT, HAS_CAP, True, WANT_DK, WANT_DV, D, DV, BLOCK_D, BLOCK_DV, QUERIES, PRECISION,
                UNIT,
            )  # fmt: skip
        # Keys past the length have no gradient; the sums of their lanes mean nothing.
        exists = (key < keys)[:, None]
        if WANT_DK:
            sum_dk = tl.where(exists, sum_dk * scale, 0.0)
            if cu_q is not None or lengths is not None:
                sum_dk = tl.where(bad, float("nan"), sum_dk)
            dk_base = dk + tl.multiple_of(batch * dk_b + key_head * dk_h.to(tl.int64), ALIGN) + tile_start * dk_s
            store_rows(dk_base, lane, dk_s, key < all_keys, sum_dk, D, BLOCK_D)
        if WANT_DV:
            sum_dv = tl.where(exists, sum_dv, 0.0)
            if cu_q is not None or lengths is not None:
                sum_dv = tl.where(bad, float("nan"), sum_dv)
            dv_base = dv + tl.multiple_of(batch * dv_b + key_head * dv_h.to(tl.int64), ALIGN) + tile_start * dv_s
            store_rows(dv_base, lane, dv_s, key < all_keys, sum_dv, DV, BLOCK_DV)


def attention_backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    mask: Tensor | None, bias: Tensor | None, kv_lengths: Tensor | None, sink: Tensor | None, flags: Flags,
    need_bias_grad: bool, need_sink_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    kv_lengths, sink, mask = in_order(kv_lengths), in_order(sink), as_bytes(mask)
    dq, dk, dv = (layout.empty_heads_inside(x) for x in (q, k, v))
    dsink, stats = _launch_backward(
        grad_out, grad_lse, q, k, v, out, lse, mask, bias, kv_lengths, sink, None, None, 0, 0, flags, need_sink_grad,
        dq, dk, dv,
    )  # fmt: skip
    dbias = q.new_empty(0)
    if need_bias_grad and bias is not None:
        dbias = bias_gradient(grad_out, q, k, v, stats, mask, bias, kv_lengths, flags)
    return dq, dk, dv, dbias, dsink


def attention_varlen_backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor,
    cu_k: Tensor, max_q: int, max_k: int, sink: Tensor | None, flags: Flags, need_sink_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    sink = in_order(sink)
    # One sequence of all tokens, heads outside, that the kernels cut up.
    whole = [x.transpose(0, 1)[None] for x in (grad_out, q, k, v, out, dq, dk, dv)]
    dsink, _ = _launch_backward(
        whole[0], grad_lse, whole[1], whole[2], whole[3], whole[4], lse, None, None, None, sink, cu_q.contiguous(),
        cu_k.contiguous(), max_q, max_k, flags, need_sink_grad, whole[5], whole[6], whole[7],
    )  # fmt: skip
    return dq, dk, dv, dsink


def _launch_backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    mask: Tensor | None, bias: Tensor | None, kv_lengths: Tensor | None, sink: Tensor | None, cu_q: Tensor | None,
    cu_k: Tensor | None, max_q: int, max_k: int, flags: Flags, need_sink_grad: bool, dq: Tensor, dk: Tensor, dv: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Fill dq, dk and dv; return dsink and the rows' (lse, delta)."""
    if v.shape[3] > 1 and grad_out.stride(3) != 1:
        grad_out = grad_out.contiguous()
    if v.shape[3] > 1 and out.stride(3) != 1:
        out = out.contiguous()
    lse = lse.contiguous()
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    if mask is None and bias is None and kv_lengths is None and _for_hopper(q):
        from headwise.backends.triton.hopper import attention_backward as on_hopper  # only where there is such a GPU

        packed = None if cu_q is None or cu_k is None else on_hopper.Packed(cu_q, cu_k, max_q, max_k)
        dsink = on_hopper.try_backward(
            grad_out, grad_lse, q, k, v, out, lse, sink, packed, flags, need_sink_grad, dq, dk, dv
        )
        if dsink is not None:
            return dsink, lse  # the statistics are for the gradient of a bias
    bits, banded, widest = 8 * q.element_size(), flags.left >= 0 or flags.right >= 0, max(q.shape[3], v.shape[3])
    queries = tile_sizes.tile("attention_backward_queries", bits, widest, banded, q.device)
    keys = tile_sizes.tile("attention_backward_keys", bits, widest, banded, q.device)
    precision = tile_precision(dot_precision(q.dtype, widest), q.dtype, queries, keys)
    plans = _plans(
        queries, keys,
        q.shape, k.shape, v.shape[3], q.stride(), k.stride(), v.stride(), out.stride(), grad_out.stride(), dq.stride(),
        dk.stride(), dv.stride(), score_strides(mask), score_strides(bias), None if cu_q is None else cu_q.shape[0] - 1,
        max_q, max_k, flags, q.element_size(), precision, logit_unit(q.dtype),
    )  # fmt: skip
    # A row's lse and delta, side by side in 16 bytes (two of four numbers): one load that is wide enough for the
    # compiler to spread over all threads. Two loads of a number per row each were held sixteen times over, in registers.
    stats = q.new_empty((*q.shape[:3], 4), dtype=torch.float32)
    sink_parts = None
    if need_sink_grad and sink is not None:
        sink_parts = q.new_zeros((*q.shape[:2], plans.q_tiles), dtype=torch.float32)
    if precision == "parts":
        grad_out, q, k, v = split(grad_out), split(q), split(k), split(v)
    if stats.numel():
        plans.of_queries.launch(
            grad_out, grad_lse, q, k, v, out, lse, mask, bias, kv_lengths, sink, cu_q, cu_k, dq, stats, sink_parts
        )
    if dk.numel():
        for of_keys in plans.of_keys:
            of_keys.launch(grad_out, q, k, v, stats, mask, bias, kv_lengths, cu_q, cu_k, dk, dv)
    if sink_parts is None or sink is None:
        return dq.new_empty(0), stats
    return sink_parts.sum((0, 2)).to(sink.dtype), stats


def _for_hopper(q: Tensor) -> bool:
    """Could the kernels of hopper/ run here? A tile that `headwise tune` asks for is one of the plain kernels."""
    if not q.is_cuda or hopper.missing(q.get_device()) is not None:
        return False
    return not any(map(tile_sizes.is_forced, ("attention_backward_queries", "attention_backward_keys")))


class _Plans(NamedTuple):
    q_tiles: int
    of_queries: Plan
    of_keys: tuple[Plan, ...]  # one, or dk and dv one after the other


@functools.lru_cache(maxsize=4096)
def _plans(
    queries: Tile, keys: Tile, q_shape: tuple[int, ...], k_shape: tuple[int, ...], value_dim: int, q_strides: Strides,
    k_strides: Strides, v_strides: Strides, out_strides: Strides, grad_strides: Strides, dq_strides: Strides,
    dk_strides: Strides, dv_strides: Strides, mask_strides: Strides, bias_strides: Strides, sequences: int | None,
    max_q: int, max_k: int, flags: Flags, element: int, precision: str, unit: float,
) -> _Plans:  # fmt: skip
    batch, heads, q_length, head_dim = q_shape
    key_heads, k_length = k_shape[1:3]
    if precision == "parts":
        q_strides, k_strides = split_strides(q_shape, q_strides, head_dim), split_strides(k_shape, k_strides, head_dim)
        v_strides, element = split_strides(k_shape, v_strides, value_dim), 2
        grad_strides = split_strides(q_shape, grad_strides, value_dim)
    strides = (q_strides, k_strides, v_strides, out_strides, grad_strides, dq_strides, dk_strides, dv_strides)
    check_row_strides(max(*queries[:2], *keys[:2]), *strides)
    if sequences is None:
        q_tiles, k_tiles = -(-q_length // queries.queries), -(-k_length // keys.keys)
    else:
        q_tiles = packed_tiles(q_length, sequences, queries.queries)
        k_tiles = packed_tiles(k_length, sequences, keys.keys)
    sizes = (q_length, k_length, heads, heads // key_heads)
    band = (sequences or 0, max_q, max_k, *band_of(flags, q_length, k_length))
    qkv = (*q_strides[:3], *k_strides[:3], *v_strides[:3])
    scores = (*mask_strides, *bias_strides, flags.scale, flags.softcap)
    variants = (flags.left >= 0, flags.right >= 0, flags.softcap > 0)
    dims = (head_dim, value_dim, block_of(head_dim), block_of(value_dim))
    rest = (common_alignment(element, *strides), search_block(sequences or 0), precision, unit)
    of_queries = Plan(
        _backward_queries,
        (q_tiles * heads * batch, 1, 1),
        (*sizes, q_tiles, *band, *qkv, *out_strides[:3], *grad_strides[:3], *dq_strides[:3], *scores),
        (*variants, *dims, queries.queries, queries.keys, *rest),
        queries.warps,
        queries.stages,
        queries.registers,
    )
    of_keys = tuple(
        Plan(
            _backward_keys,
            (k_tiles * key_heads * batch, 1, 1),
            (*sizes, k_tiles, *band, *qkv, *grad_strides[:3], *dk_strides[:3], *dv_strides[:3], *scores),
            (*variants, heads > key_heads, *want, *dims, keys.queries, keys.keys, *rest),
            keys.warps,
            keys.stages,
            keys.registers,
        )
        # With wide heads, dk and dv together fill the registers: there each gets a pass of its own.
        for want in (((True, False), (False, True)) if keys.passes == 2 else ((True, True),))
    )
    return _Plans(q_tiles, of_queries, of_keys)
