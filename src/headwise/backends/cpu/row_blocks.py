"""Tensors of rows, taken a cache-sized block at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

# Elements of a block: 2 MB of float32. A handful of these fit the cache, and a PyTorch call on one costs far more than
# the call's own overhead.
BLOCK = 512 * 1024


def accumulator(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def rows_per_block(width: int) -> int:
    return max(1, BLOCK // max(width, 1))


def row_blocks(*tensors: Tensor) -> Iterator[tuple[slice, tuple[Tensor, ...]]]:
    """The rows of ``tensors`` (..., D), all of one shape, in order: slices of the flat row number, and those rows of
    each tensor as (rows, D).

    Blocks are views wherever the strides allow; where they do not, one block at a time is copied, never a whole tensor.
    """
    yield from _blocks_from(tensors, rows_per_block(tensors[0].shape[-1]), 0)


def _blocks_from(tensors: tuple[Tensor, ...], limit: int, first: int) -> Iterator[tuple[slice, tuple[Tensor, ...]]]:
    *leading, width = tensors[0].shape
    if len(leading) != 1 and all(x.is_contiguous() for x in tensors):
        tensors = tuple(x.view(-1, width) for x in tensors)
    elif not leading:
        tensors = tuple(x.unsqueeze(0) for x in tensors)
    outer = tensors[0].shape[0]
    inner = math.prod(tensors[0].shape[1:-1])  # rows under one index of the first dimension
    if inner > limit:
        for i in range(outer):
            yield from _blocks_from(tuple(x[i] for x in tensors), limit, first + i * inner)
        return
    step = limit // inner
    for i in range(0, outer, step):
        blocks = tuple(x[i : i + step].reshape(-1, width) for x in tensors)
        start = first + i * inner
        yield slice(start, start + blocks[0].shape[0]), blocks


def working_copy(block: Tensor, scratch: Tensor) -> Tensor:
    """``block`` itself if it can be computed on in place of a copy, else its copy in ``scratch``."""
    if block.dtype == scratch.dtype and block.stride(-1) == 1:
        return block
    return scratch[: block.shape[0]].copy_(block)


def scratch_for(x: Tensor, count: int) -> tuple[Tensor, ...]:
    """``count`` buffers of one block each, in the dtype that ``x`` is computed in."""
    rows = min(rows_per_block(x.shape[-1]), x.numel() // x.shape[-1])
    return tuple(torch.empty((rows, x.shape[-1]), dtype=accumulator(x)) for _ in range(count))
