"""ALiBi in O(S) memory: a bias of ``-slope_h · |p - j|`` for query position p and key j, never written out as S × S.

Adding a number to a whole row of scores changes its lse by that number and its softmax not at all. For keys ``j <= p`` the
bias is ``slope · j`` less ``slope · p``, so a bias over keys alone does. For keys ``j > p`` it is ``-slope · j`` plus
``slope · p``: the same with the other sign. A call that sees both sides is two calls over disjoint keys, merged by their
lse. (Press et al., "Train Short, Test Long: Attention with Linear Biases", 2021.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headwise.layout import statistics_dtype
from headwise.ops.attention import attention, merge_attention


def attend(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, window: tuple[int, int], *, q_lengths: Tensor | None = None,
    kv_lengths: Tensor | None = None, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Out and lse of q ``(B, H, Sq, D)``, slopes ``(H,)`` or ``(B, H)``. window: (left, right), -1 for no bound."""
    batch, heads, queries, _ = q.shape
    keys, (left, right) = k.shape[2], window
    if slopes.shape not in ((heads,), (batch, heads)):
        raise ValueError(
            f"flash_attn: alibi_slopes has shape {tuple(slopes.shape)}; it needs ({heads},) or ({batch}, {heads})"
        )
    slope = slopes.to(statistics_dtype(q.dtype)).reshape(-1, heads, 1)  # (1 or B, H, 1)

    # Both counted from the last key, where most queries look: the numbers stay small.
    key = torch.arange(1 - keys, 1, device=q.device, dtype=slope.dtype)
    bias = (slope * key).unsqueeze(2)  # (1 or B, H, 1, Sk)
    first: int | Tensor = keys - queries
    if q_lengths is not None and kv_lengths is not None:
        first = (kv_lengths - q_lengths)[:, None, None]
    elif kv_lengths is not None:
        first = (kv_lengths - queries)[:, None, None]
    position = torch.arange(1 - keys, 1 - keys + queries, device=q.device) + first  # (Sq,) or (B, 1, Sq)
    row = slope * position  # (1 or B, H, Sq)

    out, lse = attention(
        q, k, v, causal=True, window=(left, None), bias=bias, q_lengths=q_lengths, kv_lengths=kv_lengths,
        return_lse=True, **options,
    )  # fmt: skip
    if right == 0:
        return out, lse - row
    # Without its last query, every query moves one position on: a window that begins with its own position begins
    # after that of the query itself.
    if q_lengths is None:
        q_lengths = torch.full((batch,), queries, dtype=torch.int32, device=q.device)
    out_after, lse_after = attention(
        q, k, v, window=(0, None if right < 0 else right - 1), bias=-bias, q_lengths=(q_lengths - 1).clamp(min=0),
        kv_lengths=kv_lengths, return_lse=True, **options,
    )  # fmt: skip
    # With heads inside, as the parts lie: merging does not care which dim is which.
    outs, lses = (out, out_after), (lse - row, lse_after + row)
    out, lse = merge_attention([x.transpose(1, 2) for x in outs], [x.transpose(1, 2) for x in lses])
    return out.transpose(1, 2), lse.transpose(1, 2)


def square_bias(
    q: Tensor, k: Tensor, slopes: Tensor, window: tuple[int, int], q_lengths: Tensor | None = None,
    kv_lengths: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The bias written out, ``(1 or B, H, Sq, Sk)``, for who asks for probabilities: those are as large."""
    queries, keys = q.shape[2], k.shape[2]
    first: int | Tensor = keys - queries
    if q_lengths is not None and kv_lengths is not None:
        first = (kv_lengths - q_lengths)[:, None, None, None]
    position = torch.arange(queries, device=q.device)[:, None] + first
    distance = (position - torch.arange(keys, device=q.device)).abs()
    return -slopes.to(statistics_dtype(q.dtype)).reshape(-1, q.shape[1], 1, 1) * distance
