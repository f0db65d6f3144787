"""Filling, copying and adding tensors, for launchers and arrays."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import torch

from headwise.backends.webgpu.device import Device
from headwise.backends.webgpu.shaders import DTYPES
from headwise.backends.webgpu.storage import Region

_FORMATS = {torch.float32: "f", torch.float16: "e", torch.int32: "i"}
_MOST_DIMS = 5  # of kernels that copy; neighbours among more are merged, or copied one by one


def full(device: Device, shape: Sequence[int], value: float, dtype: torch.dtype) -> Region:
    """A new contiguous tensor of one value."""
    y = device.empty(tuple(shape), dtype)
    fill(device, y, _word(value, dtype))
    return y


def fill(device: Device, y: Region, word: int) -> None:
    """Fill a whole tensor with a word of four bytes."""
    words = -(-y.numel * y.itemsize // 4)
    for start in range(0, words, most := device.capabilities.binding_bytes // 4 - 128):
        part = Region(y.storage, torch.int32, (min(most, words - start),), (1,), start)
        device.run(device.kernel("fill"), -(-part.numel // 256), (part.numel, word), y=part)


def _word(value: float, dtype: torch.dtype) -> int:
    """Four bytes filled with ``value``."""
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


def contiguous_vectors(device: Device, x: Region) -> Region:
    """The same, but also starting at a multiple of four elements."""
    return x if x.contiguous and x.offset % 4 == 0 else copied(device, x)


def copied(device: Device, x: Region, columns: int | None = None) -> Region:
    """A contiguous copy, its last dim padded with zeros to ``columns``."""
    y = device.empty((*x.shape[:-1], columns) if columns is not None else x.shape, x.dtype)
    if columns is None and len(x.shape) > _MOST_DIMS:
        copy_into(device, x, y)
    elif fits(device, x) and fits(device, y):
        _copy_dense(device, x, y)
    elif columns is None:
        copy_into(device, x, y)
    else:
        y = full(device, y.shape, 0.0, y.dtype)
        copy_into(device, x, y.narrow(len(y.shape) - 1, 0, x.shape[-1]), part=True)
    return y


def copy_into(device: Device, x: Region, y: Region, part: bool = False) -> None:
    """Copy x into y, of the same shape and any strides.

    part: y is part of a larger tensor, whose other elements stay; else nothing else is in its memory.
    """
    # In the memory order of y: with heads inside, y is contiguous after a permutation of its dims.
    order = sorted(range(len(y.shape)), key=lambda d: -y.strides[d])
    x, y = x.permuted(order), y.permuted(order)
    if len(y.shape) > _MOST_DIMS:
        shape, (x_strides, y_strides) = merged(y.shape, [x.strides, y.strides])
        x, y = x.with_shape(shape, x_strides), y.with_shape(shape, y_strides)
    if len(y.shape) > _MOST_DIMS:
        dim = min(range(len(y.shape)), key=lambda d: y.shape[d])
        for i in range(y.shape[dim]):
            copy_into(device, x.narrow(dim, i, 1), y.narrow(dim, i, 1), part=True)
        return
    per_word = max(1, 4 // y.itemsize)
    whole_words = not part or y.offset % per_word == y.numel % per_word == 0
    if y.contiguous and whole_words and fits(device, x) and fits(device, y):
        _copy_dense(device, x, y)
        return
    kernel = device.kernel("copy_strided", bytes=x.itemsize)
    for source, target in pieces(device, x.with_leading(_MOST_DIMS), y.with_leading(_MOST_DIMS)):
        parameters = (*source.shape[1:], source.numel, *source.strides, *target.strides)
        device.run(kernel, -(-source.numel // 256), parameters, x=source, y=target)


def _copy_dense(device: Device, x: Region, y: Region) -> None:
    """Copy into contiguous y; columns that x does not have become zeros."""
    x, y = x.with_leading(_MOST_DIMS), y.with_leading(_MOST_DIMS)
    per_word = max(1, 4 // x.itemsize)
    parameters = (*y.shape[1:], x.shape[-1], *x.strides, y.numel)
    device.run(device.kernel("copy", bytes=x.itemsize), -(-y.numel // (256 * per_word)), parameters, x=x, y=y)


def merged(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """The same elements in fewer dims: neighbours that all tensors step through evenly become one."""
    sizes: list[int] = []
    steps: list[list[int]] = [[] for _ in strides]
    for dim, size in enumerate(shape):
        if size == 1:
            continue
        here = [s[dim] for s in strides]
        if sizes and all(of[-1] == s * size for of, s in zip(steps, here, strict=True)):
            sizes[-1] *= size
            for of, s in zip(steps, here, strict=True):
                of[-1] = s
        else:
            sizes.append(size)
            for of, s in zip(steps, here, strict=True):
                of.append(s)
    if not sizes:
        return (1,), [(0,) for _ in strides]
    return tuple(sizes), [tuple(of) for of in steps]


def fits(device: Device, x: Region) -> bool:
    """Can a kernel bind all of it?"""
    most = device.capabilities.binding_bytes
    return x.storage.size <= most or x.span_bytes() <= most - 512


def pieces(device: Device, *regions: Region, dims: int = _MOST_DIMS) -> Iterator[tuple[Region, ...]]:
    """The regions, whose first ``dims`` dims agree, halved until each can be bound.

    The outermost dim with more than one entry is halved, so that parts of a contiguous tensor are contiguous.
    """
    dim = next((d for d, size in enumerate(regions[0].shape[:dims]) if size > 1), None)
    if dim is None or all(fits(device, x) for x in regions):
        yield regions  # if one row is still too large, `Device.run` raises
        return
    size = regions[0].shape[dim]
    for first, count in ((0, size // 2), (size // 2, size - size // 2)):
        yield from pieces(device, *(x.narrow(dim, first, count) for x in regions), dims=dims)


def added(device: Device, a: Region, b: Region) -> Region:
    """The sum of two tensors of one shape."""
    a, b = contiguous_vectors(device, a), contiguous_vectors(device, b)
    y = device.empty(a.shape, a.dtype)
    kernel = device.kernel("add", dtype=DTYPES[a.dtype])
    most = (device.capabilities.binding_bytes - 512) // y.itemsize // 4 * 4
    for start in range(0, y.numel, most):
        count = min(most, y.numel - start)
        parts = [x.flat().narrow(0, start, count) for x in (a, b, y)]
        vectors = -(-count // 4)
        device.run(kernel, -(-vectors // 256), (vectors,), a=parts[0], b=parts[1], y=parts[2])
    return y


def round_rows(device: Device, x: Region, y: Region) -> None:
    """Round x ``(rows, columns)``, float32, into y; the rows of both are aligned."""
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
