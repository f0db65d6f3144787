"""Cross entropy on WebGPU: ``wgsl/cross_entropy.wgsl``, one kernel for losses, gradient, or both."""

from __future__ import annotations

from typing import NamedTuple

import torch

from headwise.backends.webgpu import copies, rows
from headwise.backends.webgpu.array import launcher
from headwise.backends.webgpu.runtime import Device
from headwise.backends.webgpu.shaders import DTYPES
from headwise.backends.webgpu.storage import Region

# Rows of a workgroup that has each to itself: the next one is read while one is written. Fewer of them fill a GPU evenly.
MOST_TURNS = 8
ENOUGH_GROUPS = 1024
# 16 bits are bound by instructions rather than memory. Up to so many classes, many small workgroups that read most of a row
# twice, the second time from the cache, wait less than few that hold it in registers; longer rows would not stay there. So
# many need not take turns, either.
WALKED_BY_FEW = 65536
_FEW = rows.Tile(256, 256, 8, True)
# Where references are sampled a thread has room for so many vectors, and rows have so many threads, by their classes. They
# are walked even where all of a row has room: a compiler that sees the same vectors twice seems to keep them unpacked in
# between, and there are no registers for that. Powers of differences are taken exactly there: a reference that is not the
# highest value itself would show the rounding of its product with log2(e) wherever a GPU does not fuse multiplications with
# additions.
_MOST_SAMPLED = 16
_THREADS_BY_CLASSES = {16384: 256, 65536: 512}


class _Options(NamedTuple):
    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float | None


@launcher
def cross_entropy_forward(
    device: Device, logits: Region, targets: Region, ignore_index: int, label_smoothing: float, z_loss: float,
    softcap: float | None,
) -> tuple[Region, Region]:  # fmt: skip
    """Losses of the rows (N,), and for backward (2, N) numbers: of each row in turn a reference, near its highest logit, and
    its total of powers beside that."""
    losses, stats = _new_losses(device, targets)
    _launch(
        device, None, logits, targets, losses, stats, None, _Options(ignore_index, label_smoothing, z_loss, softcap)
    )
    return losses, stats


@launcher
def cross_entropy_backward(
    device: Device, row_grads: Region, logits: Region, targets: Region, row_stats: Region, ignore_index: int,
    label_smoothing: float, z_loss: float, softcap: float | None,
) -> Region:  # fmt: skip
    dlogits = device.empty(logits.shape, logits.dtype)
    stats = copies.contiguous(device, row_stats)
    options = _Options(ignore_index, label_smoothing, z_loss, softcap)
    _launch(device, row_grads, logits, targets, None, stats, dlogits, options)
    return dlogits


@launcher
def cross_entropy_forward_backward(
    device: Device, row_grads: Region, logits: Region, targets: Region, ignore_index: int, label_smoothing: float,
    z_loss: float, softcap: float | None,
) -> tuple[Region, Region]:  # fmt: skip
    """Losses of the rows (N,), and the gradient of the logits."""
    dlogits = device.empty(logits.shape, logits.dtype)
    losses, stats = _new_losses(device, targets)
    options = _Options(ignore_index, label_smoothing, z_loss, softcap)
    _launch(device, row_grads, logits, targets, losses, stats, dlogits, options)
    return losses, dlogits


def _new_losses(device: Device, targets: Region) -> tuple[Region, Region]:
    count = targets.numel
    return device.empty((count,), torch.float32), device.empty((2, count), torch.float32)


def _launch(
    device: Device, row_grads: Region | None, logits: Region, targets: Region, losses: Region | None, stats: Region,
    dlogits: Region | None, options: _Options,
) -> None:  # fmt: skip
    count, width = targets.numel, logits.shape[-1]
    if count == 0 or (width == 0 and losses is None):
        return
    x = rows.as_rows(device, logits) if width else logits.with_shape((count, 0), (0, 1))
    # Does the kernel take its references from few values? Then none wait in registers as float32.
    sampled = x.dtype.itemsize == 2 and options.softcap is None and rows.are_aligned(x)
    at = rows.layout(device, _tile(device, width, x.dtype, sampled), x)
    variant = {
        "targets": DTYPES[targets.dtype], "forward": losses is not None, "gradient": row_grads is not None,
        "cap": options.softcap is not None, "smooth": options.label_smoothing > 0, "sampled": sampled,
    }  # fmt: skip
    sides = {
        "targets": copies.contiguous(device, targets).with_shape((count,)),
        "stats": stats.with_shape((count, 2)),
    }
    if losses is not None:
        sides["losses"] = losses
    if row_grads is not None:
        sides["row_grads"] = row_grads
    parameters = (
        0 if row_grads is None else row_grads.strides[0], options.ignore_index & 0xFFFFFFFF,
        (options.ignore_index >> 32) & 0xFFFFFFFF, options.label_smoothing, options.z_loss, options.softcap or 1.0,
    )  # fmt: skip
    y = None if dlogits is None else dlogits.with_shape((count, width))
    for first, length in rows.pieces(device, x, *(() if y is None else (y,))):
        groups = _groups(length, at.tile, sampled)
        rows.run_piece(
            device, "cross_entropy", at, first, length, groups, (groups, *parameters),
            variant | {"turns": groups * at.tile.rows < length}, {"logits": x}, "dlogits", y, sides,
        )  # fmt: skip


def _tile(device: Device, width: int, dtype: torch.dtype, sampled: bool) -> rows.Tile:
    tile = rows.tile(device, width, rows.softmax_words(dtype))
    if dtype.itemsize == 2 and tile.lanes > rows.THREADS:
        if sampled:
            threads = next((t for classes, t in _THREADS_BY_CLASSES.items() if width <= classes), rows.LONGEST_THREADS)
            while threads > device.capabilities.workgroup_threads:  # a power of two, as sums across threads need it
                threads //= 2
            parts = -(-width // (4 * threads * _MOST_SAMPLED))
            return rows.Tile(threads, threads, -(-width // (4 * threads * parts)), True)
        if width <= WALKED_BY_FEW:
            return _FEW
    return tile


def _groups(count: int, tile: rows.Tile, sampled: bool) -> int:
    """Workgroups: of several rows each where a row has all threads, as long as there are many workgroups."""
    if tile.rows > 1 or tile == _FEW or sampled:
        return -(-count // tile.rows)
    return -(-count // max(1, min(MOST_TURNS, count // ENOUGH_GROUPS)))
