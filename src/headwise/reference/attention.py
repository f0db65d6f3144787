"""Attention, written as its formulas: the whole score matrix, one softmax, nothing clever."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from headwise.reference.philox import kept


def visible_keys(
    q_length: int, k_length: int, rows: int, start: int, stop: int, left: int, right: int, device: torch.device
) -> Tensor:
    """bool ``(Sq, Sk)``: which keys each query sees when only ``rows`` queries and the keys start to stop exist."""
    query = torch.arange(q_length, device=device)[:, None]
    position, key = query + (stop - rows), torch.arange(k_length, device=device)[None, :]
    visible = (query < rows) & (start <= key) & (key < stop)
    if left >= 0:
        visible = visible & (key >= position - left)
    if right >= 0:
        visible = visible & (key <= position + right)
    return visible


def attention_with_probs(
    q: Tensor, k: Tensor, v: Tensor | None, *, causal: bool = False, window: Sequence[int | None] | None = None,
    mask: Tensor | None = None, bias: Tensor | None = None, kv_lengths: Tensor | None = None,
    q_lengths: Tensor | None = None, kv_starts: Tensor | None = None, scale: float | None = None,
    softcap: float | None = None, sink: Tensor | None = None, dropout: float = 0.0,
    dropout_seed: int | Tensor | None = None, first_batch: int = 0,
) -> tuple[Tensor | None, Tensor, Tensor]:  # fmt: skip
    """``(out, lse, probs)`` of q ``(B, Hq, Sq, D)`` over k, v ``(B, Hk, Sk, ·)``.

    dropout needs a seed here; first_batch: the number of the first batch entry, for what dropout drops.
    """
    batch, q_heads, q_length, head_dim = q.shape
    k_heads, k_length = k.shape[1], k.shape[2]
    left, right = (-1 if side is None else side for side in (window or (None, None)))
    right = 0 if causal else right
    rows, starts, stops = (
        torch.full((batch,), default, device=q.device) if lengths is None else lengths.long()
        for lengths, default in ((q_lengths, q_length), (kv_starts, 0), (kv_lengths, k_length))
    )
    bad = (rows < 0) | (rows > q_length) | (starts < 0) | (starts > k_length) | (stops < 0) | (stops > k_length)

    visible = torch.zeros(batch, q_heads, q_length, k_length, dtype=torch.bool, device=q.device)
    for b, (n, start, stop) in enumerate(zip(rows.tolist(), starts.tolist(), stops.tolist(), strict=True)):
        visible[b] = visible_keys(q_length, k_length, n, start, stop, left, right, q.device)
    if mask is not None:
        visible = visible & mask

    # What does not exist or is seen by nobody may hold NaN: it is taken out before it is multiplied with zero.
    exists = (torch.arange(q_length, device=q.device) < rows[:, None])[:, None, :, None]
    group = q_heads // k_heads
    seen = visible.any(2).reshape(batch, k_heads, group, k_length).any(2)[..., None]
    q = torch.where(exists, q, 0.0)
    k = torch.where(seen, k, 0.0).repeat_interleave(group, 1)

    logits = q @ k.transpose(-1, -2) * (1 / math.sqrt(head_dim) if scale is None else scale)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        logits = logits + bias.to(logits.dtype)
    logits = logits.masked_fill(~visible, -torch.inf)
    sees_nothing = (logits == -torch.inf).all(-1, keepdim=True)
    column = logits.new_full((batch, q_heads, q_length, 1), -torch.inf)
    if sink is not None:
        column = torch.where(exists, sink.to(logits.dtype)[:, None, None], column)
    terms = torch.cat([logits, column], -1)
    # Zeros stand in for the terms of a row without a denominator, so that its gradients are finite.
    empty = (terms == -torch.inf).all(-1, keepdim=True)
    terms = torch.where(empty, 0.0, terms)
    probs = torch.where(sees_nothing, 0.0, torch.softmax(terms, -1)[..., :k_length])
    lse = torch.where(empty, -torch.inf, torch.logsumexp(terms, -1, keepdim=True)).squeeze(-1)
    if dropout:
        assert dropout_seed is not None
        keep = kept(dropout, dropout_seed, (batch, q_heads, q_length, k_length), q.device, first_batch)
        probs = torch.where(keep, probs / (1 - dropout), 0.0)
    bad = bad[:, None, None]
    lse, probs = torch.where(bad, torch.nan, lse), torch.where(bad[..., None], torch.nan, probs)
    if v is None:
        return None, lse, probs
    out = torch.where(sees_nothing, 0.0, probs @ torch.where(seen, v, 0.0).repeat_interleave(group, 1))
    return torch.where(bad[..., None], torch.nan, out), lse, probs


def attention(q: Tensor, k: Tensor, v: Tensor, **flags: object) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` of dense attention."""
    out, lse, _ = attention_with_probs(q, k, v, **flags)  # type: ignore[arg-type]
    assert out is not None
    return out, lse


