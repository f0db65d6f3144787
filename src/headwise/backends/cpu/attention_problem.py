"""What both engines of this backend work on: attention with one geometry.

A dense call without lengths is one problem. With lengths it is one per batch entry, and a packed batch is one per sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headwise.backends.cpu.attention_band import Band, Segment, hidden
from headwise.backends.cpu.dropout import Dropout
from headwise.layout import statistics_dtype

ALL = slice(None)


class Problem(NamedTuple):
    q: Tensor  # (B, Hq, Sq, D)
    k: Tensor  # (B, Hk, Sk, D)
    v: Tensor  # (B, Hk, Sk, Dv)
    mask: Tensor | None  # bool, 4-D; dims of 1 are broadcast
    bias: Tensor | None  # likewise
    band: Band
    scale: float
    softcap: float  # 0: none
    dropout: Dropout | None = None

    def of_batch(self, batch: slice) -> Problem:
        """Of some batch entries, without dropout, which counts them."""
        if batch == ALL:
            return self
        q, k, v = (x[batch] for x in (self.q, self.k, self.v))
        mask, bias = (scores_slice(x, ALL, ALL, batch) for x in (self.mask, self.bias))
        return self._replace(q=q, k=k, v=v, mask=mask, bias=bias)


class Saved(NamedTuple):
    """What a backward gets for the rows of a problem, beside its inputs."""

    grad_out: Tensor  # (B, Hq, Sq, Dv)
    grad_lse: Tensor | None  # (B, Hq, Sq)
    out: Tensor
    lse: Tensor  # sink included

    def of_rows(self, rows: tuple[slice, ...]) -> Saved:
        grad_lse = None if self.grad_lse is None else self.grad_lse[rows]
        return Saved(self.grad_out[rows], grad_lse, self.out[rows], self.lse[rows])


def scores_slice(x: Tensor | None, rows: slice, keys: slice, batch: slice = ALL) -> Tensor | None:
    """The part of a mask or bias that belongs to these scores; broadcast dims stay 1."""
    if x is None:
        return None
    return x[
        batch if x.shape[0] > 1 else ALL, :, rows if x.shape[2] > 1 else ALL, keys if x.shape[3] > 1 else ALL
    ]  # fmt: skip


def seen_scores(problem: Problem, start: int, stop: int, segment: Segment) -> Tensor | None:
    """bool, broadcastable to ``(B, Hq, rows, keys)``: what geometry and mask let be seen; None where that is all."""
    mask = scores_slice(problem.mask, slice(start, stop), slice(segment.start, segment.stop))
    if segment.kind == "full":
        return mask
    in_band = ~hidden(start, stop, segment, problem.band)
    return in_band[None, None] if mask is None else mask & in_band


def without_hidden_keys(x: Tensor, seen: Tensor | None, problem: Problem) -> Tensor:
    """k or v ``(B, Hk, keys, ·)`` with zeros for the keys that the mask hides from every query of the block.

    Such keys may hold NaN, and zero times NaN is NaN. Geometry needs no such care: a segment has no key that no row sees.
    """
    if seen is None or problem.mask is None:
        return x
    by_head = seen.any(2)  # (B or 1, Hq or 1, keys or 1)
    if by_head.all():
        return x
    if by_head.shape[1] > 1:
        by_head = by_head.unflatten(1, (x.shape[1], -1)).any(2)
    return torch.where(by_head[..., None], x, 0.0).to(x.dtype)


def accumulator(x: Tensor) -> Tensor:
    """Zeros in the shape of x ``(B, H, S, D)``, stored as ``(B, S, H, D)``, in the dtype that sums are kept in."""
    batch, heads, length, last = x.shape
    return torch.zeros((batch, length, heads, last), dtype=statistics_dtype(x.dtype)).transpose(1, 2)
