"""Dense attention, forward and backward.

    s_ij  = softcap(scale · q_i·k_j) + bias_ij        for the keys j that query i may see
    lse_i = log( sum_j exp(s_ij) + exp(sink_h) )
    out_i = sum_j exp(s_ij - lse_i) v_j

Computed tile by tile with an online softmax, so the S × S scores never exist: Dao et al., "FlashAttention: Fast and
Memory-Efficient Exact Attention with IO-Awareness", 2022, and "FlashAttention-2", 2023.
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

LETTERS = ("(B, Hq, Sq, D)", "(B, Hk, Sk, D)", "(B, Hk, Sk, Dv)")


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
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of q ``(B, Hq, Sq, D)`` over k ``(B, Hk, Sk, D)`` and v ``(B, Hk, Sk, Dv)``: out ``(B, Hq, Sq, Dv)``.

    Query ``i`` sits at position ``p = i + Sk - Sq`` (bottom-right alignment); query head ``h`` reads key head
    ``h // (Hq // Hk)``. Strides are free as long as the last dim is contiguous. Memory is O(S).

    causal         key j is visible iff ``j <= p``
    window         ``(left, right)``, inclusive: visible iff ``p - left <= j <= p + right``; None or -1: no bound
    mask           bool, True = may attend, broadcastable to ``(B, Hq, Sq, Sk)``, never expanded in memory
    bias           added to the scaled logits, broadcastable the same way, differentiable
    kv_lengths     ``(B,)`` ints: keys from there on do not exist; positions become ``p = i + kv_lengths[b] - Sq``
    scale          default ``1 / sqrt(D)``
    softcap        ``c · tanh(s / c)`` on the scaled logit, before bias and masks
    sink           ``(Hq,)`` logits that join the denominator only, differentiable
    deterministic  None: always on CPU and WebGPU; on CUDA as ``torch.are_deterministic_algorithms_enabled()``
    return_lse     also return the natural log of the softmax denominator, float32 ``(B, Hq, Sq)``, differentiable

    A query that may see nothing gives zeros, an lse of -inf and zero gradients. Differentiable in q, k, v, bias, sink.
    """
    kind = _remembered.kind(
        "attention",
        (q, k, v, mask, bias, kv_lengths, sink),
        (causal, window, scale, softcap, deterministic, return_lse, backend),
    )
    run = _remembered.recall(kind)
    if run is None:
        p = _prepare(
            q, k, v, causal=causal, window=window, mask=mask, bias=bias, kv_lengths=kv_lengths, scale=scale,
            softcap=softcap, sink=sink, deterministic=deterministic,
        )  # fmt: skip
        chosen = registry.choose(p.call, backend)
        op = _forward if return_lse else _forward_without_lse
        run = _remembered.keep(kind, op, q, k, v, p.mask, p.bias, kv_lengths, sink, *p.flags, chosen)
    if mask is not None or bias is not None:
        mask, bias = _arguments.four_dims(mask), _arguments.four_dims(bias)
    out, lse = run(q, k, v, mask, bias, kv_lengths, sink)
    return (out, lse) if return_lse else out


def attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool = False,
    window: Window = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    deterministic: bool | None = None,
    grad_lse: Tensor | None = None,
    need_bias_grad: bool = False,
    need_sink_grad: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, ...]:
    """The gradients ``(dq, dk, dv)`` of `attention`, given its results ``out`` and ``lse`` and the same flags.

    ``grad_lse`` is the gradient that arrives at the lse, if any. ``need_bias_grad`` and ``need_sink_grad`` append
    ``dbias`` and ``dsink`` to the result, in that order.
    """
    p = _prepare_backward(
        grad_out, q, k, v, out, lse, causal=causal, window=window, mask=mask, bias=bias, kv_lengths=kv_lengths,
        scale=scale, softcap=softcap, sink=sink, deterministic=deterministic, grad_lse=grad_lse,
        need_bias_grad=need_bias_grad, need_sink_grad=need_sink_grad,
    )  # fmt: skip
    dq, dk, dv, dbias, dsink = _backward(
        grad_out, grad_lse, q, k, v, out, lse, p.mask, p.bias, kv_lengths, sink, *p.flags, need_bias_grad,
        need_sink_grad, registry.choose(p.call, backend),
    )  # fmt: skip
    wanted = [dq, dk, dv]
    if need_bias_grad and bias is not None:
        wanted.append(dbias.reshape(bias.shape))
    if need_sink_grad:
        wanted.append(dsink)
    return tuple(wanted)


