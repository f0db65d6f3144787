"""Packed and paged batches as padded ones, for calls whose op takes no others: gathers of O(tokens), no look at data."""

from __future__ import annotations

import torch
from torch import Tensor


def lengths(cu_seqlens: Tensor) -> Tensor:
    """``(B,)``"""
    return cu_seqlens[1:] - cu_seqlens[:-1]


def padded(x: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
    """``(T, H, D)`` as ``(B, longest, H, D)``. Behind each sequence lie tokens of others: lengths have to hide them."""
    if x.shape[0] == 0:
        return x.new_zeros((cu_seqlens.shape[0] - 1, longest, *x.shape[1:]))
    rows = cu_seqlens[:-1, None] + torch.arange(longest, device=x.device)
    return x[rows.clamp(0, x.shape[0] - 1)]


def packed(x: Tensor, cu_seqlens: Tensor, total: int, past_the_end: float = 0.0) -> Tensor:
    """``(B, longest, …)`` as ``(total, …)``; rows past the last sequence are filled."""
    batch, longest = x.shape[:2]
    if batch == 0 or longest == 0:
        return x.new_full((total, *x.shape[2:]), past_the_end)
    sequence, position = sequence_of_token(cu_seqlens, total)
    rows = x[sequence, position.clamp(0, longest - 1)]
    outside = torch.arange(total, device=x.device) >= cu_seqlens[-1]
    return rows.masked_fill(outside.reshape(-1, *(1,) * (rows.dim() - 1)), past_the_end)


def sequence_of_token(cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """The sequence that each token belongs to, and its position in there; past the last sequence, as if it went on."""
    token = torch.arange(total, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True)
    sequence = sequence.clamp(max=max(cu_seqlens.shape[0] - 2, 0))
    return sequence, token - cu_seqlens[sequence]


def from_pages(cache: Tensor, block_table: Tensor) -> Tensor:
    """``(pages, page_size, Hk, D)`` as ``(B, max_pages · page_size, Hk, D)``; entries that name no page give any."""
    pages = cache[block_table.long().clamp(0, max(cache.shape[0] - 1, 0))]  # (B, max_pages, page_size, Hk, D)
    return pages.flatten(1, 2)
