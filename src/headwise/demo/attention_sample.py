"""What the trained model looks at: queries, keys and attention probabilities of every head over a short text."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import headwise as hw
from headwise.demo.model import HEAD_DIM, Shape
from headwise.demo.packing import Packing
from headwise.demo.record import AttentionSample, LayerAttention
from headwise.demo.text import Text
from headwise.nn import Attention, TransformerLM

LENGTH = 96


@torch.no_grad()
def attention_sample(model: TransformerLM, shape: Shape, text: bytes) -> AttentionSample:
    device = model.embedding.weight.device
    packing = Packing.of([len(text)], device)
    scale = 1 / math.sqrt(HEAD_DIM)
    layers: list[LayerAttention] = []

    def look(attention: Attention, arguments: tuple[Tensor], how: dict[str, Any]) -> None:
        layer = how["layer"]
        q, k, _ = attention.project(arguments[0], packing.positions, packed=True)
        q_heads, k_heads = (x.transpose(0, 1)[None] for x in (q, k))  # (1, H, S, D)
        probs = hw.attention_probs(
            q_heads, k_heads, causal=True, window=attention.window, scale=scale, backend=model.backend
        )
        window = shape.window_of(layer)
        name = f"layer {layer + 1}, " + ("global" if window is None else f"window {window}")
        q_kept, k_kept, probs_kept = (x[0].float().cpu().contiguous() for x in (q_heads, k_heads, probs))
        layers.append(LayerAttention(name, window, scale, None, q_kept, k_kept, probs_kept))

    modules = [module for module in model.modules() if isinstance(module, Attention)]
    hooks = [module.register_forward_pre_hook(look, with_kwargs=True) for module in modules]
    try:
        model(torch.tensor(list(text), device=device), packing=packing)
    finally:
        for hook in hooks:
            hook.remove()
    return AttentionSample(list(text), layers)


def passage(text: Text, length: int) -> bytes:
    """A piece of a real document, from the start of a line; from held-out text if there is enough."""
    held_out = [d.held_out for d in text.documents]
    for candidates in (held_out, [d.training for d in text.documents]):
        source = max(candidates, key=len)
        if len(source) >= 2 * length:
            start = source.find(b"\n") + 1
            return source[start if start + length <= len(source) else 0 :][:length]
    return max((d.training for d in text.documents), key=len)[:length]
