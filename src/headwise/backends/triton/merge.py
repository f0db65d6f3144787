"""Merging of partial attention results in Triton: one pass that reads each of them once, forward and backward.

    w_i = exp(lse_i - lse)        out = sum_i w_i out_i
    d out_i = w_i g               d lse_i = w_i (g · out_i - g · out + g_lse)

A kernel takes up to eight partial results. More are merged in groups of eight first, into float32; merging is associative.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwise.backends.triton.blocks import aligned_elements, block_of

if TYPE_CHECKING:
    from headwise.backends.triton.gpu import Gpu
    from headwise.ops.attention.merge import Merge, MergeBackward

_GROUP = 8  # as many partial results as the kernels have parameters for
_TILE = 2048  # elements of one that a program holds


@triton.jit
def _rows_of(rows, size_1, size_2, ROWS: tl.constexpr):
    """``(row, i, j, k, inside)``: the rows of this program, and their indices into (·, size_1, size_2)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return row, row // size_2 // size_1, row // size_2 % size_1, row % size_2, row < rows


@triton.jit
def _weights(lses, at, inside, COUNT: tl.constexpr, SLOTS: tl.constexpr):
    """The weight of each partial result [ROWS, SLOTS], and the merged log-sum-exp [ROWS]."""
    slot = tl.arange(0, SLOTS)[None, :]
    stacked = tl.full([at.shape[0], SLOTS], -float("inf"), tl.float32)
    for i in tl.static_range(COUNT):
        lse = tl.load(lses[i] + at, mask=inside, other=-float("inf"))
        stacked = tl.where(slot == i, lse[:, None], stacked)
    highest = tl.max(stacked, 1)
    highest = tl.where(highest == -float("inf"), 0.0, highest)  # none saw anything: weights of zero, not NaN
    weights = tl.exp(stacked - highest[:, None])
    total = tl.sum(weights, 1)
    merged = tl.where(total == 0.0, -float("inf"), highest + tl.log(total))
    return weights / tl.where(total == 0.0, 1.0, total)[:, None], merged


@triton.jit
def _column(stacked, i, SLOTS: tl.constexpr):
    """Column ``i`` of [ROWS, SLOTS]."""
    return tl.sum(tl.where(tl.arange(0, SLOTS)[None, :] == i, stacked, 0.0), 1)


