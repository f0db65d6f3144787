"""Softmax on the CPU: cache-sized blocks of rows, float32 inside, exp2 for the exponentials.

PyTorch's own kernel sums a row in order, which loses digits over a long row, and gives NaN for a row of -inf.
"""

from __future__ import annotations

import math
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwise.backends.cpu.row_blocks import BLOCK, row_blocks, scratch_for, working_copy
from headwise.backends.cpu.threads import in_threads

if TYPE_CHECKING:
    from headwise.ops.softmax import Softmax, SoftmaxBackward


def softmax_forward(args: Softmax) -> Tensor:
    x = args.x
    probs = torch.empty(x.shape, dtype=x.dtype)
    if x.numel() == 0:
        return probs
    probs_rows = probs.view(-1, x.shape[-1])

    def work(thread: int, threads: int) -> None:
        copy, terms = scratch_for(x, 2)
        for rows, (block,) in islice(row_blocks(x), thread, None, threads):
            out = probs_rows[rows]
            weights = out if out.dtype == terms.dtype else terms[: block.shape[0]]
            z = working_copy(block, copy)
            highest = z.amax(-1, keepdim=True)
            # In a row of -inf, 0 stands in for the maximum, so that the weights are 0 and not NaN.
            torch.sub(z, highest.masked_fill_(highest == -torch.inf, 0.0), out=weights).mul_(math.log2(math.e)).exp2_()
            total = weights.sum(-1, keepdim=True)
            weights.div_(total.masked_fill_(total == 0, 1.0))
            if weights is not out:
                out.copy_(weights)

    in_threads(work, most=-(-x.numel() // BLOCK))
    return probs


def softmax_backward(args: SoftmaxBackward) -> Tensor:
    # The kernel behind the backward of torch.softmax: it accumulates 16-bit types in float32.
    return torch.ops.aten._softmax_backward_data(args.grad, args.probs, -1, args.probs.dtype).contiguous()
