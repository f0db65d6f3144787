"""Cross entropy on WebGPU.

``wgsl/cross_entropy.wgsl`` computes the losses of rows, the gradient of the logits, or both. ``wgsl/loss.wgsl`` reduces the
losses of rows to one loss, and computes the gradient of each row's loss from that of the loss.
"""

from __future__ import annotations

from typing import Any

import torch

from headwise.backends.webgpu import copies, rows
from headwise.backends.webgpu.device import Device
from headwise.backends.webgpu.shaders import DTYPES
from headwise.backends.webgpu.storage import Region

# Rows that a workgroup takes in turn: it reads the next one while it writes one. With fewer, GPUs are filled more evenly.
MOST_TURNS = 8
ENOUGH_GROUPS = 1024
# 16-bit logits are limited by instructions rather than memory. Up to this many classes, many small workgroups that read most
# of a row twice, the second time from cache, are faster than few that hold it in registers. They do not take turns.
WALKED_BY_FEW = 65536
_FEW = rows.RowTile(256, 256, 8, True)
# Vectors of a thread, and threads of a row by classes, where references are sampled. Such rows are walked even if a whole
# row would fit: a compiler that sees the same vectors twice seems to keep them unpacked, for which there are no registers.
# They take exact powers of differences: with a reference that is not the highest value, the rounding of its product with
# log2(e) would show on GPUs that do not fuse multiply and add.
_MOST_SAMPLED = 16
_THREADS_BY_CLASSES = {16384: 256, 65536: 512}


def cross_entropy_forward(device: Device, args: Any) -> tuple[Region, Region]:
    """The loss, and (2, N) numbers for backward: for each row a reference near its highest logit, and its sum of powers."""
    losses, stats = _new_losses(device, args)
    _run(device, args, None, losses, stats, None)
    return _reduced(device, args, losses), stats


def cross_entropy_backward(device: Device, args: Any) -> Region:
    forward = args.forward
    dlogits = device.empty(forward.logits.shape, forward.logits.dtype)
    row_grads = _row_grads(device, forward, args.grad)
    _run(device, forward, row_grads, None, copies.contiguous(device, args.row_stats), dlogits)
    return dlogits


def cross_entropy_forward_backward(device: Device, args: Any) -> tuple[Region, Region]:
    dlogits = device.empty(args.logits.shape, args.logits.dtype)
    losses, stats = _new_losses(device, args)
    _run(device, args, _row_grads(device, args, None), losses, stats, dlogits)
    return _reduced(device, args, losses), dlogits


def _new_losses(device: Device, args: Any) -> tuple[Region, Region]:
    count = args.targets.numel
    return device.empty((count,), torch.float32), device.empty((2, count), torch.float32)


def _reduced(device: Device, args: Any, losses: Region) -> Region:
    """The loss from those of the rows (N,), which are 0 where the target is ignored."""
    if args.reduction == "none":
        return losses.with_shape(args.targets.shape)
    return _one_number(device, args, losses, gradient=False)


def _row_grads(device: Device, args: Any, grad: Region | None) -> Region:
    """The gradient of each row's loss, (N,), from that of the loss; None is 1."""
    rows_of = (args.targets.numel,)
    if args.reduction == "mean":
        return _one_number(device, args, grad, gradient=True).with_shape(rows_of, (0,))
    if grad is None:
        return copies.full(device, (1,), 1.0, torch.float32).with_shape(rows_of, (0,))
    if args.reduction == "sum":
        return grad.with_shape(rows_of, (0,))
    return copies.contiguous(device, grad).flat()


def _one_number(device: Device, args: Any, x: Region | None, gradient: bool) -> Region:
    return one_number(device, args, args.targets, None, x, gradient)


def one_number(
    device: Device, args: Any, targets: Region, weights: Region | None, x: Region | None, gradient: bool
) -> Region:
    """The loss from those of the rows, or what each row's loss gets of its gradient; x None: 1. weights: for a mean."""
    mean = args.reduction == "mean"
    weighted = DTYPES[weights.dtype] if mean and weights is not None else ""
    y = device.empty((), torch.float32)
    kernel = device.kernel(
        "loss", targets=DTYPES[targets.dtype], mean=mean, gradient=gradient, given=x is not None, weighted=weighted
    )
    flat = copies.contiguous(device, targets).flat()
    inputs = {} if x is None else {"x": copies.contiguous(device, x)}
    if weighted and weights is not None:
        inputs["weights"] = weights
    device.run(kernel, 1, (targets.numel, *words_of(args.ignore_index)), targets=flat, y=y, **inputs)
    return y


