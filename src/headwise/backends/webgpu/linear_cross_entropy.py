"""Cross entropy of a linear layer's logits on WebGPU: ``wgsl/matmul.wgsl`` and the row kernel of cross entropy, in chunks.

Logits of a chunk, and their gradient, are float32 whatever the inputs are. As on the CPU: float32 goes by chunks of
rows (three matmuls; the sums of dweight go on in the result), 16 bits by rows for the loss and by chunks of classes
for the gradients (four matmuls: each part of dweight is one sum, rounded once). The backward that follows a forward
goes by classes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from headwise.backends.webgpu import copies, rows
from headwise.backends.webgpu.cross_entropy import one_number, run_rows, words_of
from headwise.backends.webgpu.device import Device
from headwise.backends.webgpu.matmul import matmul, matmul_into, round_into, transposed
from headwise.backends.webgpu.shaders import DTYPES
from headwise.backends.webgpu.storage import Region

Results = tuple[Region | None, ...]

CHUNK = 16 << 20  # logits: 64 MiB of float32, and as much for their gradient


class _Call(NamedTuple):
    """A call's tensors as matrices."""

    args: Any
    hidden: Region  # (N, H)
    weight: Region  # (V, H)
    targets: Region  # (N,)
    weights: Region | None  # (N,)
    bias: Region | None

    @property
    def rows(self) -> int:
        return self.hidden.shape[0]

    @property
    def classes(self) -> int:
        return self.weight.shape[0]

    def logits(self, device: Device, hidden: Region, first: int, count: int) -> Region:
        """Of some rows, and ``count`` classes from ``first`` on."""
        bias = None if self.bias is None else self.bias.narrow(0, first, count)
        return matmul(device, hidden, transposed(self.weight.narrow(0, first, count)), torch.float32, bias)

    def sides(self, first: int, count: int, **more: Region | None) -> dict[str, Region]:
        """What the row kernel has per row, of some rows."""
        given = {"targets": self.targets, **more}
        return {name: rows.part(x, first, count) for name, x in given.items() if x is not None}


def _call(device: Device, args: Any) -> _Call:
    count, width = args.targets.numel, args.hidden.shape[-1]
    hidden = rows.as_rows(device, args.hidden) if width and count else device.empty((count, width), args.hidden.dtype)
    flat = [None if x is None else copies.contiguous(device, x).flat() for x in (args.token_weights, args.bias)]
    return _Call(args, hidden, args.weight, copies.contiguous(device, args.targets).flat(), *flat)


def linear_cross_entropy_forward(device: Device, args: Any) -> Results:
    call = _call(device, args)
    losses, stats = device.empty((call.rows,), torch.float32), device.empty((2, call.rows), torch.float32)
    logprobs = device.empty(args.targets.shape, torch.float32) if args.return_logprobs else None
    entropies = device.empty(args.targets.shape, torch.float32) if args.return_entropy else None
    at_once = bool(args.gradients) and args.hidden.dtype == torch.float32
    row_grads = _row_grads(device, call, _one(device, call, None)) if args.gradients else None
    outputs = {
        "losses": losses, "stats": stats.with_shape((call.rows, 2)), "token_weights": call.weights,
        "logprobs": logprobs and logprobs.flat(), "entropies": entropies and entropies.flat(),
    }  # fmt: skip
    made = _by_rows(device, call, outputs, row_grads if at_once else None)
    if row_grads is not None and not at_once:
        made = _by_classes(device, call, stats, row_grads)
    loss = losses.with_shape(args.targets.shape)
    if args.reduction != "none":
        loss = one_number(device, args, call.targets, call.weights, losses, gradient=False)
    return (loss, logprobs, entropies, stats, *made)


def linear_cross_entropy_backward(device: Device, args: Any) -> Results:
    call = _call(device, args.forward)
    grad = None if args.grad is None else _one(device, call, args.grad)
    given = (args.grad_logprobs, args.grad_entropy, args.entropy)
    logprobs, entropy, entropies = (None if x is None else copies.contiguous(device, x).flat() for x in given)
    row_grads = _row_grads(device, call, grad, logprobs, entropy, entropies)
    return _by_classes(device, call, copies.contiguous(device, args.row_stats), row_grads)


