"""Root-mean-square normalisation over the last dimension, and its backward.

    r_n   = 1 / sqrt(mean_d x_nd² + eps)
    y_nd  = x_nd r_n (w_d + offset)
    dx_nd = r_n (h_nd - x_nd r_n² mean_d(h_nd x_nd))   with h_nd = g_nd (w_d + offset)
    dw_d  = sum_n g_nd x_nd r_n

Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019 (arXiv 1910.07467).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from headwise import layout
from headwise.ops import _autocast, _checks
from headwise.ops._op import Described, Op, Saved


def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, weight_offset: float = 0.0, *,
    backend: str | None = None,
) -> Tensor:  # fmt: skip
    """``x * rsqrt(mean(x²) + eps) * (weight + weight_offset)`` over the last dimension of ``x`` (..., D).

    weight: (D,), of x's dtype or float32; ``None`` leaves the last factor out. weight_offset: 1.0 for models that
    store the distance of the weight from one (Gemma). The arithmetic is float32 at least and rounds once, to x's dtype.
    Any strides; the result is contiguous. Differentiable in ``x`` and ``weight``.

    >>> hw.rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2))
    tensor([[0.8485, 1.1314]])
    """
    y: Tensor = _forward((x, weight), (eps, weight_offset), backend)[0]
    return y


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, weight_offset: float = 0.0, *,
    rstd: Tensor | None = None, backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """``(dx, dweight)``, given the gradient ``grad`` of the output; dweight is None where ``weight`` is.

    rstd: ``rsqrt(mean(x²) + eps)``, of shape (...,), float32 (float64 for float64), if it is at hand; else it is
    computed again. dweight is summed over the rows in a fixed order.

    >>> x, weight = torch.randn(4, 64), torch.ones(64)
    >>> dx, dweight = hw.rms_norm_backward(torch.ones(4, 64), x, weight)
    """
    dx, dweight = _backward((grad, x, weight, rstd), (eps, weight_offset), backend)
    return dx, (None if weight is None else dweight)


class RmsNorm(NamedTuple):
    x: Tensor
    weight: Tensor | None
    eps: float
    weight_offset: float
    with_rstd: bool = True


class RmsNormBackward(NamedTuple):
    grad: Tensor
    x: Tensor
    weight: Tensor | None
    rstd: Tensor | None  # None: computed again
    eps: float
    weight_offset: float


def _check(op: str, x: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> RmsNorm:
    _checks.rows(op, "x", x)
    if weight is not None:
        _checks.per_column(op, "weight", weight, "x", x)
    return RmsNorm(x, weight, _checks.not_negative(op, "eps", eps), _checks.number(op, "weight_offset", weight_offset))


def _check_backward(
    op: str, grad: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor | None, eps: float, weight_offset: float
) -> RmsNormBackward:
    forward = _check(op, x, weight, eps, weight_offset)
    _checks.like(op, "grad", grad, "x", x)
    if rstd is not None:
        check_rstd(op, rstd, "x", x)
    return RmsNormBackward(grad, x, weight, rstd, forward.eps, forward.weight_offset)


def check_rstd(op: str, rstd: Any, name: str, x: Tensor) -> None:
    """rstd: of the rows of the tensor ``x``, which is called ``name``."""
    _checks.tensor(op, "rstd", rstd)
    _checks.dtype(op, "rstd", rstd, layout.statistics_dtype(x.dtype))
    _checks.shape(op, "rstd", rstd, x.shape[:-1], f"the shape of {name} without its last dimension")
    _checks.same_device(op, "rstd", rstd, name, x)


def _describe(args: Any) -> Described:
    return Described(args.x, {"D": args.x.shape[-1]})


def _fake(args: RmsNorm) -> tuple[Tensor, Tensor]:
    x = args.x
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=layout.statistics_dtype(x.dtype))


def _fake_backward(args: RmsNormBackward) -> tuple[Tensor, Tensor | None]:
    weight = args.weight
    return args.x.new_empty(args.x.shape), None if weight is None else weight.new_empty(weight.shape)


def _differentiate(saved: Saved, grad: Tensor, _: None) -> tuple[Tensor, Tensor | None]:
    x, weight, eps, offset, _ = saved.args
    dx, dweight = saved.run(_backward, RmsNormBackward(grad, x, weight, saved.results[1], eps, offset))
    return dx, (None if weight is None else dweight)


_forward = Op(
    "rms_norm_forward", RmsNorm, public="rms_norm", check=_check, describe=_describe, fake=_fake,
    returns="(Tensor, Tensor)", backward=_differentiate, backward_launchers=("rms_norm_backward",),
    saves=("x", "weight"), saves_results=(1,), statistics=(1,), keep="with_rstd",
    autocast=_autocast.Rule(_autocast.float32, operands=2),
)  # fmt: skip
_backward = Op(
    "rms_norm_backward", RmsNormBackward, check=_check_backward, describe=_describe, fake=_fake_backward,
    returns="(Tensor, Tensor)",
)  # fmt: skip
