"""Launching the kernels of attention backward, ``wgsl/attention_stats.wgsl`` and ``wgsl/attention_backward.wgsl``, and the
tile sizes of the latter."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from headwise.backends.webgpu import scores, tiles
from headwise.backends.webgpu.adapter import FLOOR_WORKGROUP_MEMORY, Capabilities
from headwise.backends.webgpu.device import Device
from headwise.backends.webgpu.shaders import DTYPES
from headwise.backends.webgpu.storage import Region

QUERIES, KEYS = "queries", "keys"

_MOST_REGISTERS = 200  # floats of a thread in arrays that must not spill


class BackwardTile(NamedTuple):
    """Template variables of ``wgsl/attention_backward.wgsl``."""

    rows: int  # own rows that a group of lanes shares
    lanes: int
    threads: int
    streamed_rows: int  # in workgroup memory
    chunk: int  # of them, computed at once
    subgroups: bool

    @property
    def own_tile(self) -> int:
        return self.threads // self.lanes * self.rows

    @property
    def slots(self) -> int:
        """Scores of a chunk that a lane has, of neighbouring streamed rows."""
        return self.chunk // (min(self.lanes // self.rows, self.chunk) if self.subgroups else 1)


class Piece(NamedTuple):
    """A part of a call: all of it, or one key head of one batch entry."""

    batch: int  # the first batch entry
    batches: int
    key_head: int  # the first key head
    key_heads: int
    group: int  # query heads per key head

    def of_keys(self, x: Region) -> Region:
        """The part of k, v, dk or dv ``(B, Hk, ·, ·)``."""
        return x.narrow(0, self.batch, self.batches).narrow(1, self.key_head, self.key_heads)

    def of_queries(self, x: Region) -> Region:
        """The part of q, dO, O, lse or dq ``(B, Hq, …)``."""
        return x.narrow(0, self.batch, self.batches).narrow(1, self.key_head * self.group, self.key_heads * self.group)

    def of_scores(self, x: scores.Scores) -> scores.Scores:
        heads = (self.key_head * self.group, self.key_heads * self.group)
        return x.narrow(self.batch, self.batches, *heads, self.group)


class Problem(NamedTuple):
    """Aligned tensors of one piece: dense, or packed as ``(1, H, T, ·)`` views."""

    piece: Piece
    q: Region
    k: Region
    v: Region
    grad: Region
    stats: Region  # of the whole call; those of the rows of this piece begin at stats_first
    stats_first: int
    scores: scores.Scores
    packing: Any  # `Packing`, or None

    def bound(self, device: Device) -> Problem:
        """The same, with tensors copied whose elements are too far apart to bind."""
        q, k, v, grad = (scores.bindable(device, x) for x in (self.q, self.k, self.v, self.grad))
        return self._replace(q=q, k=k, v=v, grad=grad)

    def single_head(self, batch: int, head: int) -> Problem:
        """One query head of one batch entry, both counted within the piece."""
        piece, length = self.piece, self.q.shape[2]
        q, grad = (x.narrow(0, batch, 1).narrow(1, head, 1) for x in (self.q, self.grad))
        k, v = (x.narrow(0, batch, 1).narrow(1, head // piece.group, 1) for x in (self.k, self.v))
        head_of_call = piece.key_head * piece.group + head
        return self._replace(
            piece=Piece(piece.batch + batch, 1, head_of_call // piece.group, 1, 1), q=q, k=k, v=v, grad=grad,
            stats_first=self.stats_first + (batch * self.q.shape[1] + head) * length,
            scores=self.scores.narrow(batch, 1, head, 1, 1),
        )  # fmt: skip


class Streamed(NamedTuple):
    """Rows [first, past) of the streamed side. resumes: continue the sums of earlier rows; finishes: these are the last."""

    first: int
    past: int
    resumes: bool
    finishes: bool


def ranges(device: Device, problem: Problem, dim: int, *results: Region) -> Iterator[tuple[tuple[int, int], Problem]]:
    """Rows [first, past) of queries (dim 2) or keys (dim 3) to work on at once, and the problem with their mask and bias.

    All rows, unless a result, the mask or the bias is too large to bind."""
    length = rows = (problem.q if dim == 2 else problem.k).shape[2]
    most, pairs = device.capabilities.binding_bytes, problem.scores.pairs
    for x in results:
        if x.storage.size > most:
            rows = min(rows, (most - 512) // (x.strides[2] * x.itemsize))
    for x in pairs.values():
        if x.storage.size > most and x.shape[dim] > 1:
            rows = min(rows, (most - 512) // (x.numel // x.shape[dim] * x.itemsize))
    words = problem.scores.words
    if words is not None and dim == 2 and words.words.storage.size > most and words.words.span_bytes() > most - 512:
        rows = min(rows, max(1, words.rows_at_once(most - 512)))
    if rows == length:
        if length:
            yield (0, length), problem
        return
    for first in range(0, length, max(rows, 1)):
        count = min(max(rows, 1), length - first)
        bound = {name: scores.bindable(device, x.narrow_broadcast(dim, first, count)) for name, x in pairs.items()}
        seen = problem.scores.with_pairs(bound)
        yield (
            (first, first + count),
            problem._replace(scores=seen.mask_rows(first, first + count) if dim == 2 else seen),
        )


def write_stats(device: Device, problem: Problem, out: Region, lse: Region, grad_lse: Region | None) -> None:
    """Fill the stats of the rows of a problem: see ``wgsl/attention_stats.wgsl``."""
    batch, heads, length = out.shape[:3]
    count, vectors = batch * heads * length, out.shape[3] // 4
    lanes = 4 if vectors <= 8 else 16
    kernel = device.kernel(
        "attention_stats", dtype=DTYPES[out.dtype], dlse=grad_lse is not None, vectors=vectors, lanes=lanes
    )
    regions = {"result": out, "grad": problem.grad, "lse": lse, "stats": problem.stats}
    if grad_lse is not None:
        regions["grad_lse"] = grad_lse
    parameters = (
        batch, heads, length, *scores.vectors(out), *scores.vectors(problem.grad), *lse.strides,
        *((0, 0, 0) if grad_lse is None else grad_lse.strides), problem.stats_first,
    )  # fmt: skip
    device.run(kernel, -(-count // (256 // lanes)), parameters, **regions)


class Tiles(NamedTuple):
    """The tiles of own rows of one side of a problem."""

    tile: BackwardTile
    total: int
    entries: Region | None  # of a packed batch: the list of them


def tiles_of(device: Device, side: str, problem: Problem) -> Tiles:
    q, k, v = problem.q, problem.k, problem.v
    batch, heads, length, _ = (q if side == QUERIES else k).shape
    masked = problem.scores.words is not None
    widths = q.shape[3] // 4, v.shape[3] // 4
    tile = _tile(device.capabilities, side, 8 * q.itemsize, *widths, batch * heads, length, masked)
    if problem.packing is None:
        return Tiles(tile, -(-length // tile.own_tile), None)
    of_queries, of_keys = scores.packed_sides(problem.packing, q, k)
    own, other = (of_queries, of_keys) if side == QUERIES else (of_keys, of_queries)
    entries, total = scores.packed_tiles(device, own, other, tile.own_tile)
    return Tiles(tile, total, entries)


def run_side(
    device: Device, side: str, problem: Problem, own: Tiles, own_range: tuple[int, int],
    results: tuple[Region | None, Region | None], streamed: Streamed | None = None,
) -> None:  # fmt: skip
    """One dispatch. results: dq or dk, and dv, where wanted, with all own rows.

    streamed: only this range of the other side; then q, k, v, grad, mask and bias have only the rows of both ranges."""
    q, k, v, grad, call_scores = problem.q, problem.k, problem.v, problem.grad, problem.scores
    first, second = results
    queries, keys = q.shape[2], k.shape[2]
    if problem.packing is not None:
        queries, keys = problem.packing.max_q, problem.packing.max_k
    summed = keys if side == QUERIES else queries * problem.piece.group  # rows: of all query heads of a key head
    variant = call_scores.variant
    if side == QUERIES and streamed is None:
        variant = call_scores.wide_biases(math.gcd(own.tile.slots, 4))
    kernel = device.kernel(
        "attention_backward", side=side, dtype=DTYPES[q.dtype], first=q.shape[3] // 4, second=v.shape[3] // 4,
        want_first=first is not None, want_second=second is not None, variant=variant, **own.tile._asdict(),
        chain=tiles.chain(q.dtype, summed) if streamed is None else tiles.CHAIN, ranged=streamed is not None,
        to=DTYPES[next(x.dtype for x in results if x is not None)],
    )  # fmt: skip
    regions = {"q": q, "k": k, "v": v, "grad": grad, "stats": problem.stats, **call_scores.tensors}
    parameters: tuple[float, ...] = (
        own.total, *own_range, problem.stats_first, *(streamed or ()),
        *(n for x in (q, k, v, grad) for n in scores.vectors(x)),
    )  # fmt: skip
    for name, x in (("dq" if side == QUERIES else "dk", first), ("dv", second)):
        if x is not None:
            regions[name] = x.narrow(2, own_range[0], own_range[1] - own_range[0])
            parameters += scores.vectors(x)
    if own.entries is not None:
        regions["tiles"] = own.entries
    heads = (q if side == QUERIES else k).shape[1]
    device.run(kernel, q.shape[0] * heads * own.total, parameters + call_scores.parameters, **regions)


# -------------------------------------------------------------------------------------------------------- tile sizes


@functools.lru_cache(maxsize=4096)
def _tile(
    capabilities: Capabilities, side: str, bits: int, first: int, second: int, heads: int, length: int,
    masked: bool,
) -> BackwardTile:  # fmt: skip
    """What ``tiles.json`` lists for ``attention_backward_queries`` or ``…_keys``, or a tile by limits alone."""
    subgroup = capabilities.subgroup_size if capabilities.tier >= "C" else 0
    enough = tiles.busy(capabilities)
    found = None
    for entry in tiles.listed(f"attention_backward_{side}", capabilities, bits, max(first, second)):
        tile = BackwardTile(**entry, subgroups=subgroup > 0)
        if (
            workgroup_bytes(tile, side, first, second, masked) <= capabilities.workgroup_memory
            and tile.threads <= capabilities.workgroup_threads
            and (tile.lanes <= subgroup or not subgroup)
        ):
            found = tile
            if heads * -(-length // tile.own_tile) >= enough:
                return tile
    if found is None:
        found = default_tile(subgroup, side, first, second, masked)
        if subgroup and heads * -(-length // found.own_tile) < enough and found.threads > 64:
            found = found._replace(threads=64)
    return found


def default_tile(subgroup: int, side: str, first: int, second: int, masked: bool = False) -> BackwardTile:
    """A tile that fits every adapter. subgroup: its size, or 0. first, second: vectors of a row of q and of v.

    masked: with a mask.
    """
    widest = max(first, second)
    held, most = (3, 4) if side == QUERIES else (4, 2)  # tensors in registers; vectors that a lane has of a row
    rows = lanes = 4
    while lanes * most < widest and lanes < (min(subgroup, 32) if subgroup else 16):
        lanes *= 2
    while rows > 1 and held * rows * 4 * -(-widest // lanes) > _MOST_REGISTERS:
        rows //= 2
    if subgroup:
        tile = BackwardTile(rows, lanes, 128, 32, 8, True)
    else:
        tile = BackwardTile(rows, lanes, 64, 16, 4, False)
    while (
        tile.streamed_rows > tile.chunk and workgroup_bytes(tile, side, first, second, masked) > FLOOR_WORKGROUP_MEMORY
    ):
        tile = tile._replace(streamed_rows=tile.streamed_rows // 2)
    while tile.threads > lanes and workgroup_bytes(tile, side, first, second, masked) > FLOOR_WORKGROUP_MEMORY:
        tile = tile._replace(threads=tile.threads // 2)
    return tile


def workgroup_bytes(tile: BackwardTile, side: str, first: int, second: int, masked: bool = False) -> int:
    """Workgroup memory that a kernel needs, if it writes all results."""
    row = sum(-(-vectors // tile.lanes) * tile.lanes for vectors in (first, second))
    size = 16 * tile.streamed_rows * row
    if side == KEYS:
        size += 8 * tile.streamed_rows
        size += masked * 4 * tile.streamed_rows * max(tile.own_tile // 32, 1)
    if not tile.subgroups:
        size += 16 * (2 * tile.rows * (tile.threads + 1) + (2 if side == KEYS else 1) * tile.own_tile)
    return size
