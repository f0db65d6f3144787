"""Cross entropy of a linear layer's logits on the CPU: PyTorch's matmuls, and the row pass of `loss_rows.py`, in chunks.

Float32 and float64: chunks of rows. Logits of a chunk, then in their place their gradient, which dhidden and dweight
are made from at once; the sums of dweight go on in the result itself. Three matmuls, and memory for one chunk.

16 bits: a sum that goes on from chunk to chunk would need the whole of dweight in float32, or be rounded at every
chunk. bfloat16 of at most `KEPT` logits: their gradients are kept in 16 bits, as tensor cores take them, until dhidden and
dweight are each made by one matmul. Else chunks of columns: the gradient of some classes needs nothing but their logits
of all rows, made again, and the statistics of the rows; their part of dweight is one matmul and rounded once. dhidden is
summed in float32. Four matmuls. Logits are always made in float32, which inputs are converted to chunk by chunk.

The backward that follows a forward has the statistics of the rows, and goes by columns in every dtype. `CHUNK` logits
at a time: 64 MiB of float32, large enough for a matmul to reach its speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwise.backends.cpu.loss_rows import RowGrads, Sums, Sweep, Targets, empty_sums, part_of_targets, read_targets
from headwise.backends.cpu.matmul import fast_in_bfloat16, linear
from headwise.backends.cpu.memory import huge_pages
from headwise.layout import statistics_dtype

if TYPE_CHECKING:
    from headwise.ops.linear_cross_entropy import (
        LinearCrossEntropy,
        LinearCrossEntropyBackward,
        LinearCrossEntropyScale,
    )

Results = tuple[Tensor | None, ...]

CHUNK = 16 << 20  # logits
KEPT = 2 * CHUNK  # of bfloat16: another 64 MiB


class _Call:
    """A call's tensors as matrices, and its targets."""

    def __init__(self, args: LinearCrossEntropy) -> None:
        self.args, self.rows, self.classes = args, args.targets.numel(), args.weight.shape[0]
        self.dtype = statistics_dtype(args.hidden.dtype)
        self.hidden = args.hidden.reshape(self.rows, args.hidden.shape[-1])
        self.targets = read_targets(args.targets, args.ignore_index, self.classes)
        self.weights = _weights(args, self.targets, self.dtype)  # None: all 1
        self.bias = None if args.bias is None else args.bias.to(self.dtype)

    def divisor(self) -> Tensor:
        """What the loss is multiplied by: of a mean, the inverse of the sum of the weights of counted tokens; or 0."""
        counted = ~self.targets.ignored
        if self.args.reduction != "mean":
            return torch.ones((), dtype=torch.float64)
        total = counted.sum().double() if self.weights is None else self.weights.double().sum()
        return torch.where(total == 0, 0.0, 1 / total)

    def row_grads(self, grad: Tensor | None) -> Tensor:
        """The gradient of each row's loss, before its weight."""
        given = torch.zeros((), dtype=self.dtype) if grad is None else grad.to(self.dtype)
        of_rows = (given * self.divisor()).to(self.dtype).expand(self.args.targets.shape).reshape(-1)
        if self.weights is not None:
            of_rows = of_rows * self.weights
        return of_rows.masked_fill(self.targets.outside, torch.nan)

    def keeps_gradients(self) -> bool:
        """Is there room for the gradients of all logits in 16 bits?"""
        few = self.rows * self.classes <= KEPT
        return few and self.args.hidden.dtype == torch.bfloat16 and fast_in_bfloat16()

    def logits(self, out: Tensor, hidden: Tensor, first: int, count: int) -> None:
        """Of some rows and classes; the weight is converted by and by."""
        args = self.args
        if args.weight.dtype == self.dtype:
            if self.bias is not None:
                out.copy_(self.bias[first : first + count].expand(out.shape))
            weight = args.weight[first : first + count]
            torch.addmm(out, hidden, weight.T, beta=int(self.bias is not None), out=out)
            return
        step = max(64, CHUNK // 4 // max(*hidden.shape, 1))
        for at in range(0, count, step):
            classes = slice(first + at, first + min(at + step, count))
            bias = None if self.bias is None else self.bias[classes]
            out[:, at : at + step] = linear(hidden, args.weight[classes].to(self.dtype), bias)


def _weights(args: LinearCrossEntropy, targets: Targets, dtype: torch.dtype) -> Tensor | None:
    if args.token_weights is None:
        return None
    return args.token_weights.reshape(-1).to(dtype).masked_fill(targets.ignored, 0.0)


def linear_cross_entropy_forward(args: LinearCrossEntropy) -> Results:
    call = _Call(args)
    stats, sums = torch.zeros((2, call.rows), dtype=call.dtype), empty_sums(call.rows, call.dtype, args.return_entropy)
    at_once = bool(args.gradients) and (args.hidden.dtype == call.dtype or call.keeps_gradients())
    grads = RowGrads(call.row_grads(torch.ones((), dtype=call.dtype))) if args.gradients else None
    made = _by_rows(call, stats, sums, grads if at_once else None)
    if grads is not None and not at_once:
        made = _by_columns(call, stats, grads)
    sweep = Sweep(args, call.classes, call.targets, stats, sums, None)
    loss = sweep.losses()
    if call.weights is not None:  # not 0 · NaN: a target out of range is loud whatever it weighs
        loss = (loss * call.weights.double()).masked_fill(call.targets.outside, torch.nan)
    loss = loss.view(args.targets.shape) if args.reduction == "none" else loss.sum() * call.divisor()
    logprobs = sweep.logprobs() if args.return_logprobs else None
    entropies = sweep.entropies() if args.return_entropy else None

    def result(x: Tensor) -> Tensor:
        return x.to(call.dtype, copy=x._is_view())  # a returned view could not be written to

    per_token = [None if x is None else result(x.view(args.targets.shape)) for x in (logprobs, entropies)]
    return (result(loss), *per_token, stats, *made)


def linear_cross_entropy_backward(args: LinearCrossEntropyBackward) -> Results:
    call = _Call(args.forward)

    def of_rows(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(call.dtype).reshape(-1).masked_fill(call.targets.outside, torch.nan)

    grads = RowGrads(call.row_grads(args.grad), *map(of_rows, (args.grad_logprobs, args.grad_entropy, args.entropy)))
    return _by_columns(call, args.row_stats, grads)


def linear_cross_entropy_scale(args: LinearCrossEntropyScale) -> Results:
    made = tuple(x if x is None or args.in_place else x.clone() for x in (args.dhidden, args.dweight, args.dbias))
    if args.grad.item() != 1.0:
        for x in made:
            if x is not None:
                x.mul_(args.grad)
    return made


def _empty_gradients(call: _Call) -> Results:
    args = call.args
    named = (("h", args.hidden), ("w", args.weight), ("b", args.bias))
    return tuple(
        None if x is None or s not in args.gradients else huge_pages(torch.empty(x.shape, dtype=x.dtype))
        for s, x in named
    )


def _parts(count: int, other: int, least: int, chunk: int) -> Iterator[slice]:
    """``count`` rows or columns in parts of equal size, of about ``chunk`` elements with ``other`` of the other kind."""
    step = max(least, chunk // max(other, 1))
    parts = -(-count // step)
    for i in range(parts):
        yield slice(count * i // parts, count * (i + 1) // parts)


def _by_rows(call: _Call, stats: Tensor, sums: Sums, grads: RowGrads | None) -> Results:
    """Statistics of all rows and, given the gradients of the rows' losses, all gradients."""
    args, made = call.args, _empty_gradients(call) if grads is not None else (None, None, None)
    dhidden, dweight, dbias = made
    keeps = grads is not None and call.keeps_gradients()
    for x in (dweight, dbias):
        if x is not None:
            x.zero_()
    if dhidden is not None and call.classes == 0:
        dhidden.zero_()
    if 0 in (call.classes, call.rows):
        return made
    sum_of_bias = dbias if dbias is None or not keeps else torch.zeros(call.classes, dtype=call.dtype)
    kept = huge_pages(torch.empty((call.rows, call.classes), dtype=args.hidden.dtype)) if keeps else None
    parts = list(_parts(call.rows, call.classes, 16, CHUNK // 2 if keeps else CHUNK))
    memory = huge_pages(torch.empty((max(p.stop - p.start for p in parts), call.classes), dtype=call.dtype))
    for part in parts:
        hidden = call.hidden[part].to(call.dtype)
        logits = memory[: hidden.shape[0]]
        call.logits(logits, hidden, 0, call.classes)
        of_part = Sums(*(None if x is None else x[part] for x in sums))  # type: ignore[arg-type]
        some = None if grads is None else grads.part(part)
        targets = part_of_targets(call.targets, part)
        Sweep(args, call.classes, targets, stats[:, part], of_part, some).run(logits, None if some is None else logits)
        if sum_of_bias is not None:
            sum_of_bias += logits.sum(0)
        if kept is not None:
            kept[part] = logits
            continue
        if dhidden is not None:
            torch.mm(logits, args.weight, out=dhidden.view(call.rows, -1)[part])
        if dweight is not None:
            dweight.addmm_(logits.T, hidden)
    if kept is not None:
        if dhidden is not None:
            torch.mm(kept, args.weight, out=dhidden.view(call.rows, -1))
        if dweight is not None:
            torch.mm(kept.T, call.hidden, out=dweight)
        if dbias is not None and sum_of_bias is not None:
            dbias.copy_(sum_of_bias)
    return made


def _by_columns(call: _Call, stats: Tensor, grads: RowGrads) -> Results:
    """Gradients, given the statistics of all rows."""
    args, made = call.args, _empty_gradients(call)
    dhidden, dweight, dbias = made
    hidden = call.hidden.to(call.dtype)
    # Given bfloat16, PyTorch's matmul has float32 sums, and several times the speed.
    of_weight = call.hidden if call.hidden.dtype == torch.bfloat16 and fast_in_bfloat16() else hidden
    sum_of_hidden = None if dhidden is None else torch.zeros(hidden.shape, dtype=call.dtype)
    parts = list(_parts(call.classes, call.rows, 64, CHUNK))
    memory = huge_pages(torch.empty(call.rows * max((p.stop - p.start for p in parts), default=0), dtype=call.dtype))
    for part in parts:
        columns = part.stop - part.start
        logits = memory[: call.rows * columns].view(call.rows, columns)
        call.logits(logits, hidden, part.start, logits.shape[1])
        Sweep(args, call.classes, call.targets, stats, None, grads, part.start).run(logits, logits)
        if sum_of_hidden is not None:
            if args.weight.dtype == call.dtype:
                sum_of_hidden.addmm_(logits, args.weight[part])
            else:
                sum_of_hidden += linear(logits, args.weight[part].to(call.dtype).T)
        if dweight is not None:
            dweight[part] = torch.mm(logits.T.to(of_weight.dtype), of_weight)
        if dbias is not None:
            dbias[part] = logits.sum(0)
    if dhidden is not None and sum_of_hidden is not None:
        dhidden.view(hidden.shape).copy_(sum_of_hidden)
    return made
