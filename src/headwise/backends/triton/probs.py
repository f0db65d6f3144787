"""Attention probabilities in Triton, forward and backward.

A program owns a tile of rows and walks over the keys twice: once for the maximum and the sum (and, backward, for
``p · grad``), once more to write. The backward writes the gradients of the scores, which are as large as the result was,
and plain matmuls make dq and dk of them.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwise.backends.triton.blocks import aligned_elements, as_bytes, block_of, in_order, load_scores, score_strides
from headwise.backends.triton.launch import launch
from headwise.backends.triton.products import piece_of, row_products
from headwise.backends.triton.rows import power_of_two
from headwise.backends.triton.scores import (
    cap_slope,
    dot_precision,
    first_key,
    in_band,
    logit_unit,
    past_last_key,
    power,
    tile_logits,
)
from headwise.backends.triton.tile_sizes import Tile, architecture

if TYPE_CHECKING:
    from headwise.ops.attention._arguments import Flags


@triton.jit
def _named_rows(rows, tile, count, q_length, QUERIES: tl.constexpr):
    """``(line, row, inside, bad)``: lines of the result, the rows of q they show, and whether those exist."""
    line = tile * QUERIES + tl.arange(0, QUERIES)
    inside = line < count
    if rows is None:
        return line, line, inside, inside & False
    else:
        named = tl.load(rows + line, mask=inside, other=0).to(tl.int64)
        bad = (named < -q_length) | (named >= q_length)
        return line, tl.where(bad, 0, tl.where(named < 0, named + q_length, named)).to(tl.int32), inside, bad


@triton.jit
def _range_of(position, inside, keys, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, KEYS: tl.constexpr):
    """``[start, stop)`` in whole blocks: the keys that some row may see."""
    first = tl.min(tl.where(inside, first_key(position, left, HAS_LEFT), keys), 0)
    past = tl.max(tl.where(inside, past_last_key(position, keys, right, HAS_RIGHT), 0), 0)
    start = tl.minimum(first, keys) // KEYS * KEYS
    return start, tl.maximum(start, (past + KEYS - 1) // KEYS * KEYS)


@triton.jit
def _logits(
    q_at, k, mask, bias, start, position, row, inside, keys, left, right, k_s, m_q, m_k, b_q, b_k, scale, softcap,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_CAP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    PIECE: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """``(logits, capped, seen)`` of a tile, ``[QUERIES, KEYS]``: with all that adds to them, before the bias, and where."""
    lane = tl.arange(0, KEYS)
    key = start + lane
    k_base = k + (tl.full((), 0, tl.int64) + start) * k_s
    products = row_products(q_at, inside, k_base, lane, k_s, key < keys, D, BLOCK_D, PIECE, PRECISION)
    capped = tile_logits(products, scale, softcap, HAS_CAP, UNIT)
    seen = in_band(position[:, None], key[None, :], keys, left, right, HAS_LEFT, HAS_RIGHT) & inside[:, None]
    if mask is not None:
        seen = seen & (load_scores(mask, row[:, None], key[None, :], m_q, m_k, seen) != 0)
    logits = capped
    if bias is not None:
        logits += load_scores(bias, row[:, None], key[None, :], b_q, b_k, seen).to(tl.float32) * UNIT
    return tl.where(seen, logits, -float("inf")), capped, seen


@triton.jit
def _fill(to, inside, values, start, stop, k_length, KEYS: tl.constexpr):
    """One value per row, for the keys in [start, stop) of rows that begin at ``to``."""
    for n in range(start, stop, KEYS):
        key = n + tl.arange(0, KEYS)
        there = inside[:, None] & (key < k_length)[None, :]
        tl.store(to[:, None] + key[None, :], tl.broadcast_to(values[:, None], there.shape), mask=there)


@triton.jit
def _normaliser(highest, total, sink, head, UNIT: tl.constexpr):
    """``(reference, scaling)``: a probability is ``power(logit - reference) · scaling``; 0 in a row that sees nothing."""
    empty = total == 0.0
    reference = tl.where(empty, 0.0, highest)
    if sink is not None:
        at_sink = tl.load(sink + head).to(tl.float32) * UNIT
        higher = tl.maximum(reference, at_sink)
        total = total * power(reference - higher, UNIT) + power(at_sink - higher, UNIT)
        reference = higher
    return reference, tl.where(empty, 0.0, 1.0 / total)


@triton.jit(
    do_not_specialize=[
        "count", "q_length", "k_length", "heads", "group", "tiles", "left", "right", "q_b", "q_h", "k_b", "k_h", "m_b",
        "m_h", "m_q", "b_b", "b_h", "b_q", "g_b", "g_h", "g_q",
    ]
)  # fmt: skip
def _probs(
    q, k, rows, mask, bias, lengths, sink, grad, to, raw, used, sees, sink_parts,
    count, q_length, k_length, heads, group, tiles, left, right, q_b, q_h, q_s, k_b, k_h, k_s, m_b, m_h, m_q, m_k,
    b_b, b_h, b_q, b_k, g_b, g_h, g_q, g_k, scale, softcap,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_CAP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    PIECE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, ALIGN: tl.constexpr, KEY_ALIGN: tl.constexpr,
    PRECISION: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Forward (grad is None): ``to`` gets the probabilities.

    Backward: ``to`` gets the gradients of q·k, ``raw``, if there, those of the logits, ``used`` a 1 for each key that
    somebody sees and ``sees`` one for each row that sees some, and ``sink_parts`` what each row adds to the sink's.
    """
    program = tl.program_id(0)
    tile = program % tiles
    head = (program // tiles) % heads
    batch = (program // tiles // heads).to(tl.int64)
    key_head = head // group
    line, row, inside, bad = _named_rows(rows, tile, count, q_length, QUERIES)
    keys = tl.full((), 0, tl.int32) + k_length
    if lengths is not None:
        length = tl.load(lengths + batch).to(tl.int64)
        wrong = (length < 0) | (length > k_length)
        bad = bad | (inside & wrong)
        keys = tl.where(wrong, 0, length).to(tl.int32)
    position = row + (keys - q_length)
    start, stop = _range_of(position, inside, keys, left, right, HAS_LEFT, HAS_RIGHT, KEYS)

    q_at = q + tl.multiple_of(batch * q_b + head * q_h.to(tl.int64), ALIGN) + row.to(tl.int64) * q_s
    k_base = k + tl.multiple_of(batch * k_b + key_head * k_h.to(tl.int64), ALIGN)
    mask_base, bias_base, g_at = mask, bias, grad
    if mask is not None:
        mask_base = mask + batch * m_b + head * m_h.to(tl.int64)
    if bias is not None:
        bias_base = bias + batch * b_b + head * b_h.to(tl.int64)
    if grad is not None:
        g_rows = batch * g_b + head * g_h.to(tl.int64) + line.to(tl.int64) * g_q
        g_at = grad + tl.multiple_of(g_rows, KEY_ALIGN)[:, None]

    highest = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    moved = tl.zeros([QUERIES], tl.float32)  # the sum of weight times gradient
    for n in range(start, stop, KEYS):
        logits, _, seen = _logits(
            q_at, k_base, mask_base, bias_base, n, position, row, inside, keys, left, right, k_s, m_q, m_k, b_q, b_k,
            scale, softcap, HAS_LEFT, HAS_RIGHT, HAS_CAP, D, BLOCK_D, PIECE, KEYS, PRECISION, UNIT,
        )  # fmt: skip
        higher = tl.maximum(highest, tl.max(logits, 1))
        reference = tl.where(higher == -float("inf"), 0.0, higher)
        weights = power(logits - reference[:, None], UNIT)
        shrink = power(highest - reference, UNIT)
        total = total * shrink + tl.sum(weights, 1)
        if grad is not None:
            key = n + tl.arange(0, KEYS)
            g = tl.load(g_at + key.to(tl.int64)[None, :] * g_k, mask=seen, other=0.0).to(tl.float32)
            moved = moved * shrink + tl.sum(weights * g, 1)
        highest = higher
    reference, scaling = _normaliser(highest, total, sink, head, UNIT)
    # What a row holds where it sees nothing: zeros, unless it is one that does not exist.
    nothing = tl.where(bad, float("nan"), 0.0)
    result = (batch * heads + head) * count
    at = tl.multiple_of((result + line) * k_length, KEY_ALIGN)
    nothing_to = nothing.to(to.dtype.element_ty)
    _fill(to + at, inside, nothing_to, 0, start, k_length, KEYS)
    _fill(to + at, inside, nothing_to, stop, k_length, k_length, KEYS)
    delta = moved
    if grad is not None:
        # The gradients were weighted with the reference of the first pass.
        delta = tl.where(total == 0.0, 0.0, moved * power(highest - reference, UNIT) * scaling)
        tl.store(sees + result + line, (total > 0.0).to(tl.uint8), mask=inside)
        if sink_parts is not None:
            share = power(tl.load(sink + head).to(tl.float32) * UNIT - reference, UNIT) * scaling
            tl.store(sink_parts + result + line, tl.where(bad, float("nan"), -share * delta), mask=inside)
        if raw is not None:
            nothing_raw = nothing.to(raw.dtype.element_ty)
            _fill(raw + at, inside, nothing_raw, 0, start, k_length, KEYS)
            _fill(raw + at, inside, nothing_raw, stop, k_length, k_length, KEYS)

    for n in range(start, stop, KEYS):
        logits, capped, seen = _logits(
            q_at, k_base, mask_base, bias_base, n, position, row, inside, keys, left, right, k_s, m_q, m_k, b_q, b_k,
            scale, softcap, HAS_LEFT, HAS_RIGHT, HAS_CAP, D, BLOCK_D, PIECE, KEYS, PRECISION, UNIT,
        )  # fmt: skip
        key = n + tl.arange(0, KEYS)
        there = inside[:, None] & (key < k_length)[None, :]
        tile_at = at[:, None] + key[None, :]
        values = power(logits - reference[:, None], UNIT) * scaling[:, None]
        if grad is not None:
            g = tl.load(g_at + key.to(tl.int64)[None, :] * g_k, mask=seen, other=0.0).to(tl.float32)
            values = tl.where(seen, values * (g - delta[:, None]), 0.0)
            if raw is not None:
                raw_values = tl.where(bad[:, None], float("nan"), values).to(raw.dtype.element_ty)
                tl.store(raw + tile_at, raw_values, mask=there)
            if HAS_CAP:
                values = tl.where(seen, values * cap_slope(capped, softcap, UNIT), 0.0)
            values *= scale
            some = tl.max(seen.to(tl.int32), 0) > 0
            flag = used + (batch * (heads // group) + key_head) * k_length + key
            tl.store(flag, some.to(tl.uint8), mask=some)
        tl.store(to + tile_at, tl.where(bad[:, None], float("nan"), values).to(to.dtype.element_ty), mask=there)


def attention_probs(
    q: Tensor, k: Tensor, rows: Tensor | None, mask: Tensor | None, bias: Tensor | None, kv_lengths: Tensor | None,
    sink: Tensor | None, flags: Flags,
) -> Tensor:  # fmt: skip
    probs = _empty_scores(q, k, rows, q.dtype)
    if q.shape[2] == 0:
        return probs.fill_(torch.nan)  # no row exists, so none of those named
    if probs.numel() > 0:
        _launch(q, k, rows, mask, bias, kv_lengths, sink, None, probs, None, None, None, None, flags)
    return probs


def attention_probs_backward(
    grad: Tensor, probs: Tensor, q: Tensor, k: Tensor, rows: Tensor | None, mask: Tensor | None, bias: Tensor | None,
    kv_lengths: Tensor | None, sink: Tensor | None, flags: Flags, need_bias_grad: bool, need_sink_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    batch, heads, q_length, head_dim = q.shape
    key_heads, k_length = k.shape[1], k.shape[2]
    dproducts = _empty_scores(q, k, rows, q.dtype)
    count = dproducts.shape[2]
    dlogits = None
    if need_bias_grad and bias is not None:
        as_it_is = rows is None and bias.shape == dproducts.shape
        dlogits = _empty_scores(q, k, rows, bias.dtype if as_it_is else torch.float32)
    used = torch.zeros((batch, key_heads, k_length), dtype=torch.uint8, device=q.device)
    sees = torch.zeros((batch, heads, count), dtype=torch.uint8, device=q.device)
    sink_parts = None
    if need_sink_grad and sink is not None:
        sink_parts = torch.zeros((batch, heads, count), dtype=torch.float32, device=q.device)
    if q_length == 0:
        for made_of_rows in (dproducts, dlogits, sink_parts):
            if made_of_rows is not None:
                made_of_rows.fill_(torch.nan)  # no row exists, so none of those named
    elif dproducts.numel() > 0:
        _launch(
            q, k, rows, mask, bias, kv_lengths, sink, grad, dproducts, dlogits, used, sees, sink_parts, flags
        )  # fmt: skip

    dbias = dsink = q.new_empty(0)
    if dlogits is not None and bias is not None:
        if rows is not None and bias.shape[2] > 1:
            dlogits = _into_rows(dlogits, _existing(rows, q_length), q_length)
        dbias = dlogits.sum_to_size(bias.shape).to(bias.dtype)
    if sink_parts is not None and sink is not None:
        dsink = sink_parts.sum((0, 2)).to(sink.dtype)

    # Keys that no query sees and rows that see nothing may hold NaN: they are taken out before they meet a zero.
    q_rows = q
    if q_length == 0:
        q_rows = q.new_zeros((batch, heads, count, head_dim))
    elif rows is not None:
        q_rows = q.index_select(2, _existing(rows, q_length))
    rows_of_key_head = heads // key_heads * count
    q_rows = torch.where(sees.bool()[..., None], q_rows, 0).reshape(batch, key_heads, rows_of_key_head, head_dim)
    k_used = torch.where(used.bool()[..., None], k, 0)
    by_key_head = dproducts.view(batch, key_heads, rows_of_key_head, k_length)
    dk = by_key_head.transpose(-1, -2) @ q_rows
    dq = (by_key_head @ k_used).view(batch, heads, count, head_dim)
    if rows is not None:
        dq = _into_rows(dq.float(), _existing(rows, q_length), q_length).to(q.dtype)
    return dq.contiguous(), dk.contiguous(), dbias, dsink


def _launch(
    q: Tensor, k: Tensor, rows: Tensor | None, mask: Tensor | None, bias: Tensor | None, kv_lengths: Tensor | None,
    sink: Tensor | None, grad: Tensor | None, to: Tensor, raw: Tensor | None, used: Tensor | None, sees: Tensor | None,
    sink_parts: Tensor | None, flags: Flags,
) -> None:  # fmt: skip
    batch, heads, q_length, head_dim = q.shape
    tile = probs_tile(q.element_size(), head_dim, to.shape[2], architecture(q.device))
    tiles = -(-to.shape[2] // tile.queries)
    block_d = block_of(head_dim)
    widest = q_length + k.shape[2]  # of a window; beyond it, sums of positions and windows could overflow
    launch(
        _probs,
        (tiles * heads * batch, 1, 1),
        (
            q, k, in_order(rows), as_bytes(mask), bias, in_order(kv_lengths), in_order(sink), grad, to, raw, used, sees,
            sink_parts,
        ),
        (
            to.shape[2], q_length, k.shape[2], heads, heads // k.shape[1], tiles, min(flags.left, widest),
            min(flags.right, widest),
            *q.stride()[:3], *k.stride()[:3], *score_strides(mask), *score_strides(bias),
            *((0, 0, 0, 0) if grad is None else grad.stride()), flags.scale, flags.softcap,
        ),
        (
            flags.left >= 0, flags.right >= 0, flags.softcap > 0, head_dim, block_d, piece_of(block_d, q.element_size()),
            tile.queries, tile.keys, aligned_elements(q, k), aligned_elements(to, grad), dot_precision(q.dtype),
            logit_unit(q.dtype),
        ),
        tile.warps,
        tile.stages,
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def probs_tile(element_size: int, head_dim: int, count: int, arch: str) -> Tile:
    """Tiles that fit where an architecture has little shared memory; ``count`` rows need no larger ones."""
    row_bytes = block_of(head_dim) * element_size
    room = (64 if arch in ("sm_80", "sm_90", "sm_100") else 32) * 512
    keys = max(16, min(128 // element_size, room // row_bytes))
    queries = min(64 if row_bytes <= 512 else keys, max(16, power_of_two(count)))
    return Tile(queries, keys, 8 if min(queries, keys) >= 32 else 4, 2 if keys * row_bytes <= room else 1)


def _empty_scores(q: Tensor, k: Tensor, rows: Tensor | None, dtype: torch.dtype) -> Tensor:
    count = q.shape[2] if rows is None else rows.shape[0]
    return torch.empty((q.shape[0], q.shape[1], count, k.shape[2]), dtype=dtype, device=q.device)


def _existing(rows: Tensor, q_length: int) -> Tensor:
    """The rows as indices from 0 on; the first row for one that does not exist (whose values are NaN)."""
    rows = torch.where(rows < 0, rows + q_length, rows)
    return torch.where((rows < 0) | (rows >= q_length), 0, rows).long()


def _into_rows(values: Tensor, index: Tensor, q_length: int) -> Tensor:
    """``(B, H, Sq, ·)`` with ``values[:, :, i]`` added to row ``index[i]``, repeated ones in a fixed order."""
    batch, heads, _, last = values.shape
    whole = values.new_zeros((q_length, batch, heads, last))
    if q_length > 0:
        whole.index_put_((index,), values.permute(2, 0, 1, 3), accumulate=True)
    return whole.permute(1, 2, 0, 3)
