"""Decoding on the CPU: one problem per sequence, so that its bits do not depend on the batch around it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwise import layout
from headwise.backends.cpu import attention_engine as engine
from headwise.backends.cpu.attention_band import Band
from headwise.backends.cpu.attention_problem import Problem
from headwise.backends.cpu.merge import merge_attention

if TYPE_CHECKING:
    from headwise.ops.attention._arguments import Flags


# Where keys have to be converted for the kernel (16 bits, D ≠ Dv), as many at once.
_KEYS_AT_ONCE = 8192


def attention_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, block_table: Tensor | None, sink: Tensor | None,
    flags: Flags, num_splits: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q is ``(B, Hq, D)`` or ``(B, Hq, Sq, D)``."""
    one = q.dim() == 3
    if one:
        q = q.unsqueeze(2)
    out = layout.empty_like_heads(q, v_cache.shape[3])
    lse = q.new_empty(q.shape[:3], dtype=layout.lse_dtype(q.dtype))
    for b, length in enumerate(lengths.tolist()):
        of_b = slice(b, b + 1)
        cache = _sequence(k_cache, v_cache, block_table, b, length)
        if cache is None:
            out[of_b], lse[of_b] = torch.nan, torch.nan
        else:
            out[of_b], lse[of_b] = _decode_one(q[of_b], *cache, sink, flags, num_splits)
    if one:  # in place: autograd forbids changes in place to views that an op returns
        out.squeeze_(2)
        lse.squeeze_(2)
    return out, lse


def _sequence(
    k_cache: Tensor, v_cache: Tensor, block_table: Tensor | None, b: int, length: int
) -> tuple[Tensor, Tensor] | None:
    """The valid keys and values of a sequence, ``(1, Hk, length, ·)``; None if its length or pages make no sense."""
    if block_table is None:
        if not 0 <= length <= k_cache.shape[2]:
            return None
        return k_cache[b : b + 1, :, :length], v_cache[b : b + 1, :, :length]
    pages, _, page_size, _ = k_cache.shape
    if not 0 <= length <= page_size * block_table.shape[1]:
        return None
    needed = block_table[b, : -(-length // page_size) if page_size else 0].long()
    if ((needed < 0) | (needed >= pages)).any():
        return None
    k, v = (cache[needed].transpose(0, 1).flatten(1, 2)[None, :, :length] for cache in (k_cache, v_cache))
    return k, v


def _decode_one(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, flags: Flags, num_splits: int
) -> tuple[Tensor, Tensor]:
    """q ``(1, Hq, Sq, D)`` over k and v ``(1, Hk, length, ·)``."""
    shape = (*q.shape[:3], v.shape[3])
    band = Band(flags.left, flags.right, k.shape[2] - q.shape[2])
    if q.shape[2] == 1 and k.shape[2] > 0:
        # One token sees one range of keys: cut it out. Then the query heads of a key head are rows of one problem, and
        # share one read of the cache.
        first = 0 if flags.left < 0 else max(0, k.shape[2] - 1 - flags.left)
        k, v = k[:, :, first:], v[:, :, first:]
        q = q.reshape(1, k.shape[1], -1, q.shape[3])
        band = Band(-1, -1, 0)
    parts: tuple[list[Tensor], list[Tensor]] = ([], [])
    size = -(-k.shape[2] // num_splits) or 1 if num_splits else _KEYS_AT_ONCE
    for start in range(0, max(k.shape[2], 1), size):
        keys = slice(start, start + size)
        part_band = band._replace(offset=band.offset - start)
        problem = Problem(q, k[:, :, keys], v[:, :, keys], None, None, part_band, flags.scale, flags.softcap)
        out = q.new_empty((*q.shape[:3], shape[3]))
        lse = q.new_empty(q.shape[:3], dtype=layout.lse_dtype(q.dtype))
        engine.forward(problem, out, lse)
        parts[0].append(out)
        parts[1].append(lse)
    out, lse = (parts[0][0], parts[1][0]) if len(parts[0]) == 1 else merge_attention(*parts)
    out, lse = out.reshape(shape), lse.reshape(shape[:3])
    engine.join_sink(out, lse, sink)
    return out, lse
