"""A byte-level transformer in the manner of Gemma, over packed documents.

Grouped heads with normalised queries and keys, rotary positions that restart in every document, layers that look
through a sliding window in turn with layers that see the whole document, RMSNorm with a weight that starts at zero and is
added to one, SwiGLU, and one table of embeddings for the way in and the way out.

What Headwise has an op for goes through `Ops`, so that the very same model, weights and all, runs on plain PyTorch too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import headwise as hw
from headwise.demo.packing import IGNORED, Packing

BYTES = 256
HEAD_DIM = 32
_EPS = 1e-6
_ROTARY_BASE = 10_000.0

# attend(layer, q (T, Hq, D), k (T, Hk, D), v (T, Hk, D)) -> (T, Hq, D)
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Ops:
    """The four ops of a training step, by whoever computes them."""

    name: str
    embedding: Callable[[Tensor, Tensor], Tensor]  # ids, table
    rms_norm: Callable[[Tensor, Tensor], Tensor]  # x, weight; the gain is 1 + weight
    attention: Callable[[Tensor, Tensor, Tensor, Packing, int | None], Tensor]  # causal; packing, window
    cross_entropy: Callable[[Tensor, Tensor], Tensor]  # logits, targets: the mean over targets that are not IGNORED


def headwise_ops(backend: str) -> Ops:
    def attention(q: Tensor, k: Tensor, v: Tensor, packing: Packing, window: int | None) -> Tensor:
        out = hw.attention_varlen(
            q, k, v, packing.cu_seqlens, packing.cu_seqlens, packing.longest, packing.longest,
            causal=True, window=contract_window(window), deterministic=True, backend=backend,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out

    return Ops(
        name=f"Headwise ({backend})",
        embedding=lambda ids, table: hw.embedding(ids, table, backend=backend),
        rms_norm=lambda x, weight: hw.rms_norm(x, weight, _EPS, 1.0, backend=backend),
        attention=attention,
        cross_entropy=lambda logits, targets: hw.cross_entropy(logits, targets, IGNORED, backend=backend),
    )


def plain_ops() -> Ops:
    """PyTorch alone. Its attention knows no packed documents: it gets a block-diagonal mask."""

    def attention(q: Tensor, k: Tensor, v: Tensor, packing: Packing, window: int | None) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        mask = packing.mask(window)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1)

    return Ops(
        name="plain PyTorch",
        embedding=F.embedding,
        rms_norm=lambda x, weight: F.rms_norm(x, weight.shape, 1.0 + weight, _EPS),
        attention=attention,
        cross_entropy=lambda logits, targets: F.cross_entropy(logits, targets, ignore_index=IGNORED),
    )


def contract_window(window: int | None) -> tuple[int, int] | None:
    """A window of so many keys, the query's own included, as Headwise's ops take it: (left, right)."""
    return None if window is None else (window - 1, 0)


@dataclass(frozen=True)
class Shape:
    """What the weights' shapes and the meaning of the model follow from."""

    layers: int = 4
    width: int = 128
    window: int = 64  # keys that a query of a window layer sees, its own included

    def __post_init__(self) -> None:
        for name in ("layers", "width", "window"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it needs to be at least 1")
        if self.width % (2 * HEAD_DIM):
            raise ValueError(
                f"width is {self.width}; it needs to be a multiple of {2 * HEAD_DIM}: "
                f"heads of {HEAD_DIM}, two query heads for each key head"
            )

    @property
    def query_heads(self) -> int:
        return self.width // HEAD_DIM

    @property
    def key_heads(self) -> int:
        return self.query_heads // 2

    @property
    def hidden(self) -> int:
        return 3 * self.width

    def window_of(self, layer: int) -> int | None:
        """Window layers and global layers take turns; the first has a window."""
        return self.window if layer % 2 == 0 else None


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, kv = shape.width, shape.key_heads * HEAD_DIM
        self._split = (width, kv, kv)
        self.attention_norm = nn.Parameter(torch.zeros(width))
        self.qkv = nn.Parameter(torch.empty(width + 2 * kv, width))
        self.q_norm = nn.Parameter(torch.zeros(HEAD_DIM))
        self.k_norm = nn.Parameter(torch.zeros(HEAD_DIM))
        self.attention_out = nn.Parameter(torch.empty(width, width))
        self.mlp_norm = nn.Parameter(torch.zeros(width))
        self.gate_up = nn.Parameter(torch.empty(2 * shape.hidden, width))
        self.mlp_out = nn.Parameter(torch.empty(width, shape.hidden))

    def forward(
        self, x: Tensor, rotation: tuple[Tensor, Tensor], ops: Ops, attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        normed = ops.rms_norm(x, self.attention_norm)
        q, k, v = (y.unflatten(-1, (-1, HEAD_DIM)) for y in F.linear(normed, self.qkv).split(self._split, -1))
        q = rotate(ops.rms_norm(q, self.q_norm), rotation)
        k = rotate(ops.rms_norm(k, self.k_norm), rotation)
        x = x + F.linear(attend(q, k, v).flatten(1), self.attention_out)
        gate, up = F.linear(ops.rms_norm(x, self.mlp_norm), self.gate_up).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self.mlp_out)


class Transformer(nn.Module):
    """ids (T,) -> logits (T, 256). The same seed gives the same weights, whatever the ops and the device.

    seed: None leaves the matrices as they come, for weights to be loaded into.
    """

    def __init__(self, shape: Shape, ops: Ops, seed: int | None) -> None:
        super().__init__()
        self.shape, self.ops = shape, ops
        self.table = nn.Parameter(torch.empty(BYTES, shape.width))
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.final_norm = nn.Parameter(torch.zeros(shape.width))
        if seed is not None:
            self._initialise(seed)

    @torch.no_grad()
    def _initialise(self, seed: int) -> None:
        """Matrices that keep the size of what they are given; embeddings half that size, which makes the first logits
        small, and so the first loss nearly that of a guess, ln 256."""
        generator = torch.Generator().manual_seed(seed)
        self.table.normal_(0.0, 0.5 / math.sqrt(self.shape.width), generator=generator)
        for layer in self.layers:
            assert isinstance(layer, Layer)
            for matrix in (layer.qkv, layer.attention_out, layer.gate_up, layer.mlp_out):
                matrix.normal_(0.0, 1 / math.sqrt(matrix.shape[1]), generator=generator)

    def forward(self, ids: Tensor, packing: Packing) -> Tensor:
        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.ops.attention(q, k, v, packing, self.shape.window_of(layer))

        return self.run(ids, packing.positions, attend)

    def run(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The model around whatever computes its attention: packed documents, or a cache."""
        x = self.ops.embedding(ids, self.table) * math.sqrt(self.shape.width)
        rotation = rotation_at(positions, x.dtype)
        for index, layer in enumerate(self.layers):
            x = layer(x, rotation, self.ops, lambda q, k, v, index=index: attend(index, q, k, v))
        return F.linear(self.ops.rms_norm(x, self.final_norm), self.table)

    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters())


def rotation_at(positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of the angles at each position, (T, 1, D/2); computed in float64, since positions grow."""
    half = HEAD_DIM // 2
    steps = torch.arange(half, dtype=torch.float64, device=positions.device) / half
    angles = positions[:, None, None] * torch.pow(_ROTARY_BASE, -steps)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (x[i], x[i + D/2]) of every head by its position's angle (RoFormer, Su et al. 2021)."""
    cos, sin = rotation
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
