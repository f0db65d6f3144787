"""The lengths of a padded call: which queries and keys of a batch entry there are, and what a bad one makes of results."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from headwise.backends.triton.scores import checked_length

if TYPE_CHECKING:
    from headwise.backends.triton.gpu import Gpu
    from headwise.ops.attention._arguments import Attention

ELEMENTS = 4096  # that a program fills at once
_ROWS = 256


def lengths_of(gpu: Gpu, args: Attention) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """q_lengths, kv_lengths and kv_starts."""

    def of(x: Tensor | None) -> Tensor | None:
        return None if x is None else gpu.contiguous(x)

    return of(args.q_lengths), of(args.kv_lengths), of(args.kv_starts)


def mark_bad(gpu: Gpu, args: Attention, x: Tensor) -> None:
    """NaN in the entries of x that have a bad length; x holds one entry behind the other."""
    gpu.launch(
        _fill_bad, (args.q.shape[0], 8), (*lengths_of(gpu, args), x),
        (args.q.shape[2], args.k.shape[2], x.numel() // args.q.shape[0]), (ELEMENTS,),
    )  # fmt: skip


def mark_rows(gpu: Gpu, args: Attention, lse: Tensor) -> None:
    """lse ``(B, H, S)``: -inf past the queries of an entry, which a sink does not reach, and NaN in a bad one."""
    batch, heads, queries = lse.shape
    gpu.launch(
        _fill_rows, (batch * heads * triton.cdiv(queries, _ROWS),), (*lengths_of(gpu, args), lse),
        (heads, queries, args.k.shape[2]), (_ROWS,),
    )  # fmt: skip


@triton.jit
def extent(q_lengths, kv_lengths, kv_starts, batch, queries, keys):
    """(queries, keys, first key) of a batch entry, and whether a length makes no sense; then there is nothing."""
    rows, past, first, bad = queries, keys, tl.full((), 0, tl.int32), tl.full((), 0, tl.int1)
    if q_lengths is not None:
        rows, bad = checked_length(q_lengths + batch, queries, bad)
    if kv_lengths is not None:
        past, bad = checked_length(kv_lengths + batch, keys, bad)
    if kv_starts is not None:
        first, bad = checked_length(kv_starts + batch, keys, bad)
    return tl.where(bad, 0, rows), tl.where(bad, 0, past), tl.where(bad, 0, tl.minimum(first, past)), bad


@triton.jit(do_not_specialize=["queries", "keys", "size"])
def _fill_bad(q_lengths, kv_lengths, kv_starts, x, queries, keys, size, ELEMENTS: tl.constexpr):
    """NaN in the ``size`` elements of a batch entry, if one of its lengths is bad."""
    batch = tl.program_id(0)
    _, _, _, bad = extent(q_lengths, kv_lengths, kv_starts, batch, queries, keys)
    if bad:
        base = x + batch.to(tl.int64) * size
        # In 64 bits: just below 2³¹ elements, the last step would come round in 32.
        for first in range(tl.program_id(1).to(tl.int64) * ELEMENTS, size, tl.num_programs(1) * ELEMENTS):
            i = first + tl.arange(0, ELEMENTS)
            tl.store(base + i, tl.full([ELEMENTS], float("nan"), tl.float32).to(x.dtype.element_ty), mask=i < size)


@triton.jit(do_not_specialize=["heads", "queries", "keys"])
def _fill_rows(q_lengths, kv_lengths, kv_starts, lse, heads, queries, keys, ROWS: tl.constexpr):
    program, blocks = tl.program_id(0), tl.cdiv(queries, ROWS)
    batch_head, row = (program // blocks).to(tl.int64), program % blocks * ROWS + tl.arange(0, ROWS)
    existing, _, _, bad = extent(q_lengths, kv_lengths, kv_starts, batch_head // heads, queries, keys)
    value = tl.where(bad, float("nan"), tl.full([ROWS], -float("inf"), tl.float32))
    tl.store(lse + batch_head * queries + row, value, mask=(row < queries) & (bad | (row >= existing)))
