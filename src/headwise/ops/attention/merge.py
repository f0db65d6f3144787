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
from headwise.backends import registry
from headwise.ops import _checks, _library


def merge_attention(
    outs: Sequence[Tensor], lses: Sequence[Tensor], *, packed: bool | None = None, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """The attention over all keys, from attention over each part of them: ``(out, lse)``.

    outs    results ``(B, Hq, Sq, Dv)``, of decoding ``(B, Hq, Dv)``, or packed ``(Tq, Hq, Dv)``, all of one shape
    lses    their log-sum-exps ``(B, Hq, Sq)``, ``(B, Hq)``, or packed ``(Hq, Tq)``
    packed  the shapes say which it is, except for 3-D outs with as many rows as heads: there it must be given

    Differentiable in outs and lses.
    """
    p = _prepare(outs, lses, packed=packed)
    out, lse = _forward(list(outs), p.lses, registry.choose(p.call, backend))
    return out, lse.transpose(0, 1).contiguous() if p.packed else lse


def merge_attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    outs: Sequence[Tensor],
    lses: Sequence[Tensor],
    out: Tensor,
    lse: Tensor,
    *,
    packed: bool | None = None,
    backend: str | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients ``(douts, dlses)`` of `merge_attention`, given its results ``out`` and ``lse``."""
    p = _prepare_backward(grad_out, grad_lse, outs, lses, out, lse, packed=packed)
    turned = [x.transpose(0, 1) if p.packed else x for x in (grad_lse, lse)]
    grads = _backward(grad_out, turned[0], list(outs), p.lses, out, turned[1], registry.choose(p.call, backend))
    douts, dlses = grads[: len(outs)], grads[len(outs) :]
    return douts, [x.transpose(0, 1).contiguous() if p.packed else x for x in dlses]


def merge_attention_backward_call(*args: Any, **kwargs: Any) -> registry.Call:
    """Check the arguments of `merge_attention_backward` and describe the call to the backends."""
    return _prepare_backward(*args, **kwargs).call


def merge_attention_call(outs: Any, lses: Any, *, packed: bool | None = None) -> registry.Call:
    """Check the arguments of `merge_attention` and describe the call to the backends."""
    return _prepare(outs, lses, packed=packed).call


class _Prepared(NamedTuple):
    call: registry.Call
    lses: list[Tensor]  # each of the shape of its out without the last dim
    packed: bool


def _prepare_backward(
    grad_out: Any, grad_lse: Any, outs: Any, lses: Any, out: Any, lse: Any, *, packed: bool | None = None
) -> _Prepared:
    op = "merge_attention_backward"
    prepared = _prepare(outs, lses, packed=packed, op=op)
    for name, x, like, of in (
        ("grad_out", grad_out, outs[0], "outs[0]"),
        ("out", out, outs[0], "outs[0]"),
        ("grad_lse", grad_lse, lses[0], "lses[0]"),
        ("lse", lse, lses[0], "lses[0]"),
    ):
        _checks.floating(op, name, x)
        _checks.shape(op, name, x, like.shape, f"the shape of {of}")
        _checks.same_dtype(op, name, x, of, like)
        _checks.same_device(op, name, x, of, like)
    return prepared._replace(call=prepared.call._replace(launchers=(op,)))


def _prepare(outs: Any, lses: Any, *, packed: bool | None, op: str = "merge_attention") -> _Prepared:
    for name, parts in (("outs", outs), ("lses", lses)):
        if not isinstance(parts, (list, tuple)):
            raise TypeError(f"{op}: {name} is a {type(parts).__name__}; it needs to be a list or tuple of tensors")
    if not outs:
        raise ValueError(f"{op}: outs is empty; it needs at least one part")
    if len(outs) != len(lses):
        raise ValueError(f"{op}: lses has {len(lses)} parts and outs {len(outs)}; they need to be as many")
    first = outs[0]
    for i, out in enumerate(outs):
        _checks.floating(op, f"outs[{i}]", out)
        if out.dim() not in (3, 4):
            raise ValueError(
                f"{op}: outs[{i}] has shape {_checks.shape_of(out)}; it needs (B, Hq, Sq, Dv), (B, Hq, Dv) or (Tq, Hq, Dv)"
            )
        _checks.shape(op, f"outs[{i}]", out, first.shape, "the shape of outs[0]")
        _checks.same_dtype(op, f"outs[{i}]", out, "outs[0]", first)
        _checks.same_device(op, f"outs[{i}]", out, "outs[0]", first)
    _checks.tensor(op, "lses[0]", lses[0])
    packed = _is_packed(op, first, lses[0], packed)
    wanted = (first.shape[1], first.shape[0]) if packed else tuple(first.shape[:-1])
    for i, lse in enumerate(lses):
        _checks.floating(op, f"lses[{i}]", lse)
        _checks.shape(op, f"lses[{i}]", lse, wanted, "(Hq, Tq)" if packed else "the shape of outs without its last dim")
        if lse.dtype != layout.lse_dtype(first.dtype):
            raise TypeError(
                f"{op}: lses[{i}] has dtype {_checks.short(lse.dtype)}; it needs "
                f"{_checks.short(layout.lse_dtype(first.dtype))}"
            )
        _checks.same_device(op, f"lses[{i}]", lse, "outs[0]", first)
    gradient = _checks.wants_gradient(*outs, *lses)
    call = registry.Call(
        op,
        ("merge_attention", "merge_attention_backward") if gradient else ("merge_attention",),
        _checks.device_type(first),
        first.dtype,
        {"Dv": first.shape[-1], "parts": len(outs)},
    )
    return _Prepared(call, [lse.transpose(0, 1) for lse in lses] if packed else list(lses), packed)


def _is_packed(op: str, out: Tensor, lse: Tensor, packed: bool | None) -> bool:
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


def _run_forward(outs: list[Tensor], lses: list[Tensor], backend: str) -> tuple[Tensor, Tensor]:
    return registry.launcher(backend, "merge_attention")(outs, lses)


def _fake_forward(outs: list[Tensor], lses: list[Tensor], backend: str) -> tuple[Tensor, Tensor]:
    return outs[0].new_empty(outs[0].shape), lses[0].new_empty(lses[0].shape)


def _run_backward(
    grad_out: Tensor, grad_lse: Tensor, outs: list[Tensor], lses: list[Tensor], out: Tensor, lse: Tensor, backend: str
) -> list[Tensor]:
    return registry.launcher(backend, "merge_attention_backward")(grad_out, grad_lse, outs, lses, out, lse)


def _fake_backward(
    grad_out: Tensor, grad_lse: Tensor, outs: list[Tensor], lses: list[Tensor], out: Tensor, lse: Tensor, backend: str
) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (*outs, *lses)]


def _save(ctx: Any, inputs: tuple[list[Tensor], list[Tensor], str], output: tuple[Tensor, Tensor]) -> None:
    outs, lses, ctx.backend = inputs
    ctx.parts = len(outs)
    ctx.save_for_backward(*outs, *lses, *output)


def _differentiate(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[list[Tensor], list[Tensor], None]:
    *parts, out, lse = ctx.saved_tensors
    outs, lses = parts[: ctx.parts], parts[ctx.parts :]
    grads = _backward(grad_out, grad_lse, outs, lses, out, lse, ctx.backend)
    return grads[: ctx.parts], grads[ctx.parts :], None


_forward = _library.define_with_lists(
    "merge_attention",
    "(Tensor[] outs, Tensor[] lses, str backend) -> (Tensor, Tensor)",
    run=_run_forward,
    fake=_fake_forward,
    save=_save,
    backward=_differentiate,
)
_backward = _library.define_with_lists(
    "merge_attention_backward",
    "(Tensor grad_out, Tensor grad_lse, Tensor[] outs, Tensor[] lses, Tensor out, Tensor lse, str backend) -> Tensor[]",
    run=_run_backward,
    fake=_fake_backward,
)
