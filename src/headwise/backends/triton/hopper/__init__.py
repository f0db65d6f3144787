"""Attention kernels for Hopper GPUs (sm_90) in Triton Gluon."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from headwise.backends.triton.hopper.padding import covers_backward, covers_forward

if TYPE_CHECKING:
    from headwise.backends.triton.gpu import Gpu

__all__ = ["covers_backward", "covers_forward", "missing"]


def missing(gpu: Gpu) -> str | None:
    """What this GPU or this Triton lacks for these kernels; None if nothing."""
    major, minor = gpu.capability
    if gpu.hip:
        return "the Hopper kernels are for NVIDIA GPUs"
    if (major, minor) != (9, 0):
        return f"the Hopper kernels are for sm_90, and this GPU is sm_{major}{minor}"
    if importlib.util.find_spec("triton.experimental.gluon.nvidia.hopper") is None:
        return "the Hopper kernels need Triton 3.6 or newer (Gluon)"
    return None
