"""The decoding kernel: some splits of one sequence's keys, for one key head and a block of its rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from headwise.backends.triton.blocks import head_start, load_rows
from headwise.backends.triton.decode_merge import finish, fold, merged
from headwise.backends.triton.parameters import Parameters
from headwise.backends.triton.products import latent_products, product, row_products
from headwise.backends.triton.scores import batch_extent, capped_logits, in_band, power


class DecodeSizes(NamedTuple):
    rows: Any  # B · Hq · Sq
    queries: Any  # new tokens of a sequence
    keys: Any  # capacity of the cache, of all pages of a sequence
    group: Any  # query heads per key head
    key_heads: Any
    row_blocks: Any
    pages: Any
    table_stride: Any
    splits: Any  # that the keys of a sequence are cut into
    splits_per_program: Any
    splits_per_bundle: Any
    left: Any  # the window
    right: Any


class DecodeVariant(NamedTuple):
    """Constants that the kernels are compiled for."""

    WHOLE: bool  # a program has all splits of its rows
    SINGLE: bool  # a program has one split: the registers hold no bundles beside it
    LEFT: bool  # is the window bounded on this side?
    RIGHT: bool
    STARTS: bool  # are there kv_starts?
    CAP: bool
    PAGE: int  # the page size; 0: the cache is contiguous
    D: int
    DV: int
    BLOCK_D: int  # padded to powers of two
    BLOCK_DV: int
    BLOCK_REST: (
        int  # values are the first DV numbers of the keys, and this is what holds the other D - DV; 0: they are not
    )
    ROWS: int  # of a tile
    KEYS: int
    STAGES: int
    PIECE: int  # of the head dim that is multiplied at once
    ALIGN: int  # elements that all strides but the last are a multiple of
    PRECISION: str
    UNIT: float  # see scores.py
    MERGED_ROWS: int
    MERGED_AT_ONCE: int
    PARTIALS_PER_BUNDLE: int


@triton.jit
def _pages_of(table, start, extent, PAGE: tl.constexpr, KEYS: tl.constexpr):
    """The page of the block of keys that begins at ``start``, or the page of each of its keys where blocks cross pages."""
    if PAGE % KEYS == 0:
        return tl.load(table + start // PAGE, mask=start < extent.band.keys, other=0)
    else:
        key = start + tl.arange(0, KEYS)
        return tl.load(table + key // PAGE, mask=(key >= extent.band.first) & (key < extent.band.keys), other=0)


@triton.jit
def _any_wrong(table, start, stop, pages, BLOCK: tl.constexpr):
    """int32: does one of the entries [start, stop) of a block table name a page that does not exist?"""
    wrong = tl.zeros([BLOCK], tl.int32)
    for first in range(start, stop, BLOCK):
        entry = first + tl.arange(0, BLOCK)
        page = tl.load(table + entry, mask=entry < stop, other=0)
        wrong = tl.maximum(wrong, ((page < 0) | (page >= pages)).to(tl.int32))
    return tl.max(wrong, 0)


@triton.jit
def _rows(first, batch, key_head, n, ROWS: tl.constexpr):
    """``(token, head, result, inside)`` of a block of a key head's rows: where they are in q, and in (B, Hq, Sq)."""
    row = first + tl.arange(0, ROWS)  # the tokens of a head are neighbours
    token, head = row % n.queries, key_head * n.group + row // n.queries
    return token, head, (batch * n.key_heads * n.group + head) * n.queries + token, row < n.group * n.queries


@triton.jit
def _merge_rows(first, partials, stats, count, sink, out, lse, batch, key_head, n, p, V: tl.constexpr):
    token, head, result, inside = _rows(first, batch, key_head, n, V.MERGED_ROWS)
    acc, highest, total = merged(partials, stats, result * count, count, inside, V.MERGED_AT_ONCE, V)
    out_at = out + batch * p.batch.out + head.to(tl.int64) * p.head.out + token * p.row.out
    finish(acc, highest, total, sink, out, lse, out_at, result, head, inside, V)


