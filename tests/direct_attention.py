"""Attention written a second time, straight from the contract, for the tests alone.

One query head of one sequence at a time, every probability in memory, in the dtype of the inputs (float64: the truth;
float32 and below: the plain result that sets the budget). It shares no line with `headwise.reference`, so that the
oracle is itself under test. Gradients come from autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headwise.testing import compare_all

Window = tuple[int | None, int | None] | None


def visible_keys(
    Sq: int, Sk: int, *, queries: int | None = None, length: int | None = None, start: int = 0, causal: bool = False,
    window: Window = None,
) -> Tensor:  # fmt: skip
    """(Sq, Sk) bool: which keys each query may see by position, where the first ``queries`` and ``length`` exist."""
    length = Sk if length is None else length
    queries = Sq if queries is None else queries
    seen = torch.zeros(Sq, Sk, dtype=torch.bool)
    left, right = (None, None) if window is None else window
    for i in range(queries):
        p = i + (length - queries)
        first = 0 if left in (None, -1) else max(0, p - left)
        last = length - 1 if right in (None, -1) else min(length - 1, p + right)
        if causal:
            last = min(last, p)
        if last >= max(first, start):
            seen[i, max(first, start) : last + 1] = True
    return seen


def one_head(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    *,
    queries: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """out (Sq, Dv), lse (Sq,) and probabilities (Sq, Sk) of one head: q (Sq, D), k (Sk, D), v (Sk, Dv)."""
    seen = seen.to(q.device)
    exists = torch.arange(len(q), device=q.device)[:, None] < (len(q) if queries is None else queries)
    used = seen.any(0)[:, None]
    # What nobody sees, and a query that does not exist, may hold anything.
    q, k, v = torch.where(exists, q, 0), torch.where(used, k, 0), torch.where(used, v, 0)
    s = (q @ k.T) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if bias is not None:
        s = s + bias.to(s.dtype)
    s = torch.where(seen, s, -math.inf)
    blind = ~(s > -math.inf).any(1, keepdim=True) if len(k) else torch.ones_like(exists)
    last = torch.full((len(q), 1), -math.inf, dtype=s.dtype, device=q.device)
    logits = torch.cat([s, last if sink is None else torch.where(exists, sink.to(s.dtype), last)], 1)
    void = ~(logits > -math.inf).any(1, keepdim=True)  # not even a sink in the denominator
    logits = torch.where(void, torch.zeros_like(logits), logits)
    lse = torch.logsumexp(logits, 1, keepdim=True)
    p = torch.where(seen & ~blind, torch.exp(logits - lse)[:, : len(k)], 0)
    return p @ v, torch.where(void, -math.inf, lse)[:, 0], p


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    q_lengths: Tensor | None = None,
    kv_starts: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    probs: bool = False,
) -> tuple[Tensor, ...]:
    """(out, lse) of padded attention, or (out, lse, probs)."""
    B, Hq, Sq, _ = q.shape
    Hk, Sk, Dv = k.shape[1], k.shape[2], v.shape[3]
    mask = None if mask is None else mask.expand(B, Hq, Sq, Sk)
    bias = None if bias is None else bias.expand(B, Hq, Sq, Sk)
    heads = []
    for b in range(B):
        length, queries = (
            full if lengths is None else int(lengths[b]) for full, lengths in ((Sk, kv_lengths), (Sq, q_lengths))
        )
        start = 0 if kv_starts is None else int(kv_starts[b])
        seen = visible_keys(Sq, Sk, queries=queries, length=length, start=start, causal=causal, window=window)
        seen = seen.to(q.device)
        for h in range(Hq):
            g = h // (Hq // Hk)
            heads.append(
                one_head(
                    q[b, h],
                    k[b, g],
                    v[b, g],
                    seen if mask is None else seen & mask[b, h],
                    queries=queries,
                    scale=scale,
                    softcap=softcap,
                    bias=None if bias is None else bias[b, h],
                    sink=None if sink is None else sink[h],
                )
            )
    if not heads:
        results = (q.new_zeros(B, Hq, Sq, Dv), q.new_zeros(B, Hq, Sq), q.new_zeros(B, Hq, Sq, Sk))
    else:
        results = tuple(torch.stack(part).unflatten(0, (B, Hq)) for part in zip(*heads, strict=True))
    return results if probs else results[:2]


def varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: list[int], cu_seqlens_k: list[int], **flags: Any
) -> tuple[Tensor, Tensor]:
    """(out (Tq, Hq, Dv), lse (Hq, Tq)) of a packed batch: each sequence by itself, zeros behind the last one."""
    outs, lses = [], []
    sequences = zip(cu_seqlens_q[:-1], cu_seqlens_q[1:], cu_seqlens_k[:-1], cu_seqlens_k[1:], strict=True)
    for q0, q1, k0, k1 in sequences:
        part = (x.transpose(0, 1)[None] for x in (q[q0:q1], k[k0:k1], v[k0:k1]))
        out, lse = attention(*part, **flags)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    rest = q.shape[0] - cu_seqlens_q[-1]
    outs.append(v.new_zeros(rest, q.shape[1], v.shape[2]))
    lses.append(q.new_full((q.shape[1], rest), -math.inf))
    return torch.cat(outs), torch.cat(lses, 1)


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: list[int],
    *,
    kv_starts: list[int] | None = None,
    block_table: Tensor | None = None,
    **flags: Any,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of decoding: each sequence's keys cut or gathered to its length, causal, aligned bottom-right."""
    queries = q[:, :, None] if q.dim() == 3 else q
    outs, lses = [], []
    for b, length in enumerate(lengths):
        if block_table is None:
            keys, values = k_cache[b, :, :length], v_cache[b, :, :length]
        else:
            size = k_cache.shape[2]
            pages = [int(block_table[b, i]) for i in range(math.ceil(length / size))]
            keys, values = (
                torch.cat([c[page] for page in pages] or [c[0, :, :0]], 1)[:, :length] for c in (k_cache, v_cache)
            )
        starts = None if kv_starts is None else torch.tensor(kv_starts[b : b + 1])
        out, lse = attention(queries[b : b + 1], keys[None], values[None], causal=True, kv_starts=starts, **flags)
        outs.append(out)
        lses.append(lse)
    out, lse = torch.cat(outs), torch.cat(lses)
    return (out[:, :, 0], lse[:, :, 0]) if q.dim() == 3 else (out, lse)


