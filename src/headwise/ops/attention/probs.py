"""The attention probabilities themselves: for looking at, for distillation, for losses on attention.

    p_ij = exp(s_ij - lse_i),  with s and lse as in `attention`; masked entries are exactly 0

The result is as large as the scores, so name the ``rows`` you want where S is long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.backends import registry
from headwise.config import settings
from headwise.ops import _checks, _device_values, _library
from headwise.ops.attention import _arguments
from headwise.ops.attention._arguments import Flags, Window


def attention_probs(
    q: Tensor,
    k: Tensor,
    *,
    rows: Sequence[int] | Tensor | None = None,
    causal: bool = False,
    window: Window = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """The softmax rows of q ``(B, Hq, Sq, D)`` over k ``(B, Hk, Sk, D)``: ``(B, Hq, Sq, Sk)``, of q's dtype.

    rows         only these query rows, in this order, negative ones counted from the end: ``(B, Hq, len(rows), Sk)``;
                 a list of ints, or a 1-D int tensor (a row that does not exist then gives NaN)
    other flags  as in `attention`, which takes ``mask`` and ``bias`` over all Sq rows here too

    A query that may see nothing gives a row of zeros. With a sink the rows sum to less than 1. Differentiable in q, k,
    bias and sink.
    """
    p = _prepare(
        q, k, rows=rows, causal=causal, window=window, mask=mask, bias=bias, kv_lengths=kv_lengths, scale=scale,
        softcap=softcap, sink=sink,
    )  # fmt: skip
    return _forward(q, k, p.rows, p.mask, p.bias, kv_lengths, sink, *p.flags, registry.choose(p.call, backend))


def attention_probs_backward(
    grad: Tensor,
    probs: Tensor,
    q: Tensor,
    k: Tensor,
    *,
    rows: Sequence[int] | Tensor | None = None,
    causal: bool = False,
    window: Window = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    need_bias_grad: bool = False,
    need_sink_grad: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, ...]:
    """The gradients ``(dq, dk)`` of `attention_probs`, given its result ``probs`` and the same flags.

    ``need_bias_grad`` and ``need_sink_grad`` append ``dbias`` and ``dsink``, in that order.
    """
    p = _prepare_backward(
        grad, probs, q, k, rows=rows, causal=causal, window=window, mask=mask, bias=bias, kv_lengths=kv_lengths,
        scale=scale, softcap=softcap, sink=sink, need_bias_grad=need_bias_grad, need_sink_grad=need_sink_grad,
    )  # fmt: skip
    dq, dk, dbias, dsink = _backward(
        grad, probs, q, k, p.rows, p.mask, p.bias, kv_lengths, sink, *p.flags, need_bias_grad, need_sink_grad,
        registry.choose(p.call, backend),
    )  # fmt: skip
    wanted = [dq, dk]
    if need_bias_grad and bias is not None:
        wanted.append(dbias.reshape(bias.shape))
    if need_sink_grad:
        wanted.append(dsink)
    return tuple(wanted)


def attention_probs_call(*args: Any, **kwargs: Any) -> registry.Call:
    """Check the arguments of `attention_probs` and describe the call to the backends."""
    return _prepare(*args, **kwargs).call


def attention_probs_backward_call(*args: Any, **kwargs: Any) -> registry.Call:
    """Check the arguments of `attention_probs_backward` and describe the call to the backends."""
    return _prepare_backward(*args, **kwargs).call


class _Prepared(NamedTuple):
    call: registry.Call
    flags: Flags
    rows: Tensor | None
    mask: Tensor | None
    bias: Tensor | None


def _prepare(
    q: Any, k: Any, *, rows: Any = None, causal: bool = False, window: Window = None, mask: Any = None,
    bias: Any = None, kv_lengths: Any = None, scale: float | None = None, softcap: float | None = None,
    sink: Any = None, op: str = "attention_probs",
) -> _Prepared:  # fmt: skip
    _arguments.qkv(op, q, k, None, 4, ("(B, Hq, Sq, D)", "(B, Hk, Sk, D)", ""))
    batch, q_heads, q_length, head_dim = q.shape
    k_heads, k_length = k.shape[1], k.shape[2]
    _checks.shape(op, "k", k, (batch, k_heads, k_length, head_dim), "(B, Hk, Sk, D)")
    _arguments.grouped_heads(op, q_heads, k_heads)
    scores = (batch, q_heads, q_length, k_length)
    mask = _arguments.broadcastable(op, "mask", mask, scores, q, boolean=True)
    bias = _arguments.broadcastable(op, "bias", bias, scores, q, boolean=False)
    if kv_lengths is not None:
        _arguments.per_batch(op, "kv_lengths", kv_lengths, q, batch)
    _arguments.per_head(op, sink, q, q_heads)
    row_indices = _rows(op, rows, q)
    flags = _arguments.flags(op, q, causal=causal, window=window, scale=scale, softcap=softcap, deterministic=True)
    gradient = _checks.wants_gradient(q, k, bias, sink)
    call = registry.Call(
        op,
        ("attention_probs", "attention_probs_backward") if gradient else ("attention_probs",),
        _checks.device_type(q),
        q.dtype,
        {"B": batch, "Hq": q_heads, "Hk": k_heads, "Sq": q_length, "Sk": k_length, "D": head_dim},
        _arguments.features(
            flags, mask=mask, bias=bias, kv_lengths=kv_lengths, sink=sink, rows=rows, gradient=gradient
        ),
    )
    return _Prepared(call, flags, row_indices, mask, bias)


def _prepare_backward(
    grad: Any, probs: Any, q: Any, k: Any, *, need_bias_grad: bool = False, need_sink_grad: bool = False,
    **arguments: Any,
) -> _Prepared:  # fmt: skip
    op = "attention_probs_backward"
    prepared = _prepare(q, k, op=op, **arguments)
    count = q.shape[2] if prepared.rows is None else prepared.rows.shape[0]
    for name, x in (("grad", grad), ("probs", probs)):
        _checks.floating(op, name, x)
        _checks.shape(op, name, x, (q.shape[0], q.shape[1], count, k.shape[2]), "(B, Hq, rows, Sk)")
        _checks.same_dtype(op, name, x, "q", q)
        _checks.same_device(op, name, x, "q", q)
    _arguments.needed_gradients(op, need_bias_grad, arguments.get("bias"), need_sink_grad, arguments.get("sink"))
    return prepared._replace(call=prepared.call._replace(launchers=(op,)))


def _rows(op: str, rows: Any, q: Tensor) -> Tensor | None:
    if rows is None:
        return None
    if isinstance(rows, Tensor):
        _checks.integer(op, "rows", rows)
        _checks.dims(op, "rows", rows, 1, "(rows,)")
        _checks.same_device(op, "rows", rows, "q", q)
        return rows
    if not isinstance(rows, (list, tuple, range)):
        raise TypeError(f"{op}: rows is a {type(rows).__name__}; it needs a list of ints or a 1-D int tensor")
    length = q.shape[2]
    for i, row in enumerate(rows):
        if isinstance(row, bool) or not isinstance(row, (int, torch.SymInt)):
            raise TypeError(f"{op}: rows[{i}] is {row!r}; it needs to be a whole number")
        if not -length <= row < length:
            raise ValueError(f"{op}: rows[{i}] is {row}; it needs to be from {-length} to {length - 1}")
    # A GPU that PyTorch does not know takes its tensors from the CPU.
    return torch.tensor(list(rows), dtype=torch.int64, device="cpu" if hasattr(q, "headwise_device") else q.device)


def _run_forward(
    q: Tensor, k: Tensor, rows: Tensor | None, mask: Tensor | None, bias: Tensor | None, kv_lengths: Tensor | None,
    sink: Tensor | None, left: int, right: int, scale: float, softcap: float, deterministic: bool, backend: str,
) -> Tensor:  # fmt: skip
    if settings.validate and kv_lengths is not None:
        _device_values.in_range("attention_probs", "kv_lengths", kv_lengths, k.shape[2] + 1)
    if settings.validate and rows is not None:
        _device_values.rows("attention_probs", rows, q.shape[2])
    flags = Flags(left, right, scale, softcap, deterministic)
    return registry.launcher(backend, "attention_probs")(q, k, rows, mask, bias, kv_lengths, sink, flags)


def _fake_forward(q: Tensor, k: Tensor, rows: Tensor | None, *others: Any) -> Tensor:
    length = q.shape[2] if rows is None else rows.shape[0]
    return q.new_empty((q.shape[0], q.shape[1], length, k.shape[2]))


def _run_backward(
    grad: Tensor, probs: Tensor, q: Tensor, k: Tensor, rows: Tensor | None, mask: Tensor | None, bias: Tensor | None,
    kv_lengths: Tensor | None, sink: Tensor | None, left: int, right: int, scale: float, softcap: float,
    deterministic: bool, need_bias_grad: bool, need_sink_grad: bool, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return registry.launcher(backend, "attention_probs_backward")(
        grad, probs, q, k, rows, mask, bias, kv_lengths, sink, Flags(left, right, scale, softcap, deterministic),
        need_bias_grad, need_sink_grad,
    )  # fmt: skip


def _fake_backward(
    grad: Tensor, probs: Tensor, q: Tensor, k: Tensor, rows: Tensor | None, mask: Tensor | None, bias: Tensor | None,
    kv_lengths: Tensor | None, sink: Tensor | None, left: int, right: int, scale: float, softcap: float,
    deterministic: bool, need_bias_grad: bool, need_sink_grad: bool, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return (
        q.new_empty(q.shape),
        k.new_empty(k.shape),
        bias.new_empty(bias.shape) if bias is not None and need_bias_grad else q.new_empty(0),
        sink.new_empty(sink.shape) if sink is not None and need_sink_grad else q.new_empty(0),
    )


def _save(ctx: Any, args: tuple[Any, ...], probs: Tensor) -> None:
    *tensors, left, right, scale, softcap, deterministic, backend = args
    ctx.save_for_backward(probs, *tensors)
    ctx.flags, ctx.backend = (left, right, scale, softcap, deterministic), backend


def _differentiate(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
    nothing = (None,) * (7 + len(ctx.flags) + 1)
    if grad is None:
        return nothing
    need_bias, need_sink = ctx.needs_input_grad[4], ctx.needs_input_grad[6]
    dq, dk, dbias, dsink = _backward(grad, *ctx.saved_tensors, *ctx.flags, need_bias, need_sink, ctx.backend)
    return dq, dk, None, None, dbias if need_bias else None, None, dsink if need_sink else None, *nothing[7:]


_TENSORS = "Tensor q, Tensor k, Tensor? rows, Tensor? mask, Tensor? bias, Tensor? kv_lengths, Tensor? sink"
_FLAGS = "SymInt left, SymInt right, float scale, float softcap, bool deterministic"
_forward = _library.define(
    "attention_probs",
    f"({_TENSORS}, {_FLAGS}, str backend) -> Tensor",
    run=_run_forward,
    fake=_fake_forward,
    save=_save,
    backward=_differentiate,
)
_backward = _library.define(
    "attention_probs_backward",
    f"(Tensor grad, Tensor probs, {_TENSORS}, {_FLAGS}, bool need_bias_grad, bool need_sink_grad, str backend) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    run=_run_backward,
    fake=_fake_backward,
)
