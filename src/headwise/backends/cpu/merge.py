"""Merging of partial attention results on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from headwise.ops.attention.merge import Merge, MergeBackward


def merge_attention(args: Merge) -> tuple[Tensor, Tensor]:
    return merge(args.outs, args.lses)


def merge_attention_backward(args: MergeBackward) -> tuple[Tensor, ...]:
    # With w_i = exp(lse_i - lse):    dout_i = w_i g,    dlse_i = w_i (g · (out_i - out) + g_lse)
    douts, dlses = [], []
    grad, exact = args.grad_out.to(args.lse.dtype), _weighted_sum(args.outs, args.lses, args.lse)
    for out, lse in zip(args.outs, args.lses, strict=True):
        weight = _weight(lse, args.lse)
        present = weight > 0
        douts.append(torch.where(present[..., None], weight[..., None] * grad, 0.0).to(out.dtype).contiguous())
        moved = (grad * (out.to(grad.dtype) - exact)).sum(-1)
        dlses.append(torch.where(present, weight * (moved + args.grad_lse), 0.0).contiguous())
    return *douts, *dlses


def merge(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    total = lses[0].clone(memory_format=torch.contiguous_format)
    for lse in lses[1:]:
        total = torch.logaddexp(total, lse)  # of -inf and -inf: -inf
    return _weighted_sum(outs, lses, total).to(outs[0].dtype), total


def merge_batch(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Partials ``(N, H, S, ·)`` of one batch entry merged to ``(1, H, S, ·)``. Every row of each has seen something."""
    total = lses.logsumexp(0, keepdim=True)
    return (outs * torch.exp(lses - total)[..., None]).sum(0, keepdim=True), total


def _weighted_sum(outs: list[Tensor], lses: list[Tensor], total: Tensor) -> Tensor:
    merged = torch.zeros(outs[0].shape, dtype=total.dtype)
    for out, lse in zip(outs, lses, strict=True):
        # A row that saw nothing counts for nothing, whatever it holds.
        merged += torch.where((lse == -torch.inf)[..., None], 0.0, _weight(lse, total)[..., None] * out)
    return merged


def _weight(lse: Tensor, total: Tensor) -> Tensor:
    return torch.where(lse == -torch.inf, 0.0, torch.exp(lse - total))
