"""Attention of one or a few new tokens over a cache of keys and values, contiguous or paged.

The keys are split so that one long sequence fills the machine; the parts are merged by their log-sum-exp in a fixed order
("Flash-Decoding", Dao et al., 2023). Pages as in Kwon et al., "Efficient Memory Management for Large Language Model
Serving with PagedAttention", 2023.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise import layout
from headwise.backends import registry
from headwise.config import settings
from headwise.ops import _checks, _device_values, _library, _remembered
from headwise.ops.attention import _arguments
from headwise.ops.attention._arguments import Flags, Window


def attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    *,
    block_table: Tensor | None = None,
    window: Window = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of q ``(B, Hq, D)`` or ``(B, Hq, Sq, D)`` over the first ``lengths[b]`` positions of a cache.

    k_cache, v_cache  ``(B, Hk, C, D)`` and ``(B, Hk, C, Dv)`` with capacity C, any strides; with ``block_table``
                      ``(pages, Hk, page_size, D)`` and ``(pages, Hk, page_size, Dv)``
    lengths           ``(B,)`` ints: valid positions, the new tokens included; 0 gives an empty row
    block_table       ``(B, max_pages)`` int32: the pages of each sequence, in order
    num_splits        parts the keys are split into; None: chosen from the shapes alone, so that a sequence gives the
                      same bits in any batch
    other flags       as in `attention`

    With Sq > 1 the new tokens are causal among themselves: query ``i`` sits at ``p = i + lengths[b] - Sq`` and sees the
    keys up to ``p``. The result has the shape of q with Dv for D; the lse is float32 ``(B, Hq)`` or ``(B, Hq, Sq)``.
    Meant for inference; gradients are there, and cost what those of `attention` cost (over a gathered copy of the cache
    when it is paged). The explicit form is ``attention_backward(..., causal=True, kv_lengths=lengths)``.
    """
    kind = _remembered.kind(
        "attention_decode",
        (q, k_cache, v_cache, lengths, block_table, sink),
        (window, scale, softcap, num_splits, backend),
    )
    run = _remembered.recall(kind)
    if run is None:
        p = _prepare(
            q, k_cache, v_cache, lengths, block_table=block_table, window=window, scale=scale, softcap=softcap,
            sink=sink, num_splits=num_splits,
        )  # fmt: skip
        run = _remembered.keep(
            kind, _forward, q, k_cache, v_cache, lengths, block_table, sink, *p.flags, num_splits or 0,
            registry.choose(p.call, backend),
        )  # fmt: skip
    out, lse = run(q, k_cache, v_cache, lengths, block_table, sink)
    return (out, lse) if return_lse else out


def attention_decode_call(*args: Any, **kwargs: Any) -> registry.Call:
    """Check the arguments of `attention_decode` and describe the call to the backends."""
    return _prepare(*args, **kwargs).call


class _Prepared(NamedTuple):
    call: registry.Call
    flags: Flags


def _prepare(
    q: Any, k_cache: Any, v_cache: Any, lengths: Any, *, block_table: Any = None, window: Window = None,
    scale: float | None = None, softcap: float | None = None, sink: Any = None, num_splits: int | None = None,
) -> _Prepared:  # fmt: skip
    op = "attention_decode"
    _checks.floating(op, "q", q)
    if q.dim() not in (3, 4):
        raise ValueError(f"{op}: q has shape {_checks.shape_of(q)}; it needs (B, Hq, D) or (B, Hq, Sq, D)")
    _arguments.contiguous_last(op, "q", q)
    if q.dim() == 3:
        q = q.unsqueeze(2)
    batch, q_heads, q_length, head_dim = q.shape
    letters = "(B, Hk, C, D)" if block_table is None else "(pages, Hk, page_size, D)"
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        _checks.floating(op, name, cache)
        _checks.dims(op, name, cache, 4, letters)
        _checks.same_dtype(op, name, cache, "q", q)
        _checks.same_device(op, name, cache, "q", q)
        _arguments.contiguous_last(op, name, cache)
    first = batch if block_table is None else k_cache.shape[0]
    heads, room = k_cache.shape[1], k_cache.shape[2]
    _checks.shape(op, "k_cache", k_cache, (first, heads, room, head_dim), letters)
    _checks.shape(op, "v_cache", v_cache, (first, heads, room, v_cache.shape[3]), f"{letters[:-1]}v)")
    _arguments.grouped_heads(op, q_heads, heads)
    _arguments.per_batch(op, "lengths", lengths, q, batch)
    if block_table is not None:
        _checks.integer(op, "block_table", block_table, (torch.int32,))
        _checks.dims(op, "block_table", block_table, 2, "(B, max_pages)")
        _checks.shape(op, "block_table", block_table, (batch, block_table.shape[1]), "(B, max_pages)")
        _checks.same_device(op, "block_table", block_table, "q", q)
    _arguments.per_head(op, sink, q, q_heads)
    if num_splits is not None:
        _checks.whole(op, "num_splits", num_splits, 1)
    flags = _arguments.flags(op, q, causal=True, window=window, scale=scale, softcap=softcap, deterministic=True)
    gradient = _checks.wants_gradient(q, k_cache, v_cache, sink)
    launchers: tuple[str, ...] = ("attention_decode",)
    if gradient:
        launchers += ("attention_backward",) if block_table is None else ("attention_backward", "embedding_backward")
    capacity = room if block_table is None else room * block_table.shape[1]
    call = registry.Call(
        op,
        launchers,
        _checks.device_type(q),
        q.dtype,
        {
            "B": batch, "Hq": q_heads, "Hk": heads, "Sq": q_length, "Sk": capacity, "D": head_dim,
            "Dv": v_cache.shape[3],
        },
        _arguments.features(flags, sink=sink, paged=block_table, gradient=gradient),
    )  # fmt: skip
    return _Prepared(call, flags)


