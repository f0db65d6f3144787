"""What PyTorch does around the rows of cross entropy elsewhere, on arrays: ``wgsl/loss.wgsl``."""

from __future__ import annotations

import torch

from headwise.backends.webgpu import copies
from headwise.backends.webgpu.array import launcher
from headwise.backends.webgpu.runtime import Device
from headwise.backends.webgpu.shaders import DTYPES
from headwise.backends.webgpu.storage import Region


@launcher
def cross_entropy_reduce(device: Device, row_losses: Region, targets: Region, ignore_index: int, mean: bool) -> Region:
    """The sum of the losses (N,), or their mean over the rows whose target is not ignored."""
    return _launch(device, row_losses, targets, ignore_index, mean, gradient=False)


@launcher
def cross_entropy_row_grads(
    device: Device, grad: Region | None, targets: Region, ignore_index: int, mean: bool
) -> Region:
    """The gradient of every row's loss, (N,), from the gradient of the loss; None is 1."""
    count = targets.numel
    one = _launch(device, grad, targets, ignore_index, mean, gradient=True)
    return one.with_shape((count,), (0,))


def _launch(device: Device, x: Region | None, targets: Region, ignore_index: int, mean: bool, gradient: bool) -> Region:
    y = device.empty((), torch.float32)
    kernel = device.kernel("loss", targets=DTYPES[targets.dtype], mean=mean, gradient=gradient, given=x is not None)
    low, high = ignore_index & 0xFFFFFFFF, (ignore_index >> 32) & 0xFFFFFFFF
    flat = copies.contiguous(device, targets).with_shape((targets.numel,))
    inputs = {} if x is None else {"x": copies.contiguous(device, x)}
    device.run(kernel, 1, (targets.numel, low, high), targets=flat, y=y, **inputs)
    return y
