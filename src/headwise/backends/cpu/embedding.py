"""Embedding on the CPU: PyTorch's row gather and its sum of rows, around bad ids and with float32 sums."""

from __future__ import annotations

import torch
from torch import Tensor

# Elements of the float32 copy that a 16-bit gradient is summed through: 16 MB.
_SCRATCH = 4 * 1024 * 1024
_NOWHERE = -1  # embedding_dense_backward leaves rows of this id out


def embedding_forward(ids: Tensor, weight: Tensor) -> Tensor:
    rows, width = weight.shape
    if rows == 0 or ids.numel() == 0:
        return weight.new_full((*ids.shape, width), torch.nan)
    flat = ids.reshape(-1)
    outside = (flat < 0) | (flat >= rows)
    some_outside = bool(outside.any())
    if some_outside:
        flat = flat.masked_fill(outside, 0)
    y = weight.index_select(0, flat)
    if some_outside:
        y.masked_fill_(outside.unsqueeze(-1), torch.nan)
    return y.view(*ids.shape, width)


def embedding_backward(grad: Tensor, ids: Tensor, num_embeddings: int, padding: int) -> Tensor:
    width = grad.shape[-1]
    if grad.numel() == 0 or num_embeddings == 0:
        return grad.new_zeros((num_embeddings, width))
    flat = ids.reshape(-1).long()
    left_out = (flat < 0) | (flat >= num_embeddings) | (flat == padding)
    grad = grad.reshape(-1, width)
    if grad.dtype in (torch.float32, torch.float64):
        return _sum_rows(grad, flat.masked_fill(left_out, _NOWHERE) if left_out.any() else flat, num_embeddings)

    # 16-bit types: sum in float32, over the ids that occur, a band of columns at a time to bound the copies.
    dweight = grad.new_zeros((num_embeddings, width))
    if left_out.any():
        keep = (~left_out).nonzero().squeeze(-1)
        flat, grad = flat[keep], grad[keep]
        if flat.numel() == 0:
            return dweight
    occurring, place = torch.unique(flat, return_inverse=True)
    band = max(16, _SCRATCH // flat.numel())
    for start in range(0, width, band):
        columns = slice(start, start + band)
        total = _sum_rows(grad[:, columns].float(), place, occurring.numel())
        dweight[:, columns].index_copy_(0, occurring, total.to(grad.dtype))
    return dweight


def _sum_rows(grad: Tensor, places: Tensor, rows: int) -> Tensor:
    """Row v is the sum of the rows of ``grad`` whose place is v, added in order: the same bits for any thread count."""
    return torch.ops.aten.embedding_dense_backward(grad, places, rows, _NOWHERE, False)
