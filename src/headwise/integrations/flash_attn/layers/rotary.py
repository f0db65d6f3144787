"""``flash_attn.layers.rotary``: `headwise.rope` with tokens before heads, in place where flash_attn is."""

from __future__ import annotations

import torch
from torch import Tensor, nn

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
        return _in_place(x, [(x.shape[-2], cos, sin)], positions, interleaved)
    return _rotated(x, cos, sin, positions, interleaved)


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_qkv_(
    qkv: Tensor, cos: Tensor, sin: Tensor, cos_k: Tensor | None = None, sin_k: Tensor | None = None,
    interleaved: bool = False, seqlen_offsets: int | Tensor = 0, num_heads_q: int | None = None,
) -> Tensor:  # fmt: skip
    """Queries and keys rotated in place: qkv ``(B, S, 3, H, D)``, or ``(B, S, Hq + 2 Hk, D)`` with ``num_heads_q``.

    cos_k, sin_k  tables for the keys; None: those for the queries
    """
    if qkv.dim() == 5 and qkv.shape[2] == 3:
        queries = keys = qkv.shape[3]
    elif qkv.dim() == 4 and num_heads_q is not None:
        queries, keys = num_heads_q, (qkv.shape[2] - num_heads_q) // 2
    else:
        raise ValueError(
            f"apply_rotary_emb_qkv_: qkv has shape {tuple(qkv.shape)} and num_heads_q is {num_heads_q}; they need "
            "(B, S, 3, H, D), or (B, S, Hq + 2 Hk, D) and a number"
        )
    parts = [(queries + keys, *tables(cos, sin))]
    if cos_k is not None or sin_k is not None:
        of_keys = tables(cos if cos_k is None else cos_k, sin if sin_k is None else sin_k)
        parts = [(queries, *tables(cos, sin)), (keys, *of_keys)]
    return _of_joined(qkv, parts, interleaved, seqlen_offsets)


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """Keys rotated in place: kv ``(B, S, 2, H, D)``."""
    if kv.dim() != 5 or kv.shape[2] != 2:
        raise ValueError(f"apply_rotary_emb_kv_: kv has shape {tuple(kv.shape)}; it needs (B, S, 2, H, D)")
    return _of_joined(kv, [(kv.shape[3], *tables(cos, sin))], interleaved, seqlen_offsets)


def rotate_half(x: Tensor, interleaved: bool = False) -> Tensor:
    """``(a, b)`` as ``(-b, a)``, for the halves of the last dim or for its pairs."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """The same in plain PyTorch, in x's dtype: x ``(B, S, H, D)``, cos and sin ``(S, R)`` or ``(B, S, R)``."""
    turned, rest = x.split((2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]), -1)
    cos, sin = (
        (y.repeat_interleave(2, -1) if interleaved else torch.cat((y, y), -1)).unsqueeze(-2) for y in (cos, sin)
    )
    return torch.cat((turned * cos + rotate_half(turned, interleaved) * sin, rest), -1)


