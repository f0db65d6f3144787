"""Embedding in Triton: a gather, and a sum over sorted ids in a fixed order.

Backward: ids are sorted (stably), then cut into chunks of equal length. A program walks a chunk and adds up the rows of
each id in it. An id that lies inside one chunk is written at once; one that crosses chunks leaves a part in each, and a
second kernel adds the parts in order. So one id repeated a million times is as parallel as a million ids.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwise.backends.triton.launch import launch
from headwise.backends.triton.rows import as_rows, power_of_two

_CHUNK = 32


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
def _sum_chunks(
    ids,
    order,
    grad,
    dweight,
    parts,
    count,
    classes,
    padding,
    width,
    grad_stride,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    chunk = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    first = chunk * CHUNK
    last = tl.minimum(first + CHUNK, count)
    # An id that came before the chunk began: its sum here is a part of something larger.
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
                tl.store(parts + (chunk * 2) * width + column, total, mask=inside)
            elif ends:
                target = dweight + row.to(tl.int64) * width + column
                tl.store(target, total.to(dweight.dtype.element_ty), mask=inside & known)
            else:
                tl.store(parts + (chunk * 2 + 1) * width + column, total, mask=inside)
            total = tl.zeros([BLOCK], tl.float32)
            continued = continued * 0


@triton.jit(do_not_specialize=["count", "classes", "padding"])
def _join_parts(ids, dweight, parts, count, classes, padding, width, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """One program per chunk; it works if an id begins in its chunk and goes on in the next."""
    chunk = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    last = (chunk + 1) * CHUNK - 1
    if last + 1 < count:
        row = tl.load(ids + last)
        goes_on = tl.load(ids + last + 1) == row
        first = chunk * CHUNK
        # It began here unless the whole chunk is this id and the one before it was too.
        before = tl.load(ids + first - 1, mask=first > 0, other=-1)
        began = (tl.load(ids + first) != row) | (first == 0) | (before != row)
        if goes_on & began:
            total = tl.load(parts + (chunk * 2 + 1) * width + column, mask=inside, other=0.0)
            following = chunk + 1
            more = goes_on
            while more:
                total += tl.load(parts + following * 2 * width + column, mask=inside, other=0.0)
                following += 1
                end = following * CHUNK
                last_here = tl.load(ids + end - 1, mask=end < count, other=-1)
                first_there = tl.load(ids + end, mask=end < count, other=-1)
                more = (end < count) & (last_here == row) & (first_there == row)
            known = (row >= 0) & (row < classes) & (row != padding)
            target = dweight + row.to(tl.int64) * width + column
            tl.store(target, total.to(dweight.dtype.element_ty), mask=inside & known)


def embedding_forward(ids: Tensor, weight: Tensor) -> Tensor:
    classes, width = weight.shape
    y = torch.empty((*ids.shape, width), dtype=weight.dtype, device=weight.device)
    if y.numel() == 0:
        return y
    table = weight if weight.stride(1) == 1 else weight.contiguous()
    block = min(2048, power_of_two(width))
    grid = (ids.numel(), triton.cdiv(width, block))
    launch(_gather, grid, (ids.contiguous(), table, y), (classes, width, table.stride(0)), (block,))
    return y


def embedding_backward(grad: Tensor, ids: Tensor, num_embeddings: int, padding: int) -> Tensor:
    width = grad.shape[-1]
    dweight = torch.zeros((num_embeddings, width), dtype=grad.dtype, device=grad.device)
    count = ids.numel()
    if count == 0 or dweight.numel() == 0:
        return dweight
    rows, stride = as_rows(grad)
    sorted_ids, order = torch.sort(ids.reshape(-1), stable=True)
    block = min(1024, power_of_two(width))
    chunks = triton.cdiv(count, _CHUNK)
    grid = (chunks, triton.cdiv(width, block))
    parts = torch.empty((chunks, 2, width), dtype=torch.float32, device=grad.device)
    numbers = (count, num_embeddings, padding, width)
    launch(_sum_chunks, grid, (sorted_ids, order, rows, dweight, parts), (*numbers, stride), (_CHUNK, block))
    launch(_join_parts, grid, (sorted_ids, dweight, parts), numbers, (_CHUNK, block))
    return dweight
