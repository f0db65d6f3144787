"""Attention over a packed batch: sequences of different lengths laid end to end, no padding.

Sequence ``b`` owns the rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b+1]`` of q and the rows ``cu_seqlens_k[b]`` to
``cu_seqlens_k[b+1]`` of k and v, and attends to nothing else. Inside a sequence everything is as in `attention`.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, Unpack, overload

from torch import Tensor

from headwise import layout
from headwise.ops import _autocast, _checks, _device_values
from headwise.ops._op import Described, Op
from headwise.ops.attention import _arguments
from headwise.ops.attention._arguments import Attention, AttentionBackward, Packing, Window
from headwise.ops.attention.dense import GRADIENTS, INPUTS, differentiate, fake_bias_and_sink

LETTERS = ("(Tq, Hq, D)", "(Tk, Hk, D)", "(Tk, Hk, Dv)")
_NOT_PACKED = (None, None, None)  # lengths per batch


class Options(_arguments.CommonOptions, _arguments.DropoutOptions, total=False):
    """For the overloads of `attention_varlen`."""

    causal: bool
    deterministic: bool


@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    *, return_lse: Literal[False] = False, **options: Unpack[Options],
) -> Tensor: ...  # fmt: skip
@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    *, return_lse: Literal[True], **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    *, return_lse: bool, **options: Unpack[Options],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    *, causal: bool = False, window: Window = None, scale: float | None = None, softcap: float | None = None,
    sink: Tensor | None = None, dropout: float = 0, dropout_seed: int | Tensor | None = None,
    deterministic: bool = True, return_lse: bool = False, backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of packed q ``(Tq, Hq, D)`` over k ``(Tk, Hk, D)`` and v ``(Tk, Hk, Dv)``: out ``(Tq, Hq, Dv)``.

    cu_seqlens_q, cu_seqlens_k  ``(sequences + 1,)`` ints: 0, then where each sequence ends
    max_seqlen_q, max_seqlen_k  the longest sequence, or more; they size the launch
    other flags                 as in `attention`; positions count inside each sequence, also for dropout, which drops
                                what it drops of the padded batch
    return_lse                  also return the lse, float32 ``(Hq, Tq)``

    Rows past the last sequence give zeros. Offsets that make no sense give NaN. Differentiable in q, k, v, sink.

    >>> q, k, v = torch.randn(3, 8, 4, 32)  # sequences of 3 and 5 tokens, end to end
    >>> ends = torch.tensor([0, 3, 8], dtype=torch.int32)
    >>> hw.attention_varlen(q, k, v, ends, ends, 5, 5, causal=True).shape
    torch.Size([8, 4, 32])
    """
    seed = _arguments.seed_beside("attention_varlen", q, dropout, dropout_seed) if dropout else None
    results = _forward(
        (q, k, v, None, None, sink, *_NOT_PACKED, cu_seqlens_q, cu_seqlens_k, seed),
        (max_seqlen_q, max_seqlen_k, causal, window, scale, softcap, deterministic, dropout),
        backend,
        return_lse,
    )
    return results if return_lse else results[0]


