"""A device of PyTorch on any GPU with Vulkan, Metal or DX12: importing this module makes ``torch.device("webgpu")`` work.

>>> import headwise.webgpu
>>> model = model.to("webgpu")                  # PyTorch's modules, optimizers and operators; docs/webgpu-device.md
>>> x = torch.randn(4, 1024, device="webgpu")   # or headwise.webgpu.array(x_on_the_cpu)
>>> y = hw.softmax(hw.rms_norm(x, None))        # runs there; nothing is read back in between
>>> y.cpu()                                     # a copy on the CPU; `await y.torch_async()` in a coroutine

CPU tensors with ``backend="webgpu"`` work as well: they are uploaded, and the results read back, at every call.
"""

from __future__ import annotations

from headwise.backends.webgpu.adapter import Capabilities, NoAdapter
from headwise.backends.webgpu.array import Array, array
from headwise.backends.webgpu.aten.rest import fallback, fallbacks
from headwise.backends.webgpu.forks import ForkedProcess
from headwise.backends.webgpu.memory import memory_summary
from headwise.backends.webgpu.runtime import Counts, DeviceLost, counts, device
from headwise.backends.webgpu.storage import OutOfMemory
from headwise.integrations import _sdpa_webgpu  # noqa: F401  gives PyTorch's attention the fused kernels

__all__ = [
    "Array", "Capabilities", "Counts", "DeviceLost", "ForkedProcess", "NoAdapter", "OutOfMemory", "array", "capabilities",
    "counts", "fallback", "fallbacks", "memory_summary", "synchronize",
]  # fmt: skip


def capabilities() -> Capabilities:
    """The adapter in use and what it can do; opens it where it is not open yet."""
    return device().capabilities


def synchronize() -> None:
    """Wait until the GPU has done everything it was given."""
    device().synchronize()
