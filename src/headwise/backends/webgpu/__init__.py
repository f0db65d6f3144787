"""The WebGPU backend: every GPU with Vulkan, Metal or DX12."""

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
        return "no WebGPU kernel is part of this version"
    if importlib.util.find_spec("wgpu") is None:
        return "the package wgpu is not installed: pip install 'headwise[webgpu]'"
    return None


def supports(call: Call) -> str | None:
    return None
