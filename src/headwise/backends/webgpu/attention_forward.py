"""Attention forward in WGSL, dense and packed: one kernel, ``wgsl/attention_forward.wgsl``.

A workgroup owns a tile of queries and walks over the keys that some of its rows see, with an online softmax in registers.
Dao, "FlashAttention-2", 2023.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from headwise.backends.webgpu import scores, tiles
from headwise.backends.webgpu.array import launcher
from headwise.backends.webgpu.runtime import Device, Kernel
from headwise.backends.webgpu.shaders import DTYPES
from headwise.backends.webgpu.storage import Region

if TYPE_CHECKING:
    from headwise.ops.attention._arguments import Flags


class _Problem(NamedTuple):
    """Dense tensors, or packed ones as ``(1, H, T, ·)`` views. Rows of q, k, v and out are aligned."""

    q: Region
    k: Region
    v: Region
    out: Region
    lse: Region  # (B, Hq, Sq)
    mask: Region | None
    bias: Region | None
    lengths: Region | None
    sink: Region | None


class _Packing(NamedTuple):
    cu_q: Region
    cu_k: Region
    max_q: int
    max_k: int


@launcher
def attention_forward(
    device: Device, q: Region, k: Region, v: Region, mask: Region | None, bias: Region | None, kv_lengths: Region | None,
    sink: Region | None, flags: Flags,
) -> tuple[Region, Region]:  # fmt: skip
    shape, strides = scores.like_heads(q, v.shape[3])
    out = scores.empty_rows(device, shape, q.dtype, strides)
    lse = device.empty(q.shape[:3], torch.float32)
    if lse.numel:
        q, k, v = (scores.aligned(device, x) for x in (q, k, v))
        _forward(device, _Problem(q, k, v, out.written, lse, mask, bias, kv_lengths, sink), flags, None)
    return scores.finish(device, out), lse


@launcher
def attention_varlen_forward(
    device: Device, q: Region, k: Region, v: Region, cu_q: Region, cu_k: Region, max_q: int, max_k: int,
    sink: Region | None, flags: Flags,
) -> tuple[Region, Region]:  # fmt: skip
    tokens, heads, _ = q.shape
    out = scores.empty_rows(device, (tokens, heads, v.shape[2]), q.dtype)
    lse = device.empty((heads, tokens), torch.float32)
    if lse.numel:
        q, k, v, written = (scores.heads_outside(scores.aligned(device, x)) for x in (q, k, v, out.written))
        problem = _Problem(q, k, v, written, lse.with_shape((1, heads, tokens)), None, None, None, sink)
        _forward(device, problem, flags, _Packing(cu_q, cu_k, max_q, max_k))
    return scores.finish(device, out), lse


def _forward(device: Device, problem: _Problem, flags: Flags, packing: _Packing | None) -> None:
    batch, heads, queries, _ = problem.q.shape
    q_vectors, v_vectors = -(-problem.q.shape[3] // 4), -(-problem.v.shape[3] // 4)
    tile = tiles.forward(device.capabilities, 8 * problem.q.itemsize, q_vectors, v_vectors, queries, batch * heads)
    entries, listed = 0, None
    if packing is not None:
        listed, entries = scores.packed_tiles(
            device, packing.cu_q, packing.cu_k, queries, problem.k.shape[2], packing.max_q, packing.max_k, tile.queries
        )
    chain = tiles.chain(problem.q.dtype, _most_keys(problem, flags, packing, tile.queries))
    bindable = scores.Bindable(device)
    for part in _pieces(device, problem):
        windows = [(0, part.k.shape[2])] if part is problem else scores.windows(device, part.k, part.v)
        # A row that several dispatches sum up lies in memory in between, and not in 16 bits.
        target = part if len(windows) == 1 else part._replace(out=scores.empty_sums(device, part.out, more=4))
        for first, past in windows:
            # A sink counts once, when all keys have.
            sink = part.sink if past == part.k.shape[2] else None
            of_scores = scores.of_call(
                device, part.q, part.k, part.mask, part.bias, part.lengths, sink, flags, packing is not None
            )
            direct = _direct(flags.scale, of_scores.variant)
            kernel = device.kernel(
                "attention_forward",
                dtype=DTYPES[part.q.dtype],
                to=DTYPES[target.out.dtype],
                variant=of_scores.variant,
                q_vectors=q_vectors,
                v_vectors=v_vectors,
                subgroups=device.capabilities.tier >= "C",
                windowed=len(windows) > 1,
                chain=chain if len(windows) == 1 else tiles.CHAIN,
                direct=bool(direct),
                **tile._asdict(),
            )
            k, v = (bindable.rows(x, first, past) for x in (part.k, part.v))
            window = () if len(windows) == 1 else (first, past, int(first > 0), int(past == part.k.shape[2]))
            target_part = target._replace(k=k, v=v)
            _dispatch(device, kernel, target_part, of_scores, tile.queries, listed, entries, direct, window)
        if target is not part:
            scores.round_rows(device, target.out, part.out)


def _dispatch(
    device: Device, kernel: Kernel, part: _Problem, of_scores: scores.Scores, queries: int, listed: Region | None,
    entries: int, direct: tuple[float, ...], window: tuple[int, ...],
) -> None:  # fmt: skip
    """One kernel over all rows of a part, in tiles of so many ``queries`` (of a packed batch: in its list of them)."""
    for first, rows in _rows_at_once(device, part):
        seen = part if rows == part.q.shape[2] else _of_rows(part, first, rows)
        blocks = -(-rows // queries) if listed is None else entries
        regions = of_scores.regions
        for name, x in (("mask", seen.mask), ("bias", seen.bias), ("tiles", listed)):
            if x is not None:
                regions[name] = x
        device.run(
            kernel,
            part.q.shape[0] * part.q.shape[1] * blocks,
            (
                *direct, blocks, first, rows, *scores.vectors(seen.q), *scores.vectors(seen.k), *scores.vectors(seen.v),
                *scores.vectors(seen.out), *seen.lse.strides[:2], *window, *of_scores.parameters,
            ),
            q=seen.q, k=seen.k, v=seen.v, out=seen.out, lse=seen.lse, **regions,
        )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _direct(scale: float, variant: scores.Variant) -> tuple[float, ...]:
    """Numbers of weights that come from products q·k directly; none where something comes in between.

    power, which a product takes to be an exponent of two; natural, which takes that to the logit; the product of a key that
    is hidden, as low as float32 goes and no power makes infinite; a first reference, above it by so much that 2 to it is 0.
    """
    if variant.mask or variant.bias or variant.cap or not 1e-30 < scale < 1e30:
        return ()
    power = float(np.float32(scale * math.log2(math.e)))
    hidden = -3.39e38 * min(1.0, 1.0 / power)
    return power, scale / power, hidden, hidden * power * (1 - 1e-4)


def _most_keys(problem: _Problem, flags: Flags, packing: _Packing | None, rows: int) -> int:
    """Keys that so many rows of queries side by side see together, at most."""
    longest = problem.k.shape[2] if packing is None else packing.max_k
    return min(longest, flags.left + flags.right + rows) if min(flags.left, flags.right) >= 0 else longest


# ------------------------------------------------------------------------------------- tensors larger than one binding


def _pieces(device: Device, problem: _Problem) -> Iterator[_Problem]:
    """The problem, or one head of one batch entry after the other, where a tensor is larger than a kernel may bind."""
    batch, heads = problem.q.shape[:2]
    key_heads = problem.k.shape[1]
    most = device.capabilities.binding_bytes
    if all(x is None or x.storage.size <= most for x in problem):
        yield problem
        return
    for b in range(batch):
        for key_head in range(key_heads):
            k, v = (x.narrow(0, b, 1).narrow(1, key_head, 1) for x in (problem.k, problem.v))
            for head in range(key_head * heads // key_heads, (key_head + 1) * heads // key_heads):
                q, out, lse = (x.narrow(0, b, 1).narrow(1, head, 1) for x in (problem.q, problem.out, problem.lse))
                mask, bias = (
                    None if x is None else _narrowed(_narrowed(x, 0, b, 1), 1, head, 1)
                    for x in (problem.mask, problem.bias)
                )
                lengths = None if problem.lengths is None else problem.lengths.narrow(0, b, 1)
                sink = None if problem.sink is None else problem.sink.narrow(0, head, 1)
                yield _Problem(q, k, v, out, lse, mask, bias, lengths, sink)


def _rows_at_once(device: Device, part: _Problem) -> list[tuple[int, int]]:
    """(first row, rows) so that what a kernel sees of every tensor with such rows can be bound."""
    queries = part.q.shape[2]
    most = queries
    for x in (part.q, part.out, part.mask, part.bias):
        if x is not None and x.storage.size > device.capabilities.binding_bytes:
            bytes_of_row = x.strides[2] * x.itemsize
            low, high = _narrowed(x, 2, 0, 1).span()
            room = device.capabilities.binding_bytes - 512 - (high - low) * x.itemsize
            if x.shape[2] > 1 and bytes_of_row:
                most = min(most, max(1, room // bytes_of_row))
    return [(first, min(most, queries - first)) for first in range(0, queries, most)]


def _of_rows(part: _Problem, first: int, rows: int) -> _Problem:
    q, out, lse = (x.narrow(2, first, rows) for x in (part.q, part.out, part.lse))
    mask, bias = (None if x is None else _narrowed(x, 2, first, rows) for x in (part.mask, part.bias))
    return part._replace(q=q, out=out, lse=lse, mask=mask, bias=bias)


def _narrowed(x: Region, dim: int, start: int, length: int) -> Region:
    """As `Region.narrow`; a dim of size 1 stays: it is the same for all."""
    return x.narrow(dim, start, length) if x.shape[dim] > 1 else x
