"""Softmax on WebGPU: ``wgsl/softmax.wgsl``."""

from __future__ import annotations

from typing import Any

from headwise.backends.webgpu import rows
from headwise.backends.webgpu.device import Device
from headwise.backends.webgpu.storage import Region


def softmax_forward(device: Device, args: Any, strict: bool = False) -> Region:
    """strict: a row of -inf gives NaN, as PyTorch's own operator does."""
    return _softmax(device, {"x": args.x}, rows.softmax_words(args.x.dtype), strict)


def softmax_backward(device: Device, args: Any) -> Region:
    return _softmax(device, {"p": args.probs, "g": args.grad}, rows.words(args.probs.dtype, 2))


def _softmax(device: Device, inputs: dict[str, Region], words: int, strict: bool = False) -> Region:
    first = next(iter(inputs.values()))
    y = device.empty(first.shape, first.dtype)
    if y.numel:
        matrices = {name: rows.as_rows(device, x) for name, x in inputs.items()}
        at = rows.layout(device, rows.tile(device, first.shape[-1], words), *matrices.values())
        result = {"y": y.with_shape((at.rows, at.width))}
        rows.RowKernel("softmax", at, {"backward": "g" in inputs, "strict": strict}, matrices, result, {}).run(device, ())
    return y
