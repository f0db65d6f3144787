"""Softmax statistics, losses and gradients of rows of logits on the CPU: what cross_entropy and linear_cross_entropy share.

Cache-sized blocks of rows, written in place, float32 inside. A row's softmax is ``exp2((z - max(z)) * log2(e)) / total``.
exp2 is several times faster here than exp, and taking the difference first keeps the largest terms, which matter most, the
most exact. The row statistics for backward are max and total, not the lse: at an lse of 100 its rounding would cost the
gradient two digits. Losses are float64 until they are reduced: there are few of them, and their terms cancel.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from headwise.backends.cpu.row_blocks import BLOCK, Scratch, row_blocks, scratch_for, working_copy
from headwise.backends.cpu.threads import Shared, in_threads

if TYPE_CHECKING:
    from headwise.ops.cross_entropy import CrossEntropy
    from headwise.ops.linear_cross_entropy import LinearCrossEntropy

# Where 2u reaches this, tanh(u) is 1 in float64 too, and exp(2u) is still finite.
_SATURATED = 40.0
# Differences below it weigh nothing in an entropy; -inf would make 0 · inf of it.
_FARTHEST = -1e4


class Targets(NamedTuple):
    """One entry per row."""

    classes: Tensor  # int64, 0 where the row has no class
    ignored: Tensor  # bool
    outside: Tensor  # bool: out of range and not ignored
    some_ignored: bool


def read_targets(targets: Tensor, ignore_index: int, classes: int) -> Targets:
    # In int64, so that an ignore_index beyond the targets' own dtype does not wrap around to one of them.
    index = targets.reshape(-1).long()
    ignored = index == ignore_index
    outside = ((index < 0) | (index >= classes)) & ~ignored
    return Targets(index.masked_fill(ignored | outside, 0), ignored, outside, bool(ignored.any()))


def part_of_targets(targets: Targets, rows: slice) -> Targets:
    ignored = targets.ignored[rows]
    return Targets(targets.classes[rows], ignored, targets.outside[rows], bool(ignored.any()))


class Sums(NamedTuple):
    """What a forward gathers beside the row statistics, one entry per row."""

    at_target: Tensor  # the logit of the target, as given
    plain: Tensor  # of z, for label smoothing
    weighted: Tensor | None  # of exp(z - highest) (z - highest), for the entropy


class RowGrads(NamedTuple):
    """The gradients that arrive at each row; NaN where the target is out of range."""

    loss: Tensor
    logprob: Tensor | None = None
    entropy: Tensor | None = None
    entropies: Tensor | None = None  # of the rows themselves, where their gradient is given

    def part(self, rows: slice) -> RowGrads:
        return RowGrads(*(None if x is None else x[rows] for x in self))  # type: ignore[arg-type]


class Sweep(NamedTuple):
    """One pass over logits (N, columns), and what it reads and writes.

    They have all classes of a row, or, where only the gradient is wanted, some: from ``first_class`` on.
    """

    options: CrossEntropy | LinearCrossEntropy
    classes: int
    targets: Targets
    stats: Tensor  # (2, N): highest z and total of each row; zeros where a row is not read
    sums: Sums | None  # None in a backward, which knows the stats
    grads: RowGrads | None
    first_class: int = 0

    @property
    def cap(self) -> float:
        """What z in a block has to be multiplied with: under a softcap c a block holds tanh(x / c)."""
        return 1.0 if self.options.softcap is None else self.options.softcap

    def lse(self, rows: slice) -> Tensor:
        """In float64."""
        highest, total = self.stats[:, rows].double()
        return torch.log(total) + self.cap * highest

    def run(self, logits: Tensor, dlogits: Tensor | None) -> None:
        """All rows. dlogits: written where gradients are given; contiguous, and perhaps the logits themselves."""

        blocks = Shared(row_blocks(logits))

        def work(thread: int, threads: int) -> None:
            copy, scratch = scratch_for(logits, 2)
            for rows, (block,) in blocks:
                out = None if dlogits is None else dlogits.view(-1, block.shape[-1])[rows]
                self.block(block, rows, out, copy, scratch)

        in_threads(work, most=-(-logits.numel() // BLOCK))

    def block(self, block: Tensor, rows: slice, out: Tensor | None, copy: Scratch, scratch: Scratch) -> None:
        """Do some rows; copy and scratch are of the size of a block."""
        options, targets = self.options, self.targets
        if targets.some_ignored and targets.ignored[rows].all():
            if out is not None:
                out.zero_()
            return
        if self.sums is not None:
            self.sums.at_target[rows] = block.gather(1, targets.classes[rows].unsqueeze(-1)).squeeze(-1).to(copy.dtype)
        terms = out if out is not None and out.dtype == scratch.dtype else scratch[: block.shape[0]]
        # An entropy needs z once more, after the terms were written, perhaps over the logits.
        of_entropy = self.grads is not None and self.grads.entropy is not None
        z = copy[: block.shape[0]].copy_(block) if of_entropy else working_copy(block, copy)
        if options.softcap is not None:
            z = _tanh(z, options.softcap, out=copy[: block.shape[0]], scratch=terms)
        highest, total = self.stats[0, rows], self.stats[1, rows]
        if self.sums is not None:
            torch.amax(z, -1, out=highest)
            if options.label_smoothing:
                torch.sum(z, -1, out=self.sums.plain[rows])
        torch.sub(z, highest.unsqueeze(-1), out=terms).mul_(self.cap * math.log2(math.e)).exp2_()
        if self.sums is not None:
            torch.sum(terms, -1, out=total)
            if self.sums.weighted is not None:
                torch.sum(terms * self._differences(z, highest), -1, out=self.sums.weighted[rows])
        if out is None or self.grads is None:
            return
        self._gradient(rows, terms, z, self.grads.part(rows))
        if targets.some_ignored:
            terms.masked_fill_(targets.ignored[rows].unsqueeze(-1), 0.0)
        if terms is not out:
            out.copy_(terms)

    def _differences(self, z: Tensor, highest: Tensor) -> Tensor:
        """z less the highest of the row, in units of the logits."""
        return torch.sub(z, highest.unsqueeze(-1)).mul_(self.cap).clamp_(min=_FARTHEST)

    def _gradient(self, rows: slice, terms: Tensor, z: Tensor, grads: RowGrads) -> None:
        """terms: exp(z - highest) before, the gradient of the logits after. z may be overwritten."""
        options, (highest, total) = self.options, self.stats[:, rows]
        factor = grads.loss
        if options.z_loss:
            factor = factor * (1 + 2 * options.z_loss * self.lse(rows).to(factor.dtype))
        at_target = grads.loss * (options.label_smoothing - 1)
        if grads.logprob is not None:
            factor, at_target = factor - grads.logprob, at_target + grads.logprob
        if grads.entropy is not None and grads.entropies is not None:
            factor = factor - grads.entropy * (grads.entropies - torch.log(total))
            slope = (grads.entropy / total).unsqueeze(-1)
            differences = self._differences(z, highest)
            terms.mul_(torch.addcmul((factor / total).unsqueeze(-1), differences, slope, value=-1))
        elif not options.label_smoothing:
            terms.mul_((factor / total).unsqueeze(-1))
        if options.label_smoothing:
            everywhere = (grads.loss * (-options.label_smoothing / self.classes)).unsqueeze(-1)
            if grads.entropy is not None:
                terms.add_(everywhere)
            else:
                torch.addcmul(everywhere, terms, (factor / total).unsqueeze(-1), out=terms)
        column = self.targets.classes[rows] - self.first_class
        if self.first_class or terms.shape[1] < self.classes:
            here = (column >= 0) & (column < terms.shape[1])
            column, at_target = column.where(here, 0), at_target.where(here, 0.0)
        terms.scatter_add_(1, column.unsqueeze(-1), at_target.unsqueeze(-1))
        if options.softcap is not None:
            terms.addcmul_(terms, z.square_(), value=-1)

    def losses(self) -> Tensor:
        """Of all rows, in float64: NaN where the target is out of range, 0 where it is ignored."""
        options, lse = self.options, self.lse(slice(None))
        losses = lse
        if self.classes > 0 and self.sums is not None:
            losses = (1 - options.label_smoothing) * (lse - self.z_of_target())
            if options.label_smoothing:
                losses += options.label_smoothing * (lse - self.sums.plain.double() * (self.cap / self.classes))
            if options.z_loss:
                losses += options.z_loss * lse.square()
        return self.of_counted(losses)

    def z_of_target(self) -> Tensor:
        assert self.sums is not None
        z = self.sums.at_target.double()
        return z if self.options.softcap is None else self.cap * torch.tanh(z / self.cap)

    def logprobs(self) -> Tensor:
        return self.of_counted(self.z_of_target() - self.lse(slice(None)))

    def entropies(self) -> Tensor:
        assert self.sums is not None
        assert self.sums.weighted is not None
        total = self.stats[1].double()
        return self.of_counted(torch.log(total) - self.sums.weighted.double() / total)

    def of_counted(self, values: Tensor) -> Tensor:
        return values.masked_fill(self.targets.outside, torch.nan).masked_fill(self.targets.ignored, 0.0)


def empty_sums(count: int, dtype: torch.dtype, entropy: bool = False) -> Sums:
    plain, at_target = torch.zeros(count, dtype=dtype), torch.zeros(count, dtype=dtype)
    return Sums(at_target, plain, torch.zeros(count, dtype=dtype) if entropy else None)


def _tanh(x: Tensor, softcap: float, out: Tensor, scratch: Tensor) -> Tensor:
    """tanh(x / softcap) as expm1(2u) / (expm1(2u) + 2): as accurate as torch.tanh, in half its time."""
    torch.div(x, softcap / 2, out=out).clamp_(max=_SATURATED).expm1_()
    return out.div_(torch.add(out, 2.0, out=scratch))
