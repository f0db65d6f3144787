"""Softmax on WebGPU: ``wgsl/softmax.wgsl``."""

from __future__ import annotations

from headwise.backends.webgpu import rows
from headwise.backends.webgpu.array import launcher
from headwise.backends.webgpu.runtime import Device
from headwise.backends.webgpu.storage import Region


@launcher
def softmax_forward(device: Device, x: Region) -> Region:
    return _softmax(device, {"x": x})


@launcher
def softmax_backward(device: Device, probs: Region, grad: Region) -> Region:
    return _softmax(device, {"p": probs, "g": grad})


def _softmax(device: Device, inputs: dict[str, Region]) -> Region:
    first = next(iter(inputs.values()))
    y = device.empty(first.shape, first.dtype)
    if y.numel == 0:
        return y
    matrices = {name: rows.as_rows(device, x) for name, x in inputs.items()}
    width = first.shape[-1]
    words = rows.words(first.dtype, 2) if len(inputs) == 2 else rows.softmax_words(first.dtype)
    tile = rows.tile(device, width, words)
    at = rows.layout(device, tile, *matrices.values())
    result = y.with_shape((at.rows, width))
    rows.run(device, "softmax", at, (), {"backward": len(inputs) == 2}, matrices, "y", result, {})
    return y
