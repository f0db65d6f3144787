"""Filling and copying memory: what launchers and arrays need before a kernel can run."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import torch

from headwise.backends.webgpu.runtime import Device
from headwise.backends.webgpu.shaders import DTYPES
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
        bits = struct.pack("<" + _FORMATS[dtype], int(value) if dtype == torch.int32 else value)
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


def added(device: Device, a: Region, b: Region) -> Region:
    """The sum of two contiguous tensors of one shape that begin at whole vectors."""
    y = device.empty(a.shape, a.dtype)
    kernel = device.kernel("add", dtype=DTYPES[a.dtype])
    most = (device.capabilities.binding_bytes - 512) // y.itemsize // 4 * 4
    for start in range(0, y.numel, most):
        count = min(most, y.numel - start)
        parts = [r.with_shape((y.numel,)).narrow(0, start, count) for r in (a, b, y)]
        vectors = -(-count // 4)
        device.run(kernel, -(-vectors // 256), (vectors,), a=parts[0], b=parts[1], y=parts[2])
    return y


def round_rows(device: Device, x: Region, y: Region) -> None:
    """Round x ``(rows, columns)``, float32, into y; the rows of both begin at whole vectors."""
    length, columns = x.shape[0], x.shape[1] // 4
    kernel = device.kernel("round_rows", dtype=DTYPES[y.dtype])
    most = max(
        1, (device.capabilities.binding_bytes - 512) // max(y.strides[0] * y.itemsize, x.strides[0] * x.itemsize)
    )
    for first in range(0, length, most):
        rows = min(most, length - first)
        parameters = (rows, columns, x.strides[0] // 4, y.strides[0] // 4)
        source, target = (r.narrow(0, first, rows) for r in (x, y))
        device.run(kernel, -(-rows * columns // 256), parameters, x=source, y=target)


def copy_flat(device: Device, x: Region, y: Region) -> None:
    """Copy contiguous x into contiguous y: sixteen bytes per thread, as fast as the GPU copies."""
    vectors = -(-x.numel * x.itemsize // 16)
    words = [Region(r.storage, torch.int32, (4 * vectors,), (1,), r.offset * r.itemsize // 4) for r in (x, y)]
    most = (device.capabilities.binding_bytes - 512) // 16
    for start in range(0, vectors, most):
        count = min(most, vectors - start)
        source, target = (r.narrow(0, 4 * start, 4 * count) for r in words)
        device.run(device.kernel("copy_flat"), -(-count // 256), (count,), x=source, y=target)


def copy_into(device: Device, x: Region, y: Region, part: bool = False) -> None:
    """Copy x into y, which is contiguous and of its shape but for the last dim: that is cut, or filled with zeros.

    ``part``: y is part of something larger, which may go on in the middle of a word.
    """
    if len(x.shape) > _MOST_DIMS:
        raise NotImplementedError(f"copying a tensor of {len(x.shape)} dims; WebGPU kernels take up to {_MOST_DIMS}")
    if not y.numel:
        return
    missing = _MOST_DIMS - len(x.shape)
    x = x.with_shape((1,) * missing + x.shape, (0,) * missing + x.strides)
    y = y.with_shape((1,) * missing + y.shape)
    per_word = max(1, 4 // x.itemsize)
    low, high = x.span()
    sizes = (*y.shape[1:], x.shape[-1], *x.strides)
    most = (device.capabilities.binding_bytes - 512) // x.itemsize
    if max(high - low, y.numel) <= most and not (part and y.numel % per_word):
        kernel = device.kernel("copy", bytes=x.itemsize, boxed=False)
        device.run(kernel, -(-y.numel // (256 * per_word)), (*sizes, y.numel), x=x, y=y)
        return
    kernel = device.kernel("copy", bytes=x.itemsize, boxed=True)
    for box in _boxes(x, y, most):
        seen, written = _span_of(x, box), _span_of(y, box)
        origin = (written[0] - y.offset) // per_word * per_word
        count = written[1] - y.offset - origin
        device.run(
            kernel,
            -(-count // (256 * per_word)),
            (*sizes, count, origin, seen[0] - x.offset, *box[0], *box[1]),
            x=Region(x.storage, x.dtype, (seen[1] - seen[0],), (1,), seen[0]),
            y=Region(y.storage, y.dtype, (count,), (1,), y.offset + origin),
        )


# The first coordinates, and those one past the last.
_Box = tuple[tuple[int, ...], tuple[int, ...]]


def _boxes(x: Region, y: Region, most: int) -> Iterator[_Box]:
    """All of y, divided so that what a box touches of either tensor is at most so many elements from end to end."""
    waiting: list[_Box] = [((0,) * _MOST_DIMS, y.shape)]
    while waiting:
        box = low, high = waiting.pop()
        large = next((r for r in (x, y) if (span := _span_of(r, box))[1] - span[0] > most), None)
        if large is None:
            yield box
            continue
        extents = [(h - n - 1) * stride for n, h, stride in zip(low, high, large.strides, strict=True)]
        dim = extents.index(max(extents))
        middle = (low[dim] + high[dim]) // 2
        waiting.append(((*low[:dim], middle, *low[dim + 1 :]), high))
        waiting.append((low, (*high[:dim], middle, *high[dim + 1 :])))


def _span_of(x: Region, box: _Box) -> tuple[int, int]:
    """First element and one past the last that a box touches, counted from the start of the storage."""
    first = last = x.offset
    for low, high, size, stride in zip(*box, x.shape, x.strides, strict=True):
        first += max(min(low, size - 1), 0) * stride  # columns beyond x are zeros, and not read
        last += max(min(high, size) - 1, 0) * stride
    return first, last + 1


def place(device: Device, x: Region, y: Region, dim: int, start: int, step: int = 1) -> None:
    """Copy x into the part ``y[…, start::step, …]`` of contiguous y along ``dim``; the rest of y stays."""
    x = contiguous(device, x)
    if x.numel == 0:
        return
    inner = 1
    for size in y.shape[dim + 1 :]:
        inner *= size
    per_word = max(1, 4 // y.itemsize)
    parameters = (y.shape[dim] * inner, inner, x.shape[dim], start, step, y.numel)
    device.run(
        device.kernel("place", bytes=y.itemsize), -(-y.numel // (256 * per_word)), parameters, x=x, y=y
    )  # fmt: skip
