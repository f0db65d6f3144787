"""RMS normalisation on the CPU: cache-sized blocks of rows, float32 inside. Of a tensor, or of the sum of two."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwise.backends.cpu.memory import huge_pages
from headwise.backends.cpu.row_blocks import BLOCK, Scratch, row_blocks, scratch_for, working_copy
from headwise.backends.cpu.threads import Shared, in_threads
from headwise.layout import statistics_dtype

if TYPE_CHECKING:
    from headwise.ops.rms_norm import RmsNorm, RmsNormBackward


def rms_norm_forward(args: RmsNorm) -> tuple[Tensor, Tensor]:
    y, _, rstd = forward(args.x, None, args.weight, args.eps, args.weight_offset)
    return y, rstd


def rms_norm_backward(args: RmsNormBackward) -> tuple[Tensor, Tensor | None]:
    return backward(args.grad, None, args.x, args.weight, args.rstd, args.eps, args.weight_offset)


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, weight_offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    """y, h and rstd of ``h = x + residual``; without a residual h is x."""
    gain = _gain(weight, weight_offset, x.dtype)
    y = huge_pages(torch.empty(x.shape, dtype=x.dtype))
    h = x if residual is None else huge_pages(torch.empty(x.shape, dtype=x.dtype))
    rstd = torch.empty(x.shape[:-1], dtype=statistics_dtype(x.dtype))
    if x.numel() == 0:
        return y, h, rstd.zero_()
    inputs = (x,) if residual is None else (x, residual)
    y_rows, h_rows, rstd_rows = y.view(-1, x.shape[-1]), h, rstd.view(-1)
    if residual is not None:
        h_rows = h.view(-1, x.shape[-1])

    shared = Shared(row_blocks(*inputs))

    def work(thread: int, threads: int) -> None:
        copy, scratch = scratch_for(x, 2)
        for rows, blocks in shared:
            block, y_block = blocks[0], y_rows[rows]
            if residual is not None:
                # PyTorch adds 16-bit numbers in float32 and rounds once.
                block = torch.add(*blocks, out=h_rows[rows])
            h_block = working_copy(block, copy)
            r = _reciprocal_rms(h_block, eps, scratch, rstd_rows[rows])
            target = y_block if y.dtype == rstd.dtype else scratch[: block.shape[0]]
            torch.mul(h_block, r, out=target)
            if gain is not None:
                target.mul_(gain)
            if target is not y_block:
                y_block.copy_(target)

    in_threads(work, most=-(-x.numel() // BLOCK))
    return y, h, rstd


def backward(
    grad: Tensor, grad_h: Tensor | None, x: Tensor, weight: Tensor | None, rstd: Tensor | None, eps: float,
    weight_offset: float,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """dx and dweight. grad_h: what else reaches x, added before dx is rounded."""
    gain, width = _gain(weight, weight_offset, x.dtype), x.shape[-1]
    dx = huge_pages(torch.empty(x.shape, dtype=x.dtype))
    sums: dict[int, Tensor] = {}  # of dweight, by block
    if x.numel() > 0:
        inputs = (x, grad) if grad_h is None else (x, grad, grad_h)
        dx_rows = dx.view(-1, width)
        rstd_rows = None if rstd is None else rstd.reshape(-1)

        shared = Shared(enumerate(row_blocks(*inputs)))

        def work(thread: int, threads: int) -> None:
            x_copy, grad_copy, normalised, product = scratch_for(x, 4)
            computed = torch.empty(x_copy.shape[0], dtype=x_copy.dtype)
            for i, (rows, blocks) in shared:
                count = blocks[0].shape[0]
                x_block, g = working_copy(blocks[0], x_copy), working_copy(blocks[1], grad_copy)
                if rstd_rows is None:
                    r = _reciprocal_rms(x_block, eps, product, computed[:count])
                else:
                    r = rstd_rows[rows].unsqueeze(-1)
                n = torch.mul(x_block, r, out=normalised[:count])
                p = torch.mul(g, n, out=product[:count])
                if gain is not None:
                    sums[i] = p.sum(0)
                    p.mul_(gain)
                mean = p.mean(-1, keepdim=True)
                t = torch.mul(g, 1.0 if gain is None else gain, out=p)
                t.addcmul_(n, mean, value=-1)
                if grad_h is None:
                    dx_rows[rows] = t.mul_(r)
                else:
                    dx_rows[rows] = torch.addcmul(blocks[2], t, r, out=normalised[:count])

        in_threads(work, most=-(-x.numel() // BLOCK))
    if weight is None:
        return dx, None
    # Blocks are summed in float32, their sums in float64: it costs nothing and adds no rounding of its own.
    dweight = torch.zeros(width, dtype=torch.float64)
    for i in range(len(sums)):
        dweight += sums[i]
    return dx, dweight.to(weight.dtype)


def _gain(weight: Tensor | None, offset: float, dtype: torch.dtype) -> Tensor | None:
    """In the dtype that x of ``dtype`` is computed in."""
    return None if weight is None else weight.to(statistics_dtype(dtype)) + offset


def _reciprocal_rms(x: Tensor, eps: float, scratch: Scratch, out: Tensor) -> Tensor:
    """``1 / sqrt(mean(x²) + eps)`` of each row, written to ``out`` (rows,), returned as a column."""
    torch.mean(torch.mul(x, x, out=scratch[: x.shape[0]]), -1, out=out)
    return out.add_(eps).rsqrt_().unsqueeze(-1)
