"""Attention probabilities on the CPU: the result is as large as the scores, so plain matmuls do."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from headwise.backends.cpu.dropout import kept_of_rows, of_flags
from headwise.layout import four_dims, statistics_dtype

if TYPE_CHECKING:
    from headwise.ops.attention._arguments import Probs, ProbsBackward


class _Scores(NamedTuple):
    probs: Tensor  # (B, Hq, rows, Sk)
    lse: Tensor  # (B, Hq, rows, 1), +inf for a row that sees nothing
    empty: Tensor  # (B, 1 or Hq, rows, 1): rows that see nothing
    tanh: Tensor | None  # of the capped scores, for the derivative of the cap
    q: Tensor  # the queries and keys that count, in the dtype of the arithmetic; zeros for the others
    k: Tensor
    rows: Tensor  # index of each row into Sq
    bad: (
        Tensor | None
    )  # (B, 1, rows, 1): rows of NaN, because a length or the row makes no sense; None if there are none


def attention_probs(args: Probs) -> Tensor:
    scores = _scores(args)
    probs = _drop(args, scores.rows, scores.probs)
    if scores.bad is not None:
        probs.masked_fill_(scores.bad, torch.nan)
    return probs.to(args.q.dtype)


def _drop(args: Probs, rows: Tensor, x: Tensor) -> Tensor:
    """x ``(B, Hq, rows, Sk)`` with zeros for what dropout drops, and the rest scaled; in place."""
    dropout = of_flags(args.flags, args.dropout_seed)
    if dropout is None or x.numel() == 0:
        return x
    for b, entry in enumerate(x.mul_(dropout.scale)):
        kept = kept_of_rows(dropout._replace(batch=dropout.batch + b), x.shape[1], rows, x.shape[3])
        entry.masked_fill_(~kept, 0.0)
    return x


def attention_probs_backward(args: ProbsBackward) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    forward, scores = args.forward, _scores(args.forward)
    q, k, bias, sink = forward.q, forward.k, forward.bias, forward.sink
    # From a row that sees nothing comes no gradient, whatever arrives there.
    grad = torch.where(scores.empty, 0.0, args.grad.to(scores.probs.dtype))
    weighted = _drop(forward, scores.rows, grad) * scores.probs
    delta = weighted.sum(-1, keepdim=True)
    dlogits = weighted - scores.probs * delta
    dbias = dsink = None
    if args.need_bias and bias is not None:
        whole, shape = dlogits, four_dims(bias).shape
        if forward.rows is not None and shape[2] > 1:
            whole = dlogits.new_zeros((*dlogits.shape[:2], q.shape[2], k.shape[2]))
            whole.index_add_(2, scores.rows, dlogits)
        dbias = whole.sum_to_size(shape).to(bias.dtype).reshape(bias.shape)
    if args.need_sink and sink is not None:
        share = torch.exp(sink.to(delta.dtype)[:, None, None] - scores.lse)
        dsink = -(share * delta).sum((0, 2, 3)).to(sink.dtype)
    if scores.tanh is not None:
        dlogits = dlogits * (1 - scores.tanh.square())
    dlogits = (dlogits * forward.flags.scale).unflatten(1, (k.shape[1], -1))  # [B, Hk, G, rows, Sk]
    dq_rows = (dlogits @ scores.k[:, :, None]).flatten(1, 2).masked_fill_(scores.empty, 0.0)
    dk = (dlogits.transpose(-1, -2) @ scores.q.unflatten(1, (k.shape[1], -1))).sum(2)
    dq = torch.zeros(q.shape, dtype=dq_rows.dtype).index_add_(2, scores.rows, dq_rows)
    return dq.to(q.dtype), dk.to(k.dtype), dbias, dsink


def _scores(args: Probs) -> _Scores:
    q, k, flags, dtype = args.q, args.k, args.flags, statistics_dtype(args.q.dtype)
    mask, bias = four_dims(args.mask), four_dims(args.bias)
    batch, _, q_length, _ = q.shape
    k_heads, k_length = k.shape[1], k.shape[2]
    index = torch.arange(q_length) if args.rows is None else args.rows.long()
    bad_row = (index < -q_length) | (index >= q_length)
    index = torch.where(bad_row, 0, torch.where(index < 0, index + q_length, index))
    if q_length == 0:  # every row asked for is bad, and there is none to read
        q, index = q.new_zeros((*q.shape[:2], len(index), q.shape[3])), torch.arange(len(index))
        mask = bias = None
    rows, starts, stops = (
        torch.full((batch,), default) if lengths is None else lengths.long()
        for lengths, default in ((args.q_lengths, q_length), (args.kv_starts, 0), (args.kv_lengths, k_length))
    )
    bad = (rows < 0) | (rows > q_length) | (starts < 0) | (starts > k_length) | (stops < 0) | (stops > k_length)

    rows, starts, stops, bad = (x[:, None, None, None] for x in (rows, starts, stops, bad))
    row, key = index[:, None], torch.arange(k_length)
    position = row + (stops - rows)  # [B, 1, rows, 1]
    seen = (row < rows) & (key >= starts) & (key < stops)  # [B, 1, rows, Sk]
    if flags.left >= 0:
        seen = seen & (key >= position - flags.left)
    if flags.right >= 0:
        seen = seen & (key <= position + flags.right)
    if mask is not None:
        seen = seen & _rows_of(mask, index)

    # Queries that see nothing and keys that nobody sees may hold NaN, and zero times NaN is NaN.
    empty, used = ~seen.any(-1, keepdim=True), seen.any(2)
    if used.shape[1] > 1:
        used = used.unflatten(1, (k_heads, -1)).any(2)
    q_rows = torch.where(empty, 0.0, q[:, :, index]).to(dtype)
    k_used = torch.where(used[..., None], k, 0.0).to(dtype)
    logits = (q_rows.unflatten(1, (k_heads, -1)) @ k_used[:, :, None].transpose(-1, -2)).flatten(1, 2)
    logits *= flags.scale
    tanh = None
    if flags.softcap:
        tanh = torch.tanh(logits / flags.softcap)
        logits = tanh * flags.softcap
    if bias is not None:
        logits = logits + _rows_of(bias, index).to(dtype)
    lse = _lse(logits.masked_fill_(~seen, -torch.inf), args.sink)
    probs = torch.exp(logits - lse)
    bad = bad | bad_row[:, None]
    if not bad.any():
        return _Scores(probs, lse, empty, tanh, q_rows, k_used, index, None)
    probs.masked_fill_(bad, torch.nan)
    return _Scores(probs, lse, empty & ~bad, tanh, q_rows, k_used, index, bad)  # loud in backward, too


def _rows_of(scores: Tensor, index: Tensor) -> Tensor:
    return scores[:, :, index] if scores.shape[2] > 1 else scores


def _lse(logits: Tensor, sink: Tensor | None) -> Tensor:
    """``(B, Hq, rows, 1)``; +inf for a row that sees nothing, so that its weights become 0."""
    if logits.shape[-1] == 0:
        return logits.new_full((*logits.shape[:3], 1), torch.inf)
    lse = torch.logsumexp(logits, -1, keepdim=True)
    joined = lse if sink is None else torch.logaddexp(lse, sink.to(lse.dtype)[:, None, None])
    return torch.where(lse == -torch.inf, torch.inf, joined)
