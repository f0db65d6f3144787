"""The attention probabilities themselves: for looking at, for distillation, for losses on attention.

    p_ij = D_ij exp(s_ij - lse_i),  with D, s and lse as in `attention`; masked and dropped entries are exactly 0

The result is as large as the scores, so name the ``rows`` you want where S is long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headwise.ops import _autocast, _checks, _device_values
from headwise.ops._op import Described, Op, Saved
from headwise.ops.attention import _arguments
from headwise.ops.attention._arguments import Probs, ProbsBackward, Window
from headwise.ops.attention.dense import fake_bias_and_sink


def attention_probs(
    q: Tensor, k: Tensor, *, rows: Sequence[int] | Tensor | None = None, causal: bool = False, window: Window = None,
    mask: Tensor | None = None, bias: Tensor | None = None, kv_lengths: Tensor | None = None,
    q_lengths: Tensor | None = None, kv_starts: Tensor | None = None, scale: float | None = None,
    softcap: float | None = None, sink: Tensor | None = None, dropout: float = 0,
    dropout_seed: int | Tensor | None = None, backend: str | None = None,
) -> Tensor:  # fmt: skip
    """The softmax rows of q ``(B, Hq, Sq, D)`` over k ``(B, Hk, Sk, D)``: ``(B, Hq, Sq, Sk)``, of q's dtype.

    rows         only these query rows, in this order, negative ones counted from the end: ``(B, Hq, len(rows), Sk)``;
                 a list of ints, or a 1-D int tensor (a row that does not exist then gives NaN)
    other flags  as in `attention`, which takes ``mask`` and ``bias`` over all Sq rows here too

    A query that may see nothing gives a row of zeros. With a sink the rows sum to less than 1. With the dropout and the
    seed of an `attention` these are its weights: zeros where it dropped. Differentiable in q, k, bias and sink.

    >>> q, k = torch.randn(2, 1, 4, 6, 32)
    >>> probs = hw.attention_probs(q, k, rows=[-1], causal=True)
    >>> probs.shape, bool(torch.isclose(probs.sum(), torch.tensor(4.0)))
    (torch.Size([1, 4, 1, 6]), True)
    """
    seed = _arguments.seed_beside("attention_probs", q, dropout, dropout_seed) if dropout else None
    probs: Tensor = _forward(
        (q, k, _row_indices("attention_probs", rows, q), mask, bias, sink, kv_lengths, q_lengths, kv_starts, seed),
        (causal, window, scale, softcap, dropout),
        backend,
    )
    return probs


def attention_probs_backward(
    grad: Tensor, probs: Tensor, q: Tensor, k: Tensor, *, rows: Sequence[int] | Tensor | None = None,
    causal: bool = False, window: Window = None, mask: Tensor | None = None, bias: Tensor | None = None,
    kv_lengths: Tensor | None = None, q_lengths: Tensor | None = None, kv_starts: Tensor | None = None,
    scale: float | None = None, softcap: float | None = None, sink: Tensor | None = None, dropout: float = 0,
    dropout_seed: int | Tensor | None = None, need_bias_grad: bool = False, need_sink_grad: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients ``(dq, dk)`` of `attention_probs`, given its result ``probs`` and the same flags.

    ``need_bias_grad`` and ``need_sink_grad`` append ``dbias`` and ``dsink``, in that order. ``dropout`` needs
    the ``dropout_seed`` of the forward.

    >>> q, k = torch.randn(2, 1, 4, 6, 32)
    >>> probs = hw.attention_probs(q, k)
    >>> dq, dk = hw.attention_probs_backward(torch.randn_like(probs), probs, q, k)
    """
    indices = _row_indices("attention_probs_backward", rows, q)
    seed = _arguments.given_seed("attention_probs_backward", q, dropout, dropout_seed) if dropout else None
    grads = _backward(
        (grad, probs, q, k, indices, mask, bias, sink, kv_lengths, q_lengths, kv_starts, seed),
        (causal, window, scale, softcap, dropout, need_bias_grad, need_sink_grad),
        backend,
    )
    return _arguments.gradients_asked_for(grads, bias, need_bias_grad, need_sink_grad)


