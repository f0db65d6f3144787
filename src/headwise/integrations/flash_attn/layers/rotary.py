"""``flash_attn.layers.rotary``: `headwise.rope` with tokens before heads, in place where flash_attn is."""

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
    inplace         write into x; autograd differentiates through it, of a leaf too
    seqlen_offsets  the position of each sequence's first token: an int, or ``(B,)`` ints
    max_seqlen      not needed here

    A position outside the tables gives NaN. Differentiable in x.
    """
    cos, sin = tables(cos, sin)
    if cu_seqlens is None:
        positions = _positions(x, seqlen_offsets)
    else:
        sequence, positions = sequence_of_token(cu_seqlens, x.shape[0])
        positions = positions + (seqlen_offsets[sequence] if isinstance(seqlen_offsets, Tensor) else seqlen_offsets)
    if inplace:
        return _in_place(x, x.shape[-2], cos, sin, positions, interleaved)
    return _rotated(x, cos, sin, positions, interleaved)


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_qkv_(
    qkv: Tensor, cos: Tensor, sin: Tensor, cos_k: Tensor | None = None, sin_k: Tensor | None = None,
    interleaved: bool = False, seqlen_offsets: int | Tensor = 0, num_heads_q: int | None = None,
) -> Tensor:  # fmt: skip
    """Queries and keys rotated in place: qkv ``(B, S, 3, H, D)``, or ``(B, S, Hq + 2 Hk, D)`` with ``num_heads_q``."""
    if cos_k is not None or sin_k is not None:
        raise NotImplementedError(
            "apply_rotary_emb_qkv_: cos_k and sin_k are not supported: call apply_rotary_emb on the keys"
        )
    if qkv.dim() == 5 and qkv.shape[2] == 3:
        heads = 2 * qkv.shape[3]
    elif qkv.dim() == 4 and num_heads_q is not None:
        heads = num_heads_q + (qkv.shape[2] - num_heads_q) // 2
    else:
        raise ValueError(
            f"apply_rotary_emb_qkv_: qkv has shape {tuple(qkv.shape)} and num_heads_q is {num_heads_q}; they need "
            "(B, S, 3, H, D), or (B, S, Hq + 2 Hk, D) and a number"
        )
    return _of_joined(qkv, heads, cos, sin, interleaved, seqlen_offsets)


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """Keys rotated in place: kv ``(B, S, 2, H, D)``."""
    if kv.dim() != 5 or kv.shape[2] != 2:
        raise ValueError(f"apply_rotary_emb_kv_: kv has shape {tuple(kv.shape)}; it needs (B, S, 2, H, D)")
    return _of_joined(kv, kv.shape[3], cos, sin, interleaved, seqlen_offsets)


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """The same in plain PyTorch, in x's dtype: x ``(B, S, H, D)``, cos and sin ``(S, R)`` or ``(B, S, R)``."""
    turned, rest = x.split((2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]), -1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    first, second = a * cos - b * sin, b * cos + a * sin
    joined = torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)
    return torch.cat((joined, rest), -1)


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


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool) -> Tensor:
    """x ``(B, S, H, D)`` or ``(T, H, D)``."""
    if x.dim() == 3:
        return rope(x, cos, sin, positions, interleaved)
    return rope(x.transpose(1, 2), cos, sin, positions, interleaved).transpose(1, 2)


def _of_joined(
    x: Tensor, heads: int, cos: Tensor, sin: Tensor, interleaved: bool, seqlen_offsets: int | Tensor
) -> Tensor:
    """``(B, S, 3 or 2, H, D)`` or ``(B, S, H, D)``, of which the first heads are rotated in place."""
    flat = x.view(*x.shape[:2], -1, x.shape[-1])
    return _in_place(flat, heads, *tables(cos, sin), _positions(x, seqlen_offsets), interleaved).view(x.shape)


def _in_place(x: Tensor, heads: int, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool) -> Tensor:
    """The first heads of x rotated in its memory. With gradients the result has memory of its own, beside that.

    flash_attn's own function writes behind autograd's back: a leaf may be rotated, and only the result has the right
    gradient. So here.
    """
    part = x[..., :heads, :]
    rotated = _rotated(part, cos, sin, positions, interleaved)
    if not (torch.is_grad_enabled() and x.requires_grad):
        part.copy_(rotated)
        return x
    result = rotated if heads == x.shape[-2] else torch.cat((rotated, x[..., heads:, :]), -2)
    with torch.no_grad():
        part.copy_(rotated)
    return result