@triton.jit(do_not_specialize=DecodeSizes._fields)
def decode_kernel(
    q, k, v, lengths, kv_starts, table, sink, out, lse, partials, arrived,
    rows, queries, keys, group, key_heads, row_blocks, pages, table_stride, splits, splits_per_program, splits_per_bundle,
    left, right, batch_strides, head_strides, row_strides, scale, softcap, V: tl.constexpr,
):  # fmt: skip
    """The keys of a sequence are cut into ``splits``, which are added up to bundles, and those to the whole, always in
    the same order. A program has one of the splits, a bundle, or all (WHOLE). Unless it has all, its partial goes to
    ``partials``: float32 ``[row, partial, Dv]``, then highest logit and total ``[row, partial, 2]``.

    ``arrived``, if it is there, counts the programs of these rows that are done, and is zero again after: the last one
    merges.
    """
    ROWS: tl.constexpr = V.ROWS
    KEYS: tl.constexpr = V.KEYS
    BLOCK_DV: tl.constexpr = V.BLOCK_DV
    ALIGN: tl.constexpr = V.ALIGN
    PRECISION: tl.constexpr = V.PRECISION
    n = DecodeSizes(
        rows, queries, keys, group, key_heads, row_blocks, pages, table_stride, splits, splits_per_program,
        splits_per_bundle, left, right,
    )  # fmt: skip
    p = Parameters(batch_strides, head_strides, row_strides, None, scale, softcap)  # type: ignore[arg-type]
    program = tl.program_id(0)
    row_block = program % n.row_blocks
    count = (n.splits + n.splits_per_program - 1) // n.splits_per_program  # partials of a row
    partial = (program // n.row_blocks) % count
    key_head = (program // n.row_blocks // count) % n.key_heads
    batch = (program // n.row_blocks // count // n.key_heads).to(tl.int64)

    token, head, result, inside = _rows(row_block * ROWS, batch, key_head, n, ROWS)
    extent = batch_extent((None, lengths, kv_starts), batch, 0, n)
    length, first = extent.band.keys, extent.band.first
    wrong = extent.bad.to(tl.int32)
    if V.LEFT:
        first = tl.maximum(length - n.queries - n.left, first)  # the first key that some row sees
    first_block = first // KEYS
    blocks = tl.maximum((length + KEYS - 1) // KEYS - first_block, 0)
    split = (blocks + n.splits - 1) // n.splits  # blocks of a split
    begin = first_block + partial * n.splits_per_program * split
    end = tl.minimum(begin + n.splits_per_program * split, first_block + blocks)
    if V.PAGE > 0:
        table += batch * n.table_stride
    if V.LEFT and V.PAGE > 0:
        # Pages left of the window are not read, but a table that names pages that do not exist is bad all the same.
        entry, stop = extent.band.first // V.PAGE, first_block * KEYS // V.PAGE
        some = (stop - entry + count - 1) // count
        entry += partial * some
        wrong = tl.maximum(wrong, _any_wrong(table, entry, tl.minimum(entry + some, stop), n.pages, 128))

    stats = partials
    at_partial = result * count + partial
    if not V.WHOLE:
        stats += tl.full((), 0, tl.int64) + n.rows.to(tl.int64) * count * V.DV
    if begin >= end and not V.WHOLE:
        marked = tl.where(wrong > 0, float("nan"), 0.0)  # a total that is NaN makes everything NaN
        tl.store(stats + 2 * at_partial, tl.zeros([ROWS], tl.float32) - float("inf"), mask=inside)
        tl.store(stats + 2 * at_partial + 1, tl.zeros([ROWS], tl.float32) + marked, mask=inside)
    else:
        lane = tl.arange(0, KEYS)
        q_at = q + tl.multiple_of(batch * p.batch.q + head.to(tl.int64) * p.head.q + token * p.row.q, ALIGN)
        position = token + extent.offset
        page = 0
        crossed = tl.zeros([KEYS], tl.int32)  # as `wrong`, where each key has a page of its own
        zero = tl.full((), 0, tl.int64)
        if V.PAGE == 0:
            k_base = head_start(k, p.batch.k, p.head.k, batch, key_head, ALIGN)
            v_base = head_start(v, p.batch.v, p.head.v, batch, key_head, ALIGN)
        else:
            k_base = head_start(k, p.batch.k, p.head.k, zero, key_head, ALIGN)
            v_base = head_start(v, p.batch.v, p.head.v, zero, key_head, ALIGN)
            page = _pages_of(table, begin * KEYS, extent, V.PAGE, KEYS)

        acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
        highest = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        bundle, bundle_highest, bundle_total = acc, highest, total
        all_acc, all_highest, all_total = acc, highest, total
        for block in tl.range(begin, end, num_stages=V.STAGES):
            start = block * KEYS
            key = start + lane
            there = (key >= first) & (key < length)  # what no row sees may hold NaN: it is read as zero
            if V.PAGE == 0:
                k_at, v_at, slot = k_base + (zero + start) * p.row.k, v_base + (zero + start) * p.row.v, lane
            else:
                exists = (page >= 0) & (page < n.pages)
                number = tl.where(exists, page, 0).to(tl.int64)
                k_at = k_base + tl.multiple_of(number * p.batch.k, ALIGN)
                v_at = v_base + tl.multiple_of(number * p.batch.v, ALIGN)
                there = there & exists
                if V.PAGE % KEYS == 0:
                    slot = start % V.PAGE + lane
                    wrong = tl.maximum(wrong, (exists == 0).to(tl.int32))
                else:
                    slot = key % V.PAGE
                    k_at, v_at = k_at[:, None], v_at[:, None]
                    crossed = tl.maximum(crossed, (exists == 0).to(tl.int32))
                # One block ahead: the loads of keys and values, which are several blocks ahead, must not wait for it.
                page = _pages_of(table, start + KEYS, extent, V.PAGE, KEYS)
            if V.BLOCK_REST > 0:
                products, v_tile = latent_products(q_at, inside, k_at, slot, p.row.k, there, V)
            else:
                products = row_products(q_at, inside, k_at, slot, p.row.k, there, V)
            logits = capped_logits(products, p.scale, p.softcap, V.CAP, V.UNIT)
            seen = in_band(position[:, None], key[None, :], extent.band, V)
            logits = tl.where(seen, logits, -float("inf"))  # [ROWS, KEYS]
            higher = tl.maximum(highest, tl.max(logits, 1))
            reference = tl.where(higher == -float("inf"), 0.0, higher)
            weights = power(logits - reference[:, None], V.UNIT)
            shrink = power(highest - reference, V.UNIT)
            total = total * shrink + tl.sum(weights, 1)
            highest = higher
            if V.BLOCK_REST == 0:
                v_tile = load_rows(v_at, slot, p.row.v, there, V.DV, BLOCK_DV, True)  # [KEYS, BLOCK_DV]
            acc = product(weights.to(v_tile.dtype), v_tile, acc * shrink[:, None], PRECISION)
            if not V.SINGLE:
                done = block + 1 - first_block
                if (done % split == 0) | (block + 1 == end):
                    bundle, bundle_highest, bundle_total = fold(
                        bundle, bundle_highest, bundle_total, acc, highest, total, V.UNIT
                    )
                    acc, highest, total = (
                        tl.zeros_like(acc),
                        tl.full([ROWS], -float("inf"), tl.float32),
                        tl.zeros_like(total),
                    )
                    if (done % (n.splits_per_bundle * split) == 0) | (block + 1 == end):
                        all_acc, all_highest, all_total = fold(
                            all_acc, all_highest, all_total, bundle, bundle_highest, bundle_total, V.UNIT
                        )
                        bundle, bundle_highest, bundle_total = acc, highest, total

        if V.SINGLE:
            all_acc, all_highest, all_total = fold(all_acc, all_highest, all_total, acc, highest, total, V.UNIT)
        if V.PAGE > 0 and V.PAGE % KEYS != 0:
            wrong = tl.maximum(wrong, tl.max(crossed, 0))
        all_total = tl.where(wrong > 0, float("nan"), all_total)
        if V.WHOLE:
            out_at = out + batch * p.batch.out + head.to(tl.int64) * p.head.out + token * p.row.out
            finish(all_acc, all_highest, all_total, sink, out, lse, out_at, result, head, inside, V)
        else:
            dv = tl.arange(0, BLOCK_DV)
            tl.store(stats + 2 * at_partial, all_highest, mask=inside)
            tl.store(stats + 2 * at_partial + 1, all_total, mask=inside)
            at = partials + (at_partial * V.DV)[:, None] + dv[None, :]
            tl.store(at, all_acc, mask=inside[:, None] & (dv < V.DV)[None, :])

    if arrived is not None:
        # The count of one thread speaks for the stores of all that came to the barrier: so it is on NVIDIA GPUs.
        tl.debug_barrier()
        here = arrived + (batch * n.key_heads + key_head) * n.row_blocks + row_block
        if tl.atomic_add(here, 1, sem="acq_rel") == count - 1:
            tl.store(here, 0)
            _merge_rows(row_block * ROWS, partials, stats, count, sink, out, lse, batch, key_head, n, p, V)