def linear_cross_entropy_scale(device: Device, args: Any) -> Results:
    made = [
        x if x is None or args.in_place else copies.copied(device, x) for x in (args.dhidden, args.dweight, args.dbias)
    ]
    most = (device.capabilities.binding_bytes - 512) // 16
    for x in made:
        if x is None:
            continue
        vectors = -(-x.numel // 4)
        for start in range(0, vectors, most):
            count = min(most, vectors - start)
            part = x.with_shape((4 * vectors,)).narrow(0, 4 * start, 4 * count)
            device.run(
                device.kernel("scale", dtype=DTYPES[x.dtype]), -(-count // 256), (count,), factor=args.grad, x=part
            )
    return tuple(made)


def _one(device: Device, call: _Call, grad: Region | None) -> Region:
    """What arrives at every row's loss, before its weight: (1,) or (N,). grad: of the loss; None is 1."""
    if call.args.reduction == "mean":
        return one_number(device, call.args, call.targets, call.weights, grad, gradient=True).flat()
    if grad is None:
        return copies.full(device, (1,), 1.0, torch.float32)
    return copies.contiguous(device, grad).flat()


def _row_grads(
    device: Device, call: _Call, grad: Region | None, logprobs: Region | None = None, entropy: Region | None = None,
    entropies: Region | None = None,
) -> Region:  # fmt: skip
    """The gradients that arrive at each row: (N,), or (N, 4) as the row kernel takes them."""
    tilted = logprobs is not None or entropy is not None
    step = 0 if grad is None or grad.numel == 1 else 1
    if not tilted and call.weights is None and grad is not None:
        return grad.with_shape((call.rows,), (step,))
    y = device.empty((call.rows, 4) if tilted else (call.rows,), torch.float32)
    kernel = device.kernel(
        "loss_grads", grad=grad is not None, logprob=logprobs is not None, entropy=entropy is not None, tilted=tilted,
        weighted="" if call.weights is None else DTYPES[call.weights.dtype], targets=DTYPES[call.targets.dtype],
    )  # fmt: skip
    given = {
        "grad": grad, "weights": call.weights, "grad_logprobs": logprobs, "grad_entropy": entropy, "entropy": entropies
    }  # fmt: skip
    bound = {name: x for name, x in given.items() if x is not None}
    numbers = (call.rows, step, *words_of(call.args.ignore_index))
    device.run(kernel, -(-call.rows // 256), numbers, targets=call.targets, **bound, y=y)
    return y


def _gradients(device: Device, call: _Call) -> Results:
    """Memory for those that are asked for; zeros where nothing will be written."""
    args = call.args
    empty = 0 in (call.rows, call.classes)
    made: list[Region | None] = []
    for letter, x in (("h", args.hidden), ("w", args.weight), ("b", args.bias)):
        if x is None or letter not in args.gradients:
            made.append(None)
        else:
            made.append(copies.full(device, x.shape, 0.0, x.dtype) if empty else device.empty(x.shape, x.dtype))
    return tuple(made)


def _parts(count: int, other: int, least: int) -> list[tuple[int, int]]:
    """``(first, count)`` of rows or classes: multiples of ``least``, about CHUNK logits with ``other`` of the other kind."""
    step = max(least, CHUNK // max(other, 1) // least * least)
    parts = max(1, -(-count // step))
    step = -(-count // (parts * least)) * least
    return [(first, min(step, count - first)) for first in range(0, count, step)] if count else []


def _by_rows(device: Device, call: _Call, outputs: dict[str, Region | None], row_grads: Region | None) -> Results:
    """Statistics and losses of all rows and, given the gradients of those, all gradients."""
    made: Results = (None, None, None) if row_grads is None else _gradients(device, call)
    dhidden, dweight, dbias = made
    for first, count in _parts(call.rows, call.classes, 64):
        hidden = rows.part(call.hidden, first, count)
        logits = call.logits(device, hidden, 0, call.classes)
        dlogits = None if row_grads is None else device.empty(logits.shape, torch.float32)
        sides = call.sides(first, count, **outputs, row_grads=row_grads)
        run_rows(device, call.args, logits, call.classes, 0, sides, dlogits)
        if dlogits is None or call.classes == 0:
            continue
        if dhidden is not None:
            matmul_into(device, dlogits, call.weight, rows.part(dhidden.with_shape(call.hidden.shape), first, count))
        if dweight is not None:
            matmul_into(device, transposed(dlogits), hidden, dweight, add=first > 0)
        if dbias is not None:
            ones = copies.full(device, (1, count), 1.0, torch.float32)
            matmul_into(device, ones, dlogits, dbias.with_shape((1, call.classes)), add=first > 0)
    return made


def _by_classes(device: Device, call: _Call, stats: Region, row_grads: Region) -> Results:
    """Gradients, given the statistics of all rows."""
    made = _gradients(device, call)
    dhidden, dweight, dbias = made
    if 0 in (call.rows, call.classes):
        return made
    sums = None if dhidden is None else dhidden.with_shape(call.hidden.shape)
    if sums is not None and sums.dtype != torch.float32:
        sums = device.empty(call.hidden.shape, torch.float32)
    ones = None if dbias is None else copies.full(device, (1, call.rows), 1.0, torch.float32)
    sides = call.sides(0, call.rows, stats=stats.with_shape((call.rows, 2)), row_grads=row_grads)
    for first, count in _parts(call.classes, call.rows, 64):
        logits = call.logits(device, call.hidden, first, count)
        dlogits = device.empty(logits.shape, torch.float32)
        run_rows(device, call.args, logits, call.classes, first, sides, dlogits)
        if sums is not None:
            matmul_into(device, dlogits, call.weight.narrow(0, first, count), sums, add=first > 0)
        if dweight is not None:
            matmul_into(device, transposed(dlogits), call.hidden, dweight.narrow(0, first, count))
        if dbias is not None and ones is not None:
            matmul_into(device, ones, dlogits, dbias.narrow(0, first, count).with_shape((1, count)))
    if dhidden is not None and sums is not None and dhidden.dtype != torch.float32:
        round_into(device, sums, dhidden)
    return made
