"""Merging of partial attention results in Triton: one pass that reads each part once, forward and backward.

    w_i = exp(lse_i - lse)        out = sum_i w_i out_i
    d out_i = w_i g               d lse_i = w_i (g · out_i - g · out + g_lse)

A kernel takes up to eight parts. More of them are merged by eights first, into float32; merging is associative.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwise.backends.triton.blocks import aligned_elements, block_of
from headwise.backends.triton.launch import launch

_PARTS = 8  # as many as the kernels have parameters for
_TILE = 2048  # elements of a part that a program holds


@triton.jit
def _rows_of(rows, size_1, size_2, ROWS: tl.constexpr):
    """``(row, i, j, k, inside)``: the rows of this program, and their indices into (·, size_1, size_2)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return row, row // size_2 // size_1, row // size_2 % size_1, row % size_2, row < rows


@triton.jit
def _shares(lses, at, inside, PARTS: tl.constexpr, SLOTS: tl.constexpr):
    """``(weights, lse)``: ``[ROWS, SLOTS]``, what share of the whole each part has, and the log-sum-exp over the parts."""
    slot = tl.arange(0, SLOTS)[None, :]
    stacked = tl.full([at.shape[0], SLOTS], -float("inf"), tl.float32)
    for i in tl.static_range(PARTS):
        part = tl.load(lses[i] + at, mask=inside, other=-float("inf"))
        stacked = tl.where(slot == i, part[:, None], stacked)
    highest = tl.max(stacked, 1)
    highest = tl.where(highest == -float("inf"), 0.0, highest)  # no part saw anything: weights of zero, not NaN
    weights = tl.exp(stacked - highest[:, None])
    total = tl.sum(weights, 1)
    lse = tl.where(total == 0.0, -float("inf"), highest + tl.log(total))
    return weights / tl.where(total == 0.0, 1.0, total)[:, None], lse


@triton.jit
def _part(stacked, i, SLOTS: tl.constexpr):
    """Column ``i`` of what was stacked up for all parts."""
    return tl.sum(tl.where(tl.arange(0, SLOTS)[None, :] == i, stacked, 0.0), 1)