def attention_call(*args: Any, **kwargs: Any) -> registry.Call:
    """Check the arguments of `attention` and describe the call to the backends."""
    return _prepare(*args, **kwargs).call


def attention_backward_call(*args: Any, **kwargs: Any) -> registry.Call:
    """Check the arguments of `attention_backward` and describe the call to the backends."""
    return _prepare_backward(*args, **kwargs).call


class _Prepared(NamedTuple):
    call: registry.Call
    flags: Flags
    mask: Tensor | None  # 4-D, broadcast dims of size 1
    bias: Tensor | None


def _prepare(
    q: Any, k: Any, v: Any, *, causal: bool = False, window: Window = None, mask: Any = None, bias: Any = None,
    kv_lengths: Any = None, scale: float | None = None, softcap: float | None = None, sink: Any = None,
    deterministic: bool | None = None, op: str = "attention",
) -> _Prepared:  # fmt: skip
    _arguments.qkv(op, q, k, v, 4, LETTERS)
    batch, q_heads, q_length, head_dim = q.shape
    k_heads, k_length = k.shape[1], k.shape[2]
    _checks.shape(op, "k", k, (batch, k_heads, k_length, head_dim), "(B, Hk, Sk, D)")
    _checks.shape(op, "v", v, (batch, k_heads, k_length, v.shape[3]), "(B, Hk, Sk, Dv)")
    _arguments.grouped_heads(op, q_heads, k_heads)
    scores = (batch, q_heads, q_length, k_length)
    mask = _arguments.broadcastable(op, "mask", mask, scores, q, boolean=True)
    bias = _arguments.broadcastable(op, "bias", bias, scores, q, boolean=False)
    if kv_lengths is not None:
        _arguments.per_batch(op, "kv_lengths", kv_lengths, q, batch)
    _arguments.per_head(op, sink, q, q_heads)
    flags = _arguments.flags(
        op, q, causal=causal, window=window, scale=scale, softcap=softcap, deterministic=deterministic
    )
    gradient = _checks.wants_gradient(q, k, v, bias, sink)
    call = registry.Call(
        op,
        ("attention_forward", "attention_backward") if gradient else ("attention_forward",),
        _checks.device_type(q),
        q.dtype,
        {
            "B": batch, "Hq": q_heads, "Hk": k_heads, "Sq": q_length, "Sk": k_length, "D": head_dim, "Dv": v.shape[3],
        },
        _arguments.features(flags, mask=mask, bias=bias, kv_lengths=kv_lengths, sink=sink, gradient=gradient),
    )  # fmt: skip
    return _Prepared(call, flags, mask, bias)


def _prepare_backward(
    grad_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *, grad_lse: Any = None, need_bias_grad: bool = False,
    need_sink_grad: bool = False, **arguments: Any,
) -> _Prepared:  # fmt: skip
    op = "attention_backward"
    prepared = _prepare(q, k, v, op=op, **arguments)
    out_shape = (*q.shape[:3], v.shape[3])
    _arguments.saved_results(
        op, grad_out, grad_lse, out, lse, q, out_shape, out_shape[:3], ("(B, Hq, Sq, Dv)", "(B, Hq, Sq)")
    )
    _arguments.needed_gradients(op, need_bias_grad, arguments.get("bias"), need_sink_grad, arguments.get("sink"))
    return prepared._replace(call=prepared.call._replace(launchers=(op,)))


