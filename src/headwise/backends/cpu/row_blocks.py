"""Tensors of rows, taken one cache-sized block at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from headwise.layout import statistics_dtype

# Elements of a block: 2 MB of float32. A few of them fit the cache, and the work on one hides the overhead of a call.
BLOCK = 512 * 1024
_SMALL = 4 << 20  # elements of a tensor


def row_blocks(*tensors: Tensor, elements: int = BLOCK) -> Iterator[tuple[slice, tuple[Tensor, ...]]]:
    """The rows of ``tensors`` (..., D), all of one shape, in order, about so many elements at a time.

    Gives slices of the flat row number, and those rows of each tensor as (rows, D). Blocks are views where the strides
    allow it; else one block at a time is copied, never a whole tensor.
    """
    yield from _blocks_from(tensors, _rows_per_block(tensors[0].shape[-1], elements), 0)


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


def sharing(x: Tensor, elements: int) -> tuple[int, int]:
    """The elements of a block, and how many of our threads may share the blocks of ``x``.

    The blocks of a small tensor go one after the other, each to PyTorch's own threads: those spin after an operation, so
    that ours would wait for a core. Such a block is as large as all their caches take.
    """
    if x.numel() <= _SMALL:
        return elements * torch.get_num_threads(), 1
    return elements, -(-x.numel() // elements)


def _rows_per_block(width: int, elements: int) -> int:
    return max(1, elements // max(width, 1))


class Scratch:
    """A buffer of one block, made when it is first used: a block that needs no copy shall not pay for its memory."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
        self._memory: Tensor | None = None

    def __getitem__(self, rows: slice) -> Tensor:
        if self._memory is None:
            self._memory = torch.empty(self.shape, dtype=self.dtype)
        return self._memory[rows]


def working_copy(block: Tensor, scratch: Scratch) -> Tensor:
    """``block`` itself if its dtype and strides suit the arithmetic, else a copy in ``scratch``."""
    if block.dtype == scratch.dtype and block.stride(-1) == 1:
        return block
    return scratch[: block.shape[0]].copy_(block)


def scratch_for(x: Tensor, count: int, elements: int = BLOCK) -> tuple[Scratch, ...]:
    """``count`` buffers of one block each, in the dtype that ``x`` is computed in. elements: as of `row_blocks`."""
    rows = min(_rows_per_block(x.shape[-1], elements), x.numel() // x.shape[-1])
    return tuple(Scratch((rows, x.shape[-1]), statistics_dtype(x.dtype)) for _ in range(count))
