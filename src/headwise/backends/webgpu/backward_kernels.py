"""The kernels of attention backward: ``wgsl/attention_stats.wgsl``, ``wgsl/attention_backward.wgsl``, how a workgroup of the
latter is cut, and what one dispatch of them is given."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

from headwise.backends.webgpu import scores, tiles
from headwise.backends.webgpu.adapter import FLOOR_WORKGROUP_MEMORY, Capabilities
from headwise.backends.webgpu.runtime import Device
from headwise.backends.webgpu.shaders import DTYPES
from headwise.backends.webgpu.storage import Region

QUERIES, KEYS = "queries", "keys"

_MOST_REGISTERS = 200  # floats of a thread in arrays that must not spill


class Shape(NamedTuple):
    """How a workgroup of ``wgsl/attention_backward.wgsl`` is cut: template variables of the same names."""

    rows: int  # own rows that a group of lanes shares
    lanes: int
    threads: int
    tile: int  # streamed rows in workgroup memory
    chunk: int  # of them, computed at once
    subgroups: bool

    @property
    def own_tile(self) -> int:
        return self.threads // self.lanes * self.rows


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

    def of_scores(self, x: Region) -> Region:
        """The part of a mask or bias, of which dims of 1 are broadcast."""
        if x.shape[0] > 1:
            x = x.narrow(0, self.batch, self.batches)
        if x.shape[1] > 1:
            x = x.narrow(1, self.key_head * self.group, self.key_heads * self.group)
        return x


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
    packed: Packed | None


class Packed(NamedTuple):
    cu_q: Region
    cu_k: Region
    max_q: int
    max_k: int


class Streamed(NamedTuple):
    """Rows [first, past) of the side that a kernel streams; does it go on with sums of earlier ones, and finish them?"""

    first: int
    past: int
    resumes: bool
    finishes: bool


def windows(device: Device, problem: Problem, dim: int, *results: Region) -> Iterator[tuple[tuple[int, int], Problem]]:
    """Rows [first, past) of the side of dim 2 (queries) or 3 (keys) of the scores that a kernel can work on at once: all of
    them, unless a result, the mask or the bias is too large to bind. With them the problem that has only their scores."""
    length = (problem.q if dim == 2 else problem.k).shape[2]
    most, seen = device.capabilities.binding_bytes, problem.scores.regions
    rows = length
    for x in results:
        if x.storage.size > most:
            rows = min(rows, (most - 512) // (x.strides[2] * x.itemsize))
    for x in seen.values():
        if x.storage.size > most and x.shape[dim] > 1:
            rows = min(rows, (most - 512) // (x.numel // x.shape[dim] * x.itemsize))
    if rows == length:
        if length:
            yield (0, length), problem
        return
    for first in range(0, length, max(rows, 1)):
        count = min(max(rows, 1), length - first)
        parts = {
            n: scores.bindable(device, x.narrow(dim, first, count) if x.shape[dim] > 1 else x) for n, x in seen.items()
        }
        strides = tuple(0 if n == 1 else s for x in parts.values() for n, s in zip(x.shape, x.strides, strict=True))
        of_scores = scores.Scores(problem.scores.variant, (*problem.scores.parameters[:9], *strides), parts)
        yield (first, first + count), problem._replace(scores=of_scores)


def rows_of(
    device: Device, problem: Problem, out: Region, lse: Region, grad_lse: Region | None, kv_lengths: Region | None
) -> None:
    """Fill the stats of a problem: see ``wgsl/attention_stats.wgsl``."""
    batch, heads, length = out.shape[:3]
    count, vectors = batch * heads * length, out.shape[3] // 4
    lanes = 4 if vectors <= 8 else 16
    kernel = device.kernel(
        "attention_stats", dtype=DTYPES[out.dtype], dlse=grad_lse is not None,
        lengths="" if kv_lengths is None else DTYPES[kv_lengths.dtype], vectors=vectors, lanes=lanes,
    )  # fmt: skip
    regions = {"result": out, "grad": problem.grad, "lse": lse, "stats": problem.stats}
    dlse_strides: tuple[int, ...] = (0, 0, 0)
    if grad_lse is not None:
        regions["grad_lse"], dlse_strides = grad_lse, grad_lse.strides
    if kv_lengths is not None:
        regions["lengths"] = kv_lengths
    parameters = (
        batch, heads, length, problem.k.shape[2], *scores.vectors(out), *scores.vectors(problem.grad), *lse.strides,
        *dlse_strides, *((0, 0) if kv_lengths is None else (kv_lengths.strides[0], kv_lengths.shape[0])),
        problem.stats_first,
    )  # fmt: skip
    # Without any row there may still be lengths.
    device.run(kernel, max(-(-count // (256 // lanes)), int(kv_lengths is not None)), parameters, **regions)


def own_tiles(device: Device, side: str, problem: Problem, shape: Shape) -> tuple[Region | None, int]:
    """How many tiles of own rows there are; of a packed batch, with the list of them."""
    q, k, packed = problem.q, problem.k, problem.packed
    if packed is None:
        return None, -(-(q if side == QUERIES else k).shape[2] // shape.own_tile)
    of_q, of_k = (packed.cu_q, q.shape[2], packed.max_q), (packed.cu_k, k.shape[2], packed.max_k)
    own, other = (of_q, of_k) if side == QUERIES else (of_k, of_q)
    return scores.packed_tiles(device, own[0], other[0], own[1], other[1], own[2], other[2], shape.own_tile)


def run_side(
    device: Device, side: str, problem: Problem, shape: Shape, entries: Region | None, tile_count: int,
    window: tuple[int, int], first: Region | None, second: Region | None, streamed: Streamed | None = None,
) -> None:  # fmt: skip
    """One dispatch: ``first`` is dq or dk, ``second`` is dv, where they are wanted; both have all own rows.

    ``streamed``: only this window of the other side. Then q, k, v, the gradient, mask and bias have only the rows of
    both windows."""
    q, k, v, grad, of_call = problem.q, problem.k, problem.v, problem.grad, problem.scores
    queries, keys = (q.shape[2], k.shape[2]) if problem.packed is None else (problem.packed.max_q, problem.packed.max_k)
    summed = keys if side == QUERIES else queries * problem.piece.group  # rows: of all query heads of a key head
    kernel = device.kernel(
        "attention_backward", side=side, dtype=DTYPES[q.dtype], first=q.shape[3] // 4, second=v.shape[3] // 4,
        want_first=first is not None, want_second=second is not None, variant=of_call.variant, rows=shape.rows,
        lanes=shape.lanes, threads=shape.threads, tile=shape.tile, chunk=shape.chunk, subgroups=shape.subgroups,
        chain=tiles.chain(q.dtype, summed) if streamed is None else tiles.CHAIN, windowed=streamed is not None,
        to=DTYPES[next(x.dtype for x in (first, second) if x is not None)],
    )  # fmt: skip
    regions = {"q": q, "k": k, "v": v, "grad": grad, "stats": problem.stats, **of_call.regions}
    parameters: tuple[float, ...] = (
        tile_count, *window, problem.stats_first, problem.piece.batch, *(streamed or ()),
        *(n for x in (q, k, v, grad) for n in scores.vectors(x)),
    )  # fmt: skip
    for name, x in (("dq" if side == QUERIES else "dk", first), ("dv", second)):
        if x is not None:
            regions[name] = x.narrow(2, window[0], window[1] - window[0])
            parameters += scores.vectors(x)
    if entries is not None:
        regions["tiles"] = entries
    heads = (q if side == QUERIES else k).shape[1]
    device.run(kernel, q.shape[0] * heads * tile_count, parameters + of_call.parameters, **regions)


# ------------------------------------------------------------------------------------------------------------ the shapes


def shape_of(device: Device, side: str, problem: Problem) -> Shape:
    q, k, v = problem.q, problem.k, problem.v
    batch, heads, length, _ = (q if side == QUERIES else k).shape
    return _shape(device.capabilities, side, 8 * q.itemsize, q.shape[3] // 4, v.shape[3] // 4, batch * heads, length)


@functools.lru_cache(maxsize=4096)
def _shape(capabilities: Capabilities, side: str, bits: int, first: int, second: int, heads: int, length: int) -> Shape:
    """What ``tiles.json`` lists for ``attention_backward_queries`` or ``…_keys``, or a shape by limits alone."""
    subgroup = capabilities.subgroup_size if capabilities.tier >= "C" else 0
    enough = tiles.busy(capabilities)
    found = None
    for entry in tiles.rows(f"attention_backward_{side}", capabilities, bits, max(first, second)):
        shape = Shape(**entry, subgroups=subgroup > 0)
        if (
            workgroup_bytes(shape, side, first, second) <= capabilities.workgroup_memory
            and shape.threads <= capabilities.workgroup_threads
            and (shape.lanes <= subgroup or not subgroup)
        ):
            found = shape
            if heads * -(-length // shape.own_tile) >= enough:
                return shape
    if found is None:
        found = default_shape(subgroup, side, first, second)
        if subgroup and heads * -(-length // found.own_tile) < enough and found.threads > 64:
            found = found._replace(threads=64)
    return found


def default_shape(subgroup: int, side: str, first: int, second: int) -> Shape:
    """A shape for what every adapter has. ``subgroup`` is its size, or 0; ``first`` and ``second`` are vectors of a row of q
    and of v."""
    widest = max(first, second)
    held, most = (3, 4) if side == QUERIES else (4, 2)  # tensors in registers; vectors that a lane has of a row
    rows = lanes = 4
    while lanes * most < widest and lanes < (min(subgroup, 32) if subgroup else 16):
        lanes *= 2
    while rows > 1 and held * rows * 4 * -(-widest // lanes) > _MOST_REGISTERS:
        rows //= 2
    if subgroup:
        shape = Shape(rows, lanes, 128, 32, 8, True)
    else:
        shape = Shape(rows, lanes, 64, 16, 4, False)
    while shape.tile > shape.chunk and workgroup_bytes(shape, side, first, second) > FLOOR_WORKGROUP_MEMORY:
        shape = shape._replace(tile=shape.tile // 2)
    while shape.threads > lanes and workgroup_bytes(shape, side, first, second) > FLOOR_WORKGROUP_MEMORY:
        shape = shape._replace(threads=shape.threads // 2)
    return shape


def workgroup_bytes(shape: Shape, side: str, first: int, second: int, results: int = 2) -> int:
    """Workgroup memory that a kernel needs."""
    row = sum(-(-vectors // shape.lanes) * shape.lanes for vectors in (first, second))
    size = 16 * shape.tile * row
    if side == KEYS:
        size += 8 * shape.tile
    if not shape.subgroups:
        weights = results if side == KEYS else 1
        size += 16 * (2 * shape.rows * (shape.threads + 1) + weights * shape.own_tile)
    return size
