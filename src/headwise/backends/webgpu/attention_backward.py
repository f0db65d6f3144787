"""Attention backward in WGSL, dense and packed: rows' numbers first, then dq, then dk and dv. No atomics, one order of sums.

    p_ij = exp(s_ij - lse_i)      delta_i = dO_i · O_i - dlse_i      ds_ij = p_ij (dO_i · v_j - delta_i)
    dq_i = scale Σ_j ds_ij k_j    dk_j = scale Σ_i ds_ij q_i         dv_j = Σ_i p_ij dO_i

Both big kernels (two variants of ``wgsl/attention_backward.wgsl``) compute the scores anew: seven matrix products where five
would do with atomics. Dao, "FlashAttention-2", 2023.

A tensor larger than one binding is worked on by one key head of one batch entry after the other (`Piece`): its rows are made
dense first where even one head of it is spread too far, and results are written in windows of rows. Where one head is larger
than a binding, windows of queries meet windows of keys, and sums go on from one to the next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from headwise.backends.webgpu import scores
from headwise.backends.webgpu.array import launcher
from headwise.backends.webgpu.attention_bias import bias_gradient
from headwise.backends.webgpu.backward_kernels import (
    KEYS,
    QUERIES,
    Packed,
    Piece,
    Problem,
    Streamed,
    own_tiles,
    rows_of,
    run_side,
    shape_of,
    windows,
)
from headwise.backends.webgpu.runtime import Device
from headwise.backends.webgpu.shaders import DTYPES
from headwise.backends.webgpu.storage import Region

if TYPE_CHECKING:
    from headwise.ops.attention._arguments import Flags

# --------------------------------------------------------------------------------------------------------- the launchers


@launcher
def attention_backward(
    device: Device, grad_out: Region, grad_lse: Region | None, q: Region, k: Region, v: Region, out: Region, lse: Region,
    mask: Region | None, bias: Region | None, kv_lengths: Region | None, sink: Region | None, flags: Flags,
    need_bias_grad: bool, need_sink_grad: bool,
) -> tuple[Region, ...]:  # fmt: skip
    problems, stats, (dq, dk, dv) = _run(
        device, grad_out, grad_lse, q, k, v, out, lse, mask, bias, kv_lengths, flags, None
    )
    dbias = dsink = device.empty((0,), q.dtype)
    if need_bias_grad and bias is not None:
        dbias = bias_gradient(device, problems, windows, bias, q.shape, k.shape)
    if need_sink_grad and sink is not None:
        dsink = _sink_gradient(device, stats, sink, q.shape, kv_lengths is not None)
    return dq, dk, dv, dbias, dsink


@launcher
def attention_varlen_backward(
    device: Device, grad_out: Region, grad_lse: Region | None, q: Region, k: Region, v: Region, out: Region, lse: Region,
    cu_q: Region, cu_k: Region, max_q: int, max_k: int, sink: Region | None, flags: Flags, need_sink_grad: bool,
) -> tuple[Region, ...]:  # fmt: skip
    # One sequence of all tokens, heads outside, that the kernels cut up.
    seen_q, seen_k, seen_v, seen_out, seen_grad = (scores.heads_outside(x) for x in (q, k, v, out, grad_out))
    lse, grad_lse = _one_batch(lse), None if grad_lse is None else _one_batch(grad_lse)
    _, stats, grads = _run(
        device, seen_grad, grad_lse, seen_q, seen_k, seen_v, seen_out, lse, None, None, None, flags,
        Packed(cu_q, cu_k, max_q, max_k),
    )  # fmt: skip
    dsink = device.empty((0,), q.dtype)
    if need_sink_grad and sink is not None:
        dsink = _sink_gradient(device, stats, sink, seen_q.shape, False)
    dq, dk, dv = (x.with_shape(like.shape) for x, like in zip(grads, (q, k, v), strict=True))
    return dq, dk, dv, dsink


def _one_batch(x: Region) -> Region:
    return x.with_shape((1, *x.shape), (0, *x.strides))


def _run(
    device: Device, grad_out: Region, grad_lse: Region | None, q: Region, k: Region, v: Region, out: Region, lse: Region,
    mask: Region | None, bias: Region | None, kv_lengths: Region | None, flags: Flags, packed: Packed | None,
) -> tuple[list[Problem], Region, list[Region]]:  # fmt: skip
    """dq, dk and dv; with them the pieces of the call and its stats."""
    of_call = scores.of_call(device, q, k, mask, bias, None, None, flags, packed is not None)
    of_call = of_call._replace(variant=of_call.variant._replace(lengths=kv_lengths is not None))
    results = [_empty_result(device, x) for x in (q, k, v)]
    q, k, v, grad, out = (scores.aligned(device, x) for x in (q, k, v, grad_out, out))
    batch, heads, q_length, _ = q.shape
    stats = device.empty((batch + batch * heads * q_length, 2), torch.int32)
    group = heads // k.shape[1]
    problems = []
    for cut in scores.pieces(device, batch, k.shape[1], q, k, v, grad, out, mask, bias, *(x.written for x in results)):
        piece = Piece(*cut, group)
        problem = Problem(
            piece,
            piece.of_queries(q),
            piece.of_keys(k),
            piece.of_keys(v),
            piece.of_queries(grad),
            stats,
            batch + (piece.batch * heads + piece.key_head * group) * q_length,
            _scores_of(of_call, piece),
            packed,
        )
        of_rows = _OfRows(
            piece.of_queries(out), piece.of_queries(lse), None if grad_lse is None else piece.of_queries(grad_lse),
            kv_lengths,
        )  # fmt: skip
        dq, dk, dv = piece.of_queries(results[0].written), *(piece.of_keys(x.written) for x in results[1:])
        if _is_large(device, problem.q, problem.k, problem.v, problem.grad, of_rows.out):
            _run_in_windows(device, problem, of_rows, dq, dk, dv)
        else:
            q_part, k_part, v_part, grad_part, out_part = (
                scores.bindable(device, x) for x in (problem.q, problem.k, problem.v, problem.grad, of_rows.out)
            )
            problem = problem._replace(q=q_part, k=k_part, v=v_part, grad=grad_part)
            rows_of(device, problem, out_part, of_rows.lse, of_rows.grad_lse, kv_lengths)
            _run_queries(device, problem, dq)
            _run_keys(device, problem, dk, dv)
        problems.append(problem)
    return problems, stats, [scores.finish(device, x) for x in results]


def _empty_result(device: Device, x: Region) -> scores.Rows:
    """Gradients lie heads inside, their rows padded first where the size of a head is no multiple of four."""
    result = device.empty(x.shape, x.dtype, scores.heads_inside(x.shape))
    if x.shape[3] % 4 == 0:
        return scores.Rows(result, result)
    padded = (*x.shape[:3], -(-x.shape[3] // 4) * 4)
    return scores.Rows(device.empty(padded, x.dtype, scores.heads_inside(padded)), result)


def _scores_of(of_call: scores.Scores, piece: Piece) -> scores.Scores:
    regions = {name: piece.of_scores(x) for name, x in of_call.regions.items()}
    parameters = (piece.batches, piece.key_heads * piece.group, *of_call.parameters[2:])
    return scores.Scores(of_call.variant, parameters, regions)


def _sink_gradient(device: Device, stats: Region, sink: Region, shape: tuple[int, ...], lengths: bool) -> Region:
    batch, heads, q_length, _ = shape
    dsink = device.empty((heads,), sink.dtype)
    kernel = device.kernel("attention_stats_sink", dtype=DTYPES[sink.dtype], lengths=lengths)
    device.run(kernel, -(-heads // 2), (batch, heads, q_length, sink.strides[0]), sink=sink, stats=stats, dsink=dsink)
    return dsink


def _run_queries(device: Device, problem: Problem, dq: Region) -> None:
    shape = shape_of(device, QUERIES, problem)
    entries, count = own_tiles(device, QUERIES, problem, shape)
    for window, seen in windows(device, problem, 2, dq):
        run_side(device, QUERIES, seen, shape, entries, count, window, dq, None)


def _run_keys(device: Device, problem: Problem, dk: Region, dv: Region) -> None:
    shape = shape_of(device, KEYS, problem)
    entries, count = own_tiles(device, KEYS, problem, shape)
    for window, seen in windows(device, problem, 3, dk, dv):
        for first, second in _together(problem, dk, dv):
            run_side(device, KEYS, seen, shape, entries, count, window, first, second)


def _together(problem: Problem, dk: Region, dv: Region) -> list[tuple[Region | None, Region | None]]:
    """dk and dv; one after the other where both are one buffer more than a kernel may bind."""
    both = "mask" in problem.scores.regions and "bias" in problem.scores.regions
    return [(dk, None), (None, dv)] if both else [(dk, dv)]


# ------------------------------------------------------------------------------------- heads that are larger than a binding


def _is_large(device: Device, *tensors: Region) -> bool:
    """Is one of them too large for a kernel to bind, even if it were dense?"""
    most = device.capabilities.binding_bytes
    return any(x.storage.size > most and x.numel * x.itemsize > most - 512 for x in tensors)


def _run_in_windows(device: Device, problem: Problem, of_rows: _OfRows, dq: Region, dk: Region, dv: Region) -> None:
    """A key head of which some tensor is larger than a binding: windows of queries and keys, in a fixed order."""
    k, v = problem.k, problem.v
    sums = [scores.empty_sums(device, x) for x in (dq, dk, dv)]
    group, heads = problem.piece.group, [_single_head(problem, of_rows, h) for h in range(problem.piece.group)]
    q_windows = scores.windows(device, *(x.narrow(1, 0, 1) for x in (problem.q, problem.grad, of_rows.out, sums[0])))
    k_windows = scores.windows(device, k, v, *sums[1:])
    q_windows, k_windows = _with_room_for_scores(device, problem, q_windows, k_windows)
    bindable = scores.Bindable(device)
    for single, rows in heads:
        for first, past in q_windows:
            rows_of(device, *_rows_of_window(bindable, single, rows, first, past))
    shape = shape_of(device, QUERIES, heads[0][0])
    entries, count = own_tiles(device, QUERIES, heads[0][0], shape)
    for h, (single, _) in enumerate(heads):
        for own in q_windows:
            for past_windows, window in enumerate(k_windows):
                streamed = Streamed(*window, past_windows > 0, past_windows == len(k_windows) - 1)
                seen = _pair_of_windows(bindable, single, own, window)
                result = sums[0].narrow(1, h, 1)
                run_side(device, QUERIES, seen, shape, entries, count, own, result, None, streamed)
    shape = shape_of(device, KEYS, heads[0][0])
    entries, count = own_tiles(device, KEYS, heads[0][0], shape)
    for own in k_windows:
        for h, (single, _) in enumerate(heads):
            for window in q_windows:
                last = h == group - 1 and window == q_windows[-1]
                streamed = Streamed(*window, h > 0 or window != q_windows[0], last)
                seen = _pair_of_windows(bindable, single, window, own)
                for of_k, of_v in _together(problem, sums[1], sums[2]):
                    run_side(device, KEYS, seen, shape, entries, count, own, of_k, of_v, streamed)
    for total, result in zip(sums, (dq, dk, dv), strict=True):
        for h in range(result.shape[1]):
            scores.round_rows(device, total.narrow(1, h, 1), result.narrow(1, h, 1))


class _OfRows(NamedTuple):
    """What only the rows' numbers are made from."""

    out: Region
    lse: Region
    grad_lse: Region | None
    kv_lengths: Region | None


