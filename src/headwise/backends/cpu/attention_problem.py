"""One attention problem with one geometry: what both engines of this backend work on.

A dense call without lengths is one problem; with lengths it is one per batch entry; a packed batch is one per sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headwise.backends.cpu.attention_band import Band, Segment, visible
from headwise.layout import lse_dtype


class Problem(NamedTuple):
    q: Tensor  # (B, Hq, Sq, D)
    k: Tensor  # (B, Hk, Sk, D)
    v: Tensor  # (B, Hk, Sk, Dv)
    mask: Tensor | None  # bool, 4-D, dims of 1 are broadcast
    bias: Tensor | None
    band: Band
    scale: float
    softcap: float  # 0: none


def largest_score(problem: Problem) -> float:
    """A bound on the scaled scores, by Cauchy and Schwarz; infinite where there is NaN."""
    longest = [torch.linalg.vector_norm(x, dim=-1, dtype=lse_dtype(x.dtype)).amax() for x in (problem.q, problem.k)]
    bound = float(longest[0] * longest[1]) * problem.scale
    return bound if bound == bound else float("inf")


def scores_slice(x: Tensor | None, rows: slice, keys: slice) -> Tensor | None:
    """The part of a mask or bias that belongs to these scores; broadcast dims stay 1."""
    if x is None:
        return None
    return x[:, :, rows if x.shape[2] > 1 else slice(None), keys if x.shape[3] > 1 else slice(None)]


def seen_scores(problem: Problem, start: int, stop: int, segment: Segment) -> Tensor | None:
    """bool, broadcastable to ``(B, Hq, rows, keys)``: geometry and mask together; None where all is visible."""
    seen = visible(start, stop, segment, problem.band)
    mask = scores_slice(problem.mask, slice(start, stop), slice(segment.start, segment.stop))
    if mask is None:
        return None if seen is None else seen[None, None]
    return mask if seen is None else mask & seen


def without_hidden_keys(x: Tensor, seen: Tensor | None, problem: Problem) -> Tensor:
    """Rows of k or v ``(B, Hk, keys, ·)`` that a mask hides from every query of the block, set to zero.

    Such keys may hold NaN, and zero times NaN is NaN. Geometry needs no such care: it cuts ranges to what some row sees.
    """
    if seen is None or problem.mask is None:
        return x
    by_head = seen.any(2)  # (B or 1, Hq or 1, keys or 1)
    if by_head.all():
        return x
    if by_head.shape[1] > 1:
        by_head = by_head.unflatten(1, (x.shape[1], -1)).any(2)
    return torch.where(by_head[..., None], x, 0.0).to(x.dtype)


def finite_lse(lse: Tensor) -> Tensor:
    """The lse with +inf where it is -inf: exp(s - lse) of an empty row becomes 0 instead of NaN."""
    return lse.masked_fill(lse == -torch.inf, torch.inf)


def accumulator(x: Tensor) -> Tensor:
    """Zeros in the shape of x ``(B, H, S, D)``, stored heads inside, in the dtype that sums of x are kept in."""
    batch, heads, length, last = x.shape
    return torch.zeros((batch, length, heads, last), dtype=lse_dtype(x.dtype)).transpose(1, 2)
