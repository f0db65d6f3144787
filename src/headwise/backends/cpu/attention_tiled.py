"""Attention by tiles of PyTorch matmuls with an online softmax: every flag, both directions.

A group is one key head with all its query heads: G query heads of R rows are one matrix of G·R rows, so keys are never
expanded. A tile, about 256 rows × 1024 keys, stays in a core's cache between the passes over it, which write into
preallocated scratch. Threads share the groups, or the rows of a group where groups are few.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.backends.cpu.attention_band import Segment, hidden, segments
from headwise.backends.cpu.attention_problem import (
    Problem,
    accumulator,
    scores_slice,
    seen_scores,
    without_hidden_keys,
)
from headwise.backends.cpu.dropout import kept
from headwise.backends.cpu.threads import in_threads
from headwise.layout import statistics_dtype

_LOG2E = math.log2(math.e)
_TILE_ROWS = 256
_TILE_KEYS = 1024
_TASKS = 8  # where there are fewer groups, their rows are shared
_SCORES_PER_THREAD = 1 << 17  # about a millisecond
_LARGEST_FAST_CAP = 64.0
_TANH_ARGUMENT = 60.0  # tanh(x / 2) is 1 from there on, and exp(x) is still finite


def tiled_forward(problem: Problem, out: Tensor, lse: Tensor) -> None:
    """Fill out ``(B, Hq, Sq, Dv)`` and lse ``(B, Hq, Sq)``."""
    tasks, saturates = _tasks(problem), _saturates(problem)

    def work(thread: int, threads: int) -> None:
        scratch = _Scratch(statistics_dtype(problem.q.dtype), saturates)
        for task in tasks[thread::threads]:
            _forward_task(task, out[task.b, task.heads], lse[task.b, task.heads], scratch)

    in_threads(work, most=_worthwhile(problem, len(tasks)))


def tiled_backward(
    problem: Problem, grad_out: Tensor, delta: Tensor, lse: Tensor, dbias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)`` in the dtype that sums are kept in; adds the gradient of the bias into ``dbias`` if given.

    delta  ``rowsum(grad_out · out) - grad_lse``, (B, Hq, Sq)
    lse    of all keys, sink included, +inf for an empty row
    """
    tasks, saturates = _tasks(problem), _saturates(problem)
    dq = accumulator(problem.q)
    # The tasks of a group share its keys: each has sums of its own, which are added in order at the end.
    dk, dv = (torch.zeros((tasks[0].step, *x.shape), dtype=dq.dtype) for x in (problem.k, problem.v))

    def work(thread: int, threads: int) -> None:
        scratch = _Scratch(dq.dtype, saturates)
        for task in tasks[thread::threads]:
            queries, keys = (task.b, task.heads), (task.first, task.b, task.key_head)
            _backward_task(
                task, grad_out[queries], delta[queries], lse[queries], dq[queries], dk[keys], dv[keys],
                _of_heads(dbias, task.b, task.heads), scratch,
            )  # fmt: skip

    # A bias may be shared by heads and rows, so one thread adds up its gradient.
    in_threads(work, most=1 if dbias is not None else _worthwhile(problem, len(tasks)))
    return dq, dk.sum(0) if len(dk) > 1 else dk[0], dv.sum(0) if len(dv) > 1 else dv[0]


def _saturates(problem: Problem) -> bool:
    """May some score lie so far beyond the softcap that its tanh needs a clamp? By Cauchy-Schwarz; NaN may."""
    if not problem.softcap:
        return False
    longest = [
        torch.linalg.vector_norm(x, dim=-1, dtype=statistics_dtype(x.dtype)).amax() for x in (problem.q, problem.k)
    ]
    return not float(longest[0] * longest[1]) * problem.scale <= _TANH_ARGUMENT * problem.softcap / 2


