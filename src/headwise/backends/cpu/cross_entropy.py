"""Cross entropy on the CPU: blocks of rows that stay in the cache, written in place, float32 inside.

A row's softmax is ``exp2((z - max(z)) * log2(e)) / total``. exp2 is several times faster here than exp, and the
difference comes first, so that the largest terms, which matter most, are the most exact. Kept for backward are max and
total, not the LSE: at an LSE of 100 its own rounding would cost the gradient two digits. Losses of rows are float64
until they are done: there are few of them, and their terms cancel.
"""

from __future__ import annotations

import math
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.backends.cpu.row_blocks import BLOCK, accumulator, row_blocks, scratch_for, working_copy
from headwise.backends.cpu.threads import in_threads

# Where 2u reaches this, tanh(u) is 1 in float64 too, and exp(2u) is still finite.
_SATURATED = 40.0


class _Options(NamedTuple):
    label_smoothing: float
    z_loss: float
    softcap: float | None

    @property
    def cap(self) -> float:
        """What z in a block has to be multiplied with: a capped block holds tanh(x / c)."""
        return 1.0 if self.softcap is None else self.softcap


class _Targets(NamedTuple):
    """One entry per row."""

    classes: Tensor  # int64, 0 where the row has no class
    ignored: Tensor  # bool
    outside: Tensor  # bool: out of range and not ignored
    some_ignored: bool


