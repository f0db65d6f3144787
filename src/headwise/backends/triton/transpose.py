"""Transpose in Triton: square tiles, read along rows and written along rows. Elements are plain bits of 1 to 8 bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from headwise import layout
from headwise.backends.triton.row_tiling import reshaped

if TYPE_CHECKING:
    from headwise.backends.triton.gpu import Gpu
    from headwise.ops.transpose import Transpose

_TILE = {1: 128, 2: 128, 4: 128, 8: 64}  # bytes of an element -> side of a tile


@triton.jit
def _store(y, bits, matrix, row, column, rows, columns):
    target = y + matrix * rows * columns + column[:, None] * rows + row[None, :]
    tl.store(target, bits, mask=(column < columns)[:, None] & (row < rows)[None, :])


@triton.jit(do_not_specialize=["rows"])
def _transpose(x, y, rows, columns, batch_stride, row_stride, column_stride, TILE: tl.constexpr):
    row_tiles, column_tiles = tl.cdiv(rows, TILE), tl.cdiv(columns, TILE)
    program = tl.program_id(0).to(tl.int64)
    matrix = program // (row_tiles * column_tiles)
    tile = program % (row_tiles * column_tiles)
    row = (tile // column_tiles) * TILE + tl.arange(0, TILE)  # [TILE]
    column = (tile % column_tiles) * TILE + tl.arange(0, TILE)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    source = x + matrix * batch_stride + row[:, None] * row_stride + column[None, :] * column_stride
    bits = tl.trans(tl.load(source, mask=inside))
    if rows % 16 == 0:  # written so that the compiler sees aligned stores
        _store(y, bits, matrix, row, column, rows // 16 * 16, columns)
    else:
        _store(y, bits, matrix, row, column, rows, columns)


def transpose_forward(gpu: Gpu, args: Transpose) -> Tensor:
    x = args.x
    rows, columns = x.shape[-2:]
    y = gpu.empty((*x.shape[:-2], columns, rows), x.dtype)
    if x.numel() == 0:
        return y
    matrices = x if x.dim() == 3 else reshaped(gpu, x, -1, rows, columns)
    side = _TILE[x.element_size()]
    grid = (matrices.shape[0] * triton.cdiv(rows, side) * triton.cdiv(columns, side),)
    tensors = layout.as_integers(matrices), layout.as_integers(y)
    gpu.launch(_transpose, grid, tensors, (rows, columns, *matrices.stride()), (side,), warps=8)
    return y
