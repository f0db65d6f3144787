"""Attention over a packed batch: sequences of different lengths laid end to end, no padding.

Sequence ``b`` owns the rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b+1]`` of q and the rows ``cu_seqlens_k[b]`` to
``cu_seqlens_k[b+1]`` of k and v, and attends to nothing else. Inside a sequence everything is as in `attention`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise import layout
from headwise.backends import registry
from headwise.config import settings
from headwise.ops import _checks, _device_values, _library, _remembered
from headwise.ops.attention import _arguments
from headwise.ops.attention._arguments import Flags, Window

LETTERS = ("(Tq, Hq, D)", "(Tk, Hk, D)", "(Tk, Hk, Dv)")


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    window: Window = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of packed q ``(Tq, Hq, D)`` over k ``(Tk, Hk, D)`` and v ``(Tk, Hk, Dv)``: out ``(Tq, Hq, Dv)``.

    cu_seqlens_q, cu_seqlens_k  ``(sequences + 1,)`` ints: 0, then where each sequence ends
    max_seqlen_q, max_seqlen_k  the longest sequence, or more; they size the launch
    other flags                 as in `attention`; positions count inside each sequence
    return_lse                  also return the lse, float32 ``(Hq, Tq)``

    Rows past the last sequence give zeros. Offsets that make no sense give NaN. Differentiable in q, k, v, sink.
    """
    kind = _remembered.kind(
        "attention_varlen",
        (q, k, v, cu_seqlens_q, cu_seqlens_k, sink),
        (max_seqlen_q, max_seqlen_k, causal, window, scale, softcap, deterministic, backend),
    )
    run = _remembered.recall(kind)
    if run is None:
        p = _prepare(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=causal, window=window, scale=scale,
            softcap=softcap, sink=sink, deterministic=deterministic,
        )  # fmt: skip
        run = _remembered.keep(
            kind, _forward, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, sink, *p.flags,
            registry.choose(p.call, backend),
        )  # fmt: skip
    out, lse = run(q, k, v, cu_seqlens_q, cu_seqlens_k, sink)
    return (out, lse) if return_lse else out


def attention_varlen_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    window: Window = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    deterministic: bool | None = None,
    grad_lse: Tensor | None = None,
    need_sink_grad: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, ...]:
    """The gradients ``(dq, dk, dv)`` of `attention_varlen`, and ``dsink`` after them with ``need_sink_grad``."""
    p = _prepare_backward(
        grad_out, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=causal,
        window=window, scale=scale, softcap=softcap, sink=sink, deterministic=deterministic, grad_lse=grad_lse,
        need_sink_grad=need_sink_grad,
    )  # fmt: skip
    dq, dk, dv, dsink = _backward(
        grad_out, grad_lse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, sink, *p.flags,
        need_sink_grad, registry.choose(p.call, backend),
    )  # fmt: skip
    return (dq, dk, dv, dsink) if need_sink_grad else (dq, dk, dv)


def attention_varlen_call(*args: Any, **kwargs: Any) -> registry.Call:
    """Check the arguments of `attention_varlen` and describe the call to the backends."""
    return _prepare(*args, **kwargs).call


def attention_varlen_backward_call(*args: Any, **kwargs: Any) -> registry.Call:
    """Check the arguments of `attention_varlen_backward` and describe the call to the backends."""
    return _prepare_backward(*args, **kwargs).call


class _Prepared(NamedTuple):
    call: registry.Call
    flags: Flags


def _prepare(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any, *,
    causal: bool = False, window: Window = None, scale: float | None = None, softcap: float | None = None,
    sink: Any = None, deterministic: bool | None = None, op: str = "attention_varlen",
) -> _Prepared:  # fmt: skip
    _arguments.qkv(op, q, k, v, 3, LETTERS)
    _checks.shape(op, "v", v, (k.shape[0], k.shape[1], v.shape[2]), "(Tk, Hk, Dv)")
    _arguments.grouped_heads(op, q.shape[1], k.shape[1])
    for name, offsets in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        _checks.integer(op, name, offsets)
        _checks.dims(op, name, offsets, 1, "(sequences + 1,)")
        _checks.same_device(op, name, offsets, "q", q)
        if offsets.shape[0] < 1:
            raise ValueError(f"{op}: {name} has length 0; it needs the number of sequences plus 1")
    if cu_seqlens_q.shape[0] != cu_seqlens_k.shape[0]:
        raise ValueError(
            f"{op}: cu_seqlens_k has length {cu_seqlens_k.shape[0]} and cu_seqlens_q {cu_seqlens_q.shape[0]}; "
            "both need the number of sequences plus 1"
        )
    _checks.whole(op, "max_seqlen_q", max_seqlen_q, 0)
    _checks.whole(op, "max_seqlen_k", max_seqlen_k, 0)
    _arguments.per_head(op, sink, q, q.shape[1])
    flags = _arguments.flags(
        op, q, causal=causal, window=window, scale=scale, softcap=softcap, deterministic=deterministic
    )
    gradient = _checks.wants_gradient(q, k, v, sink)
    call = registry.Call(
        op,
        ("attention_varlen_forward", "attention_varlen_backward") if gradient else ("attention_varlen_forward",),
        _checks.device_type(q),
        q.dtype,
        {
            "Tq": q.shape[0], "Tk": k.shape[0], "Hq": q.shape[1], "Hk": k.shape[1], "Sq": max_seqlen_q,
            "Sk": max_seqlen_k, "D": q.shape[2], "Dv": v.shape[2],
        },
        _arguments.features(flags, sink=sink, gradient=gradient),
    )  # fmt: skip
    return _Prepared(call, flags)


