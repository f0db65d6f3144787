"""Merging of partial attention results on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.layout import lse_dtype


def merge_attention(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    lse = lses[0].clone(memory_format=torch.contiguous_format)
    for part in lses[1:]:
        lse = torch.logaddexp(lse, part)  # of -inf and -inf: -inf
    return _weighted_sum(outs, lses, lse).to(outs[0].dtype), lse


def merge_attention_backward(
    grad_out: Tensor, grad_lse: Tensor, outs: list[Tensor], lses: list[Tensor], out: Tensor, lse: Tensor
) -> list[Tensor]:
    #   d out_i = w_i g        d lse_i = w_i (g · (out_i - out) + g_lse)        with w_i = exp(lse_i - lse)
    douts, dlses = [], []
    grad, exact_out = grad_out.to(lse.dtype), _weighted_sum(outs, lses, lse)
    for part_out, part_lse in zip(outs, lses, strict=True):
        weight = _weight(part_lse, lse)
        present = weight > 0
        douts.append((weight[..., None] * grad).to(part_out.dtype))
        moved = (grad * (part_out.to(lse.dtype) - exact_out)).sum(-1)
        dlses.append(torch.where(present, weight * (moved + grad_lse), 0.0).contiguous())
    return douts + dlses


def _weight(part: Tensor, total: Tensor) -> Tensor:
    return torch.where(part == -torch.inf, 0.0, torch.exp(part - total))


def _weighted_sum(outs: list[Tensor], lses: list[Tensor], lse: Tensor) -> Tensor:
    total = torch.zeros(outs[0].shape, dtype=lse_dtype(outs[0].dtype))
    for out, part in zip(outs, lses, strict=True):
        # A part that saw nothing weighs nothing even if its rows were never written.
        total += torch.where((part == -torch.inf)[..., None], 0.0, _weight(part, lse)[..., None] * out)
    return total
