"""The Triton backend: NVIDIA GPUs from sm_80 and AMD GPUs through ROCm."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch

from headwise.backends.triton import tile_sizes
from headwise.config import settings

if TYPE_CHECKING:
    from headwise.backends.registry import Call

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_WIDEST_HEAD = 512

# launcher -> module of this folder
LAUNCHERS = {
    "attention_forward": "attention_forward",
    "attention_backward": "attention_backward",
    "attention_varlen_forward": "attention_forward",
    "attention_varlen_backward": "attention_backward",
    "attention_decode": "decode",
    "attention_probs": "probs",
    "attention_probs_backward": "probs",
    "cross_entropy_forward": "cross_entropy",
    "cross_entropy_backward": "cross_entropy",
    "cross_entropy_forward_backward": "cross_entropy",
    "embedding_forward": "embedding",
    "embedding_backward": "embedding",
    "merge_attention": "merge",
    "merge_attention_backward": "merge",
    "rms_norm_forward": "rms_norm",
    "rms_norm_backward": "rms_norm",
    "softmax_forward": "softmax",
    "softmax_backward": "softmax",
    "transpose_forward": "transpose",
}


def unavailable() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed: pip install 'headwise[triton]'"
    if not settings.triton_interpret and not torch.cuda.is_available():
        return "PyTorch sees no CUDA or ROCm GPU"
    return None


def supports(call: Call) -> str | None:
    if not call.op.startswith("attention"):
        return None
    widest = max(call.sizes["D"], call.sizes.get("Dv", 0))
    if widest <= 256:
        return None
    if widest > _WIDEST_HEAD:
        return f"its kernels hold heads of at most {_WIDEST_HEAD}, and this head dim is {widest}"
    backward = any(name.endswith("backward") for name in call.launchers)
    if backward and not call.op.startswith("attention_probs") and call.device == "cuda":
        arch = tile_sizes.architecture(torch.device("cuda", torch.cuda.current_device()))
        if not tile_sizes.covers("attention_backward_keys", 8 * call.dtype.itemsize, widest, arch):
            return (
                f"gradients of a head dim of {widest} in this dtype do not fit the shared memory of this GPU ({arch})"
            )
    return None