def _prepare_launch(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, block_table: Tensor | None, sink: Tensor | None,
    left: int, right: int, scale: float, softcap: float, deterministic: bool, num_splits: int, backend: str,
) -> Callable[..., tuple[Tensor, Tensor]]:  # fmt: skip
    others = (Flags(left, right, scale, softcap, deterministic), num_splits)

    def prepare(*tensors: Any) -> Callable[..., tuple[Tensor, Tensor]]:
        return registry.prepare(backend, "attention_decode", tensors, others)

    def validate_and_launch(*tensors: Any) -> tuple[Tensor, Tensor]:
        _validate(*tensors[1:5])
        return prepare(*tensors)(*tensors)

    return validate_and_launch if settings.validate else prepare(q, k_cache, v_cache, lengths, block_table, sink)


def _validate(k_cache: Tensor, v_cache: Tensor, lengths: Tensor, block_table: Tensor | None) -> None:
    pages = 1 if block_table is None else block_table.shape[1]
    _device_values.in_range("attention_decode", "lengths", lengths, k_cache.shape[2] * pages + 1)
    if block_table is not None:
        _device_values.pages("attention_decode", block_table, lengths, k_cache.shape[2], k_cache.shape[0])


def _fake(q: Tensor, k_cache: Tensor, v_cache: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    if q.dim() == 3:
        out = q.new_empty((*q.shape[:2], v_cache.shape[3]))
        return out, q.new_empty(q.shape[:2], dtype=layout.lse_dtype(q.dtype))
    return layout.empty_like_heads(q, v_cache.shape[3]), q.new_empty(q.shape[:3], dtype=layout.lse_dtype(q.dtype))


def _save(ctx: Any, args: tuple[Any, ...], outputs: tuple[Tensor, Tensor]) -> None:
    q, k_cache, v_cache, lengths, block_table, sink, *flags, _, backend = args
    ctx.save_for_backward(q, k_cache, v_cache, *outputs, lengths, block_table, sink)
    ctx.flags, ctx.backend = flags, backend


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    q, k_cache, v_cache, out, lse, lengths, block_table, sink = ctx.saved_tensors
    nothing = (None,) * (6 + len(ctx.flags) + 2)
    if grad_out is None and grad_lse is None:
        return nothing
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    one = q.dim() == 3
    if one:
        q, out, lse, grad_out = (x.unsqueeze(2) for x in (q, out, lse, grad_out))
        grad_lse = None if grad_lse is None else grad_lse.unsqueeze(2)
    need_sink = ctx.needs_input_grad[5]
    k, v = k_cache, v_cache
    if block_table is not None:
        k, v = (_gather_pages(cache, block_table) for cache in (k_cache, v_cache))
    dq, dk, dv, _, dsink = torch.ops.headwise.attention_backward(
        grad_out, grad_lse, q, k, v, out, lse, None, None, lengths, sink, *ctx.flags, False, need_sink, ctx.backend
    )
    if block_table is not None:
        dk, dv = (_scatter_pages(d, block_table, k_cache.shape[0], k_cache.shape[2], ctx.backend) for d in (dk, dv))
    return dq.squeeze(2) if one else dq, dk, dv, None, None, dsink if need_sink else None, *nothing[6:]


def _gather_pages(cache: Tensor, block_table: Tensor) -> Tensor:
    """``(pages, Hk, page_size, D)`` as one contiguous cache per sequence ``(B, Hk, max_pages · page_size, D)``."""
    pages, heads, page_size, dim = cache.shape
    batch, max_pages = block_table.shape
    if pages == 0:
        return cache.new_zeros((batch, heads, max_pages * page_size, dim))
    gathered = cache[block_table.long().clamp(0, pages - 1)]  # (B, max_pages, Hk, page_size, D)
    return gathered.transpose(1, 2).reshape(batch, heads, max_pages * page_size, dim)


def _scatter_pages(grad: Tensor, block_table: Tensor, pages: int, page_size: int, backend: str) -> Tensor:
    """Gradients of gathered caches, added up into their pages in a fixed order: a page is a row of an embedding."""
    batch, heads, _, dim = grad.shape
    max_pages = block_table.shape[1]
    by_page = grad.reshape(batch, heads, max_pages, page_size, dim).transpose(1, 2)
    rows = by_page.reshape(batch * max_pages, heads * page_size * dim)
    summed = torch.ops.headwise.embedding_backward(rows, block_table.reshape(-1), pages, -1, backend)
    return summed.reshape(pages, heads, page_size, dim)


_forward = _library.define(
    "attention_decode",
    "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor lengths, Tensor? block_table, Tensor? sink, SymInt left, "
    "SymInt right, float scale, float softcap, bool deterministic, SymInt num_splits, str backend) -> (Tensor, Tensor)",
    prepare=_prepare_launch,
    fake=_fake,
    save=_save,
    backward=_differentiate,
)