@triton.jit(do_not_specialize=["rows", "size_1", "size_2", "o_0", "o_1", "o_2", "l_0", "l_1", "l_2"])
def _merge(
    o0, o1, o2, o3, o4, o5, o6, o7, l0, l1, l2, l3, l4, l5, l6, l7, out, lse,
    rows, size_1, size_2, o_0, o_1, o_2, l_0, l_1, l_2,
    COUNT: tl.constexpr, SLOTS: tl.constexpr, DV: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    outs = (o0, o1, o2, o3, o4, o5, o6, o7)
    row, i0, i1, i2, inside = _rows_of(rows, size_1, size_2, ROWS)
    weights, merged = _weights((l0, l1, l2, l3, l4, l5, l6, l7), i0 * l_0 + i1 * l_1 + i2 * l_2, inside, COUNT, SLOTS)
    column = tl.arange(0, COLUMNS)
    at = tl.multiple_of(i0 * o_0 + i1 * o_1 + i2 * o_2, ALIGN)[:, None] + column[None, :]
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for i in tl.static_range(COUNT):
        weight = _column(weights, i, SLOTS)
        # A partial result that saw nothing weighs nothing even if its rows were never written.
        there = (inside & (weight != 0.0))[:, None] & (column < DV)[None, :]
        acc += weight[:, None] * tl.load(outs[i] + at, mask=there, other=0.0).to(tl.float32)
    to = row[:, None] * DV + column[None, :]
    tl.store(out + to, acc.to(out.dtype.element_ty), mask=inside[:, None] & (column < DV)[None, :])
    tl.store(lse + row, merged, mask=inside)


@triton.jit(
    do_not_specialize=[
        "rows", "size_1", "size_2", "o_0", "o_1", "o_2", "l_0", "l_1", "l_2", "g_0", "g_1", "g_2", "gl_0", "gl_1", "gl_2"
    ]
)  # fmt: skip
def _merge_backward(
    o0, o1, o2, o3, o4, o5, o6, o7, l0, l1, l2, l3, l4, l5, l6, l7,
    do0, do1, do2, do3, do4, do5, do6, do7, dl0, dl1, dl2, dl3, dl4, dl5, dl6, dl7, grad, grad_lse,
    rows, size_1, size_2, o_0, o_1, o_2, l_0, l_1, l_2, g_0, g_1, g_2, gl_0, gl_1, gl_2,
    COUNT: tl.constexpr, SLOTS: tl.constexpr, DV: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    outs = (o0, o1, o2, o3, o4, o5, o6, o7)
    douts = (do0, do1, do2, do3, do4, do5, do6, do7)
    dlses = (dl0, dl1, dl2, dl3, dl4, dl5, dl6, dl7)
    row, i0, i1, i2, inside = _rows_of(rows, size_1, size_2, ROWS)
    weights, _ = _weights((l0, l1, l2, l3, l4, l5, l6, l7), i0 * l_0 + i1 * l_1 + i2 * l_2, inside, COUNT, SLOTS)
    column = tl.arange(0, COLUMNS)
    whole = inside[:, None] & (column < DV)[None, :]
    g_at = tl.multiple_of(i0 * g_0 + i1 * g_1 + i2 * g_2, ALIGN)[:, None] + column[None, :]
    g = tl.load(grad + g_at, mask=whole, other=0.0).to(tl.float32)
    g_lse = tl.load(grad_lse + i0 * gl_0 + i1 * gl_1 + i2 * gl_2, mask=inside, other=0.0)

    at = tl.multiple_of(i0 * o_0 + i1 * o_1 + i2 * o_2, ALIGN)[:, None] + column[None, :]
    to = row[:, None] * DV + column[None, :]
    slot = tl.arange(0, SLOTS)[None, :]
    products = tl.zeros([ROWS, SLOTS], tl.float32)  # g · out_i
    for i in tl.static_range(COUNT):
        weight = _column(weights, i, SLOTS)
        there = (weight != 0.0)[:, None] & whole
        out = tl.load(outs[i] + at, mask=there, other=0.0).to(tl.float32)
        products = tl.where(slot == i, tl.sum(g * out, 1)[:, None], products)
        tl.store(douts[i] + to, (weight[:, None] * g).to(douts[i].dtype.element_ty), mask=whole)
    # g · out is the same sum with the weights, so the merged result itself is not needed.
    dlse = weights * (products - tl.sum(weights * products, 1)[:, None] + g_lse[:, None])
    for i in tl.static_range(COUNT):
        tl.store(dlses[i] + row, _column(dlse, i, SLOTS), mask=inside)


def merge_attention(gpu: Gpu, args: Merge) -> tuple[Tensor, Tensor]:
    return _forward(gpu, args.outs, args.lses, args.outs[0].dtype)


def merge_attention_backward(gpu: Gpu, args: MergeBackward) -> tuple[Tensor, ...]:
    douts, dlses = _backward(gpu, args.grad_out, args.grad_lse, args.outs, args.lses)
    return (*douts, *dlses)


def _forward(
    gpu: Gpu, outs: Sequence[Tensor], lses: Sequence[Tensor], dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    if len(outs) > _GROUP:
        outs, lses = zip(*[_forward(gpu, *group) for group in _groups(outs, lses)], strict=True)
        return _forward(gpu, outs, lses, dtype)
    out, lse = gpu.empty(outs[0].shape, dtype), gpu.empty(lses[0].shape, torch.float32)
    if lse.numel() > 0:
        outs, lses = _same_rows(gpu, outs), _same_strides(gpu, lses)
        constants = _constants(outs)
        gpu.launch(
            _merge, (triton.cdiv(lse.numel(), constants[4]),), (*_slots(outs), *_slots(lses), out, lse),
            (lse.numel(), *lse.shape[-2:], *_row_strides(outs[0], lse), *_row_strides(lses[0], lse)), constants,
        )  # fmt: skip
    return out, lse


def _backward(
    gpu: Gpu, grad_out: Tensor, grad_lse: Tensor, outs: Sequence[Tensor], lses: Sequence[Tensor]
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    if len(outs) > _GROUP:
        groups = _groups(outs, lses)
        merged = [_forward(gpu, *group) for group in groups]
        grads = zip(*_backward(gpu, grad_out, grad_lse, *zip(*merged, strict=True)), strict=True)
        found = [_backward(gpu, *grad, *group) for grad, group in zip(grads, groups, strict=True)]
        return [d for douts, _ in found for d in douts], [d for _, dlses in found for d in dlses]
    douts = [gpu.empty(x.shape, x.dtype) for x in outs]
    dlses = [gpu.empty(x.shape, torch.float32) for x in lses]
    rows = grad_lse.numel()
    if rows > 0:
        outs, lses, (grad,) = _same_rows(gpu, outs), _same_strides(gpu, lses), _same_rows(gpu, [grad_out])
        constants = _constants(outs, grad)
        strides = (_row_strides(x, grad_lse) for x in (outs[0], lses[0], grad, grad_lse))
        gpu.launch(
            _merge_backward, (triton.cdiv(rows, constants[4]),),
            (*_slots(outs), *_slots(lses), *_slots(douts), *_slots(dlses), grad, grad_lse),
            (rows, *grad_lse.shape[-2:], *itertools.chain(*strides)), constants,
        )  # fmt: skip
    return douts, dlses


def _groups(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> list[tuple[Sequence[Tensor], Sequence[Tensor]]]:
    return [(outs[i : i + _GROUP], lses[i : i + _GROUP]) for i in range(0, len(outs), _GROUP)]


def _same_strides(gpu: Gpu, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The tensors as they are if their strides agree, else contiguous."""
    same = all(x.stride() == tensors[0].stride() for x in tensors)
    return tensors if same else [gpu.contiguous(x) for x in tensors]


def _same_rows(gpu: Gpu, outs: Sequence[Tensor]) -> Sequence[Tensor]:
    """The same with contiguous rows."""
    rows = outs[0].shape[-1] <= 1 or outs[0].stride(-1) == 1
    return _same_strides(gpu, outs) if rows else [gpu.contiguous(x) for x in outs]


def _slots(tensors: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    return (*tensors, *[None] * (_GROUP - len(tensors)))


def _row_strides(x: Tensor, lse: Tensor) -> tuple[int, int, int]:
    """Strides of x over the dims of an lse: ``(B, Hq, Sq)``, or two dims, and 0 for the one that is not there."""
    first, *others = x.stride()[: lse.dim()]
    return (first, others[0], others[1]) if lse.dim() == 3 else (0, first, others[0])


def _constants(outs: Sequence[Tensor], *others: Tensor) -> tuple[int, int, int, int, int, int]:
    """``(COUNT, SLOTS, DV, COLUMNS, ROWS, ALIGN)``"""
    dv = outs[0].shape[-1]
    slots = 2 if len(outs) <= 2 else 4 if len(outs) <= 4 else _GROUP
    rows = max(1, _TILE // block_of(dv))
    return len(outs), slots, dv, block_of(dv), rows, aligned_elements(*outs, *others)
