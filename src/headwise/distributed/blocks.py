"""Attention of some queries over a block of keys that lies elsewhere in the sequence, and the merge of such partial results.

What sees what is a list of regions: the whole, or one for each document of a packed sequence, or one for each run of batch
entries that have the same lengths. In a region queries and keys are aligned at their ends, as in `attention`. Where the ends
of a block and of the queries are apart in the sequence, the window is shifted by that distance. What cannot be seen is cut
off first, on both sides; a shifted bound is never negative after that. So lengths never reach a kernel: they are slices.

What is merged or summed is float32 also where the inputs are 16-bit: a partial that is rounded to 16 bits, block after
block, loses digits as ranks are added. So kernels are asked for `unrounded` results of 16-bit inputs. Where a query meets
all its keys in one call there is nothing to merge, and the result comes in the dtype of the inputs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise import layout as memory
from headwise.distributed.shards import Parts, Segment
from headwise.ops.attention import merge_attention, unrounded

UNBOUNDED = -1
ALL = slice(None)


class Region(NamedTuple):
    """Queries and keys that may see each other; the last query sits at the last key."""

    queries: Segment
    keys: Segment
    first: int = 0  # batch entry
    past: int | None = None  # None: all of them
    number: int = 0  # of a document

    @property
    def batch(self) -> slice:
        return slice(self.first, self.past) if self.past is not None else ALL


class Plan(NamedTuple):
    """Who holds what, and how far a query sees."""

    rank: int
    of_q: Parts
    of_k: Parts
    left: int
    right: int
    regions: tuple[Region, ...]
    packed: bool = False  # regions are documents, one after the other

    @property
    def ranks(self) -> int:
        return len(self.of_q)

    @property
    def keys(self) -> int:
        return length_of(self.of_k)

    @property
    def queries(self) -> int:
        return length_of(self.of_q)


def length_of(parts: Parts) -> int:
    return sum(stop - start for part in parts for start, stop in part)


class Piece(NamedTuple):
    """What one `attention` call takes."""

    batch: slice
    rows: slice  # of a rank's queries
    columns: slice  # of a block's keys
    keys: slice  # where those keys lie in the sequence
    window: tuple[int | None, int | None]
    first: tuple[int, int, int]  # numbers of its first batch entry (or document), query and key, for dropout


class Dropping(NamedTuple):
    """Dropout. Calls of parts are told where in the whole they lie, so they drop what is dropped in one process."""

    rate: float
    seed: int

    def at(self, device: torch.device, *first: int) -> dict[str, Any]:
        """first: numbers of the first batch entry and head, and of the first query and key if not 0."""
        aligned = (16,) if len(first) == 4 and not any(n % 16 for n in first[2:]) else ()
        return {"dropout": self.rate, "seed": torch.tensor([self.seed, *first, *aligned], device=device)}


class Options(NamedTuple):
    scale: float
    softcap: float | None
    deterministic: bool
    backend: str | None
    dropping: Dropping | None = None

    @property
    def flags(self) -> dict[str, Any]:
        """Those that every call has."""
        return {name: value for name, value in self._asdict().items() if name != "dropping"}

    def at(self, piece: Piece, device: torch.device) -> dict[str, Any]:
        if self.dropping is None:
            return self.flags
        batch, row, key = piece.first
        return {**self.flags, **self.dropping.at(device, batch, 0, row, key)}


class Scores(NamedTuple):
    """What is given for each score, four-dimensional: a rank's queries (or 1) by the keys of the whole sequence (or 1)."""

    mask: Tensor | None = None
    bias: Tensor | None = None

    def at(self, piece: Piece) -> dict[str, Tensor]:
        given = {"mask": self.mask, "bias": self.bias}
        return {name: scores_at(x, piece) for name, x in given.items() if x is not None}


def scores_at(x: Tensor, piece: Piece) -> Tensor:
    """A view."""
    places = (piece.batch, ALL, piece.rows, piece.keys)
    return x[tuple(ALL if size == 1 else place for size, place in zip(x.shape, places, strict=True))]


def pieces(plan: Plan, queries: Sequence[Segment], keys: Sequence[Segment]) -> Iterator[Piece]:
    """The calls that attention of these queries over these keys takes; none where nothing is seen."""
    row = 0
    for q in queries:
        column = 0
        for k in keys:
            for region in _regions(plan, q, k):
                piece = _piece(plan, region, q, k, row, column)
                if piece is not None:
                    yield piece
            column += k.stop - k.start
        row += q.stop - q.start


def _regions(plan: Plan, q: Segment, k: Segment) -> Sequence[Region]:
    """Those that may have something in both segments."""
    if not plan.packed:
        return plan.regions
    first = bisect_right(plan.regions, max(q.start, k.start), key=lambda region: region.queries.stop)
    past = bisect_left(plan.regions, min(q.stop, k.stop), key=lambda region: region.queries.start)
    return plan.regions[first:past]


