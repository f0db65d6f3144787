"""Cross entropy in Triton: one kernel, which reads a row for its statistics, or writes its gradient, or does both.

Doing both, a program holds a row, or walks a long one as rows.py says. Nothing of the size of the logits is stored but
the gradient. A row whose target is ignored is not read.

Lines of 16 bytes are read and written at once. A row of 50257 classes begins anywhere in a line (SHIFTED): columns are
counted from that line's beginning, ``shift`` columns before the row, and what the row has of its first and its last line,
the *ends*, is read and written element by element.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwise.backends.triton.launch import launch
from headwise.backends.triton.rows import (
    LOWEST,
    Block,
    aligned_rows,
    as_rows,
    block_columns,
    empty_rows_like,
    join_softmax,
    long_block,
    online_softmax,
    power_of_two,
    walkers,
)

_SHORTEST_SHIFTED = 1024  # columns: in shorter rows the ends weigh too much


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
def _gradient(
    raw, line, target, highest, factor, at_all, at_target, softcap, HAS_CAP: tl.constexpr, SMOOTH: tl.constexpr
):
    """Gradient of lines of logits [LINES, LINE]; at_target [1, LINE] is taken off the line of column ``target``."""
    LINE: tl.constexpr = raw.shape[1]
    here = line == (target // LINE).to(tl.int32)
    z = _capped(raw.to(tl.float32), softcap, HAS_CAP)
    d = factor * tl.exp(z - highest) - tl.where(here[:, None], at_target, 0.0)
    if SMOOTH:
        d -= at_all
    if HAS_CAP:
        t = z / softcap
        d = d * (1.0 - t * t)
    return d


@triton.jit(do_not_specialize=["rows", "grad_stride", "ignore_index"])
def _cross_entropy(
    logits, targets, row_grads, losses, stats, dlogits, rows, width, logits_stride, grad_stride, ignore_index,
    label_smoothing, z_loss, softcap,
    HAS_CAP: tl.constexpr, SMOOTH: tl.constexpr, STATS: tl.constexpr, GRADIENT: tl.constexpr,
    LINES: tl.constexpr, LINE: tl.constexpr, STAGES: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
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
        following = tl.load(targets + later, mask=later < rows, other=0).to(
            tl.int64
        )  # the next row need not wait for it
        ignored = target == ignore_index
        read = target != ignore_index
        known = (target >= 0) & (target < width) & read
        outside = ((target < 0) | (target >= width)) & read
        if STATS:
            raw_at_target = tl.load(x + shift + target, mask=known, other=0.0).to(tl.float32)
            top = tl.full([LINES], LOWEST, tl.float32)
            total = tl.zeros([LINES], tl.float32)
            plain = tl.zeros([LINES], tl.float32)
            # With a gradient to write, the last block is kept for it, and the others should stay in the cache.
            for block in tl.range(0, blocks - 1 if GRADIENT else blocks, num_stages=STAGES):
                column, inside = _columns(block, shift, width, SHIFTED, LINES, LINE)
                inside = inside & read
                if GRADIENT:
                    z = tl.load(x + column, inside, -float("inf"), eviction_policy="evict_last").to(tl.float32)
                else:
                    z = tl.load(x + column, inside, -float("inf"), eviction_policy="evict_first").to(tl.float32)
                z = tl.where(inside, _capped(z, softcap, HAS_CAP), -float("inf"))
                top, total = online_softmax(z, top, total)
                if SMOOTH:
                    plain += tl.sum(tl.where(inside, z, 0.0), 1)
            if GRADIENT:
                column, inside = _columns(blocks - 1, shift, width, SHIFTED, LINES, LINE)
                inside = inside & read
                held = tl.load(x + column, inside, 0.0, eviction_policy="evict_first")
                z = tl.where(inside, _capped(held.to(tl.float32), softcap, HAS_CAP), -float("inf"))
                top, total = online_softmax(z, top, total)
                if SMOOTH:
                    plain += tl.sum(tl.where(inside, z, 0.0), 1)
            highest, all_of_row = join_softmax(top, total)
            sum_of_row = tl.sum(plain, 0)
            if SHIFTED:
                _, end_column, of_row = _ends(shift, width, LINE)
                of_row = of_row & read
                held_ends = tl.load(x + end_column, of_row, 0.0)
                ends = tl.where(of_row, _capped(held_ends.to(tl.float32), softcap, HAS_CAP), -float("inf"))
                of_ends = online_softmax(ends, tl.full([2], LOWEST, tl.float32), tl.zeros([2], tl.float32))
                highest_end, all_of_ends = join_softmax(of_ends[0], of_ends[1])
                higher = tl.maximum(highest, highest_end)
                all_of_row = all_of_row * tl.exp(highest - higher) + all_of_ends * tl.exp(highest_end - higher)
                highest = higher
                if SMOOTH:
                    sum_of_row += tl.sum(tl.where(of_row, ends, 0.0))
            at_target = _capped(raw_at_target, softcap, HAS_CAP)
            log_total = tl.log(all_of_row)
            loss = (1.0 - label_smoothing) * (log_total + (highest - at_target))
            if SMOOTH:
                loss += label_smoothing * (log_total + (highest - sum_of_row / width))
            lse = highest + log_total
            loss += z_loss * lse * lse
            loss = tl.where(ignored, 0.0, tl.where(outside, float("nan"), loss))
            tl.store(losses + row, loss)
            tl.store(stats + row, highest)
            tl.store(stats + rows + row, all_of_row)
        else:
            highest = tl.load(stats + row)
            all_of_row = tl.load(stats + rows + row)
        if GRADIENT:
            grad = tl.load(row_grads + row * grad_stride).to(tl.float32)
            grad = tl.where(outside, float("nan"), grad)
            factor = grad / all_of_row * (1.0 + 2.0 * z_loss * (highest + tl.log(all_of_row)))
            factor = tl.where(ignored, 0.0, factor)
            highest = tl.where(ignored, 0.0, highest)
            at_all = tl.where(ignored, 0.0, grad * label_smoothing / width)
            at_one = tl.where(ignored, 0.0, grad * (1.0 - label_smoothing))
            target += shift
            at_line = tl.where(inner == target % LINE, at_one, 0.0)[None, :]
            dx = dlogits + row * width
            if SHIFTED:
                dx = dlogits + tl.multiple_of(row * width - shift, LINE)
                end_line, end_column, of_row = _ends(shift, width, LINE)
                if not STATS:
                    held_ends = tl.load(x + end_column, of_row & read, 0.0)
                of_ends = _gradient(
                    held_ends, end_line, target, highest, factor, at_all, at_line, softcap, HAS_CAP, SMOOTH
                )
                tl.store(dx + end_column, of_ends.to(dlogits.dtype.element_ty), of_row)
            if STATS:
                line = (blocks - 1) * LINES + lines
                d = _gradient(held, line, target, highest, factor, at_all, at_line, softcap, HAS_CAP, SMOOTH)
                column, inside = _columns(blocks - 1, shift, width, SHIFTED, LINES, LINE)
                tl.store(dx + column, d.to(dlogits.dtype.element_ty), inside, eviction_policy="evict_first")
            for back in tl.range(1 if STATS else 0, blocks, num_stages=STAGES):
                block = blocks - 1 - back
                column, inside = _columns(block, shift, width, SHIFTED, LINES, LINE)
                raw = tl.load(x + column, inside & read, 0.0, eviction_policy="evict_first")
                line = block * LINES + lines
                d = _gradient(raw, line, target, highest, factor, at_all, at_line, softcap, HAS_CAP, SMOOTH)
                tl.store(dx + column, d.to(dlogits.dtype.element_ty), inside, eviction_policy="evict_first")


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
    dlogits = empty_rows_like(logits)
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
    dlogits = empty_rows_like(logits)
    _launch(row_grads, logits, targets, losses, stats, dlogits, ignore_index, label_smoothing, z_loss, softcap)
    return losses, dlogits


def _block(width: int, forward: bool, backward: bool, shifted: bool, x: tuple[Tensor, int]) -> Block:
    """The best of a sweep on an H200 at 131072 classes."""
    if not (forward and backward):
        elements, warps = (4096, 8) if forward else (8192, 16)
        return long_block(elements, warps, 1, width, x, shifted=shifted)
    block = long_block(32768 // x[0].element_size(), 32, 1, width, x, shifted=shifted)
    if block.line == 1:
        block = Block(min(8192, max(1024, power_of_two(width))), 1, 32, 1)
    return block._replace(warps=min(block.warps, max(4, block.lines * block.line // 256)))


def _shifted(width: int, x: Tensor, stride: int, gradient: bool) -> bool:
    """Do rows begin anywhere in a line, but those of the logits where those of the gradient do?

    Not where the first begins inside one (``logits[1:]``): elements one by one then, as in short rows.
    """
    line = 16 // x.element_size()
    same = not gradient or stride % line == width % line
    return width >= _SHORTEST_SHIFTED and x.data_ptr() % 16 == 0 and same and not aligned_rows(width, (x, stride))


def _programs(rows: int, width: int, both: bool, block: Block, x: Tensor) -> int:
    twice = both and -(-width // block.line) > block.lines  # is a row read twice?
    return walkers(rows, width * x.element_size(), block, x) if twice else rows


def _launch(
    row_grads: Tensor | None, logits: Tensor, targets: Tensor, losses: Tensor | None, stats: Tensor,
    dlogits: Tensor | None, ignore_index: int, label_smoothing: float, z_loss: float, softcap: float | None,
) -> None:  # fmt: skip
    rows, width = targets.numel(), logits.shape[-1]
    if rows == 0:
        return
    x, stride = as_rows(logits)
    grad_stride = 0 if row_grads is None else row_grads.stride(0)
    cap = 1.0 if softcap is None else softcap
    both = losses is not None and dlogits is not None
    shifted = _shifted(width, x, stride, dlogits is not None)
    lines, line, warps, stages = block = _block(width, losses is not None, dlogits is not None, shifted, (x, stride))
    programs = _programs(rows, width, both, block, x)
    launch(
        _cross_entropy, (programs,), (x, targets.contiguous(), row_grads, losses, stats, dlogits),
        (rows, width, stride, grad_stride, ignore_index, label_smoothing, z_loss, cap),
        (softcap is not None, label_smoothing > 0, losses is not None, dlogits is not None, lines, line, stages, shifted),
        warps,
    )  # fmt: skip
