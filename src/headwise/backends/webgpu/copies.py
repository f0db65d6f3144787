"""Filling and copying memory: what launchers and arrays need before a kernel can run."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import torch

from headwise.backends.webgpu.runtime import Device
from headwise.backends.webgpu.storage import Region

_FORMATS = {torch.float32: "f", torch.float16: "e", torch.int32: "i"}
_MOST_DIMS = 5


def full(device: Device, shape: Sequence[int], value: float, dtype: torch.dtype) -> Region:
    """A new contiguous tensor of one value."""
    y = device.empty(tuple(shape), dtype)
    words = -(-y.numel * dtype.itemsize // 4)
    for start in range(0, words, most := device.capabilities.binding_bytes // 4 - 128):
        part = Region(y.storage, torch.int32, (min(most, words - start),), (1,), start)
        device.run(device.kernel("fill"), -(-part.numel // 256), (part.numel, _word(value, dtype)), y=part)
    return y


def _word(value: float, dtype: torch.dtype) -> int:
    """Four bytes that hold ``value`` as often as it fits."""
    if dtype == torch.bfloat16:
        bits = struct.pack("<f", value)[2:]
    elif dtype in _FORMATS:
        bits = struct.pack("<" + _FORMATS[dtype], value)
    elif value == 0:
        bits = b"\0"
    else:
        raise NotImplementedError(f"filling {dtype} with {value}")
    return int(struct.unpack("<I", bits * (4 // len(bits)))[0])


def contiguous(device: Device, x: Region) -> Region:
    """x itself where it is contiguous, else a contiguous copy."""
    return x if x.contiguous else copied(device, x)


def copied(device: Device, x: Region, columns: int | None = None) -> Region:
    """A contiguous copy, its last dim padded with zeros to ``columns``."""
    y = device.empty(x.shape if columns is None else (*x.shape[:-1], columns), x.dtype)
    copy_into(device, x, y)
    return y


def copy_into(device: Device, x: Region, y: Region) -> None:
    """Copy x into y, which is contiguous and of its shape but for the last dim: that is cut, or filled with zeros."""
    if len(x.shape) > _MOST_DIMS:
        raise NotImplementedError(f"copying a tensor of {len(x.shape)} dims; WebGPU kernels take up to {_MOST_DIMS}")
    missing = _MOST_DIMS - len(x.shape)
    x = x.with_shape((1,) * missing + x.shape, (0,) * missing + x.strides)
    y = y.with_shape((1,) * missing + y.shape)
    kernel = device.kernel("copy", bytes=x.itemsize)
    per_word = max(1, 4 // x.itemsize)
    for part, to in _pieces(device, x, y):
        words = -(-to.numel // per_word)
        device.run(kernel, -(-words // 256), (*to.shape[1:], x.shape[-1], *part.strides, to.numel), x=part, y=to)


def _pieces(device: Device, x: Region, y: Region) -> Iterator[tuple[Region, Region]]:
    """Both, divided along their outermost dim where one binding does not hold them."""
    limit = device.capabilities.binding_bytes - 512
    low, high = x.span()
    if y.numel == 0:
        return
    pieces = -(-max((high - low) * x.itemsize, y.numel * y.itemsize) // limit)
    if pieces == 1:
        yield x, y
        return
    dim = next(d for d, size in enumerate(x.shape) if size > 1)
    length = max(1, x.shape[dim] // (pieces + 1))
    if length >= 4:
        length = length // 4 * 4  # a piece of y begins at a whole word
    for start in range(0, x.shape[dim], length):
        count = min(length, x.shape[dim] - start)
        yield x.narrow(dim, start, count), y.narrow(dim, start, count)
