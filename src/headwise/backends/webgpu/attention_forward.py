"""Attention forward in WGSL, dense and packed: one kernel, ``wgsl/attention_forward.wgsl``.

A workgroup owns a tile of queries and walks over the keys that some of its rows see, with an online softmax in registers.
Dao, "FlashAttention-2", 2023.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from headwise.backends.webgpu import scores, tiles
from headwise.backends.webgpu.device import Device
from headwise.backends.webgpu.shaders import DTYPES
from headwise.backends.webgpu.storage import Region


class _Problem(NamedTuple):
    """Dense tensors, or packed ones as ``(1, H, T, ·)`` views. Rows of q, k, v and out are aligned."""

    q: Region
    k: Region
    v: Region
    out: Region
    lse: Region  # (B, Hq, Sq)
    scores: scores.Scores


class _Tiling(NamedTuple):
    """How the rows of a call are cut into tiles."""

    tile: tiles.ForwardTile
    chain: int  # keys after which sums go to memory
    entries: Region | None  # of a packed batch: the list of tiles
    total: int  # of its entries

    def blocks(self, rows: int) -> int:
        return self.total if self.entries is not None else -(-rows // self.tile.queries)


def attention_forward(device: Device, args: Any) -> tuple[Region, Region | None]:
    q, k, v = args.q, args.k, args.v
    dtype = args.flags.result_dtype(q.dtype)
    if args.packing is None:
        shape, strides = scores.like_heads(q, v.shape[3])
        out = scores.empty_rows(device, shape, dtype, strides)
        lse = device.empty(q.shape[:3], torch.float32)
    else:
        tokens, heads, _ = q.shape
        out = scores.empty_rows(device, (tokens, heads, v.shape[2]), dtype)
        lse = device.empty((heads, tokens), torch.float32)
    if lse.numel:
        q, k, v = (scores.aligned(device, x) for x in (q, k, v))
        written = out.written
        if args.packing is not None:
            q, k, v, written = (scores.heads_outside(x) for x in (q, k, v, written))
        found = scores.describe(device, args, q, k)
        _run(device, _Problem(q, k, v, written, lse.with_leading(3), found), args)
    # The kernel always writes lse: a variant without it would be one more to compile.
    return scores.finish(device, out), lse if args.with_lse else None


def _run(device: Device, problem: _Problem, args: Any) -> None:
    batch, heads, queries, _ = problem.q.shape
    q_vectors, v_vectors = -(-problem.q.shape[3] // 4), -(-problem.v.shape[3] // 4)
    hides, bits = bool(problem.scores.tensors), 8 * problem.q.itemsize
    tile = tiles.forward(device.capabilities, bits, q_vectors, v_vectors, queries, batch * heads, hides)
    if problem.scores.bias is not None:
        tile = tile.of_fours()
    entries, total = None, 0
    if args.packing is not None:
        entries, total = scores.packed_tiles(
            device, *scores.packed_sides(args.packing, problem.q, problem.k), tile.queries
        )
    chain = tiles.chain(problem.q.dtype, _most_keys(problem, args, tile.queries))
    bindable = scores.Bindable(device)
    for part in _pieces(device, problem):
        keys = part.k.shape[2]
        ranges = [(0, keys)] if part is problem else scores.ranges(device, part.k, part.v)
        ranged = len(ranges) > 1
        # Between dispatches the sums of a row are in memory, in float32.
        out = scores.empty_sums(device, part.out, more=4) if ranged else part.out
        tiling = _Tiling(tile, tiles.CHAIN if ranged else chain, entries, total)
        for first, past in ranges:
            k, v = (bindable.rows(x, first, past) for x in (part.k, part.v))
            # The sink is added once, with the last keys.
            seen = part.scores if past == keys else part.scores.without_sink()
            key_range = (first, past, int(first > 0), int(past == keys)) if ranged else ()
            _dispatch(device, part._replace(k=k, v=v, out=out, scores=seen), tiling, key_range)
        if ranged:
            scores.round_rows(device, out, part.out)


def _dispatch(device: Device, part: _Problem, tiling: _Tiling, key_range: tuple[int, ...]) -> None:
    """One kernel over all rows of a part."""
    variant = part.scores.variant if key_range else part.scores.wide_biases(math.gcd(tiling.tile.unroll, 4))
    direct = _direct(part.scores.numbers.scale, variant)
    kernel = device.kernel(
        "attention_forward", dtype=DTYPES[part.q.dtype], to=DTYPES[part.out.dtype], variant=variant,
        q_vectors=-(-part.q.shape[3] // 4), v_vectors=-(-part.v.shape[3] // 4),
        subgroups=device.capabilities.tier >= "C", ranged=bool(key_range), chain=tiling.chain, direct=bool(direct),
        **tiling.tile._asdict(),
    )  # fmt: skip
    for first, rows in _rows_at_once(device, part):
        seen = part if rows == part.q.shape[2] else _of_rows(part, first, rows)
        blocks = tiling.blocks(rows)
        listed = {} if tiling.entries is None else {"tiles": tiling.entries}
        device.run(
            kernel,
            part.q.shape[0] * part.q.shape[1] * blocks,
            (
                *direct, blocks, first, rows, *scores.vectors(seen.q), *scores.vectors(seen.k), *scores.vectors(seen.v),
                *scores.vectors(seen.out), *seen.lse.strides[:2], *key_range, *seen.scores.parameters,
            ),
            q=seen.q, k=seen.k, v=seen.v, out=seen.out, lse=seen.lse, **seen.scores.regions, **listed,
        )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _direct(scale: float, variant: scores.Variant) -> tuple[float, ...]:
    """Parameters for weights that are computed from products q·k directly; none, if a bias or cap prevents that.

    power: turns a product into an exponent of two. natural: turns that into a logit. hidden: the product of a hidden key, as
    low as float32 allows without overflow. first_reference: so far above hidden that the weight of a hidden key is 0.
    """
    if variant.bias or variant.cap or not 1e-30 < scale < 1e30:
        return ()
    power = float(np.float32(scale * math.log2(math.e)))
    hidden = -3.39e38 * min(1.0, 1.0 / power)
    return power, scale / power, hidden, hidden * power * (1 - 1e-4)


def _most_keys(problem: _Problem, args: Any, rows: int) -> int:
    """An upper bound on the keys that ``rows`` neighbouring queries see."""
    left, right = args.flags.left, args.flags.right
    longest: int = problem.k.shape[2] if args.packing is None else args.packing.max_k
    return min(longest, left + right + rows) if min(left, right) >= 0 else longest


# ------------------------------------------------------------------------------------- tensors larger than one binding


def _pieces(device: Device, problem: _Problem) -> Iterator[_Problem]:
    """The problem; or each head of each batch entry, if a tensor is larger than a kernel may bind."""
    q, k, v, out, lse, call_scores = problem
    most = device.capabilities.binding_bytes
    if all(x.storage.size <= most for x in (q, k, v, out, lse, *call_scores.regions.values())):
        yield problem
        return
    for b in range(q.shape[0]):
        for head in range(q.shape[1]):
            one_q, one_out, one_lse = (x.narrow(0, b, 1).narrow(1, head, 1) for x in (q, out, lse))
            one_k, one_v = (x.narrow(0, b, 1).narrow(1, head // call_scores.numbers.group, 1) for x in (k, v))
            yield _Problem(one_q, one_k, one_v, one_out, one_lse, call_scores.narrow(b, 1, head, 1, 1))


def _rows_at_once(device: Device, part: _Problem) -> list[tuple[int, int]]:
    """``(first row, rows)``, few enough that these rows of every tensor can be bound."""
    queries = most = part.q.shape[2]
    for x in (part.q, part.out, *part.scores.pairs.values()):
        bytes_of_row = x.strides[2] * x.itemsize
        if x.storage.size > device.capabilities.binding_bytes and x.shape[2] > 1 and bytes_of_row:
            room = device.capabilities.binding_bytes - 512 - x.narrow(2, 0, 1).span_bytes()
            most = min(most, max(1, room // bytes_of_row))
    words = part.scores.words
    if words is not None and words.words.storage.size > device.capabilities.binding_bytes:
        most = min(most, max(1, words.rows_at_once(device.capabilities.binding_bytes - 512)))
    return [(first, min(most, queries - first)) for first in range(0, queries, most)]


def _of_rows(part: _Problem, first: int, rows: int) -> _Problem:
    q, out, lse = (x.narrow(2, first, rows) for x in (part.q, part.out, part.lse))
    pairs = {name: x.narrow_broadcast(2, first, rows) for name, x in part.scores.pairs.items()}
    return part._replace(q=q, out=out, lse=lse, scores=part.scores.with_pairs(pairs).mask_rows(first, first + rows))
