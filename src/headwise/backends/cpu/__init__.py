"""The CPU backend: PyTorch's own CPU kernels, called block by block. Always available."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from headwise.backends.registry import Call

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def unavailable() -> str | None:
    return None


def supports(call: Call) -> str | None:
    return None