def _prepare_forward(*args: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    return _prepare_launcher("attention_forward", *args)


def _prepare_alone(*args: Any) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Without lse, to make which costs the host as much as a seventh of a small call."""
    if not registry.offers(args[-1], "attention_output"):
        return _prepare_forward(*args)
    launch = _prepare_launcher("attention_output", *args)
    return lambda *tensors: (launch(*tensors), None)


def _prepare_launcher(
    launcher: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None,
    kv_lengths: Tensor | None, sink: Tensor | None, left: int, right: int, scale: float, softcap: float,
    deterministic: bool, backend: str,
) -> Callable[..., Any]:  # fmt: skip
    flags = Flags(left, right, scale, softcap, deterministic)

    def prepare(*tensors: Any) -> Callable[..., Any]:
        return registry.prepare(backend, launcher, tensors, (flags,))

    def validate_and_launch(*tensors: Any) -> Any:
        _device_values.in_range("attention", "kv_lengths", tensors[5], tensors[1].shape[2] + 1)
        return prepare(*tensors)(*tensors)

    if settings.validate and kv_lengths is not None:
        return validate_and_launch
    return prepare(q, k, v, mask, bias, kv_lengths, sink)


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return layout.empty_like_heads(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=layout.lse_dtype(q.dtype))


def _run_backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    mask: Tensor | None, bias: Tensor | None, kv_lengths: Tensor | None, sink: Tensor | None, left: int, right: int,
    scale: float, softcap: float, deterministic: bool, need_bias_grad: bool, need_sink_grad: bool, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    if settings.validate and kv_lengths is not None:
        _device_values.in_range("attention_backward", "kv_lengths", kv_lengths, k.shape[2] + 1)
    flags = Flags(left, right, scale, softcap, deterministic)
    return registry.launcher(backend, "attention_backward")(
        grad_out, grad_lse, q, k, v, out, lse, mask, bias, kv_lengths, sink, flags, need_bias_grad, need_sink_grad
    )


def _fake_backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    mask: Tensor | None, bias: Tensor | None, kv_lengths: Tensor | None, sink: Tensor | None, left: int, right: int,
    scale: float, softcap: float, deterministic: bool, need_bias_grad: bool, need_sink_grad: bool, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dbias = bias if need_bias_grad else None
    dsink = sink if need_sink_grad else None
    return (
        layout.empty_heads_inside(q),
        layout.empty_heads_inside(k),
        layout.empty_heads_inside(v),
        q.new_empty(0) if dbias is None else dbias.new_empty(dbias.shape),
        q.new_empty(0) if dsink is None else dsink.new_empty(dsink.shape),
    )


def _save(ctx: Any, args: tuple[Any, ...], outputs: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, bias, kv_lengths, sink, *flags, backend = args
    ctx.save_for_backward(q, k, v, *outputs, mask, bias, kv_lengths, sink)
    ctx.flags, ctx.backend = flags, backend


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, mask, bias, kv_lengths, sink = ctx.saved_tensors
    nothing = (None,) * (7 + len(ctx.flags) + 1)
    if grad_out is None and grad_lse is None:
        return nothing
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    need_bias, need_sink = ctx.needs_input_grad[4], ctx.needs_input_grad[6]
    dq, dk, dv, dbias, dsink = _backward(
        grad_out, grad_lse, q, k, v, out, lse, mask, bias, kv_lengths, sink, *ctx.flags, need_bias, need_sink,
        ctx.backend,
    )  # fmt: skip
    return dq, dk, dv, None, dbias if need_bias else None, None, dsink if need_sink else None, *nothing[7:]


_FLAGS = "SymInt left, SymInt right, float scale, float softcap, bool deterministic"
_forward = _library.define(
    "attention_forward",
    "(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? bias, Tensor? kv_lengths, Tensor? sink, "
    f"{_FLAGS}, str backend) -> (Tensor, Tensor)",
    prepare=_prepare_forward,
    fake=_fake_forward,
    save=_save,
    backward=_differentiate,
)
_forward_without_lse = _forward.where_alone(_prepare_alone)
_backward = _library.define(
    "attention_backward",
    "(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? mask, "
    f"Tensor? bias, Tensor? kv_lengths, Tensor? sink, {_FLAGS}, bool need_bias_grad, bool need_sink_grad, "
    "str backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    run=_run_backward,
    fake=_fake_backward,
)
