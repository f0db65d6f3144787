"""Rotary position embedding: pairs of elements turned by angles of their token, and its backward.

    y_i = x_i cos_pi - x_j sin_pi        p: the position of the token
    y_j = x_j cos_pi + x_i sin_pi        (i, j): (i, i + R), or interleaved (2 i, 2 i + 1), for i < R

The gradient is the inverse rotation: the same with -sin. Su et al., "RoFormer: Enhanced Transformer with Rotary Position
Embedding", 2021 (arXiv 2104.09864).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from headwise import layout
from headwise.ops import _autocast, _checks, _device_values
from headwise.ops._op import Described, Op, Saved

Pair = tuple[Tensor, Tensor]


@overload
def rope(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None, interleaved: bool = False, *,
    backend: str | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def rope(
    x: Pair, cos: Tensor, sin: Tensor, positions: Tensor | None = None, interleaved: bool = False, *,
    backend: str | None = None,
) -> Pair: ...  # fmt: skip
def rope(
    x: Tensor | Pair, cos: Tensor, sin: Tensor, positions: Tensor | None = None, interleaved: bool = False, *,
    backend: str | None = None,
) -> Tensor | Pair:  # fmt: skip
    """The first 2 R elements of the last dim of ``x`` rotated by the angles of each token; the rest pass through.

    x            ``(B, H, S, D)``, or packed ``(T, H, D)``; any strides. A pair ``(q, k)``, whose numbers of heads may
                 differ, is rotated in one launch and gives a pair.
    cos, sin     ``(P, R)`` float32, row p for position p: ``torch.outer(torch.arange(P), inv_freq)`` and its cos and sin,
                 computed in float32. They get no gradient.
    positions    whole numbers ``(B, S)`` or ``(S,)``, packed ``(T,)``. None counts from 0 over S or T: a packed batch of
                 several documents wants positions that begin anew in each.
    interleaved  pairs are neighbours (2 i, 2 i + 1) in place of (i, i + R)

    A position outside ``0 … P - 1`` gives a token of NaN, in all of its D elements. The arithmetic is float32 at least and
    rounds once. The result lies in memory as x does: heads inside where x is a transposed ``(B, S, H, D)``. Differentiable
    in x.

    >>> angles = torch.outer(torch.arange(128.0), 10000 ** (-torch.arange(32) / 32))
    >>> q, k = torch.randn(1, 8, 100, 64), torch.randn(1, 2, 100, 64)
    >>> q, k = hw.rope((q, k), angles.cos(), angles.sin())
    >>> k.shape
    torch.Size([1, 2, 100, 64])
    """
    xs = _as_list("rope", "x", x)
    ys = _forward((*xs, cos, sin, positions), (interleaved,), backend)
    return ys[0] if isinstance(x, Tensor) else tuple(ys)


@overload
def rope_backward(
    grad: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None, interleaved: bool = False, *,
    backend: str | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def rope_backward(
    grad: Pair, cos: Tensor, sin: Tensor, positions: Tensor | None = None, interleaved: bool = False, *,
    backend: str | None = None,
) -> Pair: ...  # fmt: skip
def rope_backward(
    grad: Tensor | Pair, cos: Tensor, sin: Tensor, positions: Tensor | None = None, interleaved: bool = False, *,
    backend: str | None = None,
) -> Tensor | Pair:  # fmt: skip
    """The gradient of x, given the gradient ``grad`` of the output, or of a pair, given a pair: the inverse rotation.

    >>> angles = torch.outer(torch.arange(128.0), 10000 ** (-torch.arange(32) / 32))
    >>> hw.rope_backward(torch.randn(1, 8, 100, 64), angles.cos(), angles.sin()).shape
    torch.Size([1, 8, 100, 64])
    """
    grads = _as_list("rope_backward", "grad", grad)
    found = _backward((*grads, cos, sin, positions), (interleaved,), backend)
    return found[0] if isinstance(grad, Tensor) else tuple(found)


class Rope(NamedTuple):
    xs: list[Tensor]  # one or two; of the backward, their gradients
    cos: Tensor
    sin: Tensor
    positions: Tensor | None
    interleaved: bool


def _as_list(op: str, name: str, x: Any) -> tuple[Any, ...]:
    if not isinstance(x, (tuple, list)):
        return (x,)
    if len(x) != 2:
        raise ValueError(f"{op}: {name} is a {type(x).__name__} of {len(x)}; it needs to be a tensor or a pair (q, k)")
    return tuple(x)


def _check(op: str, *given: Any) -> Rope:
    *xs, cos, sin, positions, interleaved = given
    name = "grad" if op == "rope_backward" else "x"
    names = [name] if len(xs) == 1 else [f"{name}[{i}]" for i in range(len(xs))]
    for one, x in zip(names, xs, strict=True):
        _check_x(op, one, x, names[0], xs[0])
    for one, table in (("cos", cos), ("sin", sin)):
        _check_table(op, one, table, names[0], xs[0])
    _checks.shape(op, "sin", sin, tuple(cos.shape), "the shape of cos")
    _checks.same_dtype(op, "sin", sin, "cos", cos)
    _check_positions(op, positions, names[0], xs[0], cos.shape[0])
    _checks.boolean(op, "interleaved", interleaved)
    return Rope(xs, cos, sin, positions, interleaved)


def _check_x(op: str, name: str, x: Any, first_name: str, first: Tensor) -> None:
    _checks.floating(op, name, x)
    if x.dim() not in (3, 4):
        raise ValueError(f"{op}: {name} has shape {_checks.shape_of(x)}; it needs (B, H, S, D), or packed (T, H, D)")
    if x is first:
        return
    wanted = (first.shape[0], x.shape[1], *first.shape[2:])
    _checks.shape(op, name, x, wanted, f"the shape of {first_name}, but for the number of heads")
    _checks.same_dtype(op, name, x, first_name, first)
    _checks.same_device(op, name, x, first_name, first)


def _check_table(op: str, name: str, table: Any, x_name: str, x: Tensor) -> None:
    _checks.floating(op, name, table)
    _checks.dims(op, name, table, 2, "(P, R)")
    if table.dtype not in (torch.float32, layout.statistics_dtype(x.dtype)):
        raise TypeError(
            f"{op}: {name} has dtype {_checks.short(table.dtype)}; it needs float32: 16 bits do not tell far positions apart"
        )
    _checks.same_device(op, name, table, x_name, x)
    rotated, dim = 2 * table.shape[1], x.shape[-1]
    if rotated > dim:
        raise ValueError(
            f"{op}: {name} has shape {_checks.shape_of(table)}, which rotates {rotated} elements, and {x_name} has {dim}; "
            f"it needs (P, R) with R at most {dim // 2}, a column for each pair of elements"
        )
    if table.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{op}: {name} requires a gradient, and none is computed; it needs {name}.detach()")


def _check_positions(op: str, positions: Any, name: str, x: Tensor, known: int) -> None:
    tokens = tuple(x.shape[:1]) if x.dim() == 3 else (x.shape[0], x.shape[2])
    if positions is None:
        if tokens[-1] > known and x.numel() > 0:
            raise ValueError(
                f"{op}: cos has {known} rows and positions is None, so the {tokens[-1]} tokens of {name} are at 0 to "
                f"{tokens[-1] - 1}; it needs a row for each, or positions"
            )
        return
    _checks.integer(op, "positions", positions)
    if tuple(positions.shape) not in (tokens, tokens[-1:]):
        letters = "(T,)" if x.dim() == 3 else f"(B, S), or {_checks.tuple_text(tokens[-1:])} = (S,)"
        got, wanted = _checks.shape_of(positions), _checks.tuple_text(tokens)
        raise ValueError(f"{op}: positions has shape {got}; it needs {wanted} = {letters}")
    _checks.same_device(op, "positions", positions, name, x)


def _describe(args: Rope) -> Described:
    x = args.xs[0]
    tokens = {"T": x.shape[0]} if x.dim() == 3 else {"B": x.shape[0], "S": x.shape[2]}
    heads = {f"H{letter}": y.shape[1] for letter, y in zip("qk", args.xs, strict=False)}
    features = ("interleaved",) if args.interleaved else ()
    return Described(x, {**tokens, **heads, "D": x.shape[-1], "R": args.cos.shape[1]}, features)


def _validate(op: str, args: Rope) -> None:
    _device_values.in_range(op, "positions", args.positions, args.cos.shape[0])


def _fake(args: Rope) -> tuple[Tensor, ...]:
    return tuple(x.new_empty_strided(x.shape, layout.strides_like_heads(x, x.shape[-1])) for x in args.xs)


def _differentiate(saved: Saved, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """Of a pair, whichever of the two has a gradient and wants one: an unused key costs nothing."""
    args = saved.args
    wanted = [i for i, grad in enumerate(grads) if grad is not None and saved.needs[i]]
    found: list[Tensor | None] = [None] * len(grads)
    if wanted:
        given: list[Any] = [grads[i] for i in wanted]
        results = saved.run(_backward, args._replace(xs=given))
        for i, dx in zip(wanted, results, strict=True):
            found[i] = dx
    return (*found, None, None, None)


_forward = Op(
    "rope_forward", Rope, public="rope", check=_check, describe=_describe, validate=partial(_validate, "rope"), fake=_fake,
    returns="Tensor[]", backward=_differentiate, backward_launchers=("rope_backward",), saves=("cos", "sin", "positions"),
    autocast=_autocast.Rule(_autocast.widest, operands=-3),
)  # fmt: skip
_backward = Op(
    "rope_backward", Rope, check=_check, describe=_describe, validate=partial(_validate, "rope_backward"), fake=_fake,
    returns="Tensor[]",
)  # fmt: skip
