"""Cross entropy of a linear layer's logits on a GPU: PyTorch's matmuls and the row kernel of cross entropy, in chunks.

Logits are float32: rounded to bfloat16, a logit of 20 would be off by up to 0.06, and its probability by 6 %. Their
gradient is rounded to the dtype of the inputs, as tensor cores take it. All sums are float32, rounded once.

A weight's gradient is summed over all rows, so either its sums are kept from chunk to chunk (in float32: twice the
size of a 16-bit weight), or the gradients of the logits of all rows are at hand when some classes of it are made.
float32 does the first: the sums go on in the result (`_by_rows`). 16 bits do the second, and where those gradients
wait is the memory of the result itself: a window of K classes of dweight (K, H) has room for the gradients of K
logits of H rows.

    _by_rows      for chunks of rows: logits, statistics and losses; gradients of the first H rows into the windows
    _by_classes   for each window: logits of the other rows once more, their gradient; dhidden += gradient · weight;
                  dweight of the window = gradientᵀ · hidden, in float32, then rounded into its place

That is 3 matmuls up to N = H, 3 + (N - H) / N of them beyond, and never more scratch than SCRATCH and the sums of
dhidden. With H 4096, V 131072, N 8192 in bfloat16 a matmul is 8.8 TFLOP, 12.4 ms at 710 TFLOP/s: 43 ms for 3.5 of
them. The row passes read and write 14 GB (3.5 ms), the sums of dhidden are read and written in every window, 8.6 GB
(2 ms), rounding of dweight moves 5 GB (1.3 ms). Keeping the gradients of all rows would save 6 ms and take 1 GiB more,
as much as dweight itself. Memory is what this op is called for, so it keeps to 0.25 GiB.

A frozen head (no dweight) needs 2 matmuls in chunks of rows. The backward that follows a forward without gradients
has the statistics, and makes all logits again by classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwise.backends.triton.cross_entropy import ROOM, LogitRows, LossRows, divisor, launch_rows, reduced
from headwise.backends.triton.row_tiling import Rows, reshaped

if TYPE_CHECKING:
    from headwise.backends.triton.gpu import Gpu
    from headwise.ops.linear_cross_entropy import (
        LinearCrossEntropy,
        LinearCrossEntropyBackward,
        LinearCrossEntropyScale,
    )

Results = tuple[Tensor | None, ...]
Wanted = Sequence[tuple[tuple[int, ...], torch.dtype]]

SCRATCH = 256 << 20  # bytes
_ROWS = 64  # chunks of rows are multiples of it
_AGAIN = 512  # rows whose logits are made again at a time
_WIDEST, _NARROWEST = 16384, 1024  # windows, powers of two: blocks of the row kernel divide them
_SCALED = 8192  # elements that a program scales at a time


@triton.jit(do_not_specialize=["count"])
def _scale(x, factor, count, BLOCK: tl.constexpr):
    """x *= factor, in float32; a factor of 1 leaves x as it is, and costs nothing."""
    by = tl.load(factor)
    if by != 1.0:
        for block in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
            at = (tl.full((), 0, tl.int64) + block) * BLOCK + tl.arange(0, BLOCK)
            value = tl.load(x + at, mask=at < count).to(tl.float32) * by
            tl.store(x + at, value.to(x.dtype.element_ty), mask=at < count)


class _Call(NamedTuple):
    """A call's tensors as matrices."""

    args: LinearCrossEntropy
    hidden: Tensor  # (N, H)
    targets: Tensor  # (N,), contiguous
    weights: Tensor | None  # (N,), contiguous
    rows: int
    width: int
    classes: int

    @property
    def single(self) -> bool:
        return self.hidden.dtype == torch.float32

    @property
    def padded(self) -> int:
        """Classes with room up to the next whole line."""
        return max(1, -(-self.classes // ROOM)) * ROOM

    def logits(self, gpu: Gpu, out: Tensor, rows: slice, first: int) -> None:
        """Of some rows, and of the classes from ``first`` on that out (rows, classes) has columns for."""
        columns = slice(first, first + out.shape[1])
        if self.args.bias is not None:
            gpu.copy(self.args.bias[columns].expand(out.shape), out)
        gpu.matmul(self.hidden[rows], self.args.weight[columns].t(), out, add=self.args.bias is not None)


def _call(gpu: Gpu, args: LinearCrossEntropy) -> _Call:
    rows, (classes, width) = args.targets.numel(), args.weight.shape
    weights = None if args.token_weights is None else reshaped(gpu, gpu.contiguous(args.token_weights), -1)
    targets = gpu.contiguous(args.targets).view(-1)
    return _Call(args, reshaped(gpu, args.hidden, rows, width), targets, weights, rows, width, classes)


def linear_cross_entropy_forward(gpu: Gpu, args: LinearCrossEntropy) -> Results:
    call, shape = _call(gpu, args), args.targets.shape
    losses = gpu.empty(shape if args.reduction == "none" else (call.rows,), torch.float32)
    stats = gpu.empty((2, call.rows), torch.float32)
    logprobs = gpu.empty(shape, torch.float32) if args.return_logprobs else None
    entropies = gpu.empty(shape, torch.float32) if args.return_entropy else None
    count = divisor(gpu, args, call.targets, call.weights) if args.gradients else None
    at = LossRows(
        call.targets, divided_by=count, losses=losses.view(-1), stats=stats, weights=call.weights,
        logprobs=None if logprobs is None else logprobs.view(-1),
        entropies=None if entropies is None else entropies.view(-1),
    )  # fmt: skip
    made: Results = (None, None, None)
    if not args.gradients or 0 in (call.rows, call.classes):
        made = _no_gradients(gpu, call)
        _by_rows(gpu, call, at, None, (None, None, None))
    elif call.single or "w" not in args.gradients:
        made = _empty_gradients(gpu, call)
        _by_rows(gpu, call, at, None, made)
    else:
        rows = min(call.rows, call.width)
        kept = _Kept(rows, _window(call, rows), gpu.empty((call.padded, call.width), args.weight.dtype))
        size = max(_size(_rows_wanted(call, kept, False)[1]), _size(_classes_wanted(call, kept)))
        scratch = gpu.empty((size,), torch.uint8)  # for one, then for the other
        _by_rows(gpu, call, at, kept, (None, None, None), scratch)
        made = _by_classes(gpu, call, at._replace(losses=None), kept, scratch)
    return (reduced(gpu, args, losses, call.targets, call.weights), logprobs, entropies, stats, *made)


def linear_cross_entropy_backward(gpu: Gpu, args: LinearCrossEntropyBackward) -> Results:
    call = _call(gpu, args.forward)
    if 0 in (call.rows, call.classes):
        return _no_gradients(gpu, call)
    grads = gpu.zeros((), torch.float32) if args.grad is None else args.grad
    if grads.dim() > 0:
        grads = reshaped(gpu, grads, -1)
    others = [None if x is None else gpu.contiguous(x).view(-1) for x in args[1:3]]
    entropy = None if args.entropy is None else gpu.contiguous(args.entropy).view(-1)
    count = divisor(gpu, args.forward, call.targets, call.weights)
    at = LossRows(
        call.targets, grads=grads, divided_by=count, stats=gpu.contiguous(args.row_stats), weights=call.weights,
        entropies=entropy, logprob_grads=others[0], entropy_grads=others[1],
    )  # fmt: skip
    return _by_classes(gpu, call, at, _Kept(0, _window(call, 0), None))


def linear_cross_entropy_scale(gpu: Gpu, args: LinearCrossEntropyScale) -> Results:
    made = tuple(
        x if x is None or args.in_place else gpu.call(torch.clone, x) for x in (args.dhidden, args.dweight, args.dbias)
    )
    for x in made:
        if x is not None and x.numel() > 0:
            programs = min(triton.cdiv(x.numel(), _SCALED), 4 * gpu.multiprocessors)
            gpu.launch(_scale, (programs,), (x, args.grad), (x.numel(),), (_SCALED,), warps=8)
    return made


# --------------------------------------------------------------------------------------------------------------- memory


class _Kept(NamedTuple):
    """Gradients of the logits of the first ``rows`` rows, in windows of ``window`` classes, in the memory of dweight."""

    rows: int
    window: int
    memory: Tensor | None  # (classes with room, H)

    def of(self, call: _Call, first: int) -> Tensor | None:
        """(rows, classes) of the window that begins at class ``first``."""
        if self.memory is None or self.rows == 0:
            return None
        room = min(self.window, call.padded - first)
        at = first * call.width
        block = self.memory.view(-1)[at : at + self.rows * room].view(self.rows, room)
        return block[:, : min(room, call.classes - first)]


def _window(call: _Call, kept: int) -> int:
    """Classes that are worked on at a time: what is left of SCRATCH beside the sums of dhidden decides."""
    summed = "h" in call.args.gradients and not call.single
    left = max(SCRATCH - 4 * call.rows * call.width * summed, SCRATCH // 4)
    if call.single:
        per_class = 4 * call.rows
    else:
        per_class = 2 * (call.rows - kept) + 4 * call.width + 4 * min(_AGAIN, call.rows - kept)
    at_most = max(left // max(per_class, 1), 1)
    widest = 1 << (at_most.bit_length() - 1)  # a power of two
    return min(max(widest, _NARROWEST), _WIDEST)


def _named(call: _Call) -> list[tuple[str, Tensor | None]]:
    return [("h", call.args.hidden), ("w", call.args.weight), ("b", call.args.bias)]


def _empty_gradients(gpu: Gpu, call: _Call) -> Results:
    asked = call.args.gradients
    return tuple(None if x is None or s not in asked else gpu.empty(x.shape, x.dtype) for s, x in _named(call))


def _no_gradients(gpu: Gpu, call: _Call) -> Results:
    """Zeros: there are no rows or no classes."""
    asked = call.args.gradients
    return tuple(None if x is None or s not in asked else gpu.zeros(x.shape, x.dtype) for s, x in _named(call))


def _size(wanted: Wanted) -> int:
    return sum(-(-math.prod(shape) * dtype.itemsize // 256) * 256 for shape, dtype in wanted)


def _scratch(gpu: Gpu, wanted: Wanted, memory: Tensor | None) -> list[Tensor]:
    """Tensors side by side in one piece of memory."""
    memory, made = gpu.empty((_size(wanted),), torch.uint8) if memory is None else memory, []
    for i, (shape, dtype) in enumerate(wanted):
        at = _size(wanted[:i])
        made.append(memory[at : at + math.prod(shape) * dtype.itemsize].view(dtype).view(shape))
    return made


def _rows_wanted(call: _Call, kept: _Kept | None, gradient: bool) -> tuple[list[slice], Wanted]:
    """The chunks of rows, and the memory for one of them: logits and, where their gradient is used at once, that."""
    of_logits = 4 + (2 if gradient and not call.single else 0)
    most = max(SCRATCH * 15 // 16 // (of_logits * call.padded) // _ROWS * _ROWS, _ROWS)
    chunks = _chunks(0, call.rows if kept is None else kept.rows, most)
    if kept is not None:
        chunks += _chunks(kept.rows, call.rows, most)
    rows = max((chunk.stop - chunk.start for chunk in chunks), default=0)
    again = rows if gradient and not call.single else 0
    shapes = (((rows, call.padded), torch.float32), ((again, call.padded), call.hidden.dtype))
    return chunks, (*shapes, ((again, call.width), torch.float32))


def _classes_wanted(call: _Call, kept: _Kept) -> Wanted:
    """Logits of rows whose gradient is not kept, their gradient, and the sums of dhidden, dweight and dbias of a window."""
    single, window, again = call.single, min(kept.window, call.padded), call.rows - kept.rows
    has_hidden, has_weight, has_bias = (letter in call.args.gradients for letter in "hwb")
    return (
        ((again if single else min(again, _AGAIN), window), torch.float32),
        ((0 if single else again, window), call.hidden.dtype),
        ((call.rows if has_hidden and not single else 0, call.width), torch.float32),
        ((window if has_weight and not single else 0, call.width), torch.float32),
        ((1, window if has_bias else 0), torch.float32),
    )


def _part(at: LossRows, rows: slice) -> LossRows:
    """What the row kernel has per row, of some rows."""
    cut = {
        name: getattr(at, name)[rows]
        for name in ("targets", "losses", "weights", "logprobs", "entropies", "logprob_grads", "entropy_grads")
        if getattr(at, name) is not None
    }
    if at.grads is not None and at.grads.dim() > 0:
        cut["grads"] = at.grads[rows]
    if at.stats is not None:
        cut["stats"] = at.stats[:, rows]
    return at._replace(**cut)


# --------------------------------------------------------------------------------------------------------------- chunks


def _chunks(first: int, end: int, most: int) -> list[slice]:
    """Rows from ``first`` to ``end`` in equal chunks of at most ``most``, multiples of _ROWS."""
    count = end - first
    if count <= 0:
        return []
    parts = -(-count // most)
    step = -(-count // (parts * _ROWS)) * _ROWS
    return [slice(i, min(i + step, end)) for i in range(first, end, step)]


def _by_rows(
    gpu: Gpu, call: _Call, at: LossRows, kept: _Kept | None, made: Results, scratch: Tensor | None = None
) -> None:
    """Statistics and losses; gradients of logits for ``kept``, or all gradients that ``made`` has memory for."""
    dhidden, dweight, dbias = made
    gradient = any(x is not None for x in made)
    chunks, wanted = _rows_wanted(call, kept, gradient)
    if not chunks:
        return
    memory = _scratch(gpu, wanted, scratch)
    ones = None if dbias is None else gpu.filled((1, len(memory[0])), 1.0, call.hidden.dtype)
    sums_of_bias = None if dbias is None else gpu.empty((1, call.classes), torch.float32)
    for chunk in chunks:
        count = chunk.stop - chunk.start
        logits = memory[0][:count, : call.classes]
        call.logits(gpu, logits, chunk, 0)
        given = LogitRows(Rows(memory[0], call.padded), call.classes, call.classes, padded=True)
        part = _part(at, chunk)
        if kept is not None and chunk.start < kept.rows:
            part = part._replace(
                dlogits=kept.memory, window=kept.window, dlogits_stride=call.width, first_row=chunk.start
            )
        if not gradient:
            launch_rows(gpu, call.args, given, part)
            continue
        dlogits = memory[0] if call.single else memory[1]
        launch_rows(gpu, call.args, given, part._replace(dlogits=dlogits, dlogits_stride=call.padded))
        dlogits, hidden = dlogits[:count, : call.classes], call.hidden[chunk]
        if dhidden is not None:
            result = dhidden.view(call.rows, call.width)[chunk]
            sums = result if call.single else memory[2][:count]
            gpu.matmul(dlogits, call.args.weight, sums)
            if not call.single:
                gpu.copy(sums, result)
        if dweight is not None:
            gpu.matmul(dlogits.t(), hidden, dweight, add=chunk.start > 0)
        if ones is not None and sums_of_bias is not None:
            gpu.matmul(ones[:, :count], dlogits, sums_of_bias, add=chunk.start > 0)
    if dbias is not None and sums_of_bias is not None:
        gpu.copy(sums_of_bias.view(-1), dbias)


def _by_classes(gpu: Gpu, call: _Call, at: LossRows, kept: _Kept, scratch: Tensor | None = None) -> Results:
    """All gradients that are asked for, given the statistics of all rows."""
    args, single, window = call.args, call.single, min(kept.window, call.padded)
    dhidden, dweight, dbias = _empty_gradients(gpu, call._replace(args=args._replace(gradients=_without(args, kept))))
    if kept.memory is not None:
        dweight = kept.memory[: call.classes]
    wanted = _classes_wanted(call, kept)
    logits, dlogits, sums_of_hidden, sums_of_weight, sums_of_bias = _scratch(gpu, wanted, scratch)
    if single:
        dlogits = logits
    ones = None if dbias is None else gpu.filled((1, call.rows), 1.0, call.hidden.dtype)
    if dhidden is not None and single:
        sums_of_hidden = dhidden.view(call.rows, call.width)
    for first in range(0, call.classes, window):
        classes = slice(first, min(first + window, call.classes))
        count = classes.stop - classes.start
        for chunk in [slice(kept.rows, call.rows)] if single else _chunks(kept.rows, call.rows, _AGAIN):
            length, to = chunk.stop - chunk.start, dlogits[chunk.start - kept.rows : chunk.stop - kept.rows]
            call.logits(gpu, logits[:length, :count], chunk, first)
            given = LogitRows(Rows(logits, window), count, call.classes, first, padded=True)
            launch_rows(gpu, args, given, _part(at, chunk)._replace(dlogits=to, dlogits_stride=window))
        parts = [(slice(0, kept.rows), kept.of(call, first)), (slice(kept.rows, call.rows), dlogits[:, :count])]
        parts = [(rows, d) for rows, d in parts if d is not None and rows.stop > rows.start]
        for i, (rows, d) in enumerate(parts):
            assert d is not None
            if dhidden is not None:
                gpu.matmul(d, args.weight[classes], sums_of_hidden[rows], add=first > 0)
            if dweight is not None:
                gpu.matmul(d.t(), call.hidden[rows], dweight[classes] if single else sums_of_weight[:count], add=i > 0)
            if ones is not None:
                gpu.matmul(ones[:, rows], d, sums_of_bias[:, :count], add=i > 0)
        if dweight is not None and not single:
            gpu.copy(sums_of_weight[:count], dweight[classes])
        if dbias is not None:
            gpu.copy(sums_of_bias.view(-1)[:count], dbias[classes])
    if dhidden is not None and not single:
        gpu.copy(sums_of_hidden, dhidden.view(call.rows, call.width))
    return dhidden, dweight, dbias


def _without(args: LinearCrossEntropy, kept: _Kept) -> str:
    """The gradients that need memory of their own."""
    return args.gradients if kept.memory is None else args.gradients.replace("w", "")
