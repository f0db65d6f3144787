"""Softmax on the CPU: PyTorch's own kernels, but for rows that see nothing.

The kernel reads a row of any dtype into float32 and keeps it in the cache between its passes, which blocks of whole
operations cannot match: they took 1.3 to 4 times as long. It adds up a row in the lanes of a vector, which loses digits over
a long one: four times the error of a pairwise sum at 262144 columns. So long float32 rows are divided by their pairwise sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from headwise.ops.softmax import Softmax, SoftmaxBackward

_LONG = 16384  # columns; up to here the kernel's sum is as good as a pairwise one


def softmax_forward(args: Softmax) -> Tensor:
    x = args.x
    probs = torch.softmax(x, -1).contiguous()
    if x.dtype == torch.float32 and x.shape[-1] > _LONG:
        probs.div_(probs.sum(-1, keepdim=True))
    if x.numel() > 0:
        rows = probs.view(-1, x.shape[-1])
        # A row of -inf comes out as NaN; so does one that holds a NaN or +inf, and that one is to stay so.
        undefined = rows[:, 0].isnan()
        if undefined.any():
            number = undefined.nonzero()[:, 0]
            hidden = (x.reshape(rows.shape)[number] == -torch.inf).all(-1)
            rows[number[hidden]] = 0.0
    return probs


def softmax_backward(args: SoftmaxBackward) -> Tensor:
    # The kernel behind the backward of torch.softmax: it accumulates 16-bit types in float32.
    return torch.ops.aten._softmax_backward_data(args.grad, args.probs, -1, args.probs.dtype).contiguous()
