"""Decoding in Triton: the keys are split over the machine, and the parts are merged in a fixed order.

A program serves all query heads of a key head (and all new tokens) with one read of its share of the cache: they are the
rows of one tile. Shares are cut from each sequence's own keys, so a short sequence in a large cache still fills the
machine. "Flash-Decoding", Dao et al., 2023; pages as in Kwon et al., "PagedAttention", 2023.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwise import layout
from headwise.backends.triton.blocks import Strides, block_of, check_row_strides, common_alignment, in_order, load_rows
from headwise.backends.triton.counters import zeros
from headwise.backends.triton.launch import Plan
from headwise.backends.triton.products import piece_of, row_products
from headwise.backends.triton.rows import multiprocessors, power_of_two
from headwise.backends.triton.scores import LN2, dot_precision, in_band, logit_unit, power, product, tile_logits
from headwise.backends.triton.tile_sizes import Tile, architecture

if TYPE_CHECKING:
    from headwise.ops.attention._arguments import Flags

# A sequence alone is split into about this many programs per multiprocessor, and no share is smaller than this many keys.
# The batch has no say: a sequence gives the same bits in any batch.
PROGRAMS_PER_MULTIPROCESSOR = 1
SMALLEST_SHARE = 256
# The program that finishes last merges the parts of its rows, where they are no more numbers than this. Else, and wherever a
# launch costs nothing or counting is of no use (see `_merges_itself`), a second kernel does, in the same order and bits.
MOST_MERGED = 16384
# In a CUDA graph a second kernel costs less than a counter that the graph has to clear, up to so many key heads of a batch.
FEW_TILES = 512

# Shared memory that the tiles of one program may take, in KB: two programs or more fit on a multiprocessor.
_SHARED_MEMORY = {"sm_80": 80, "sm_86": 48, "sm_90": 100, "sm_100": 100, "gfx942": 32}


@triton.jit
def _pages_of(table, start, past, PAGE: tl.constexpr, KEYS: tl.constexpr):
    """The page of the block of keys that begins at ``start``, or the page of each of its keys where blocks cross pages."""
    if PAGE % KEYS == 0:
        return tl.load(table + start // PAGE, mask=start < past, other=0)
    else:
        key = start + tl.arange(0, KEYS)
        return tl.load(table + key // PAGE, mask=key < past, other=0)


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
def _join_sink(lse, sink, head, inside):
    """``(joined, share)``: a log-sum-exp with the sink's logit in it, and how much of the weight is not the sink's."""
    at_sink = tl.load(sink + head, mask=inside, other=0.0).to(tl.float32)
    higher = tl.maximum(lse, at_sink)
    joined = higher + tl.log2(power(lse - higher, 1.0) + power(at_sink - higher, 1.0)) * LN2
    empty = lse == -float("inf")  # a query that sees nothing stays empty
    return tl.where(empty, lse, joined), tl.where(empty, 0.0, power(lse - joined, 1.0))


@triton.jit
def _merged(
    parts, part_lses, first_part, splits, rows_inside, DV: tl.constexpr, BLOCK_DV: tl.constexpr, AT_ONCE: tl.constexpr
):  # fmt: skip
    """``(values, lse)`` of rows, from their parts ``[split, Dv]``: always in the order of the splits."""
    dv = tl.arange(0, BLOCK_DV)
    inside = rows_inside[:, None] & (dv < DV)[None, :]
    acc = tl.zeros([first_part.shape[0], BLOCK_DV], tl.float32)
    highest = tl.full([first_part.shape[0]], -float("inf"), tl.float32)
    total = tl.zeros([first_part.shape[0]], tl.float32)
    for first in range(0, splits, AT_ONCE):
        all_splits = first + tl.arange(0, AT_ONCE)
        there = rows_inside[:, None] & (all_splits < splits)[None, :]
        lses = tl.load(part_lses + first_part[:, None] + all_splits[None, :], mask=there, other=-float("inf"))
        higher = tl.maximum(highest, tl.max(lses, 1))
        reference = tl.where(higher == -float("inf"), 0.0, higher)
        shrink = power(highest - reference, 1.0)
        acc *= shrink[:, None]
        total *= shrink
        highest = higher
        # Unrolled, so that the loads of several parts are under way together.
        for i in tl.static_range(AT_ONCE):
            split = first + i
            lse = tl.load(part_lses + first_part + split, mask=rows_inside & (split < splits), other=-float("inf"))
            at = parts + ((first_part + split) * DV)[:, None] + dv[None, :]
            values = tl.load(at, mask=inside & (split < splits), other=0.0)
            values = tl.where((lse > -float("inf"))[:, None], values, 0.0)  # nobody wrote those that saw nothing
            weight = power(lse - reference, 1.0)
            total += weight
            acc += values * weight[:, None]
    empty = total == 0.0
    row_lse = tl.where(empty, -float("inf"), highest + tl.log2(total) * LN2)
    return acc * (1.0 / tl.where(empty, 1.0, total))[:, None], row_lse


@triton.jit
def _finish(values, row_lse, sink, out, lse, at, result, head, inside, DV: tl.constexpr, BLOCK_DV: tl.constexpr):
    """Join the sink and store the results of rows, whose outputs begin at ``at``."""
    if sink is not None:
        row_lse, not_sink = _join_sink(row_lse, sink, head, inside)
        values *= not_sink[:, None]
    tl.store(lse + result, row_lse, mask=inside)
    dv = tl.arange(0, BLOCK_DV)
    tl.store(at[:, None] + dv[None, :], values.to(out.dtype.element_ty), mask=inside[:, None] & (dv < DV)[None, :])


@triton.jit(
    do_not_specialize=[
        "rows", "q_length", "group", "key_heads", "capacity", "pages", "splits", "row_blocks", "left", "table_b", "q_b",
        "q_h", "q_s", "k_b", "k_h", "v_b", "v_h", "o_b", "o_h", "o_s",
    ]
)  # fmt: skip
def _decode(
    q, k, v, lengths, table, sink, out, lse, parts, arrived,
    rows, q_length, group, key_heads, capacity, pages, splits, row_blocks, left, table_b,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, o_b, o_h, o_s, scale, softcap,
    WHOLE: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_CAP: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    STAGES: tl.constexpr, PIECE: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr, UNIT: tl.constexpr,
    MERGED_ROWS: tl.constexpr, MERGED_PARTS: tl.constexpr,
):  # fmt: skip
    """One share of one sequence's keys, for one key head and a block of its rows.

    WHOLE: there is one share. Else its part goes to ``parts``: float32 ``[row, split, Dv]``, then the lses ``[row, split]``.
    ``arrived``, if it is there, counts the programs of these rows that are done, and is zero again after: the last one
    merges. PAGE: the page size, 0 for a contiguous cache.
    """
    program = tl.program_id(0)
    row_block = program % row_blocks
    split = (program // row_blocks) % splits
    key_head = (program // row_blocks // splits) % key_heads
    batch = (program // row_blocks // splits // key_heads).to(tl.int64)

    row = row_block * ROWS + tl.arange(0, ROWS)  # the tokens of a head are neighbours
    rows_inside = row < group * q_length
    token, head = row % q_length, key_head * group + row // q_length
    result = (batch * key_heads * group + head) * q_length + token  # its row in (B, Hq, Sq)

    whole_length = tl.load(lengths + batch).to(tl.int64)
    bad = (whole_length < 0) | (whole_length > capacity)
    length = tl.where(bad, 0, whole_length).to(tl.int32)
    wrong = bad.to(tl.int32)
    first = tl.full((), 0, tl.int32)
    if HAS_LEFT:
        first = tl.maximum(length - q_length - left, 0)  # the first key that some row sees
    first_block = first // KEYS
    blocks = (length + KEYS - 1) // KEYS - first_block
    share = (blocks + splits - 1) // splits
    begin = first_block + split * share
    end = tl.minimum(begin + share, first_block + blocks)
    if HAS_LEFT and PAGE > 0:
        # Pages left of the window are not read, but a table that names pages that do not exist is bad all the same.
        skipped = first_block * KEYS // PAGE
        some = (skipped + splits - 1) // splits
        stop = tl.minimum(split * some + some, skipped)
        wrong = tl.maximum(wrong, _any_wrong(table + batch * table_b, split * some, stop, pages, 128))

    part_lses = parts
    if not WHOLE:
        part_lses += tl.full((), 0, tl.int64) + rows.to(tl.int64) * splits * DV
    if begin >= end and not WHOLE:
        nothing = tl.where(wrong > 0, float("nan"), -float("inf"))
        tl.store(part_lses + result * splits + split, tl.zeros([ROWS], tl.float32) + nothing, mask=rows_inside)
    else:
        lane = tl.arange(0, KEYS)
        q_at = q + tl.multiple_of(batch * q_b + head.to(tl.int64) * q_h + token * q_s, ALIGN)
        position = token + (length - q_length)
        k_base = k + tl.multiple_of(key_head * k_h.to(tl.int64), ALIGN)
        v_base = v + tl.multiple_of(key_head * v_h.to(tl.int64), ALIGN)
        page = 0
        crossed = tl.zeros([KEYS], tl.int32)  # as `wrong`, where each key has a page of its own
        if PAGE == 0:
            k_base += tl.multiple_of(batch * k_b, ALIGN)
            v_base += tl.multiple_of(batch * v_b, ALIGN)
        else:
            table += batch * table_b
            page = _pages_of(table, begin * KEYS, length, PAGE, KEYS)

        acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
        highest = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        for block in tl.range(begin, end, num_stages=STAGES):
            start = block * KEYS
            key = start + lane
            inside = (key >= first) & (key < length)  # what no row sees may hold NaN: it is read as zero
            if PAGE == 0:
                at = tl.full((), 0, tl.int64) + start
                k_at, v_at, slot = k_base + at * k_s, v_base + at * v_s, lane
            else:
                exists = (page >= 0) & (page < pages)
                number = tl.where(exists, page, 0).to(tl.int64)
                k_at, v_at = k_base + tl.multiple_of(number * k_b, ALIGN), v_base + tl.multiple_of(number * v_b, ALIGN)
                inside = inside & exists
                if PAGE % KEYS == 0:
                    slot = start % PAGE + lane
                    wrong = tl.maximum(wrong, (exists == 0).to(tl.int32))
                else:
                    slot = key % PAGE
                    k_at, v_at = k_at[:, None], v_at[:, None]
                    crossed = tl.maximum(crossed, (exists == 0).to(tl.int32))
                # One block ahead: the loads of keys and values, which are several blocks ahead, must not wait for it.
                page = _pages_of(table, start + KEYS, length, PAGE, KEYS)
            products = row_products(q_at, rows_inside, k_at, slot, k_s, inside, D, BLOCK_D, PIECE, PRECISION)
            logits = tile_logits(products, scale, softcap, HAS_CAP, UNIT)
            seen = in_band(position[:, None], key[None, :], length, left, 0, HAS_LEFT, True)
            logits = tl.where(seen, logits, -float("inf"))  # [ROWS, KEYS]
            higher = tl.maximum(highest, tl.max(logits, 1))
            reference = tl.where(higher == -float("inf"), 0.0, higher)
            weights = power(logits - reference[:, None], UNIT)
            shrink = power(highest - reference, UNIT)
            total = total * shrink + tl.sum(weights, 1)
            highest = higher
            v_tile = load_rows(v_at, slot, v_s, inside, DV, BLOCK_DV, True)  # [KEYS, BLOCK_DV]
            acc = product(weights.to(v_tile.dtype), v_tile, acc * shrink[:, None], PRECISION)

        if PAGE > 0 and PAGE % KEYS != 0:
            wrong = tl.maximum(wrong, tl.max(crossed, 0))
        empty = total == 0.0
        row_lse = tl.where(empty, -float("inf"), highest * (1.0 / UNIT) + tl.log2(total) * LN2)
        row_lse = tl.where(wrong > 0, float("nan"), row_lse)
        # An empty row is zeros, also where other rows see a NaN: zero times NaN is NaN.
        values = tl.where(empty[:, None], 0.0, acc * (1.0 / tl.where(empty, 1.0, total))[:, None])
        values = tl.where(wrong > 0, float("nan"), values)
        if WHOLE:
            o_at = out + batch * o_b + head.to(tl.int64) * o_h + token * o_s
            _finish(values, row_lse, sink, out, lse, o_at, result, head, rows_inside, DV, BLOCK_DV)
        else:
            part = result * splits + split
            dv = tl.arange(0, BLOCK_DV)
            tl.store(part_lses + part, row_lse, mask=rows_inside)
            tl.store(parts + (part * DV)[:, None] + dv[None, :], values, mask=rows_inside[:, None] & (dv < DV)[None, :])

    if arrived is not None:
        # The count of one thread speaks for the stores of all that came to the barrier: so it is on NVIDIA GPUs.
        tl.debug_barrier()
        count = arrived + (batch * key_heads + key_head) * row_blocks + row_block
        if tl.atomic_add(count, 1, sem="acq_rel") == splits - 1:
            tl.store(count, 0)
            last_row = row_block * ROWS + tl.arange(0, MERGED_ROWS)
            last_inside = last_row < group * q_length
            last_token, last_head = last_row % q_length, key_head * group + last_row // q_length
            last_result = (batch * key_heads * group + last_head) * q_length + last_token
            merged, merged_lse = _merged(
                parts, part_lses, last_result * splits, splits, last_inside, DV, BLOCK_DV, MERGED_PARTS
            )  # fmt: skip
            last_at = out + batch * o_b + last_head.to(tl.int64) * o_h + last_token * o_s
            _finish(merged, merged_lse, sink, out, lse, last_at, last_result, last_head, last_inside, DV, BLOCK_DV)


@triton.jit(do_not_specialize=["rows", "q_length", "heads", "splits", "o_b", "o_h", "o_s"])
def _merge(
    parts, sink, out, lse, rows, q_length, heads, splits, o_b, o_h, o_s,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, MERGED_PARTS: tl.constexpr,
):  # fmt: skip
    """out and lse of one row, from the parts that `_decode` left."""
    result = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    token, head = result % q_length, result // q_length % heads
    part_lses = parts + tl.full((), 0, tl.int64) + rows.to(tl.int64) * splits * DV
    inside = result < rows
    values, row_lse = _merged(parts, part_lses, result * splits, splits, inside, DV, BLOCK_DV, MERGED_PARTS)
    o_at = out + result // q_length // heads * o_b + head * o_h + token * o_s
    _finish(values, row_lse, sink, out, lse, o_at, result, head, inside, DV, BLOCK_DV)


def attention_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, block_table: Tensor | None, sink: Tensor | None,
    flags: Flags, num_splits: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    tile = decode_tile(q.element_size(), q.shape[3], v_cache.shape[3], rows_of(q, k_cache), architecture(q.device))
    if num_splits == 0:
        span = capacity_of(k_cache, block_table)
        if flags.left >= 0:
            span = min(span, flags.left + q.shape[2])
        programs = PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(q)
        per_split = k_cache.shape[1] * max(1, -(-rows_of(q, k_cache) // tile.queries))
        num_splits = min(programs // per_split, -(-span // SMALLEST_SHARE))
    return decode_with(tile, num_splits, q, k_cache, v_cache, lengths, block_table, sink, flags)


def decode_with(
    tile: Tile, num_splits: int, q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor,
    block_table: Tensor | None, sink: Tensor | None, flags: Flags,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`attention_decode` with these tile sizes and this many splits, or one per block of keys if there are fewer."""
    out = layout.empty_like_heads(q, v_cache.shape[3])
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    if lse.numel() == 0:
        return out, lse
    if block_table is not None and block_table.stride(1) != 1:
        block_table = block_table.contiguous()
    plans = _plans(
        tile, num_splits, q.shape, k_cache.shape, v_cache.shape[3], q.stride(), k_cache.stride(), v_cache.stride(),
        out.stride(), None if block_table is None else (*block_table.shape, block_table.stride(0)), q.element_size(),
        flags, dot_precision(q.dtype), logit_unit(q.dtype),
    )  # fmt: skip
    parts = arrived = None
    if plans.parts:
        parts = q.new_empty(plans.parts, dtype=torch.float32)
        if _merges_itself(q, plans):
            arrived = zeros(q, plans.tiles)
    sink = in_order(sink)
    plans.decode.launch(q, k_cache, v_cache, lengths.contiguous(), block_table, sink, out, lse, parts, arrived)
    if parts is not None and arrived is None:
        plans.merge.launch(parts, sink, out, lse)
    return out, lse