def _single_head(problem: Problem, rows: _OfRows, head: int) -> tuple[Problem, _OfRows]:
    """One query head of a problem of one key head."""
    of_call, length = problem.scores, problem.q.shape[2]
    q, grad, out, lse = (x.narrow(1, head, 1) for x in (problem.q, problem.grad, rows.out, rows.lse))
    regions = {name: x.narrow(1, head, 1) if x.shape[1] > 1 else x for name, x in of_call.regions.items()}
    of_scores = of_call._replace(parameters=(1, 1, 1, *of_call.parameters[3:]), regions=regions)
    grad_lse = None if rows.grad_lse is None else rows.grad_lse.narrow(1, head, 1)
    return (
        problem._replace(
            piece=problem.piece._replace(group=1), q=q, grad=grad, stats_first=problem.stats_first + head * length,
            scores=of_scores,
        ),
        _OfRows(out, lse, grad_lse, rows.kv_lengths),
    )  # fmt: skip


def _rows_of_window(
    bindable: scores.Bindable, single: Problem, rows: _OfRows, first: int, past: int
) -> tuple[Problem, Region, Region, Region | None, Region | None]:
    grad, out = (bindable.rows(x, first, past) for x in (single.grad, rows.out))
    lse, grad_lse = (None if x is None else x.narrow(2, first, past - first) for x in (rows.lse, rows.grad_lse))
    assert lse is not None
    return single._replace(grad=grad, stats_first=single.stats_first + first), out, lse, grad_lse, rows.kv_lengths