def results_of(
    run: Callable[..., tuple[Tensor, ...]],
    inputs: dict[str, Tensor],
    grads: tuple[Tensor, ...] | None,
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Outputs "0", "1", … of ``run(**inputs)`` and, with output gradients ``grads``, "grad of NAME" for every input."""
    leaves = {n: x.detach().to(dtype or x.dtype).requires_grad_(grads is not None) for n, x in inputs.items()}
    outputs = run(**leaves)
    results = {str(i): out.detach() for i, out in enumerate(outputs)}
    if grads is not None:
        pairs = [(out, g.to(out.dtype)) for out, g in zip(outputs, grads, strict=True) if out.requires_grad]
        found = torch.autograd.grad(
            [out for out, _ in pairs], list(leaves.values()), [g for _, g in pairs], allow_unused=True
        )
        for (name, leaf), grad in zip(leaves.items(), found, strict=True):
            results[f"grad of {name}"] = torch.zeros_like(leaf) if grad is None else grad
    return results


def assert_within_budget(
    ours: Callable[..., tuple[Tensor, ...]],
    direct: Callable[..., tuple[Tensor, ...]],
    inputs: dict[str, Tensor],
    *,
    backward: bool = True,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Hold ``ours(**inputs)`` and its gradients against the direct formula in float64; gives our results."""
    with torch.no_grad():
        shapes = [(out.shape, out.dtype, out.device) for out in ours(**inputs)]
    generator = torch.Generator().manual_seed(seed)
    grads = tuple(torch.randn(shape, generator=generator).to(device, dtype) for shape, dtype, device in shapes)
    wanted = grads if backward else None
    results = results_of(ours, inputs, wanted)
    truth = results_of(direct, inputs, wanted, torch.float64)
    plain = results_of(direct, inputs, wanted)
    single = results_of(direct, inputs, None, torch.float32)
    plain.update({n: single[n] for n in single if results[n].dtype == torch.float32})
    assert_all_ok(results, truth, plain)
    return results


def assert_all_ok(results: dict[str, Tensor], truth: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    failures = [str(verdict) for verdict in compare_all(results, truth, plain) if not verdict.ok]
    assert not failures, "\n".join(failures)
