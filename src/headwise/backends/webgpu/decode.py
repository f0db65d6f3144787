"""Decoding on WebGPU: the keys are split over the machine, and a second kernel merges the shares in a fixed order.

A workgroup serves all query heads of a key head (and all new tokens) with one read of its share of the cache. Shares are
cut from each sequence's own keys, so a short sequence in a large cache still fills the machine.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from headwise.backends.webgpu import scores
from headwise.backends.webgpu.adapter import FLOOR_WORKGROUP_MEMORY
from headwise.backends.webgpu.array import launcher
from headwise.backends.webgpu.runtime import Device
from headwise.backends.webgpu.shaders import DTYPES
from headwise.backends.webgpu.storage import Region

if TYPE_CHECKING:
    from headwise.ops.attention._arguments import Flags

# A sequence alone is split into about this many workgroups, and no share is smaller than this many keys. The batch has no
# say: a sequence gives the same bits in any batch.
WORKGROUPS = 512
SMALLEST_SHARE = 256

_THREADS = 128  # of a workgroup, where rows do not ask for more
_MOST_SETS = 8  # of rows that teams of one workgroup serve
_MERGE_THREADS = 128
_EXCHANGE_BYTES = 4096  # of workgroup memory that the teams meet in at the end


class Tile(NamedTuple):
    """How a workgroup is laid out; see ``wgsl/decode.wgsl``."""

    lanes: int  # threads that share a row of k and v: a power of two
    slots: int  # teams of them that share the keys
    sets: int  # of rows
    rows: int  # of a thread
    keys: int  # of a team at once


@launcher
def attention_decode(
    device: Device, q: Region, k_cache: Region, v_cache: Region, lengths: Region, block_table: Region | None,
    sink: Region | None, flags: Flags, num_splits: int,
) -> tuple[Region, Region]:  # fmt: skip
    """q ``(B, Hq, Sq, D)``, or ``(B, Hq, D)``, and then the results have no dim of tokens either."""
    if len(q.shape) == 4:
        return _decode(device, q, k_cache, v_cache, lengths, block_table, sink, flags, num_splits)
    (batch, heads, d), (of_batch, of_head, _) = q.shape, q.strides
    row = q.with_shape((batch, heads, 1, d), (of_batch, of_head, d, 1))
    out, lse = _decode(device, row, k_cache, v_cache, lengths, block_table, sink, flags, num_splits)
    return tuple(x.with_shape((*x.shape[:2], *x.shape[3:]), (*x.strides[:2], *x.strides[3:])) for x in (out, lse))  # type: ignore[return-value]


def _decode(
    device: Device, q: Region, k_cache: Region, v_cache: Region, lengths: Region, block_table: Region | None,
    sink: Region | None, flags: Flags, num_splits: int,
) -> tuple[Region, Region]:  # fmt: skip
    q_heads, q_length, d = q.shape[1:]
    rows = q_heads // k_cache.shape[1] * q_length
    tile = tile_of(device.capabilities.subgroup_size, _fours(d), _fours(v_cache.shape[3]), rows)
    if num_splits == 0:
        span = capacity_of(k_cache, block_table)
        if flags.left >= 0:
            span = min(span, flags.left + q_length)
        row_blocks = -(-rows // (tile.sets * tile.rows)) or 1
        num_splits = min(WORKGROUPS // (k_cache.shape[1] * row_blocks), -(-span // SMALLEST_SHARE))
    return decode_with(device, tile, num_splits, q, k_cache, v_cache, lengths, block_table, sink, flags)


def decode_with(
    device: Device, tile: Tile, num_splits: int, q: Region, k_cache: Region, v_cache: Region, lengths: Region,
    block_table: Region | None, sink: Region | None, flags: Flags,
) -> tuple[Region, Region]:  # fmt: skip
    """`attention_decode` with this tile and this many splits, or one per step of a workgroup if there are fewer."""
    out = scores.empty_rows(device, *_result(q, v_cache.shape[3]))
    lse = device.empty(q.shape[:3], torch.float32)
    if lse.numel == 0:
        return out.result, lse
    q, k, v = (scores.aligned(device, x) for x in (q, k_cache, v_cache))
    capacity = capacity_of(k, block_table)
    splits = max(1, min(num_splits, -(-capacity // (tile.slots * tile.keys))))
    call = _Call(tile, splits, capacity, _fours(q.shape[3]), _fours(v.shape[3]), flags)
    for piece in _pieces(device, call, q, k, v, lengths, block_table, sink, out.written, lse):
        _run(device, call, piece)
    return scores.finish(device, out), lse


class _Call(NamedTuple):
    tile: Tile
    splits: int
    capacity: int
    d4: int  # vectors of four in a row
    dv4: int
    flags: Flags


class _Piece(NamedTuple):
    """The batch entries and key heads that are worked on at once; ``ranges`` of keys, or pages, that are bound together."""

    q: Region
    k: Region
    v: Region
    lengths: Region
    table: Region | None
    sink: Region | None
    out: Region
    lse: Region
    ranges: list[tuple[int, int]]


def _pieces(
    device: Device, call: _Call, q: Region, k: Region, v: Region, lengths: Region, table: Region | None,
    sink: Region | None, out: Region, lse: Region,
) -> Iterator[_Piece]:  # fmt: skip
    """All of it, unless a tensor is larger than a kernel may bind: then one key head of one sequence after the other."""
    most = device.capabilities.binding_bytes
    split_dim = 2 if table is None else 0
    parts = lse.numel * call.splits * call.dv4 * 16
    if parts <= most and all(x.storage.size <= most for x in (q, k, v, out, lse)):
        yield _Piece(q, k, v, lengths, table, sink, out, lse, [(0, k.shape[split_dim])])
        return
    group = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for h in range(k.shape[1]):
            of_head = [x.narrow(0, b, 1).narrow(1, h * group, group) for x in (q, out, lse)]
            k_part, v_part = (x.narrow(1, h, 1) if table else x.narrow(0, b, 1).narrow(1, h, 1) for x in (k, v))
            yield _Piece(
                of_head[0], k_part, v_part, lengths.narrow(0, b, 1), table.narrow(0, b, 1) if table else None,
                sink.narrow(0, h * group, group) if sink else None, of_head[1], of_head[2],
                _ranges(k_part, v_part, split_dim, most),
            )  # fmt: skip


def _ranges(k: Region, v: Region, dim: int, most: int) -> list[tuple[int, int]]:
    """``(first, past)`` along a dim: as few as a kernel may bind one after the other."""
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
    q, k, v, table = piece.q, piece.k, piece.v, piece.table
    batch, heads, q_length, _ = q.shape
    key_heads = k.shape[1]
    rows = heads // key_heads * q_length
    row_blocks = -(-rows // (tile.sets * tile.rows))
    splits = -(-call.splits // len(piece.ranges))
    slots = splits * len(piece.ranges)
    results = batch * heads * q_length
    parts = device.empty((results * slots * call.dv4 * 4,), torch.float32)
    part_lses = device.empty((results * slots,), torch.float32)
    left = flags.left if flags.left < call.capacity - 1 else -1  # a window that reaches over the whole cache is none
    kernel = device.kernel("decode", **_variant(
        tile, call.d4, call.dv4, DTYPES[q.dtype], DTYPES[piece.lengths.dtype],
        # A cache without a single slot has no pages to look up.
        0 if table is None else max(1, k.shape[2]), len(piece.ranges) > 1, q_length > 1, left >= 0, flags.softcap > 0,
        device.capabilities.subgroup_size > 0,
    ))  # fmt: skip
    count = row_blocks * splits * key_heads * batch
    strides = (
        piece.lengths.strides[0], *((0, 0) if table is None else table.strides), *scores.vectors(q), *scores.vectors(k),
        *scores.vectors(v),
    )  # fmt: skip
    tables = {} if table is None else {"table": table}
    for i, (first, past) in enumerate(piece.ranges):
        parameters = (
            count, key_heads, heads // key_heads, q_length, row_blocks, splits, slots, i * splits,
            call.capacity, left, first, past, k.shape[0], *strides, flags.scale, flags.softcap or 1.0,
        )  # fmt: skip
        bound = [
            x if len(piece.ranges) == 1 else x.narrow(2 if table is None else 0, first, past - first) for x in (k, v)
        ]
        device.run(
            kernel, count, parameters, q=q, k=bound[0], v=bound[1], lengths=piece.lengths, **tables, parts=parts,
            part_lses=part_lses,
        )  # fmt: skip
    _merge(device, call, piece, parts, part_lses, slots)


def _merge(device: Device, call: _Call, piece: _Piece, parts: Region, part_lses: Region, slots: int) -> None:
    sink, out = piece.sink, piece.out
    columns = min(_MERGE_THREADS, _power_of_two(call.dv4))
    kernel = device.kernel(
        "decode_merge", dtype=DTYPES[out.dtype], sink="" if sink is None else DTYPES[sink.dtype], dv4=call.dv4,
        columns=columns, chains=_MERGE_THREADS // columns,
    )  # fmt: skip
    count = piece.lse.numel
    parameters = (count, *out.shape[1:3], slots, 0 if sink is None else sink.strides[0], *scores.vectors(out))
    sinks = {} if sink is None else {"sink": sink}
    device.run(kernel, count, parameters, parts=parts, part_lses=part_lses, **sinks, out=out, lse=piece.lse)


@functools.lru_cache(maxsize=1024)
def _variant(
    tile: Tile, d4: int, dv4: int, dtype: str, lengths: str, page: int, ranged: bool, several: bool, left: bool,
    cap: bool, subgroups: bool,
) -> dict[str, Any]:  # fmt: skip
    """The template variables of ``wgsl/decode.wgsl``."""
    return {
        "dtype": dtype, "lengths": lengths, "page": page, "ranged": ranged and page > 0, "several": several,
        "left": left, "cap": cap, "d4": d4, "dv4": dv4, **tile._asdict(), "subgroups": subgroups,
        "at_once": _at_once(tile),
    }  # fmt: skip


@functools.lru_cache(maxsize=256)
def tile_of(subgroup_size: int, d4: int, dv4: int, rows: int) -> Tile:
    """A layout for rows of ``d4`` and ``dv4`` vectors, and ``rows`` query rows of a key head.

    Two vectors of a row per thread: enough bytes on their way from memory, and few enough registers that several workgroups
    fit. Without subgroups (size 0) teams are small, for what they exchange goes through workgroup memory.
    """
    widest = max(d4, dv4)
    lanes = min(_power_of_two(-(-widest // 2)), min(subgroup_size, 32) or 8)
    columns = -(-widest // lanes)
    most_rows = max(1, min(4, 16 // columns))
    sets = min(-(-max(rows, 1) // most_rows), _MOST_SETS)
    own_rows = min(most_rows, -(-max(rows, 1) // sets))
    slots = max(1, _THREADS // (lanes * sets))
    tile = Tile(lanes, slots, sets, own_rows, 4 if columns <= 2 else 2 if columns <= 4 else 1)
    while tile.keys > 1 and _memory(tile, subgroup_size > 0) > FLOOR_WORKGROUP_MEMORY:
        tile = tile._replace(keys=tile.keys // 2)
    return tile


def _memory(tile: Tile, subgroups: bool) -> int:
    """Bytes of workgroup memory that ``wgsl/decode.wgsl`` takes."""
    teams = tile.slots * tile.sets
    floats = 1 + 2 * teams * tile.rows + 2 * tile.sets * tile.rows + 4 * teams * tile.lanes * _at_once(tile)
    if not subgroups:
        floats += teams * tile.keys * tile.rows * (tile.lanes + 2)
    return 4 * floats


def _at_once(tile: Tile) -> int:
    """Vectors of a thread that teams exchange at once."""
    return max(1, _EXCHANGE_BYTES // (16 * tile.lanes * tile.slots * tile.sets))


def capacity_of(k_cache: Region, block_table: Region | None) -> int:
    return k_cache.shape[2] * (1 if block_table is None else block_table.shape[1])


def _result(q: Region, last: int) -> tuple[tuple[int, ...], torch.dtype, tuple[int, ...] | None]:
    shape, strides = scores.like_heads(q, last)
    return shape, q.dtype, strides


def _fours(size: int) -> int:
    return -(-size // 4)


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
