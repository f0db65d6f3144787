"""Partial results, for those who merge or sum them (`headwise.distributed`): out, and the gradients of q, k and v, stay in
the dtype of the sums, float32 where the inputs are 16-bit, as if they were rounded later.

Otherwise as the functions of the same names. Not public, and without gradients of their own. With dropout they take a seed
and where the call lies in a larger one (`SEED_NUMBERS`); rounded results are there for that, too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.ops.attention import _arguments, decode, dense, varlen
from headwise.ops.attention._arguments import Window


@torch.no_grad()
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, window: Window, scale: float, softcap: float | None, deterministic: bool,
    backend: str | None, mask: Tensor | None = None, bias: Tensor | None = None, sink: Tensor | None = None,
    dropout: float = 0, seed: Tensor | None = None, rounded: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out, lse = dense._forward(
        (q, k, v, mask, bias, sink, None, None, None, seed),
        (False, window, scale, softcap, deterministic, dropout, not rounded),
        backend, True,
    )  # fmt: skip
    return out, lse


@torch.no_grad()
def attention_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, window: Window, scale: float,
    softcap: float | None, deterministic: bool, backend: str | None, mask: Tensor | None = None,
    bias: Tensor | None = None, sink: Tensor | None = None, kv_lengths: Tensor | None = None,
    q_lengths: Tensor | None = None, kv_starts: Tensor | None = None, grad_lse: Tensor | None = None,
    need_bias_grad: bool = False, need_sink_grad: bool = False, dropout: float = 0, seed: Tensor | None = None,
    rounded: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients of bias and sink have the dtype of these."""
    grads = dense._backward(
        (grad_out, grad_lse, out, lse, q, k, v, mask, bias, sink, kv_lengths, q_lengths, kv_starts, seed),
        (False, window, scale, softcap, deterministic, dropout, need_bias_grad, need_sink_grad, not rounded),
        backend,
    )
    return _arguments.gradients_asked_for(grads, bias, need_bias_grad, need_sink_grad)


@torch.no_grad()
def attention_varlen_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor, longest: int, *,
    window: Window, scale: float, softcap: float | None, deterministic: bool, backend: str | None,
    sink: Tensor | None = None, grad_lse: Tensor | None = None, need_sink_grad: bool = False, dropout: float = 0,
    seed: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Of sequences that have as many keys as queries."""
    offsets = cu_seqlens, cu_seqlens
    grads = varlen._backward(
        (grad_out, grad_lse, out, lse, q, k, v, None, None, sink, None, None, None, *offsets, seed),
        (longest, longest, False, window, scale, softcap, deterministic, dropout, True, need_sink_grad),
        backend,
    )
    return _arguments.gradients_asked_for(grads, None, False, need_sink_grad)


@torch.no_grad()
def attention_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, *, kv_starts: Tensor, block_table: Tensor | None,
    scale: float, softcap: float | None, backend: str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out, lse = decode._forward(
        (q, k_cache, v_cache, lengths, kv_starts, block_table, None),
        (None, scale, softcap, None, decode._is_part_of(v_cache, k_cache), True),
        backend, True,
    )  # fmt: skip
    return out, lse
