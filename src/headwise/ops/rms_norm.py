"""Root-mean-square normalisation over the last dimension, and its backward.

    r_n   = 1 / sqrt(mean_d x_nd² + eps)
    y_nd  = x_nd r_n (w_d + offset)
    dx_nd = r_n (h_nd - x_nd r_n² mean_d(h_nd x_nd))   with h_nd = g_nd (w_d + offset)
    dw_d  = sum_n g_nd x_nd r_n

Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019 (arXiv 1910.07467).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headwise.backends import registry
from headwise.ops import _checks, _library, _remembered


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float = 1e-6, weight_offset: float = 0.0, *, backend: str | None = None
) -> Tensor:
    """``x * rsqrt(mean(x²) + eps) * (weight + weight_offset)`` over the last dimension of ``x`` (..., D).

    weight: (D,), of x's dtype or float32; ``None`` leaves the last factor out. weight_offset: 1.0 for models that
    store the distance of the weight from one (Gemma). The arithmetic is float32 at least and rounds once, to x's dtype.
    Any strides; the result is contiguous. Differentiable in ``x`` and ``weight``.
    """
    kind = _remembered.kind("rms_norm", (x, weight), (eps, weight_offset, backend))
    run = _remembered.recall(kind)
    if run is None:
        chosen = registry.choose(rms_norm_call(x, weight, eps, weight_offset), backend)
        run = _remembered.keep(kind, _forward, x, weight, float(eps), float(weight_offset), chosen)
    y: Tensor = run(x, weight)[0]
    return y


def rms_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    *,
    rstd: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``(dx, dweight)``, given the gradient ``grad`` of the output; dweight is None where ``weight`` is.

    rstd: ``rsqrt(mean(x²) + eps)``, of shape (...,), float32 (float64 for float64), if it is at hand; else it is
    computed again. dweight is summed over the rows in a fixed order.
    """
    call = rms_norm_backward_call(grad, x, weight, eps, weight_offset, rstd=rstd)
    dx, dweight = _backward(grad, x, weight, rstd, float(eps), float(weight_offset), registry.choose(call, backend))
    return dx, (None if weight is None else dweight)


def rms_norm_call(x: Tensor, weight: Tensor | None, eps: float = 1e-6, weight_offset: float = 0.0) -> registry.Call:
    """Check the arguments of `rms_norm` and describe the call to the backends."""
    _check_inputs("rms_norm", x, weight, eps, weight_offset)
    backward = ("rms_norm_backward",) if _checks.wants_gradient(x, weight) else ()
    return registry.Call(
        "rms_norm", ("rms_norm_forward", *backward), _checks.device_type(x), x.dtype, {"D": x.shape[-1]}
    )


def rms_norm_backward_call(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    *,
    rstd: Tensor | None = None,
) -> registry.Call:
    """Check the arguments of `rms_norm_backward` and describe the call to the backends."""
    op = "rms_norm_backward"
    _check_inputs(op, x, weight, eps, weight_offset)
    _checks.floating(op, "grad", grad)
    _checks.shape(op, "grad", grad, x.shape, "the shape of x")
    _checks.same_dtype(op, "grad", grad, "x", x)
    _checks.same_device(op, "grad", grad, "x", x)
    if rstd is not None:
        _checks.tensor(op, "rstd", rstd)
        if rstd.dtype != _accumulator(x):
            wanted = _checks.short(_accumulator(x))
            raise TypeError(f"{op}: rstd has dtype {_checks.short(rstd.dtype)}; it needs {wanted}")
        _checks.shape(op, "rstd", rstd, x.shape[:-1], "the shape of x without its last dimension")
        _checks.same_device(op, "rstd", rstd, "x", x)
    return registry.Call(op, (op,), _checks.device_type(x), x.dtype, {"D": x.shape[-1]})


def _check_inputs(op: str, x: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> None:
    _checks.floating(op, "x", x)
    _checks.at_least_dims(op, "x", x, 1)
    if weight is not None:
        _checks.floating(op, "weight", weight)
        _checks.shape(op, "weight", weight, (x.shape[-1],), "(D,), the last dimension of x")
        if weight.dtype not in (x.dtype, torch.float32):
            wanted = f"{_checks.short(x.dtype)}, as x has, or float32"
            raise TypeError(f"{op}: weight has dtype {_checks.short(weight.dtype)}; it needs {wanted}")
        _checks.same_device(op, "weight", weight, "x", x)
    _checks.not_negative(op, "eps", eps)
    _checks.number(op, "weight_offset", weight_offset)


def _accumulator(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _prepare_forward(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float, backend: str
) -> Callable[..., tuple[Tensor, Tensor]]:
    return registry.prepare(backend, "rms_norm_forward", (x, weight), (eps, weight_offset))


def _prepare_alone(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float, backend: str
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Without rstd, to make which costs the host of a GPU as much as a quarter of the call."""
    if not registry.offers(backend, "rms_norm_output"):
        return _prepare_forward(x, weight, eps, weight_offset, backend)
    launch = registry.prepare(backend, "rms_norm_output", (x, weight), (eps, weight_offset))
    return lambda x, weight: (launch(x, weight), None)


def _run_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor | None,
    eps: float,
    weight_offset: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    dx, dweight = registry.launcher(backend, "rms_norm_backward")(grad, x, weight, rstd, eps, weight_offset)
    # A torch op returns tensors only: without a weight its gradient is a tensor of no elements.
    return dx, (x.new_empty(0) if dweight is None else dweight)


def _fake_forward(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float, backend: str
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=_accumulator(x))


def _fake_backward(grad: Tensor, x: Tensor, weight: Tensor | None, *others: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), (x.new_empty(0) if weight is None else weight.new_empty(weight.shape))


def _save(ctx: Any, args: tuple[Any, ...], outputs: tuple[Tensor, Tensor]) -> None:
    x, weight, ctx.eps, ctx.weight_offset, ctx.backend = args
    rstd = outputs[1]
    ctx.mark_non_differentiable(rstd)
    ctx.save_for_backward(x, weight, rstd)


def _differentiate(
    ctx: Any, grad: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, Tensor | None, None, None, None]:
    if grad is None:
        return None, None, None, None, None
    x, weight, rstd = ctx.saved_tensors
    dx, dweight = _backward(grad, x, weight, rstd, ctx.eps, ctx.weight_offset, ctx.backend)
    return dx, (None if weight is None else dweight), None, None, None


_forward = _library.define(
    "rms_norm_forward",
    "(Tensor x, Tensor? weight, float eps, float weight_offset, str backend) -> (Tensor, Tensor)",
    prepare=_prepare_forward,
    prepare_alone=_prepare_alone,
    fake=_fake_forward,
    save=_save,
    backward=_differentiate,
)
_backward = _library.define(
    "rms_norm_backward",
    "(Tensor grad, Tensor x, Tensor? weight, Tensor? rstd, float eps, float weight_offset, str backend) "
    "-> (Tensor, Tensor)",
    run=_run_backward,
    fake=_fake_backward,
)
