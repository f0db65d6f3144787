"""Merging of partial attention results over disjoint sets of keys.

    lse = log sum_i exp(lse_i)        out = sum_i exp(lse_i - lse) out_i

A part that saw nothing (``lse_i = -inf``) weighs nothing; if no part saw anything the row is empty. Associative, so any
tree of merges gives the same attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from headwise import layout
from headwise.ops import _checks
from headwise.ops._op import Described, Op, Saved


def merge_attention(
    outs: Sequence[Tensor], lses: Sequence[Tensor], *, packed: bool | None = None, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """The attention over all keys, from attention over each part of them: ``(out, lse)``.

    outs    results ``(B, Hq, Sq, Dv)``, of decoding ``(B, Hq, Dv)``, or packed ``(Tq, Hq, Dv)``, all of one shape
    lses    their log-sum-exps ``(B, Hq, Sq)``, ``(B, Hq)``, or packed ``(Hq, Tq)``
    packed  the shapes say which it is, except for 3-D outs with as many rows as heads: there it must be given

    Differentiable in outs and lses.

    >>> q, k, v = torch.randn(3, 1, 4, 100, 32)
    >>> slices = slice(60), slice(60, 100)
    >>> parts = [hw.attention(q, k[:, :, part], v[:, :, part], return_lse=True) for part in slices]
    >>> out, lse = hw.merge_attention(*zip(*parts))
    >>> torch.allclose(out, hw.attention(q, k, v), atol=1e-5)
    True
    """
    check_parts("merge_attention", outs, lses)
    turn = is_packed("merge_attention", outs[0], lses[0], packed)
    out, lse = _forward((*outs, *_turned(lses, turn)), (turn,), backend)
    return out, lse.transpose(0, 1).contiguous() if turn else lse


def merge_attention_backward(
    grad_out: Tensor, grad_lse: Tensor, outs: Sequence[Tensor], lses: Sequence[Tensor], out: Tensor, lse: Tensor, *,
    packed: bool | None = None, backend: str | None = None,
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """The gradients ``(douts, dlses)`` of `merge_attention`, given its results ``out`` and ``lse``.

    >>> outs, lses = list(torch.randn(2, 1, 4, 10, 32)), list(torch.randn(2, 1, 4, 10))
    >>> out, lse = hw.merge_attention(outs, lses)
    >>> dout, dlse = torch.ones_like(out), torch.zeros_like(lse)
    >>> douts, dlses = hw.merge_attention_backward(dout, dlse, outs, lses, out, lse)
    """
    check_parts("merge_attention_backward", outs, lses)
    turn = is_packed("merge_attention_backward", outs[0], lses[0], packed)
    (grad_lse, lse, *lses), count = _turned((grad_lse, lse, *lses), turn), len(outs)
    grads = _backward((grad_out, grad_lse, *outs, *lses, out, lse), (turn,), backend)
    return list(grads[:count]), [x.transpose(0, 1).contiguous() if turn else x for x in grads[count:]]


class Merge(NamedTuple):
    outs: list[Tensor]
    lses: list[Tensor]  # each of the shape of its out without the last dim


class MergeBackward(NamedTuple):
    grad_out: Tensor
    grad_lse: Tensor
    outs: list[Tensor]
    lses: list[Tensor]
    out: Tensor
    lse: Tensor


def check_parts(op: str, outs: Any, lses: Any) -> None:
    """Two lists of tensors, as many in each."""
    for name, parts in (("outs", outs), ("lses", lses)):
        if not isinstance(parts, (list, tuple)):
            raise TypeError(f"{op}: {name} is a {type(parts).__name__}; it needs to be a list or tuple of tensors")
    if not outs:
        raise ValueError(f"{op}: outs is empty; it needs at least one part")
    if len(outs) != len(lses):
        raise ValueError(f"{op}: lses has {len(lses)} parts and outs {len(outs)}; they need to be as many")
    for i, out in enumerate(outs):
        _checks.floating(op, f"outs[{i}]", out)
        if out.dim() not in (3, 4):
            raise ValueError(
                f"{op}: outs[{i}] has shape {_checks.shape_of(out)}; it needs (B, Hq, Sq, Dv), (B, Hq, Dv) or (Tq, Hq, Dv)"
            )
    for i, lse in enumerate(lses):
        _checks.floating(op, f"lses[{i}]", lse)


def is_packed(op: str, out: Tensor, lse: Tensor, packed: bool | None) -> bool:
    if out.dim() == 4:
        return False
    if packed is not None:
        _checks.boolean(op, "packed", packed)
        return packed
    if out.shape[0] != out.shape[1]:
        return tuple(lse.shape) == (out.shape[1], out.shape[0])
    raise ValueError(
        f"{op}: outs have shape {_checks.shape_of(out)}, as many rows as heads, so the lses could be (Hq, Tq) of a packed "
        "batch or (B, Hq) of decoding; it needs packed=True or packed=False"
    )


def _turned(lses: Sequence[Any], packed: bool) -> list[Any]:
    """The lses of a packed batch, (Hq, Tq), as (Tq, Hq)."""
    return [x.transpose(0, 1) if packed and isinstance(x, Tensor) and x.dim() == 2 else x for x in lses]


def _check(op: str, *tensors_and_packed: Any) -> Merge:
    *parts, packed = tensors_and_packed
    count = len(parts) // 2
    outs, lses = parts[:count], parts[count:]
    for i, out in enumerate(outs):
        _checks.like(op, f"outs[{i}]", out, "outs[0]", outs[0])
    for i, lse in enumerate(lses):
        _check_lse(op, f"lses[{i}]", lse, outs[0], packed)
    return Merge(outs, lses)


def _check_lse(op: str, name: str, lse: Any, out: Tensor, packed: bool) -> None:
    _checks.floating(op, name, lse)
    if lse.shape != out.shape[:-1]:
        # What the user gave: the lses of a packed batch were turned.
        shapes = [tuple(reversed(s)) if packed else tuple(s) for s in (lse.shape, out.shape[:-1])]
        letters = "(Hq, Tq)" if packed else "the shape of outs without its last dim"
        got, wanted = map(_checks.tuple_text, shapes)
        raise ValueError(f"{op}: {name} has shape {got}; it needs {wanted} = {letters}")
    _checks.dtype(op, name, lse, layout.statistics_dtype(out.dtype))
    _checks.same_device(op, name, lse, "outs[0]", out)


def _check_backward(op: str, grad_out: Any, grad_lse: Any, *others: Any) -> MergeBackward:
    *parts, out, lse, packed = others
    forward = _check(op, *parts, packed)
    for name, x in (("grad_out", grad_out), ("out", out)):
        _checks.like(op, name, x, "outs[0]", forward.outs[0])
    for name, x in (("grad_lse", grad_lse), ("lse", lse)):
        _check_lse(op, name, x, forward.outs[0], packed)
    return MergeBackward(grad_out, grad_lse, *forward, out, lse)


def _describe(args: Merge | MergeBackward) -> Described:
    return Described(args.outs[0], {"Dv": args.outs[0].shape[-1], "parts": len(args.outs)})


def _fake(args: Merge) -> tuple[Tensor, Tensor]:
    return args.outs[0].new_empty(args.outs[0].shape), args.lses[0].new_empty(args.lses[0].shape)


def _fake_backward(args: MergeBackward) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (*args.outs, *args.lses)]


def _differentiate(saved: Saved, grad_out: Tensor | None, grad_lse: Tensor | None) -> list[Tensor]:
    out, lse = saved.results
    grad_out = out.new_zeros(out.shape) if grad_out is None else grad_out
    grad_lse = lse.new_zeros(lse.shape) if grad_lse is None else grad_lse
    return list(saved.run(_backward, MergeBackward(grad_out, grad_lse, saved.args.outs, saved.args.lses, out, lse)))


_forward = Op(
    "merge_attention", Merge, check=_check, describe=_describe, fake=_fake, returns="(Tensor, Tensor)",
    backward=_differentiate, backward_launchers=("merge_attention_backward",), saves=("outs", "lses"),
    saves_results=(0, 1),
)  # fmt: skip
_backward = Op(
    "merge_attention_backward", MergeBackward, check=_check_backward, describe=_describe, fake=_fake_backward,
    returns="Tensor[]",
)  # fmt: skip
