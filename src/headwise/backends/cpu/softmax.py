"""Softmax on the CPU: blocks of rows that stay in the cache, float32 inside, powers of two for the exponentials.

PyTorch's own kernel adds a row up in order, which costs digits over a long row, and makes NaN of a row of -inf.
"""

from __future__ import annotations

import math
from itertools import islice

import torch
from torch import Tensor

from headwise.backends.cpu.row_blocks import BLOCK, row_blocks, scratch_for, working_copy
from headwise.backends.cpu.threads import in_threads


def softmax_forward(x: Tensor) -> Tensor:
    probs = torch.empty(x.shape, dtype=x.dtype)
    if x.numel() == 0:
        return probs
    probs_rows = probs.view(-1, x.shape[-1])

    def work(part: int, parts: int) -> None:
        copy, terms = scratch_for(x, 2)
        for rows, (block,) in islice(row_blocks(x), part, None, parts):
            out = probs_rows[rows]
            weights = out if out.dtype == terms.dtype else terms[: block.shape[0]]
            z = working_copy(block, copy)
            highest = z.amax(-1, keepdim=True)
            # A row of -inf is measured from a finite stand-in: its weights are zero.
            torch.sub(z, highest.masked_fill_(highest == -torch.inf, 0.0), out=weights).mul_(math.log2(math.e)).exp2_()
            total = weights.sum(-1, keepdim=True)
            weights.div_(total.masked_fill_(total == 0, 1.0))
            if weights is not out:
                out.copy_(weights)

    in_threads(work, most=-(-x.numel() // BLOCK))
    return probs


def softmax_backward(probs: Tensor, grad: Tensor) -> Tensor:
    # The kernel behind torch.softmax's own backward: accumulates in float32 for the 16-bit types.
    return torch.ops.aten._softmax_backward_data(grad, probs, -1, probs.dtype).contiguous()
