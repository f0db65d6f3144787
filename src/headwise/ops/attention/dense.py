"""Dense attention, forward and backward.

    s_ij  = softcap(scale · q_i·k_j) + bias_ij        for the keys j that query i may see
    lse_i = log( sum_j exp(s_ij) + exp(sink_h) )
    out_i = sum_j D_ij exp(s_ij - lse_i) v_j          D: 1, or under dropout 0 or 1 / (1 - dropout)

Computed tile by tile with an online softmax, so the S × S scores never exist: Dao et al., "FlashAttention: Fast and
Memory-Efficient Exact Attention with IO-Awareness", 2022, and "FlashAttention-2", 2023.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from headwise import layout
from headwise.ops import _autocast, _checks, _device_values
from headwise.ops._op import Described, Op, Saved
from headwise.ops.attention import _arguments
from headwise.ops.attention._arguments import Attention, AttentionBackward, Window

LETTERS = ("(B, Hq, Sq, D)", "(B, Hk, Sk, D)", "(B, Hk, Sk, Dv)")


class Options(_arguments.CommonOptions, _arguments.DropoutOptions, total=False):
    """For the overloads of `attention`."""

    causal: bool
    mask: Tensor | None
    bias: Tensor | None
    kv_lengths: Tensor | None
    q_lengths: Tensor | None
    kv_starts: Tensor | None
    deterministic: bool


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[Options]
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[Options]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[Options]
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, window: Window = None, mask: Tensor | None = None,
    bias: Tensor | None = None, kv_lengths: Tensor | None = None, q_lengths: Tensor | None = None,
    kv_starts: Tensor | None = None, scale: float | None = None, softcap: float | None = None,
    sink: Tensor | None = None, dropout: float = 0, dropout_seed: int | Tensor | None = None,
    deterministic: bool = True, return_lse: bool = False, backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of q ``(B, Hq, Sq, D)`` over k ``(B, Hk, Sk, D)`` and v ``(B, Hk, Sk, Dv)``: out ``(B, Hq, Sq, Dv)``.

    Query ``i`` sits at position ``p = i + Sk - Sq`` (bottom-right alignment); query head ``h`` reads key head
    ``h // (Hq // Hk)``. Strides are free as long as the last dim is contiguous. Memory is O(S).

    causal         key j is visible iff ``j <= p``
    window         ``(left, right)``, inclusive: visible iff ``p - left <= j <= p + right``; None or -1: no bound
    mask           bool, True = may attend, broadcastable to ``(B, Hq, Sq, Sk)``, never expanded in memory
    bias           added to the scaled logits, broadcastable the same way, differentiable
    kv_lengths     ``(B,)`` ints: keys from there on do not exist; positions become ``p = i + kv_lengths[b] - Sq``
    q_lengths      ``(B,)`` ints: queries from there on do not exist (zeros, lse -inf, no gradient); positions become
                   ``p = i + (kv_lengths[b] if given, else Sk) - q_lengths[b]``. A right-padded batch is
                   q_lengths=kv_lengths=lengths
    kv_starts      ``(B,)`` ints: keys before it do not exist (left padding); positions stay
    scale          default ``1 / sqrt(D)``
    softcap        ``c · tanh(s / c)`` on the scaled logit, before bias and masks
    sink           ``(Hq,)`` logits that join the denominator only, differentiable
    dropout        chance, below 1, with which a probability becomes 0 after the softmax; the others are divided by
                   ``1 - dropout``. The lse is without it
    dropout_seed   which ones: an int or a one-element int64 tensor; the same ones on every backend and in both directions
                   (docs/contract.md). None draws a seed from PyTorch's generator of q's device
    deterministic  the same bits run after run; False allows a faster backward whose sums come in any order, where there
                   is one (``torch.use_deterministic_algorithms(True)`` overrules it)
    return_lse     also return the natural log of the softmax denominator, float32 ``(B, Hq, Sq)``, differentiable

    A query that may see nothing gives zeros and zero gradients; its lse is -inf, or the sink where there is one.
    Differentiable in q, k, v, bias, sink.

    >>> q, k, v = torch.randn(1, 8, 100, 64), torch.randn(1, 2, 100, 64), torch.randn(1, 2, 100, 64)
    >>> hw.attention(q, k, v, causal=True, window=(31, 0)).shape
    torch.Size([1, 8, 100, 64])
    >>> out, lse = hw.attention(q, k, v, kv_lengths=torch.tensor([0]), return_lse=True)  # no key
    >>> out.abs().max().item(), lse.max().item()
    (0.0, -inf)
    """
    seed = _arguments.seed_beside("attention", q, dropout, dropout_seed) if dropout else None
    results = _forward(
        (q, k, v, mask, bias, sink, kv_lengths, q_lengths, kv_starts, seed),
        (causal, window, scale, softcap, deterministic, dropout),
        backend,
        return_lse,
    )
    return results if return_lse else results[0]


