"""Attention through PyTorch's CPU flash kernel, called per block of rows and range of visible keys, merged by lse.

The kernel knows full and causal attention and an additive mask; softcap and values wider than keys it does not know. Its
sharp edges are dealt with here: it divides by zero without rows or keys, gives a fully masked row an lse of 0, and for
16-bit inputs has an lse of five digits and a float16 backward that is ten times slower, so these are given as float32.
Its backward takes any lse: with that of all keys, the gradients of a range are exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headwise.backends.cpu.attention_band import Segment, segments
from headwise.backends.cpu.attention_problem import (
    ALL,
    Problem,
    accumulator,
    scores_slice,
    seen_scores,
    without_hidden_keys,
)
from headwise.backends.cpu.merge import merge
from headwise.layout import statistics_dtype

_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_kernel_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

_MASKED_ROWS = 256
_MASK_ELEMENTS = 1 << 22  # floats of additive mask alive at once
_SMALLEST_FULL = 256  # a shorter range of fully visible keys is not worth a call of its own


def flash_whole(problem: Problem) -> tuple[Tensor, Tensor] | None:
    """out and lse if a single call of the kernel computes them, with nothing to merge or copy; else None."""
    if problem.q.dtype != statistics_dtype(problem.q.dtype) or problem.q.shape[3] != problem.v.shape[3]:
        return None
    whole = _whole_segment(problem)
    if whole is None:
        return None
    out, lse = _kernel(problem.q, problem.k, problem.v, 0.0, whole.kind == "diagonal", scale=problem.scale)
    return out, lse.contiguous()


def _whole_segment(problem: Problem) -> Segment | None:
    """All keys for all rows, full or causal, without a mask or bias; None if it is anything else."""
    rows, keys = problem.q.shape[2], problem.k.shape[2]
    if problem.mask is not None or problem.bias is not None or problem.q.numel() == 0 or keys == 0:
        return None
    found = segments(0, rows, keys, problem.band)
    simple = len(found) == 1 and found[0].kind != "partial" and found[0].stop - found[0].start == keys
    return found[0] if simple else None


def _calls(problem: Problem, start: int, stop: int) -> Iterator[tuple[Segment, bool, Any]]:
    """The calls of PyTorch's kernel for a block of rows: the segment, whether it is causal, and the inputs."""
    for segment in _segments(problem, start, stop):
        inputs = _segment_inputs(problem, start, stop, segment)
        if inputs is not None:
            yield segment, segment.kind == "diagonal" and inputs[3] is None, inputs


def flash_forward(problem: Problem, out: Tensor, lse: Tensor) -> None:
    """Fill out ``(B, Hq, Sq, Dv)`` and lse ``(B, Hq, Sq)``."""
    width = problem.v.shape[3]
    problem = _same_head_dims(problem)
    for start, stop in _row_blocks(problem):
        outs, lses = [], []
        for _, causal, (q, k, v, additive, empty) in _calls(problem, start, stop):
            partial_out, partial_lse = _kernel(q, k, v, 0.0, causal, attn_mask=additive, scale=problem.scale)
            if empty is not None:
                partial_out = partial_out.masked_fill(empty[..., None], 0.0)
                partial_lse = partial_lse.masked_fill(empty, -torch.inf)
            outs.append(partial_out)
            lses.append(partial_lse)
        rows = (ALL, ALL, slice(start, stop))
        if not outs:
            out[rows], lse[rows] = 0.0, -torch.inf
        else:
            block_out, block_lse = (outs[0], lses[0]) if len(outs) == 1 else merge(outs, lses)
            out[rows], lse[rows] = block_out[..., :width], block_lse


