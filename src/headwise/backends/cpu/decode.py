"""Decoding on the CPU: one problem per sequence, so that its bits do not depend on the rest of the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwise import layout
from headwise.backends.cpu import attention_engine as engine
from headwise.backends.cpu.attention_band import Band
from headwise.backends.cpu.attention_problem import Problem
from headwise.backends.cpu.merge import merge

if TYPE_CHECKING:
    from headwise.ops.attention._arguments import Decode


_KEYS_AT_ONCE = 8192  # bounds the copies where keys are converted for the kernel (16 bits, D ≠ Dv)


def attention_decode(args: Decode) -> tuple[Tensor, Tensor]:
    q = args.q.unsqueeze(2) if args.q.dim() == 3 else args.q
    out = layout.empty_like_heads(q, args.v_cache.shape[3])
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
    flags, shape = args.flags, (*q.shape[:3], v.shape[3])
    band = Band(flags.left, flags.right, k.shape[2] - q.shape[2])
    if q.shape[2] == 1 and k.shape[2] > 0:
        # One token sees one range of keys, so that is cut out. The query heads of a key head then are the rows of one
        # problem, and share one read of the cache.
        first = 0 if flags.left < 0 else max(0, k.shape[2] - 1 - flags.left)
        k, v = k[:, :, first:], v[:, :, first:]
        q = q.reshape(1, k.shape[1], -1, q.shape[3])
        band = Band(-1, -1, 0)
    outs, lses = [], []
    size = -(-k.shape[2] // args.num_splits) or 1 if args.num_splits else _KEYS_AT_ONCE
    for start in range(0, max(k.shape[2], 1), size):
        keys = slice(start, start + size)
        moved = band._replace(offset=band.offset - start)
        problem = Problem(q, k[:, :, keys], v[:, :, keys], None, None, moved, flags.scale, flags.softcap)
        outs.append(q.new_empty((*q.shape[:3], shape[3])))
        lses.append(q.new_empty(q.shape[:3], dtype=layout.statistics_dtype(q.dtype)))
        engine.forward(problem, None, outs[-1], lses[-1])
    out, lse = (outs[0], lses[0]) if len(outs) == 1 else merge(outs, lses)
    out, lse = out.reshape(shape), lse.reshape(shape[:3])
    if args.sink is not None:
        engine.join_sink(out, lse, args.sink)
    return out, lse
