"""Embedding in Triton: a gather, and for the gradient a segmented sum over sorted ids in a fixed order.

Backward: ids are sorted (stably) and cut into chunks of equal length. A program goes through a chunk and sums the rows of
each id in it. The sum of an id that lies inside one chunk is final; an id that crosses chunks leaves a partial sum in each,
and a second kernel adds these in order. So one id repeated a million times is as parallel as a million ids.

At most 1024 ids are not sorted: sorting costs the host more than all the rest. The program of the first place of an id
looks for the others, and sums their rows chunk by chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwise.backends.triton.blocks import power_of_two
from headwise.backends.triton.row_tiling import as_rows

if TYPE_CHECKING:
    from headwise.backends.triton.gpu import Gpu
    from headwise.ops.embedding import Embedding, EmbeddingBackward

_CHUNK = 32
_FEW = 1024


@triton.jit(do_not_specialize=["classes"])
def _gather(ids, weight, y, classes, width, weight_stride, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    row = tl.load(ids + place).to(tl.int64)
    known = (row >= 0) & (row < classes)
    values = tl.load(weight + row * weight_stride + column, mask=inside & known, other=float("nan"))
    tl.store(y + place * width + column, values, mask=inside)


@triton.jit(do_not_specialize=["count", "classes", "padding"])
def _sum_few(
    ids, grad, dweight, count, classes, padding, width, grad_stride, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    IDS: tl.constexpr,
):  # fmt: skip
    """One program per place; IDS: the most there may be."""
    place = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    row = tl.load(ids + place)
    known = (row >= 0) & (row < classes) & (row != padding)
    places = tl.arange(0, IDS)
    same = (tl.load(ids + places, mask=places < count, other=-1) == row) & (places < count)
    if known & (tl.min(tl.where(same, places, IDS)) == place):
        total = tl.zeros([BLOCK], tl.float32)
        last = tl.max(tl.where(same, places, 0))
        for start in range(place // CHUNK * CHUNK, last + 1, CHUNK):
            near = start + tl.arange(0, CHUNK)
            wanted = (near <= last) & (tl.load(ids + near, mask=near <= last, other=-1) == row)
            if tl.max(wanted.to(tl.int32)) == 1:
                source = grad + near.to(tl.int64)[:, None] * grad_stride + column[None, :]
                values = tl.load(source, mask=wanted[:, None] & inside[None, :], other=0.0)
                total += tl.sum(values.to(tl.float32), axis=0)
        target = dweight + row.to(tl.int64) * width + column
        tl.store(target, total.to(dweight.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count", "classes", "padding"])
def _sum_chunks(
    ids, order, grad, dweight, partials, count, classes, padding, width, grad_stride,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    first = chunk * CHUNK
    last = tl.minimum(first + CHUNK, count)
    # The sum of an id that began before the chunk is partial.
    before = tl.load(ids + first - 1, mask=first > 0, other=-1)
    continued = ((first > 0) & (before == tl.load(ids + first))).to(tl.int32)
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(first, last):
        row = tl.load(ids + i)
        source = tl.load(order + i).to(tl.int64)
        total += tl.load(grad + source * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
        following = tl.load(ids + i + 1, mask=i + 1 < count, other=-1)
        ends = (i + 1 == count) | (following != row)
        if ends | (i + 1 == last):
            known = (row >= 0) & (row < classes) & (row != padding)
            if continued == 1:
                tl.store(partials + (chunk * 2) * width + column, total, mask=inside)
            elif ends:
                target = dweight + row.to(tl.int64) * width + column
                tl.store(target, total.to(dweight.dtype.element_ty), mask=inside & known)
            else:
                tl.store(partials + (chunk * 2 + 1) * width + column, total, mask=inside)
            total = tl.zeros([BLOCK], tl.float32)
            continued = continued * 0


@triton.jit(do_not_specialize=["count", "classes", "padding"])
def _add_partials(ids, dweight, partials, count, classes, padding, width, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """One program per chunk; it works if an id begins in its chunk and continues in the next."""
    chunk = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    last = (chunk + 1) * CHUNK - 1
    if last + 1 < count:
        row = tl.load(ids + last)
        continues = tl.load(ids + last + 1) == row
        first = chunk * CHUNK
        # It began here unless the whole chunk is this id and the one before it was too.
        before = tl.load(ids + first - 1, mask=first > 0, other=-1)
        began = (tl.load(ids + first) != row) | (first == 0) | (before != row)
        if continues & began:
            total = tl.load(partials + (chunk * 2 + 1) * width + column, mask=inside, other=0.0)
            following = chunk + 1
            more = continues
            while more:
                total += tl.load(partials + following * 2 * width + column, mask=inside, other=0.0)
                following += 1
                end = following * CHUNK
                last_here = tl.load(ids + end - 1, mask=end < count, other=-1)
                first_there = tl.load(ids + end, mask=end < count, other=-1)
                more = (end < count) & (last_here == row) & (first_there == row)
            known = (row >= 0) & (row < classes) & (row != padding)
            target = dweight + row.to(tl.int64) * width + column
            tl.store(target, total.to(dweight.dtype.element_ty), mask=inside & known)


def embedding_forward(gpu: Gpu, args: Embedding) -> Tensor:
    ids, weight = args.ids, args.weight
    classes, width = weight.shape
    y = gpu.empty((*ids.shape, width), weight.dtype)
    if y.numel() == 0:
        return y
    table = weight if weight.stride(1) == 1 else gpu.contiguous(weight)
    block = min(2048, power_of_two(width))
    grid = (ids.numel(), triton.cdiv(width, block))
    gpu.launch(_gather, grid, (gpu.contiguous(ids), table, y), (classes, width, table.stride(0)), (block,))
    return y


def embedding_backward(gpu: Gpu, args: EmbeddingBackward) -> Tensor:
    count, width = args.ids.numel(), args.grad.shape[-1]
    dweight = gpu.zeros((args.num_embeddings, width), args.grad.dtype)
    if count == 0 or dweight.numel() == 0:
        return dweight
    grad, numbers = as_rows(gpu, args.grad), (count, args.num_embeddings, args.padding, width)
    if count <= _FEW:
        block = min(256, power_of_two(width))
        few = (gpu.contiguous(args.ids), grad.tensor, dweight)
        grid = (count, triton.cdiv(width, block))
        gpu.launch(_sum_few, grid, few, (*numbers, grad.stride), (_CHUNK, block, _FEW))
        return dweight
    ids, order = gpu.call(_sort, args.ids)
    block, chunks = min(1024, power_of_two(width)), triton.cdiv(count, _CHUNK)
    grid = (chunks, triton.cdiv(width, block))
    partials = gpu.empty((chunks, 2, width), torch.float32)
    tensors = (ids, order, grad.tensor, dweight, partials)
    gpu.launch(_sum_chunks, grid, tensors, (*numbers, grad.stride), (_CHUNK, block))
    gpu.launch(_add_partials, grid, (ids, dweight, partials), numbers, (_CHUNK, block))
    return dweight


def _sort(ids: Tensor) -> tuple[Tensor, Tensor]:
    values, order = torch.sort(ids.reshape(-1), stable=True)
    return values, order
