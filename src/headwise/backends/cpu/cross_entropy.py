"""Cross entropy on the CPU: one pass over the logits, in blocks of rows (`loss_rows.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwise.backends.cpu.loss_rows import RowGrads, Sweep, Targets, empty_sums, read_targets
from headwise.backends.cpu.memory import huge_pages
from headwise.layout import statistics_dtype

if TYPE_CHECKING:
    from headwise.ops.cross_entropy import CrossEntropy, CrossEntropyBackward


def cross_entropy_forward(args: CrossEntropy) -> tuple[Tensor, Tensor]:
    sweep, _ = _sweep(args, None, None)
    return _loss(sweep, args), sweep.stats


def cross_entropy_backward(args: CrossEntropyBackward) -> Tensor:
    return _sweep(args.forward, args.row_stats, args.grad)[1]


def cross_entropy_forward_backward(args: CrossEntropy) -> tuple[Tensor, Tensor]:
    sweep, dlogits = _sweep(args, None, torch.ones(args.targets.shape if args.reduction == "none" else ()))
    return _loss(sweep, args), dlogits


def _sweep(args: CrossEntropy, stats: Tensor | None, grad: Tensor | None) -> tuple[Sweep, Tensor]:
    """Without stats it computes them; with the gradient of the loss it computes dlogits."""
    logits, count, classes = args.logits, args.targets.numel(), args.logits.shape[-1]
    targets, dtype = read_targets(args.targets, args.ignore_index, classes), statistics_dtype(logits.dtype)
    sums, grads = None, None
    if stats is None:
        stats, sums = torch.zeros((2, count), dtype=dtype), empty_sums(count, dtype)
    if grad is not None:
        of_rows = grad.to(dtype) / _counted(targets) if args.reduction == "mean" else grad.to(dtype)
        of_rows = of_rows.expand(args.targets.shape).reshape(-1)
        grads = RowGrads(of_rows.masked_fill(targets.outside, torch.nan))
    dlogits = huge_pages(torch.empty((0,) if grad is None else logits.shape, dtype=logits.dtype))
    sweep = Sweep(args, classes, targets, stats, sums, grads)
    sweep.run(logits, None if grad is None else dlogits)
    return sweep, dlogits


def _counted(targets: Targets) -> Tensor:
    return (~targets.ignored).sum().clamp(min=1)


def _loss(sweep: Sweep, args: CrossEntropy) -> Tensor:
    losses = sweep.losses()
    if args.reduction == "none":
        # A copy: a returned view could not be written to.
        return losses.view(args.targets.shape).to(sweep.stats.dtype, copy=True)
    total = losses.sum() / _counted(sweep.targets) if args.reduction == "mean" else losses.sum()
    return total.to(sweep.stats.dtype)
