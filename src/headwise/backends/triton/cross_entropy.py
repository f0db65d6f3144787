"""Cross entropy in Triton: one kernel reads a row for its statistics, or writes its gradient, or does both.

With "mean" or "sum" a second kernel adds the rows' losses in a fixed order; where a gradient needs the number of
targets that are not ignored, the same kernel counts them first. Nothing of the size of the logits is stored but the
gradient. A row whose target is ignored is not read.

Lines of 16 bytes are read and written at once. A row of 50257 classes begins anywhere in a line (SHIFTED): columns
are counted from that line's beginning, ``shift`` columns before the row, and the elements of the row in its first and
its last line, the *ends*, are read and written one by one. Blocks and passes: row_tiling.py.

linear_cross_entropy runs the same kernel on chunks of logits: float32, with room after each row (PADDED) so that all
lines are whole, the gradient in another dtype and place (WINDOW); part of the classes in a backward; weights, log-
probabilities, entropies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwise.backends.triton.blocks import power_of_two
from headwise.backends.triton.row_tiling import (
    LOWEST,
    Block,
    Rows,
    aligned_rows,
    as_rows,
    block_columns,
    combine_softmax,
    long_block,
    most_warps,
    online_softmax,
    persistent_programs,
    reshaped,
)

if TYPE_CHECKING:
    from headwise.backends.triton.gpu import Gpu
    from headwise.ops.cross_entropy import CrossEntropy, CrossEntropyBackward

_SHORTEST_SHIFTED = 1024  # columns: in shorter rows the ends weigh too much
_REDUCED = 4096  # rows that the reduction takes at a time
FARTHEST = tl.constexpr(-1.0e4)  # differences below it weigh nothing in an entropy; -inf would make 0 · inf of it
ROOM = 64  # elements: rows of chunks of logits begin at multiples of it


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
def _columns(block, shift, width, SHIFTED: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr):
    """Columns [LINES, LINE] of a block, and which lines [LINES, 1] are the row's throughout."""
    column, inside = block_columns(block, width, LINES, LINE)
    if SHIFTED:
        first = (block * LINES + tl.arange(0, LINES)) * LINE
        inside = ((first >= shift) & (first + LINE <= shift + width))[:, None]
    return column, inside


