"""``flash_attn_with_kvcache``: new keys and values go into the cache, in place, then queries attend to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headwise.integrations._edges import with_positive_scale
from headwise.integrations.flash_attn import _alibi, _packed
from headwise.integrations.flash_attn._options import softcap_or_none, window_of
from headwise.ops.attention import attention, attention_decode

_NAME = "flash_attn_with_kvcache"
_FEW_QUERIES = 16  # more of them are dense attention over a contiguous cache


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of q ``(B, Sq, Hq, D)`` over a cache, after k and v ``(B, Snew, Hk, D)`` were written into it.

    k_cache, v_cache      ``(B, C, Hk, D)``, or pages ``(pages, page_size, Hk, D)`` with ``block_table`` ``(B, max_pages)``
    rotary_cos, _sin      ``(P, R)``: rotate k, and q, from position ``cache_seqlens`` on; without causal or a window, all
                          of q sits at ``cache_seqlens``
    cache_seqlens         how many positions are filled before the new ones: an int or ``(B,)``; None: all
    cache_batch_idx       ``(B,)``: which entries of the cache belong to the batch
    cache_leftpad         ``(B,)``: cache positions before it do not exist
    num_splits            parts the keys are split into where the call decodes; 0: chosen here

    Out ``(B, Sq, Hq, D)``, and with ``return_softmax_lse`` the lse ``(B, Hq, Sq)``. No gradients, as in flash_attn.
    """
    if torch.is_grad_enabled():
        with torch.no_grad():
            return flash_attn_with_kvcache(
                q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad,
                block_table, softmax_scale, causal, window_size, softcap, rotary_interleaved, alibi_slopes, num_splits,
                return_softmax_lse,
            )  # fmt: skip
    _check(k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, block_table)
    batch, queries = q.shape[:2]
    left, right = window_of(causal, window_size)
    lengths = _lengths(cache_seqlens, batch, k_cache, block_table)
    if k is not None and v is not None:
        for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
            if new.dim() != 4 or (new.shape[0], *new.shape[2:]) != (batch, *cache.shape[2:]):
                raise ValueError(
                    f"{_NAME}: {name} has shape {tuple(new.shape)}; it needs ({batch}, Snew, "
                    f"{', '.join(map(str, cache.shape[2:]))}) as q and the cache have it"
                )
        if rotary_cos is not None and rotary_sin is not None:
            one_place = left < 0 and right < 0
            q, k = _rotated(q, k, rotary_cos, rotary_sin, lengths, one_place, rotary_interleaved)
        positions = lengths[:, None] + torch.arange(k.shape[1], device=q.device)  # (B, Snew)
        for cache, new in ((k_cache, k), (v_cache, v)):
            _write(cache, new, positions, cache_batch_idx, block_table)
        lengths = lengths + k.shape[1]

    q, softmax_scale = with_positive_scale(f"{_NAME}: softmax_scale", q, softmax_scale)
    if q.stride()[-1] != 1:
        q = q.contiguous()
    q = q.transpose(1, 2)
    options: dict[str, Any] = {"scale": softmax_scale, "softcap": softcap_or_none(softcap)}
    sees_all_before = right == 0 or queries == 1  # what decoding means; a single query has no key behind it
    indirect = block_table is not None or cache_batch_idx is not None
    if alibi_slopes is None and sees_all_before and (indirect or queries <= _FEW_QUERIES):
        k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
        if cache_batch_idx is not None:  # a cache is a pool of long pages, one for each entry
            block_table = cache_batch_idx.to(torch.int32)[:, None]
        elif block_table is None and k_cache.shape[0] != batch:
            k_cache, v_cache = k_cache[:batch], v_cache[:batch]
        found = attention_decode(
            q, k_cache, v_cache, lengths, block_table=block_table, kv_starts=cache_leftpad, window=(left, None),
            num_splits=num_splits or None, return_lse=return_softmax_lse, **options,
        )  # fmt: skip
        return (found[0].transpose(1, 2), found[1]) if isinstance(found, tuple) else found.transpose(1, 2)

    options |= {"kv_lengths": lengths, "kv_starts": cache_leftpad}
    keys, values = (_gathered(cache, batch, cache_batch_idx, block_table) for cache in (k_cache, v_cache))
    if alibi_slopes is not None:
        out, lse = _alibi.attend(q, keys, values, alibi_slopes, (left, right), **options)
    else:
        out, lse = attention(q, keys, values, window=(left, right), return_lse=True, **options)
    out = out.transpose(1, 2)
    return (out, lse) if return_softmax_lse else out


