"""A decoder-only transformer out of the modules, for training on packed documents and generation with a cache.

Pre-norm blocks with RMSNorm, grouped heads, rotary positions and a gated feed-forward half, as in Llama; options give the
windows, normalised queries and keys, soft caps, sinks and tied embeddings of Gemma, Mistral, Qwen 3 and gpt-oss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwise.nn.attention import Attention
from headwise.nn.cache import KVCache, PagedKVCache
from headwise.nn.embedding import Embedding
from headwise.nn.glu import GatedMLP
from headwise.nn.losses import LinearCrossEntropyLoss
from headwise.nn.norms import RMSNorm
from headwise.nn.rotary import RotaryEmbedding, Scaling


def sliding_window(tokens: int | None) -> tuple[int, int] | None:
    """A window in keys, the query's own included, as `headwise.attention` takes it."""
    if tokens is not None and tokens < 1:
        raise ValueError(f"a window is {tokens}; it needs at least 1 key, the query's own, or None")
    return None if tokens is None else (tokens - 1, 0)


@dataclass(frozen=True)
class TransformerConfig:
    """What defines the weights and the computation of a `TransformerLM`.

    >>> nn.TransformerConfig(vocabulary=1000, dim=64, layers=2, heads=4, windows=(32, None)).head_width
    16
    """

    vocabulary: int
    dim: int
    layers: int
    heads: int
    key_heads: int | None = None
    head_dim: int | None = None
    hidden: int | None = None  # of the feed-forward half; None: 8/3 of dim, rounded up to a multiple of 64
    activation: str = "silu"
    windows: tuple[int | None, ...] = (None,)  # keys that a query sees, its own included; layers take them in turn
    softcap: float | None = None  # of the attention logits
    logit_softcap: float | None = None  # of the model's output
    sink: bool = False
    qk_norm: bool = False
    norm_eps: float = 1e-6
    norm_offset: float = 0.0  # 1.0: the gain is 1 + weight, as in Gemma
    positions: int = 8192
    rotary_base: float = 10_000.0
    rotary_scaling: Scaling | None = None
    tied: bool = True  # the table of embeddings is the head as well
    embedding_scale: float = 1.0
    dropout: float = 0.0  # of the attention probabilities
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        if not self.windows:
            raise ValueError("TransformerConfig: windows is empty; it needs one entry at least, (None,) for no window")
        for window in self.windows:
            sliding_window(window)
        if self.head_dim is None and self.dim % self.heads:
            raise ValueError(
                f"TransformerConfig: dim is {self.dim}; it needs a multiple of heads ({self.heads}), or give head_dim"
            )

    @property
    def head_width(self) -> int:
        return self.dim // self.heads if self.head_dim is None else self.head_dim

    @property
    def hidden_width(self) -> int:
        return -(-8 * self.dim // 3 // 64) * 64 if self.hidden is None else self.hidden

    def window_of(self, layer: int) -> tuple[int, int] | None:
        """As `headwise.attention` takes it."""
        return sliding_window(self.windows[layer % len(self.windows)])


class TransformerBlock(nn.Module):
    """One layer. It takes and gives ``(x, residual)``: their sum is the stream, added inside the next norm's kernel.

    >>> block = nn.TransformerBlock(nn.TransformerConfig(1000, 64, 2, 4), layer=0)
    >>> x, residual = block(torch.randn(2, 10, 64))
    """

    def __init__(
        self, config: TransformerConfig, layer: int = 0, rotary: RotaryEmbedding | None = None,
        backend: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        c = config
        self.layer = layer
        self.attention_norm = RMSNorm(c.dim, c.norm_eps, c.norm_offset, backend=backend)
        self.attention = Attention(
            c.dim, c.heads, c.key_heads, c.head_width, window=c.window_of(layer), softcap=c.softcap, sink=c.sink,
            qk_norm=c.qk_norm, norm_eps=c.norm_eps, norm_offset=c.norm_offset, rotary=rotary, dropout=c.dropout,
            backend=backend,
        )  # fmt: skip
        self.mlp_norm = RMSNorm(c.dim, c.norm_eps, c.norm_offset, backend=backend)
        self.mlp = GatedMLP(c.dim, c.hidden_width, c.activation, backend=backend)

    def forward(self, x: Tensor, residual: Tensor | None = None, **how: Any) -> tuple[Tensor, Tensor]:
        """how: the keywords of `Attention.forward`."""
        if residual is None:
            normed, residual = self.attention_norm(x), x
        else:
            normed, residual = self.attention_norm(x, residual)
        x = self.attention(normed, layer=self.layer, **how)
        normed, residual = self.mlp_norm(x, residual)
        return self.mlp(normed), residual


class TransformerLM(nn.Module):
    """ids ``(B, S)``, or packed ``(T,)`` with ``packing=``, to logits, or with targets to the loss.

    The loss never builds the logits. ``how`` is what `Attention.forward` takes: positions, packing, lengths, cache.

    >>> config = nn.TransformerConfig(vocabulary=1000, dim=64, layers=1, heads=4, positions=128)
    >>> model = nn.TransformerLM(config)
    >>> ids = torch.randint(1000, (2, 17))
    >>> model(ids[:, :-1], ids[:, 1:]).shape  # given targets: the loss, without the logits
    torch.Size([])
    """

    def __init__(self, config: TransformerConfig, *, backend: str | None = None) -> None:
        super().__init__()
        self.config, self.backend = config, backend
        self.embedding = Embedding(config.vocabulary, config.dim, backend=backend)
        rotary = RotaryEmbedding(
            config.head_width, config.positions, config.rotary_base, scaling=config.rotary_scaling, backend=backend
        )
        self.blocks = nn.ModuleList(TransformerBlock(config, layer, rotary, backend) for layer in range(config.layers))
        self.norm = RMSNorm(config.dim, config.norm_eps, config.norm_offset, backend=backend)
        self.head = None if config.tied else nn.Linear(config.dim, config.vocabulary, bias=False)
        self.loss = LinearCrossEntropyLoss(softcap=config.logit_softcap, z_loss=config.z_loss, backend=backend)
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Matrices keep the scale of their input; the table of embeddings has half of that, so that the first logits are
        small and the first loss is close to that of a uniform guess. Norms and sinks start anew, too."""
        for module in self.modules():
            if isinstance(module, RMSNorm):
                module.reset_parameters()
            elif isinstance(module, Attention) and module.sink is not None:
                nn.init.zeros_(module.sink)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, 0.0, 1 / math.sqrt(parameter.shape[1]), generator=generator)
        with torch.no_grad():
            self.embedding.weight.mul_(0.5)

    def hidden(self, ids: Tensor, **how: Any) -> Tensor:
        """What the head gets, ``(…, dim)``."""
        x, residual = self.embedding(ids), None
        if self.config.embedding_scale != 1.0:
            x = x * self.config.embedding_scale
        for block in self.blocks:
            x, residual = block(x, residual, **how)
        normed: Tensor = self.norm(x) if residual is None else self.norm(x, residual)[0]
        return normed

    def forward(self, ids: Tensor, targets: Tensor | None = None, **how: Any) -> Tensor:
        weight = self.embedding.weight if self.head is None else self.head.weight
        hidden = self.hidden(ids, **how)
        if targets is not None:
            loss: Tensor = self.loss(hidden, weight, targets)
            return loss
        logits, cap = F.linear(hidden, weight), self.config.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def cache(self, batch: int, capacity: int, *, page_size: int | None = None) -> KVCache:
        """An empty cache for ``batch`` sequences of up to ``capacity`` tokens; in pages if ``page_size`` is given."""
        c, weight = self.config, self.embedding.weight
        if capacity > c.positions:
            raise ValueError(f"cache: capacity is {capacity}; the model has {c.positions} positions")
        heads = c.heads if c.key_heads is None else c.key_heads
        if page_size is None:
            return KVCache(c.layers, batch, heads, capacity, c.head_width, device=weight.device, dtype=weight.dtype)
        pages = -(-capacity // page_size)
        return PagedKVCache(
            c.layers, batch, heads, batch * pages, c.head_width, page_size=page_size, max_pages=pages,
            device=weight.device, dtype=weight.dtype,
        )  # fmt: skip

    @torch.no_grad()
    def generate(
        self, ids: Tensor, count: int, *, temperature: float = 0.0, lengths: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:  # fmt: skip
        """The ``count`` tokens ``(B, count)`` after the prompts ids ``(B, S)``; temperature 0 takes the likeliest.

        lengths: ``(B,)`` ints, of prompts that are padded on the right. Dropout is off, whatever the mode.
        """
        self._check_prompts(ids, count, temperature, lengths)
        cache = self.cache(ids.shape[0], max(ids.shape[1], ids.shape[1] + count - 1))  # the last token is not fed
        cache.extend(ids.shape[1], lengths)
        logits = self(ids, cache=cache)
        if lengths is None:
            logits = logits[:, -1]
        else:
            logits = logits[torch.arange(ids.shape[0], device=ids.device), lengths.to(ids.device, torch.int64) - 1]
        made = []
        for step in range(count):
            if temperature == 0.0:
                made.append(logits.argmax(-1))
            else:
                chances = torch.softmax(logits.float() / temperature, -1)
                made.append(torch.multinomial(chances, 1, generator=generator)[:, 0])
            if step + 1 < count:
                cache.extend(1)
                logits = self(made[-1][:, None], cache=cache)[:, -1]
        return torch.stack(made, 1) if made else ids.new_empty((ids.shape[0], 0))

    def _check_prompts(self, ids: Tensor, count: int, temperature: float, lengths: Tensor | None) -> None:
        if ids.dim() != 2 or ids.shape[1] == 0:
            raise ValueError(f"generate: ids has shape {tuple(ids.shape)}; it needs (B, S) with one token at least")
        if count < 0 or temperature < 0:
            raise ValueError(f"generate: count is {count} and temperature {temperature}; both need at least 0")
        if ids.shape[1] + count - 1 > self.config.positions:
            raise ValueError(
                f"generate: {ids.shape[1]} tokens and {count} more; the model has {self.config.positions} positions"
            )
        if lengths is None:
            return
        if not isinstance(lengths, Tensor) or tuple(lengths.shape) != (ids.shape[0],) or lengths.is_floating_point():
            raise ValueError(f"generate: lengths is {lengths}; it needs a tensor of {ids.shape[0]} whole numbers")
        if not bool(((lengths >= 1) & (lengths <= ids.shape[1])).all()):  # read once, before the first step
            raise ValueError(f"generate: lengths is {lengths.tolist()}; each needs to be from 1 to {ids.shape[1]}")
