"""The gradient of an attention bias in Triton: ds, summed over the dims that the bias is broadcast over.

A program owns a tile of the bias (one row or one key wide where the bias is) and walks, in order, over its share of
everything that reads it. Shares are added up in order afterwards. Needs memory of a few copies of the bias, never of all
scores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwise.backends.triton.blocks import aligned_elements, block_of, load_rows, load_scores, score_strides
from headwise.backends.triton.launch import launch
from headwise.backends.triton.rows import multiprocessors
from headwise.backends.triton.scores import band_of, dot_precision, in_band, logit_unit, power, product, tile_logits

if TYPE_CHECKING:
    from headwise.ops.attention._arguments import Flags


@triton.jit(
    do_not_specialize=[
        "batches", "heads", "group", "q_length", "k_length", "q_tiles", "k_tiles", "shares", "left", "right", "q_b", "q_h",
        "k_b", "k_h", "v_b", "v_h", "g_b", "g_h", "m_b", "m_h", "m_q", "b_b", "b_h", "b_q",
    ]
)  # fmt: skip
def _bias_gradient(
    grad_out, q, k, v, stats, mask, bias, lengths, parts,
    batches, heads, group, q_length, k_length, q_tiles, k_tiles, shares, left, right,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, g_b, g_h, g_s, m_b, m_h, m_q, m_k, b_b, b_h, b_q, b_k, scale, softcap,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_CAP: tl.constexpr, PER_BATCH: tl.constexpr,
    PER_HEAD: tl.constexpr, PER_QUERY: tl.constexpr, PER_KEY: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, ALIGN: tl.constexpr,
    PRECISION: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    # Which tile of the bias: [batch, head, query tile, key tile], those of its dims that are broadcast left out.
    program = tl.program_id(0)
    share = tl.program_id(1)
    own = program
    own_k = 0
    own_q = 0
    own_h = 0
    if PER_KEY:
        own_k = own % k_tiles
        own = own // k_tiles
    if PER_QUERY:
        own_q = own % q_tiles
        own = own // q_tiles
    if PER_HEAD:
        own_h = own % heads
        own = own // heads
    own_b = own

    q_lane, k_lane = tl.arange(0, QUERIES), tl.arange(0, KEYS)
    dbias = tl.zeros([QUERIES, KEYS], tl.float32)
    # What reads it: every combination of the dims left out. This share takes every shares-th.
    readers = 1
    if not PER_BATCH:
        readers = readers * batches
    if not PER_HEAD:
        readers = readers * heads
    if not PER_QUERY:
        readers = readers * q_tiles
    if not PER_KEY:
        readers = readers * k_tiles
    for reader in range(share, readers, shares):
        rest = tl.full((), 0, tl.int32) + reader
        k_tile_at, q_tile_at, head, batch = own_k, own_q, own_h, own_b
        if not PER_KEY:
            k_tile_at = rest % k_tiles
            rest = rest // k_tiles
        if not PER_QUERY:
            q_tile_at = rest % q_tiles
            rest = rest // q_tiles
        if not PER_HEAD:
            head = rest % heads
            rest = rest // heads
        if not PER_BATCH:
            batch = rest
        at_batch = tl.full((), 0, tl.int64) + batch
        at_head = tl.full((), 0, tl.int64) + head
        keys = k_length
        if lengths is not None:
            length = tl.load(lengths + at_batch).to(tl.int64)
            bad = (length < 0) | (length > k_length)
            dbias += tl.where(bad, float("nan"), 0.0)
            keys = tl.where(bad, 0, length).to(tl.int32)
        row, key = q_tile_at * QUERIES + q_lane, k_tile_at * KEYS + k_lane
        q_first, k_first = tl.full((), 0, tl.int64) + q_tile_at * QUERIES, tl.full((), 0, tl.int64) + k_tile_at * KEYS
        at_row = (at_batch * heads + at_head) * q_length + q_first + q_lane
        own_lse = tl.load(stats + at_row * 4, mask=row < q_length, other=float("inf"))
        alive = (row < q_length) & (own_lse != float("inf"))
        seen = in_band((row + (keys - q_length))[:, None], key[None, :], keys, left, right, HAS_LEFT, HAS_RIGHT)
        seen &= alive[:, None]
        there = (row < q_length)[:, None] & (key < keys)[None, :]
        if mask is not None:
            at_mask = mask + at_batch * m_b + at_head * m_h
            seen &= load_scores(at_mask, row[:, None], key[None, :], m_q, m_k, there) != 0
        if tl.max(tl.max(seen.to(tl.int32), 1), 0) > 0:
            key_head = at_head // group
            q_base = q + tl.multiple_of(at_batch * q_b + at_head * q_h, ALIGN) + q_first * q_s
            g_base = grad_out + tl.multiple_of(at_batch * g_b + at_head * g_h, ALIGN) + q_first * g_s
            k_base = k + tl.multiple_of(at_batch * k_b + key_head * k_h, ALIGN) + k_first * k_s
            v_base = v + tl.multiple_of(at_batch * v_b + key_head * v_h, ALIGN) + k_first * v_s
            q_tile = load_rows(q_base, q_lane, q_s, alive, D, BLOCK_D, True)
            do_tile = load_rows(g_base, q_lane, g_s, alive, DV, BLOCK_DV, True)
            k_tile = load_rows(k_base, k_lane, k_s, key < keys, D, BLOCK_D, True)
            v_tile = load_rows(v_base, k_lane, v_s, key < keys, DV, BLOCK_DV, True)
            logits = tile_logits(product(q_tile, tl.trans(k_tile), None, PRECISION), scale, softcap, HAS_CAP, UNIT)
            at_bias = bias + at_batch * b_b + at_head * b_h
            added = load_scores(at_bias, row[:, None], key[None, :], b_q, b_k, there).to(tl.float32) * UNIT
            logits = tl.where(added == -float("inf"), -float("inf"), logits + added)
            weights = power(logits - own_lse[:, None], UNIT)
            dweights = product(do_tile, tl.trans(v_tile), None, PRECISION)
            row_delta = tl.load(stats + at_row * 4 + 1, mask=alive, other=0.0)
            dlogits = weights * (dweights - row_delta[:, None])
            dbias += tl.where(seen & (logits > -float("inf")), dlogits, 0.0)

    # parts: [shares, batch, head, query, key], dims of 1 where the bias has them.
    if PER_QUERY and PER_KEY:
        row, key = own_q * QUERIES + q_lane, own_k * KEYS + k_lane
        at = share * tl.num_programs(0).to(tl.int64) // (q_tiles * k_tiles) + own_b * (heads if PER_HEAD else 1) + own_h
        place = parts + at * q_length * k_length + row.to(tl.int64)[:, None] * k_length + key[None, :]
        tl.store(place, dbias, mask=(row < q_length)[:, None] & (key < k_length)[None, :])
    elif PER_QUERY:
        row = own_q * QUERIES + q_lane
        at = share * tl.num_programs(0).to(tl.int64) // q_tiles + own_b * (heads if PER_HEAD else 1) + own_h
        tl.store(parts + at * q_length + row, tl.sum(dbias, 1), mask=row < q_length)
    elif PER_KEY:
        key = own_k * KEYS + k_lane
        at = share * tl.num_programs(0).to(tl.int64) // k_tiles + own_b * (heads if PER_HEAD else 1) + own_h
        tl.store(parts + at * k_length + key, tl.sum(dbias, 0), mask=key < k_length)
    else:
        at = share * tl.num_programs(0).to(tl.int64) + own_b * (heads if PER_HEAD else 1) + own_h
        tl.store(parts + at, tl.sum(tl.sum(dbias, 1), 0))


def bias_gradient(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, stats: Tensor, mask: Tensor | None, bias: Tensor,
    kv_lengths: Tensor | None, flags: Flags,
) -> Tensor:  # fmt: skip
    batch, heads, q_length, head_dim = q.shape
    k_length, value_dim = k.shape[2], v.shape[3]
    if bias.numel() == 0 or stats.numel() == 0 or k_length == 0:
        return torch.zeros(bias.shape, dtype=bias.dtype, device=bias.device)
    if value_dim > 1 and grad_out.stride(3) != 1:
        grad_out = grad_out.contiguous()
    tile = 32 if max(head_dim, value_dim) * q.element_size() > 256 else 64
    q_tiles, k_tiles = -(-q_length // tile), -(-k_length // tile)
    per = [size > 1 for size in bias.shape]
    owners = 1
    for count, owned in zip((batch, heads, q_tiles, k_tiles), per, strict=True):
        owners *= count if owned else 1
    readers = batch * heads * q_tiles * k_tiles // owners
    # Enough programs for the machine, as long as the shares stay few beside the bias itself or small in all.
    shares = max(1, min(readers, 8 * multiprocessors(q) // owners, max(4, (1 << 20) // bias.numel())))
    parts = torch.empty((shares, *bias.shape), dtype=torch.float32, device=q.device)
    launch(
        _bias_gradient,
        (owners, shares, 1),
        (grad_out, q, k, v, stats, mask, bias, kv_lengths, parts),
        (
            batch, heads, heads // k.shape[1], q_length, k_length, q_tiles, k_tiles, shares,
            *band_of(flags, q_length, k_length),
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *grad_out.stride()[:3], *score_strides(mask),
            *score_strides(bias), flags.scale, flags.softcap,
        ),
        (
            flags.left >= 0, flags.right >= 0, flags.softcap > 0, *per, head_dim, value_dim, block_of(head_dim),
            block_of(value_dim), tile, tile,
            aligned_elements(q, k, v, grad_out), dot_precision(q.dtype),
            logit_unit(q.dtype),
        ),
        4,
        1,
    )  # fmt: skip
    return parts.sum(0).to(bias.dtype)
