"""Attention of some queries over a block of keys that lies elsewhere in the sequence, and the merge of such partial results.

`attention` aligns queries and keys at their ends. Where the block's end and the queries' end are apart in the sequence, the
window is shifted by that distance. What cannot be seen is cut off first, on both sides; a shifted bound is never negative
after that.

Partial results are float32 also where the inputs are 16-bit: a partial that is rounded to 16 bits, block after block, loses
digits as ranks are added. The blocks travel in their own dtype and are converted where they are used.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from headwise import layout as memory
from headwise.distributed.shards import Segment, segments
from headwise.ops.attention import attention, attention_backward, merge_attention

UNBOUNDED = -1


class Plan(NamedTuple):
    """Who holds what, and how far a query sees."""

    rank: int
    ranks: int
    queries: int  # of the whole sequence
    keys: int
    layout: str
    left: int
    right: int

    def query_segments(self, rank: int) -> tuple[Segment, ...]:
        """By their positions among the keys: the last query sits at the last key."""
        ahead = self.keys - self.queries
        return tuple(Segment(a + ahead, b + ahead) for a, b in segments(self.queries, rank, self.ranks, self.layout))

    def key_segments(self, rank: int) -> tuple[Segment, ...]:
        return segments(self.keys, rank, self.ranks, self.layout)


class Piece(NamedTuple):
    """Rows of a rank's queries and the keys of a block that they see, as an `attention` call takes them."""

    rows: slice
    keys: slice
    window: tuple[int | None, int | None]


class Options(NamedTuple):
    scale: float
    softcap: float | None
    deterministic: bool
    backend: str | None


def pieces(plan: Plan, queries: tuple[Segment, ...], keys: tuple[Segment, ...]) -> Iterator[Piece]:
    """The calls that attention of these queries over these keys takes; none where nothing is seen."""
    row = 0
    for q in queries:
        column = 0
        for k in keys:
            piece = _piece(plan, q, k, row, column)
            if piece is not None:
                yield piece
            column += k.stop - k.start
        row += q.stop - q.start


def _piece(plan: Plan, q: Segment, k: Segment, row: int, column: int) -> Piece | None:
    (q_start, q_stop), (k_start, k_stop), left, right = q, k, plan.left, plan.right
    if left != UNBOUNDED:
        k_start = max(k_start, q_start - left)
    if right != UNBOUNDED:
        k_stop = min(k_stop, q_stop + right)
        q_start = max(q_start, k_start - right)
    if left != UNBOUNDED:
        q_stop = min(q_stop, k_stop + left)
    if k_start >= k_stop or q_start >= q_stop:
        return None
    ahead = q_stop - k_stop
    # A bound that no query reaches is no bound: kernels are faster without.
    seen_left = None if left == UNBOUNDED or left - ahead >= k_stop - k_start - 1 else left - ahead
    seen_right = None if right == UNBOUNDED or right + ahead >= q_stop - q_start - 1 else right + ahead
    rows = slice(row + q_start - q.start, row + q_stop - q.start)
    columns = slice(column + k_start - k.start, column + k_stop - k.start)
    return Piece(rows, columns, (seen_left, seen_right))


@functools.lru_cache(maxsize=64)
def reach(plan: Plan) -> tuple[int, ...]:
    """For the block of every rank: how many ranks further along the ring the last one sits that sees any of it."""

    def sees(rank: int, owner: int) -> bool:
        return any(True for _ in pieces(plan, plan.query_segments(rank), plan.key_segments(owner)))

    steps = range(plan.ranks)
    return tuple(max((s for s in steps if sees((o + s) % plan.ranks, o)), default=0) for o in steps)


class Partial:
    """The attention over the blocks seen so far."""

    def __init__(self, q: Tensor, value_dim: int, sink: Tensor | None) -> None:
        self.q = q.to(memory.statistics_dtype(q.dtype))
        batch, heads, rows, _ = q.shape
        self.out = self.q.new_zeros(batch, heads, rows, value_dim)
        # The sink is what a row has in its denominator before it has seen any key: so it is counted once.
        self.lse = self.q.new_full((batch, heads, rows), -float("inf"))
        if sink is not None:
            self.lse[:] = sink.to(self.lse.dtype)[:, None]

    def add(self, todo: Iterator[Piece], k: Tensor, v: Tensor, options: Options) -> None:
        for rows, keys, window in todo:
            seen = (x[:, :, keys].to(self.q.dtype) for x in (k, v))
            out, lse = attention(self.q[:, :, rows], *seen, window=window, return_lse=True, **options._asdict())
            merged = merge_attention(
                [self.out[:, :, rows].contiguous(), out.contiguous()], [self.lse[:, :, rows].contiguous(), lse],
                backend=options.backend,
            )  # fmt: skip
            self.out[:, :, rows], self.lse[:, :, rows] = merged


class Gradients:
    """The gradient of a rank's queries, and what they give to each block of keys.

    With the out and lse of the whole row, a block's gradients are its terms of the whole ones: no block needs another.
    """

    def __init__(self, q: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None) -> None:
        dtype = memory.statistics_dtype(q.dtype)
        self._q, self._out, self._grad_out = (x.to(dtype) for x in (q, out, grad_out.contiguous()))
        self._lse, self._grad_lse = lse, None if grad_lse is None else grad_lse.contiguous()
        self.dq = self._q.new_zeros(q.shape)

    def add(self, todo: Iterator[Piece], k: Tensor, v: Tensor, dk: Tensor, dv: Tensor, options: Options) -> None:
        """Into dq, and into the block's dk and dv."""
        for rows, keys, window in todo:
            grad_out, q, out, lse = (x[:, :, rows] for x in (self._grad_out, self._q, self._out, self._lse))
            flags: dict[str, Any] = options._asdict()
            if self._grad_lse is not None:
                flags["grad_lse"] = self._grad_lse[:, :, rows].contiguous()
            keys_seen, values_seen = (x[:, :, keys].to(q.dtype) for x in (k, v))
            found = attention_backward(
                grad_out, q, keys_seen, values_seen, out, lse.contiguous(), window=window, **flags
            )
            self.dq[:, :, rows] += found[0]
            dk[:, :, keys] += found[1]
            dv[:, :, keys] += found[2]

    def of_sink(self, sink: Tensor) -> Tensor:
        """From this rank's queries: the sink is a key without a value."""
        share = (sink.to(self._lse.dtype)[:, None] - self._lse).exp()
        arrived = -(self._grad_out * self._out).sum(-1)
        if self._grad_lse is not None:
            arrived = arrived + self._grad_lse
        return (share * arrived).sum((0, 2)).to(sink.dtype)
