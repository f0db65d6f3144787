"""The gradient of an attention bias in Triton: ds, summed over the dims that the bias is broadcast over.

A program owns a tile of the bias (one row or one key wide where the bias is) and walks, in order, over its share of
everything that reads it. The shares are split-K partials: they are added up in order afterwards. Needs memory of a few
copies of the bias, never of all scores.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwise.backends.triton.blocks import head_start, load_rows
from headwise.backends.triton.dropout import dropout_of, kept_tile
from headwise.backends.triton.parameters import Inputs, Parameters, Sizes, parameters
from headwise.backends.triton.partial_sums import sum_partials
from headwise.backends.triton.products import dot_precision, product
from headwise.backends.triton.scores import batch_extent, in_band, key_exists, power, tile_logits
from headwise.backends.triton.tile_sizes import AttentionTile

if TYPE_CHECKING:
    from headwise.backends.triton.gpu import Gpu
    from headwise.ops.attention._arguments import Attention


@triton.jit
def _index(number, count, COUNTED: tl.constexpr):
    """``(index, rest)``: the index into a dim of ``count``, the fastest that ``number`` counts; 0 if it does not."""
    if COUNTED:
        return number % count, number // count
    else:
        return number * 0, number


@triton.jit(do_not_specialize=[*Sizes._fields, "k_tiles", "readers", "shares"])
def _bias_gradient(
    q, k, v, mask, bias, sink, q_lengths, kv_lengths, kv_starts, cu_q, cu_k, seed, grad_out, stats, partials,
    queries, keys, heads, group, tiles, sequences, longest_q, longest_k, left, right,
    batch_strides, head_strides, row_strides, key_strides, scale, softcap, dropping, k_tiles, readers, shares,
    PER_HEAD: tl.constexpr, PER_QUERY: tl.constexpr, PER_KEY: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """partials: ``[shares, batch, head, query, key]``, dims of 1 where the bias has them."""
    QUERIES: tl.constexpr = V.QUERIES
    KEYS: tl.constexpr = V.KEYS
    PRECISION: tl.constexpr = V.PRECISION
    n = Sizes(queries, keys, heads, group, tiles, sequences, longest_q, longest_k, left, right)
    p = Parameters(batch_strides, head_strides, row_strides, key_strides, scale, softcap)
    # Which tile of the bias this program owns, and what reads it: every combination of the dims that it is broadcast over.
    own_k, rest = _index(tl.program_id(0), k_tiles, PER_KEY)
    own_q, own = _index(rest, n.tiles, PER_QUERY)
    own_head, own_batch = _index(own, n.heads, PER_HEAD)
    share = tl.program_id(1)
    q_lane, k_lane = tl.arange(0, QUERIES), tl.arange(0, KEYS)
    dbias = tl.zeros([QUERIES, KEYS], tl.float32)
    for reader in range(share, readers, shares):
        k_tile_at, rest = _index(tl.full((), 0, tl.int32) + reader, k_tiles, not PER_KEY)
        q_tile_at, rest = _index(rest, n.tiles, not PER_QUERY)
        head, rest = _index(rest, n.heads, not PER_HEAD)
        head += own_head
        batch = (rest + own_batch).to(tl.int64)
        q_first = (q_tile_at + own_q).to(tl.int64) * QUERIES
        k_first = (k_tile_at + own_k).to(tl.int64) * KEYS
        row, key = q_first.to(tl.int32) + q_lane, k_first.to(tl.int32) + k_lane
        extent = batch_extent((q_lengths, kv_lengths, kv_starts), batch, 0, n)
        dbias += tl.where(extent.bad, float("nan"), 0.0)
        at_row = (batch * n.heads + head) * n.queries + q_first + q_lane
        own_lse = tl.load(stats + at_row * 4, mask=row < extent.rows, other=float("inf"))
        alive = own_lse != float("inf")
        exists = key_exists(key, extent.band, V)
        seen = in_band((row + extent.offset)[:, None], key[None, :], extent.band, V) & alive[:, None]
        if tl.max(tl.max(seen.to(tl.int32), 1), 0) > 0:
            q_base = head_start(q, p.batch.q, p.head.q, batch, head, V.ALIGN) + q_first * p.row.q
            g_base = head_start(grad_out, p.batch.grad, p.head.grad, batch, head, V.ALIGN) + q_first * p.row.grad
            k_base = head_start(k, p.batch.k, p.head.k, batch, head // n.group, V.ALIGN) + k_first * p.row.k
            v_base = head_start(v, p.batch.v, p.head.v, batch, head // n.group, V.ALIGN) + k_first * p.row.v
            q_tile = load_rows(q_base, q_lane, p.row.q, alive, V.D, V.BLOCK_D, True)
            do_tile = load_rows(g_base, q_lane, p.row.grad, alive, V.DV, V.BLOCK_DV, True)
            k_tile = load_rows(k_base, k_lane, p.row.k, exists, V.D, V.BLOCK_D, True)
            v_tile = load_rows(v_base, k_lane, p.row.v, exists, V.DV, V.BLOCK_DV, True)
            there = alive[:, None] & exists[None, :]
            products = product(q_tile, tl.trans(k_tile), None, PRECISION)
            logits, _, seen = tile_logits(
                products, mask, bias, batch, head, row[:, None], key[None, :], there, extent, p, True, V
            )
            weights = power(logits - own_lse[:, None], V.UNIT)
            dweights = product(do_tile, tl.trans(v_tile), None, PRECISION)
            if seed is not None:
                dropout = dropout_of(dropping, seed, extent.number, head)
                keep = kept_tile(dropout, q_first.to(tl.int32), k_first.to(tl.int32), QUERIES, KEYS, False)
                dweights = tl.where(keep, dweights * dropout.scale, 0.0)
            delta = tl.load(stats + at_row * 4 + 1, mask=alive, other=0.0)
            dlogits = weights * (dweights - delta[:, None])
            dbias += tl.where(alive[:, None] & seen, dlogits, 0.0)

    entries, own_rows, own_keys = tl.num_programs(0), 1, 1  # of the bias
    row, key = tl.arange(0, 1), tl.arange(0, 1)
    if PER_QUERY:
        entries, own_rows, row = entries // n.tiles, n.queries, own_q * QUERIES + q_lane
    else:
        dbias = tl.sum(dbias, 0, keep_dims=True)
    if PER_KEY:
        entries, own_keys, key = entries // k_tiles, n.keys, own_k * KEYS + k_lane
    else:
        dbias = tl.sum(dbias, 1, keep_dims=True)
    at = ((share.to(tl.int64) * entries + own) * own_rows + row)[:, None] * own_keys + key[None, :]
    tl.store(partials + at, dbias, mask=(row < own_rows)[:, None] & (key < own_keys)[None, :])


def bias_gradient(gpu: Gpu, args: Attention, x: Inputs, grad_out: Tensor, stats: Tensor) -> Tensor:
    """In the shape of the bias as it was given. ``stats``: lse and delta of each row."""
    assert args.bias is not None
    assert x.bias is not None
    batch, heads, q_length, head_dim = x.q.shape
    k_length, value_dim = x.v.shape[2:]
    if 0 in (batch, heads, q_length, k_length):
        return gpu.zeros(args.bias.shape, args.bias.dtype)
    size = 32 if max(head_dim, value_dim) * x.q.element_size() > 256 else 64
    tile = AttentionTile(size, size, warps=4, stages=1)
    counts = (batch, heads, -(-q_length // tile.queries), -(-k_length // tile.keys))
    per = [n > 1 for n in x.bias.shape]
    owners = math.prod(n for n, owned in zip(counts, per, strict=True) if owned)
    readers = math.prod(counts) // owners
    # Enough programs for the machine, as long as the shares stay few beside the bias itself or small in all.
    shares = max(1, min(readers, 8 * gpu.multiprocessors // owners, max(4, (1 << 20) // args.bias.numel())))
    partials = gpu.empty((shares, *args.bias.shape, 1), torch.float32)
    precision = dot_precision(gpu, x.q.dtype)
    numbers, variant = parameters(args, x, counts[2], tile, precision, grad=grad_out)
    gpu.launch(
        _bias_gradient, (owners, shares), (*x, grad_out, stats, partials), (*numbers, counts[3], readers, shares),
        (*per[1:], variant), warps=tile.warps, stages=tile.stages,
    )  # fmt: skip
    return sum_partials(gpu, partials, args.bias.shape, args.bias.dtype)