@triton.jit
def _ends(shift, width, LINE: tl.constexpr):
    """The first and the last line [2] of a row, their columns [2, LINE], and those of them that are the row's.

    Lines that are the row's throughout are not counted. A row has two lines at least.
    """
    line = tl.where(tl.arange(0, 2) == 0, 0, (shift + width) // LINE).to(tl.int32)
    column = line[:, None] * LINE + tl.arange(0, LINE)[None, :]
    inside = (column >= shift) & (column < shift + width) & ((line > 0) | (shift > 0))[:, None]
    return line, column, inside


@triton.jit
def _online(z, maxima, totals, spreads, ENTROPY: tl.constexpr):
    """As `online_softmax`, and for an entropy the running sums of exp(z - maximum) (z - maximum)."""
    higher, totals_now = online_softmax(z, maxima, totals)
    if ENTROPY:
        down = tl.maximum(maxima - higher, FARTHEST)
        u = tl.maximum(z - higher[:, None], FARTHEST)
        spreads = tl.exp(down) * (spreads + totals * down) + tl.sum(tl.exp(u) * u, 1)
    return higher, totals_now, spreads


@triton.jit
def _window(dlogits, row, block, width, stride, COLUMNS: tl.constexpr, WINDOW: tl.constexpr):
    """Where a block of a row's gradient lies: all rows of WINDOW columns, then all rows of the next; ``stride`` a column.

    The last window is narrower. COLUMNS divide WINDOW, or there is one window. To be added: the column.
    """
    padded = tl.cdiv(width, 64) * 64
    first = tl.full((), 0, tl.int64) + block * COLUMNS // WINDOW * WINDOW
    here = tl.minimum(padded - first, WINDOW)
    return dlogits + tl.multiple_of(first * stride + row * here - first, 16)


@triton.jit
def _gradient(
    raw, line, target, highest, factor, tilt, at_all, at_target, softcap, HAS_CAP: tl.constexpr, SMOOTH: tl.constexpr,
    TILTED: tl.constexpr,
):  # fmt: skip
    """Gradient of lines of logits [LINES, LINE]; at_target [1, LINE] is taken off the line of column ``target``."""
    LINE: tl.constexpr = raw.shape[1]
    here = line == (target // LINE).to(tl.int32)
    z = _capped(raw.to(tl.float32), softcap, HAS_CAP)
    if TILTED:
        u = tl.maximum(z - highest, FARTHEST)
        d = (factor - tilt * u) * tl.exp(u) - tl.where(here[:, None], at_target, 0.0)
    else:
        d = factor * tl.exp(z - highest) - tl.where(here[:, None], at_target, 0.0)
    if SMOOTH:
        d -= at_all
    if HAS_CAP:
        t = z / softcap
        d = d * (1.0 - t * t)
    return d


@triton.jit(do_not_specialize=["rows", "grad_stride", "ignore_index", "first_class", "stats_stride", "first_row"])
def _cross_entropy(
    logits, targets, grads, count, losses, stats, dlogits, weights, logprobs, entropies, logprob_grads, entropy_grads,
    rows, width, logits_stride, grad_stride, ignore_index, label_smoothing, z_loss, softcap,
    classes, first_class, stats_stride, dlogits_stride, first_row,
    HAS_CAP: tl.constexpr, SMOOTH: tl.constexpr, STATS: tl.constexpr, GRADIENT: tl.constexpr,
    LINES: tl.constexpr, LINE: tl.constexpr, SHIFTED: tl.constexpr, PADDED: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    ENTROPY: tl.constexpr = STATS and entropies is not None
    TILTED: tl.constexpr = entropy_grads is not None
    inner = tl.arange(0, LINE)
    lines = tl.arange(0, LINES)
    blocks = tl.maximum(tl.cdiv(tl.cdiv(width, LINE), LINES), 1)  # of whole lines a shifted row has no more
    first = tl.program_id(0)
    following = tl.load(targets + first).to(tl.int64)
    for i in range(first, rows, tl.num_programs(0)):
        row = tl.full((), 0, tl.int64) + i
        x = logits + row * logits_stride
        shift = tl.full((), 0, tl.int32)
        if SHIFTED:
            shift = (row * logits_stride % LINE).to(tl.int32)
            x = logits + tl.multiple_of(row * logits_stride - shift, LINE)
        target = following
        later = row + tl.num_programs(0)
        following = tl.load(targets + later, mask=later < rows, other=0).to(tl.int64)  # the next row need not wait
        ignored = target == ignore_index
        read = target != ignore_index
        known = (target >= 0) & (target < classes) & read
        outside = ((target < 0) | (target >= classes)) & read
        if STATS:
            raw_at_target = tl.load(x + shift + target, mask=known, other=0.0).to(tl.float32)
            maxima = tl.full([LINES], LOWEST, tl.float32)
            totals = tl.zeros([LINES], tl.float32)
            spreads = tl.zeros([LINES], tl.float32)
            sums = tl.zeros([LINES], tl.float32)  # of the logits themselves, for label smoothing
            # With a gradient to write, the last block is kept for it, and the others should stay in the cache.
            for block in tl.range(0, blocks - 1 if GRADIENT else blocks, num_stages=1):
                column, inside = _columns(block, shift, width, SHIFTED, LINES, LINE)
                inside = inside & read
                if GRADIENT:
                    z = tl.load(x + column, inside, -float("inf"), eviction_policy="evict_last").to(tl.float32)
                else:
                    z = tl.load(x + column, inside, -float("inf"), eviction_policy="evict_first").to(tl.float32)
                if PADDED:
                    inside = inside & (column < width)
                z = tl.where(inside, _capped(z, softcap, HAS_CAP), -float("inf"))
                maxima, totals, spreads = _online(z, maxima, totals, spreads, ENTROPY)
                if SMOOTH:
                    sums += tl.sum(tl.where(inside, z, 0.0), 1)
            if GRADIENT:
                column, inside = _columns(blocks - 1, shift, width, SHIFTED, LINES, LINE)
                inside = inside & read
                held = tl.load(x + column, inside, 0.0, eviction_policy="evict_first")
                if PADDED:
                    inside = inside & (column < width)
                z = tl.where(inside, _capped(held.to(tl.float32), softcap, HAS_CAP), -float("inf"))
                maxima, totals, spreads = _online(z, maxima, totals, spreads, ENTROPY)
                if SMOOTH:
                    sums += tl.sum(tl.where(inside, z, 0.0), 1)
            highest, denominator = combine_softmax(maxima, totals)
            sum_of_row = tl.sum(sums, 0)
            if SHIFTED:
                _, end_column, of_row = _ends(shift, width, LINE)
                of_row = of_row & read
                held_ends = tl.load(x + end_column, of_row, 0.0)
                ends = tl.where(of_row, _capped(held_ends.to(tl.float32), softcap, HAS_CAP), -float("inf"))
                maxima2, totals2 = online_softmax(ends, tl.full([2], LOWEST, tl.float32), tl.zeros([2], tl.float32))
                highest_end, of_ends = combine_softmax(maxima2, totals2)
                higher = tl.maximum(highest, highest_end)
                denominator = denominator * tl.exp(highest - higher) + of_ends * tl.exp(highest_end - higher)
                highest = higher
                if SMOOTH:
                    sum_of_row += tl.sum(tl.where(of_row, ends, 0.0))
            at_target = _capped(raw_at_target, softcap, HAS_CAP)
            log_denominator = tl.log(denominator)
            if logprobs is not None:
                logprob = at_target - highest - log_denominator
                tl.store(logprobs + row, tl.where(ignored, 0.0, tl.where(outside, float("nan"), logprob)))
            if ENTROPY:
                down = tl.maximum(maxima - highest, FARTHEST)
                spread = tl.sum(tl.exp(down) * (spreads + totals * down), 0)
                entropy = log_denominator - spread / denominator
                tl.store(entropies + row, tl.where(ignored, 0.0, tl.where(outside, float("nan"), entropy)))
            loss = (1.0 - label_smoothing) * (log_denominator + (highest - at_target))
            if SMOOTH:
                loss += label_smoothing * (log_denominator + (highest - sum_of_row / width))
            lse = highest + log_denominator
            loss += z_loss * lse * lse
            if weights is not None:
                loss *= tl.load(weights + row).to(tl.float32)
            loss = tl.where(ignored, 0.0, tl.where(outside, float("nan"), loss))
            tl.store(losses + row, loss)
            if stats is not None:
                tl.store(stats + row, highest)
                tl.store(stats + stats_stride + row, denominator)
        else:
            highest = tl.load(stats + row)
            denominator = tl.load(stats + stats_stride + row)
        if GRADIENT:
            grad = tl.full((), 1.0, tl.float32)
            if grads is not None:
                grad = tl.load(grads + row * grad_stride).to(tl.float32)
            if count is not None:
                grad = grad / tl.load(count)
            if weights is not None:
                grad *= tl.load(weights + row).to(tl.float32)
            grad = tl.where(outside, float("nan"), grad)
            factor = grad / denominator * (1.0 + 2.0 * z_loss * (highest + tl.log(denominator)))
            at_one = grad * (1.0 - label_smoothing)
            tilt = tl.full((), 0.0, tl.float32)
            if logprob_grads is not None:
                of_logprob = tl.load(logprob_grads + row).to(tl.float32)
                factor -= of_logprob / denominator
                at_one -= of_logprob
            if TILTED:
                tilt = tl.load(entropy_grads + row).to(tl.float32) / denominator
                factor -= tilt * (tl.load(entropies + row) - tl.log(denominator))
                tilt = tl.where(ignored, 0.0, tilt)
            factor = tl.where(ignored, 0.0, factor)
            highest = tl.where(ignored, 0.0, highest)
            at_all = tl.where(ignored, 0.0, grad * label_smoothing / classes)
            target -= first_class
            at_one = tl.where(ignored | (target < 0) | (target >= width), 0.0, at_one)
            target += shift
            at_line = tl.where(inner == target % LINE, at_one, 0.0)[None, :]
            dx = dlogits + row * dlogits_stride
            if SHIFTED:
                dx = dlogits + tl.multiple_of(row * width - shift, LINE)
                end_line, end_column, of_row = _ends(shift, width, LINE)
                if not STATS:
                    held_ends = tl.load(x + end_column, of_row & read, 0.0)
                d_ends = _gradient(
                    held_ends,
                    end_line,
                    target,
                    highest,
                    factor,
                    tilt,
                    at_all,
                    at_line,
                    softcap,
                    HAS_CAP,
                    SMOOTH,
                    TILTED,
                )
                tl.store(dx + end_column, d_ends.to(dlogits.dtype.element_ty), of_row)
            if STATS:
                line = (blocks - 1) * LINES + lines
                d = _gradient(
                    held, line, target, highest, factor, tilt, at_all, at_line, softcap, HAS_CAP, SMOOTH, TILTED
                )
                column, inside = _columns(blocks - 1, shift, width, SHIFTED, LINES, LINE)
                if WINDOW:
                    dx = _window(dlogits, row + first_row, blocks - 1, width, dlogits_stride, LINES * LINE, WINDOW)
                tl.store(dx + column, d.to(dlogits.dtype.element_ty), inside, eviction_policy="evict_first")
            for back in tl.range(1 if STATS else 0, blocks, num_stages=1):
                block = blocks - 1 - back
                column, inside = _columns(block, shift, width, SHIFTED, LINES, LINE)
                raw = tl.load(x + column, inside & read, 0.0, eviction_policy="evict_first")
                line = block * LINES + lines
                d = _gradient(
                    raw, line, target, highest, factor, tilt, at_all, at_line, softcap, HAS_CAP, SMOOTH, TILTED
                )
                if WINDOW:
                    dx = _window(dlogits, row + first_row, block, width, dlogits_stride, LINES * LINE, WINDOW)
                tl.store(dx + column, d.to(dlogits.dtype.element_ty), inside, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["rows", "ignore_index"])
def _reduce(losses, targets, weights, loss, count, rows, ignore_index, MEAN: tl.constexpr, BLOCK: tl.constexpr):
    """One program: the loss from those of the rows, and what a mean divides by.

    That is the number of targets that are not ignored, at least 1; or the sum of their weights, inf in place of 0, so that
    loss and gradients are 0. What is None is not needed.
    """
    totals = tl.zeros([BLOCK], tl.float32)
    counts = tl.zeros([BLOCK], tl.int32)
    of_weights = tl.zeros([BLOCK], tl.float32)
    for first in range(0, rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        if losses is not None:
            totals += tl.load(losses + row, mask=row < rows, other=0.0)
        if targets is not None:
            target = tl.load(targets + row, mask=row < rows, other=0).to(tl.int64)
            counts += ((target != ignore_index) & (row < rows)).to(tl.int32)
            if weights is not None:
                weight = tl.load(weights + row, mask=row < rows, other=0.0).to(tl.float32)
                of_weights += tl.where(target != ignore_index, weight, 0.0)
    counted = tl.maximum(tl.sum(counts, 0), 1).to(tl.float32)
    if weights is not None:
        counted = tl.sum(of_weights, 0)
        counted = tl.where(counted == 0.0, float("inf"), counted)
    if count is not None:
        tl.store(count, counted)
    if loss is not None:
        total = tl.sum(totals, 0)
        tl.store(loss, total / counted if MEAN else total)


def cross_entropy_forward(gpu: Gpu, args: CrossEntropy) -> tuple[Tensor, Tensor]:
    """The loss, and for backward the highest logit and the softmax denominator of each row (2, N)."""
    args = args._replace(targets=gpu.contiguous(args.targets))
    losses, stats = _empty_losses(gpu, args), gpu.empty((2, args.targets.numel()), torch.float32)
    launch_rows(gpu, args, _rows_of(gpu, args), LossRows(args.targets, losses=losses, stats=stats))
    return reduced(gpu, args, losses, args.targets), stats


def cross_entropy_backward(gpu: Gpu, args: CrossEntropyBackward) -> Tensor:
    forward = args.forward._replace(targets=gpu.contiguous(args.forward.targets))
    dlogits = gpu.empty(forward.logits.shape, forward.logits.dtype)
    count = divisor(gpu, forward, forward.targets)
    of_rows = LossRows(forward.targets, grads=args.grad, divided_by=count, stats=args.row_stats, dlogits=dlogits)
    launch_rows(gpu, forward, _rows_of(gpu, forward), of_rows)
    return dlogits


def cross_entropy_forward_backward(gpu: Gpu, args: CrossEntropy) -> tuple[Tensor, Tensor]:
    """The loss and the gradient of the logits."""
    args = args._replace(targets=gpu.contiguous(args.targets))
    losses, dlogits = _empty_losses(gpu, args), gpu.empty(args.logits.shape, args.logits.dtype)
    of_rows = LossRows(args.targets, divided_by=divisor(gpu, args, args.targets), losses=losses, dlogits=dlogits)
    launch_rows(gpu, args, _rows_of(gpu, args), of_rows)
    return reduced(gpu, args, losses, args.targets), dlogits


def _rows_of(gpu: Gpu, args: CrossEntropy) -> LogitRows:
    return LogitRows(as_rows(gpu, args.logits), args.logits.shape[-1], args.logits.shape[-1])


def _empty_losses(gpu: Gpu, args: CrossEntropy) -> Tensor:
    """One per row: the result itself if nothing is reduced."""
    return gpu.empty(args.targets.shape if args.reduction == "none" else (args.targets.numel(),), torch.float32)


def reduced(gpu: Gpu, args: Any, losses: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """The loss from those of the rows; weights: what a mean divides by the sum of."""
    if args.reduction == "none":
        return losses
    if losses.numel() == 0:
        return gpu.zeros((), torch.float32)
    loss, mean = gpu.empty((), torch.float32), args.reduction == "mean"
    tensors = (losses, targets if mean else None, weights if mean else None, loss, None)
    gpu.launch(_reduce, (1,), tensors, (losses.numel(), args.ignore_index), (mean, _REDUCED), warps=16)
    return loss


def divisor(gpu: Gpu, args: Any, targets: Tensor, weights: Tensor | None = None) -> Tensor | None:
    """What a mean divides by; None for other reductions."""
    rows = targets.numel()
    if args.reduction != "mean" or rows == 0:
        return None
    count, numbers = gpu.empty((), torch.float32), (rows, args.ignore_index)
    gpu.launch(_reduce, (1,), (None, targets, weights, None, count), numbers, (True, _REDUCED), warps=16)
    return count


def _block(
    gpu: Gpu, width: int, forward: bool, backward: bool, shifted: bool, padded: bool, x: Rows, window: int
) -> Block:
    """The best of a sweep on an H200 at 131072 classes; for padded rows, which have more to do, what spills nothing."""
    if padded:
        elements, warps = (min(8192, window or 8192), 32) if backward else (4096, 8)
        block = long_block(gpu, elements, warps, width, x, shifted=True)
        return block._replace(warps=min(block.warps, max(4, block.columns // 256)))
    if not (forward and backward):
        elements, warps = (4096, 8) if forward else (8192, 16)
        return long_block(gpu, elements, warps, width, x, shifted=shifted)
    block = long_block(gpu, 32768 // x.tensor.element_size(), 32, width, x, shifted=shifted)
    if block.line == 1:
        block = Block(min(8192, max(1024, power_of_two(width))), 1, most_warps(gpu))
    return block._replace(warps=min(block.warps, max(4, block.columns // 256)))


def _shifted(gpu: Gpu, width: int, x: Rows, gradient: bool) -> bool:
    """Do rows begin anywhere in a line, but those of the logits where those of the gradient do?

    Not where the first begins inside one (``logits[1:]``): elements one by one then, as in short rows.
    """
    line = 16 // x.tensor.element_size()
    same = not gradient or x.stride % line == width % line
    return width >= _SHORTEST_SHIFTED and gpu.aligned(x.tensor) and same and not aligned_rows(gpu, width, x)


class LogitRows(NamedTuple):
    """Logits of rows: all classes, or, where only the gradient is wanted, ``width`` of them from ``first_class`` on."""

    x: Rows
    width: int
    classes: int
    first_class: int = 0
    padded: bool = (
        False  # rows, and those of the gradient, begin at multiples of ROOM elements and have room up to the next
    )


class LossRows(NamedTuple):
    """What the kernel reads and writes beside the logits. What is None is not there."""

    targets: Tensor  # (N,)
    grads: Tensor | None = None  # of the loss, or of each row's loss; None: 1
    divided_by: Tensor | None = None  # what they are divided by; None: nothing
    losses: Tensor | None = None  # (N,): they are written, and stats
    stats: Tensor | None = None  # (2, N), perhaps part of more rows; written with losses, read otherwise
    dlogits: Tensor | None = None
    weights: Tensor | None = None  # (N,)
    logprobs: Tensor | None = None  # (N,): written
    entropies: Tensor | None = None  # (N,): written with losses, read otherwise
    logprob_grads: Tensor | None = None  # (N,)
    entropy_grads: Tensor | None = None  # (N,)
    window: int = 0  # columns of the gradient that lie together, all rows of them (see `_window`); 0: rows lie whole
    dlogits_stride: int | None = None  # from row to row, or for each column of a window; None: as wide as the logits
    first_row: int = 0  # of these among all rows of a window


def launch_rows(gpu: Gpu, args: Any, logits: LogitRows, at: LossRows) -> None:
    """args: has the options of the loss."""
    rows, (x, width, classes, first_class, padded) = at.targets.numel(), logits
    if rows == 0:
        return
    forward, backward, grads, grad_stride = at.losses is not None, at.dlogits is not None, at.grads, 0
    if grads is not None and grads.dim() > 0:
        grads = reshaped(gpu, grads, -1)
        grad_stride = grads.stride(0)
    shifted = not padded and _shifted(gpu, width, x, backward)
    block = _block(gpu, width, forward, backward, shifted, padded, x, at.window)
    programs = rows
    if forward and backward and triton.cdiv(width, block.line) > block.lines:  # two passes
        programs = persistent_programs(gpu, rows, width * x.tensor.element_size(), block)
    if at.window % block.columns and width > block.columns:
        raise RuntimeError(f"windows of {at.window} columns are not multiples of blocks of {block.columns}")
    tensors = (
        x.tensor, at.targets, grads, at.divided_by, at.losses, at.stats, at.dlogits, at.weights, at.logprobs, at.entropies,
        at.logprob_grads, at.entropy_grads,
    )  # fmt: skip
    stats_stride = rows if at.stats is None else at.stats.stride(0)
    numbers = (
        rows, width, x.stride, grad_stride, args.ignore_index, args.label_smoothing, args.z_loss, args.softcap or 1.0,
        classes, first_class, stats_stride, width if at.dlogits_stride is None else at.dlogits_stride, at.first_row,
    )  # fmt: skip
    constants = (
        args.softcap is not None, args.label_smoothing > 0, forward, backward, *block.constants, shifted,
        padded and width % 16 > 0, at.window,
    )  # fmt: skip
    gpu.launch(_cross_entropy, (programs,), tensors, numbers, constants, warps=block.warps)
