"""Transpose on WebGPU: ``wgsl/transpose.wgsl``. Elements are plain bits of 1, 2, 4 or 8 bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headwise.backends.webgpu import copies, rows
from headwise.backends.webgpu.device import Device
from headwise.backends.webgpu.storage import Region

ACROSS = 8  # of 32 threads, those side by side in a row: they read 8 vectors in a row, and write 32 / 8

_BLOCKS = 16  # on a side of a tile
_TILE = 32  # elements on a side of a tile where there are no blocks
_STEP = 256  # elements: cuts of a matrix are at multiples of this, which are whole tiles and words


def transpose_forward(device: Device, args: Any) -> Region:
    x = args.x
    count, width = x.shape[-2:]
    shape = (*x.shape[:-2], width, count)
    if x.numel == 0:
        return device.empty(shape, x.dtype)
    if x.strides[-2] == 1 and x.strides[-1] != 1:  # the memory already is the transpose
        return copies.copied(device, x.with_shape(shape, (*x.strides[:-2], x.strides[-1], 1)))
    matrices = _matrices(device, x)
    per_word = max(1, 4 // x.itemsize)
    padded = -(-count // per_word) * per_word
    y = device.empty((matrices.shape[0], width, padded), x.dtype)
    _turn(device, matrices, y)
    if padded == count:
        return y.with_shape(shape)
    result = device.empty(shape, x.dtype)
    copies.copy_into(device, y.narrow(2, 0, count), result.with_shape((matrices.shape[0], width, count)))
    return result


def _matrices(device: Device, x: Region) -> Region:
    """x as ``(batch, rows, columns)``."""
    if len(x.shape) == 3:
        return x
    batch = x.numel // (x.shape[-2] * x.shape[-1])
    leading, strides = rows.merged(Region(x.storage, x.dtype, x.shape[:-2], x.strides[:-2]))
    if len(leading) > 1:
        x = copies.contiguous(device, x)
        strides = (x.shape[-2] * x.shape[-1],)
    return x.with_shape((batch, *x.shape[-2:]), (strides[0], *x.strides[-2:]))


def _turn(device: Device, x: Region, y: Region) -> None:
    """Transpose x into y ``(batch, columns, rows)``, whose rows are padded to whole words."""
    element = x.itemsize
    blocks = _in_blocks(x)
    kernel = device.kernel("transpose", bytes=element, blocks=blocks, across=ACROSS)
    side = _BLOCKS * 16 // element if blocks else _TILE
    per_word = max(1, 4 // element)
    for source, target in _pieces(device, x, y):
        batch, count, width = source.shape
        x_strides, y_strides = source.broadcast_strides, target.broadcast_strides
        row_tiles, column_tiles = -(-count // side), -(-width // side)
        tiles = batch * row_tiles * column_tiles
        sizes = (count, width, row_tiles, column_tiles, tiles)
        if blocks:
            vector = 16 // element
            strides = tuple(s // vector for s in (*x_strides[:2], *y_strides[:2]))
            source, target = source.as_words(), target.as_words()
        else:
            strides = (*x_strides, y_strides[0] // per_word, y_strides[1] // per_word)
        device.run(kernel, tiles, (*sizes, *strides), x=source, y=target)


def _in_blocks(x: Region) -> bool:
    """Are the rows of x, and those of its transpose, whole vectors that begin at whole vectors?"""
    vector = 16 // x.itemsize
    _, count, width = x.shape
    numbers = (count, width, x.offset, *x.broadcast_strides[:2])
    return x.strides[2] == 1 and not any(n % vector for n in numbers)


def _pieces(device: Device, x: Region, y: Region) -> Iterator[tuple[Region, Region]]:
    """x and y, cut into fewer matrices or into blocks of a matrix if they are larger than a binding."""
    most = device.capabilities.binding_bytes
    if x.storage.size <= most and y.storage.size <= most:
        yield x, y
        return
    room = (most - 512) // x.itemsize
    batch, count, width = x.shape
    one = max((count - 1) * x.strides[1] + (width - 1) * x.strides[2] + 1, y.strides[0])
    if one <= room:
        step = min((room - one) // stride + 1 if stride else batch for stride in (x.strides[0], y.strides[0]))
        step = step // 4 * 4 or step
        for b in range(0, batch, step):
            length = min(step, batch - b)
            yield x.narrow(0, b, length), y.narrow(0, b, length)
        return
    down = _cut(room - (width - 1) * x.strides[2], x.strides[1])
    across = _cut(room, y.strides[1])
    for b in range(batch):
        for first in range(0, count, down):
            length = min(down, count - first)
            strip = x.narrow(0, b, 1).narrow(1, first, length)
            for left in range(0, width, across):
                wide = min(across, width - left)
                yield strip.narrow(2, left, wide), y.narrow(0, b, 1).narrow(1, left, wide).narrow(2, first, length)


def _cut(room: int, stride: int) -> int:
    """Rows that fit ``room`` elements, rounded down to whole steps."""
    held = max(1, room // max(1, stride))
    return held // _STEP * _STEP or max(1, held // 16 * 16 or held // 4 * 4)