class _Task(NamedTuple):
    """One group, or every ``step``-th of its row blocks from ``first`` on."""

    problem: Problem  # of the group
    b: int
    key_head: int
    heads: slice  # its query heads
    first: int
    step: int


def _tasks(problem: Problem) -> list[_Task]:
    batch, q_heads, rows, _ = problem.q.shape
    k_heads = problem.k.shape[1]
    blocks = -(-rows // _rows_per_block(problem))
    step = max(1, min(_TASKS // max(1, batch * k_heads), blocks))
    size, tasks = q_heads // k_heads, []
    for b in range(batch):
        for key_head in range(k_heads):
            heads = slice(key_head * size, (key_head + 1) * size)
            group = problem._replace(
                q=problem.q[b : b + 1, heads],
                k=problem.k[b : b + 1, key_head : key_head + 1],
                v=problem.v[b : b + 1, key_head : key_head + 1],
                mask=_of_heads(problem.mask, b, heads),
                bias=_of_heads(problem.bias, b, heads),
            )
            if problem.dropout is not None:
                first = problem.dropout
                group = group._replace(dropout=first._replace(batch=first.batch + b, head=first.head + heads.start))
            tasks += [_Task(group, b, key_head, heads, first, step) for first in range(step)]
    return tasks


def _worthwhile(problem: Problem, tasks: int) -> int:
    """How many threads there is work for."""
    batch, heads, rows, _ = problem.q.shape
    return min(tasks, max(1, batch * heads * rows * problem.k.shape[2] // _SCORES_PER_THREAD))


def _of_heads(scores: Tensor | None, b: int, heads: slice) -> Tensor | None:
    if scores is None:
        return None
    scores = scores[b : b + 1] if scores.shape[0] > 1 else scores
    return scores[:, heads] if scores.shape[1] > 1 else scores


class _Rows(NamedTuple):
    """A block of query rows of G heads, packed into one matrix of G·R rows."""

    start: int
    stop: int
    group: int

    def pack(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """``(G, S, ·)`` -> ``(G·R, ·)``, a copy or a view."""
        return x[:, self.start : self.stop].to(dtype).flatten(0, 1)

    def unpack(self, x: Tensor) -> Tensor:
        """``(G·R, ·)`` -> ``(G, R, ·)``."""
        return x.unflatten(0, (self.group, self.stop - self.start))


def _rows_per_block(problem: Problem) -> int:
    return max(16, _TILE_ROWS * problem.k.shape[1] // problem.q.shape[1])


def _row_blocks(task: _Task) -> Iterator[_Rows]:
    _, heads, rows, _ = task.problem.q.shape
    size = _rows_per_block(task.problem)
    for start in range(task.first * size, rows, task.step * size):
        yield _Rows(start, min(start + size, rows), heads)


def _key_tiles(problem: Problem, rows: _Rows) -> Iterator[Segment]:
    for segment in segments(rows.start, rows.stop, problem.k.shape[2], problem.band):
        kind = "full" if segment.kind == "full" else "partial"
        for low in range(segment.start, segment.stop, _TILE_KEYS):
            yield Segment(low, min(low + _TILE_KEYS, segment.stop), kind)


class _Scratch:
    """The memory one thread works in: every tile of a name is a view of the same buffer."""

    def __init__(self, dtype: torch.dtype, saturates: bool) -> None:
        self.dtype, self.saturates = dtype, saturates
        self.buffers: dict[str, Tensor] = {}

    def tile(self, name: str, rows: int, columns: int) -> Tensor:
        buffer = self.buffers.get(name)
        if buffer is None or buffer.numel() < rows * columns:
            buffer = self.buffers[name] = torch.empty(rows * columns, dtype=self.dtype)
        return buffer[: rows * columns].view(rows, columns)


class _Tile(NamedTuple):
    k: Tensor  # (keys, D), hidden keys zeroed
    v: Tensor  # (keys, Dv)
    scores: Tensor  # (G·R, keys), or (keys, G·R) if transposed: scaled, capped, biased, masked
    tanh: Tensor | None  # of the capped scores, for the derivative of the cap


def _score_tile(
    problem: Problem, rows: _Rows, segment: Segment, q: Tensor, scratch: _Scratch, transposed: bool = False
) -> _Tile | None:
    """The scores of one tile, in the unit of `_unit`; q comes from `_queries`. None if a mask hides all of it."""
    keys = slice(segment.start, segment.stop)
    k, v = problem.k[0, 0, keys], problem.v[0, 0, keys]
    seen = None
    if problem.mask is not None:
        seen = seen_scores(problem, rows.start, rows.stop, segment)
        if seen is not None and not seen.any():
            return None
        k, v = (without_hidden_keys(x[None, None], seen, problem)[0, 0] for x in (k, v))
    k, v = k.to(q.dtype), v.to(q.dtype)
    if transposed:
        scores = torch.mm(k, q.t(), out=scratch.tile("scores", k.shape[0], q.shape[0]))
    else:
        scores = torch.mm(q, k.t(), out=scratch.tile("scores", q.shape[0], k.shape[0]))
    tanh = None
    if problem.softcap:
        if scratch.saturates:
            scores.clamp_(max=_TANH_ARGUMENT)
        tanh, scores = _capped(scores, problem, scratch, keep_tanh=transposed)
    else:
        scores.mul_(problem.scale)
    if problem.bias is not None:
        bias = scores_slice(problem.bias, slice(rows.start, rows.stop), keys)
        assert bias is not None
        _by_head(scores, rows, transposed).add_(bias[0].to(q.dtype), alpha=_unit(problem))
    if seen is not None:
        _by_head(scores, rows, transposed).masked_fill_(~seen[0], -torch.inf)
    elif problem.mask is None and segment.kind != "full":
        # Written along memory: (G, R, keys), or (keys, G, R).
        shape = (-1, rows.group, rows.stop - rows.start) if transposed else (rows.group, -1, scores.shape[1])
        where = hidden(rows.start, rows.stop, segment, problem.band, transposed)
        scores.view(shape).masked_fill_(where[:, None] if transposed else where, -torch.inf)
    return _Tile(k, v, scores, tanh)


def _by_head(packed: Tensor, rows: _Rows, transposed: bool) -> Tensor:
    """A view ``(G, R, keys)`` of packed scores."""
    return rows.unpack(packed.t() if transposed else packed)


def _factors(
    problem: Problem, rows: _Rows, segment: Segment, scratch: _Scratch, transposed: bool = False
) -> Tensor | None:
    """``(G·R, keys)``, or ``(keys, G·R)`` if transposed: what dropout multiplies the weights of a tile with.

    Multiplied, and not filled in: `masked_fill` takes five times as long. Where a weight or its gradient is not finite, its
    whole row is NaN anyway.
    """
    if problem.dropout is None:
        return None
    tile = kept(problem.dropout, rows.group, (rows.start, rows.stop), (segment.start, segment.stop))  # [G, R, keys]
    group, height, width = tile.shape
    if transposed:
        factors = scratch.tile("factors", width, group * height)
        factors.view(width, group, height).copy_(tile.permute(2, 0, 1))
    else:
        factors = scratch.tile("factors", group * height, width)
        factors.view(tile.shape).copy_(tile)
    return factors.mul_(problem.dropout.scale)


def _unit(problem: Problem) -> float:
    """What scores are multiplied with: log2(e) where both directions are ours, 1 where PyTorch computed the forward.

    PyTorch's exp2 is several times faster than its exp, so weights are powers of two. But a backward needs scores of the
    same rounding as the lse that normalises them, or large logits lose digits.
    """
    return _LOG2E if problem.softcap else 1.0


def _queries(problem: Problem, rows: _Rows, dtype: torch.dtype) -> Tensor:
    """The packed queries; under a softcap scaled so that their scores are the exponents that `_capped` takes."""
    q = rows.pack(problem.q[0], dtype)
    if not problem.softcap:
        return q
    unit = _LOG2E if problem.softcap <= _LARGEST_FAST_CAP else 1.0
    return q * (2 * unit * problem.scale / problem.softcap)


def _capped(x: Tensor, problem: Problem, scratch: _Scratch, keep_tanh: bool) -> tuple[Tensor | None, Tensor]:
    """The tanh if it is to be kept, and the capped scores, less `_reference` if it is not; overwrites the raw scores x.

    tanh(u) = (e - 1) / (e + 1) with e = exp(2u), as a power of two: a fifth of the time of PyTorch's tanh. Near u = 0 that
    has an error of half a unit of 1, times the cap; where the cap is too large for that, expm1 is exact and slower.
    """
    cap, other = problem.softcap * _LOG2E, scratch.tile("capped", *x.shape)
    if problem.softcap <= _LARGEST_FAST_CAP:
        torch.add(x.exp2_(), 1.0, out=other)
        x.sub_(1.0)
    else:
        torch.add(torch.expm1(x, out=x), 2.0, out=other)
    if not keep_tanh:
        return None, torch.addcdiv(x.new_tensor(-_reference(problem)), x, other, value=cap, out=x)
    tanh = x.div_(other)
    return tanh, torch.mul(tanh, cap, out=other)


def _reference(problem: Problem) -> float:
    """What a forward under a softcap subtracts from scores: they are bounded, so no maximum is needed.

    Weights then lie between 2^-120 and 2^30, whatever the scores. 0 where the cap is too large or a bias undoes it.
    """
    return max(0.0, problem.softcap * _LOG2E - 30.0) if _is_bounded(problem) else 0.0


def _is_bounded(problem: Problem) -> bool:
    return problem.bias is None and 0 < problem.softcap * _LOG2E <= 75.0


def _exp_(x: Tensor, unit: float) -> Tensor:
    """exp of scores in that unit, in place."""
    return (x if unit == _LOG2E else x.mul_(_LOG2E)).exp2_()


def _forward_task(task: _Task, out: Tensor, lse: Tensor, scratch: _Scratch) -> None:
    """out ``(G, Sq, Dv)`` and lse ``(G, Sq)`` of a group."""
    problem, unit = task.problem, _unit(task.problem)
    for rows in _row_blocks(task):
        q = _queries(problem, rows, scratch.dtype)
        state: _Online | None = None
        for segment in _key_tiles(problem, rows):
            tile = _score_tile(problem, rows, segment, q, scratch)
            if tile is None:
                continue
            factors = _factors(problem, rows, segment, scratch)
            if _is_bounded(problem):
                state = _add_bounded_tile(state, tile.scores, tile.v, factors, _reference(problem))
            else:
                state = _add_tile(state, tile.scores, tile.v, factors, unit)
        block = slice(rows.start, rows.stop)
        if state is None:
            out[:, block], lse[:, block] = 0.0, -torch.inf
            continue
        row_lse = state.highest / unit + torch.log(state.total)
        empty = state.total == 0
        if empty.any():
            # Zero times a NaN that other rows see is NaN.
            state.weighted.masked_fill_(empty, 0.0)
            state.total.masked_fill_(empty, 1.0)
            row_lse.masked_fill_(empty, -torch.inf)
        out[:, block] = rows.unpack(state.weighted.div_(state.total))
        lse[:, block] = rows.unpack(row_lse)[..., 0]


class _Online(NamedTuple):
    """An online softmax over the keys so far, one per packed row."""

    highest: Tensor  # (G·R, 1): the largest score, -inf for a row without a key
    total: Tensor  # sum of exp(score - highest)
    weighted: Tensor  # (G·R, Dv): sum of exp(score - highest) v, times the factors of dropout


def _after_dropout(weights: Tensor, factors: Tensor | None) -> Tensor:
    return weights if factors is None else weights.mul_(factors)


def _add_bounded_tile(
    state: _Online | None, scores: Tensor, v: Tensor, factors: Tensor | None, reference: float
) -> _Online:
    """As `_add_tile`, for bounded scores in base 2 with one reference in place of a maximum."""
    weights = scores.exp2_()
    total = weights.sum(-1, keepdim=True)
    if state is None:
        return _Online(torch.full_like(total, reference), total, torch.mm(_after_dropout(weights, factors), v))
    state.total.add_(total)
    state.weighted.addmm_(_after_dropout(weights, factors), v)
    return state


def _add_tile(state: _Online | None, scores: Tensor, v: Tensor, factors: Tensor | None, unit: float) -> _Online:
    """Add a tile to the online softmax; overwrites the scores. ``factors``: those of dropout, after the sum."""
    highest = scores.amax(-1, keepdim=True)
    if state is not None:
        torch.maximum(highest, state.highest, out=highest)
    # A row without a key so far has a maximum of -inf: any finite number in its place leaves its weights at zero.
    reference = highest.clamp_min(torch.finfo(highest.dtype).min)
    weights = _exp_(scores.sub_(reference), unit)
    total = weights.sum(-1, keepdim=True)
    if state is None:
        return _Online(highest, total, torch.mm(_after_dropout(weights, factors), v))
    shrink = _exp_(state.highest - reference, unit)
    state.total.mul_(shrink).add_(total)
    state.weighted.mul_(shrink).addmm_(_after_dropout(weights, factors), v)
    return state._replace(highest=highest)


def _backward_task(
    task: _Task, grad_out: Tensor, delta: Tensor, lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    dbias: Tensor | None, scratch: _Scratch,
) -> None:  # fmt: skip
    """grad_out and dq ``(G, Sq, ·)``, delta and lse ``(G, Sq)``, dk and dv ``(Sk, ·)`` of a group.

    Scores are kept transposed, keys × rows: then two of the three matmuls that read them do so along memory.
    """
    problem, dtype, unit = task.problem, scratch.dtype, _unit(task.problem)
    for rows in _row_blocks(task):
        q = rows.pack(problem.q[0], dtype)  # [G·R, D]
        score_q, q_for_dk = _queries(problem, rows, dtype), q * problem.scale
        grad = rows.pack(grad_out, dtype).contiguous()  # [G·R, Dv]
        row_delta = rows.pack(delta, dtype)  # [G·R]
        row_lse = rows.pack(lse, dtype) * unit
        row_dq = torch.zeros_like(q)
        for segment in _key_tiles(problem, rows):
            tile = _score_tile(problem, rows, segment, score_q, scratch, transposed=True)
            if tile is None:
                continue
            keys = slice(segment.start, segment.stop)
            probs = _exp_(tile.scores.sub_(row_lse), unit)  # [keys, G·R]
            dscores = scratch.tile("dscores", *probs.shape)
            factors = _factors(problem, rows, segment, scratch, transposed=True)
            dv[keys].addmm_(probs if factors is None else torch.mul(probs, factors, out=dscores), grad)
            torch.mm(tile.v, grad.t(), out=dscores)
            if factors is not None:
                dscores.mul_(factors)
            dscores.sub_(row_delta).mul_(probs)
            if dbias is not None:
                target = scores_slice(dbias, slice(rows.start, rows.stop), keys)
                assert target is not None
                target += _by_head(dscores, rows, transposed=True)[None].sum_to_size(target.shape)
            if tile.tanh is not None:  # d tanh = 1 - tanh²
                dscores.mul_(tile.tanh.square_().neg_().add_(1.0))
            row_dq.addmm_(dscores.t(), tile.k)
            dk[keys].addmm_(dscores, q_for_dk)
        dq[:, rows.start : rows.stop] = rows.unpack(row_dq.mul_(problem.scale))
