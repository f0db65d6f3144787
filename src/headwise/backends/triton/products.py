"""q·k of a tile with the head dim in pieces: float32 operands of a wide head fit in no register file at once."""

from __future__ import annotations

import triton
import triton.language as tl

from headwise.backends.triton.blocks import load_rows
from headwise.backends.triton.scores import product


@triton.jit
def row_products(
    q_at, rows_inside, k, k_row, k_s, keys_inside,
    D: tl.constexpr, BLOCK_D: tl.constexpr, PIECE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``[rows, keys]`` from pointers to rows of q, and rows ``k + k_row · k_s``; zeros where they are not inside.

    The loads of q do not depend on the keys: in a loop over them, the compiler does them once.
    """
    acc = None
    for start in tl.static_range(0, BLOCK_D, PIECE):
        d = start + tl.arange(0, PIECE)
        q_tile = tl.load(q_at[:, None] + d[None, :], mask=rows_inside[:, None] & (d < D)[None, :], other=0.0)
        k_tile = load_rows(k + start, k_row, k_s, keys_inside, D - start, PIECE, True)
        acc = product(q_tile, tl.trans(k_tile), acc, PRECISION)
    return acc


def piece_of(block_d: int, element_size: int) -> int:
    """How much of a head dim of ``block_d`` is multiplied at once."""
    return block_d if element_size < 4 else min(block_d, 32)
