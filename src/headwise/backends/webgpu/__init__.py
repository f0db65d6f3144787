"""The WebGPU backend: every GPU with Vulkan, Metal or DX12."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from headwise.backends.registry import Call

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def unavailable() -> str | None:
    for package in ("wgpu", "jinja2", "numpy"):
        if importlib.util.find_spec(package) is None:
            return f"the package {package} is not installed: pip install 'headwise[webgpu]'"
    from headwise.backends.webgpu import adapter, runtime

    try:
        runtime.device()
    except adapter.NoAdapter as error:
        return str(error)
    except Exception as error:  # a driver that refuses, a setting that names what is not there: a reason, not a crash
        return f"its device could not be opened: {error}"
    return None


_WIDEST_KEY = 576


def supports(call: Call) -> str | None:
    if call.op.startswith("attention"):
        widest = max(call.sizes["D"], call.sizes.get("Dv", 0))
        gradient = any(name.endswith("backward") for name in call.launchers)
        limit = 256 if gradient and not call.op.startswith("attention_probs") else 512
        # Absorbed latent attention: keys are the values and a little more.
        latent = not gradient and call.sizes.get("Dv", limit + 1) <= limit and call.sizes["D"] <= _WIDEST_KEY
        if widest > limit and not latent:
            what = "gradients of heads" if limit == 256 else "heads"
            return f"its kernels compute {what} of at most {limit}, and this head dim is {widest}"
    return None
