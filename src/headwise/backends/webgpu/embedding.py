"""Embedding on WebGPU: a gather, and a sum over sorted ids in a fixed order (`radix`, ``wgsl/embedding*.wgsl``).

If all ids, or four columns of their gradients, are more than a kernel may bind, they are summed in parts."""

from __future__ import annotations

from typing import Any

import torch

from headwise.backends.webgpu import copies, radix, rows
from headwise.backends.webgpu.device import Device
from headwise.backends.webgpu.shaders import DTYPES
from headwise.backends.webgpu.storage import Region

CHUNK = 32  # sorted ids that are summed one after the other
_NAN = {torch.float32: 0x7FC00000, torch.float16: 0x7E007E00, torch.bfloat16: 0x7FC07FC0}  # words


def embedding_forward(device: Device, args: Any) -> Region:
    ids, weight = args.ids, args.weight
    classes, width = weight.shape
    y = device.empty((*ids.shape, width), weight.dtype)
    count = ids.numel
    if y.numel == 0:
        return y
    if classes == 0:
        return copies.full(device, y.shape, float("nan"), weight.dtype)
    table = weight if weight.strides[1] == 1 or width == 1 else copies.copied(device, weight)
    flat_ids = copies.contiguous(device, ids).flat()
    flat = y.with_shape((count, width))
    words = _words_per_item(table)
    unit = 4 * words // table.itemsize or 1  # elements that the kernel counts as one
    kernel = device.kernel("embedding", ids=DTYPES[ids.dtype], width=words)
    table_pieces = rows.pieces(device, table)
    for place, places in rows.pieces(device, flat, flat_ids.with_shape((count, 1))):
        target = rows.part(flat, place, places)
        elements = places * width // unit
        items = elements if words else -(-elements // 2)
        if words:
            target = target.as_words()
        for first, here in table_pieces:
            piece = rows.part(table, first, here)
            parameters = (
                items, elements, width // unit, table.strides[0] // unit if classes > 1 else 0, classes, first, here,
                _NAN[weight.dtype],
            )  # fmt: skip
            device.run(
                kernel, -(-items // 256), parameters, ids=rows.part(flat_ids, place, places),
                weight=piece.as_words() if words else piece, y=target,
            )  # fmt: skip
    return y


def _words_per_item(table: Region) -> int:
    """Words that one thread moves: 4 or 1; 0 where rows are no whole words."""
    sizes = (table.shape[1], table.offset, table.strides[0] if table.shape[0] > 1 else 0)
    for words in (4, 1):
        if all(size * table.itemsize % (4 * words) == 0 for size in sizes):
            return words
    return 0


def embedding_backward(device: Device, args: Any) -> Region:
    grad, ids, num_embeddings, padding = args
    width = grad.shape[-1]
    padded = -(-width // 4) * 4
    count = ids.numel
    if count == 0 or num_embeddings * width == 0:
        return copies.full(device, (num_embeddings, width), 0.0, grad.dtype)
    g = rows.as_rows(device, grad)
    if not rows.are_aligned(g):
        g = copies.copied(device, g, padded)
    flat_ids = copies.contiguous(device, ids).flat()
    at_once = (device.capabilities.binding_bytes - 512) // max(ids.itemsize, 4 * g.itemsize)
    if count <= at_once:
        dweight = _gradient(device, flat_ids, g, num_embeddings, padding, g.dtype)
    else:
        dweight = _gradient_in_parts(device, flat_ids, g, num_embeddings, padding, at_once)
    if padded == width:
        return dweight
    result = device.empty((num_embeddings, width), grad.dtype)
    copies.copy_into(device, dweight.narrow(1, 0, width), result)
    return result


def _gradient(device: Device, ids: Region, g: Region, classes: int, padding: int, dtype: torch.dtype) -> Region:
    count, padded = g.shape
    dweight = copies.full(device, (classes, padded), 0.0, dtype)
    keys, places = radix.sorted_ids(device, ids, classes, padding)
    # A kernel reads any row of the gradient. If that is larger than a binding, bands of columns are copied. So they are if
    # the partials are larger, which those of a few very long rows may be.
    room = device.capabilities.binding_bytes - 512
    size = 0 if g.storage.size <= room + 512 else count * padded * g.itemsize
    size = max(size, 8 * padded * -(-count // CHUNK))
    band = max(4, padded // -(-size // room) // 4 * 4)
    for first in range(0, padded, band):
        columns = min(band, padded - first)
        part = g.narrow(1, first, columns)
        if columns < padded or (g.storage.size > room + 512 and g.strides[0] != padded):
            part = copies.copied(device, part)
        _sum(device, keys, places, part, dweight.narrow(1, first, columns))
    return dweight


def _gradient_in_parts(device: Device, ids: Region, g: Region, classes: int, padding: int, at_once: int) -> Region:
    """`_gradient` in parts of ``at_once`` ids; 16-bit results are rounded once, at the end."""
    total = None
    for first in range(0, g.shape[0], at_once):
        here = min(at_once, g.shape[0] - first)
        part = _gradient(device, ids.narrow(0, first, here), g.narrow(0, first, here), classes, padding, torch.float32)
        total = part if total is None else copies.added(device, total, part)
    assert total is not None
    if g.dtype == torch.float32:
        return total
    dweight = device.empty(total.shape, g.dtype)
    copies.round_rows(device, total, dweight)
    return dweight


def _sum(device: Device, keys: Region, places: Region, g: Region, dweight: Region) -> None:
    count, classes = keys.shape[0], dweight.shape[0]
    vectors = g.shape[1] // 4
    chunks = -(-count // CHUNK)
    lanes = min(256, max(8, 1 << (vectors - 1).bit_length()))
    partials = device.empty((chunks, 2, 4 * vectors), torch.float32)
    groups = -(-chunks // (256 // lanes)) * -(-vectors // lanes)
    for first, here in rows.pieces(device, dweight):
        piece = rows.part(dweight, first, here)
        parameters = (
            count, chunks, vectors, g.strides[0] // 4, dweight.strides[0] // 4, classes, first, here,
        )  # fmt: skip
        variant = {"dtype": DTYPES[g.dtype], "to": DTYPES[dweight.dtype], "chunk": CHUNK, "lanes": lanes}
        device.run(
            device.kernel("embedding_sum", step="chunks", **variant), groups, parameters, keys=keys, places=places, g=g,
            dweight=piece, partials=partials,
        )  # fmt: skip
        if chunks > 1:
            join = device.kernel("embedding_sum", step="join", **variant)
            device.run(join, groups, parameters, keys=keys, dweight=piece, partials=partials)
