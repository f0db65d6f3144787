"""Attention forward in Triton, dense and packed: one kernel.

A program owns a tile of queries and walks over the keys that some of its rows see, with an online softmax in registers.
Keys that all of its rows see are visited without a mask; the ends of the range, with one. Dao, "FlashAttention-2", 2023.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwise import layout
from headwise.backends.triton import hopper, tile_sizes
from headwise.backends.triton.blocks import (
    Strides,
    as_bytes,
    block_of,
    check_row_strides,
    common_alignment,
    in_order,
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
from headwise.backends.triton.scores import (
    LN2,
    band_of,
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
def _visit(
    acc, highest, total, q_tile, k, v, mask, bias, begin, stop, gap_at, gap, first, past, row, rows_inside,
    offset, keys, left, right,
    k_s, v_s, m_q, m_k, b_q, b_k, scale, softcap,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_CAP: tl.constexpr, PARTIAL: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """The online softmax over the blocks of keys from ``begin`` to ``stop``; from ``gap_at`` on, ``gap`` keys are left out.

    PARTIAL: some rows do not see some of these keys.
    """
    lane = tl.arange(0, KEYS)
    GUARDED: tl.constexpr = PARTIAL or mask is not None or bias is not None  # a row may have seen nothing so far
    for at in range(begin, stop, KEYS):
        n = at + tl.where(at >= gap_at, gap, 0)
        key = n + lane
        inside = (key >= first) & (key < past)  # what no row of this tile sees may hold NaN: it is read as zero
        key_base = tl.full((), 0, tl.int64) + n
        k_tile = load_tile(k + key_base * k_s, lane, k_s, inside, D, BLOCK_D, PARTIAL, PRECISION)  # [KEYS, BLOCK_D]
        products = tile_product(q_tile, turned(k_tile, PRECISION), None, PRECISION)  # [QUERIES, KEYS]
        if GUARDED or HAS_CAP:
            logits = tile_logits(products, scale, softcap, HAS_CAP, UNIT)
            if bias is not None:
                there = rows_inside[:, None] & inside[None, :]
                added = load_scores(bias, row[:, None], key[None, :], b_q, b_k, there).to(tl.float32) * UNIT
                logits = tl.where(added == -float("inf"), -float("inf"), logits + added)  # hides a NaN, as a mask does
            if PARTIAL:
                seen = in_band((row + offset)[:, None], key[None, :], keys, left, right, HAS_LEFT, HAS_RIGHT)
                logits = tl.where(seen, logits, -float("inf"))
            if mask is not None:
                there = rows_inside[:, None] & inside[None, :]
                allowed = load_scores(mask, row[:, None], key[None, :], m_q, m_k, there) != 0
                logits = tl.where(allowed, logits, -float("inf"))
            higher = tl.maximum(highest, tl.max(logits, 1))
            reference = higher
            if GUARDED:
                reference = tl.where(higher == -float("inf"), 0.0, higher)
            weights = power(logits - reference[:, None], UNIT)
        else:
            scale2 = scale * UNIT
            higher = tl.maximum(highest, tl.max(products, 1) * scale2)
            reference = higher
            weights = power(products * scale2 - reference[:, None], UNIT)
        shrink = power(highest - reference, UNIT)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        highest = higher
        v_tile = load_tile(v + key_base * v_s, lane, v_s, inside, DV, BLOCK_DV, PARTIAL, PRECISION)  # [KEYS, BLOCK_DV]
        if mask is not None or bias is not None:
            # A key that is hidden from every row may hold NaN, and zero times NaN is NaN.
            used = tl.max((rows_inside[:, None] & (logits > -float("inf"))).to(tl.int32), 0) > 0
            v_tile = rows_kept(v_tile, used, PRECISION)
        acc = tile_product(tile_of(weights, PRECISION), v_tile, acc, PRECISION)
    return acc, highest, total


@triton.jit(
    do_not_specialize=[
        "q_length", "k_length", "heads", "group", "tiles", "sequences", "longest_q", "longest_k", "left", "right", "q_b",
        "q_h", "k_b", "k_h", "v_b", "v_h", "o_b", "o_h", "m_b", "m_h", "m_q", "b_b", "b_h", "b_q",
    ]
)  # fmt: skip
def _forward(
    q, k, v, out, lse, mask, bias, lengths, sink, cu_q, cu_k,
    q_length, k_length, heads, group, tiles, sequences, longest_q, longest_k, left, right,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, o_b, o_h, o_s, m_b, m_h, m_q, m_k, b_b, b_h, b_q, b_k, scale, softcap,
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
    if tile * QUERIES < rows:
        lane = tl.arange(0, QUERIES)
        row = tile * QUERIES + lane
        rows_inside = row < rows
        offset = keys - rows  # a query's position is its row plus this
        tile_start = q_start + tile * QUERIES
        q_base = q + tl.multiple_of(batch * q_b + head * q_h.to(tl.int64), ALIGN) + tile_start * q_s
        q_tile = load_tile(q_base, lane, q_s, rows_inside, D, BLOCK_D, True, PRECISION)  # [QUERIES, BLOCK_D]
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

        acc = tl.zeros([QUERIES, BLOCK_DV], tl.float32)
        highest = tl.full([QUERIES], -float("inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        # One loop over the blocks that all rows see all of, and one over those before and after them. In the first, every
        # tile starts at keys of its own and comes round to the first: programs of one head that read the same keys at the
        # same time wait for each other at the same part of the cache.
        gap = whole_past - whole
        shift = tl.where(gap > 0, tile * QUERIES // KEYS * KEYS % tl.maximum(gap, 1), 0)
        acc, highest, total = _visit(
            acc, highest, total, q_tile, k_base, v_base, mask_base, bias_base, whole + shift, whole_past + shift,
            whole_past, -gap, first, past, row, rows_inside, offset, keys, left, right, k_s, v_s, m_q, m_k, b_q, b_k,
            scale, softcap, HAS_LEFT,
            HAS_RIGHT, HAS_CAP, False, D, DV, BLOCK_D, BLOCK_DV, KEYS, PRECISION, UNIT,
        )  # fmt: skip
        acc, highest, total = _visit(
            acc, highest, total, q_tile, k_base, v_base, mask_base, bias_base, start, past - gap, whole, gap, first, past,
            row, rows_inside, offset, keys, left, right, k_s, v_s, m_q, m_k, b_q, b_k, scale, softcap, HAS_LEFT,
            HAS_RIGHT, HAS_CAP, True, D, DV, BLOCK_D, BLOCK_DV, KEYS, PRECISION, UNIT,
        )  # fmt: skip

        empty = total == 0.0
        if sink is not None:
            at_sink = tl.load(sink + head).to(tl.float32) * UNIT
            higher = tl.maximum(highest, at_sink)
            shrink = tl.where(empty, 0.0, power(highest - higher, UNIT))
            total = total * shrink + power(at_sink - higher, UNIT)
            acc = acc * shrink[:, None]
            highest = higher
        row_lse = tl.where(empty, -float("inf"), highest * (1.0 / UNIT) + tl.log2(total) * LN2)
        result = acc * (1.0 / tl.where(empty, 1.0, total))[:, None]
        if HAS_LEFT or HAS_RIGHT or mask is not None or bias is not None:
            # Zero times a NaN that other rows of the tile see.
            result = tl.where(empty[:, None], 0.0, result)
        if cu_q is not None or lengths is not None:
            row_lse = tl.where(bad, float("nan"), row_lse)
            result = tl.where(bad, float("nan"), result)
        out_base = out + tl.multiple_of(batch * o_b + head * o_h.to(tl.int64), ALIGN) + tile_start * o_s
        store_rows(out_base, lane, o_s, rows_inside, result, DV, BLOCK_DV)
        if lse is not None:
            tl.store(lse + (batch * heads + head) * q_length + tile_start + lane, row_lse, mask=rows_inside)


# What a model calls once it calls again and again: working a launch out costs as much as the launch.
@functools.lru_cache(maxsize=4096)
def _plan(
    q_shape: tuple[int, ...], k_shape: tuple[int, ...], value_dim: int, q_strides: Strides, k_strides: Strides,
    v_strides: Strides, out_strides: Strides, mask_strides: Strides, bias_strides: Strides, sequences: int | None,
    max_q: int, max_k: int, flags: Flags, tile: Tile, element: int, precision: str, unit: float,
) -> Plan:  # fmt: skip
    """For q ``(B, Hq, Sq, D)`` and k ``(B, Hk, Sk, D)``; a packed batch of ``sequences`` is one entry of all tokens."""
    batch, heads, q_length, head_dim = q_shape
    if precision == "parts":
        q_strides, k_strides = split_strides(q_shape, q_strides, head_dim), split_strides(k_shape, k_strides, head_dim)
        v_strides, element = split_strides(k_shape, v_strides, value_dim), 2
    check_row_strides(max(tile.queries, tile.keys), q_strides, k_strides, v_strides, out_strides)
    tiles = -(-q_length // tile.queries) if sequences is None else packed_tiles(q_length, sequences, tile.queries)
    return Plan(
        _forward,
        (tiles * heads * batch, 1, 1),
        (
            q_length, k_shape[2], heads, heads // k_shape[1], tiles, sequences or 0, max_q, max_k,
            *band_of(flags, q_length, k_shape[2]), *q_strides[:3], *k_strides[:3], *v_strides[:3], *out_strides[:3],
            *mask_strides, *bias_strides, flags.scale, flags.softcap,
        ),
        (
            flags.left >= 0, flags.right >= 0, flags.softcap > 0, head_dim, value_dim, block_of(head_dim),
            block_of(value_dim), tile.queries, tile.keys,
            common_alignment(element, q_strides, k_strides, v_strides, out_strides), search_block(sequences or 0),
            precision, unit,
        ),
        tile.warps,
        tile.stages,
        tile.registers,
    )  # fmt: skip


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, kv_lengths: Tensor | None,
    sink: Tensor | None, flags: Flags,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _prepare(True, q, k, v, mask, bias, kv_lengths, sink, flags)(q, k, v, mask, bias, kv_lengths, sink)


def prepare_attention_forward(q: Tensor, *others: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    if q.dtype == torch.float32:  # how it is multiplied is a switch of PyTorch's, to be asked for at every call
        flags = others[-1]
        return lambda *tensors: attention_forward(*(*tensors, flags))
    return _prepare(True, q, *others)


attention_forward.prepare = prepare_attention_forward  # type: ignore[attr-defined]


def attention_output(*arguments: Any) -> Tensor:
    """`attention_forward` for those who will not ask for lse; the plain kernel does not write it then."""
    return prepare_attention_output(*arguments)(*arguments[:-1])


def prepare_attention_output(q: Tensor, *others: Any) -> Callable[..., Tensor]:
    both = prepare_attention_forward(q, *others) if q.dtype == torch.float32 else _prepare(False, q, *others)
    return lambda *tensors: both(*tensors)[0]


attention_output.prepare = prepare_attention_output  # type: ignore[attr-defined]


def _prepare(
    wants_lse: bool, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None,
    kv_lengths: Tensor | None, sink: Tensor | None, flags: Flags,
) -> Callable[..., tuple[Tensor, Any]]:  # fmt: skip
    """What is left to do for calls that differ from this one in data and addresses alone, given their tensors.

    Without lse a small call costs the host a seventh less. The Hopper kernel, for larger ones, writes it anyway.
    """
    rows = tuple(q.shape[:3])
    out_shape, out_strides = (*rows, v.shape[3]), layout.strides_like_heads(q, v.shape[3])
    make_lse = layout.maker_of_empty(q, rows, torch.float32)
    if 0 in rows:
        return lambda q, *others: (q.new_empty_strided(out_shape, out_strides), make_lse())
    launch, writes_lse = _prepare_launch(
        wants_lse, q, k, v, out_strides, as_bytes(mask), bias, kv_lengths, sink, None, None, 0, 0, flags
    )

    def run(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, kv_lengths: Tensor | None,
        sink: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        out = q.new_empty_strided(out_shape, out_strides)
        lse = make_lse() if writes_lse else None
        launch(q, k, v, out, lse, as_bytes(mask), bias, in_order(kv_lengths), in_order(sink), None, None)
        return out, lse

    return run


def attention_varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, sink: Tensor | None,
    flags: Flags,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    tokens, heads, _ = q.shape
    out = q.new_empty((tokens, heads, v.shape[2]))
    lse = q.new_empty((heads, tokens), dtype=torch.float32)
    if lse.numel():
        # One sequence of all tokens, heads outside, that the kernel cuts up.
        q, k, v, all_out = (x.transpose(0, 1)[None] for x in (q, k, v, out))
        cu_q, cu_k, sink = cu_q.contiguous(), cu_k.contiguous(), in_order(sink)
        launch, _ = _prepare_launch(
            True, q, k, v, all_out.stride(), None, None, None, sink, cu_q, cu_k, max_q, max_k, flags
        )
        launch(q, k, v, all_out, lse, None, None, None, sink, cu_q, cu_k)
    return out, lse


def _prepare_launch(
    wants_lse: bool, q: Tensor, k: Tensor, v: Tensor, out_strides: Strides, mask: Tensor | None, bias: Tensor | None,
    kv_lengths: Tensor | None, sink: Tensor | None, cu_q: Tensor | None, cu_k: Tensor | None, max_q: int, max_k: int,
    flags: Flags,
) -> tuple[Callable[..., None], bool]:  # fmt: skip
    """What launches, given ``q, k, v, out, lse, mask, bias, kv_lengths, sink, cu_q, cu_k``; and does it write lse?"""
    hopper_launch = (
        _hopper_forward()(q, k, v, out_strides, kv_lengths, sink, cu_q, cu_k, max_q, max_k, flags)
        if mask is None and bias is None and _for_hopper(q)
        else None
    )
    if hopper_launch is None:
        others = (mask, bias, kv_lengths, sink, cu_q, cu_k, max_q, max_k, flags)
        return _prepare_plain(wants_lse, q, k, v, out_strides, *others), wants_lse
    plain: Callable[..., None] | None = None

    def launch(*tensors: Any) -> None:
        nonlocal plain
        if hopper_launch(*tensors):
            return
        if plain is None:  # not before it is needed: it has limits that Hopper's kernel has not
            q, k, v, _, _, mask, bias, kv_lengths, sink, cu_q, cu_k = tensors
            others = (mask, bias, kv_lengths, sink, cu_q, cu_k, max_q, max_k, flags)
            plain = _prepare_plain(True, q, k, v, out_strides, *others)
        plain(*tensors)

    return launch, True


def _for_hopper(q: Tensor) -> bool:
    """Could the kernels of hopper/ run here? A tile that `headwise tune` asks for is one of the plain kernel."""
    return q.is_cuda and hopper.missing(q.get_device()) is None and not tile_sizes.is_forced("attention_forward")


@functools.cache
def _hopper_forward() -> Callable[..., Callable[..., bool] | None]:
    from headwise.backends.triton.hopper.attention_forward import prepare_forward  # only where there is such a GPU

    return prepare_forward


def _prepare_plain(
    wants_lse: bool, q: Tensor, k: Tensor, v: Tensor, out_strides: Strides, mask: Tensor | None, bias: Tensor | None,
    kv_lengths: Tensor | None, sink: Tensor | None, cu_q: Tensor | None, cu_k: Tensor | None, max_q: int, max_k: int,
    flags: Flags,
) -> Callable[..., None]:  # fmt: skip
    element, value_dim = q.element_size(), v.shape[3]
    banded = flags.left >= 0 or flags.right >= 0
    tile = tile_sizes.tile("attention_forward", 8 * element, max(q.shape[3], value_dim), banded, q.device)
    precision = tile_precision(dot_precision(q.dtype), q.dtype, tile)
    plan = _plan(
        q.shape, k.shape, value_dim, q.stride(), k.stride(), v.stride(), out_strides, score_strides(mask),
        score_strides(bias), None if cu_q is None else cu_q.shape[0] - 1, max_q, max_k, flags, tile, element,
        precision, logit_unit(q.dtype),
    )  # fmt: skip
    others = (mask, bias, kv_lengths, sink, cu_q, cu_k)
    dtypes = (q.dtype, torch.float32 if wants_lse else None, *(x if x is None else x.dtype for x in others))
    if precision != "parts":
        return plan.bound(q.get_device(), q.dtype, k.dtype, v.dtype, *dtypes)
    of_parts = plan.bound(q.get_device(), *(torch.bfloat16,) * 3, *dtypes)
    return lambda q, k, v, *rest: of_parts(split(q), split(k), split(v), *rest)


def packed_tiles(tokens: int, sequences: int, tile: int) -> int:
    """As many tiles as a packed batch can have at most: each sequence, and what is past the last, may end in a short one."""
    return -(-tokens // tile) + sequences + 1


def search_block(sequences: int) -> int:
    """How many cu_seqlens a program looks at in one go: few variants, so that few kernels are compiled."""
    return 128 if sequences <= 128 else 1024