def words_of(number: int) -> tuple[int, int]:
    """64 bits as two words: an ignore_index outside the targets' dtype must not wrap around to a valid target."""
    return number & 0xFFFFFFFF, (number >> 32) & 0xFFFFFFFF


def _run(
    device: Device, args: Any, row_grads: Region | None, losses: Region | None, stats: Region, dlogits: Region | None
) -> None:
    targets = copies.contiguous(device, args.targets).flat()
    sides = {"targets": targets, "stats": stats.with_shape((targets.numel, 2))}
    sides |= {name: side for name, side in (("losses", losses), ("row_grads", row_grads)) if side is not None}
    run_rows(device, args, args.logits, args.logits.shape[-1], 0, sides, dlogits)


def run_rows(
    device: Device, args: Any, logits: Region, classes: int, first_class: int, sides: dict[str, Region],
    dlogits: Region | None,
) -> None:  # fmt: skip
    """The row kernel on logits ``(…, width)``: all classes, or those from ``first_class`` on, where only dlogits is wanted.

    args: has the options of the loss. sides: what the kernel reads and writes per row, by its names in the shader.
    """
    targets, row_grads = sides["targets"], sides.get("row_grads")
    count, width = targets.numel, logits.shape[-1]
    if count == 0 or (width == 0 and "losses" not in sides):
        return
    x = rows.as_rows(device, logits) if width else logits.with_shape((count, 0), (0, 1))
    # Does the kernel take its references from few values? Then it keeps no values in registers as float32.
    sampled = x.dtype.itemsize == 2 and args.softcap is None and rows.are_aligned(x)
    at = rows.layout(device, _tile(device, width, x.dtype, sampled), x)
    weights = sides.get("token_weights")
    variant = {
        "targets": DTYPES[targets.dtype], "forward": "losses" in sides, "gradient": row_grads is not None,
        "cap": args.softcap is not None, "smooth": args.label_smoothing > 0, "sampled": sampled,
        "weighted": "" if weights is None else DTYPES[weights.dtype], "logprobs": "logprobs" in sides,
        "entropy": "entropies" in sides, "tilted": row_grads is not None and len(row_grads.shape) == 2,
    }  # fmt: skip
    result = {} if dlogits is None else {"dlogits": dlogits.with_shape((count, width))}
    kernel = rows.RowKernel("cross_entropy", at, variant, {"logits": x}, result, sides)
    parameters = (
        0 if row_grads is None else row_grads.strides[0], classes, first_class, *words_of(args.ignore_index),
        args.label_smoothing, args.z_loss, args.softcap or 1.0,
    )  # fmt: skip
    for first, length in kernel.pieces(device):
        groups = _groups(length, at.tile, sampled)
        turns = groups * at.tile.rows < length
        kernel.run_piece(device, first, length, groups, (groups, *parameters), turns=turns)


def _tile(device: Device, width: int, dtype: torch.dtype, sampled: bool) -> rows.RowTile:
    tile = rows.tile(device, width, rows.softmax_words(dtype))
    if dtype.itemsize == 2 and tile.lanes > rows.THREADS:
        if sampled:
            threads = next((t for classes, t in _THREADS_BY_CLASSES.items() if width <= classes), rows.LONGEST_THREADS)
            while threads > device.capabilities.workgroup_threads:  # a power of two, for sums across threads
                threads //= 2
            parts = -(-width // (4 * threads * _MOST_SAMPLED))
            return rows.RowTile(threads, threads, -(-width // (4 * threads * parts)), True)
        if width <= WALKED_BY_FEW:
            return _FEW
    return tile


def _groups(count: int, tile: rows.RowTile, sampled: bool) -> int:
    """Number of workgroups. One that works on a row with all its threads takes several, if there are enough workgroups."""
    if tile.rows > 1 or tile == _FEW or sampled:
        return -(-count // tile.rows)
    return -(-count // max(1, min(MOST_TURNS, count // ENOUGH_GROUPS)))
