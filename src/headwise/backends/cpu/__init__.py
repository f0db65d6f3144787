"""The CPU backend: PyTorch's own CPU kernels, called block by block. Always available."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from headwise.backends.registry import Call

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

# launcher -> module of this folder
LAUNCHERS = {
    "attention_forward": "attention",
    "attention_backward": "attention",
    "attention_varlen_forward": "attention",
    "attention_varlen_backward": "attention",
    "attention_decode": "decode",
    "attention_probs": "probs",
    "attention_probs_backward": "probs",
    "merge_attention": "merge",
    "merge_attention_backward": "merge",
    "cross_entropy_forward": "cross_entropy",
    "cross_entropy_backward": "cross_entropy",
    "cross_entropy_forward_backward": "cross_entropy",
    "embedding_forward": "embedding",
    "embedding_backward": "embedding",
    "rms_norm_forward": "rms_norm",
    "rms_norm_backward": "rms_norm",
    "transpose_forward": "transpose",
    "softmax_forward": "softmax",
    "softmax_backward": "softmax",
}


def unavailable() -> str | None:
    return None


def supports(call: Call) -> str | None:
    return None
