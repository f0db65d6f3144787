"""ALiBi in O(S) memory: a bias of ``-slope_h · |p - j|`` for query position p and key j, never written out as S × S.

Both sides: with the queries in reverse order the distance is a number less ``i + j``, so the whole bias is a view of one
vector with both strides 1.

One side, or a window: adding a number to a whole row of scores changes its lse by that number and its softmax not at all.
For keys ``j <= p`` the bias is ``slope · j`` less ``slope · p``, so a bias over keys alone does. For keys ``j > p`` it is
``-slope · j`` plus ``slope · p``: the same with the other sign. A window that sees both sides is two calls over disjoint
keys, merged by their lse. (Press et al., "Train Short, Test Long: Attention with Linear Biases", 2021.)
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
    # All counted from the last key that there is, where most queries look: the numbers stay small.
    last: int | Tensor = keys - 1 if kv_lengths is None else (kv_lengths - 1)[:, None, None]
    lengths: dict[str, Any] = {"q_lengths": q_lengths, "kv_lengths": kv_lengths}
    if reverses(slopes, window):
        distance = (last - torch.arange(queries + max(keys, 1) - 1, device=q.device)).abs()
        vector = -slope * distance  # (1 or B, H, Sq + Sk - 1)
        bias = vector.as_strided((vector.shape[0], heads, queries, keys), (*vector.stride()[:2], 1, 1))
        out, lse = attention(reversed_rows(q, q_lengths), k, v, bias=bias, return_lse=True, **lengths, **options)
        return reversed_rows(out, q_lengths), reversed_rows(lse, q_lengths)

    key = torch.arange(keys, device=q.device) - last
    bias = (slope * key).unsqueeze(2)  # (1 or B, H, 1, Sk)
    there: int | Tensor = queries if q_lengths is None else q_lengths[:, None, None]
    row = slope * (torch.arange(1, queries + 1, device=q.device) - there)  # (1 or B, H, Sq)

    out, lse = attention(q, k, v, causal=True, window=(left, None), bias=bias, return_lse=True, **lengths, **options)
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


def reverses(slopes: Tensor, window: tuple[int, int]) -> bool:
    """Whether `attend` takes the queries in reverse order. (The gradient of a slope would be summed over all pairs.)"""
    return window[0] < 0 and window[1] < 0 and not slopes.requires_grad


def reversed_rows(x: Tensor, q_lengths: Tensor | None) -> Tensor:
    """``(B, H, Sq, …)`` with the rows of each sequence in reverse order; those behind it stay behind it."""
    if q_lengths is None:
        return x.flip(2)
    rows = x.shape[2]
    if rows == 0:
        return x
    order = (q_lengths[:, None] - 1 - torch.arange(rows, device=x.device)) % rows  # (B, Sq)
    order = order.long().reshape(x.shape[0], 1, rows, *(1,) * (x.dim() - 3))
    return x.gather(2, order.expand(x.shape))


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
