"""Layer normalisation over the last dimension, and its backward.

    m_n   = mean_d x_nd
    r_n   = 1 / sqrt(mean_d (x_nd - m_n)² + eps)
    n_nd  = (x_nd - m_n) r_n
    y_nd  = n_nd w_d + b_d
    dx_nd = r_n (h_nd - mean_d(h_nd) - n_nd mean_d(h_nd n_nd))   with h_nd = g_nd w_d
    dw_d  = sum_n g_nd n_nd,  db_d = sum_n g_nd

Ba, Kiros and Hinton, "Layer Normalization", 2016 (arXiv 1607.06450).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from headwise import layout
from headwise.ops import _autocast, _checks
from headwise.ops._op import Described, Op, Saved


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *,
    backend: str | None = None,
) -> Tensor:  # fmt: skip
    """``(x - mean(x)) * rsqrt(var(x) + eps) * weight + bias`` over the last dimension of ``x`` (..., D).

    weight, bias: (D,), each of x's dtype or float32; ``None`` leaves the factor or the summand out. The variance is that
    of the deviations from the mean, divided by D. The arithmetic is float32 at least and rounds once, to x's dtype.
    Any strides; the result is contiguous. Differentiable in ``x``, ``weight`` and ``bias``.

    >>> hw.layer_norm(torch.tensor([[1.0, 4.0]]), torch.ones(2))
    tensor([[-1.0000,  1.0000]])
    """
    y: Tensor = _forward((x, weight, bias), (eps,), backend)[0]
    return y


def layer_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """``(dx, dweight, dbias)``, given the gradient ``grad`` of the output; the last two are None where their inputs are.

    bias: only its dtype is used. The statistics of the rows are computed again; autograd keeps them. dweight and dbias are
    summed over the rows in a fixed order.

    >>> x, weight, bias = torch.randn(4, 64), torch.ones(64), torch.zeros(64)
    >>> dx, dweight, dbias = hw.layer_norm_backward(torch.ones(4, 64), x, weight, bias)
    """
    dx, dweight, dbias = _backward((grad, x, weight, bias, None), (eps,), backend)
    return dx, (None if weight is None else dweight), (None if bias is None else dbias)


class LayerNorm(NamedTuple):
    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    with_statistics: bool = True


class LayerNormBackward(NamedTuple):
    grad: Tensor
    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    statistics: Tensor | None  # (..., 3), as the forward leaves them; None: computed again
    eps: float


def _check(op: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> LayerNorm:
    _checks.rows(op, "x", x)
    for name, given in (("weight", weight), ("bias", bias)):
        if given is not None:
            _checks.per_column(op, name, given, "x", x)
    return LayerNorm(x, weight, bias, _checks.not_negative(op, "eps", eps))


def _check_backward(
    op: str, grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: None, eps: float
) -> LayerNormBackward:
    forward = _check(op, x, weight, bias, eps)
    _checks.like(op, "grad", grad, "x", x)
    return LayerNormBackward(grad, x, weight, bias, statistics, forward.eps)


def _describe(args: Any) -> Described:
    return Described(args.x, {"D": args.x.shape[-1]})


def _fake(args: LayerNorm) -> tuple[Tensor, Tensor]:
    """The statistics of a row are its mean, what the rounding of the mean left, and rstd."""
    x = args.x
    return x.new_empty(x.shape), x.new_empty((*x.shape[:-1], 3), dtype=layout.statistics_dtype(x.dtype))


def _fake_backward(args: LayerNormBackward) -> tuple[Tensor, Tensor | None, Tensor | None]:
    weight, bias = (None if v is None else v.new_empty(v.shape) for v in (args.weight, args.bias))
    return args.x.new_empty(args.x.shape), weight, bias


def _differentiate(saved: Saved, grad: Tensor, _: None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    x, weight, bias, eps, _ = saved.args
    dx, dweight, dbias = saved.run(_backward, LayerNormBackward(grad, x, weight, bias, saved.results[1], eps))
    return dx, (None if weight is None else dweight), (None if bias is None else dbias)


_forward = Op(
    "layer_norm_forward", LayerNorm, public="layer_norm", check=_check, describe=_describe, fake=_fake,
    returns="(Tensor, Tensor)", backward=_differentiate, backward_launchers=("layer_norm_backward",),
    saves=("x", "weight", "bias"), saves_results=(1,), statistics=(1,), keep="with_statistics",
    autocast=_autocast.Rule(_autocast.float32, operands=3),
)  # fmt: skip
_backward = Op(
    "layer_norm_backward", LayerNormBackward, check=_check_backward, describe=_describe, fake=_fake_backward,
    returns="(Tensor, Tensor, Tensor)",
)  # fmt: skip
