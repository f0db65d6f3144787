"""The Triton backend: NVIDIA GPUs from sm_80 and AMD GPUs through ROCm."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headwise import arguments
from headwise.backends.triton import hopper, tile_sizes
from headwise.backends.triton.gpu import ALIGNMENT, KNOWN, Gpu, facts
from headwise.config import settings

if TYPE_CHECKING:
    from headwise.backends.registry import Call

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ARCHITECTURES = tuple(KNOWN)  # that `explain` answers for without such a GPU

_WIDEST_HEAD = 512
_WIDEST_KEY = 576  # in decoding: of absorbed latent attention
_FLOAT32_KEYS = 106496  # bytes of shared memory that 16 such keys and their values take in float32 on an NVIDIA GPU
_HOPPER = {"attention_forward": hopper.covers_forward, "attention_backward": hopper.covers_backward}


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
    backward = any(name.endswith("backward") for name in call.launchers)
    latent = call.op == "attention_decode" and not backward and call.sizes["Dv"] <= _WIDEST_HEAD
    if widest > (_WIDEST_KEY if latent else _WIDEST_HEAD):
        what = "gradients of heads" if backward else "heads"
        return f"its kernels hold {what} of at most {_WIDEST_HEAD}, and this head dim is {widest}"
    if widest > _WIDEST_HEAD and call.dtype == torch.float32 and call.device == "cuda":
        gpu = _gpu(call)
        if not gpu.hip and gpu.shared_memory < _FLOAT32_KEYS:
            return f"keys of a head dim of {widest} in float32 do not fit the shared memory of this GPU ({gpu.arch})"
    if backward and not call.op.startswith("attention_probs") and call.device == "cuda":
        arch = _gpu(call).arch
        if not tile_sizes.covers("attention_backward_keys", 8 * call.dtype.itemsize, widest, arch):
            return (
                f"gradients of a head dim of {widest} in this dtype do not fit the shared memory of this GPU ({arch})"
            )
    return None


def note(call: Call, args: Any) -> str | None:
    """Which kernels run an attention call on a GPU, and which tensors begin where loads cannot be vectorised."""
    if call.device != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    tensors, names, _ = arguments.split(args)
    unaligned = [name for name, x in zip(names, tensors, strict=True) if x is not None and _is_unaligned(x)]
    missing, said = hopper.missing(_gpu(call)), []
    for launcher, covers in _HOPPER.items():
        if launcher in call.launchers:
            reason = missing or covers(getattr(args, "forward", args))
            if reason is None and (operands := [name for name in unaligned if name in ("q", "k", "v", "bias")]):
                reason = f"{operands[0]} does not begin at a multiple of {ALIGNMENT} bytes"
            kernel = "the Hopper kernel" if reason is None else f"the plain kernel ({reason})"
            said.append(f"{launcher.removeprefix('attention_')}: {kernel}")
    if unaligned:
        said.append(f"not at a multiple of {ALIGNMENT} bytes, so loads are not vectorised: {', '.join(unaligned)}")
    return "; ".join(said) or None


def _gpu(call: Call) -> Gpu:
    """The GPU of a call: the one at hand, unless the call names another."""
    known = facts(torch.cuda.current_device()) if call.arch is None else KNOWN[call.arch]
    return Gpu(known, tf32=False)


def _is_unaligned(x: Tensor) -> bool:
    return x.device.type != "meta" and x.data_ptr() % ALIGNMENT != 0