def _pair_of_windows(
    bindable: scores.Bindable, single: Problem, queries: tuple[int, int], keys: tuple[int, int]
) -> Problem:
    q, grad = (bindable.rows(x, *queries) for x in (single.q, single.grad))
    k, v = (bindable.rows(x, *keys) for x in (single.k, single.v))
    regions = {}
    for name, x in single.scores.regions.items():
        for dim, (first, past) in ((2, queries), (3, keys)):
            x = x.narrow(dim, first, past - first) if x.shape[dim] > 1 else x
        regions[name] = bindable(x)
    strides = tuple(0 if n == 1 else s for x in regions.values() for n, s in zip(x.shape, x.strides, strict=True))
    of_scores = single.scores._replace(parameters=(*single.scores.parameters[:9], *strides), regions=regions)
    return single._replace(q=q, k=k, v=v, grad=grad, scores=of_scores)


Windows = list[tuple[int, int]]


def _with_room_for_scores(
    device: Device, problem: Problem, q_windows: Windows, k_windows: Windows
) -> tuple[Windows, Windows]:
    """The windows, made so small that a mask or bias of both can be bound."""
    sizes = [past - first for first, past in (q_windows[0], k_windows[0])]
    for x in problem.scores.regions.values():
        room = (device.capabilities.binding_bytes - 512) // x.itemsize
        while min(sizes[0], x.shape[2]) * min(sizes[1], x.shape[3]) > room:
            large = 0 if min(sizes[0], x.shape[2]) >= min(sizes[1], x.shape[3]) else 1
            sizes[large] = -(-sizes[large] // 2)
    return tuple(  # type: ignore[return-value]
        [(first, min(first + size, cut[-1][1])) for first in range(0, cut[-1][1], max(size, 1))] or cut
        for size, cut in zip(sizes, (q_windows, k_windows), strict=True)
    )
