"""Cross entropy in Triton: one kernel, which reads a row for its statistics, or writes its gradient, or does both.

A program owns a row. Doing both, it goes through the row forwards and then backwards, so that what it read last, which
still lies in the second-level cache, is what it reads first. Nothing of the size of the logits is stored but the gradient.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwise.backends.triton.rows import as_rows, power_of_two


@triton.jit
def _capped(x, softcap, HAS_CAP: tl.constexpr):
    """c · tanh(x / c) by way of exp(-2|u|), which cannot overflow; a polynomial where u is small and digits would go."""
    if HAS_CAP:
        u = x / softcap
        e = tl.exp(-2.0 * tl.abs(u))
        large = (1.0 - e) / (1.0 + e)
        u2 = u * u
        small = tl.abs(u) * (1.0 + u2 * (-0.33333333 + u2 * (0.13333333 + u2 * (-0.053968254 + u2 * 0.021869489))))
        t = tl.where(tl.abs(u) < 0.25, small, large)
        x = softcap * tl.where(u < 0.0, -t, t)
    return x


@triton.jit
def _cross_entropy(
    logits, targets, row_grads, losses, stats, dlogits, rows, width, logits_stride, grad_stride, ignore_index,
    label_smoothing, z_loss, softcap,
    HAS_CAP: tl.constexpr, SMOOTH: tl.constexpr, STATS: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    target = tl.load(targets + row).to(tl.int64)
    ignored = target == ignore_index
    outside = ((target < 0) | (target >= width)) & (target != ignore_index)
    x = logits + row * logits_stride
    blocks = tl.cdiv(width, BLOCK)
    if STATS:
        top = -float("inf")
        total = tl.zeros([BLOCK], tl.float32)  # per lane, relative to the highest logit so far: one exp per logit
        plain = tl.zeros([BLOCK], tl.float32)
        for i in range(0, blocks):
            inside = i * BLOCK + lane < width
            z = tl.load(x + i * BLOCK + lane, mask=inside, other=-float("inf")).to(tl.float32)
            z = tl.where(inside, _capped(z, softcap, HAS_CAP), -float("inf"))
            higher = tl.maximum(top, tl.max(z, 0))
            reference = tl.where(higher == -float("inf"), 0.0, higher)
            total = total * tl.exp(top - reference) + tl.exp(z - reference)
            top = higher
            if SMOOTH:
                plain += tl.where(inside, z, 0.0)
        top = tl.where(top == -float("inf"), 0.0, top)
        all_of_row = tl.sum(total, 0)
        known = (target >= 0) & (target < width)
        at_target = _capped(tl.load(x + target, mask=known, other=0.0).to(tl.float32), softcap, HAS_CAP)
        log_total = tl.log(all_of_row)
        loss = (1.0 - label_smoothing) * (log_total + (top - at_target))
        if SMOOTH:
            loss += label_smoothing * (log_total + (top - tl.sum(plain, 0) / width))
        lse = top + log_total
        loss += z_loss * lse * lse
        loss = tl.where(ignored, 0.0, tl.where(outside, float("nan"), loss))
        tl.store(losses + row, loss)
        tl.store(stats + row, top)
        tl.store(stats + rows + row, all_of_row)
    else:
        top = tl.load(stats + row)
        all_of_row = tl.load(stats + rows + row)
    if GRADIENT:
        grad = tl.load(row_grads + row * grad_stride).to(tl.float32)
        grad = tl.where(outside, float("nan"), grad)
        factor = grad / all_of_row * (1.0 + 2.0 * z_loss * (top + tl.log(all_of_row)))
        at_all = grad * label_smoothing / width
        at_one = grad * (1.0 - label_smoothing)
        for j in range(0, blocks):
            column = (blocks - 1 - j) * BLOCK + lane
            inside = column < width
            raw = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
            z = _capped(raw, softcap, HAS_CAP)
            d = factor * tl.exp(z - top) - at_all - tl.where(column == target, at_one, 0.0)
            if HAS_CAP:
                t = z / softcap
                d = d * (1.0 - t * t)
            d = tl.where(ignored, 0.0, d)
            tl.store(dlogits + row * width + column, d.to(dlogits.dtype.element_ty), mask=inside)


def cross_entropy_forward(
    logits: Tensor, targets: Tensor, ignore_index: int, label_smoothing: float, z_loss: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Losses of the rows (N,), and for backward their highest logit and their total (2, N)."""
    rows = logits.numel() // logits.shape[-1] if logits.shape[-1] else targets.numel()
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    stats = torch.empty((2, rows), dtype=torch.float32, device=logits.device)
    _launch(None, logits, targets, losses, stats, None, ignore_index, label_smoothing, z_loss, softcap)
    return losses, stats


def cross_entropy_backward(
    row_grads: Tensor, logits: Tensor, targets: Tensor, row_stats: Tensor, ignore_index: int, label_smoothing: float,
    z_loss: float, softcap: float | None,
) -> Tensor:  # fmt: skip
    dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    _launch(row_grads, logits, targets, None, row_stats, dlogits, ignore_index, label_smoothing, z_loss, softcap)
    return dlogits


def cross_entropy_forward_backward(
    row_grads: Tensor, logits: Tensor, targets: Tensor, ignore_index: int, label_smoothing: float, z_loss: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Losses of the rows (N,), and the gradient of the logits."""
    rows = targets.numel()
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    stats = torch.empty((2, rows), dtype=torch.float32, device=logits.device)
    dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    _launch(row_grads, logits, targets, losses, stats, dlogits, ignore_index, label_smoothing, z_loss, softcap)
    return losses, dlogits


def _launch(
    row_grads: Tensor | None, logits: Tensor, targets: Tensor, losses: Tensor | None, stats: Tensor,
    dlogits: Tensor | None, ignore_index: int, label_smoothing: float, z_loss: float, softcap: float | None,
) -> None:  # fmt: skip
    rows, width = targets.numel(), logits.shape[-1]
    if rows == 0:
        return
    x = as_rows(logits) if logits.numel() else logits.reshape(rows, width)
    block = min(4096, max(128, power_of_two(width)))
    _cross_entropy[(rows,)](
        x, targets.reshape(-1).contiguous(), row_grads, losses, stats, dlogits, rows, width, x.stride(0),
        0 if row_grads is None else row_grads.stride(0), ignore_index, label_smoothing, z_loss,
        1.0 if softcap is None else softcap, softcap is not None, label_smoothing > 0, losses is not None,
        dlogits is not None, block, num_warps=8,
    )  # fmt: skip
