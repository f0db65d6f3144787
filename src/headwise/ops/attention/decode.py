"""Attention of one or a few new tokens over a cache of keys and values, contiguous or paged.

The keys are split so that one long sequence fills the machine; the parts are merged by their log-sum-exp in a fixed order
("Flash-Decoding", Dao et al., 2023). Pages as in Kwon et al., "Efficient Memory Management for Large Language Model
Serving with PagedAttention", 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from headwise import layout
from headwise.ops import _autocast, _checks, _device_values, embedding
from headwise.ops._op import Described, Op, Saved
from headwise.ops.attention import _arguments, dense
from headwise.ops.attention._arguments import Attention, AttentionBackward, Decode, Window


class Options(_arguments.CommonOptions, total=False):
    """For the overloads of `attention_decode`."""

    block_table: Tensor | None
    kv_starts: Tensor | None
    num_splits: int | None


@overload
def attention_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, *, return_lse: Literal[False] = False,
    **options: Unpack[Options],
) -> Tensor: ...  # fmt: skip
@overload
def attention_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, *, return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, *, return_lse: bool, **options: Unpack[Options]
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, *, block_table: Tensor | None = None,
    kv_starts: Tensor | None = None, window: Window = None, scale: float | None = None, softcap: float | None = None,
    sink: Tensor | None = None, num_splits: int | None = None, return_lse: bool = False, backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of q ``(B, Hq, D)`` or ``(B, Hq, Sq, D)`` over the first ``lengths[b]`` positions of a cache.

    k_cache, v_cache  ``(B, Hk, C, D)`` and ``(B, Hk, C, Dv)`` with capacity C, any strides; with ``block_table``
                      ``(pages, Hk, page_size, D)`` and ``(pages, Hk, page_size, Dv)``
    lengths           ``(B,)`` ints: valid positions, the new tokens included; 0 gives an empty row
    block_table       ``(B, max_pages)`` int32: the pages of each sequence, in order
    kv_starts         ``(B,)`` ints: cache positions before it do not exist (left padding)
    num_splits        parts the keys are split into; None: chosen from the shapes alone, so that a sequence gives the
                      same bits in any batch
    other flags       as in `attention`

    With Sq > 1 the new tokens are causal among themselves: query ``i`` sits at ``p = i + lengths[b] - Sq`` and sees the
    keys up to ``p``. The result has the shape of q with Dv for D; the lse is float32 ``(B, Hq)`` or ``(B, Hq, Sq)``.
    Absorbed latent attention (DeepSeek's MLA) has one key head of D 576 whose first 512 numbers are the values: given as
    ``v_cache = k_cache[..., :512]``, one read of the cache serves both.
    Meant for inference; gradients are there, and cost what those of `attention` cost (over a gathered copy of the cache
    when it is paged). The explicit form is ``attention_backward(…, causal=True, kv_lengths=lengths, kv_starts=…)``.

    >>> q = torch.randn(2, 8, 64)  # one token of each of two sequences
    >>> k_cache, v_cache = torch.randn(2, 2, 2, 256, 64)
    >>> hw.attention_decode(q, k_cache, v_cache, torch.tensor([17, 256])).shape
    torch.Size([2, 8, 64])
    """
    results = _forward(
        (q, k_cache, v_cache, lengths, kv_starts, block_table, sink),
        (window, scale, softcap, num_splits, _is_part_of(v_cache, k_cache)),
        backend,
        return_lse,
    )
    return results if return_lse else results[0]


def _is_part_of(v_cache: Any, k_cache: Any) -> bool:
    """Are the values the first numbers of each key, in the same memory? Not where memory cannot be asked for."""
    if torch.compiler.is_compiling() or type(v_cache) is not Tensor or type(k_cache) is not Tensor:
        return False
    if v_cache.shape[-1:] >= k_cache.shape[-1:] or v_cache.stride() != k_cache.stride():
        return False
    try:
        return v_cache.data_ptr() == k_cache.data_ptr() != 0
    except RuntimeError:  # of a transform
        return False


def _check(
    op: str, q: Any, k_cache: Any, v_cache: Any, lengths: Any, kv_starts: Any, block_table: Any, sink: Any,
    window: Window, scale: float | None, softcap: float | None, num_splits: int | None, values_in_keys: bool = False,
    unrounded: bool = False,
) -> Decode:  # fmt: skip
    _checks.floating(op, "q", q)
    if q.dim() not in (3, 4):
        raise ValueError(f"{op}: q has shape {_checks.shape_of(q)}; it needs (B, Hq, D) or (B, Hq, Sq, D)")
    _arguments.contiguous_last(op, "q", q)
    batch, heads, head_dim = q.shape[0], q.shape[1], q.shape[-1]
    letters = "(B, Hk, C, D)" if block_table is None else "(pages, Hk, page_size, D)"
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        _arguments.operand(op, name, cache, q, 4, letters)
    first = batch if block_table is None else k_cache.shape[0]
    _, key_heads, room, _ = k_cache.shape
    _checks.shape(op, "k_cache", k_cache, (first, key_heads, room, head_dim), letters)
    _checks.shape(op, "v_cache", v_cache, (first, key_heads, room, v_cache.shape[3]), f"{letters[:-1]}v)")
    _arguments.grouped_heads(op, heads, key_heads)
    _checks.tensor(op, "lengths", lengths)
    _arguments.per_batch(op, "lengths", lengths, q, batch)
    _arguments.per_batch(op, "kv_starts", kv_starts, q, batch)
    if block_table is not None:
        _checks.integer(op, "block_table", block_table, (torch.int32,))
        _checks.dims(op, "block_table", block_table, 2, "(B, max_pages)")
        _checks.shape(op, "block_table", block_table, (batch, block_table.shape[1]), "(B, max_pages)")
        _checks.same_device(op, "block_table", block_table, "q", q)
    _arguments.per_head(op, sink, q, heads)
    if num_splits is not None:
        _checks.whole(op, "num_splits", num_splits, 1)
    flags = _arguments.flags(op, q, True, window, scale, softcap, unrounded=unrounded)
    return Decode(q, k_cache, v_cache, lengths, kv_starts, block_table, sink, flags, num_splits or 0, values_in_keys)


