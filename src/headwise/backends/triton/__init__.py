"""The Triton backend: NVIDIA GPUs from sm_80 and AMD GPUs through ROCm."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from headwise.backends.registry import Call

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# launcher -> module of this folder
LAUNCHERS: dict[str, str] = {}


def unavailable() -> str | None:
    if not LAUNCHERS:
        return "no Triton kernel is part of this version"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed: pip install 'headwise[triton]'"
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA or ROCm GPU"
    return None


def supports(call: Call) -> str | None:
    return None
