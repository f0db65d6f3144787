"""Gated linear units in Triton: one pass over the inputs, forward and backward.

Rows are cut into lines of 16 bytes, and a program takes so many lines, whatever rows they are of: no width leaves part of a
program idle. Contiguous tensors are one long row. Elements that no 16-byte line is aligned with are read one by one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from headwise.backends.triton.row_tiling import Rows, as_rows

if TYPE_CHECKING:
    from headwise.backends.triton.gpu import Gpu
    from headwise.ops.glu import Glu, GluBackward

_ELEMENTS = 2048  # of a program of four warps
_INT32 = 2**31

_LOG2E = tl.constexpr(1.4426950408889634)
_TANH_SLOPE = tl.constexpr(1.5957691216057308)  # 2 √(2/π)
_TANH_CUBE = tl.constexpr(0.044715)
_INVERSE_ROOT_2PI = tl.constexpr(0.3989422804014327)


@triton.jit
def _sigmoid(a):
    """``(σ(a), 1 - σ(a))``, both relatively accurate: the exponential of a negative number does not overflow."""
    power = tl.exp2(-tl.abs(a) * _LOG2E)
    large = 1.0 / (1.0 + power)
    small = power * large
    return tl.where(a < 0.0, small, large), tl.where(a < 0.0, large, small)


@triton.jit
def _normal(a):
    """Density and distribution of the normal law at a.

    The tail erfc(t / √2) / 2 for t = |a| is exp(-t² / 2) · p(w) / (t + 3), w = 1 - 6 / (t + 3): a least-squares fit of
    p on [0, 14.5], off by 5e-8. In float32 the tail is off by 5e-7 up to t = 3, 1.1e-6 up to 5, as t² beyond: the
    rounding of the exponent. 1 + erf(a / √2), with its cancellation, would be off by a sixth at a = -5.
    """
    t = tl.abs(a)
    power = tl.exp2(t * t * (-0.5 * _LOG2E))
    v = 1.0 / (t + 3.0)
    w = 1.0 - 6.0 * v
    p = -0.00026298913871869445 * w - 0.0008977542747743428
    p = p * w + 0.0010747318156063557
    p = p * w + 0.006920006591826677
    p = p * w - 0.010480092838406563
    p = p * w - 0.04725528508424759
    p = p * w + 0.23001940548419952
    p = p * w - 0.5093322992324829
    p = p * w + 0.7290836572647095
    tail = power * (p * v)
    return power * _INVERSE_ROOT_2PI, tl.where(a < 0.0, tail, 1.0 - tail)


@triton.jit
def _activation(a, ACTIVATION: tl.constexpr):
    """``(f(a), f'(a))``; what is not used is not computed."""
    if ACTIVATION == "silu":
        s, rest = _sigmoid(a)
        value = a * s
        return value, s + value * rest
    elif ACTIVATION == "gelu":
        density, distribution = _normal(a)
        return a * distribution, distribution + a * density
    elif ACTIVATION == "gelu_tanh":
        s, rest = _sigmoid(a * (_TANH_SLOPE + _TANH_SLOPE * _TANH_CUBE * a * a))
        value = a * s
        return value, s + value * rest * (_TANH_SLOPE + 3.0 * _TANH_SLOPE * _TANH_CUBE * a * a)
    elif ACTIVATION == "relu":
        # NaN is not below zero, and stays.
        return tl.where(a <= 0.0, 0.0, a), tl.where(a <= 0.0, 0.0, 1.0)
    elif ACTIVATION == "relu2":
        positive = tl.where(a <= 0.0, 0.0, a)
        return positive * positive, 2.0 * positive
    elif ACTIVATION == "sigmoid":
        s, rest = _sigmoid(a)
        return s, s * rest
    else:
        tl.static_assert(ACTIVATION == "identity")
        return a, tl.full(a.shape, 1.0, tl.float32)


@triton.jit
def _lines(lines, per_row, LINES: tl.constexpr, LINE: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """``(row, column, inside)`` of this program's lines [LINES]. ROWS: there may be more than one. WIDE: count in int64."""
    program = tl.program_id(0)
    line = (program.to(tl.int64) if WIDE else program) * LINES + tl.arange(0, LINES)
    row = tl.zeros([LINES], tl.int64)
    column = line.to(tl.int64) * LINE
    if ROWS:
        row = line // per_row
        column = (line - row * per_row) * LINE
        row = row.to(tl.int64)
    return row, column, (line < lines)[:, None]


@triton.jit
def _at(x, row, column, stride, LINE: tl.constexpr):
    """Pointers [LINES, LINE] to the elements of lines that begin at multiples of LINE elements."""
    return x + tl.multiple_of(row * stride + column, LINE)[:, None] + tl.arange(0, LINE)[None, :]


@triton.jit(do_not_specialize=["lines", "per_row", "gate_stride", "up_stride", "y_stride"])
def _forward(
    gate, up, y, lines, per_row, gate_stride, up_stride, y_stride,
    ACTIVATION: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row, column, inside = _lines(lines, per_row, LINES, LINE, ROWS, WIDE)
    a = tl.load(_at(gate, row, column, gate_stride, LINE), mask=inside, other=0.0).to(tl.float32)
    u = tl.load(_at(up, row, column, up_stride, LINE), mask=inside, other=0.0).to(tl.float32)
    value, _ = _activation(a, ACTIVATION)
    tl.store(_at(y, row, column, y_stride, LINE), (value * u).to(y.dtype.element_ty), mask=inside)


@triton.jit(
    do_not_specialize=["lines", "per_row", "grad_stride", "gate_stride", "up_stride", "dgate_stride", "dup_stride"]
)
def _backward(
    grad, gate, up, dgate, dup, lines, per_row, grad_stride, gate_stride, up_stride, dgate_stride, dup_stride,
    ACTIVATION: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row, column, inside = _lines(lines, per_row, LINES, LINE, ROWS, WIDE)
    g = tl.load(_at(grad, row, column, grad_stride, LINE), mask=inside, other=0.0).to(tl.float32)
    a = tl.load(_at(gate, row, column, gate_stride, LINE), mask=inside, other=0.0).to(tl.float32)
    u = tl.load(_at(up, row, column, up_stride, LINE), mask=inside, other=0.0).to(tl.float32)
    value, slope = _activation(a, ACTIVATION)
    tl.store(_at(dgate, row, column, dgate_stride, LINE), (g * u * slope).to(dgate.dtype.element_ty), mask=inside)
    tl.store(_at(dup, row, column, dup_stride, LINE), (g * value).to(dup.dtype.element_ty), mask=inside)


def glu_forward(gpu: Gpu, args: Glu) -> Tensor:
    gate, up = _halves(args.gate, args.up)
    y = gpu.empty(gate.shape, gate.dtype)
    _launch(gpu, _forward, args.activation, args.up is None, gate, up, y)
    return y


def glu_backward(gpu: Gpu, args: GluBackward) -> tuple[Tensor, Tensor | None]:
    gate, up = _halves(args.gate, args.up)
    dgate = gpu.empty(args.gate.shape, args.gate.dtype)
    dup = None if args.up is None else gpu.empty(args.up.shape, args.up.dtype)
    _launch(gpu, _backward, args.activation, dup is None, args.grad, gate, up, *_halves(dgate, dup))
    return dgate, dup


def _halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """gate and up, or the views of them in one tensor ``(..., 2 W)``."""
    if up is not None:
        return gate, up
    width = gate.shape[-1] // 2
    return gate[..., :width], gate[..., width:]


def _launch(gpu: Gpu, kernel: object, activation: str, halves: bool, *tensors: Tensor) -> None:
    """halves: some of the tensors are views of one; a single row of them is no other kernel."""
    count, width, element = tensors[0].numel(), tensors[0].shape[-1], tensors[0].element_size()
    if count == 0:
        return
    flat = not halves and all(x.is_contiguous() for x in tensors)
    if flat:
        matrices, width = [Rows(x, 0) for x in tensors], count
    else:
        matrices = [as_rows(gpu, x) for x in tensors]
    line = 16 // element
    if width % line or any(x.stride % line or not gpu.aligned(x.tensor) for x in matrices):
        line = 1
    lines, per_program = count // line, _ELEMENTS // line
    constants = (activation, per_program, line, not flat, lines + per_program >= _INT32)
    strides = tuple(x.stride for x in matrices)
    grid = (triton.cdiv(lines, per_program),)
    gpu.launch(kernel, grid, [x.tensor for x in matrices], (lines, width // line, *strides), constants)
