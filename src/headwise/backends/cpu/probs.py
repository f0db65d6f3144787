"""Attention probabilities on the CPU: the result is as large as the scores, so plain matmuls do."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from headwise.layout import lse_dtype

if TYPE_CHECKING:
    from headwise.ops.attention._arguments import Flags


class _Scores(NamedTuple):
    logits: Tensor  # (B, Hq, rows, Sk), masked with -inf
    tanh: Tensor | None  # of the capped scores, for the derivative
    q: Tensor  # the rows of q and k they were made of, in the dtype of the arithmetic
    k: Tensor
    rows: Tensor  # index of each row into Sq
    bad: Tensor  # (B, 1, rows, 1): lengths or rows that make no sense


def attention_probs(
    q: Tensor, k: Tensor, rows: Tensor | None, mask: Tensor | None, bias: Tensor | None, kv_lengths: Tensor | None,
    sink: Tensor | None, flags: Flags,
) -> Tensor:  # fmt: skip
    scores = _scores(q, k, rows, mask, bias, kv_lengths, flags)
    probs = torch.exp(scores.logits - _lse(scores.logits, sink))
    return torch.where(scores.bad, torch.nan, probs).to(q.dtype)


def attention_probs_backward(
    grad: Tensor, probs: Tensor, q: Tensor, k: Tensor, rows: Tensor | None, mask: Tensor | None, bias: Tensor | None,
    kv_lengths: Tensor | None, sink: Tensor | None, flags: Flags, need_bias_grad: bool, need_sink_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    scores = _scores(q, k, rows, mask, bias, kv_lengths, flags)
    lse = _lse(scores.logits, sink)
    exact = torch.where(scores.bad, torch.nan, torch.exp(scores.logits - lse))
    weighted = grad.to(exact.dtype) * exact
    delta = weighted.sum(-1, keepdim=True)
    dlogits = weighted - exact * delta
    dbias = dsink = q.new_empty(0)
    if need_bias_grad and bias is not None:
        whole = dlogits
        if rows is not None and bias.shape[2] > 1:
            whole = dlogits.new_zeros((*dlogits.shape[:2], q.shape[2], k.shape[2]))
            whole.index_add_(2, scores.rows, dlogits)
        dbias = whole.sum_to_size(bias.shape).to(bias.dtype)
    if need_sink_grad and sink is not None:
        share = torch.exp(sink.to(lse.dtype)[:, None, None] - lse)
        dsink = -(share * delta).sum((0, 2, 3)).to(sink.dtype)
    if scores.tanh is not None:
        dlogits = dlogits * (1 - scores.tanh.square())
    dlogits = dlogits * flags.scale
    by_key_head = dlogits.unflatten(1, (k.shape[1], -1))  # [B, Hk, G, rows, Sk]
    dq_rows = (by_key_head @ scores.k[:, :, None]).flatten(1, 2)
    dk = (by_key_head.transpose(-1, -2) @ scores.q.unflatten(1, (k.shape[1], -1))).sum(2)
    dq = torch.zeros(q.shape, dtype=dq_rows.dtype).index_add_(2, scores.rows, dq_rows)
    return dq.to(q.dtype), dk.to(k.dtype), dbias, dsink


def _scores(
    q: Tensor, k: Tensor, rows: Tensor | None, mask: Tensor | None, bias: Tensor | None, kv_lengths: Tensor | None,
    flags: Flags,
) -> _Scores:  # fmt: skip
    batch, _, q_length, _ = q.shape
    k_length = k.shape[2]
    dtype = lse_dtype(q.dtype)
    index = torch.arange(q_length) if rows is None else rows.long()
    bad_row = (index < -q_length) | (index >= q_length)
    index = torch.where(bad_row, 0, torch.where(index < 0, index + q_length, index))
    if q_length == 0:  # no row exists; whatever is asked for is bad, and there is nothing to read
        q, index = q.new_zeros((*q.shape[:2], len(index), q.shape[3])), torch.arange(len(index))
        mask = bias = None
    lengths = torch.full((batch,), k_length) if kv_lengths is None else kv_lengths.long()
    bad = bad_row[None, None, :, None] | ((lengths < 0) | (lengths > k_length))[:, None, None, None]

    position = (index[None, :] + (lengths[:, None] - q_length))[:, None, :, None]  # [B, 1, rows, 1]
    key = torch.arange(k_length)
    seen = (key < lengths[:, None, None, None]).expand(batch, 1, len(index), k_length)
    if flags.left >= 0:
        seen = seen & (key >= position - flags.left)
    if flags.right >= 0:
        seen = seen & (key <= position + flags.right)
    if mask is not None:
        seen = seen & _rows_of(mask, index)

    # A key that no query sees may hold NaN: it is taken out before it meets a zero.
    used = seen.any(2)  # [B, 1 or Hq, Sk]
    if used.shape[1] > 1:
        used = used.unflatten(1, (k.shape[1], -1)).any(2)
    q_rows, k_used = q[:, :, index].to(dtype), torch.where(used[..., None], k, 0.0).to(dtype)
    logits = (q_rows.unflatten(1, (k.shape[1], -1)) @ k_used[:, :, None].transpose(-1, -2)).flatten(1, 2)
    logits *= flags.scale
    tanh = None
    if flags.softcap:
        tanh = torch.tanh(logits / flags.softcap)
        logits = tanh * flags.softcap
    if bias is not None:
        logits = logits + _rows_of(bias, index).to(dtype)
    return _Scores(logits.masked_fill(~seen, -torch.inf), tanh, q_rows, k_used, index, bad)


def _rows_of(scores: Tensor, index: Tensor) -> Tensor:
    return scores[:, :, index] if scores.shape[2] > 1 else scores


def _lse(logits: Tensor, sink: Tensor | None) -> Tensor:
    """``(B, Hq, rows, 1)``; +inf for a row that sees nothing, so that its weights become 0."""
    if logits.shape[-1] == 0:
        return logits.new_full((*logits.shape[:3], 1), torch.inf)
    lse = torch.logsumexp(logits, -1, keepdim=True)
    joined = lse if sink is None else torch.logaddexp(lse, sink.to(lse.dtype)[:, None, None])
    return torch.where(lse == -torch.inf, torch.inf, joined)