def attention_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool = False,
    window: Window = None, mask: Tensor | None = None, bias: Tensor | None = None, kv_lengths: Tensor | None = None,
    q_lengths: Tensor | None = None, kv_starts: Tensor | None = None, scale: float | None = None,
    softcap: float | None = None, sink: Tensor | None = None, dropout: float = 0,
    dropout_seed: int | Tensor | None = None, deterministic: bool = True, grad_lse: Tensor | None = None,
    need_bias_grad: bool = False, need_sink_grad: bool = False, backend: str | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients ``(dq, dk, dv)`` of `attention`, given its results ``out`` and ``lse`` and the same flags.

    ``grad_lse`` is the gradient that arrives at the lse, if any. ``need_bias_grad`` and ``need_sink_grad`` append
    ``dbias`` and ``dsink`` to the result, in that order. ``dropout`` needs the ``dropout_seed`` of the forward.

    >>> q, k, v = torch.randn(3, 1, 4, 20, 32)
    >>> out, lse = hw.attention(q, k, v, causal=True, return_lse=True)
    >>> dq, dk, dv = hw.attention_backward(torch.ones_like(out), q, k, v, out, lse, causal=True)
    >>> dk.shape
    torch.Size([1, 4, 20, 32])
    """
    seed = _arguments.given_seed("attention_backward", q, dropout, dropout_seed) if dropout else None
    grads = _backward(
        (grad_out, grad_lse, out, lse, q, k, v, mask, bias, sink, kv_lengths, q_lengths, kv_starts, seed),
        (causal, window, scale, softcap, deterministic, dropout, need_bias_grad, need_sink_grad),
        backend,
    )
    return _arguments.gradients_asked_for(grads, bias, need_bias_grad, need_sink_grad)


def _check(
    op: str, q: Any, k: Any, v: Any, mask: Any, bias: Any, sink: Any, kv_lengths: Any, q_lengths: Any, kv_starts: Any,
    seed: Any, causal: bool, window: Window, scale: float | None, softcap: float | None, deterministic: bool,
    dropout: float, unrounded: bool = False,
) -> Attention:  # fmt: skip
    _arguments.qkv(op, q, k, v, 4, LETTERS)
    batch, heads, _, head_dim = q.shape
    _checks.shape(op, "k", k, (batch, k.shape[1], k.shape[2], head_dim), "(B, Hk, Sk, D)")
    _checks.shape(op, "v", v, (batch, k.shape[1], k.shape[2], v.shape[3]), "(B, Hk, Sk, Dv)")
    _arguments.grouped_heads(op, heads, k.shape[1])
    _arguments.optional_inputs(op, q, k, mask, bias, sink, kv_lengths, q_lengths, kv_starts)
    _arguments.check_seed(op, seed, q)
    flags = _arguments.flags(op, q, causal, window, scale, softcap, deterministic, dropout, unrounded)
    return Attention(
        q, k, v, mask, bias, sink, kv_lengths, q_lengths, kv_starts, None, flags, dropout_seed=seed
    )  # fmt: skip


def _check_backward(
    op: str, grad_out: Any, grad_lse: Any, out: Any, lse: Any, q: Any, k: Any, v: Any, mask: Any, bias: Any, sink: Any,
    kv_lengths: Any, q_lengths: Any, kv_starts: Any, seed: Any, causal: bool, window: Window, scale: float | None,
    softcap: float | None, deterministic: bool, dropout: float, need_bias_grad: bool, need_sink_grad: bool,
    unrounded: bool = False,
) -> AttentionBackward:  # fmt: skip
    forward = _check(
        op, q, k, v, mask, bias, sink, kv_lengths, q_lengths, kv_starts, seed, causal, window, scale, softcap,
        deterministic, dropout, unrounded,
    )  # fmt: skip
    shape = (*q.shape[:3], v.shape[3])
    _arguments.saved_results(op, grad_out, grad_lse, out, lse, q, shape, shape[:3], ("(B, Hq, Sq, Dv)", "(B, Hq, Sq)"))
    _arguments.needed_gradients(op, need_bias_grad, bias, need_sink_grad, sink)
    return AttentionBackward(grad_out, grad_lse, out, lse, forward, need_bias_grad, need_sink_grad)


def _describe(args: Attention) -> Described:
    (batch, heads, length, head_dim), (_, key_heads, keys, value_dim) = args.q.shape, args.v.shape
    sizes = {"B": batch, "Hq": heads, "Hk": key_heads, "Sq": length, "Sk": keys, "D": head_dim, "Dv": value_dim}
    return Described(args.q, sizes, _arguments.features(args))


def _validate(args: Attention) -> None:
    queries, keys = args.q.shape[2], args.k.shape[2]
    for name, most in (("kv_lengths", keys), ("q_lengths", queries), ("kv_starts", keys)):
        _device_values.in_range("attention", name, getattr(args, name), most + 1)


def _fake(args: Attention) -> tuple[Tensor, Tensor]:
    q = args.q
    lse = q.new_empty(q.shape[:3], dtype=layout.statistics_dtype(q.dtype))
    return layout.empty_like_heads(q, args.v.shape[3], args.flags.result_dtype(q.dtype)), lse


def _fake_backward(args: AttentionBackward) -> tuple[Tensor | None, ...]:
    forward = args.forward
    dtype = forward.flags.result_dtype(forward.q.dtype)
    dq, dk, dv = (layout.empty_heads_inside(x, dtype) for x in (forward.q, forward.k, forward.v))
    return dq, dk, dv, *fake_bias_and_sink(args)


def fake_bias_and_sink(args: Any) -> tuple[Tensor | None, Tensor | None]:
    wanted = ((args.forward.bias, args.need_bias), (args.forward.sink, args.need_sink))
    dbias, dsink = (x.new_empty(x.shape) if x is not None and need else None for x, need in wanted)
    return dbias, dsink


def differentiate(op: Op, saved: Saved, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    """The gradients of every tensor of `Attention`, by the backward ``op``."""
    out, lse = saved.results
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    need_bias, need_sink = saved.need("bias"), saved.need("sink")
    dq, dk, dv, dbias, dsink = saved.run(
        op, AttentionBackward(grad_out, grad_lse, out, lse, saved.args, need_bias, need_sink)
    )
    grads = (dq, dk, dv, None, dbias if need_bias else None, dsink if need_sink else None)
    return grads + (None,) * (len(saved.needs) - len(grads))


INPUTS = ("q", "k", "v", "mask", "bias", "sink", "kv_lengths", "q_lengths", "kv_starts", "cu_q", "cu_k", "dropout_seed")
GRADIENTS = "(Tensor, Tensor, Tensor, Tensor, Tensor)"
_backward = Op(
    "attention_backward", AttentionBackward, check=_check_backward, describe=lambda args: _describe(args.forward),
    validate=lambda args: _validate(args.forward), fake=_fake_backward, returns=GRADIENTS,
)  # fmt: skip
_forward = Op(
    "attention_forward", Attention, public="attention", check=_check, describe=_describe, validate=_validate,
    fake=_fake, returns="(Tensor, Tensor)", backward=functools.partial(differentiate, _backward),
    backward_launchers=("attention_backward",), saves=INPUTS, saves_results=(0, 1), keep="with_lse",
    autocast=_autocast.Rule(_autocast.low, operands=3),
)  # fmt: skip