def _merges_itself(q: Tensor, plans: _Plans) -> bool:
    """Does the program that finishes last merge? Not on AMD GPUs: its barrier does not wait for stores of other waves."""
    if not plans.small or torch.version.hip is not None:
        return False
    return plans.tiles >= FEW_TILES or not (q.is_cuda and torch.cuda.is_current_stream_capturing())


class _Plans(NamedTuple):
    decode: Plan
    merge: Plan
    parts: int  # numbers of all shares: values and lses; 0 where one share has all keys
    tiles: int  # blocks of rows, each with a count of programs that are done
    small: bool  # so few parts that one program may merge them


# A model decodes with the same shapes again and again: working a launch out costs as much as the launch.
@functools.lru_cache(maxsize=4096)
def _plans(
    tile: Tile, num_splits: int, q_shape: tuple[int, ...], k_shape: tuple[int, ...], dv: int,
    q_strides: Strides, k_strides: Strides, v_strides: Strides, out_strides: Strides, table: tuple[int, int, int] | None,
    element: int, flags: Flags, precision: str, unit: float,
) -> _Plans:  # fmt: skip
    """``table``: sequences, pages of each, and the stride between them."""
    batch, heads, q_length, head_dim = q_shape
    key_heads, block_d = k_shape[1], block_of(head_dim)
    # In a paged cache rows are found from the beginning of their page.
    check_row_strides(max(tile.keys, 0 if table is None else k_shape[2]), k_strides, v_strides)
    capacity = k_shape[2] * (1 if table is None else table[1])
    splits = max(1, min(num_splits, -(-capacity // tile.keys)))
    row_blocks = -(-(heads // key_heads * q_length) // tile.queries)
    left = flags.left if flags.left < capacity - 1 else -1  # a window that reaches over the whole cache is none
    # A cache without a single slot has no pages to look up.
    page_size = 0 if table is None else max(1, k_shape[2])
    rows = batch * heads * q_length
    tiles = row_blocks * key_heads * batch
    merged_rows, merged_parts = merge_tile(heads // key_heads * q_length, tile.queries, block_of(dv), tile.warps)
    decode = Plan(
        _decode,
        (tiles * splits, 1, 1),
        (
            rows, q_length, heads // key_heads, key_heads, capacity, k_shape[0], splits, row_blocks, left,
            0 if table is None else table[2], *q_strides[:3], *k_strides[:3], *v_strides[:3], *out_strides[:3],
            flags.scale, flags.softcap,
        ),
        (
            splits == 1, left >= 0, flags.softcap > 0, page_size, head_dim, dv, block_d, block_of(dv),
            tile.queries, tile.keys, tile.stages, piece_of(block_d, element),
            common_alignment(element, q_strides, k_strides, v_strides), precision, unit,
            merged_rows, merged_parts,
        ),
        tile.warps,
        tile.stages,
        tile.registers,
    )  # fmt: skip
    merge = Plan(
        _merge,
        (rows, 1, 1),
        (rows, q_length, heads, splits, *out_strides[:3]),
        (dv, block_of(dv), merged_parts),
        4,
        1,
    )
    small = merged_rows * splits * dv <= MOST_MERGED
    return _Plans(decode, merge, 0 if splits == 1 else rows * splits * (dv + 1), tiles, small)


def merge_tile(rows: int, queries: int, block_dv: int, warps: int) -> tuple[int, int]:
    """Rows whose parts a program merges, and parts whose loads are under way together, as far as 64 registers go."""
    merged = min(queries, power_of_two(rows))
    return merged, max(1, min(16, 64 * 32 * warps // (merged * block_dv)))


def rows_of(q: Tensor, k_cache: Tensor) -> int:
    """Rows that share a read of the cache: the query heads of a key head, times the new tokens."""
    return q.shape[1] // k_cache.shape[1] * q.shape[2]


def capacity_of(k_cache: Tensor, block_table: Tensor | None) -> int:
    return k_cache.shape[2] * (1 if block_table is None else block_table.shape[1])


@functools.lru_cache(maxsize=256)
def decode_tile(element_size: int, head_dim: int, v_dim: int, rows: int, arch: str) -> Tile:
    """Rows padded to what the matrix units take; keys and stages as shared memory allows."""
    block_d, block_dv = block_of(head_dim), block_of(v_dim)
    room = 16384 // (max(block_d, block_dv) * element_size)
    queries = min(max(16, power_of_two(rows)), max(16, min(room, 128 // element_size)))
    bytes_per_key = (block_d + block_dv) * element_size
    # Four warps would run out of registers where there is more than this, float32 above all.
    warps = 4 if queries == 16 and bytes_per_key * element_size < 4096 else 8
    for keys, stages in ((64, 3), (32, 4), (32, 3), (16, 4), (16, 3), (16, 2)):
        if keys * (stages - 1) * bytes_per_key <= _SHARED_MEMORY[arch] * 1024:
            return Tile(queries, keys, warps, stages)
    return Tile(queries, 16, warps, 1)
