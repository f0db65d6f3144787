"""A device of PyTorch on any GPU with Vulkan, Metal or DX12: importing this module makes ``torch.device("webgpu")`` work.

>>> import headwise.webgpu
>>> model = model.to("webgpu")                  # PyTorch's modules, optimizers and operators; docs/webgpu-device.md
>>> x = torch.randn(4, 1024, device="webgpu")   # or headwise.webgpu.array(x_on_the_cpu)
>>> y = hw.softmax(hw.rms_norm(x, None))        # runs there; nothing is read back in between
>>> y.cpu()                                     # a copy on the CPU; `await y.torch_async()` in a coroutine

CPU tensors with ``backend="webgpu"`` work as well: they are uploaded, and the results read back, at every call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from headwise.backends.webgpu import runtime
from headwise.backends.webgpu.adapter import Capabilities, NoAdapter
from headwise.backends.webgpu.array import OPERATORS, Array, array
from headwise.backends.webgpu.aten.rest import fallback, fallbacks
from headwise.backends.webgpu.capture import Capture
from headwise.backends.webgpu.capture_errors import CaptureError
from headwise.backends.webgpu.forks import ForkedProcess
from headwise.backends.webgpu.memory import memory_summary
from headwise.backends.webgpu.runtime import Counts, DeviceLost, counts, device
from headwise.backends.webgpu.storage import OutOfMemory
from headwise.backends.webgpu.torch_device import REGISTERED
from headwise.integrations import _sdpa_webgpu

__all__ = [
    "Array", "Capabilities", "Capture", "CaptureError", "Counts", "DeviceLost", "ForkedProcess", "NoAdapter", "OutOfMemory",
    "array", "capabilities", "capture", "counts", "fallback", "fallbacks", "memory_summary", "portable", "save_step",
    "synchronize",
]  # fmt: skip

_sdpa_webgpu.register(OPERATORS, REGISTERED)  # PyTorch's attention runs the fused kernels


def capabilities() -> Capabilities:
    """The adapter in use and what it can do; opens it where it is not open yet."""
    return device().capabilities


def synchronize() -> None:
    """Wait until the GPU has done everything it was given."""
    device().synchronize()


def capture(*inputs: torch.Tensor, **named: torch.Tensor) -> Capture:
    """Record the block that follows, a training or decoding step; calling what ``as`` gives replays it.

    inputs, named   tensors on webgpu that the block reads; a replay copies new elements of the same shape into them

    The block runs as it does without, and is the first step. A replay costs the host one submission and about a microsecond
    per kernel. It changes the same memory: weights, moments and caches go on from where they are, and what the block made
    (a loss, gradients) holds the results of the last replay. Random draws are new ones every time; all other numbers of
    Python's, and all its decisions, stay those of the block. Where that would be wrong, a `CaptureError` says so: elements
    that are read back, an optimizer that counts its steps on the CPU.

    >>> weight, x = torch.ones(3, device="webgpu"), torch.ones(3, device="webgpu")
    >>> with headwise.webgpu.capture(x=x) as step:
    ...     _ = weight.add_(x, alpha=0.5)
    >>> step(x=torch.tensor([1.0, 2.0, 4.0]))
    >>> weight.tolist()
    [2.0, 2.5, 3.5]
    """
    return Capture(*inputs, **named)


@contextmanager
def portable() -> Iterator[None]:
    """Within the block, kernels are those that every GPU and every browser with WebGPU can run: for `save_step`.

    It is a device of its own on the same GPU: make the model, its optimizer and the inputs within it. Tensors from outside
    do not work in it, nor its tensors outside.

    >>> with headwise.webgpu.portable():
    ...     capabilities().subgroup_size
    0
    """
    from headwise.web.tiers import TIERS

    with runtime.current(runtime.OpenDevice((device().gpu, TIERS[-1].capabilities))):
        yield


def save_step(
    step: Capture,
    path: Path | str,
    *,
    outputs: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write a captured step to one file: its WGSL, its dispatches, its memory. The browser page's ``step.js`` runs it.

    outputs   tensors that the step made, by the names that their reader asks for: {"loss": loss}
    state     tensors that it changes, to be read as well: model.state_dict()

    The file holds what is in weights, moments and other tensors now; a step that is run from it goes on from there. It needs
    a step captured within `portable`.

    >>> with headwise.webgpu.portable():
    ...     total, x = torch.zeros(3, device="webgpu"), torch.ones(3, device="webgpu")
    ...     with headwise.webgpu.capture(x=x) as step:
    ...         largest = total.add_(x).max()
    ...     outputs, state = {"largest": largest}, {"total": total}
    ...     headwise.webgpu.save_step(step, "sum.step", outputs=outputs, state=state)
    """
    from headwise.web import steps

    steps.save(step, Path(path), outputs, state or {})
