"""Softmax on the CPU: PyTorch's own kernels, but for rows that see nothing.

The kernel reads a row of any dtype into float32 and keeps it in the cache between its passes, which blocks of whole
operations cannot match: they took 1.3 to 4 times as long. It adds up a row in the lanes of a vector, which loses digits over
a long one: four times the error of a pairwise sum at 262144 columns. So long float32 rows are divided by their pairwise sum
where that is needed, block by block, while they are in the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwise.backends.cpu.memory import huge_pages
from headwise.backends.cpu.row_blocks import BLOCK, row_blocks
from headwise.backends.cpu.threads import Shared, in_threads

if TYPE_CHECKING:
    from headwise.ops.softmax import Softmax, SoftmaxBackward

_LONG = 16384  # columns; up to here the kernel's sum is as good as a pairwise one
_OFF = 2.0**-21  # how far from 1 the sum of a row may be: as far as it gets at _LONG columns
_ELEMENTS = BLOCK // 4


def softmax_forward(args: Softmax) -> Tensor:
    x = args.x
    probs = huge_pages(torch.empty(x.shape, dtype=x.dtype))
    if x.numel() == 0:
        return probs
    rows = probs.view(-1, x.shape[-1])
    if x.dtype == torch.float32 and x.shape[-1] > _LONG:
        _long_rows(x, rows)
    else:
        torch.softmax(x, -1, out=probs)
    # A row of -inf comes out as NaN; so does one that holds a NaN or +inf, and that one is to stay so.
    undefined = rows[:, 0].isnan()
    if undefined.any():
        number = undefined.nonzero()[:, 0]
        hidden = (x.reshape(rows.shape)[number] == -torch.inf).all(-1)
        rows[number[hidden]] = 0.0
    return probs


def _long_rows(x: Tensor, probs: Tensor) -> None:
    blocks = Shared(row_blocks(x, elements=_ELEMENTS))

    def work(thread: int, threads: int) -> None:
        for rows, (block,) in blocks:
            of_block = torch.softmax(block, -1, out=probs[rows])
            total = of_block.sum(-1, keepdim=True)
            off = (total - 1).abs() > _OFF  # False for NaN
            if off.any():
                of_block.div_(total.where(off, 1.0))

    in_threads(work, most=-(-x.numel() // _ELEMENTS))


def softmax_backward(args: SoftmaxBackward) -> Tensor:
    # The kernel behind the backward of torch.softmax: it accumulates 16-bit types in float32.
    dx = huge_pages(torch.empty(args.probs.shape, dtype=args.probs.dtype))
    return torch.ops.aten._softmax_backward_data.out(args.grad, args.probs, -1, args.probs.dtype, grad_input=dx)
