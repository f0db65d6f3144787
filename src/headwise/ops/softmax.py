"""Softmax over the last dimension, and its backward.

    p_i  = exp(x_i - max x) / sum_j exp(x_j - max x)
    dx_i = p_i (g_i - sum_j p_j g_j)

A row that is -inf throughout (a query that may see nothing) gives zeros, not NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headwise.ops import _autocast, _checks
from headwise.ops._op import Described, Op, Saved


def softmax(x: Tensor, *, backend: str | None = None) -> Tensor:
    """Softmax over the last dimension of ``x`` (any rank from 1, any strides); the result is contiguous, of x's dtype.

    The arithmetic is float32 at least. Differentiable in ``x``.

    >>> hw.softmax(torch.tensor([[0.0, 0.0], [-torch.inf, -torch.inf]]))
    tensor([[0.5000, 0.5000],
            [0.0000, 0.0000]])
    """
    y: Tensor = _forward((x,), (), backend)
    return y


def softmax_backward(probs: Tensor, grad: Tensor, *, backend: str | None = None) -> Tensor:
    """Gradient of the softmax input, given its output ``probs`` and the output's gradient ``grad``.

    >>> probs = hw.softmax(torch.randn(4, 10))
    >>> hw.softmax_backward(probs, torch.randn(4, 10)).shape
    torch.Size([4, 10])
    """
    dx: Tensor = _backward((probs, grad), (), backend)
    return dx


class Softmax(NamedTuple):
    x: Tensor


class SoftmaxBackward(NamedTuple):
    probs: Tensor
    grad: Tensor


def _check(op: str, x: Tensor) -> Softmax:
    _checks.rows(op, "x", x)
    return Softmax(x)


def _check_backward(op: str, probs: Tensor, grad: Tensor) -> SoftmaxBackward:
    _checks.floating(op, "probs", probs)
    _checks.at_least_dims(op, "probs", probs, 1)
    _checks.like(op, "grad", grad, "probs", probs)
    return SoftmaxBackward(probs, grad)


def _describe(args: Softmax | SoftmaxBackward) -> Described:
    return Described(args[0], {"V": args[0].shape[-1]})


def _fake(args: Softmax | SoftmaxBackward) -> Tensor:
    return torch.empty_like(args[0], memory_format=torch.contiguous_format)


def _differentiate(saved: Saved, grad: Tensor) -> tuple[Tensor]:
    return (saved.run(_backward, SoftmaxBackward(saved.results[0], grad)),)


_forward = Op(
    "softmax_forward", Softmax, public="softmax", check=_check, describe=_describe, fake=_fake,
    backward=_differentiate, backward_launchers=("softmax_backward",), saves_results=(0,),
    autocast=_autocast.Rule(_autocast.float32, operands=1),
)  # fmt: skip
_backward = Op("softmax_backward", SoftmaxBackward, check=_check_backward, describe=_describe, fake=_fake)