class RotaryEmbedding(nn.Module):
    """Rotation by ``position · base^(-2 i / dim)``, in place (Su et al., "RoFormer", 2021).

    With ``scale_base``, xPos (Sun et al., "A Length-Extrapolatable Transformer", 2022): the tables of queries are
    multiplied by ``((2 i + 0.4 dim) / 1.4 dim) ^ ((position - P // 2) / scale_base)``, those of keys divided by it; P is
    how many positions the tables have.
    """

    inv_freq: Tensor
    scale: Tensor | None

    def __init__(
        self, dim: int, base: float = 10000.0, interleaved: bool = False, scale_base: float | None = None,
        device: torch.device | str | None = None, *, pos_idx_in_fp32: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        if not pos_idx_in_fp32:
            raise NotImplementedError(
                "RotaryEmbedding: pos_idx_in_fp32=False is not supported: angles are float32; leave it off"
            )
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        self.register_buffer("inv_freq", self._frequencies(device), persistent=False)
        self.register_buffer("scale", None if scale_base is None else self._scale(device), persistent=False)
        self._seq_len_cached = 0
        self._cos_cached: Tensor | None = None
        self._sin_cached: Tensor | None = None
        self._cos_k_cached: Tensor | None = None  # of keys, where they have tables of their own
        self._sin_k_cached: Tensor | None = None

    def _even(self, device: torch.device | str | None) -> Tensor:
        return torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)

    def _frequencies(self, device: torch.device | str | None) -> Tensor:
        return self.base ** (-self._even(device) / self.dim)

    def _scale(self, device: torch.device | str | None) -> Tensor:
        return (self._even(device) + 0.4 * self.dim) / (1.4 * self.dim)

    def _update_cos_sin_cache(
        self, seqlen: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Tables for ``seqlen`` positions at least. Programs call this, and read the tables, by these names."""
        known = self._cos_cached
        if (
            known is not None
            and seqlen <= self._seq_len_cached
            and (known.device, known.dtype) == (device, dtype)
            and not (self.training and known.is_inference())
        ):
            return
        self._seq_len_cached = seqlen
        position = torch.arange(seqlen, device=device, dtype=torch.float32)
        # The buffers may have been cast to 16 bits with the model, in which angles of far positions mean nothing.
        angles = torch.outer(position, self._frequencies(device))
        cos, sin = angles.cos(), angles.sin()
        if self.scale_base is None:
            self._cos_cached, self._sin_cached = cos.to(dtype), sin.to(dtype)
            return
        factor = self._scale(device) ** ((position - seqlen // 2) / self.scale_base)[:, None]
        self._cos_cached, self._sin_cached = (cos * factor).to(dtype), (sin * factor).to(dtype)
        self._cos_k_cached, self._sin_k_cached = (cos / factor).to(dtype), (sin / factor).to(dtype)

    def forward(
        self, qkv: Tensor, kv: Tensor | None = None, seqlen_offset: int | Tensor = 0, max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """qkv as in `apply_rotary_emb_qkv_`; or q ``(B, S, H, D)`` and kv ``(B, S, 2, H, D)``, and both come back.

        max_seqlen  how many positions there are, where ``seqlen_offset`` is a tensor
        """
        if max_seqlen is not None:
            self._update_cos_sin_cache(max_seqlen, qkv.device, qkv.dtype)
        elif not isinstance(seqlen_offset, Tensor):
            self._update_cos_sin_cache(qkv.shape[1] + seqlen_offset, qkv.device, qkv.dtype)
        cos, sin = self._cos_cached, self._sin_cached
        if cos is None or sin is None:
            raise ValueError(
                "RotaryEmbedding: seqlen_offset is a tensor and max_seqlen None; the first call needs max_seqlen"
            )
        if kv is None:
            return apply_rotary_emb_qkv_(
                qkv, cos, sin, self._cos_k_cached, self._sin_k_cached, self.interleaved, seqlen_offset, num_heads_q
            )
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        if self._cos_k_cached is not None and self._sin_k_cached is not None:
            cos, sin = self._cos_k_cached, self._sin_k_cached
        return q, apply_rotary_emb_kv_(kv, cos, sin, self.interleaved, seqlen_offset)


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


Parts = list[tuple[int, Tensor, Tensor]]  # consecutive heads with their cos and sin


def _of_joined(x: Tensor, parts: Parts, interleaved: bool, seqlen_offsets: int | Tensor) -> Tensor:
    """``(B, S, 3 or 2, H, D)`` or ``(B, S, H, D)``, of which the first heads are rotated in place."""
    flat = x.view(*x.shape[:2], -1, x.shape[-1])
    return _in_place(flat, parts, _positions(x, seqlen_offsets), interleaved).view(x.shape)


def _in_place(x: Tensor, parts: Parts, positions: Tensor | None, interleaved: bool) -> Tensor:
    """The first heads of x rotated in its memory. With gradients the result has memory of its own, beside that.

    flash_attn's own function writes behind autograd's back: a leaf may be rotated, and only the result has the right
    gradient. So here.
    """
    heads = [count for count, _, _ in parts]
    rest = x.shape[-2] - sum(heads)
    given = x.split([*heads, rest], -2)
    rotated = [_rotated(y, cos, sin, positions, interleaved) for y, (_, cos, sin) in zip(given, parts, strict=False)]
    differentiable = torch.is_grad_enabled() and x.requires_grad
    result = x
    if differentiable:
        result = rotated[0] if len(rotated) == 1 and not rest else torch.cat((*rotated, given[-1]), -2)
    with torch.no_grad():
        start = 0
        for count, y in zip(heads, rotated, strict=True):
            x.narrow(-2, start, count).copy_(y)
            start += count
    return result