def cross_entropy_forward(
    logits: Tensor, targets: Tensor, ignore_index: int, label_smoothing: float, z_loss: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Losses of the rows (N,), and for backward their highest z and their total (2, N)."""
    options = _Options(label_smoothing, z_loss, softcap)
    read = _read_targets(targets, logits.shape[-1], ignore_index)
    stats, sums = _new_stats(logits)
    _sweep(logits, read, options, stats, sums)
    return _losses(logits, read, options, stats, sums), stats


def cross_entropy_backward(
    row_grads: Tensor,
    logits: Tensor,
    targets: Tensor,
    row_stats: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
) -> Tensor:
    dlogits = torch.empty(logits.shape, dtype=logits.dtype)
    read = _read_targets(targets, logits.shape[-1], ignore_index)
    options = _Options(label_smoothing, z_loss, softcap)
    _sweep(logits, read, options, row_stats, None, row_grads, dlogits)
    return dlogits


def cross_entropy_forward_backward(
    row_grads: Tensor,
    logits: Tensor,
    targets: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Losses of the rows (N,), and the gradient of the logits."""
    dlogits = torch.empty(logits.shape, dtype=logits.dtype)
    options = _Options(label_smoothing, z_loss, softcap)
    read = _read_targets(targets, logits.shape[-1], ignore_index)
    stats, sums = _new_stats(logits)
    _sweep(logits, read, options, stats, sums, row_grads, dlogits)
    return _losses(logits, read, options, stats, sums), dlogits


def _read_targets(targets: Tensor, classes: int, ignore_index: int) -> _Targets:
    index = targets.reshape(-1).long()
    ignored = index == ignore_index
    outside = ((index < 0) | (index >= classes)) & ~ignored
    return _Targets(index.masked_fill(ignored | outside, 0), ignored, outside, bool(ignored.any()))


def _new_stats(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Highest z and total of each row (2, N), and the sum of its logits (N,); zeros stay where a row is not read."""
    rows = math.prod(logits.shape[:-1])
    return torch.zeros((2, rows), dtype=accumulator(logits)), torch.zeros(rows, dtype=accumulator(logits))


def _sweep(
    logits: Tensor,
    targets: _Targets,
    options: _Options,
    stats: Tensor,
    sums: Tensor | None,
    row_grads: Tensor | None = None,
    dlogits: Tensor | None = None,
) -> None:
    """One pass over the logits. With ``sums`` it writes stats and sums, without it reads stats; it fills ``dlogits`` if
    that is given."""
    if logits.numel() == 0:
        return
    if dlogits is not None and row_grads is not None:
        dlogits = dlogits.view(-1, logits.shape[-1])
        row_grads = row_grads.masked_fill(targets.outside, torch.nan)

    def work(part: int, parts: int) -> None:
        copy, terms = scratch_for(logits, 2)
        for rows, (block,) in islice(row_blocks(logits), part, None, parts):
            _sweep_block(block, rows, targets, options, stats, sums, row_grads, dlogits, copy, terms)

    in_threads(work, most=-(-logits.numel() // BLOCK))


def _sweep_block(
    block: Tensor,
    rows: slice,
    targets: _Targets,
    options: _Options,
    stats: Tensor,
    sums: Tensor | None,
    row_grads: Tensor | None,
    dlogits: Tensor | None,
    copy: Tensor,
    work: Tensor,
) -> None:
    """`_sweep` on some rows; copy and work are scratch of the size of a block."""
    out = None if dlogits is None else dlogits[rows]
    if targets.some_ignored and targets.ignored[rows].all():
        if out is not None:
            out.zero_()
        return
    terms = out if out is not None and out.dtype == work.dtype else work[: block.shape[0]]
    z = working_copy(block, copy)
    if options.softcap is not None:
        z = _tanh(z, options.softcap, out=copy[: block.shape[0]], work=terms)
    highest, total = stats[0, rows], stats[1, rows]
    if sums is not None:
        torch.amax(z, -1, out=highest)
        if options.label_smoothing:
            torch.sum(z, -1, out=sums[rows])
    torch.sub(z, highest.unsqueeze(-1), out=terms).mul_(options.cap * math.log2(math.e)).exp2_()
    if sums is not None:
        torch.sum(terms, -1, out=total)
    if out is None or row_grads is None:
        return
    grads = row_grads[rows]
    factor = grads / total
    if options.z_loss:
        factor *= 1 + 2 * options.z_loss * _log_sum_exp(stats[:, rows], options).to(factor.dtype)
    if options.label_smoothing:
        everywhere = grads * (-options.label_smoothing / block.shape[-1])
        torch.addcmul(everywhere.unsqueeze(-1), terms, factor.unsqueeze(-1), out=terms)
    else:
        terms.mul_(factor.unsqueeze(-1))
    at_target = grads * (options.label_smoothing - 1)
    terms.scatter_add_(1, targets.classes[rows].unsqueeze(-1), at_target.unsqueeze(-1))
    if options.softcap is not None:
        terms.addcmul_(terms, z.square_(), value=-1)
    if targets.some_ignored:
        terms.masked_fill_(targets.ignored[rows].unsqueeze(-1), 0.0)
    if terms is not out:
        out.copy_(terms)


def _tanh(x: Tensor, softcap: float, out: Tensor, work: Tensor) -> Tensor:
    """tanh(x / softcap) as expm1(2u) / (expm1(2u) + 2): as accurate as torch.tanh, in half its time."""
    torch.div(x, softcap / 2, out=out).clamp_(max=_SATURATED).expm1_()
    return out.div_(torch.add(out, 2.0, out=work))


def _log_sum_exp(stats: Tensor, options: _Options) -> Tensor:
    """In float64, (N,)."""
    highest, total = stats.double()
    return torch.log(total) + options.cap * highest


def _losses(logits: Tensor, targets: _Targets, options: _Options, stats: Tensor, sums: Tensor) -> Tensor:
    classes = logits.shape[-1]
    losses = _log_sum_exp(stats, options)
    if classes > 0 and losses.numel() > 0:
        z = logits.gather(-1, targets.classes.view(*logits.shape[:-1], 1)).view(-1).double()
        if options.softcap is not None:
            z = options.cap * torch.tanh(z / options.cap)
        lse = losses
        losses = (1 - options.label_smoothing) * (lse - z)
        if options.label_smoothing:
            losses += options.label_smoothing * (lse - sums.double() * (options.cap / classes))
        if options.z_loss:
            losses += options.z_loss * lse.square()
    losses.masked_fill_(targets.outside, torch.nan).masked_fill_(targets.ignored, 0.0)
    return losses.to(stats.dtype)
