"""The Triton backend: NVIDIA GPUs from sm_80 and AMD GPUs through ROCm."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from headwise.backends.triton import hopper, tile_sizes
from headwise.backends.triton.hopper import backward_coverage
from headwise.config import settings

if TYPE_CHECKING:
    from headwise.backends.registry import Call

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_WIDEST_HEAD = 512

# launcher -> module of this folder
LAUNCHERS = {
    "attention_forward": "attention_forward",
    "attention_output": "attention_forward",
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
    "rms_norm_output": "rms_norm",
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


def note(call: Call, arguments: Mapping[str, Any]) -> str | None:
    """Which kernels run an attention call on a GPU."""
    if call.op not in ("attention", "attention_varlen") or call.device != "cuda" or not torch.cuda.is_available():
        return None
    missing = hopper.missing(torch.cuda.current_device())
    said = f"forward: {_kernel(missing or _not_forward(call, arguments))}"
    if any(name.endswith("backward") for name in call.launchers):
        said += f"; backward: {_kernel(missing or _not_backward(call, arguments))}"
    return said


def _kernel(reason: str | None) -> str:
    return "the Hopper kernel" if reason is None else f"the plain kernel ({reason})"


def _not_forward(call: Call, arguments: Mapping[str, Any]) -> str | None:
    shapes, strides = hopper.as_dense(call.op == "attention_varlen", *(arguments[name] for name in "qkv"))
    masked = _given(arguments, "mask", "bias")
    return hopper.covers_forward(
        call.dtype, *shapes, strides, masked, arguments.get("max_seqlen_q"), _right(arguments), _cap(arguments)
    )


def _not_backward(call: Call, arguments: Mapping[str, Any]) -> str | None:
    packed = call.op == "attention_varlen"
    shapes, strides = hopper.as_dense(packed, *(arguments[name] for name in "qkv"))
    return backward_coverage.covers_backward(
        call.dtype, *shapes, strides, _given(arguments, "mask", "bias"), _given(arguments, "kv_lengths"),
        _given(arguments, "sink"), packed, _right(arguments), _cap(arguments),
    )  # fmt: skip


def _right(arguments: Mapping[str, Any]) -> int:
    right = 0 if arguments.get("causal") else (arguments.get("window") or (None, None))[1]
    return -1 if right is None else right


def _cap(arguments: Mapping[str, Any]) -> float:
    return arguments.get("softcap") or 0.0


def _given(arguments: Mapping[str, Any], *names: str) -> bool:
    return any(arguments.get(name) is not None for name in names)
