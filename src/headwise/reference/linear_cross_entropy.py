"""Cross entropy of a linear layer's logits, with token weights, log-probabilities and entropies, written as its formula."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.reference.cross_entropy import cross_entropy


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -100, reduction: str = "mean",
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None, *, bias: Tensor | None = None,
    token_weights: Tensor | None = None, return_logprobs: bool = False, return_entropy: bool = False,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    logits = F.linear(hidden, weight, bias)
    losses = cross_entropy(logits, targets, ignore_index, "none", label_smoothing, z_loss, softcap)
    counted = (targets != ignore_index).to(losses.dtype)
    weights = counted if token_weights is None else counted * token_weights.to(losses.dtype)
    # Not 0 · weight where a target is ignored: that weight may be anything.
    loss = losses.masked_fill(counted == 0, 0.0) * weights.masked_fill(counted == 0, 0.0)
    if reduction == "mean":
        total = weights.masked_fill(counted == 0, 0.0).sum()
        loss = loss.sum() * torch.where(total == 0, 0.0, 1 / total)
    elif reduction == "sum":
        loss = loss.sum()
    results = [loss]
    if return_logprobs:
        results.append(-cross_entropy(logits, targets, ignore_index, "none", softcap=softcap))
    if return_entropy:
        results.append(_entropy(logits, targets, ignore_index, softcap))
    return tuple(results) if len(results) > 1 else loss


def _entropy(logits: Tensor, targets: Tensor, ignore_index: int, softcap: float | None) -> Tensor:
    classes, ignored = logits.shape[-1], targets == ignore_index
    outside = ((targets < 0) | (targets >= classes)) & ~ignored
    z = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    log_probs = torch.log_softmax(z, -1)
    terms = log_probs.exp() * log_probs.masked_fill(log_probs == -torch.inf, 0.0)
    entropy = -terms.sum(-1) * torch.where(outside, torch.nan, 1.0).to(logits.dtype)
    return entropy.masked_fill(ignored, 0.0)
