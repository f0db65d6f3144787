"""PyTorch's fused encoder layers, which `torch.nn` takes in evaluation: made of the operators that they fuse."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from headwise.backends.webgpu.array import OPERATORS

aten = torch.ops.aten

# What the entries of a mask are of, in PyTorch's numbers: (queries, keys), (batch, keys), or (batch, heads, queries, keys).
_OF_PAIRS, _OF_KEYS = 0, 1


def _hidden(mask: Any, mask_type: Any) -> Any:
    """True where a query does not see a key, as (batch, heads, queries, keys)."""
    mask = mask.to(torch.bool)
    if mask_type == _OF_KEYS:
        return mask[:, None, None]
    return mask[None, None] if mask_type == _OF_PAIRS or mask.dim() == 2 else mask


def _attention(
    query: Any, key: Any, value: Any, embed_dim: int, num_head: int, qkv_weight: Any, qkv_bias: Any, proj_weight: Any,
    proj_bias: Any, mask: Any = None, need_weights: bool = True, average_attn_weights: bool = True,
    mask_type: Any = None,
) -> Any:  # fmt: skip
    parts = zip((query, key, value), qkv_weight.chunk(3), qkv_bias.chunk(3), strict=True)
    q, k, v = (F.linear(x, w, b).unflatten(-1, (num_head, -1)).transpose(1, 2) for x, w, b in parts)
    hidden = None if mask is None else _hidden(mask, mask_type)
    if not need_weights:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=None if hidden is None else ~hidden)
        weights = None
    else:
        logits = (q / math.sqrt(q.shape[-1])) @ k.mT
        weights = (logits if hidden is None else logits.masked_fill(hidden, -math.inf)).softmax(-1)
        out = weights @ v
        weights = weights.mean(1) if average_attn_weights else weights
    return F.linear(out.transpose(1, 2).flatten(2), proj_weight, proj_bias), weights


def _encoder_layer(
    src: Any, embed_dim: int, num_heads: int, qkv_weight: Any, qkv_bias: Any, proj_weight: Any, proj_bias: Any,
    use_gelu: bool, norm_first: bool, eps: float, norm_weight_1: Any, norm_bias_1: Any, norm_weight_2: Any,
    norm_bias_2: Any, ffn_weight_1: Any, ffn_bias_1: Any, ffn_weight_2: Any, ffn_bias_2: Any, mask: Any = None,
    mask_type: Any = None,
) -> Any:  # fmt: skip
    if src.numel() == 0:
        return src.clone()

    def normed(x: Any, weight: Any, bias: Any, here: bool) -> Any:
        return F.layer_norm(x, (embed_dim,), weight, bias, eps) if here else x

    x = normed(src, norm_weight_1, norm_bias_1, norm_first)
    x, _ = _attention(
        x, x, x, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, mask, False, True, mask_type
    )
    x = before = normed(x + src, norm_weight_1, norm_bias_1, not norm_first)
    x = F.linear(normed(x, norm_weight_2, norm_bias_2, norm_first), ffn_weight_1, ffn_bias_1)
    x = F.linear(F.gelu(x) if use_gelu else F.relu(x), ffn_weight_2, ffn_bias_2)
    return normed(x + before, norm_weight_2, norm_bias_2, not norm_first)


OPERATORS |= {
    aten._native_multi_head_attention.default: _attention,
    aten._transformer_encoder_layer_fwd.default: _encoder_layer,
    # Nested tensors are not there: padded ones stay padded.
    aten._nested_tensor_from_mask_left_aligned.default: lambda t, mask: False,
}
