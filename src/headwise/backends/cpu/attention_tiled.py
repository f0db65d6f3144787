"""Attention by tiles of PyTorch matmuls with an online softmax: every flag, both directions.

A tile is 256 rows × 512 keys for each thread, small enough to stay in its cache between the passes; all passes write into
preallocated scratch. The query heads of a key head are rows of one matmul, so keys are never expanded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.backends.cpu.attention_band import Segment, row_blocks, segments
from headwise.backends.cpu.attention_problem import (
    Problem,
    accumulator,
    finite_lse,
    scores_slice,
    seen_scores,
    without_hidden_keys,
)
from headwise.layout import lse_dtype

_LOG2E = math.log2(math.e)
_TILE_ROWS = 256
_FORWARD_KEYS = 1024
_BACKWARD_KEYS = 512


def tiled_forward(problem: Problem, out: Tensor, lse: Tensor) -> None:
    """Fill out ``(B, Hq, Sq, Dv)`` and lse ``(B, Hq, Sq)``."""
    scratch = _Scratch(lse_dtype(problem.q.dtype))
    for part, b, heads in _head_groups(problem):
        _forward_heads(part, out[b, heads], lse[b, heads], scratch)


def tiled_backward(
    problem: Problem, grad_out: Tensor, delta: Tensor, lse: Tensor, dbias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)`` in the dtype that sums are kept in; adds the gradient of the bias into ``dbias`` if given.

    delta  ``rowsum(grad_out · out) - grad_lse``, (B, Hq, Sq)
    lse    of all keys, sink included
    """
    dq, dk, dv = (accumulator(x) for x in (problem.q, problem.k, problem.v))
    lse = finite_lse(lse)
    scratch = _Scratch(lse_dtype(problem.q.dtype))
    group = problem.q.shape[1] // problem.k.shape[1]
    for part, b, heads in _head_groups(problem):
        key_heads = slice(heads.start // group, heads.stop // group)
        _backward_heads(
            part, grad_out[b, heads], delta[b, heads], lse[b, heads],
            dq[b, heads], dk[b, key_heads], dv[b, key_heads], _of_heads(dbias, b, heads), scratch,
        )  # fmt: skip
    return dq, dk, dv


def _head_groups(problem: Problem) -> Iterator[tuple[Problem, int, slice]]:
    """The problem cut into one batch entry and some key heads with all their query heads."""
    batch, q_heads, _, _ = problem.q.shape
    k_heads = problem.k.shape[1]
    group = q_heads // k_heads
    at_once = max(1, torch.get_num_threads() // group)
    for b in range(batch):
        for first in range(0, k_heads, at_once):
            key_heads = slice(first, min(first + at_once, k_heads))
            heads = slice(key_heads.start * group, key_heads.stop * group)
            part = problem._replace(
                q=problem.q[b : b + 1, heads],
                k=problem.k[b : b + 1, key_heads],
                v=problem.v[b : b + 1, key_heads],
                mask=_of_heads(problem.mask, b, heads),
                bias=_of_heads(problem.bias, b, heads),
            )
            yield part, b, heads


def _of_heads(scores: Tensor | None, b: int, heads: slice) -> Tensor | None:
    if scores is None:
        return None
    scores = scores[b : b + 1] if scores.shape[0] > 1 else scores
    return scores[:, heads] if scores.shape[1] > 1 else scores


class _Rows(NamedTuple):
    """A block of query rows of the heads at hand, packed: the G query heads of a key head become G · rows rows."""

    start: int
    stop: int
    group: int

    def pack(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """``(Hq, S, ·)`` -> ``(Hk, G · rows, ·)``, a copy or a view."""
        block = x[:, self.start : self.stop].to(dtype)
        return block.unflatten(0, (-1, self.group)).flatten(1, 2)

    def unpack(self, x: Tensor) -> Tensor:
        """``(Hk, G · rows, ·)`` -> ``(Hq, rows, ·)``."""
        return x.unflatten(1, (self.group, self.stop - self.start)).flatten(0, 1)


def _row_blocks(problem: Problem) -> Iterator[_Rows]:
    group = problem.q.shape[1] // problem.k.shape[1]
    size = max(16, _TILE_ROWS // group)
    for start, stop in row_blocks(problem.q.shape[2], size):
        yield _Rows(start, stop, group)


def _key_tiles(problem: Problem, rows: _Rows, size: int) -> Iterator[Segment]:
    for segment in segments(rows.start, rows.stop, problem.k.shape[2], problem.band):
        kind = "full" if segment.kind == "full" else "partial"
        for low in range(segment.start, segment.stop, size):
            yield Segment(low, min(low + size, segment.stop), kind)


class _Scratch:
    """Memory for the tiles of one call: every tile of a name is a view into one buffer."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.buffers: dict[str, Tensor] = {}

    def tile(self, name: str, *shape: int) -> Tensor:
        count = math.prod(shape)
        buffer = self.buffers.get(name)
        if buffer is None or buffer.numel() < count:
            buffer = self.buffers[name] = torch.empty(count, dtype=self.dtype)
        return buffer[:count].view(shape)


class _Tile(NamedTuple):
    k: Tensor  # (Hk, keys, D), hidden keys zeroed
    v: Tensor  # (Hk, keys, Dv)
    scores: Tensor  # (Hk, G · rows, keys) or transposed: scaled, capped, biased, masked
    tanh: Tensor | None  # of the capped scores, for the derivative of the cap


def _score_tile(
    problem: Problem, rows: _Rows, segment: Segment, q: Tensor, scratch: _Scratch, transposed: bool = False
) -> _Tile | None:
    """Scores of one tile, in the unit of `_unit`; q comes from `_queries`, transposed if the scores are to be."""
    seen = seen_scores(problem, rows.start, rows.stop, segment)
    if seen is not None and problem.mask is not None and not seen.any():
        return None
    k, v = (x[:, :, segment.start : segment.stop] for x in (problem.k, problem.v))
    k, v = (without_hidden_keys(x, seen, problem)[0].to(q.dtype) for x in (k, v))
    if transposed:
        scores = torch.bmm(k, q, out=scratch.tile("scores", q.shape[0], k.shape[1], q.shape[2]))
    else:
        scores = torch.bmm(q, k.transpose(1, 2), out=scratch.tile("scores", q.shape[0], q.shape[1], k.shape[1]))
    tanh = None
    if problem.softcap:
        tanh = _tanh_of_half_(scores, scratch)
        scores = torch.mul(tanh, problem.softcap * _unit(problem), out=scratch.tile("capped", *scores.shape))
    else:
        scores.mul_(problem.scale)
    bias = scores_slice(problem.bias, slice(rows.start, rows.stop), slice(segment.start, segment.stop))
    by_head = _by_head(scores, rows, transposed)
    if bias is not None:
        by_head += (bias[0].to(q.dtype) * _unit(problem)).unflatten(0, _head_dims(bias, rows, q))
    if seen is not None:
        by_head.masked_fill_(~seen[0].unflatten(0, _head_dims(seen, rows, q)), -torch.inf)
    return _Tile(k, v, scores, tanh)


def _head_dims(scores: Tensor, rows: _Rows, q: Tensor) -> tuple[int, int]:
    """How the head dim of a mask or bias splits into (key heads, group)."""
    return (q.shape[0], rows.group) if scores.shape[1] > 1 else (1, 1)


def _by_head(packed: Tensor, rows: _Rows, transposed: bool) -> Tensor:
    """A view ``(Hk, G, rows, keys)`` of packed scores ``(Hk, G · rows, keys)`` or ``(Hk, keys, G · rows)``."""
    if not transposed:
        return packed.unflatten(1, (rows.group, rows.stop - rows.start))
    return packed.unflatten(2, (rows.group, rows.stop - rows.start)).permute(0, 2, 3, 1)


def _unit(problem: Problem) -> float:
    """What scores are multiplied with: log2(e) where they are ours alone, 1 where PyTorch's kernel computed the forward.

    PyTorch's exp2 is several times faster than its exp, so weights are powers of two. But the weights of a backward must be
    made from scores of the very same rounding as the lse they are normalised with, or large logits lose digits.
    """
    return _LOG2E if problem.softcap else 1.0


def _queries(problem: Problem, rows: _Rows, dtype: torch.dtype) -> Tensor:
    """The packed queries as the scores need them: under a softcap scaled to the doubled argument of its tanh."""
    q = rows.pack(problem.q[0], dtype)
    return q * (2 * problem.scale / problem.softcap) if problem.softcap else q


def _tanh_of_half_(x: Tensor, scratch: _Scratch) -> Tensor:
    """tanh(x / 2), in place: expm1(x) / (expm1(x) + 2). Exact to the last digits near 0, where most logits lie."""
    x.clamp_(max=60.0)  # beyond, tanh is 1 and expm1 would overflow
    torch.expm1(x, out=x)
    denominator = torch.add(x, 2.0, out=scratch.tile("denominator", *x.shape))
    return x.div_(denominator)


def _forward_heads(problem: Problem, out: Tensor, lse: Tensor, scratch: _Scratch) -> None:
    """One batch entry: out ``(Hq, Sq, Dv)``, lse ``(Hq, Sq)``."""
    dtype = scratch.dtype
    unit = _unit(problem)
    for rows in _row_blocks(problem):
        q = _queries(problem, rows, dtype)  # [Hk, G·rows, D]
        state: _Online | None = None
        for segment in _key_tiles(problem, rows, _FORWARD_KEYS):
            tile = _score_tile(problem, rows, segment, q, scratch)
            if tile is not None:
                state = _add_tile(state, tile.scores, tile.v, unit)
        block = slice(rows.start, rows.stop)
        if state is None:
            out[:, block], lse[:, block] = 0.0, -torch.inf
            continue
        empty = state.total == 0
        out[:, block] = rows.unpack(state.weighted.div_(state.total.masked_fill(empty, 1.0)))
        row_lse = state.highest / unit + torch.log(state.total)
        lse[:, block] = rows.unpack(row_lse.masked_fill_(empty, -torch.inf))[..., 0]


class _Online(NamedTuple):
    """An online softmax over the keys so far, one per packed row."""

    highest: Tensor  # (Hk, G · rows, 1), -inf for a row without a key
    total: Tensor  # sum of exp(score - highest)
    weighted: Tensor  # (Hk, G · rows, Dv): sum of exp(score - highest) v


def _exp_(x: Tensor, unit: float) -> Tensor:
    """exp of scores in that unit, in place."""
    return (x if unit == _LOG2E else x.mul_(_LOG2E)).exp2_()


def _add_tile(state: _Online | None, scores: Tensor, v: Tensor, unit: float) -> _Online:
    """Let a tile of scores in; the scores are used up."""
    highest = scores.amax(-1, keepdim=True)
    if state is not None:
        torch.maximum(highest, state.highest, out=highest)
    # A row without a key so far has a maximum of -inf: any finite stand-in leaves its weights at zero.
    reference = highest.clamp_min(torch.finfo(highest.dtype).min)
    weights = _exp_(scores.sub_(reference), unit)
    if state is None:
        return _Online(highest, weights.sum(-1, keepdim=True), torch.bmm(weights, v))
    shrink = _exp_(state.highest - reference, unit)
    state.total.mul_(shrink).add_(weights.sum(-1, keepdim=True))
    state.weighted.mul_(shrink).baddbmm_(weights, v)
    return state._replace(highest=highest)


def _backward_heads(
    problem: Problem, grad_out: Tensor, delta: Tensor, lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    dbias: Tensor | None, scratch: _Scratch,
) -> None:  # fmt: skip
    """One batch entry; all arguments without the batch dim, dbias ``(1, Hq or 1, Sq or 1, Sk or 1)``.

    Scores are kept transposed, keys × rows: then two of the three matmuls that read them do so along memory.
    """
    dtype, unit = scratch.dtype, _unit(problem)
    for rows in _row_blocks(problem):
        q = rows.pack(problem.q[0], dtype)  # [Hk, G·rows, D]
        score_q = _queries(problem, rows, dtype).transpose(1, 2)
        q_for_dk = q * problem.scale
        grad = rows.pack(grad_out, dtype).contiguous()  # [Hk, G·rows, Dv]
        row_delta = rows.pack(delta[..., None], dtype).transpose(1, 2)  # [Hk, 1, G·rows]
        row_lse = (rows.pack(lse[..., None], dtype) * unit).transpose(1, 2)
        row_dq = torch.zeros_like(q)
        for segment in _key_tiles(problem, rows, _BACKWARD_KEYS):
            tile = _score_tile(problem, rows, segment, score_q, scratch, transposed=True)
            if tile is None:
                continue
            keys = slice(segment.start, segment.stop)
            probs = _exp_(tile.scores.sub_(row_lse), unit)
            dv[:, keys].baddbmm_(probs, grad)
            dscores = scratch.tile("dscores", *probs.shape)
            torch.bmm(tile.v, grad.transpose(1, 2), out=dscores)
            dscores.sub_(row_delta).mul_(probs)
            if dbias is not None:
                _add_reduced(dbias, _by_head(dscores, rows, transposed=True), rows, keys)
            if tile.tanh is not None:  # d tanh = 1 - tanh²
                dscores.mul_(torch.square(tile.tanh, out=tile.tanh).neg_().add_(1.0))
            row_dq.baddbmm_(dscores.transpose(1, 2), tile.k)
            dk[:, keys].baddbmm_(dscores, q_for_dk)
        dq[:, rows.start : rows.stop] = rows.unpack(row_dq.mul_(problem.scale))


def _add_reduced(dbias: Tensor, dscores: Tensor, rows: _Rows, keys: slice) -> None:
    """Add ``(Hk, G, rows, keys)`` into the bias gradient, summed over the dims that the bias broadcasts."""
    target = scores_slice(dbias, slice(rows.start, rows.stop), keys)
    assert target is not None
    target += dscores.flatten(0, 1)[None].sum_to_size(target.shape)