def _piece(plan: Plan, region: Region, q: Segment, k: Segment, row: int, column: int) -> Piece | None:
    left, right, ahead = plan.left, plan.right, region.keys.stop - region.queries.stop
    # Queries by the positions of the keys that they sit at.
    q_start, q_stop = max(q.start, region.queries.start) + ahead, min(q.stop, region.queries.stop) + ahead
    k_start, k_stop = max(k.start, region.keys.start), min(k.stop, region.keys.stop)
    if left != UNBOUNDED:
        k_start = max(k_start, q_start - left)
    if right != UNBOUNDED:
        k_stop = min(k_stop, q_stop + right)
        q_start = max(q_start, k_start - right)
    if left != UNBOUNDED:
        q_stop = min(q_stop, k_stop + left)
    if k_start >= k_stop or q_start >= q_stop:
        return None
    shift = q_stop - k_stop
    # A bound that no query reaches is no bound: kernels are faster without.
    seen_left = None if left == UNBOUNDED or left - shift >= k_stop - k_start - 1 else left - shift
    seen_right = None if right == UNBOUNDED or right + shift >= q_stop - q_start - 1 else right + shift
    offset = row - q.start - ahead
    if plan.packed:  # positions count inside each document
        first = region.number, q_start - ahead - region.queries.start, k_start - region.keys.start
    else:
        first = region.first, q_start - ahead, k_start
    return Piece(
        region.batch, slice(q_start + offset, q_stop + offset), slice(column + k_start - k.start, column + k_stop - k.start),
        slice(k_start, k_stop), (seen_left, seen_right), first,
    )  # fmt: skip


def existing_rows(plan: Plan) -> Iterator[tuple[slice, slice]]:
    """Batch entries and rows of this rank's queries that are in a region, whether they see a key or not."""
    row = 0
    for q in plan.of_q[plan.rank]:
        for region in _regions(plan, q, q):
            start, stop = max(q.start, region.queries.start), min(q.stop, region.queries.stop)
            if start < stop:
                yield region.batch, slice(row + start - q.start, row + stop - q.start)
        row += q.stop - q.start


class Partial:
    """The attention over the blocks seen so far."""

    def __init__(
        self, plan: Plan, q: Tensor, value_dim: int, sink: Tensor | None, scores: Scores, options: Options, merges: bool
    ) -> None:
        """merges: the keys of a query come in more than one piece. Without it each is the result for its rows."""
        dtype = memory.statistics_dtype(q.dtype)
        self._q, self._scores, self._options, self._merges, self._sink = q, scores, options, merges, sink
        batch, heads, rows, _ = q.shape
        self.out = q.new_zeros(batch, heads, rows, value_dim, dtype=dtype if merges else q.dtype)
        # The sink is what a row has in its denominator before it has seen any key: so it is counted once.
        self.lse = q.new_full((batch, heads, rows), -float("inf"), dtype=dtype)
        if sink is not None:
            for entries, present in existing_rows(plan):
                self.lse[entries, :, present] = sink.to(dtype)[:, None]

    def add(self, todo: Iterator[Piece], k: Tensor, v: Tensor) -> None:
        for piece in todo:
            rows = piece.batch, ALL, piece.rows
            given = self._q[rows], *(x[piece.batch, :, piece.columns] for x in (k, v))
            flags = {"window": piece.window, **self._scores.at(piece), **self._options.at(piece, self._q.device)}
            sink = None if self._merges else self._sink
            out, lse = unrounded.attention(*given, sink=sink, rounded=not self._merges, **flags)
            if self._merges:
                out, lse = merge_attention(
                    [self.out[rows].contiguous(), out.contiguous()], [self.lse[rows].contiguous(), lse],
                    backend=self._options.backend,
                )  # fmt: skip
            self.out[rows], self.lse[rows] = out, lse


class Gradients:
    """The gradient of a rank's queries, and what they give to each block of keys.

    With the out and lse of the whole row, a block's gradients are its terms of the whole ones: no block needs another.
    """

    def __init__(
        self, q: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None, scores: Scores,
        options: Options, need_bias: bool, summed: bool,
    ) -> None:  # fmt: skip
        """summed: terms of other ranks are added."""
        self._rounded = not summed
        sums = memory.statistics_dtype(q.dtype)
        self._q, self._out, self._grad_out = q, out, grad_out.contiguous()
        self._lse, self._grad_lse = lse, None if grad_lse is None else grad_lse.contiguous()
        self._scores, self._options = scores, options
        if need_bias and scores.bias is not None:  # its gradient has its dtype, and is summed
            self._scores = scores._replace(bias=scores.bias.to(sums))
        self.dq = q.new_zeros(q.shape, dtype=sums)
        self.dbias = None
        if need_bias and scores.bias is not None:
            self.dbias = scores.bias.new_zeros(scores.bias.shape, dtype=sums)

    def add(self, todo: Iterator[Piece], k: Tensor, v: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Into dq and dbias, and into the block's dk and dv."""
        for piece in todo:
            rows, columns = (piece.batch, ALL, piece.rows), (piece.batch, ALL, piece.columns)
            grad_out, q, out, lse = (x[rows] for x in (self._grad_out, self._q, self._out, self._lse))
            flags = {**self._options.at(piece, q.device), **self._scores.at(piece)}
            if self._grad_lse is not None:
                flags["grad_lse"] = self._grad_lse[rows].contiguous()
            found = unrounded.attention_backward(
                grad_out, q, k[columns], v[columns], out, lse.contiguous(), window=piece.window,
                need_bias_grad=self.dbias is not None, rounded=self._rounded, **flags,
            )  # fmt: skip
            self.dq[rows] += found[0]
            dk[columns] += found[1]
            dv[columns] += found[2]
            if self.dbias is not None:
                scores_at(self.dbias, piece).add_(found[3])

    def of_sink(self, sink: Tensor) -> Tensor:
        """From this rank's queries: the sink is a key without a value."""
        lse = self._lse[..., None]
        share = (sink.to(lse.dtype)[:, None, None] - lse).exp()
        arrived = -(self._grad_out.to(lse.dtype) * self._out.to(lse.dtype)).sum(-1, keepdim=True)
        if self._grad_lse is not None:
            arrived = arrived + self._grad_lse[..., None]
        # Rows that do not exist have no sink either.
        return torch.where(lse == -float("inf"), 0.0, share * arrived).sum((0, 2, 3)).to(sink.dtype)
