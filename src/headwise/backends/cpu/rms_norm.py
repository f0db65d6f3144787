"""RMS normalisation on the CPU: blocks of rows that stay in the cache, float32 inside."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.backends.cpu.row_blocks import accumulator, row_blocks, scratch_for, working_copy


def rms_norm_forward(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> tuple[Tensor, Tensor]:
    y = torch.empty(x.shape, dtype=x.dtype)
    rstd = torch.empty(x.shape[:-1], dtype=accumulator(x))
    if x.numel() == 0:
        return y, rstd.zero_()
    gain = _gain(x, weight, weight_offset)
    copy, work = scratch_for(x, 2)
    y_rows, rstd_rows = y.view(-1, x.shape[-1]), rstd.view(-1)
    for rows, (block,) in row_blocks(x):
        x_block = working_copy(block, copy)
        r = _reciprocal_rms(x_block, eps, work, rstd_rows[rows])
        y_block = y_rows[rows]
        target = y_block if y.dtype == rstd.dtype else work[: block.shape[0]]
        torch.mul(x_block, r, out=target)
        if gain is not None:
            target.mul_(gain)
        if target is not y_block:
            y_block.copy_(target)
    return y, rstd


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor | None, eps: float, weight_offset: float
) -> tuple[Tensor, Tensor | None]:
    width = x.shape[-1]
    dx = torch.empty(x.shape, dtype=x.dtype)
    # A sum over blocks, each summed in float32: float64 here costs nothing and leaves the blocks' own rounding only.
    dweight = torch.zeros(width, dtype=torch.float64)
    if x.numel() > 0:
        gain = _gain(x, weight, weight_offset)
        x_copy, grad_copy, normalised, product = scratch_for(x, 4)
        dx_rows = dx.view(-1, width)
        rstd_rows = None if rstd is None else rstd.reshape(-1)
        fresh = torch.empty(x_copy.shape[0], dtype=x_copy.dtype)
        for rows, blocks in row_blocks(x, grad):
            count = blocks[0].shape[0]
            x_block, g = working_copy(blocks[0], x_copy), working_copy(blocks[1], grad_copy)
            if rstd_rows is None:
                r = _reciprocal_rms(x_block, eps, product, fresh[:count])
            else:
                r = rstd_rows[rows].unsqueeze(-1)
            n = torch.mul(x_block, r, out=normalised[:count])
            p = torch.mul(g, n, out=product[:count])
            if gain is not None:
                dweight += p.sum(0)
                p.mul_(gain)
            mean = p.mean(-1, keepdim=True)
            h = torch.mul(g, 1.0 if gain is None else gain, out=p)
            h.addcmul_(n, mean, value=-1)
            dx_rows[rows] = h.mul_(r)
    return dx, (None if weight is None else dweight.to(weight.dtype))


def _gain(x: Tensor, weight: Tensor | None, weight_offset: float) -> Tensor | None:
    return None if weight is None else weight.to(accumulator(x)) + weight_offset


def _reciprocal_rms(x_block: Tensor, eps: float, work: Tensor, out: Tensor) -> Tensor:
    """(rows,) into ``out``; returned as a column."""
    squares = torch.mul(x_block, x_block, out=work[: x_block.shape[0]])
    torch.mean(squares, -1, out=out)
    return out.add_(eps).rsqrt_().unsqueeze(-1)
