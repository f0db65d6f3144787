"""Attention with ``q_lengths``, ``kv_lengths`` or ``kv_starts`` on Hopper: a padded batch is run as a packed one.

Offsets are written on the device. Results are those of the packed kernels; around them small kernels move the log-sum-exps
from ``(B, H, S)`` to ``(H, B · S)`` and back, and make NaN of entries whose lengths make no sense.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwise.backends.triton.hopper import attention_backward, attention_forward, folded_lengths
from headwise.backends.triton.hopper.coverage import (
    backward_tile,
    covers_backward,
    covers_forward,
    forward_tile,
    tiles_in_all,
)
from headwise.backends.triton.hopper.lengths import extent, lengths_of, mark_bad
from headwise.backends.triton.hopper.padding import SEQUENCES, as_packed, end_to_end, foldable, packable, tokens

if TYPE_CHECKING:
    from headwise.backends.triton.gpu import Gpu
    from headwise.ops.attention._arguments import Attention, AttentionBackward

_ROWS = 256  # that a program moves


def forward(gpu: Gpu, args: Attention) -> tuple[Tensor, Tensor | None] | None:
    """(out, lse), or None if the plain kernel is to do it."""
    if foldable(args):
        return folded_lengths.forward(gpu, args)
    if covers_forward(args) is None or not packable(args):
        return attention_forward.forward(gpu, args)
    if covers_forward(as_packed(args)) is not None or not all(map(gpu.aligned, (args.q, args.k, args.v))):
        return None
    (batch, heads, queries, _), value_dim = args.q.shape, args.v.shape[3]
    banded = args.flags.left >= 0 or args.flags.right >= 0
    tile = forward_tile(
        args.q.shape[3], queries, True, banded, tiles_in_all(args.q), gpu.multiprocessors, value_dim,
        capped=args.flags.softcap > 0,
    )  # fmt: skip
    results = attention_forward.forward(gpu, as_packed(args, *_offsets(gpu, args)), tile)
    assert results is not None
    out, packed_lse = results
    lse = gpu.empty((batch, heads, queries), torch.float32) if args.with_lse else None
    if lse is not None:
        _move_statistics(gpu, args, packed_lse, lse, queries, to_packed=False)
    mark_bad(gpu, args, out)
    return out.view(batch, queries, heads, value_dim).transpose(1, 2), lse


def backward(gpu: Gpu, args: AttentionBackward) -> attention_backward.Gradients | None:
    """None if the plain kernels are to do it."""
    call = args.forward
    if foldable(call):
        return folded_lengths.backward(gpu, args)
    if covers_backward(call) is None or not packable(call):
        return attention_backward.backward(gpu, args)
    if covers_backward(as_packed(call)) is not None or not all(map(gpu.aligned, (call.q, call.k, call.v))):
        return None
    (batch, heads, queries, _), (_, key_heads, keys, _) = call.q.shape, call.k.shape
    moved: list[Tensor | None] = []
    for x in (args.lse, args.grad_lse):
        moved.append(None if x is None else gpu.empty((heads, batch * queries), torch.float32))
        if x is not None:
            hidden = float("-inf") if x is args.lse else 0.0
            _move_statistics(gpu, call, gpu.contiguous(x), moved[-1], queries, to_packed=True, hidden=hidden)
    lse, grad_lse = moved
    assert lse is not None
    gradients = attention_backward.backward(
        gpu,
        args._replace(
            grad_out=_tokens_of(gpu, args.grad_out), out=_tokens_of(gpu, args.out), lse=lse, grad_lse=grad_lse,
            forward=as_packed(call, *_offsets(gpu, call)),
        ),
        backward_tile(call.q.shape[3], call.flags.softcap > 0, value_dim=call.v.shape[3]),
    )  # fmt: skip
    assert gradients is not None
    dq, dk, dv, _, dsink = gradients
    for x in (dq, dk, dv):
        mark_bad(gpu, call, x)
    results = (
        x.view(batch, length, count, x.shape[2]).transpose(1, 2)
        for x, length, count in ((dq, queries, heads), (dk, keys, key_heads), (dv, keys, key_heads))
    )
    return (*results, None, dsink)  # type: ignore[return-value]


def _tokens_of(gpu: Gpu, x: Tensor) -> Tensor:
    return tokens(x if end_to_end(x) and x.stride(3) == 1 else gpu.call(_heads_inside, x).transpose(1, 2))


def _heads_inside(x: Tensor) -> Tensor:
    """``(B, S, H, D)``, contiguous, from ``(B, H, S, D)``."""
    return x.transpose(1, 2).clone(memory_format=torch.contiguous_format)


def _offsets(gpu: Gpu, args: Attention) -> tuple[Tensor, Tensor]:
    batch, _, queries, _ = args.q.shape
    cu_q, cu_k = (gpu.empty((SEQUENCES * batch + 1,), torch.int32) for _ in range(2))
    gpu.launch(_write_offsets, (batch,), (*lengths_of(gpu, args), cu_q, cu_k), (queries, args.k.shape[2]), warps=1)
    return cu_q, cu_k


def _move_statistics(
    gpu: Gpu, args: Attention, source: Tensor, target: Any, queries: int, *, to_packed: bool, hidden: float = float("-inf")
) -> None:  # fmt: skip
    batch, heads, keys = args.q.shape[0], args.q.shape[1], args.k.shape[2]
    gpu.launch(
        _move_rows, (batch * heads * triton.cdiv(queries, _ROWS),), (*lengths_of(gpu, args), source, target),
        (batch, heads, queries, keys, hidden), (to_packed, _ROWS),
    )  # fmt: skip


@triton.jit(do_not_specialize=["queries", "keys"])
def _write_offsets(q_lengths, kv_lengths, kv_starts, cu_q, cu_k, queries, keys):
    """Keys before the first; the entry itself; queries past its end; keys past its end."""
    batch = tl.program_id(0)
    rows, past, first, _ = extent(q_lengths, kv_lengths, kv_starts, batch, queries, keys)
    q, k = cu_q + batch * 4, cu_k + batch * 4
    at_q, at_k = batch * queries, batch * keys
    tl.store(q, at_q)
    tl.store(k, at_k)
    tl.store(q + 1, at_q)
    tl.store(k + 1, at_k + first)
    tl.store(q + 2, at_q + rows)
    tl.store(k + 2, at_k + past)
    tl.store(q + 3, at_q + queries)
    tl.store(k + 3, at_k + past)
    if batch == tl.num_programs(0) - 1:
        tl.store(q + 4, at_q + queries)
        tl.store(k + 4, at_k + keys)


@triton.jit(do_not_specialize=["batches", "heads", "queries", "keys", "hidden"])
def _move_rows(
    q_lengths, kv_lengths, kv_starts, source, target, batches, heads, queries, keys, hidden, TO_PACKED: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """float32 of every row from ``(B, H, S)`` to ``(H, B · S)``, or back; ``hidden`` for rows that do not exist."""
    program, blocks = tl.program_id(0), tl.cdiv(queries, ROWS)
    batch, head = (program // blocks // heads).to(tl.int64), (program // blocks % heads).to(tl.int64)
    row = program % blocks * ROWS + tl.arange(0, ROWS)
    inside = row < queries
    existing, _, _, bad = extent(q_lengths, kv_lengths, kv_starts, batch, queries, keys)
    padded = (batch * heads + head) * queries + row
    packed = (head * batches + batch) * queries + row
    if TO_PACKED:
        x = tl.load(source + padded, mask=inside & (row < existing), other=hidden)
    else:
        x = tl.load(source + packed, mask=inside & (row < existing), other=hidden)
    x = tl.where(bad, float("nan"), x)
    tl.store(target + (packed if TO_PACKED else padded), x, mask=inside)