def _prepare_backward(
    grad_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *positional: Any, grad_lse: Any = None,
    need_sink_grad: bool = False, **arguments: Any,
) -> _Prepared:  # fmt: skip
    op = "attention_varlen_backward"
    prepared = _prepare(q, k, v, *positional, op=op, **arguments)
    _arguments.saved_results(
        op, grad_out, grad_lse, out, lse, q, (q.shape[0], q.shape[1], v.shape[2]), (q.shape[1], q.shape[0]),
        ("(Tq, Hq, Dv)", "(Hq, Tq)"),
    )  # fmt: skip
    _arguments.needed_gradients(op, False, None, need_sink_grad, arguments.get("sink"))
    return prepared._replace(call=prepared.call._replace(launchers=(op,)))


def _validate(op: str, q: Tensor, k: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int) -> None:
    if settings.validate:
        _device_values.packed(op, "cu_seqlens_q", cu_q, q.shape[0], max_q)
        _device_values.packed(op, "cu_seqlens_k", cu_k, k.shape[0], max_k)


def _run_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    sink: Tensor | None, left: int, right: int, scale: float, softcap: float, deterministic: bool, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _validate("attention_varlen", q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return registry.launcher(backend, "attention_varlen_forward")(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, sink,
        Flags(left, right, scale, softcap, deterministic),
    )  # fmt: skip


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    rows, heads, _ = q.shape
    return q.new_empty((rows, heads, v.shape[2])), q.new_empty((heads, rows), dtype=layout.lse_dtype(q.dtype))


def _run_backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, sink: Tensor | None, left: int,
    right: int, scale: float, softcap: float, deterministic: bool, need_sink_grad: bool, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    _validate("attention_varlen_backward", q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return registry.launcher(backend, "attention_varlen_backward")(
        grad_out, grad_lse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, sink,
        Flags(left, right, scale, softcap, deterministic), need_sink_grad,
    )  # fmt: skip


def _fake_backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, sink: Tensor | None, left: int,
    right: int, scale: float, softcap: float, deterministic: bool, need_sink_grad: bool, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dsink = sink.new_empty(sink.shape) if sink is not None and need_sink_grad else q.new_empty(0)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsink


def _save(ctx: Any, args: tuple[Any, ...], outputs: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_q, cu_k, max_q, max_k, sink, *flags, backend = args
    ctx.save_for_backward(q, k, v, *outputs, cu_q, cu_k, sink)
    ctx.longest, ctx.flags, ctx.backend = (max_q, max_k), flags, backend


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, cu_q, cu_k, sink = ctx.saved_tensors
    nothing = (None,) * (8 + len(ctx.flags) + 1)
    if grad_out is None and grad_lse is None:
        return nothing
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    need_sink = ctx.needs_input_grad[7]
    dq, dk, dv, dsink = _backward(
        grad_out, grad_lse, q, k, v, out, lse, cu_q, cu_k, *ctx.longest, sink, *ctx.flags, need_sink, ctx.backend
    )
    return dq, dk, dv, *nothing[3:7], dsink if need_sink else None, *nothing[8:]


_SEQUENCES = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, Tensor? sink"
_FLAGS = "SymInt left, SymInt right, float scale, float softcap, bool deterministic"
_forward = _library.define(
    "attention_varlen_forward",
    f"(Tensor q, Tensor k, Tensor v, {_SEQUENCES}, {_FLAGS}, str backend) -> (Tensor, Tensor)",
    run=_run_forward,
    fake=_fake_forward,
    save=_save,
    backward=_differentiate,
)
_backward = _library.define(
    "attention_varlen_backward",
    f"(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_SEQUENCES}, "
    f"{_FLAGS}, bool need_sink_grad, str backend) -> (Tensor, Tensor, Tensor, Tensor)",
    run=_run_backward,
    fake=_fake_backward,
)
