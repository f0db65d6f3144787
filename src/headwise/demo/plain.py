"""The demo's model computed by plain PyTorch, from the same weights: what the losses and the speed are compared with.

PyTorch's attention has no packed batches: it gets a block-diagonal mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from headwise.demo.model import HEAD_DIM
from headwise.demo.packing import IGNORED, Batch, Packing
from headwise.nn import TransformerBlock, TransformerLM

_ROTARY_BASE = 10_000.0


@dataclass(frozen=True)
class Plain:
    name: str = "plain PyTorch"
    backend: str = "cpu"  # of the modules, none of which is called

    def loss(self, model: TransformerLM, batch: Batch) -> Tensor:
        return F.cross_entropy(logits(model, batch.ids, batch.packing), batch.targets, ignore_index=IGNORED)

    def finish_gradients(self, model: TransformerLM) -> None:
        pass


def logits(model: TransformerLM, ids: Tensor, packing: Packing) -> Tensor:
    """(T, 256), in the dtype of the weights."""
    table = model.embedding.weight
    x = F.embedding(ids, table) * model.config.embedding_scale
    rotation = tuple(table.to(x)[packing.positions] for table in rotation_tables(packing.longest))
    for block in model.blocks:
        assert isinstance(block, TransformerBlock)
        x = _layer(block, x, rotation, packing)
    return F.linear(_norm(x, model.norm.weight, model.config.norm_eps), table)


def _layer(block: TransformerBlock, x: Tensor, rotation: tuple[Tensor, ...], packing: Packing) -> Tensor:
    attention, mlp = block.attention, block.mlp
    assert attention.q_norm is not None
    assert attention.k_norm is not None
    eps = block.attention_norm.eps
    mixed = F.linear(_norm(x, block.attention_norm.weight, eps), attention.qkv.weight).unflatten(-1, (-1, HEAD_DIM))
    q, k, v = mixed.split((attention.heads, attention.key_heads, attention.key_heads), 1)
    q = rotate(_norm(q, attention.q_norm.weight, eps), rotation)
    k = rotate(_norm(k, attention.k_norm.weight, eps), rotation)
    mask = packing.mask(None if attention.window is None else attention.window[0] + 1)  # type: ignore[operator]
    q, k, v = (y.transpose(0, 1)[None] for y in (q, k, v))
    seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    x = x + F.linear(seen[0].transpose(0, 1).flatten(1), attention.out.weight)
    gate, up = F.linear(_norm(x, block.mlp_norm.weight, eps), mlp.gate_up.weight).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, mlp.down.weight)


def _norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    assert weight is not None
    return F.rms_norm(x, weight.shape, 1.0 + weight, eps)


def rotation_tables(count: int) -> tuple[Tensor, Tensor]:
    """cos and sin of the angles at each position, (count, 1, D/2), in float64, since positions grow; on the CPU, as not
    every GPU has it."""
    half = HEAD_DIM // 2
    steps = torch.arange(half, dtype=torch.float64) / half
    angles = torch.arange(count)[:, None, None] * torch.pow(_ROTARY_BASE, -steps)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotation: tuple[Tensor, ...]) -> Tensor:
    """Turn each pair (x[i], x[i + D/2]) of every head by its position's angle (RoFormer, Su et al. 2021)."""
    cos, sin = rotation
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
