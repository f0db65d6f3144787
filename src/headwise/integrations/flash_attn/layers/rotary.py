"""``flash_attn.layers.rotary.apply_rotary_emb``: `headwise.rope` with tokens before heads."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.integrations.flash_attn._packed import sequence_of_token
from headwise.ops.rope import rope


def apply_rotary_emb(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, inplace: bool = False,
    seqlen_offsets: int | Tensor = 0, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None,
) -> Tensor:  # fmt: skip
    """The first ``2 R`` elements of the head dim rotated by the angles of each token's position.

    x               ``(B, S, H, D)``, or packed ``(T, H, D)`` with ``cu_seqlens``
    cos, sin        ``(P, R)``, row p for position p
    interleaved     pairs are neighbours in place of halves
    inplace         write into x
    seqlen_offsets  the position of each sequence's first token: an int, or ``(B,)`` ints
    max_seqlen      not needed here

    A position outside the tables gives NaN. Differentiable in x.
    """
    cos, sin = tables(cos, sin)
    if cu_seqlens is None:
        rotated = rope(x.transpose(1, 2), cos, sin, _positions(x, seqlen_offsets), interleaved).transpose(1, 2)
    else:
        sequence, position = sequence_of_token(cu_seqlens, x.shape[0])
        offsets = seqlen_offsets[sequence] if isinstance(seqlen_offsets, Tensor) else seqlen_offsets
        rotated = rope(x, cos, sin, position + offsets, interleaved)
    return x.copy_(rotated) if inplace else rotated


apply_rotary_emb_func = apply_rotary_emb


def tables(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Our tables are float32; those of flash_attn have the dtype of x."""
    if cos.dtype.itemsize < 4:
        return cos.float(), sin.float()
    return cos, sin


def _positions(x: Tensor, seqlen_offsets: int | Tensor) -> Tensor | None:
    """x ``(B, S, H, D)``; None: from 0."""
    if isinstance(seqlen_offsets, Tensor):
        return seqlen_offsets[:, None] + torch.arange(x.shape[1], device=x.device)  # (B, S)
    if seqlen_offsets == 0:
        return None
    return torch.arange(seqlen_offsets, seqlen_offsets + x.shape[1], device=x.device)
