"""Merging of split-K partials in decoding: softmaxes over some keys each, added up in one order whoever does it.

A softmax that is not divided by its total yet is ``(acc, highest, total)``: weighted values, the highest logit, and the sum
of the weights.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headwise.backends.triton.scores import LN2, power


@triton.jit
def fold(acc, highest, total, more, more_highest, more_total, UNIT: tl.constexpr):
    """A softmax over some keys with one over others added.

    Adding to nothing changes no bit, nor does adding nothing. The multiply-adds are said, and not left to the compiler, so
    that it does not matter where this happens: in a program that has both, or in the one that merges.
    """
    higher = tl.maximum(highest, more_highest)
    reference = tl.where(higher == -float("inf"), 0.0, higher)
    shrink, weight = power(highest - reference, UNIT), power(more_highest - reference, UNIT)
    # Of keys that a row did not see, what is there does not count: nobody wrote it, or it is zero times a NaN.
    more = tl.where((more_highest > -float("inf"))[:, None], more, 0.0)
    acc = tl.fma(more, tl.zeros_like(more) + weight[:, None], acc * shrink[:, None])
    return acc, higher, tl.fma(more_total, weight, total * shrink)


@triton.jit
def merged(partials, stats, first, count, inside, AT_ONCE: tl.constexpr, V: tl.constexpr):
    """The softmax of rows from their ``count`` partials: in bundles, then over the bundles, in order.

    partials: float32 ``[row, partial, Dv]``; stats: highest logit and total ``[row, partial, 2]``; first: of each row.
    """
    BLOCK_DV: tl.constexpr = V.BLOCK_DV
    PER_BUNDLE: tl.constexpr = V.PARTIALS_PER_BUNDLE
    dv = tl.arange(0, BLOCK_DV)
    values_inside = inside[:, None] & (dv < V.DV)[None, :]
    nothing = tl.zeros([first.shape[0], BLOCK_DV], tl.float32)
    none = tl.full([first.shape[0]], -float("inf"), tl.float32)
    zero = tl.zeros([first.shape[0]], tl.float32)
    acc, highest, total = nothing, none, zero
    for start in range(0, count, AT_ONCE):
        # All loads before the first sum, so that they are under way together.
        loaded = ()
        for i in tl.static_range(AT_ONCE):
            at = first + start + i
            there = start + i < count
            loaded += (  # type: ignore[assignment]
                (
                    tl.load(partials + (at * V.DV)[:, None] + dv[None, :], mask=values_inside & there, other=0.0),
                    tl.load(stats + 2 * at, mask=inside & there, other=-float("inf")),
                    tl.load(stats + 2 * at + 1, mask=inside & there, other=0.0),
                ),
            )
        for begin in tl.static_range(0, AT_ONCE, PER_BUNDLE):
            bundle, bundle_highest, bundle_total = nothing, none, zero
            for i in tl.static_range(PER_BUNDLE):
                more, more_highest, more_total = loaded[begin + i]  # type: ignore[var-annotated]
                bundle, bundle_highest, bundle_total = fold(
                    bundle, bundle_highest, bundle_total, more, more_highest, more_total, V.UNIT
                )
            acc, highest, total = fold(acc, highest, total, bundle, bundle_highest, bundle_total, V.UNIT)
    return acc, highest, total


@triton.jit
def finish(acc, highest, total, sink, out, lse, out_at, row, head, inside, V: tl.constexpr):
    """Divide by the total, join the sink and store: values at ``out_at``, lse at ``row``."""
    empty = total == 0.0
    log_total = tl.log2(tl.where(empty, 1.0, total))
    row_lse = tl.fma(log_total, tl.zeros_like(total) + LN2, highest * (1.0 / V.UNIT))
    row_lse = tl.where(empty, -float("inf"), row_lse)
    values = acc * (1.0 / tl.where(empty, 1.0, total))[:, None]
    if sink is not None:
        logit = tl.load(sink + head, mask=inside, other=0.0).to(tl.float32)
        higher = tl.maximum(row_lse, logit)
        joined = higher + tl.log2(power(row_lse - higher, 1.0) + power(logit - higher, 1.0)) * LN2
        values *= tl.where(empty, 0.0, power(row_lse - joined, 1.0))[:, None]
        row_lse = tl.where(empty, logit, joined)
    if lse is not None:
        tl.store(lse + row, row_lse, mask=inside)
    dv = tl.arange(0, V.BLOCK_DV)
    tl.store(
        out_at[:, None] + dv[None, :], values.to(out.dtype.element_ty), mask=inside[:, None] & (dv < V.DV)[None, :]
    )


@triton.jit(do_not_specialize=["rows", "queries", "heads", "count"])
def merge_kernel(
    partials, sink, out, lse, rows, queries, heads, count, out_strides, AT_ONCE: tl.constexpr, V: tl.constexpr
):
    """One row from its partials, where the kernel before does not merge them itself."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    token, head = row % queries, row // queries % heads
    stats = partials + tl.full((), 0, tl.int64) + rows.to(tl.int64) * count * V.DV
    inside = row < rows
    acc, highest, total = merged(partials, stats, row * count, count, inside, AT_ONCE, V)
    out_at = out + row // queries // heads * out_strides[0] + head * out_strides[1] + token * out_strides[2]
    finish(acc, highest, total, sink, out, lse, out_at, row, head, inside, V)
