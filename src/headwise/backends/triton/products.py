"""How attention kernels multiply: in which precision, and wide float32 heads in pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from headwise.backends.triton.blocks import load_rows

if TYPE_CHECKING:
    from headwise.backends.triton.gpu import Gpu


@triton.jit
def product(a, b, acc, PRECISION: tl.constexpr):
    """``acc + a @ b`` in float32, of a rounded to b's dtype; acc may be None."""
    if PRECISION == "interpreted":  # which cannot multiply bfloat16, and cuts digits off where a GPU rounds
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        return tl.dot(a.to(b.dtype), b, acc, input_precision=PRECISION)


@triton.jit
def row_products(q_at, rows_inside, k, k_row, k_stride, keys_inside, V: tl.constexpr):
    """``[rows, keys]`` from pointers to rows of q, and rows ``k + k_row · k_stride``; zeros where they are not inside.

    In pieces of the head dim: float32 operands of a wide head fit in no register file at once. The loads of q do not
    depend on the keys: in a loop over them, the compiler does them once.
    """
    D: tl.constexpr = V.D
    PIECE: tl.constexpr = V.PIECE
    PRECISION: tl.constexpr = V.PRECISION
    acc = None
    for start in tl.static_range(0, D, PIECE):
        d = start + tl.arange(0, PIECE)
        q_tile = tl.load(q_at[:, None] + d[None, :], mask=rows_inside[:, None] & (d < V.D)[None, :], other=0.0)
        k_tile = load_rows(k + start, k_row, k_stride, keys_inside, V.D - start, PIECE, True)
        acc = product(q_tile, tl.trans(k_tile), acc, PRECISION)
    return acc


@triton.jit
def latent_products(q_at, rows_inside, k, k_row, k_stride, keys_inside, V: tl.constexpr):
    """As `row_products`, of keys that begin with their values; and these ``[keys, DV]``, which are read once for both."""
    DV: tl.constexpr = V.DV
    BLOCK_REST: tl.constexpr = V.BLOCK_REST
    PRECISION: tl.constexpr = V.PRECISION
    dv, rest = tl.arange(0, DV), DV + tl.arange(0, BLOCK_REST)
    values = load_rows(k, k_row, k_stride, keys_inside, DV, DV, True)
    q_tile = tl.load(q_at[:, None] + dv[None, :], mask=rows_inside[:, None], other=0.0)
    q_rest = tl.load(q_at[:, None] + rest[None, :], mask=rows_inside[:, None] & (rest < V.D)[None, :], other=0.0)
    k_rest = load_rows(k + DV, k_row, k_stride, keys_inside, V.D - DV, BLOCK_REST, True)
    acc = product(q_rest, tl.trans(k_rest), None, PRECISION)
    return product(q_tile, tl.trans(values), acc, PRECISION), values


def piece_of(block_d: int, element_size: int) -> int:
    """How much of a head dim of ``block_d`` is multiplied at once."""
    if block_d > 512:
        return 64 if element_size < 4 else 32  # of the 1024 that 576 would be padded to, nearly half is nothing
    return block_d if element_size < 4 else min(block_d, 32)


def dot_precision(gpu: Gpu, dtype: torch.dtype, widest: int = 0) -> str:
    """How float32 operands are multiplied: as float32, unless the user turned TF32 on in PyTorch.

    Kernels whose tile asks for bf16x3 take that in place of three TF32 products (`bf16x3.tile_precision`).

    ``widest`` is the head dim of a gradient. At 512, three TF32 products were over the error budget in the largest element,
    and their operands spill 4000 to 7000 bytes a thread (plain float32: none for dk and dv, 1900 for dq).
    """
    if gpu.interpreted:
        return "interpreted"
    if dtype != torch.float32:
        return "ieee"  # of no meaning for 16-bit operands
    if gpu.tf32:
        return "tf32"
    return "ieee" if gpu.hip or widest > 256 else "tf32x3"
