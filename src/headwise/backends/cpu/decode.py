"""Decoding on the CPU: one problem per sequence, so that its bits do not depend on the rest of the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwise import layout
from headwise.backends.cpu import attention_engine as engine
from headwise.backends.cpu.attention_band import Band
from headwise.backends.cpu.attention_problem import Problem
from headwise.backends.cpu.merge import merge, merge_batch

if TYPE_CHECKING:
    from headwise.ops.attention._arguments import Decode


_SPLIT = 512  # keys of a split: from a sequence's own length, so that its bits do not depend on the batch
_KEYS_AT_ONCE = 16384  # bounds the copies where keys are converted for the kernel (16 bits, D ≠ Dv)


def attention_decode(args: Decode) -> tuple[Tensor, Tensor]:
    q = args.q.unsqueeze(2) if args.q.dim() == 3 else args.q
    out = layout.empty_like_heads(q, args.v_cache.shape[3], args.flags.result_dtype(q.dtype))
    lse = q.new_empty(q.shape[:3], dtype=layout.statistics_dtype(q.dtype))
    starts = [0] * q.shape[0] if args.kv_starts is None else args.kv_starts.tolist()
    for b, (start, stop) in enumerate(zip(starts, args.lengths.tolist(), strict=True)):
        entry = slice(b, b + 1)
        cache = _sequence(args, b, start, stop)
        if cache is None:
            out[entry], lse[entry] = torch.nan, torch.nan
        else:
            out[entry], lse[entry] = _decode_one(q[entry], *cache, args)
    if args.q.dim() == 3:  # squeezed in place: autograd forbids changes in place to views that an op returns
        out.squeeze_(2)
        lse.squeeze_(2)
    return out, lse


def _sequence(args: Decode, b: int, start: int, stop: int) -> tuple[Tensor, Tensor] | None:
    """The keys and values of a sequence from ``start`` to ``stop``, ``(1, Hk, ·, ·)``; None if that makes no sense."""
    caches, table, size = (args.k_cache, args.v_cache), args.block_table, args.k_cache.shape[2]
    capacity = size if table is None else size * table.shape[1]
    if not (0 <= start <= capacity and 0 <= stop <= capacity):
        return None
    if table is None:
        k, v = (cache[b : b + 1, :, min(start, stop) : stop] for cache in caches)
        return k, v
    first, last = (start // size, -(-stop // size)) if start < stop else (0, 0)
    pages = table[b, first:last].long()
    if ((pages < 0) | (pages >= args.k_cache.shape[0])).any():
        return None
    keys = slice(start - first * size, stop - first * size)
    k, v = (cache[pages].transpose(0, 1).flatten(1, 2)[None, :, keys] for cache in caches)
    return k, v


def _decode_one(q: Tensor, k: Tensor, v: Tensor, args: Decode) -> tuple[Tensor, Tensor]:
    """q ``(1, Hq, Sq, D)`` over the keys of its sequence, ``(1, Hk, ·, ·)``."""
    flags, shape, keys = args.flags, (*q.shape[:3], v.shape[3]), k.shape[2]
    # Keys that every row sees are one range. There all rows of a key head, of whatever query head and token, are rows of
    # one matrix and share one read of the cache. The last few keys, which later tokens see alone, are attention as ever.
    first = 0 if flags.left < 0 else max(0, keys - 1 - flags.left)
    stop = max(first, keys + 1 - q.shape[2])
    if flags.left >= 0 and q.shape[2] > 1:
        first, stop = 0, 0  # a window moves with its row
    outs, lses = _seen_by_all(q, k[:, :, first:stop], v[:, :, first:stop], args)
    if stop < keys or not outs:
        rest = slice(stop, keys)
        band = Band(flags.left, flags.right, keys - q.shape[2] - stop)
        problem = Problem(q, k[:, :, rest], v[:, :, rest], None, None, band, flags.scale, flags.softcap)
        outs.append(q.new_empty(shape, dtype=layout.statistics_dtype(q.dtype)))
        lses.append(outs[-1].new_empty(shape[:3]))
        engine.forward(problem, None, outs[-1], lses[-1])
    out, lse = (outs[0], lses[0]) if len(outs) == 1 else merge(outs, lses)
    if args.sink is not None:
        engine.join_sink(out, lse, args.sink)
    return out, lse


def _seen_by_all(q: Tensor, k: Tensor, v: Tensor, args: Decode) -> tuple[list[Tensor], list[Tensor]]:
    """Results of ranges of these keys, which all rows see, in the shape of q.

    Ranges are cut into splits, which are the batch of one problem: so the keys of a single head fill all cores.
    """
    keys = k.shape[2]
    split = -(-keys // args.num_splits) or 1 if args.num_splits else _SPLIT
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    rows = q.reshape(1, k.shape[1], q.shape[1] // k.shape[1] * q.shape[2], q.shape[3])
    converted = q.dtype != layout.statistics_dtype(q.dtype) or k.shape[3] != v.shape[3]
    at_once = max(1, (_KEYS_AT_ONCE if converted else keys) // split)
    start = 0
    while start < keys:
        count = min(at_once, (keys - start) // split)
        size = split if count else keys - start
        count = max(count, 1)
        ks, vs = (
            x[0, :, start : start + count * size].unflatten(1, (count, size)).transpose(0, 1) for x in (k, v)
        )  # fmt: skip
        problem = Problem(
            rows.expand(count, -1, -1, -1), ks, vs, None, None, Band(-1, -1, 0), args.flags.scale, args.flags.softcap
        )  # fmt: skip
        part = q.new_empty((count, *rows.shape[1:3], v.shape[3]), dtype=layout.statistics_dtype(q.dtype))
        lse = part.new_empty(part.shape[:3])
        engine.forward(problem, None, part, lse)
        if count > 1:
            part, lse = merge_batch(part, lse)
        outs.append(part.view(*q.shape[:3], v.shape[3]))
        lses.append(lse.view(q.shape[:3]))
        start += count * size
    return outs, lses
