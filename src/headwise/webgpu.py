"""Tensors that stay on a GPU reached through WebGPU (Vulkan, Metal, DX12).

>>> x = headwise.webgpu.array(torch.randn(4, 1024))
>>> y = hw.softmax(hw.rms_norm(x, None))        # runs there; nothing is read back in between
>>> y.torch()                                   # a copy on the CPU; `await y.torch_async()` in a coroutine

CPU tensors with ``backend="webgpu"`` work as well: they are uploaded, and the results read back, at every call.
"""

from __future__ import annotations

from headwise.backends.webgpu.adapter import Capabilities, NoAdapter
from headwise.backends.webgpu.array import Array, array
from headwise.backends.webgpu.forks import ForkedProcess
from headwise.backends.webgpu.runtime import Counts, DeviceLost, counts, device
from headwise.backends.webgpu.storage import OutOfMemory

__all__ = [
    "Array", "Capabilities", "Counts", "DeviceLost", "ForkedProcess", "NoAdapter", "OutOfMemory", "array", "capabilities",
    "counts", "synchronize",
]  # fmt: skip


def capabilities() -> Capabilities:
    """The adapter in use and what it can do; opens it where it is not open yet."""
    return device().capabilities


def synchronize() -> None:
    """Wait until the GPU has done everything it was given."""
    device().synchronize()
