"""Attention backward in WGSL, dense and packed: row statistics, then dq, then dk and dv. No atomics; sums in a fixed order.

    p_ij = exp(s_ij - lse_i)      delta_i = dO_i · O_i - dlse_i      ds_ij = p_ij (D_ij dO_i · v_j - delta_i)
    dq_i = scale Σ_j ds_ij k_j    dk_j = scale Σ_i ds_ij q_i         dv_j = Σ_i D_ij p_ij dO_i
    D is 1, or under dropout 0 or 1 / (1 - dropout)

Both large kernels (two variants of ``wgsl/attention_backward.wgsl``) recompute the scores: seven matrix products, where
atomics would need five. Dao, "FlashAttention-2", 2023.

If a tensor is larger than one binding, each key head of each batch entry is a `Piece` of its own. A head whose rows are too
far apart to bind is copied first, and results are written in ranges of rows. If one head is larger than a binding, each
range of queries is combined with each range of keys, and the sums continue from one to the next.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from headwise.backends.webgpu import scores
from headwise.backends.webgpu.attention_bias import bias_gradient
from headwise.backends.webgpu.backward_kernels import (
    KEYS,
    QUERIES,
    Piece,
    Problem,
    Streamed,
    ranges,
    run_side,
    tiles_of,
    write_stats,
)
from headwise.backends.webgpu.device import Device
from headwise.backends.webgpu.shaders import DTYPES
from headwise.backends.webgpu.storage import Region


class _Forward(NamedTuple):
    """Results of the forward, and the gradient of lse."""

    out: Region
    lse: Region
    grad_lse: Region | None

    def narrow(self, dim: int, first: int, count: int) -> _Forward:
        return _Forward(*(None if x is None else x.narrow(dim, first, count) for x in self))  # type: ignore[arg-type]


def attention_backward(device: Device, args: Any) -> tuple[Region | None, ...]:
    forward = args.forward
    q, k, v, bias, sink = forward.q, forward.k, forward.v, forward.bias, forward.sink
    grad, out, lse, grad_lse = args.grad_out, args.out, args.lse, args.grad_lse
    if forward.packing is not None:  # one sequence of all tokens, heads outside; the kernels cut it up
        q, k, v, grad, out = (scores.heads_outside(x) for x in (q, k, v, grad, out))
        lse, grad_lse = (None if x is None else x.with_leading(3) for x in (lse, grad_lse))
    dtype = forward.flags.result_dtype(q.dtype)
    results = [scores.empty_rows(device, x.shape, dtype, scores.heads_inside(x.shape)) for x in (q, k, v)]
    q, k, v, grad, out = (scores.aligned(device, x) for x in (q, k, v, grad, out))
    batch, heads, q_length, _ = q.shape
    seeds = scores.seed_numbers(forward)  # which are in the last pairs
    stats = device.empty((2 * batch + batch * heads * q_length + seeds, 2), torch.int32)
    call_scores = scores.describe(device, forward, q, k, aux=stats, sink=False)
    group = heads // k.shape[1]
    problems = []
    bound = (q, k, v, grad, out, *call_scores.tensors.values(), *(x.written for x in results))
    for cut in scores.pieces(device, batch, k.shape[1], *bound):
        piece = Piece(*cut, group)
        first_row = 2 * batch + (piece.batch * heads + piece.key_head * group) * q_length
        problem = Problem(
            piece, piece.of_queries(q), piece.of_keys(k), piece.of_keys(v), piece.of_queries(grad), stats, first_row,
            piece.of_scores(call_scores), forward.packing,
        )  # fmt: skip
        rows = _Forward(*(None if x is None else piece.of_queries(x) for x in (out, lse, grad_lse)))  # type: ignore[arg-type]
        grads = (piece.of_queries(results[0].written), *(piece.of_keys(x.written) for x in results[1:]))
        packed = [] if problem.scores.words is None else [problem.scores.words.words]
        if _is_large(device, problem.q, problem.k, problem.v, problem.grad, rows.out, *packed):
            _run_in_ranges(device, problem, rows, *grads)
        else:
            problem = problem.bound(device)
            write_stats(device, problem, scores.bindable(device, rows.out), rows.lse, rows.grad_lse)
            _run(device, problem, *grads)
        problems.append(problem)
    dq, dk, dv = (scores.finish(device, x) for x in results)
    if forward.packing is not None:
        dq, dk, dv = (x.with_shape(like.shape) for x, like in ((dq, forward.q), (dk, forward.k), (dv, forward.v)))
    dbias = bias_gradient(device, problems, bias, q.shape, k.shape) if args.need_bias and bias is not None else None
    dsink = _sink_gradient(device, stats, sink, call_scores) if args.need_sink and sink is not None else None
    return dq, dk, dv, dbias, dsink


def _sink_gradient(device: Device, stats: Region, sink: Region, call_scores: scores.Scores) -> Region:
    batch, heads, _, q_length, *_ = call_scores.numbers
    dsink = device.empty((heads,), sink.dtype)
    kernel = device.kernel("attention_stats_sink", dtype=DTYPES[sink.dtype], lengths=call_scores.variant.lengths)
    device.run(kernel, -(-heads // 2), (batch, heads, q_length, sink.strides[0]), sink=sink, stats=stats, dsink=dsink)
    return dsink


def _run(device: Device, problem: Problem, dq: Region, dk: Region, dv: Region) -> None:
    own = tiles_of(device, QUERIES, problem)
    for own_range, seen in ranges(device, problem, 2, dq):
        run_side(device, QUERIES, seen, own, own_range, (dq, None))
    own = tiles_of(device, KEYS, problem)
    for own_range, seen in ranges(device, problem, 3, dk, dv):
        for results in _together(problem, dk, dv):
            run_side(device, KEYS, seen, own, own_range, results)


def _together(problem: Problem, dk: Region, dv: Region) -> list[tuple[Region | None, Region | None]]:
    """dk and dv in one dispatch; in two, if a mask and a bias take up the buffers that a kernel may bind."""
    return [(dk, None), (None, dv)] if len(problem.scores.tensors) == 2 else [(dk, dv)]


# ------------------------------------------------------------------------------------- heads that are larger than a binding


def _is_large(device: Device, *tensors: Region) -> bool:
    """Is one of them too large for a kernel to bind, even if it were dense?"""
    most = device.capabilities.binding_bytes
    return any(x.storage.size > most and x.numel * x.itemsize > most - 512 for x in tensors)


def _run_in_ranges(device: Device, problem: Problem, rows: _Forward, dq: Region, dk: Region, dv: Region) -> None:
    """A key head of which some tensor is larger than a binding: ranges of queries and keys, in a fixed order."""
    sums = [scores.empty_sums(device, x) for x in (dq, dk, dv)]
    group = problem.piece.group
    heads = [problem.single_head(0, head) for head in range(group)]
    q_ranges = scores.ranges(device, *(x.narrow(1, 0, 1) for x in (problem.q, problem.grad, rows.out, sums[0])))
    k_ranges = scores.ranges(device, problem.k, problem.v, *sums[1:])
    q_ranges, k_ranges = _with_room_for_scores(device, problem, q_ranges, k_ranges)
    bindable = scores.Bindable(device)
    for h, single in enumerate(heads):
        for first, past in q_ranges:
            out, lse, grad_lse = rows.narrow(1, h, 1).narrow(2, first, past - first)
            grad = bindable.rows(single.grad, first, past)
            part = single._replace(grad=grad, stats_first=single.stats_first + first)
            write_stats(device, part, bindable(out), lse, grad_lse)
    own_tiles = tiles_of(device, QUERIES, heads[0])
    for h, single in enumerate(heads):
        for own in q_ranges:
            for other in k_ranges:
                streamed = Streamed(*other, other != k_ranges[0], other == k_ranges[-1])
                seen = _pair_of_ranges(bindable, single, own, other)
                run_side(device, QUERIES, seen, own_tiles, own, (sums[0].narrow(1, h, 1), None), streamed)
    own_tiles = tiles_of(device, KEYS, heads[0])
    for own in k_ranges:
        for h, single in enumerate(heads):
            for other in q_ranges:
                last = h == group - 1 and other == q_ranges[-1]
                streamed = Streamed(*other, h > 0 or other != q_ranges[0], last)
                seen = _pair_of_ranges(bindable, single, other, own)
                for results in _together(problem, sums[1], sums[2]):
                    run_side(device, KEYS, seen, own_tiles, own, results, streamed)
    for total, result in zip(sums, (dq, dk, dv), strict=True):
        for h in range(result.shape[1]):
            scores.round_rows(device, total.narrow(1, h, 1), result.narrow(1, h, 1))


def _pair_of_ranges(
    bindable: scores.Bindable, single: Problem, queries: tuple[int, int], keys: tuple[int, int]
) -> Problem:
    q, grad = (bindable.rows(x, *queries) for x in (single.q, single.grad))
    k, v = (bindable.rows(x, *keys) for x in (single.k, single.v))
    pairs = {}
    for name, x in single.scores.pairs.items():
        for dim, (first, past) in ((2, queries), (3, keys)):
            x = x.narrow_broadcast(dim, first, past - first)
        pairs[name] = bindable(x)
    return single._replace(q=q, k=k, v=v, grad=grad, scores=single.scores.with_pairs(pairs).mask_rows(*queries))


Ranges = list[tuple[int, int]]


def _with_room_for_scores(
    device: Device, problem: Problem, q_ranges: Ranges, k_ranges: Ranges
) -> tuple[Ranges, Ranges]:
    """The ranges, made small enough that the mask and bias of a pair of them can be bound."""
    sizes = [past - first for first, past in (q_ranges[0], k_ranges[0])]
    if problem.scores.words is not None:
        sizes[0] = min(sizes[0], max(1, problem.scores.words.rows_at_once(device.capabilities.binding_bytes - 512)))
    for x in problem.scores.pairs.values():
        room = (device.capabilities.binding_bytes - 512) // x.itemsize
        while min(sizes[0], x.shape[2]) * min(sizes[1], x.shape[3]) > room:
            large = 0 if min(sizes[0], x.shape[2]) >= min(sizes[1], x.shape[3]) else 1
            sizes[large] = -(-sizes[large] // 2)
    return tuple(  # type: ignore[return-value]
        [(first, min(first + size, cut[-1][1])) for first in range(0, cut[-1][1], max(size, 1))] or cut
        for size, cut in zip(sizes, (q_ranges, k_ranges), strict=True)
    )
