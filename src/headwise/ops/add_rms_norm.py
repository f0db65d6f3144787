"""A sum and its root-mean-square normalisation, in one pass: what stands between two blocks of a transformer.

    h  = x + residual, rounded to their dtype
    y  = rms_norm(h), of the rounded h
    dx = dresidual = grad_h + the gradient of rms_norm at h
    dw = the sum over rows that rms_norm.py has

The backward reads h, not x and residual: nobody needs to keep those.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from headwise import layout
from headwise.ops import _autocast, _checks
from headwise.ops._op import Described, Op, Saved
from headwise.ops.rms_norm import check_rstd


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6, weight_offset: float = 0.0, *,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``(rms_norm(h), h)`` with ``h = x + residual``, of two tensors (..., D) of one shape and dtype.

    h is rounded once to their dtype, and what is normalised is the rounded h. weight, eps, weight_offset: as in
    `rms_norm`. Each input is read once. Any strides; the results are contiguous. Differentiable in ``x``, ``residual`` and
    ``weight``, through both results.

    >>> x, residual, weight = torch.randn(4, 64), torch.randn(4, 64), torch.ones(64)
    >>> normed, h = hw.add_rms_norm(x, residual, weight)
    >>> torch.equal(h, x + residual)
    True
    """
    y, h, *_ = _forward((x, residual, weight), (eps, weight_offset), backend)
    return y, h


def add_rms_norm_backward(
    grad: Tensor, grad_h: Tensor | None, h: Tensor, weight: Tensor | None = None, eps: float = 1e-6,
    weight_offset: float = 0.0, *, rstd: Tensor | None = None, backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """``(dx, dresidual, dweight)``, given the gradients of both results and the second result ``h``.

    dx and dresidual are one tensor. grad_h: None where nothing but the norm used h. dweight is None where ``weight`` is.
    rstd: ``rsqrt(mean(h²) + eps)``, of shape (...,), float32 (float64 for float64), if it is at hand; else it is computed
    again. dweight is summed over the rows in a fixed order.

    >>> h, weight = torch.randn(4, 64), torch.ones(64)
    >>> dx, dresidual, dweight = hw.add_rms_norm_backward(torch.ones(4, 64), None, h, weight)
    """
    dx, dweight = _backward((grad, grad_h, h, weight, rstd), (eps, weight_offset), backend)
    return dx, dx, (None if weight is None else dweight)


class AddRmsNorm(NamedTuple):
    x: Tensor
    residual: Tensor
    weight: Tensor | None
    eps: float
    weight_offset: float
    with_rstd: bool = True


class AddRmsNormBackward(NamedTuple):
    grad: Tensor
    grad_h: Tensor | None  # None: zeros
    h: Tensor
    weight: Tensor | None
    rstd: Tensor | None  # None: computed again
    eps: float
    weight_offset: float


def _check(
    op: str, x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float
) -> AddRmsNorm:  # fmt: skip
    _checks.rows(op, "x", x)
    _checks.like(op, "residual", residual, "x", x)
    if weight is not None:
        _checks.per_column(op, "weight", weight, "x", x)
    eps, weight_offset = _numbers(op, eps, weight_offset)
    return AddRmsNorm(x, residual, weight, eps, weight_offset)


def _check_backward(
    op: str, grad: Tensor, grad_h: Tensor | None, h: Tensor, weight: Tensor | None, rstd: Tensor | None, eps: float,
    weight_offset: float,
) -> AddRmsNormBackward:  # fmt: skip
    _checks.rows(op, "h", h)
    _checks.like(op, "grad", grad, "h", h)
    if grad_h is not None:
        _checks.like(op, "grad_h", grad_h, "h", h)
    if weight is not None:
        _checks.per_column(op, "weight", weight, "h", h)
    if rstd is not None:
        check_rstd(op, rstd, "h", h)
    eps, weight_offset = _numbers(op, eps, weight_offset)
    return AddRmsNormBackward(grad, grad_h, h, weight, rstd, eps, weight_offset)


def _numbers(op: str, eps: float, weight_offset: float) -> tuple[float, float]:
    return _checks.not_negative(op, "eps", eps), _checks.number(op, "weight_offset", weight_offset)


def _describe(args: AddRmsNorm) -> Described:
    return Described(args.x, {"D": args.x.shape[-1]})


def _describe_backward(args: AddRmsNormBackward) -> Described:
    return Described(args.h, {"D": args.h.shape[-1]})


def _fake(args: AddRmsNorm) -> tuple[Tensor, Tensor, Tensor]:
    x = args.x
    rstd = x.new_empty(x.shape[:-1], dtype=layout.statistics_dtype(x.dtype))
    return x.new_empty(x.shape), x.new_empty(x.shape), rstd


def _fake_backward(args: AddRmsNormBackward) -> tuple[Tensor, Tensor | None]:
    weight = args.weight
    return args.h.new_empty(args.h.shape), None if weight is None else weight.new_empty(weight.shape)


def _differentiate(saved: Saved, grad: Tensor | None, grad_h: Tensor | None, _: None) -> tuple[Any, ...]:
    if grad is None:  # nothing used the norm
        return grad_h, grad_h, None
    _, _, weight, eps, offset, _ = saved.args
    _, h, rstd = saved.results
    dx, dweight = saved.run(_backward, AddRmsNormBackward(grad, grad_h, h, weight, rstd, eps, offset))
    return dx, dx, (None if weight is None else dweight)


_forward = Op(
    "add_rms_norm_forward", AddRmsNorm, public="add_rms_norm", check=_check, describe=_describe, fake=_fake,
    returns="(Tensor, Tensor, Tensor)", backward=_differentiate, backward_launchers=("add_rms_norm_backward",),
    saves=("weight",), saves_results=(1, 2), statistics=(2,), keep="with_rstd", shows=2,
    autocast=_autocast.Rule(_autocast.float32, operands=3),
)  # fmt: skip
_backward = Op(
    "add_rms_norm_backward", AddRmsNormBackward, check=_check_backward, describe=_describe_backward,
    fake=_fake_backward, returns="(Tensor, Tensor)",
)  # fmt: skip
