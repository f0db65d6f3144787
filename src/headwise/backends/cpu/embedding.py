"""Embedding on the CPU: PyTorch's row gather and row sum, with bad ids as NaN and float32 sums."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from headwise.ops.embedding import Embedding, EmbeddingBackward

_SCRATCH = 4 * 1024 * 1024  # elements of the float32 copy that a 16-bit gradient is summed through (16 MB)
_SKIP = -1  # embedding_dense_backward leaves out rows with this id


def embedding_forward(args: Embedding) -> Tensor:
    ids, weight = args.ids, args.weight
    rows, width = weight.shape
    if rows == 0 or ids.numel() == 0:
        return weight.new_full((*ids.shape, width), torch.nan)
    flat = ids.reshape(-1)
    outside = (flat < 0) | (flat >= rows)
    some_outside = bool(outside.any())
    y = weight.new_empty((*ids.shape, width))  # a returned view could not be written to
    flat_y = y.view(flat.numel(), width)
    torch.index_select(weight, 0, flat.masked_fill(outside, 0) if some_outside else flat, out=flat_y)
    if some_outside:
        flat_y.masked_fill_(outside.unsqueeze(-1), torch.nan)
    return y


def embedding_backward(args: EmbeddingBackward) -> Tensor:
    grad, rows, width = args.grad, args.num_embeddings, args.grad.shape[-1]
    if grad.numel() == 0 or rows == 0:
        return grad.new_zeros((rows, width))
    ids = args.ids.reshape(-1).long()
    skipped = (ids < 0) | (ids >= rows) | (ids == args.padding)
    grad = grad.reshape(-1, width)
    if grad.dtype in (torch.float32, torch.float64):
        return _sum_rows(grad, ids.masked_fill(skipped, _SKIP) if skipped.any() else ids, rows)

    # 16-bit types are summed in float32, over the ids that occur, some columns at a time to bound the copies.
    dweight = grad.new_zeros((rows, width))
    if skipped.any():
        kept = (~skipped).nonzero().squeeze(-1)
        ids, grad = ids[kept], grad[kept]
        if ids.numel() == 0:
            return dweight
    occurring, place = torch.unique(ids, return_inverse=True)
    step = max(16, _SCRATCH // ids.numel())
    for start in range(0, width, step):
        columns = slice(start, start + step)
        total = _sum_rows(grad[:, columns].float(), place, occurring.numel())
        dweight[:, columns].index_copy_(0, occurring, total.to(grad.dtype))
    return dweight


def _sum_rows(grad: Tensor, ids: Tensor, rows: int) -> Tensor:
    """Row v is the sum of the rows of ``grad`` with id v, added in order: the same bits for any number of threads."""
    return torch.ops.aten.embedding_dense_backward(grad, ids, rows, _SKIP, False)