def _check(
    k: Any, v: Any, rotary_cos: Any, rotary_sin: Any, cache_seqlens: Any, cache_batch_idx: Any, block_table: Any
) -> None:
    if (k is None) != (v is None):
        raise ValueError(f"{_NAME}: {'v' if v is None else 'k'} is missing; k and v come together")
    if (rotary_cos is None) != (rotary_sin is None):
        missing = "rotary_sin" if rotary_sin is None else "rotary_cos"
        raise ValueError(f"{_NAME}: {missing} is missing; rotary_cos and rotary_sin come together")
    if k is None and rotary_cos is not None:
        raise ValueError(f"{_NAME}: rotary_cos is given without k and v; it rotates new keys and their queries")
    if k is not None and cache_seqlens is None:
        raise ValueError(f"{_NAME}: cache_seqlens is None; k and v need it to know where they go")
    if block_table is not None and cache_batch_idx is not None:
        raise NotImplementedError(
            f"{_NAME}: cache_batch_idx with block_table is not supported: block_table[cache_batch_idx] says the same"
        )


def _lengths(cache_seqlens: int | Tensor | None, batch: int, cache: Tensor, block_table: Tensor | None) -> Tensor:
    if isinstance(cache_seqlens, Tensor):
        return cache_seqlens
    if cache_seqlens is None:
        cache_seqlens = cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    return torch.full((batch,), cache_seqlens, dtype=torch.int32, device=cache.device)


def _rotated(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, lengths: Tensor, one_place: bool, interleaved: bool
) -> tuple[Tensor, Tensor]:
    from headwise.integrations.flash_attn.layers.rotary import apply_rotary_emb, tables

    cos, sin = tables(cos, sin)
    k = apply_rotary_emb(k, cos, sin, interleaved, seqlen_offsets=lengths)
    if one_place:  # the tokens of q as heads of one token
        batch, queries, heads, dim = q.shape
        q = q.reshape(batch, 1, queries * heads, dim)
        return apply_rotary_emb(q, cos, sin, interleaved, seqlen_offsets=lengths).reshape(batch, queries, heads, dim), k
    return apply_rotary_emb(q, cos, sin, interleaved, seqlen_offsets=lengths), k


def _write(
    cache: Tensor, new: Tensor, positions: Tensor, cache_batch_idx: Tensor | None, block_table: Tensor | None
) -> None:
    """``new`` ``(B, Snew, Hk, D)`` into its positions; one outside of the cache is an error of PyTorch's."""
    if block_table is not None:
        size = cache.shape[1]
        pages = block_table.gather(1, (positions // size).long()).long()
        cache[_not_from_the_end(pages, cache.shape[0]), positions % size] = new
        return
    rows = torch.arange(new.shape[0], device=new.device) if cache_batch_idx is None else cache_batch_idx.long()
    cache[rows[:, None], _not_from_the_end(positions.long(), cache.shape[1])] = new


def _not_from_the_end(index: Tensor, size: int) -> Tensor:
    """A negative index (the usual filler of a block table) made one past the end: PyTorch's error, not the last page."""
    return index.masked_fill(index < 0, size)


def _gathered(cache: Tensor, batch: int, cache_batch_idx: Tensor | None, block_table: Tensor | None) -> Tensor:
    """``(B, Hk, C, D)``: a view, but for pages and chosen entries."""
    if block_table is not None:
        cache = _packed.from_pages(cache, block_table)
    elif cache_batch_idx is not None:
        cache = cache.index_select(0, cache_batch_idx)
    return cache[:batch].transpose(1, 2)
