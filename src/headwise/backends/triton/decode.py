"""Decoding in Triton: the keys are split over the machine, and the parts are merged in a fixed order.

A program serves all query heads of a key head (and all new tokens) with one read of its share of the cache: they are the
rows of one tile. Shares are cut from each sequence's own keys, so a short sequence in a large cache still fills the
machine. "Flash-Decoding", Dao et al., 2023; pages as in Kwon et al., "PagedAttention", 2023.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

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

# A sequence alone is cut into about this many shares per multiprocessor, and no share is smaller than this many keys. The
# batch has no say: a sequence gives the same bits in any batch. How many shares a program has depends on it, see `_decode`.
SHARES_PER_MULTIPROCESSOR = 1
SMALLEST_SHARE = 256
BUNDLE = 4
# The program that finishes last merges the parts of its rows, where they are no more numbers than this and wherever a launch
# costs something (see `_merges_itself`). Else a second kernel does, in the same order and bits.
MOST_MERGED = 16384

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
def _fold(acc, highest, total, more, more_highest, more_total, UNIT: tl.constexpr):
    """A softmax over some keys, ``(acc, highest, total)`` not yet divided by its total, with one over others added.

    Adding to nothing changes no bit, nor does adding nothing. The multiply-adds are said, and not left to the compiler, so
    that it does not matter where this happens: in a program that has both, or in the one that merges.
    """
    higher = tl.maximum(highest, more_highest)
    reference = tl.where(higher == -float("inf"), 0.0, higher)
    shrink, weight = power(highest - reference, UNIT), power(more_highest - reference, UNIT)
    # Of keys that a row did not see, what is there does not count: nobody wrote it, or it is zero times a NaN.
    more = tl.where((more_highest > -float("inf"))[:, None], more, 0.0)
    acc = tl.fma(more, tl.zeros_like(more) + weight[:, None], acc * shrink[:, None])
    return acc, higher, tl.fma(more_total, weight, total * shrink)


@triton.jit
def _merged(
    parts, part_stats, first_part, count, rows_inside,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, AT_ONCE: tl.constexpr, PARTS_PER_BUNDLE: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """The softmax of rows from their ``count`` parts: in bundles of PARTS_PER_BUNDLE, then over the bundles, in order."""
    dv = tl.arange(0, BLOCK_DV)
    inside = rows_inside[:, None] & (dv < DV)[None, :]
    nothing = tl.zeros([first_part.shape[0], BLOCK_DV], tl.float32)
    none = tl.full([first_part.shape[0]], -float("inf"), tl.float32)
    zero = tl.zeros([first_part.shape[0]], tl.float32)
    acc, highest, total = nothing, none, zero
    for first in range(0, count, AT_ONCE):
        # All loads before the first sum, so that they are under way together.
        loaded = ()
        for i in tl.static_range(AT_ONCE):
            at = first_part + first + i
            there = rows_inside & (first + i < count)
            stats = part_stats + 2 * at
            loaded += (  # type: ignore[assignment]
                (
                    tl.load(parts + (at * DV)[:, None] + dv[None, :], mask=inside & (first + i < count), other=0.0),
                    tl.load(stats, mask=there, other=-float("inf")),
                    tl.load(stats + 1, mask=there, other=0.0),
                ),
            )
        for start in tl.static_range(0, AT_ONCE, PARTS_PER_BUNDLE):
            bundle, bundle_highest, bundle_total = nothing, none, zero
            for i in tl.static_range(PARTS_PER_BUNDLE):
                more, more_highest, more_total = loaded[start + i]  # type: ignore[var-annotated]
                bundle, bundle_highest, bundle_total = _fold(
                    bundle, bundle_highest, bundle_total, more, more_highest, more_total, UNIT
                )
            acc, highest, total = _fold(acc, highest, total, bundle, bundle_highest, bundle_total, UNIT)
    return acc, highest, total


@triton.jit
def _finish(
    acc, highest, total, sink, out, lse, at, result, head, inside,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Divide by the total, join the sink and store the results of rows, whose outputs begin at ``at``."""
    empty = total == 0.0
    log_total = tl.log2(tl.where(empty, 1.0, total))
    row_lse = tl.where(empty, -float("inf"), tl.fma(log_total, tl.zeros_like(total) + LN2, highest * (1.0 / UNIT)))
    values = acc * (1.0 / tl.where(empty, 1.0, total))[:, None]
    if sink is not None:
        row_lse, not_sink = _join_sink(row_lse, sink, head, inside)
        values *= not_sink[:, None]
    tl.store(lse + result, row_lse, mask=inside)
    dv = tl.arange(0, BLOCK_DV)
    tl.store(at[:, None] + dv[None, :], values.to(out.dtype.element_ty), mask=inside[:, None] & (dv < DV)[None, :])


