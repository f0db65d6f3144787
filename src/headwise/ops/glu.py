"""Gated linear units: an activation of one tensor times another, and its backward.

    y     = f(gate) · up
    dgate = g · up · f'(gate)
    dup   = g · f(gate)

with f one of

    silu       a σ(a)                    σ(a) = 1 / (1 + exp(-a))
    gelu       a Φ(a)                    Φ(a) = erfc(-a / √2) / 2, exact
    gelu_tanh  a σ(2 √(2/π) (a + 0.044715 a³)), the same as a (1 + tanh(…)) / 2
    relu       max(a, 0)
    relu2      max(a, 0)²
    sigmoid    σ(a)
    identity   a

Shazeer, "GLU Variants Improve Transformer", 2020 (arXiv 2002.05202). relu2: So et al., "Primer", 2021 (arXiv 2109.08668).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from headwise.ops import _autocast, _checks
from headwise.ops._op import Described, Op, Saved

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "identity")


def glu(gate: Tensor, up: Tensor | None = None, activation: str = "silu", *, backend: str | None = None) -> Tensor:
    """``activation(gate) * up`` of two tensors of one shape and dtype (any strides); the result is contiguous.

    ``glu(gate_up)``, without ``up``, takes both from one tensor: gate is the first half of its last dim, up the second.
    Its gradient is one tensor of the full width; two halves of ``chunk`` would be joined by autograd, at the cost of a copy.

    activation: "silu" (SwiGLU), "gelu" (GeGLU; exact), "gelu_tanh", "relu" (ReGLU), "relu2", "sigmoid" (GLU) or
    "identity" (bilinear). The arithmetic is float32 at least and rounds once. Infinite gates give what the formulas
    give: silu(inf) is inf, silu(-inf) is -inf · 0 = NaN, as in PyTorch.

    Differentiable in ``gate`` and ``up``. The backward computes the activation again: it keeps the inputs and nothing
    else, and changes neither.

    >>> hw.glu(torch.tensor([2.0, -1.0]), torch.tensor([3.0, 5.0]), "relu")
    tensor([6., 0.])
    >>> hw.glu(torch.randn(4, 2 * 96)).shape  # gate and up from one tensor
    torch.Size([4, 96])
    """
    y: Tensor = _forward((gate, up), (activation,), backend)
    return y


def glu_backward(
    grad: Tensor, gate: Tensor, up: Tensor | None = None, activation: str = "silu", *, backend: str | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """``(dgate, dup)``, given the gradient ``grad`` of the output; of ``glu(gate_up)`` the one gradient of ``gate_up``.

    >>> gate, up = torch.randn(2, 4, 96)
    >>> dgate, dup = hw.glu_backward(torch.ones(4, 96), gate, up)
    """
    dgate, dup = _backward((grad, gate, up), (activation,), backend)
    return dgate if up is None else (dgate, dup)


class Glu(NamedTuple):
    gate: Tensor
    up: Tensor | None  # None: gate is (..., 2 W) and holds both
    activation: str


class GluBackward(NamedTuple):
    grad: Tensor
    gate: Tensor
    up: Tensor | None
    activation: str


def _check(op: str, gate: Tensor, up: Tensor | None, activation: str) -> Glu:
    _checks.floating(op, "gate", gate)
    _checks.at_least_dims(op, "gate", gate, 1)
    if up is not None:
        _checks.like(op, "up", up, "gate", gate)
    elif gate.shape[-1] % 2 != 0:
        raise ValueError(
            f"{op}: gate has shape {_checks.shape_of(gate)} and up is None; it needs an even last dimension, the halves "
            "of which are gate and up"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(f"{op}: activation is {activation!r}; it needs to be one of {', '.join(ACTIVATIONS)}")
    return Glu(gate, up, activation)


def _check_backward(op: str, grad: Tensor, gate: Tensor, up: Tensor | None, activation: str) -> GluBackward:
    _check(op, gate, up, activation)
    _checks.floating(op, "grad", grad)
    _checks.shape(op, "grad", grad, _output_shape(gate, up), "the shape of the output")
    _checks.same_dtype(op, "grad", grad, "gate", gate)
    _checks.same_device(op, "grad", grad, "gate", gate)
    return GluBackward(grad, gate, up, activation)


def _output_shape(gate: Tensor, up: Tensor | None) -> tuple[int, ...]:
    return tuple(gate.shape) if up is not None else (*gate.shape[:-1], gate.shape[-1] // 2)


def _describe(args: Glu | GluBackward) -> Described:
    features = (args.activation,) if args.up is not None else (args.activation, "halves")
    return Described(args.gate, {"D": _output_shape(args.gate, args.up)[-1]}, features)


def _fake(args: Glu) -> Tensor:
    return args.gate.new_empty(_output_shape(args.gate, args.up))


def _fake_backward(args: GluBackward) -> tuple[Tensor, Tensor | None]:
    return args.gate.new_empty(args.gate.shape), None if args.up is None else args.up.new_empty(args.up.shape)


def _differentiate(saved: Saved, grad: Tensor) -> tuple[Any, Any]:
    gate, up, activation = saved.args
    dgate, dup = saved.run(_backward, GluBackward(grad, gate, up, activation))
    return dgate, (None if up is None else dup)


_forward = Op(
    "glu_forward", Glu, public="glu", check=_check, describe=_describe, fake=_fake, backward=_differentiate,
    backward_launchers=("glu_backward",), saves=("gate", "up"),
    autocast=_autocast.Rule(_autocast.widest, operands=2),
)  # fmt: skip
_backward = Op(
    "glu_backward", GluBackward, check=_check_backward, describe=_describe, fake=_fake_backward,
    returns="(Tensor, Tensor)",
)  # fmt: skip