def attention_varlen_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, *, causal: bool = False, window: Window = None,
    scale: float | None = None, softcap: float | None = None, sink: Tensor | None = None, dropout: float = 0,
    dropout_seed: int | Tensor | None = None, deterministic: bool = True, grad_lse: Tensor | None = None,
    need_sink_grad: bool = False, backend: str | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients ``(dq, dk, dv)`` of `attention_varlen`, and ``dsink`` after them with ``need_sink_grad``.

    ``dropout`` needs the ``dropout_seed`` of the forward.

    >>> q, k, v = torch.randn(3, 8, 4, 32)
    >>> ends = torch.tensor([0, 3, 8], dtype=torch.int32)
    >>> out, lse = hw.attention_varlen(q, k, v, ends, ends, 5, 5, return_lse=True)
    >>> grad = torch.ones_like(out)
    >>> dq, dk, dv = hw.attention_varlen_backward(grad, q, k, v, out, lse, ends, ends, 5, 5)
    >>> dq.shape
    torch.Size([8, 4, 32])
    """
    seed = _arguments.given_seed("attention_varlen_backward", q, dropout, dropout_seed) if dropout else None
    grads = _backward(
        (grad_out, grad_lse, out, lse, q, k, v, None, None, sink, *_NOT_PACKED, cu_seqlens_q, cu_seqlens_k, seed),
        (max_seqlen_q, max_seqlen_k, causal, window, scale, softcap, deterministic, dropout, False, need_sink_grad),
        backend,
    )
    return _arguments.gradients_asked_for(grads, None, False, need_sink_grad)


def _check(
    op: str, q: Any, k: Any, v: Any, mask: None, bias: None, sink: Any, kv_lengths: None, q_lengths: None,
    kv_starts: None, cu_seqlens_q: Any, cu_seqlens_k: Any, seed: Any, max_seqlen_q: Any, max_seqlen_k: Any,
    causal: bool, window: Window, scale: float | None, softcap: float | None, deterministic: bool, dropout: float,
    unrounded: bool = False,
) -> Attention:  # fmt: skip
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
    _arguments.check_seed(op, seed, q)
    flags = _arguments.flags(op, q, causal, window, scale, softcap, deterministic, dropout, unrounded)
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return Attention(q, k, v, None, None, sink, *_NOT_PACKED, packing, flags, dropout_seed=seed)


def _check_backward(
    op: str, grad_out: Any, grad_lse: Any, out: Any, lse: Any, q: Any, k: Any, v: Any, *others: Any
) -> AttentionBackward:
    *others, need_sink_grad = others  # type: ignore[assignment]
    forward = _check(op, q, k, v, *others)
    shape = (q.shape[0], q.shape[1], v.shape[2])
    _arguments.saved_results(
        op, grad_out, grad_lse, out, lse, q, shape, (shape[1], shape[0]), ("(Tq, Hq, Dv)", "(Hq, Tq)")
    )
    _arguments.needed_gradients(op, False, None, need_sink_grad, forward.sink)
    return AttentionBackward(grad_out, grad_lse, out, lse, forward, False, need_sink_grad)


def _describe(args: Attention) -> Described:
    (tokens, heads, head_dim), (keys, key_heads, value_dim) = args.q.shape, args.v.shape
    assert args.packing is not None
    sizes = {
        "Tq": tokens, "Tk": keys, "Hq": heads, "Hk": key_heads, "Sq": args.packing.max_q, "Sk": args.packing.max_k,
        "D": head_dim, "Dv": value_dim,
    }  # fmt: skip
    return Described(args.q, sizes, _arguments.features(args))


def _validate(args: Attention) -> None:
    assert args.packing is not None
    cu_q, cu_k, max_q, max_k = args.packing
    _device_values.packed("attention_varlen", "cu_seqlens_q", cu_q, args.q.shape[0], max_q)
    _device_values.packed("attention_varlen", "cu_seqlens_k", cu_k, args.k.shape[0], max_k)


def _fake(args: Attention) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = args.q.shape
    lse = args.q.new_empty((heads, tokens), dtype=layout.statistics_dtype(args.q.dtype))
    return args.q.new_empty((tokens, heads, args.v.shape[2]), dtype=args.flags.result_dtype(args.q.dtype)), lse


def _fake_backward(args: AttentionBackward) -> tuple[Tensor | None, ...]:
    dtype = args.forward.flags.result_dtype(args.forward.q.dtype)
    dq, dk, dv = (x.new_empty(x.shape, dtype=dtype) for x in (args.forward.q, args.forward.k, args.forward.v))
    return dq, dk, dv, *fake_bias_and_sink(args)


_backward = Op(
    "attention_varlen_backward", AttentionBackward, launcher="attention_backward", check=_check_backward,
    describe=lambda args: _describe(args.forward), validate=lambda args: _validate(args.forward), fake=_fake_backward,
    returns=GRADIENTS,
)  # fmt: skip
_forward = Op(
    "attention_varlen_forward", Attention, public="attention_varlen", launcher="attention_forward", check=_check,
    describe=_describe, validate=_validate, fake=_fake, returns="(Tensor, Tensor)",
    backward=functools.partial(differentiate, _backward), backward_launchers=("attention_backward",), saves=INPUTS,
    saves_results=(0, 1), keep="with_lse",
    autocast=_autocast.Rule(_autocast.low, operands=3),
)  # fmt: skip