@triton.jit(
    do_not_specialize=[
        "rows", "q_length", "group", "key_heads", "capacity", "pages", "shares", "each", "shares_per_bundle",
        "row_blocks", "left", "table_b", "q_b",
        "q_h", "q_s", "k_b", "k_h", "v_b", "v_h", "o_b", "o_h", "o_s",
    ]
)  # fmt: skip
def _decode(
    q, k, v, lengths, table, sink, out, lse, parts, arrived,
    rows, q_length, group, key_heads, capacity, pages, shares, each, shares_per_bundle, row_blocks, left, table_b,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, o_b, o_h, o_s, scale, softcap,
    WHOLE: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_CAP: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    STAGES: tl.constexpr, PIECE: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr, UNIT: tl.constexpr,
    MERGED_ROWS: tl.constexpr, MERGED_PARTS: tl.constexpr, PARTS_PER_BUNDLE: tl.constexpr,
):  # fmt: skip
    """Some shares of one sequence's keys, for one key head and a block of its rows.

    The keys of a sequence are cut into ``shares``, which are added up to bundles of ``shares_per_bundle``, and those to the
    whole, always in order, whoever does it. A program has ``each`` of the shares: one, a bundle or all (WHOLE). Else its
    part goes to ``parts``: float32 ``[row, part, Dv]``, then highest logit and total ``[row, part, 2]``.
    ``arrived``, if it is there, counts the programs of these rows that are done, and is zero again after: the last one
    merges. PAGE: the page size, 0 for a contiguous cache.
    """
    program = tl.program_id(0)
    row_block = program % row_blocks
    count = (shares + each - 1) // each  # parts of a sequence
    part = (program // row_blocks) % count
    key_head = (program // row_blocks // count) % key_heads
    batch = (program // row_blocks // count // key_heads).to(tl.int64)

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
    share = (blocks + shares - 1) // shares
    begin = first_block + part * each * share
    end = tl.minimum(begin + each * share, first_block + blocks)
    if HAS_LEFT and PAGE > 0:
        # Pages left of the window are not read, but a table that names pages that do not exist is bad all the same.
        skipped = first_block * KEYS // PAGE
        some = (skipped + count - 1) // count
        stop = tl.minimum(part * some + some, skipped)
        wrong = tl.maximum(wrong, _any_wrong(table + batch * table_b, part * some, stop, pages, 128))

    part_stats = parts
    at_part = result * count + part
    if not WHOLE:
        part_stats += tl.full((), 0, tl.int64) + rows.to(tl.int64) * count * DV
    if begin >= end and not WHOLE:
        marked = tl.where(wrong > 0, float("nan"), 0.0)  # a total that is NaN makes everything NaN
        tl.store(part_stats + 2 * at_part, tl.zeros([ROWS], tl.float32) - float("inf"), mask=rows_inside)
        tl.store(part_stats + 2 * at_part + 1, tl.zeros([ROWS], tl.float32) + marked, mask=rows_inside)
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
        bundle, bundle_highest, bundle_total = acc, highest, total
        all_acc, all_highest, all_total = acc, highest, total
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
            done = block + 1 - first_block
            if (done % share == 0) | (block + 1 == end):
                bundle, bundle_highest, bundle_total = _fold(
                    bundle, bundle_highest, bundle_total, acc, highest, total, UNIT
                )
                acc, highest, total = (
                    tl.zeros_like(acc),
                    tl.full([ROWS], -float("inf"), tl.float32),
                    tl.zeros_like(total),
                )
                if (done % (shares_per_bundle * share) == 0) | (block + 1 == end):
                    all_acc, all_highest, all_total = _fold(
                        all_acc, all_highest, all_total, bundle, bundle_highest, bundle_total, UNIT
                    )
                    bundle, bundle_highest, bundle_total = acc, highest, total

        if PAGE > 0 and PAGE % KEYS != 0:
            wrong = tl.maximum(wrong, tl.max(crossed, 0))
        all_total = tl.where(wrong > 0, float("nan"), all_total)
        if WHOLE:
            o_at = out + batch * o_b + head.to(tl.int64) * o_h + token * o_s
            _finish(
                all_acc, all_highest, all_total, sink, out, lse, o_at, result, head, rows_inside, DV, BLOCK_DV, UNIT
            )
        else:
            dv = tl.arange(0, BLOCK_DV)
            tl.store(part_stats + 2 * at_part, all_highest, mask=rows_inside)
            tl.store(part_stats + 2 * at_part + 1, all_total, mask=rows_inside)
            at = parts + (at_part * DV)[:, None] + dv[None, :]
            tl.store(at, all_acc, mask=rows_inside[:, None] & (dv < DV)[None, :])

    if arrived is not None:
        # The count of one thread speaks for the stores of all that came to the barrier: so it is on NVIDIA GPUs.
        tl.debug_barrier()
        here = arrived + (batch * key_heads + key_head) * row_blocks + row_block
        if tl.atomic_add(here, 1, sem="acq_rel") == count - 1:
            tl.store(here, 0)
            last_row = row_block * ROWS + tl.arange(0, MERGED_ROWS)
            last_inside = last_row < group * q_length
            last_token, last_head = last_row % q_length, key_head * group + last_row // q_length
            last_result = (batch * key_heads * group + last_head) * q_length + last_token
            merged, merged_highest, merged_total = _merged(
                parts, part_stats, last_result * count, count, last_inside, DV, BLOCK_DV, MERGED_PARTS,
                PARTS_PER_BUNDLE, UNIT,
            )  # fmt: skip
            last_at = out + batch * o_b + last_head.to(tl.int64) * o_h + last_token * o_s
            _finish(
                merged, merged_highest, merged_total, sink, out, lse, last_at, last_result, last_head, last_inside, DV,
                BLOCK_DV, UNIT,
            )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "q_length", "heads", "count", "o_b", "o_h", "o_s"])
def _merge(
    parts, sink, out, lse, rows, q_length, heads, count, o_b, o_h, o_s,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, MERGED_PARTS: tl.constexpr, PARTS_PER_BUNDLE: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """out and lse of one row, from the parts that `_decode` left."""
    result = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    token, head = result % q_length, result // q_length % heads
    part_stats = parts + tl.full((), 0, tl.int64) + rows.to(tl.int64) * count * DV
    inside = result < rows
    acc, highest, total = _merged(
        parts, part_stats, result * count, count, inside, DV, BLOCK_DV, MERGED_PARTS, PARTS_PER_BUNDLE, UNIT
    )
    o_at = out + result // q_length // heads * o_b + head * o_h + token * o_s
    _finish(acc, highest, total, sink, out, lse, o_at, result, head, inside, DV, BLOCK_DV, UNIT)


def attention_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, block_table: Tensor | None, sink: Tensor | None,
    flags: Flags, num_splits: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q is ``(B, Hq, D)`` or ``(B, Hq, Sq, D)``."""
    prepared = prepare_with(None, 0, q, k_cache, v_cache, lengths, block_table, sink, flags, num_splits)
    return prepared(q, k_cache, v_cache, lengths, block_table, sink)


def prepare_attention_decode(q: Tensor, *others: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    if q.dtype == torch.float32:  # how it is multiplied is a switch of PyTorch's, to be asked for at every call
        flags, num_splits = others[-2:]
        return lambda *tensors: attention_decode(*(*tensors, flags, num_splits))
    return prepare_with(None, 0, q, *others)


attention_decode.prepare = prepare_attention_decode  # type: ignore[attr-defined]


def prepare_with(
    tile: Tile | None, each: int, q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor,
    block_table: Tensor | None, sink: Tensor | None, flags: Flags, num_splits: int,
) -> Callable[..., tuple[Tensor, Tensor]]:  # fmt: skip
    """What is left to do for calls that differ from this one in data and addresses alone, given their tensors.

    ``tile`` and ``each``, the shares that a program has, are for measuring and tests: None and 0 are what is best.
    """
    rows, dv = tuple(q.shape[:-1]), v_cache.shape[3]
    one = q.unsqueeze(2) if q.dim() == 3 else q
    out_strides = layout.strides_like_heads(one, dv)
    out_shape, own_strides = (*rows, dv), out_strides if one is q else (*out_strides[:2], 1)
    if 0 in rows:
        return lambda q, *others: (q.new_empty_strided(out_shape, own_strides), q.new_empty(rows, dtype=torch.float32))
    table, table_in_order = None, True
    if block_table is not None:
        table_in_order = block_table.stride(1) == 1
        table = (*block_table.shape, block_table.stride(0) if table_in_order else block_table.shape[1])
    plans = _plans(
        tile, each, num_splits, one.shape, k_cache.shape, dv, one.stride(), k_cache.stride(), v_cache.stride(),
        out_strides, table, q.element_size(), flags, dot_precision(q.dtype), logit_unit(q.dtype), architecture(q.device),
        multiprocessors(q),
    )  # fmt: skip
    others = [x if x is None else x.dtype for x in (lengths, block_table, sink)]
    device, of_q, of_parts = q.get_device(), q.dtype, torch.float32 if plans.parts else None
    read, made = (of_q, k_cache.dtype, v_cache.dtype, *others), (of_q, torch.float32, of_parts)
    decode = plans.decode.bound(device, *read, *made, None)
    decode_and_merge = plans.decode.bound(device, *read, *made, torch.int32)
    merge = plans.merge.bound(device, torch.float32, others[2], of_q, torch.float32)

    make_lse, make_parts = (
        layout.maker_of_empty(q, rows, torch.float32),
        layout.maker_of_empty(q, (plans.parts,), torch.float32),
    )

    def run(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, block_table: Tensor | None, sink: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        out = q.new_empty_strided(out_shape, own_strides)
        lse = make_lse()
        if not table_in_order:
            block_table = in_order(block_table)
        tensors = (q, k_cache, v_cache, lengths.contiguous(), block_table, in_order(sink), out, lse)
        if plans.parts == 0:
            decode(*tensors, None, None)
            return out, lse
        parts = make_parts()
        if _merges_itself(q, plans):
            decode_and_merge(*tensors, parts, zeros(q, plans.tiles))
        else:
            decode(*tensors, parts, None)
            merge(parts, in_order(sink), out, lse)
        return out, lse

    return run


def _merges_itself(q: Tensor, plans: _Plans) -> bool:
    """Does the program that finishes last merge? Not on AMD GPUs: its barrier does not wait for stores of other waves.

    In a CUDA graph a second kernel costs less than a counter that the graph has to clear.
    """
    return plans.small and torch.version.hip is None and not (q.is_cuda and torch.cuda.is_current_stream_capturing())


class _Plans(NamedTuple):
    decode: Plan
    merge: Plan
    parts: int  # numbers of all parts: values, highest logits and totals; 0 where a program has all keys
    tiles: int  # blocks of rows, each with a count of programs that are done
    small: bool  # so few parts that one program may merge them


# A model decodes with the same shapes again and again: working a launch out costs as much as the launch.
@functools.lru_cache(maxsize=4096)
def _plans(
    tile: Tile | None, each: int, num_splits: int, q_shape: tuple[int, ...], k_shape: tuple[int, ...], dv: int,
    q_strides: Strides, k_strides: Strides, v_strides: Strides, out_strides: Strides, table: tuple[int, int, int] | None,
    element: int, flags: Flags, precision: str, unit: float, arch: str, processors: int,
) -> _Plans:  # fmt: skip
    """``table``: sequences, pages of each, and the stride between them."""
    batch, heads, q_length, head_dim = q_shape
    key_heads, block_d, group = k_shape[1], block_of(head_dim), heads // k_shape[1]
    capacity = k_shape[2] * (1 if table is None else table[1])
    given, tile = tile, tile or decode_tile(element, head_dim, dv, group * q_length, arch)
    # In a paged cache rows are found from the beginning of their page.
    check_row_strides(max(tile.keys, 0 if table is None else k_shape[2]), k_strides, v_strides)
    row_blocks = -(-(group * q_length) // tile.queries)
    if num_splits == 0:
        span = capacity if flags.left < 0 else min(capacity, flags.left + q_length)
        num_splits = min(SHARES_PER_MULTIPROCESSOR * processors // (key_heads * row_blocks), -(-span // SMALLEST_SHARE))
    shares = max(1, min(num_splits, -(-capacity // tile.keys)))
    tiles = row_blocks * key_heads * batch
    each = each or shares_of_a_program(shares, tiles, processors)
    parts = -(-shares // each)
    parts_per_bundle = -(-BUNDLE // each)
    if given is None:
        tile = for_programs_of(tile, each, parts, (block_d + block_of(dv)) * element, arch)
    left = flags.left if flags.left < capacity - 1 else -1  # a window that reaches over the whole cache is none
    # A cache without a single slot has no pages to look up.
    page_size = 0 if table is None else max(1, k_shape[2])
    rows = batch * heads * q_length
    merged_rows, merged_parts = merge_tile(group * q_length, tile.queries, block_of(dv), tile.warps)
    decode = Plan(
        _decode,
        (tiles * parts, 1, 1),
        (
            rows, q_length, group, key_heads, capacity, k_shape[0], shares, each, BUNDLE, row_blocks, left,
            0 if table is None else table[2], *q_strides[:3], *k_strides[:3], *v_strides[:3], *out_strides[:3],
            flags.scale, flags.softcap,
        ),
        (
            parts == 1, left >= 0, flags.softcap > 0, page_size, head_dim, dv, block_d, block_of(dv),
            tile.queries, tile.keys, tile.stages, piece_of(block_d, element),
            common_alignment(element, q_strides, k_strides, v_strides), precision, unit,
            merged_rows, max(merged_parts, parts_per_bundle), parts_per_bundle,
        ),
        tile.warps,
        tile.stages,
        tile.registers,
    )  # fmt: skip
    merge = Plan(
        _merge,
        (rows, 1, 1),
        (rows, q_length, heads, parts, *out_strides[:3]),
        (dv, block_of(dv), max(parts_per_bundle, 16 if each == 1 else 8), parts_per_bundle, unit),
        4,
        1,
    )
    small = merged_rows * parts * dv <= MOST_MERGED and merged_parts >= parts_per_bundle
    return _Plans(decode, merge, 0 if parts == 1 else rows * parts * (dv + 2), tiles, small)


def shares_of_a_program(shares: int, tiles: int, processors: int) -> int:
    """All, a bundle or one: as many as leave enough programs; their results are added up in the same order anyway."""
    for each in (shares, BUNDLE):
        if 2 * tiles * -(-shares // each) >= 3 * processors:
            return each
    return 1


def for_programs_of(tile: Tile, each: int, parts: int, bytes_per_key: int, arch: str) -> Tile:
    """The tile with what suits programs of so many shares and changes no bit: stages and registers."""
    if parts == 1 and tile.keys * tile.stages * bytes_per_key <= _SHARED_MEMORY[arch] * 1024:
        return tile._replace(stages=tile.stages + 1)  # two programs per multiprocessor, and more of each under way
    if each > 1 and arch == "sm_90" and tile.warps == 4 and bytes_per_key <= 512:
        return tile._replace(registers=168)  # three programs per multiprocessor; nothing spills
    return tile


def merge_tile(rows: int, queries: int, block_dv: int, warps: int) -> tuple[int, int]:
    """Rows whose parts a program merges, and parts whose loads are under way together, as far as 64 registers go."""
    merged = min(queries, power_of_two(rows))
    return merged, max(1, min(16, 64 * 32 * warps // (merged * block_dv)))


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
