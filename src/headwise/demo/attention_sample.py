"""What the trained model looks at: queries, keys and attention probabilities of every head over a short text."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import headwise as hw
from headwise.demo.model import HEAD_DIM, Transformer, contract_window
from headwise.demo.packing import Packing
from headwise.demo.record import AttentionSample, LayerAttention
from headwise.demo.text import Text

LENGTH = 96


@torch.no_grad()
def attention_sample(model: Transformer, backend: str, text: bytes) -> AttentionSample:
    device = model.table.device
    packing = Packing.of([len(text)], device)
    scale = 1 / math.sqrt(HEAD_DIM)
    layers: list[LayerAttention] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        window = model.shape.window_of(layer)
        q_heads, k_heads = (x.transpose(0, 1)[None] for x in (q, k))  # (1, H, S, D)
        probs = hw.attention_probs(
            q_heads, k_heads, causal=True, window=contract_window(window), scale=scale, backend=backend
        )
        name = f"layer {layer + 1}, " + ("global" if window is None else f"window {window}")
        q_kept, k_kept, probs_kept = (x[0].float().cpu().contiguous() for x in (q_heads, k_heads, probs))
        layers.append(LayerAttention(name, window, scale, None, q_kept, k_kept, probs_kept))
        return model.ops.attention(q, k, v, packing, window)

    model.run(torch.tensor(list(text), device=device), packing.positions, attend)
    return AttentionSample(list(text), layers)


def passage(text: Text, length: int) -> bytes:
    """A piece of a real document, from the start of a line; of text that was not trained on where there is enough."""
    held_out = [d.held_out for d in text.documents]
    for candidates in (held_out, [d.training for d in text.documents]):
        source = max(candidates, key=len)
        if len(source) >= 2 * length:
            start = source.find(b"\n") + 1
            return source[start if start + length <= len(source) else 0 :][:length]
    return max((d.training for d in text.documents), key=len)[:length]
