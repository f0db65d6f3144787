"""Attention forward in Triton, dense and packed: one kernel.

A program owns a tile of queries and walks over the keys that some of its rows see, with an online softmax in registers.
Keys that all of its rows see are visited without a mask; the ends of the range, with one. Dao, "FlashAttention-2", 2023.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwise import layout
from headwise.backends.triton import hopper, tile_sizes
from headwise.backends.triton.bf16x3 import (
    as_operand,
    load_operand,
    multiply,
    split,
    tile_precision,
    transposed,
    with_rows,
)
from headwise.backends.triton.blocks import head_start, store_rows
from headwise.backends.triton.dropout import dropout_of, kept_tile
from headwise.backends.triton.parameters import (
    Parameters,
    Sizes,
    banded,
    beside_bias,
    inputs_of,
    one_entry,
    parameters,
    row_bytes,
    tiles_of,
)
from headwise.backends.triton.products import dot_precision
from headwise.backends.triton.scores import LN2, power, query_tile, tile_logits, visible_keys

if TYPE_CHECKING:
    from headwise.backends.triton.gpu import Gpu
    from headwise.ops.attention._arguments import Attention


@triton.jit
def _visit(
    acc, highest, total, q_tile, k, v, mask, bias, batch, head, first_row, row, begin, stop, gap_at, gap, first, past,
    extent, p, dropout, PARTIAL: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """The online softmax over the blocks of keys from ``begin`` to ``stop``; from ``gap_at`` on, ``gap`` keys are left out.

    PARTIAL: some rows do not see some of these keys. dropout: a `Dropout`, or None.
    """
    lane = tl.arange(0, V.KEYS)
    MAY_BE_EMPTY: tl.constexpr = PARTIAL or mask is not None or bias is not None  # a row may have seen nothing so far
    exists = row < extent.rows
    for at in range(begin, stop, V.KEYS):
        block = at + tl.where(at >= gap_at, gap, 0)
        key = block + lane
        inside = (key >= first) & (key < past)  # what no row of this tile sees may hold NaN: it is read as zero
        start = tl.full((), 0, tl.int64) + block
        k_tile = load_operand(k + start * p.row.k, lane, p.row.k, inside, V.D, V.BLOCK_D, PARTIAL, V)
        products = multiply(q_tile, transposed(k_tile, V), None, V)  # [QUERIES, KEYS]
        if MAY_BE_EMPTY or V.CAP:
            there = exists[:, None] & inside[None, :]
            logits, _, seen = tile_logits(
                products, mask, bias, batch, head, row[:, None], key[None, :], there, extent, p, PARTIAL, V
            )
            if MAY_BE_EMPTY:
                logits = tl.where(seen, logits, -float("inf"))
            higher = tl.maximum(highest, tl.max(logits, 1))
            reference = higher
            if MAY_BE_EMPTY:
                reference = tl.where(higher == -float("inf"), 0.0, higher)
            weights = power(logits - reference[:, None], V.UNIT)
        else:
            scale = p.scale * V.UNIT
            higher = tl.maximum(highest, tl.max(products, 1) * scale)
            reference = higher
            weights = power(products * scale - reference[:, None], V.UNIT)
        shrink = power(highest - reference, V.UNIT)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        highest = higher
        v_tile = load_operand(v + start * p.row.v, lane, p.row.v, inside, V.DV, V.BLOCK_DV, PARTIAL, V)
        if mask is not None or bias is not None:
            # A key that is hidden from every row may hold NaN, and zero times NaN is NaN.
            v_tile = with_rows(v_tile, tl.max((there & seen).to(tl.int32), 0) > 0, V)
        if dropout is not None:
            weights = tl.where(kept_tile(dropout, first_row, block, V.QUERIES, V.KEYS, False), weights, 0.0)
        acc = multiply(as_operand(weights, V), v_tile, acc, V)
    return acc, highest, total


@triton.jit(do_not_specialize=Sizes._fields)
def _forward(
    q, k, v, mask, bias, sink, q_lengths, kv_lengths, kv_starts, cu_q, cu_k, seed, out, lse,
    queries, keys, heads, group, tiles, sequences, longest_q, longest_k, left, right,
    batch_strides, head_strides, row_strides, key_strides, scale, softcap, dropping, V: tl.constexpr,
):  # fmt: skip
    n = Sizes(queries, keys, heads, group, tiles, sequences, longest_q, longest_k, left, right)
    p = Parameters(batch_strides, head_strides, row_strides, key_strides, scale, softcap)
    QUERIES: tl.constexpr = V.QUERIES
    BLOCK_DV: tl.constexpr = V.BLOCK_DV
    program = tl.program_id(0)
    tile = n.tiles - 1 - program % n.tiles  # under a causal mask the last tiles have most to do: they go first
    head = (program // n.tiles) % n.heads
    batch = (program // n.tiles // n.heads).to(tl.int64)
    extent, tile = query_tile(tile, (q_lengths, kv_lengths, kv_starts), cu_q, cu_k, batch, n, V)
    if tile * QUERIES < extent.all_rows:
        lane = tl.arange(0, QUERIES)
        row = tile * QUERIES + lane
        start = extent.q_start + tile * QUERIES
        q_base = head_start(q, p.batch.q, p.head.q, batch, head, V.ALIGN) + start * p.row.q
        q_tile = load_operand(q_base, lane, p.row.q, row < extent.rows, V.D, V.BLOCK_D, True, V)
        k_base = head_start(k, p.batch.k, p.head.k, batch, head // n.group, V.ALIGN) + extent.k_start * p.row.k
        v_base = head_start(v, p.batch.v, p.head.v, batch, head // n.group, V.ALIGN) + extent.k_start * p.row.v
        first, past, blocks, whole, whole_past = visible_keys(tile, extent, V)

        acc = tl.zeros([QUERIES, BLOCK_DV], tl.float32)
        highest = tl.full([QUERIES], -float("inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        # One loop over the blocks that all rows see all of, and one over those before and after them. In the first, every
        # tile starts at keys of its own and comes round to the first: programs of one head that read the same keys at the
        # same time wait for each other at the same part of the cache.
        gap = whole_past - whole
        shift = tl.where(gap > 0, tile * QUERIES // V.KEYS * V.KEYS % tl.maximum(gap, 1), 0)
        dropout = dropping
        if seed is not None:
            dropout = dropout_of(dropping, seed, extent.number, head)
        acc, highest, total = _visit(
            acc, highest, total, q_tile, k_base, v_base, mask, bias, batch, head, tile * QUERIES, row, whole + shift,
            whole_past + shift, whole_past, -gap, first, past, extent, p, dropout, False, V,
        )  # fmt: skip
        acc, highest, total = _visit(
            acc, highest, total, q_tile, k_base, v_base, mask, bias, batch, head, tile * QUERIES, row, blocks, past - gap,
            whole, gap, first, past, extent, p, dropout, True, V,
        )  # fmt: skip

        empty = total == 0.0
        if q_lengths is not None:
            empty |= row >= extent.rows
        of_empty = tl.full([QUERIES], -float("inf"), tl.float32)
        if sink is not None:
            logit = tl.load(sink + head).to(tl.float32)
            of_empty = tl.where(row < extent.rows, logit, -float("inf"))
            higher = tl.maximum(highest, logit * V.UNIT)
            shrink = tl.where(empty, 0.0, power(highest - higher, V.UNIT))
            total = total * shrink + power(logit * V.UNIT - higher, V.UNIT)
            acc = acc * shrink[:, None]
            highest = higher
        result = acc * (1.0 / tl.where(empty, 1.0, total))[:, None]
        if seed is not None:
            result *= dropping.scale
        if V.LEFT or V.RIGHT or mask is not None or bias is not None or q_lengths is not None:
            # Zero times a NaN that other rows of the tile see.
            result = tl.where(empty[:, None], 0.0, result)
        result = tl.where(extent.bad, float("nan"), result)
        out_base = head_start(out, p.batch.out, p.head.out, batch, head, V.ALIGN) + start * p.row.out
        store_rows(out_base, lane, p.row.out, row < extent.all_rows, result, V.DV, BLOCK_DV)
        if lse is not None:
            row_lse = tl.where(empty, of_empty, highest * (1.0 / V.UNIT) + tl.log2(total) * LN2)
            row_lse = tl.where(extent.bad, float("nan"), row_lse)
            tl.store(lse + (batch * n.heads + head) * n.queries + start + lane, row_lse, mask=row < extent.all_rows)


def attention_forward(gpu: Gpu, args: Attention) -> tuple[Tensor, Tensor | None]:
    if hopper.missing(gpu) is None and not tile_sizes.is_forced("attention_forward"):
        from headwise.backends.triton.hopper import padded as on_hopper  # only where there is such a GPU

        results = on_hopper.forward(gpu, args)
        if results is not None:
            return results
    x = inputs_of(gpu, args)
    (batch, heads, rows, head_dim), value_dim = x.q.shape, x.v.shape[3]
    dtype = args.flags.result_dtype(x.q.dtype)  # the kernel stores what its pointer says
    if args.packing is None:
        out = gpu.empty((batch, heads, rows, value_dim), dtype, layout.strides_like_heads(x.q, value_dim))
        lse = gpu.empty((batch, heads, rows), torch.float32) if args.with_lse else None
    else:
        out = gpu.empty((rows, heads, value_dim), dtype)
        lse = gpu.empty((heads, rows), torch.float32) if args.with_lse else None
    if batch * heads * rows == 0:
        return out, lse

    bits, widest = 8 * x.q.element_size(), max(head_dim, value_dim)
    dropping = args.dropout_seed is not None
    tile = tile_sizes.tile("attention_forward", bits, widest, banded(args.flags), gpu.arch, dropping)
    row = row_bytes(args, tile)
    tile = beside_bias(gpu, tile, x.bias, tile.keys * row, tile.queries * row // 2)
    precision = tile_precision(dot_precision(gpu, x.q.dtype), x.q.dtype, tile)
    if precision == "bf16x3":
        x = x._replace(q=split(gpu, x.q), k=split(gpu, x.k), v=split(gpu, x.v))
    tiles = tiles_of(rows, tile.queries, args)
    to = out if args.packing is None else one_entry(out)
    numbers, variant = parameters(args, x, tiles, tile, precision, out=to)
    gpu.launch(
        _forward, (tiles * heads * batch,), (*x, to, lse), numbers, (variant,),
        warps=tile.warps, stages=tile.stages, registers=tile.registers,
    )  # fmt: skip
    return out, lse