@triton.jit(do_not_specialize=["rows", "size_1", "size_2", "o_0", "o_1", "o_2", "l_0", "l_1", "l_2"])
def _merge(
    o0, o1, o2, o3, o4, o5, o6, o7, l0, l1, l2, l3, l4, l5, l6, l7, out, lse,
    rows, size_1, size_2, o_0, o_1, o_2, l_0, l_1, l_2,
    PARTS: tl.constexpr, SLOTS: tl.constexpr, DV: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    outs = (o0, o1, o2, o3, o4, o5, o6, o7)
    row, i0, i1, i2, inside = _rows_of(rows, size_1, size_2, ROWS)
    weights, whole = _shares((l0, l1, l2, l3, l4, l5, l6, l7), i0 * l_0 + i1 * l_1 + i2 * l_2, inside, PARTS, SLOTS)
    column = tl.arange(0, COLUMNS)
    at = tl.multiple_of(i0 * o_0 + i1 * o_1 + i2 * o_2, ALIGN)[:, None] + column[None, :]
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for i in tl.static_range(PARTS):
        weight = _part(weights, i, SLOTS)
        # A part that saw nothing weighs nothing even if its rows were never written.
        there = (inside & (weight != 0.0))[:, None] & (column < DV)[None, :]
        acc += weight[:, None] * tl.load(outs[i] + at, mask=there, other=0.0).to(tl.float32)
    to = row[:, None] * DV + column[None, :]
    tl.store(out + to, acc.to(out.dtype.element_ty), mask=inside[:, None] & (column < DV)[None, :])
    tl.store(lse + row, whole, mask=inside)


@triton.jit(
    do_not_specialize=[
        "rows", "size_1", "size_2", "o_0", "o_1", "o_2", "l_0", "l_1", "l_2", "g_0", "g_1", "g_2", "gl_0", "gl_1", "gl_2"
    ]
)  # fmt: skip
def _merge_backward(
    o0, o1, o2, o3, o4, o5, o6, o7, l0, l1, l2, l3, l4, l5, l6, l7,
    do0, do1, do2, do3, do4, do5, do6, do7, dl0, dl1, dl2, dl3, dl4, dl5, dl6, dl7, grad, grad_lse,
    rows, size_1, size_2, o_0, o_1, o_2, l_0, l_1, l_2, g_0, g_1, g_2, gl_0, gl_1, gl_2,
    PARTS: tl.constexpr, SLOTS: tl.constexpr, DV: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    outs = (o0, o1, o2, o3, o4, o5, o6, o7)
    douts = (do0, do1, do2, do3, do4, do5, do6, do7)
    dlses = (dl0, dl1, dl2, dl3, dl4, dl5, dl6, dl7)
    row, i0, i1, i2, inside = _rows_of(rows, size_1, size_2, ROWS)
    weights, _ = _shares((l0, l1, l2, l3, l4, l5, l6, l7), i0 * l_0 + i1 * l_1 + i2 * l_2, inside, PARTS, SLOTS)
    column = tl.arange(0, COLUMNS)
    whole = inside[:, None] & (column < DV)[None, :]
    g_at = tl.multiple_of(i0 * g_0 + i1 * g_1 + i2 * g_2, ALIGN)[:, None] + column[None, :]
    g = tl.load(grad + g_at, mask=whole, other=0.0).to(tl.float32)
    g_lse = tl.load(grad_lse + i0 * gl_0 + i1 * gl_1 + i2 * gl_2, mask=inside, other=0.0)

    at = tl.multiple_of(i0 * o_0 + i1 * o_1 + i2 * o_2, ALIGN)[:, None] + column[None, :]
    to = row[:, None] * DV + column[None, :]
    slot = tl.arange(0, SLOTS)[None, :]
    moved = tl.zeros([ROWS, SLOTS], tl.float32)  # g · out_i
    for i in tl.static_range(PARTS):
        weight = _part(weights, i, SLOTS)
        there = (weight != 0.0)[:, None] & whole
        part = tl.load(outs[i] + at, mask=there, other=0.0).to(tl.float32)
        moved = tl.where(slot == i, tl.sum(g * part, 1)[:, None], moved)
        tl.store(douts[i] + to, (weight[:, None] * g).to(douts[i].dtype.element_ty), mask=whole)
    # g · out is the same sum with the weights, so the merged result itself is not needed.
    dlse = weights * (moved - tl.sum(weights * moved, 1)[:, None] + g_lse[:, None])
    for i in tl.static_range(PARTS):
        tl.store(dlses[i] + row, _part(dlse, i, SLOTS), mask=inside)


def merge_attention(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    return _merge_into(outs[0].dtype, outs, lses)


def merge_attention_backward(
    grad_out: Tensor, grad_lse: Tensor, outs: list[Tensor], lses: list[Tensor], out: Tensor, lse: Tensor
) -> list[Tensor]:
    douts, dlses = _backward(grad_out, grad_lse, outs, lses)
    return douts + dlses


def _merge_into(dtype: torch.dtype, outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    if len(outs) > _PARTS:
        merged = [_merge_into(torch.float32, o, x) for o, x in zip(_by_eights(outs), _by_eights(lses), strict=True)]
        outs, lses = zip(*merged, strict=True)
        return _merge_into(dtype, outs, lses)
    out = torch.empty(outs[0].shape, dtype=dtype, device=outs[0].device)
    lse = torch.empty(lses[0].shape, dtype=torch.float32, device=outs[0].device)
    if lse.numel() == 0:
        return out, lse
    outs, lses = _rows_alike(outs), _alike(lses)
    constants = _constants(outs)
    launch(
        _merge,
        (-(-lse.numel() // constants[4]), 1, 1),
        (*_slots(outs), *_slots(lses), out, lse),
        (lse.numel(), *lse.shape[-2:], *_row_strides(outs[0], lse), *_row_strides(lses[0], lse)),
        constants,
    )
    return out, lse


def _backward(
    grad_out: Tensor, grad_lse: Tensor, outs: Sequence[Tensor], lses: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    if len(outs) > _PARTS:
        groups = list(zip(_by_eights(outs), _by_eights(lses), strict=True))
        merged = [_merge_into(torch.float32, o, x) for o, x in groups]
        grads = zip(*_backward(grad_out, grad_lse, *zip(*merged, strict=True)), strict=True)
        found = [_backward(g, g_lse, o, x) for (g, g_lse), (o, x) in zip(grads, groups, strict=True)]
        return [d for douts, _ in found for d in douts], [d for _, dlses in found for d in dlses]
    douts = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in outs]
    dlses = [torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in lses]
    if grad_lse.numel() == 0:
        return douts, dlses
    outs, lses, (grad,) = _rows_alike(outs), _alike(lses), _rows_alike([grad_out])
    constants = _constants(outs, grad)
    launch(
        _merge_backward,
        (-(-grad_lse.numel() // constants[4]), 1, 1),
        (*_slots(outs), *_slots(lses), *_slots(douts), *_slots(dlses), grad, grad_lse),
        (
            grad_lse.numel(), *grad_lse.shape[-2:], *_row_strides(outs[0], grad_lse), *_row_strides(lses[0], grad_lse),
            *_row_strides(grad, grad_lse), *_row_strides(grad_lse, grad_lse),
        ),
        constants,
    )  # fmt: skip
    return douts, dlses


def _by_eights(parts: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    return [parts[i : i + _PARTS] for i in range(0, len(parts), _PARTS)]


def _alike(parts: Sequence[Tensor]) -> Sequence[Tensor]:
    """The parts, all of the same strides: as they are, if they can be."""
    return parts if all(p.stride() == parts[0].stride() for p in parts) else [p.contiguous() for p in parts]


def _rows_alike(outs: Sequence[Tensor]) -> Sequence[Tensor]:
    """The parts, all of the same strides, their rows contiguous."""
    contiguous = outs[0].shape[-1] <= 1 or outs[0].stride(-1) == 1
    return _alike(outs if contiguous else [x.contiguous() for x in outs])


def _slots(parts: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    return (*parts, *[None] * (_PARTS - len(parts)))


def _row_strides(x: Tensor, lse: Tensor) -> tuple[int, int, int]:
    """Strides of x over the dims of an lse: ``(B, Hq, Sq)``, or two dims, and 0 for the one that is not there."""
    first, *others = x.stride()[: lse.dim()]
    return (first, others[0], others[1]) if lse.dim() == 3 else (0, first, others[0])


def _constants(outs: Sequence[Tensor], *others: Tensor) -> tuple[int, int, int, int, int, int]:
    """``(PARTS, SLOTS, DV, COLUMNS, ROWS, ALIGN)``"""
    dv = outs[0].shape[-1]
    slots = 2 if len(outs) <= 2 else 4 if len(outs) <= 4 else _PARTS
    rows = max(1, _TILE // block_of(dv))
    return len(outs), slots, dv, block_of(dv), rows, aligned_elements(*outs, *others)