def _check(
    op: str, q: Any, k: Any, rows: Any, mask: Any, bias: Any, sink: Any, kv_lengths: Any, q_lengths: Any, kv_starts: Any,
    seed: Any, causal: bool, window: Window, scale: float | None, softcap: float | None, dropout: float,
) -> Probs:  # fmt: skip
    _arguments.qkv(op, q, k, None, 4, ("(B, Hq, Sq, D)", "(B, Hk, Sk, D)", ""))
    batch, heads, _, head_dim = q.shape
    _checks.shape(op, "k", k, (batch, k.shape[1], k.shape[2], head_dim), "(B, Hk, Sk, D)")
    _arguments.grouped_heads(op, heads, k.shape[1])
    rows = _row_indices(op, rows, q)
    if rows is not None:
        _checks.integer(op, "rows", rows)
        _checks.dims(op, "rows", rows, 1, "(rows,)")
        if not hasattr(q, "headwise_device"):
            _checks.same_device(op, "rows", rows, "q", q)
    _arguments.optional_inputs(op, q, k, mask, bias, sink, kv_lengths, q_lengths, kv_starts)
    _arguments.check_seed(op, seed, q)
    flags = _arguments.flags(op, q, causal, window, scale, softcap, dropout=dropout)
    return Probs(q, k, rows, mask, bias, sink, kv_lengths, q_lengths, kv_starts, flags, seed)


def _check_backward(op: str, grad: Any, probs: Any, q: Any, k: Any, *others: Any) -> ProbsBackward:
    *others, need_bias_grad, need_sink_grad = others  # type: ignore[assignment]
    forward = _check(op, q, k, *others)
    count = q.shape[2] if forward.rows is None else forward.rows.shape[0]
    for name, x in (("grad", grad), ("probs", probs)):
        _checks.floating(op, name, x)
        _checks.shape(op, name, x, (q.shape[0], q.shape[1], count, k.shape[2]), "(B, Hq, rows, Sk)")
        _checks.same_dtype(op, name, x, "q", q)
        _checks.same_device(op, name, x, "q", q)
    _arguments.needed_gradients(op, need_bias_grad, forward.bias, need_sink_grad, forward.sink)
    return ProbsBackward(grad, probs, forward, need_bias_grad, need_sink_grad)


def _row_indices(op: str, rows: Any, q: Any) -> Tensor | None:
    """``rows`` as a tensor beside q."""
    if rows is None or not isinstance(q, Tensor) or q.dim() != 4:  # the check will complain
        return rows
    if isinstance(rows, Tensor):
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


def _describe(args: Probs) -> Described:
    (batch, heads, length, head_dim), (_, key_heads, keys, _) = args.q.shape, args.k.shape
    sizes = {"B": batch, "Hq": heads, "Hk": key_heads, "Sq": length, "Sk": keys, "D": head_dim}
    rows = () if args.rows is None else ("rows",)
    return Described(args.q, sizes, (*rows, *_arguments.features(args)))


def _validate(args: Probs) -> None:
    op, queries, keys = "attention_probs", args.q.shape[2], args.k.shape[2]
    for name, most in (("kv_lengths", keys), ("q_lengths", queries), ("kv_starts", keys)):
        _device_values.in_range(op, name, getattr(args, name), most + 1)
    if args.rows is not None:
        _device_values.rows(op, args.rows, queries)


def _fake(args: Probs) -> Tensor:
    batch, heads, length, _ = args.q.shape
    return args.q.new_empty((batch, heads, length if args.rows is None else args.rows.shape[0], args.k.shape[2]))


def _fake_backward(args: ProbsBackward) -> tuple[Tensor | None, ...]:
    q, k = args.forward.q, args.forward.k
    return q.new_empty(q.shape), k.new_empty(k.shape), *fake_bias_and_sink(args)


def _differentiate(saved: Saved, grad: Tensor) -> tuple[Any, ...]:
    need_bias, need_sink = saved.need("bias"), saved.need("sink")
    dq, dk, dbias, dsink = saved.run(_backward, ProbsBackward(grad, saved.results[0], saved.args, need_bias, need_sink))
    return dq, dk, None, None, dbias if need_bias else None, dsink if need_sink else None, None, None, None, None


_forward = Op(
    "attention_probs", Probs, check=_check, describe=_describe, validate=_validate, fake=_fake,
    backward=_differentiate, backward_launchers=("attention_probs_backward",),
    saves=("q", "k", "rows", "mask", "bias", "sink", "kv_lengths", "q_lengths", "kv_starts", "dropout_seed"),
    saves_results=(0,),
    autocast=_autocast.Rule(_autocast.low, operands=2),
)  # fmt: skip
_backward = Op(
    "attention_probs_backward", ProbsBackward, check=_check_backward, describe=lambda args: _describe(args.forward),
    validate=lambda args: _validate(args.forward), fake=_fake_backward, returns="(Tensor, Tensor, Tensor, Tensor)",
)  # fmt: skip
