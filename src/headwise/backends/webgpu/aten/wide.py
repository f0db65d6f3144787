"""float64, as far as `torch.amp.GradScaler` needs it: casts from and to float32, and the reciprocal (``wgsl/wide.wgsl``)."""

from __future__ import annotations

from typing import Any

import torch

from headwise.backends.webgpu import copies
from headwise.backends.webgpu.array import OPERATORS
from headwise.backends.webgpu.aten import pointwise  # noqa: F401  whose reciprocal is told apart here
from headwise.backends.webgpu.device import Device
from headwise.backends.webgpu.recorder import replayed
from headwise.backends.webgpu.storage import Region

aten = torch.ops.aten


def cast(device: Device, x: Region, y: Region) -> bool:
    """y = x, where that is between float32 and float64."""
    order = sorted(range(len(y.shape)), key=lambda d: -y.strides[d] if y.shape[d] > 1 else 0)
    x, y = x.permuted(order), y.permuted(order)
    if {x.dtype, y.dtype} != {torch.float32, torch.float64} or not y.contiguous:
        return False
    _run(device, "narrowed" if y.dtype == torch.float32 else "widened", x, y)
    return True


def _run(device: Device, op: str, x: Region, y: Region) -> None:
    x = copies.contiguous(device, x)
    most = device.capabilities.binding_bytes // 8 - 64
    for first in range(0, y.numel, most):
        count = min(most, y.numel - first)
        parts = {name: of.flat().narrow(0, first, count) for name, of in (("x", x), ("y", y))}
        device.run(device.kernel("wide", op=op), -(-count // 256), (count,), **parts)


def _inverse(device: Device, x: Region) -> Region:
    y = device.empty(x.shape, torch.float64)
    _run(device, "inverse", x, y)
    return y


_reciprocal = OPERATORS[aten.reciprocal.default]


def _reciprocal_of_any(x: Any) -> Any:
    return replayed(_inverse, [x]) if x.dtype == torch.float64 else _reciprocal(x)


OPERATORS[aten.reciprocal.default] = _reciprocal_of_any
