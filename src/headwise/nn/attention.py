"""Self-attention as a module: projections, grouped heads, normalised queries and keys, rotary positions, a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headwise.nn.cache import KVCache
from headwise.nn.norms import RMSNorm
from headwise.nn.packing import Packing
from headwise.nn.rotary import RotaryEmbedding
from headwise.ops.attention import attention, attention_decode, attention_varlen

_DECODE_TOKENS = 16  # as many new tokens at most are worth the kernel that splits the keys


class Attention(nn.Module):
    """Self-attention of x ``(B, S, dim)``, or of packed documents ``(T, dim)``.

    heads, key_heads  query heads, and key heads that they share (None: as many)
    causal, window, softcap, scale, dropout   as in `headwise.attention`; dropout in training only
    sink              a learned logit for each head that takes part in the softmax and has no value
    qk_norm           RMSNorm of queries and keys over the head dim, before the rotation
    rotary            a `RotaryEmbedding`, shared by all layers of a model

    >>> attention = nn.Attention(64, heads=4, key_heads=2, window=(15, 0))
    >>> attention(torch.randn(2, 100, 64)).shape
    torch.Size([2, 100, 64])
    """

    def __init__(
        self, dim: int, heads: int, key_heads: int | None = None, head_dim: int | None = None, *, causal: bool = True,
        window: tuple[int | None, int | None] | None = None, softcap: float | None = None, scale: float | None = None,
        sink: bool = False, qk_norm: bool = False, norm_eps: float = 1e-6, norm_offset: float = 0.0,
        rotary: RotaryEmbedding | None = None, dropout: float = 0.0, bias: bool = False, backend: str | None = None,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.heads, self.key_heads = heads, heads if key_heads is None else key_heads
        if heads < 1 or self.key_heads < 1:
            raise ValueError(f"Attention: heads is {heads} and key_heads {key_heads}; each needs at least 1")
        if not 0 <= dropout < 1:
            raise ValueError(f"Attention: dropout is {dropout}; it needs to be at least 0 and below 1")
        if head_dim is None and dim % heads:
            raise ValueError(f"Attention: dim is {dim}; it needs a multiple of heads ({heads}), or give head_dim")
        if self.heads % self.key_heads:
            raise ValueError(f"Attention: heads is {heads}; it needs a multiple of key_heads ({self.key_heads})")
        self.head_dim = dim // heads if head_dim is None else head_dim
        self.causal, self.window, self.softcap, self.scale = causal, window, softcap, scale
        self.dropout, self.backend = dropout, backend
        width = self.heads * self.head_dim
        self.qkv = nn.Linear(dim, width + 2 * self.key_heads * self.head_dim, bias=bias, device=device, dtype=dtype)
        self.out = nn.Linear(width, dim, bias=bias, device=device, dtype=dtype)
        self.sink = nn.Parameter(torch.zeros(heads, device=device, dtype=dtype)) if sink else None
        self.q_norm, self.k_norm = (
            RMSNorm(self.head_dim, norm_eps, norm_offset, backend=backend, device=device, dtype=dtype)
            if qk_norm
            else None
            for _ in range(2)
        )
        self.rotary = rotary
        # `attention` over a sequence that lies on many devices: headwise.distributed.context_parallel puts it here.
        self.attend: Callable[..., Tensor] | None = None

    def forward(
        self, x: Tensor, *, positions: Tensor | None = None, packing: Packing | None = None,
        lengths: Tensor | None = None, cache: KVCache | None = None, layer: int = 0,
    ) -> Tensor:  # fmt: skip
        """
        positions  of the tokens, ``(B, S)``, ``(S,)`` or ``(T,)``; None: counted from 0, or from the cache or the packing
        packing    x holds documents end to end, none of which sees another
        lengths    ``(B,)`` ints: real tokens of each row of a batch padded on the right
        cache      of the model, already extended by these tokens; ``layer`` is this layer's place in it. Nothing is dropped

        Packing, lengths and a cache exclude each other; rows of different lengths are told to `KVCache.extend`.
        """
        given = [name for name, x in (("packing", packing), ("lengths", lengths), ("cache", cache)) if x is not None]
        if len(given) > 1:
            raise ValueError(f"Attention: {' and '.join(given)} are given; it takes one of them")
        if positions is None and (packing is not None or cache is not None):
            positions = packing.positions if packing is not None else cache.positions  # type: ignore[union-attr]
        q, k, v = self.project(x, positions, packed=packing is not None)
        if packing is not None:
            out = self._packed(q, k, v, packing)
            return self._output(out.flatten(1))
        out = self._dense(q, k, v, lengths, self._dropout()) if cache is None else self._cached(q, k, v, cache, layer)
        return self._output(out.transpose(1, 2).flatten(2))

    def project(
        self, x: Tensor, positions: Tensor | None = None, packed: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as attention gets them: ``(B, H, S, D)``, packed ``(T, H, D)``."""
        kv = self.key_heads * self.head_dim
        mixed = self.qkv(x).split((self.heads * self.head_dim, kv, kv), -1)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in mixed)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if not packed:
            q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        if self.rotary is not None:
            q, k = self.rotary(q, k, positions)
            if v.requires_grad and self.q_norm is None:
                # Its backward needs v alone: as a view it would keep the memory of the unrotated q and k as well.
                v = v.contiguous()
        return q, k, v

    def _packed(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> Tensor:
        if self.attend is not None:
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            return self._dense(q, k, v, None, self._dropout(), cu_seqlens=packing.cu_seqlens)[0].transpose(0, 1)
        ends, longest = packing.cu_seqlens, packing.longest
        return attention_varlen(
            q, k, v, ends, ends, longest, longest, causal=self.causal, window=self.window, scale=self.scale,
            softcap=self.softcap, sink=self.sink, dropout=self._dropout(), backend=self.backend,
        )  # fmt: skip

    def _dense(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, dropout: float = 0, **more: Any
    ) -> Tensor:
        return (self.attend or attention)(
            q, k, v, causal=self.causal, window=self.window, q_lengths=lengths, kv_lengths=lengths, scale=self.scale,
            softcap=self.softcap, sink=self.sink, dropout=dropout, backend=self.backend, **more,
        )  # fmt: skip

    def _cached(self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, layer: int) -> Tensor:
        if self.attend is not None:
            raise NotImplementedError(
                "Attention: a cache is given, and the sequence is sharded over ranks: remove that first"
            )
        if not self.causal:
            raise ValueError("Attention: a cache needs causal=True; earlier tokens would have to be computed again")
        cache.write(layer, k, v)
        if cache.first:  # the prompt sees itself alone
            return self._dense(q, k, v, cache.counts)
        q = q.to(cache.keys.dtype)  # a cache may have a dtype of its own
        if q.shape[2] <= _DECODE_TOKENS and cache.counts is None:
            return attention_decode(
                q, cache.keys[layer], cache.values[layer], cache._lengths, block_table=cache.block_table,
                window=self.window, scale=self.scale, softcap=self.softcap, sink=self.sink, backend=self.backend,
            )  # fmt: skip
        keys, values = cache.read(layer)
        return attention(
            q, keys, values, causal=True, window=self.window, q_lengths=cache.counts, kv_lengths=cache._lengths,
            scale=self.scale, softcap=self.softcap, sink=self.sink, backend=self.backend,
        )  # fmt: skip

    def _output(self, out: Tensor) -> Tensor:
        result: Tensor = self.out(out)
        return result

    def _dropout(self) -> float:
        return self.dropout if self.training else 0.0

    def extra_repr(self) -> str:
        shape = f"heads={self.heads}, key_heads={self.key_heads}, head_dim={self.head_dim}, causal={self.causal}"
        options = (("window", self.window), ("softcap", self.softcap), ("dropout", self.dropout or None))
        return ", ".join([shape, *(f"{name}={value}" for name, value in options if value is not None)])