def attention_probs(q: Tensor, k: Tensor, *, rows: Sequence[int] | Tensor | None = None, **flags: object) -> Tensor:
    """The softmax rows, or those named by ``rows``."""
    _, _, probs = attention_with_probs(q, k, None, **flags)  # type: ignore[arg-type]
    if rows is None:
        return probs
    index = torch.as_tensor(rows, dtype=torch.int64, device=q.device)
    length = q.shape[2]
    bad = (index < -length) | (index >= length)
    if length == 0:
        return probs.new_full((*probs.shape[:2], len(index), k.shape[2]), torch.nan)
    chosen = probs[:, :, torch.where(bad, 0, index)]
    return torch.where(bad[:, None], torch.nan, chosen)


def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    **flags: object,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``(out, lse)`` of a packed batch, one dense call per sequence."""
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    outs, lses = [], []
    for b in range(len(starts_q) - 1):
        of_q, of_k = slice(starts_q[b], starts_q[b + 1]), slice(starts_k[b], starts_k[b + 1])
        dense_q, dense_k, dense_v = (x.transpose(0, 1)[None] for x in (q[of_q], k[of_k], v[of_k]))
        out, lse = attention(dense_q, dense_k, dense_v, first_batch=b, **flags)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    trailing = q.shape[0] - starts_q[-1]
    outs.append(q.new_zeros(trailing, q.shape[1], v.shape[2]))
    lses.append(torch.full((q.shape[1], trailing), -torch.inf, dtype=q.dtype, device=q.device))
    if not _well_formed(starts_q, q.shape[0], max_seqlen_q) or not _well_formed(starts_k, k.shape[0], max_seqlen_k):
        nan = q.new_full((q.shape[0], q.shape[1], v.shape[2]), torch.nan)
        return nan, nan[..., 0].transpose(0, 1)
    return torch.cat(outs), torch.cat(lses, 1)


def _well_formed(offsets: list[int], total: int, longest: int) -> bool:
    steps = [b - a for a, b in pairwise(offsets)]
    return offsets[0] == 0 and offsets[-1] <= total and all(0 <= step <= longest for step in steps)


def attention_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, *, kv_starts: Tensor | None = None,
    block_table: Tensor | None = None, **flags: object,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``(out, lse)`` of new tokens over a cache: causal attention over each sequence's pages, put end to end."""
    dense_q = q[:, :, None] if q.dim() == 3 else q
    k, v = k_cache, v_cache
    if block_table is not None:
        table = block_table.long().clamp(0, max(k_cache.shape[0] - 1, 0))
        k, v = (torch.cat(list(c[table].unbind(1)), 2) for c in (k_cache, v_cache))
    out, lse = attention(dense_q, k, v, causal=True, kv_lengths=lengths, kv_starts=kv_starts, **flags)
    if block_table is not None:
        page_size = k_cache.shape[2]
        first = torch.arange(block_table.shape[1], device=q.device) * page_size
        starts = torch.zeros_like(lengths) if kv_starts is None else kv_starts
        needed = torch.maximum(first, starts[:, None]) < torch.minimum(first + page_size, lengths[:, None])
        bad = (needed & ((block_table < 0) | (block_table >= k_cache.shape[0]))).any(1)[:, None, None]
        out, lse = torch.where(bad[..., None], torch.nan, out), torch.where(bad, torch.nan, lse)
    return (out[:, :, 0], lse[:, :, 0]) if q.dim() == 3 else (out, lse)


def merge_attention(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` of parts over disjoint keys; lses of the shape of outs without the last dim."""
    stacked = torch.stack(list(lses))
    empty = (stacked == -torch.inf).all(0)
    # A part without keys gets a finite lse and a weight of zero, so that gradients through it are zero, not NaN.
    present = stacked > -torch.inf
    safe = torch.where(empty, 0.0, torch.where(present, stacked, -torch.inf))
    lse = torch.logsumexp(safe, 0)
    weights = torch.where(present, torch.exp(torch.where(present, stacked, 0.0) - lse), 0.0)
    parts = torch.where(present[..., None], torch.stack(list(outs)), 0.0)
    out = (weights[..., None].to(parts.dtype) * parts).sum(0)
    return out, torch.where(empty, -torch.inf, lse)