def flash_backward(problem: Problem, grad_out: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)`` in the dtype that sums are kept in. lse: of all keys, sink included, +inf for an empty row."""
    widths = problem.q.shape[3], problem.k.shape[3], problem.v.shape[3]
    problem = _same_head_dims(problem)
    grad_out, out = (_pad_last(x, problem.v.shape[3]) for x in (grad_out, out))
    whole = _whole_segment(problem)
    if whole is not None:
        tensors = (x.to(lse.dtype) for x in (grad_out, problem.q, problem.k, problem.v, out))
        grads = _kernel_backward(*tensors, lse, 0.0, whole.kind == "diagonal", scale=problem.scale)
    else:
        grads = [accumulator(x) for x in (problem.q, problem.k, problem.v)]
        for start, stop in _row_blocks(problem):
            rows = (ALL, ALL, slice(start, stop))
            for segment, causal, (q, k, v, additive, _) in _calls(problem, start, stop):
                partials = _kernel_backward(
                    grad_out[rows].to(q.dtype), q, k, v, out[rows].to(q.dtype), lse[rows], 0.0, causal,
                    attn_mask=additive, scale=problem.scale,
                )  # fmt: skip
                keys = (ALL, ALL, slice(segment.start, segment.stop))
                for total, place, partial in zip(grads, (rows, keys, keys), partials, strict=True):
                    total[place] += partial
    dq, dk, dv = (x[..., :width] for x, width in zip(grads, widths, strict=True))
    return dq, dk, dv


def _segment_inputs(
    problem: Problem, start: int, stop: int, segment: Segment
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None] | None:
    """q, k, v of the segment, the additive mask, and which rows see nothing of it; None if no row sees anything."""
    dtype = statistics_dtype(problem.q.dtype)
    q = problem.q[:, :, start:stop].to(dtype)
    k, v = (x[:, :, segment.start : segment.stop].to(dtype) for x in (problem.k, problem.v))
    if problem.mask is None and problem.bias is None and segment.kind != "partial":
        return q, k, v, None, None
    seen = seen_scores(problem, start, stop, segment)
    if seen is not None and not seen.any():
        return None
    k, v = (without_hidden_keys(x, seen, problem) for x in (k, v))
    rows, keys = stop - start, segment.stop - segment.start
    bias = scores_slice(problem.bias, slice(start, stop), slice(segment.start, segment.stop))
    additive = torch.zeros((), dtype=dtype) if bias is None else bias.to(dtype)
    if seen is not None:
        additive = torch.where(seen, additive, -torch.inf)
    empty = (additive == -torch.inf).expand(*additive.shape[:2], rows, keys).all(-1)
    additive = additive.expand(q.shape[0], q.shape[1], rows, keys)
    return q, k, v, additive, empty if empty.any() else None


def _row_blocks(problem: Problem) -> Iterator[tuple[int, int]]:
    rows, size = problem.q.shape[2], _rows_per_block(problem)
    # More queries than keys, causal: the first rows see nothing, and the rest is a square with its diagonal.
    blind = min(rows, -problem.band.offset) if problem.band.right == 0 and problem.band.offset < 0 else 0
    if blind:
        yield 0, blind
    for start in range(blind, rows, size):
        yield start, min(start + size, rows)


def _rows_per_block(problem: Problem) -> int:
    band, rows = problem.band, max(problem.q.shape[2], 1)
    if problem.mask is not None or problem.bias is not None:
        return min(rows, _MASKED_ROWS)
    if band.left >= 0:
        # A block sees its own rows plus the window; with a quarter of the window in rows, few scores are masked.
        return min(rows, max(64, min(1024, (band.left + max(band.right, 0) + 1) // 4)))
    if band.right > 0:
        return min(rows, _MASKED_ROWS)
    return rows  # full, or causal: nothing but a full rectangle and a square with its diagonal


def _segments(problem: Problem, start: int, stop: int) -> list[Segment]:
    found = segments(start, stop, problem.k.shape[2], problem.band, _SMALLEST_FULL)
    if problem.mask is None and problem.bias is None:
        return found
    # Masks are turned into floats piece by piece, never as a whole.
    scores = [x for x in (problem.mask, problem.bias) if x is not None]
    planes = max(x.shape[0] for x in scores) * max(x.shape[1] for x in scores)
    step = max(64, _MASK_ELEMENTS // max(1, planes * (stop - start)))
    return [
        Segment(low, min(low + step, segment.stop), "full" if segment.kind == "full" else "partial")
        for segment in found
        for low in range(segment.start, segment.stop, step)
    ]


def _same_head_dims(problem: Problem) -> Problem:
    """The kernel wants D = Dv. Zeros behind the narrower side change neither scores nor the first Dv outputs."""
    width = max(problem.q.shape[3], problem.v.shape[3])
    q, k, v = (_pad_last(x, width) for x in (problem.q, problem.k, problem.v))
    return problem._replace(q=q, k=k, v=v)


def _pad_last(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
