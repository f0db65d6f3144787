"""What the row kernels share: tensors as matrices of rows, and tile sizes from a row's width alone."""

from __future__ import annotations

import torch
from torch import Tensor

# A row up to this many elements is held in registers between the passes over it; a longer one is read again.
LONGEST_HELD_ROW = 16384
_TILE = 4096  # elements per program where rows are short and several share one


def as_rows(x: Tensor) -> Tensor:
    """``(rows, width)`` with contiguous rows: a view wherever the strides allow."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.shape[1] <= 1 or rows.stride(1) == 1 else rows.contiguous()


def power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def held_tile(width: int) -> tuple[int, int, int]:
    """``(rows, columns, warps)`` of a program that holds whole rows."""
    columns = max(16, power_of_two(width))
    rows = max(1, _TILE // columns)
    warps = min(16, max(4, rows * columns // 1024))
    return rows, columns, warps


def multiprocessors(x: Tensor) -> int:
    # Under the interpreter there is no device: any small number shows the same code.
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 3
