"""Softmax over the last dimension, and its backward.

    p_i  = exp(x_i - max x) / sum_j exp(x_j - max x)
    dx_i = p_i (g_i - sum_j p_j g_j)

A row that is -inf throughout (a query that may see nothing) gives zeros, not NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headwise.backends import registry
from headwise.ops import _checks, _library, _remembered


def softmax(x: Tensor, *, backend: str | None = None) -> Tensor:
    """Softmax over the last dimension of ``x`` (any rank from 1, any strides); the result is contiguous, of x's dtype.

    The arithmetic is float32 at least. Differentiable in ``x``.
    """
    kind = _remembered.kind("softmax", (x,), (backend,))
    run = _remembered.recall(kind)
    if run is None:
        run = _remembered.keep(kind, _forward, x, registry.choose(softmax_call(x), backend))
    y: Tensor = run(x)
    return y


def softmax_backward(probs: Tensor, grad: Tensor, *, backend: str | None = None) -> Tensor:
    """Gradient of the softmax input, given its output ``probs`` and the output's gradient ``grad``."""
    return _backward(probs, grad, registry.choose(softmax_backward_call(probs, grad), backend))


def softmax_call(x: Tensor) -> registry.Call:
    """Check the arguments of `softmax` and describe the call to the backends."""
    _checks.floating("softmax", "x", x)
    _checks.at_least_dims("softmax", "x", x, 1)
    launchers = ("softmax_forward", "softmax_backward") if _checks.wants_gradient(x) else ("softmax_forward",)
    return registry.Call("softmax", launchers, _checks.device_type(x), x.dtype, {"V": x.shape[-1]})


def softmax_backward_call(probs: Tensor, grad: Tensor) -> registry.Call:
    """Check the arguments of `softmax_backward` and describe the call to the backends."""
    op = "softmax_backward"
    _checks.floating(op, "probs", probs)
    _checks.floating(op, "grad", grad)
    _checks.at_least_dims(op, "probs", probs, 1)
    _checks.shape(op, "grad", grad, probs.shape, "the shape of probs")
    _checks.same_dtype(op, "grad", grad, "probs", probs)
    _checks.same_device(op, "grad", grad, "probs", probs)
    return registry.Call(op, (op,), _checks.device_type(probs), probs.dtype, {"V": probs.shape[-1]})


def _prepare_forward(x: Tensor, backend: str) -> Callable[[Tensor], Tensor]:
    return registry.prepare(backend, "softmax_forward", (x,), ())


def _run_backward(probs: Tensor, grad: Tensor, backend: str) -> Tensor:
    return registry.launcher(backend, "softmax_backward")(probs, grad)


def _fake_like_first(x: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save(ctx: Any, args: tuple[Any, ...], probs: Tensor) -> None:
    ctx.save_for_backward(probs)
    ctx.backend = args[1]


def _differentiate(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
    if grad is None:
        return None, None
    (probs,) = ctx.saved_tensors
    return _backward(probs, grad, ctx.backend), None


_forward = _library.define(
    "softmax_forward",
    "(Tensor x, str backend) -> Tensor",
    prepare=_prepare_forward,
    fake=_fake_like_first,
    save=_save,
    backward=_differentiate,
)
_backward = _library.define(
    "softmax_backward",
    "(Tensor probs, Tensor grad, str backend) -> Tensor",
    run=_run_backward,
    fake=_fake_like_first,
)
