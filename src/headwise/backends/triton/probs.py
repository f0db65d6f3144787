"""Attention probabilities in Triton, forward and backward.

A program owns a tile of rows and walks over the keys twice: once for the softmax statistics (and, backward, for
``p · grad``), once more to write. The backward writes the gradients of the scores, which are as large as the result was,
and plain matmuls make dq and dk of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwise import layout
from headwise.backends.triton.blocks import aligned_elements, block_of, head_start, power_of_two, score_strides
from headwise.backends.triton.dropout import dropout_numbers, dropout_of, kept_of_rows
from headwise.backends.triton.parameters import DimStrides, Parameters, Sizes, as_bytes
from headwise.backends.triton.partial_sums import sum_partials
from headwise.backends.triton.products import dot_precision, piece_of, row_products
from headwise.backends.triton.scores import (
    band_of,
    batch_extent,
    cap_slope,
    first_key,
    key_exists,
    logit_unit,
    past_last_key,
    power,
    tile_logits,
)
from headwise.backends.triton.tile_sizes import AttentionTile

if TYPE_CHECKING:
    from headwise.backends.triton.gpu import Gpu
    from headwise.ops.attention._arguments import Probs, ProbsBackward


class ProbsVariant(NamedTuple):
    """Constants that the kernel is compiled for."""

    LEFT: bool  # is the window bounded on this side?
    RIGHT: bool
    CAP: bool
    STARTS: bool  # are there kv_starts?
    D: int
    BLOCK_D: int  # padded to a power of two
    PIECE: int  # of the head dim, multiplied at once
    QUERIES: int  # of a tile
    KEYS: int
    ALIGN: int  # elements that all outer strides of q and k are a multiple of
    KEY_ALIGN: int  # and of the results and their gradient
    PRECISION: str
    UNIT: float  # see scores.py


@triton.jit
def _named_rows(rows, tile, count, q_length, QUERIES: tl.constexpr):
    """``(line, row, inside, bad)``: lines of the result, the rows of q they show, and whether q has no such row."""
    line = tile * QUERIES + tl.arange(0, QUERIES)
    inside = line < count
    if rows is None:
        return line, line, inside, inside & False
    else:
        named = tl.load(rows + line, mask=inside, other=0).to(tl.int64)
        bad = (named < -q_length) | (named >= q_length)
        return line, tl.where(bad, 0, tl.where(named < 0, named + q_length, named)).to(tl.int32), inside, bad


@triton.jit
def _range_of(position, alive, band, V: tl.constexpr):
    """``[start, stop)`` in whole blocks: the keys that some row may see."""
    first = tl.min(tl.where(alive, first_key(position, band, V), band.keys), 0)
    past = tl.max(tl.where(alive, past_last_key(position, band, V), 0), 0)
    start = tl.minimum(first, band.keys) // V.KEYS * V.KEYS
    return start, tl.maximum(start, (past + V.KEYS - 1) // V.KEYS * V.KEYS)


@triton.jit
def _logits(q_at, k, mask, bias, batch, head, start, row, alive, extent, p, V: tl.constexpr):
    """``(logits, capped, seen)`` of a tile ``[QUERIES, KEYS]``; the logits are -inf where not seen."""
    lane = tl.arange(0, V.KEYS)
    key = start + lane
    k_base = k + (tl.full((), 0, tl.int64) + start) * p.row.k
    exists = key_exists(key, extent.band, V)
    products = row_products(q_at, alive, k_base, lane, p.row.k, exists, V)
    there = alive[:, None] & exists[None, :]
    logits, capped, seen = tile_logits(
        products, mask, bias, batch, head, row[:, None], key[None, :], there, extent, p, True, V
    )
    seen = seen & there
    return tl.where(seen, logits, -float("inf")), capped, seen


@triton.jit
def _dropped(values, dropout, row, start, KEYS: tl.constexpr):
    """A tile ``[QUERIES, KEYS]`` with zeros for what dropout drops, and the rest scaled. The rows may be any."""
    return tl.where(kept_of_rows(dropout, row, start, KEYS), values * dropout.scale, 0.0)


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


@triton.jit(do_not_specialize=[*Sizes._fields, "count"])
def _probs(
    q, k, rows, mask, bias, sink, q_lengths, kv_lengths, kv_starts, seed, grad, to, raw, used, sees, sink_partials,
    queries, keys, heads, group, tiles, sequences, longest_q, longest_k, left, right, count,
    batch_strides, head_strides, row_strides, key_strides, scale, softcap, dropping, V: tl.constexpr,
):  # fmt: skip
    """Forward (grad is None): ``to`` gets the probabilities.

    Backward: ``to`` gets the gradients of q·k, ``raw``, if there, those of the logits, ``used`` a 1 for each key that
    somebody sees and ``sees`` one for each row that sees some, and ``sink_partials`` what each row adds to the sink's.
    """
    n = Sizes(queries, keys, heads, group, tiles, sequences, longest_q, longest_k, left, right)
    p = Parameters(batch_strides, head_strides, row_strides, key_strides, scale, softcap)
    QUERIES: tl.constexpr = V.QUERIES
    KEYS: tl.constexpr = V.KEYS
    KEY_ALIGN: tl.constexpr = V.KEY_ALIGN
    program = tl.program_id(0)
    tile = program % n.tiles
    head = (program // n.tiles) % n.heads
    batch = (program // n.tiles // n.heads).to(tl.int64)
    key_head = head // n.group
    extent = batch_extent((q_lengths, kv_lengths, kv_starts), batch, 0, n)
    line, row, inside, bad = _named_rows(rows, tile, count, n.queries, QUERIES)
    bad = inside & (bad | extent.bad)
    alive = inside & (row < extent.rows)  # rows that exist
    position = row + extent.offset
    start, stop = _range_of(position, alive, extent.band, V)

    q_at = head_start(q, p.batch.q, p.head.q, batch, head, V.ALIGN) + row.to(tl.int64) * p.row.q
    k_base = head_start(k, p.batch.k, p.head.k, batch, key_head, V.ALIGN)
    g_at = grad
    if grad is not None:
        g_rows = batch * p.batch.grad + head.to(tl.int64) * p.head.grad + line.to(tl.int64) * p.row.grad
        g_at = grad + tl.multiple_of(g_rows, KEY_ALIGN)[:, None]

    dropout = dropping
    if seed is not None:
        dropout = dropout_of(dropping, seed, batch, head)
    highest = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    moved = tl.zeros([QUERIES], tl.float32)  # the sum of weight times gradient
    for at_key in range(start, stop, KEYS):
        logits, _, seen = _logits(q_at, k_base, mask, bias, batch, head, at_key, row, alive, extent, p, V)
        higher = tl.maximum(highest, tl.max(logits, 1))
        reference = tl.where(higher == -float("inf"), 0.0, higher)
        weights = power(logits - reference[:, None], V.UNIT)
        shrink = power(highest - reference, V.UNIT)
        total = total * shrink + tl.sum(weights, 1)
        if grad is not None:
            key = at_key + tl.arange(0, KEYS)
            g = tl.load(g_at + key.to(tl.int64)[None, :] * p.key.grad, mask=seen, other=0.0).to(tl.float32)
            if dropout is not None:
                g = _dropped(g, dropout, row, at_key, KEYS)
            moved = moved * shrink + tl.sum(weights * g, 1)
        highest = higher
    reference, scaling = _normaliser(highest, total, sink, head, V.UNIT)
    # What a row holds where it sees nothing: zeros, unless it is one that was named and is not there.
    nothing = tl.where(bad, float("nan"), 0.0)
    result = (batch * n.heads + head) * count
    at = tl.multiple_of((result + line) * n.keys, KEY_ALIGN)
    nothing_to = nothing.to(to.dtype.element_ty)
    _fill(to + at, inside, nothing_to, 0, start, n.keys, KEYS)
    _fill(to + at, inside, nothing_to, stop, n.keys, n.keys, KEYS)
    delta = moved
    if grad is not None:
        # The gradients were weighted with the reference of the first pass.
        delta = tl.where(total == 0.0, 0.0, moved * power(highest - reference, V.UNIT) * scaling)
        tl.store(sees + result + line, (total > 0.0).to(tl.uint8), mask=inside)
        if sink_partials is not None:
            at_sink = power(tl.load(sink + head).to(tl.float32) * V.UNIT - reference, V.UNIT) * scaling
            tl.store(sink_partials + result + line, tl.where(bad, float("nan"), -at_sink * delta), mask=inside)
        if raw is not None:
            nothing_raw = nothing.to(raw.dtype.element_ty)
            _fill(raw + at, inside, nothing_raw, 0, start, n.keys, KEYS)
            _fill(raw + at, inside, nothing_raw, stop, n.keys, n.keys, KEYS)

    for at_key in range(start, stop, KEYS):
        logits, capped, seen = _logits(q_at, k_base, mask, bias, batch, head, at_key, row, alive, extent, p, V)
        key = at_key + tl.arange(0, KEYS)
        there = inside[:, None] & (key < n.keys)[None, :]
        tile_at = at[:, None] + key[None, :]
        values = power(logits - reference[:, None], V.UNIT) * scaling[:, None]
        if grad is not None:
            g = tl.load(g_at + key.to(tl.int64)[None, :] * p.key.grad, mask=seen, other=0.0).to(tl.float32)
            if dropout is not None:
                g = _dropped(g, dropout, row, at_key, KEYS)
            values = tl.where(seen, values * (g - delta[:, None]), 0.0)
            if raw is not None:
                raw_values = tl.where(bad[:, None], float("nan"), values).to(raw.dtype.element_ty)
                tl.store(raw + tile_at, raw_values, mask=there)
            if V.CAP:
                values = tl.where(seen, values * cap_slope(capped, p.softcap, V.UNIT), 0.0)
            values *= p.scale
            some = tl.max(seen.to(tl.int32), 0) > 0
            flag = used + (batch * (n.heads // n.group) + key_head) * n.keys + key
            tl.store(flag, some.to(tl.uint8), mask=some)
        elif dropout is not None:
            values = _dropped(values, dropout, row, at_key, KEYS)
        tl.store(to + tile_at, tl.where(bad[:, None], float("nan"), values).to(to.dtype.element_ty), mask=there)


def attention_probs(gpu: Gpu, args: Probs) -> Tensor:
    shape = _scores_shape(args)
    if args.q.shape[2] == 0:
        return gpu.filled(shape, float("nan"), args.q.dtype)  # no row exists, so none of those named
    probs = gpu.empty(shape, args.q.dtype)
    if probs.numel() > 0:
        _launch(gpu, args, None, probs, None, None, None, None)
    return probs


def attention_probs_backward(gpu: Gpu, args: ProbsBackward) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    forward = args.forward
    q, k, rows = forward.q, forward.k, forward.rows
    shape = batch, heads, count, k_length = _scores_shape(forward)
    key_heads, no_rows = k.shape[1], q.shape[2] == 0  # no row exists, so none of those named

    def scores(dtype: torch.dtype) -> Tensor:
        return gpu.filled(shape, float("nan"), dtype) if no_rows else gpu.empty(shape, dtype)

    bias, sink = layout.four_dims(forward.bias), forward.sink
    dproducts, dlogits, sink_partials = scores(q.dtype), None, None
    if args.need_bias and bias is not None:
        as_it_is = rows is None and tuple(bias.shape) == shape
        dlogits = scores(bias.dtype if as_it_is else torch.float32)
    used = gpu.zeros((batch, key_heads, k_length), torch.uint8)
    sees = gpu.zeros((batch, heads, count), torch.uint8)
    if args.need_sink and sink is not None:
        sink_partials = gpu.filled((batch, heads, count), float("nan") if no_rows else 0.0, torch.float32)
    if not no_rows and dproducts.numel() > 0:
        _launch(gpu, forward, args.grad, dproducts, dlogits, used, sees, sink_partials)

    dbias = dsink = None
    if dlogits is not None:
        dbias = _bias_gradient(gpu, dlogits, forward)
    if sink_partials is not None and sink is not None:
        dsink = sum_partials(gpu, sink_partials, sink.shape, sink.dtype)
    given = (dproducts, used, sees, q, k) if rows is None else (dproducts, used, sees, q, k, rows)
    dq, dk = gpu.call(_products, *given)
    return dq, dk, dbias, dsink


def _bias_gradient(gpu: Gpu, dlogits: Tensor, forward: Probs) -> Tensor:
    assert forward.bias is not None
    shape, dtype, q_length = forward.bias.shape, forward.bias.dtype, forward.q.shape[2]
    if forward.rows is None and dlogits.shape == shape:
        return dlogits
    of_rows = forward.rows is not None and len(shape) > 1 and shape[-2] > 1

    def reduced(dlogits: Tensor, *rows: Tensor) -> Tensor:
        if of_rows:
            dlogits = _into_rows(dlogits, _existing(rows[0], q_length), q_length)
        return dlogits.sum_to_size(shape).to(dtype, copy=True)

    return gpu.call(reduced, dlogits, *((forward.rows,) if of_rows and forward.rows is not None else ()))


def _products(
    dproducts: Tensor, used: Tensor, sees: Tensor, q: Tensor, k: Tensor, rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """dq and dk from the gradients of q·k."""
    (batch, heads, q_length, head_dim), (_, key_heads, k_length, _) = q.shape, k.shape
    count = dproducts.shape[2]
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
    return dq.contiguous(), dk.contiguous()


def _launch(
    gpu: Gpu, args: Probs, grad: Tensor | None, to: Tensor, raw: Tensor | None, used: Tensor | None,
    sees: Tensor | None, sink_partials: Tensor | None,
) -> None:  # fmt: skip
    q, k, flags = args.q, args.k, args.flags
    (batch, heads, q_length, head_dim), (_, key_heads, k_length, _), count = q.shape, k.shape, to.shape[2]
    tile = probs_tile(q.element_size(), head_dim, count, gpu.arch)
    tiles = -(-count // tile.queries)
    mask, bias = as_bytes(layout.four_dims(args.mask)), layout.four_dims(args.bias)
    vectors = [
        None if x is None else gpu.contiguous(x)
        for x in (args.rows, args.sink, args.q_lengths, args.kv_lengths, args.kv_starts)
    ]
    strides = {"q": (*q.stride()[:3], None), "k": (*k.stride()[:3], None)}
    strides |= {name: score_strides(x) for name, x in (("mask", mask), ("bias", bias)) if x is not None}
    if grad is not None:
        strides["grad"] = grad.stride()
    block_d = block_of(head_dim)
    gpu.launch(
        _probs,
        (tiles * heads * batch,),
        (q, k, vectors[0], mask, bias, *vectors[1:], args.dropout_seed, grad, to, raw, used, sees, sink_partials),
        (
            *Sizes(q_length, k_length, heads, heads // key_heads, tiles, 0, 0, 0, *band_of(flags, q_length, k_length)),
            count,
            *(DimStrides(**{name: of_tensor[dim] for name, of_tensor in strides.items()}) for dim in range(4)),
            flags.scale,
            flags.softcap,
            dropout_numbers(flags, args.dropout_seed),
        ),
        (
            ProbsVariant(
                flags.left >= 0, flags.right >= 0, flags.softcap > 0, args.kv_starts is not None, head_dim, block_d,
                piece_of(block_d, q.element_size()), tile.queries, tile.keys, aligned_elements(q, k),
                aligned_elements(to, grad), dot_precision(gpu, q.dtype), logit_unit(q.dtype),
            ),
        ),
        warps=tile.warps,
        stages=tile.stages,
    )  # fmt: skip


def probs_tile(element_size: int, head_dim: int, count: int, arch: str) -> AttentionTile:
    """Tiles that fit where an architecture has little shared memory; ``count`` rows need no larger ones."""
    row_bytes = block_of(head_dim) * element_size
    room = (64 if arch in ("sm_80", "sm_90", "sm_100") else 32) * 512
    keys = max(16, min(128 // element_size, room // row_bytes))
    queries = min(64 if row_bytes <= 512 else keys, max(16, power_of_two(count)))
    return AttentionTile(queries, keys, 8 if min(queries, keys) >= 32 else 4, 2 if keys * row_bytes <= room else 1)


def _scores_shape(args: Probs) -> tuple[int, int, int, int]:
    batch, heads, length, _ = args.q.shape
    return batch, heads, length if args.rows is None else args.rows.shape[0], args.k.shape[2]


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
