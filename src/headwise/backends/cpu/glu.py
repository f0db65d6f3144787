"""Gated linear units on the CPU: cache-sized blocks, float32 inside, so that a 16-bit result is rounded once.

The values and slopes are PyTorch's own kernels, where it has fast ones. Its tanh takes six times as long as its sigmoid, so
gelu_tanh goes by that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from headwise.backends.cpu.memory import huge_pages
from headwise.backends.cpu.row_blocks import BLOCK, Scratch, row_blocks, scratch_for, sharing, working_copy
from headwise.backends.cpu.threads import Shared, in_threads

if TYPE_CHECKING:
    from headwise.ops.glu import Glu, GluBackward

_aten = torch.ops.aten
_ELEMENTS = BLOCK // 2  # of a block: several tensors share the cache
_TANH_SLOPE, _TANH_CUBE = 2 * math.sqrt(2 / math.pi), 0.044715


class _Activation(NamedTuple):
    value: Callable[[Tensor, Tensor], Tensor]  # value(a, out): f(a), written to out
    slope: Callable[
        [Tensor, Tensor, Scratch, Scratch], Tensor
    ]  # slope(h, a, s, t): h · f'(a), written to h; s, t are free


def glu_forward(args: Glu) -> Tensor:
    gate, up = _halves(args)
    value = _ACTIVATIONS[args.activation].value
    y = huge_pages(torch.empty(gate.shape, dtype=gate.dtype))
    if y.numel() == 0:
        return y
    (gate, up), (y_rows,) = _as_rows([gate, up], [y])
    elements, most = sharing(y, _ELEMENTS)
    blocks = Shared(row_blocks(gate, up, elements=elements))

    def work(thread: int, threads: int) -> None:
        copy, scratch = scratch_for(gate, 2, elements)
        for rows, (a_block, u) in blocks:
            a, out = working_copy(a_block, copy), y_rows[rows]
            if out.dtype == a.dtype:
                value(a, out).mul_(u)
            else:
                out.copy_(value(a, scratch[: out.shape[0]]).mul_(u))

    in_threads(work, most=most)
    return y


def glu_backward(args: GluBackward) -> tuple[Tensor, Tensor | None]:
    gate, up = _halves(args)
    value, slope = _ACTIVATIONS[args.activation]
    results = [huge_pages(torch.empty(x.shape, dtype=x.dtype)) for x in (args.gate, args.up) if x is not None]
    both = results[0], results[1] if args.up is not None else None
    if gate.numel() == 0:
        return both
    dgate, dup = results if args.up is not None else results[0].chunk(2, -1)
    (gate, up, grad), targets = _as_rows([gate, up, args.grad], [dgate, dup])
    elements, most = sharing(gate, _ELEMENTS)
    blocks = Shared(row_blocks(gate, up, grad, elements=elements))

    def work(thread: int, threads: int) -> None:
        a_copy, g_copy, scratch, free = scratch_for(gate, 4, elements)
        for rows, (a_block, u, g_block) in blocks:
            a, g = working_copy(a_block, a_copy), working_copy(g_block, g_copy)
            dgate_block, dup_block = (target[rows] for target in targets)
            if dup_block.dtype == a.dtype:
                value(a, dup_block).mul_(g)
                slope(torch.mul(g, u, out=dgate_block), a, scratch, free)
            else:
                dup_block.copy_(value(a, scratch[: len(a)]).mul_(g))
                dgate_block.copy_(slope(g.mul_(u), a, scratch, free))

    in_threads(work, most=most)
    return both


def _halves(args: Glu | GluBackward) -> Sequence[Tensor]:
    return args.gate.chunk(2, -1) if args.up is None else (args.gate, args.up)


def _as_rows(inputs: list[Tensor], targets: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs as they are and targets as (rows, W); all as (elements, 1), to cut anywhere, where all are contiguous."""
    if all(x.is_contiguous() for x in (*inputs, *targets)):
        return [x.view(-1, 1) for x in inputs], [x.view(-1, 1) for x in targets]
    return inputs, [x.view(-1, x.shape[-1]) for x in targets]


def _gelu(a: Tensor, out: Tensor) -> Tensor:
    """PyTorch 2.13 with oneDNN leaves an ``out`` that is not contiguous as it was, without an error."""
    return _aten.gelu.out(a, out=out) if out.is_contiguous() else out.copy_(_aten.gelu(a))


def _tanh_argument(a: Tensor, out: Tensor) -> Tensor:
    """2 √(2/π) (a + 0.044715 a³): gelu_tanh is a times its sigmoid."""
    return torch.mul(a, a, out=out).mul_(_TANH_SLOPE * _TANH_CUBE).add_(_TANH_SLOPE).mul_(a)


def _gelu_tanh_slope(h: Tensor, a: Tensor, first: Scratch, second: Scratch) -> Tensor:
    s, t = first[: len(a)], second[: len(a)]
    _tanh_argument(a, s).sigmoid_()
    # a times the slope of the argument, times 1 - s
    torch.mul(a, a, out=t).mul_(3 * _TANH_SLOPE * _TANH_CUBE).add_(_TANH_SLOPE).mul_(a)
    t.addcmul_(t, s, value=-1)
    return h.mul_(t.add_(1).mul_(s))


_ACTIVATIONS = {
    "silu": _Activation(
        lambda a, out: _aten.silu.out(a, out=out), lambda h, a, s, t: _aten.silu_backward.grad_input(h, a, grad_input=h)
    ),
    "gelu": _Activation(_gelu, lambda h, a, s, t: _aten.gelu_backward.grad_input(h, a, grad_input=h)),
    "gelu_tanh": _Activation(lambda a, out: _tanh_argument(a, out).sigmoid_().mul_(a), _gelu_tanh_slope),
    "relu": _Activation(
        lambda a, out: torch.clamp_min(a, 0, out=out),
        lambda h, a, s, t: _aten.threshold_backward.grad_input(h, a, 0, grad_input=h),
    ),
    "relu2": _Activation(
        lambda a, out: torch.clamp_min(a, 0, out=out).square_(),
        lambda h, a, s, t: h.mul_(torch.clamp_min(a, 0, out=s[: len(a)])).mul_(2),
    ),
    "sigmoid": _Activation(
        lambda a, out: torch.sigmoid(a, out=out),
        lambda h, a, s, t: _aten.sigmoid_backward.grad_input(h, torch.sigmoid(a, out=s[: len(a)]), grad_input=h),
    ),
    "identity": _Activation(lambda a, out: out.copy_(a), lambda h, a, s, t: h),
}
