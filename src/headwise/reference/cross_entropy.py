"""Cross entropy with label smoothing, z-loss and soft cap, written as its formula."""

from __future__ import annotations

import torch
from torch import Tensor


def cross_entropy(
    logits: Tensor, targets: Tensor, ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0,
    z_loss: float = 0.0, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    classes = logits.shape[-1]
    targets = targets.long()
    ignored = targets == ignore_index
    outside = ((targets < 0) | (targets >= classes)) & ~ignored
    if classes == 0:
        loss = torch.where(ignored, 0.0, torch.nan).to(logits.dtype) + logits.sum(-1)
    else:
        # An ignored row does not exist: whatever it holds, nothing of it reaches the loss or the gradient.
        x = logits.masked_fill(ignored.unsqueeze(-1), 0.0)
        z = x if softcap is None else softcap * torch.tanh(x / softcap)
        log_probs = torch.log_softmax(z, -1)
        target = targets.masked_fill(ignored | outside, 0).unsqueeze(-1)
        loss = -(1 - label_smoothing) * log_probs.gather(-1, target).squeeze(-1)
        if label_smoothing:
            loss = loss - label_smoothing * log_probs.mean(-1)
        if z_loss:
            loss = loss + z_loss * torch.logsumexp(z, -1).square()
        # By multiplication, so that the row's gradient is NaN as well.
        loss = loss * torch.where(outside, torch.nan, 1.0).to(loss.dtype)
        loss = loss.masked_fill(ignored, 0.0)
    if reduction == "none":
        return loss
    return loss.sum() / (~ignored).sum().clamp(min=1) if reduction == "mean" else loss.sum()
