"""Attention through PyTorch's CPU flash kernel, called per block of rows and range of visible keys, merged by lse.

The kernel knows full and causal attention and an additive mask; softcap and values wider than keys it does not know. Its
sharp edges are dealt with here: it divides by zero without rows or keys, gives a fully masked row an lse of 0, and for
16-bit inputs has an lse of five digits and a float16 backward that is ten times slower, so these are given as float32.
Its backward takes any lse: with that of all keys, the gradients of a range are exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from headwise.backends.cpu.attention_band import Segment, segments
from headwise.backends.cpu.attention_mask import Block, Range, masked_blocks
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

_BAND_ROWS = 256
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


class _Call(NamedTuple):
    """One call of PyTorch's kernel: a range of keys for a block of rows."""

    segment: Segment
    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    additive: Tensor | None

    def empty(self, lse: Tensor) -> Tensor | None:
        """bool, like lse: the rows that see nothing of the range; None if there are none.

        The kernel gives such a row an lse of 0, or NaN where the keys or the row hold one. Other rows may
        have these values too; only then is the mask read.
        """
        if self.additive is None or not ((lse == 0) | lse.isnan()).any():
            return None
        empty = (self.additive == -torch.inf).all(-1).expand(lse.shape)
        return empty if empty.any() else None


def _calls(problem: Problem, block: Block, has_hidden_values: bool) -> Iterator[_Call]:
    """``problem``: of the batch entries of the block."""
    for segment, additive in block.ranges:
        dtype = statistics_dtype(problem.q.dtype)
        q = problem.q[:, :, block.start : block.stop].to(dtype)
        k, v = (x[:, :, segment.start : segment.stop].to(dtype) for x in (problem.k, problem.v))
        if not additive:
            yield _Call(segment, q, k, v, segment.kind == "diagonal", None)
            continue
        seen = seen_scores(problem, block.start, block.stop, segment)
        if has_hidden_values:
            k, v = (without_hidden_keys(x, seen, problem) for x in (k, v))
        bias = scores_slice(problem.bias, slice(block.start, block.stop), slice(segment.start, segment.stop))
        scores = _additive(seen, bias, dtype).expand(*q.shape[:3], k.shape[2])
        yield _Call(segment, q, k, v, False, scores)


def _additive(seen: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The bias, with -inf where a score is not seen."""
    if seen is None:
        assert bias is not None
        return bias.to(dtype)
    if bias is not None:
        return torch.where(seen, bias.to(dtype), -torch.inf)
    # 0 and -inf by arithmetic: `where` takes ten times as long.
    zeros_and_ones = seen.to(dtype)
    return zeros_and_ones.sub_(1).mul_(torch.finfo(dtype).max).mul_(2)


def _has_hidden_values(problem: Problem) -> bool:
    """May keys that a mask hides from all hold NaN or infinity? Zero times those is NaN, so they have to be looked for."""
    if problem.mask is None:
        return False
    return any(not x.sum(dtype=statistics_dtype(x.dtype)).isfinite() for x in (problem.k, problem.v))


def flash_forward(problem: Problem, out: Tensor, lse: Tensor) -> None:
    """Fill out ``(B, Hq, Sq, Dv)`` and lse ``(B, Hq, Sq)``."""
    width = problem.v.shape[3]
    problem = _same_head_dims(problem)
    has_hidden_values = _has_hidden_values(problem)
    for block in _blocks(problem):
        outs, lses = [], []
        for call in _calls(problem.of_batch(block.batch), block, has_hidden_values):
            found, found_lse = _kernel(
                call.q, call.k, call.v, 0.0, call.causal, attn_mask=call.additive, scale=problem.scale
            )
            empty = call.empty(found_lse)
            if empty is not None:
                found = found.masked_fill(empty[..., None], 0.0)
                found_lse = found_lse.masked_fill(empty, -torch.inf)
            outs.append(found)
            lses.append(found_lse)
        rows = (block.batch, ALL, slice(block.start, block.stop))
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
        has_hidden_values = _has_hidden_values(problem)
        for block in _blocks(problem):
            rows = (block.batch, ALL, slice(block.start, block.stop))
            for call in _calls(problem.of_batch(block.batch), block, has_hidden_values):
                partials = _kernel_backward(
                    grad_out[rows].to(call.q.dtype), call.q, call.k, call.v, out[rows].to(call.q.dtype), lse[rows], 0.0,
                    call.causal, attn_mask=call.additive, scale=problem.scale,
                )  # fmt: skip
                keys = (block.batch, ALL, slice(call.segment.start, call.segment.stop))
                for total, place, partial in zip(grads, (rows, keys, keys), partials, strict=True):
                    total[place] += partial
    dq, dk, dv = (x[..., :width] for x, width in zip(grads, widths, strict=True))
    return dq, dk, dv


def _blocks(problem: Problem) -> Iterator[Block]:
    if problem.mask is not None or problem.bias is not None:
        yield from masked_blocks(problem)
        return
    for start, stop in _row_blocks(problem):
        found = segments(start, stop, problem.k.shape[2], problem.band, _SMALLEST_FULL)
        yield Block(ALL, start, stop, [Range(segment, segment.kind == "partial") for segment in found])


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
    if band.left >= 0:
        # A block sees its own rows plus the window; with a quarter of the window in rows, few scores are masked.
        return min(rows, max(64, min(1024, (band.left + max(band.right, 0) + 1) // 4)))
    if band.right > 0:
        return min(rows, _BAND_ROWS)
    return rows  # full, or causal: nothing but a full rectangle and a square with its diagonal


def _same_head_dims(problem: Problem) -> Problem:
    """The kernel wants D = Dv. Zeros behind the narrower side change neither scores nor the first Dv outputs."""
    width = max(problem.q.shape[3], problem.v.shape[3])
    q, k, v = (_pad_last(x, width) for x in (problem.q, problem.k, problem.v))
    return problem._replace(q=q, k=k, v=v)


def _pad_last(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
