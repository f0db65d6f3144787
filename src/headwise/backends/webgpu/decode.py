"""Decoding on WebGPU: the keys are split over the GPU, and a second kernel merges the splits in a fixed order.

A workgroup serves all query heads of a key head (and all new tokens) with one read of its split of the cache. Only the keys
that a sequence has are split, so a short sequence in a large cache still fills the GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from headwise.backends.webgpu import scores
from headwise.backends.webgpu.adapter import FLOOR_WORKGROUP_MEMORY
from headwise.backends.webgpu.device import Device
from headwise.backends.webgpu.shaders import DTYPES
from headwise.backends.webgpu.storage import Region

# Each sequence is split over about this many workgroups, and no split is smaller than this many keys. The batch size does
# not matter: a sequence gives the same bits in any batch.
WORKGROUPS = 512
SMALLEST_SPLIT = 256

_THREADS = 128  # of a workgroup, unless its rows need more
_MOST_SETS = 8  # of rows in one workgroup
_MERGE_THREADS = 128
_EXCHANGE_BYTES = 4096  # of workgroup memory through which teams exchange their sums at the end


class DecodeTile(NamedTuple):
    """Template variables of ``wgsl/decode.wgsl``: how a workgroup is laid out."""

    lanes: int  # threads that share a row of k and v: a power of two
    slots: int  # teams of them that share the keys
    sets: int  # of rows
    rows: int  # of a thread
    keys: int  # of a team at once


def attention_decode(device: Device, args: Any) -> tuple[Region, Region | None]:
    q = args.q
    if len(q.shape) == 3:
        (batch, heads, d), (of_batch, of_head, _) = q.shape, q.strides
        q = q.with_shape((batch, heads, 1, d), (of_batch, of_head, d, 1))
    rows = q.shape[1] // args.k_cache.shape[1] * q.shape[2]
    tile = tile_of(device.capabilities.subgroup_size, _fours(q.shape[3]), _fours(args.v_cache.shape[3]), rows)
    splits = args.num_splits or _splits(args, q.shape[2], rows, tile)
    out, lse = decode_with(device, tile, splits, args._replace(q=q))
    if q is not args.q:
        out, lse = (x.with_shape((*x.shape[:2], *x.shape[3:]), (*x.strides[:2], *x.strides[3:])) for x in (out, lse))
    return out, lse if args.with_lse else None


def _splits(args: Any, q_length: int, rows: int, tile: DecodeTile) -> int:
    span = capacity_of(args)
    if args.flags.left >= 0:
        span = min(span, args.flags.left + q_length)
    row_blocks = -(-rows // (tile.sets * tile.rows)) or 1
    return min(WORKGROUPS // (args.k_cache.shape[1] * row_blocks), -(-span // SMALLEST_SPLIT))


def decode_with(device: Device, tile: DecodeTile, num_splits: int, args: Any) -> tuple[Region, Region]:
    """`attention_decode` with this tile and this many splits, or one per step of a workgroup if there are fewer."""
    shape, strides = scores.like_heads(args.q, args.v_cache.shape[3])
    out = scores.empty_rows(device, shape, args.flags.result_dtype(args.q.dtype), strides)
    lse = device.empty(args.q.shape[:3], torch.float32)
    if lse.numel == 0:
        return out.result, lse
    q, k, v = (scores.aligned(device, x) for x in (args.q, args.k_cache, args.v_cache))
    capacity = capacity_of(args)
    dv4 = _fours(v.shape[3])
    # The partials of a key head of one sequence can be bound: not those of a batch, which no split may depend on.
    room = device.capabilities.binding_bytes // (q.shape[1] // k.shape[1] * q.shape[2] * dv4 * 16)
    splits = max(1, min(num_splits, -(-capacity // (tile.slots * tile.keys)), room))
    call = _Call(tile, splits, room, capacity, _fours(q.shape[3]), dv4, args.flags)
    whole = _Piece(q, k, v, args.lengths, args.kv_starts, args.block_table, args.sink, out.written, lse, [])
    for piece in _pieces(device, call, whole):
        _run(device, call, piece)
    return scores.finish(device, out), lse


class _Call(NamedTuple):
    tile: DecodeTile
    splits: int
    most_splits: int  # of a key head of one sequence, whose partials can be bound
    capacity: int
    d4: int  # vectors of four in a row
    dv4: int
    flags: Any  # `Flags`


class _Piece(NamedTuple):
    """The batch entries and key heads that are worked on at once."""

    q: Region
    k: Region
    v: Region
    lengths: Region
    starts: Region | None
    table: Region | None
    sink: Region | None
    out: Region
    lse: Region
    ranges: list[tuple[int, int]]  # of keys, or pages, that are bound together

    @property
    def split_dim(self) -> int:
        """The dim of k and v that is bound in ranges: keys, or pages."""
        return 2 if self.table is None else 0


def _pieces(device: Device, call: _Call, whole: _Piece) -> Iterator[_Piece]:
    """The whole call; or each key head of each sequence, if a tensor is larger than a kernel may bind."""
    q, k, v, lengths, starts, table, sink, out, lse, _ = whole
    most = device.capabilities.binding_bytes
    partials = lse.numel * call.splits * call.dv4 * 16
    if partials <= most and all(x.storage.size <= most for x in (q, k, v, out, lse)):
        yield whole._replace(ranges=[(0, k.shape[whole.split_dim])])
        return
    group = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        of_batch = (None if x is None else x.narrow(0, b, 1) for x in (lengths, starts, table))
        one_lengths, one_starts, one_table = of_batch
        for h in range(k.shape[1]):
            one_q, one_out, one_lse = (x.narrow(0, b, 1).narrow(1, h * group, group) for x in (q, out, lse))
            one_k, one_v = (x.narrow(1, h, 1) if table else x.narrow(0, b, 1).narrow(1, h, 1) for x in (k, v))
            one_sink = None if sink is None else sink.narrow(0, h * group, group)
            assert one_lengths is not None
            yield _Piece(
                one_q, one_k, one_v, one_lengths, one_starts, one_table, one_sink, one_out, one_lse,
                _ranges(one_k, one_v, whole.split_dim, most),
            )  # fmt: skip


def _ranges(k: Region, v: Region, dim: int, most: int) -> list[tuple[int, int]]:
    """``(first, past)`` along a dim: as few ranges as possible that a kernel may bind."""
    count = size = k.shape[dim]
    for x in (k, v):
        if x.storage.size > most:
            low, high = x.narrow(dim, 0, min(size, 1)).span()
            room = (most - 512) // x.itemsize - (high - low)
            count = min(count, room // max(x.strides[dim], 1) + 1)
    count = max(count, 1)
    return [(first, min(first + count, size)) for first in range(0, size, count)] or [(0, 0)]


def _run(device: Device, call: _Call, piece: _Piece) -> None:
    tile, flags = call.tile, call.flags
    q, k, v, table, starts = piece.q, piece.k, piece.v, piece.table, piece.starts
    batch, heads, q_length, _ = q.shape
    key_heads = k.shape[1]
    rows = heads // key_heads * q_length
    row_blocks = -(-rows // (tile.sets * tile.rows))
    splits = max(1, min(-(-call.splits // len(piece.ranges)), call.most_splits // len(piece.ranges)))
    slots = splits * len(piece.ranges)
    results = batch * heads * q_length
    partials = device.empty((results * slots * call.dv4 * 4,), torch.float32)
    partial_lses = device.empty((results * slots,), torch.float32)
    left = flags.left if flags.left < call.capacity - 1 else -1  # a window as long as the cache has no effect
    # A cache with pages of no keys: the kernel needs a page size, though nothing is looked up.
    page = 0 if table is None else max(1, k.shape[2])
    kernel = device.kernel(
        "decode", dtype=DTYPES[q.dtype], lengths=DTYPES[piece.lengths.dtype],
        starts="" if starts is None else DTYPES[starts.dtype], page=page,
        ranged=len(piece.ranges) > 1 and page > 0, several=q_length > 1, left=left >= 0, cap=flags.softcap > 0,
        d4=call.d4, dv4=call.dv4, **tile._asdict(), subgroups=device.capabilities.subgroup_size > 0,
        at_once=_at_once(tile),
    )  # fmt: skip
    count = row_blocks * splits * key_heads * batch
    strides = (
        piece.lengths.strides[0], 0 if starts is None else starts.strides[0],
        *((0, 0) if table is None else table.strides), *scores.vectors(q), *scores.vectors(k), *scores.vectors(v),
    )  # fmt: skip
    optional = {name: x for name, x in (("starts", starts), ("table", table)) if x is not None}
    for i, (first, past) in enumerate(piece.ranges):
        parameters = (
            count, key_heads, heads // key_heads, q_length, row_blocks, splits, slots, i * splits,
            call.capacity, left, first, past, k.shape[0], *strides, flags.scale, flags.softcap or 1.0,
        )  # fmt: skip
        bound = [x if len(piece.ranges) == 1 else x.narrow(piece.split_dim, first, past - first) for x in (k, v)]
        device.run(
            kernel, count, parameters, q=q, k=bound[0], v=bound[1], lengths=piece.lengths, **optional,
            partials=partials, partial_lses=partial_lses,
        )  # fmt: skip
    _merge(device, call, piece, partials, partial_lses, slots)


def _merge(device: Device, call: _Call, piece: _Piece, partials: Region, partial_lses: Region, slots: int) -> None:
    sink, out = piece.sink, piece.out
    columns = min(_MERGE_THREADS, _power_of_two(call.dv4))
    kernel = device.kernel(
        "decode_merge", dtype=DTYPES[out.dtype], sink="" if sink is None else DTYPES[sink.dtype], dv4=call.dv4,
        columns=columns, chains=_MERGE_THREADS // columns,
    )  # fmt: skip
    count = piece.lse.numel
    parameters = (count, *out.shape[1:3], slots, 0 if sink is None else sink.strides[0], *scores.vectors(out))
    bound = {"partials": partials, "partial_lses": partial_lses, "out": out, "lse": piece.lse}
    device.run(kernel, count, parameters, **bound, **({} if sink is None else {"sink": sink}))


@functools.lru_cache(maxsize=256)
def tile_of(subgroup_size: int, d4: int, dv4: int, rows: int) -> DecodeTile:
    """A layout for rows of ``d4`` and ``dv4`` vectors, and ``rows`` query rows of a key head.

    Two vectors of a row per thread: enough loads in flight, and few enough registers that several workgroups fit. Without
    subgroups (size 0) teams are small, because they exchange numbers through workgroup memory.
    """
    widest = max(d4, dv4)
    lanes = min(_power_of_two(-(-widest // 2)), min(subgroup_size, 32) or 8)
    columns = -(-widest // lanes)
    most_rows = max(1, min(4, 16 // columns))
    sets = min(-(-max(rows, 1) // most_rows), _MOST_SETS)
    own_rows = min(most_rows, -(-max(rows, 1) // sets))
    slots = max(1, _THREADS // (lanes * sets))
    tile = DecodeTile(lanes, slots, sets, own_rows, 4 if columns <= 2 else 2 if columns <= 4 else 1)
    while tile.keys > 1 and _memory(tile, subgroup_size > 0) > FLOOR_WORKGROUP_MEMORY:
        tile = tile._replace(keys=tile.keys // 2)
    return tile


def _memory(tile: DecodeTile, subgroups: bool) -> int:
    """Bytes of workgroup memory that ``wgsl/decode.wgsl`` takes."""
    teams = tile.slots * tile.sets
    floats = 1 + 2 * teams * tile.rows + 2 * tile.sets * tile.rows + 4 * teams * tile.lanes * _at_once(tile)
    if not subgroups:
        floats += teams * tile.keys * tile.rows * (tile.lanes + 2)
    return 4 * floats


def _at_once(tile: DecodeTile) -> int:
    """Vectors of a thread that teams exchange at once."""
    return max(1, _EXCHANGE_BYTES // (16 * tile.lanes * tile.slots * tile.sets))


def capacity_of(args: Any) -> int:
    """Keys that a sequence may have."""
    pages: int = 1 if args.block_table is None else args.block_table.shape[1]
    return int(args.k_cache.shape[2]) * pages


def _fours(size: int) -> int:
    return -(-size // 4)


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