def _describe(args: Decode) -> Described:
    q, (_, key_heads, room, value_dim) = args.q, args.v_cache.shape
    sizes = {
        "B": q.shape[0], "Hq": q.shape[1], "Hk": key_heads, "Sq": 1 if q.dim() == 3 else q.shape[2],
        "Sk": room if args.block_table is None else room * args.block_table.shape[1], "D": q.shape[-1], "Dv": value_dim,
    }  # fmt: skip
    paged = () if args.block_table is None else ("paged",)
    return Described(q, sizes, (*paged, *_arguments.features(args)))


def _validate(args: Decode) -> None:
    op, table = "attention_decode", args.block_table
    room = args.k_cache.shape[2] * (1 if table is None else table.shape[1])
    _device_values.in_range(op, "lengths", args.lengths, room + 1)
    _device_values.in_range(op, "kv_starts", args.kv_starts, room + 1)
    if table is not None:
        pages, _, page_size, _ = args.k_cache.shape
        _device_values.pages(op, table, args.lengths, args.kv_starts, page_size, pages)


def _fake(args: Decode) -> tuple[Tensor, Tensor]:
    q, value_dim = args.q, args.v_cache.shape[3]
    lse = q.new_empty(q.shape[:-1], dtype=layout.statistics_dtype(q.dtype))
    dtype = args.flags.result_dtype(q.dtype)
    if q.dim() == 3:
        return q.new_empty((*q.shape[:2], value_dim), dtype=dtype), lse
    return layout.empty_like_heads(q, value_dim, dtype), lse


def _differentiate(saved: Saved, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, lengths, kv_starts, table, sink, flags, *_ = saved.args
    out, lse = saved.results
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    one = q.dim() == 3
    if one:
        q, out, lse, grad_out = (x.unsqueeze(2) for x in (q, out, lse, grad_out))
        grad_lse = None if grad_lse is None else grad_lse.unsqueeze(2)
    if table is not None:
        k, v = (_gather_pages(cache, table) for cache in (k, v))
    forward = Attention(q, k, v, None, None, sink, lengths, None, kv_starts, None, flags)
    need_sink = saved.need("sink")
    dq, dk, dv, _, dsink = saved.run(
        dense._backward, AttentionBackward(grad_out, grad_lse, out, lse, forward, False, need_sink)
    )
    if table is not None:
        dk, dv = (_scatter_pages(saved, d, table, saved.args.k_cache) for d in (dk, dv))
    return dq.squeeze(2) if one else dq, dk, dv, None, None, None, dsink if need_sink else None


def _gather_pages(cache: Tensor, block_table: Tensor) -> Tensor:
    """``(pages, Hk, page_size, D)`` as one contiguous cache per sequence ``(B, Hk, max_pages · page_size, D)``."""
    pages, heads, page_size, dim = cache.shape
    batch, max_pages = block_table.shape
    if pages == 0:
        return cache.new_zeros((batch, heads, max_pages * page_size, dim))
    gathered = cache[block_table.long().clamp(0, pages - 1)]  # (B, max_pages, Hk, page_size, D)
    return gathered.transpose(1, 2).reshape(batch, heads, max_pages * page_size, dim)


def _scatter_pages(saved: Saved, grad: Tensor, block_table: Tensor, cache: Tensor) -> Tensor:
    """Gradients of gathered caches, added up into their pages in a fixed order: a page is a row of an embedding."""
    pages, heads, page_size, _ = cache.shape
    batch, max_pages = block_table.shape
    dim = grad.shape[-1]
    by_page = grad.reshape(batch, heads, max_pages, page_size, dim).transpose(1, 2)
    rows = by_page.reshape(batch * max_pages, heads * page_size * dim)
    summed = saved.run(embedding._backward, embedding.EmbeddingBackward(rows, block_table.reshape(-1), pages, -1))
    return summed.reshape(pages, heads, page_size, dim)


def _dtype_of_caches(dtypes: Sequence[torch.dtype], autocast: torch.dtype) -> torch.dtype:
    """Under autocast the query follows the caches: a whole cache is not copied for one token."""
    return dtypes[-1] if dtypes[-1] == dtypes[-2] else autocast


AUTOCAST = _autocast.Rule(_dtype_of_caches, operands=3)
_forward = Op(
    "attention_decode", Decode, check=_check, describe=_describe, validate=_validate, fake=_fake,
    returns="(Tensor, Tensor)", backward=_differentiate,
    backward_launchers=("attention_backward", "embedding_backward"),
    saves=("q", "k_cache", "v_cache", "lengths", "kv_starts", "block_table", "sink"), saves_results=(0, 1),
    keep="with_lse",
    autocast=AUTOCAST,
)  # fmt: skip
