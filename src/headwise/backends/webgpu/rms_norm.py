"""RMS normalisation on WebGPU: ``wgsl/rms_norm*.wgsl``.

Backward, rows that registers hold: one kernel reads x and the gradient once, writes dx and shares of dweight. Longer rows
are read twice: for the mean of each row, then column by column for both results. Shares are added up in order.
"""

from __future__ import annotations

from typing import Any

import torch

from headwise.backends.webgpu import copies, rows
from headwise.backends.webgpu.array import launcher
from headwise.backends.webgpu.runtime import Device
from headwise.backends.webgpu.shaders import DTYPES
from headwise.backends.webgpu.storage import Region

# More shares of dweight fill the machine more evenly, and are more to add up.
MOST_GROUPS = 1024
ROWS_PER_SHARE = 64
FEWEST_SHARES = 256  # where there are as many rows
ACROSS = 8  # vectors of columns that a workgroup adds up
UNROLL = 4  # rows of long ones that are read at once
MOST_WITH_SPARE = 4  # vectors of a thread that leave registers for the weight and, of 16 bits, a second row ahead
_WIDEST_PARTS = 1 << 26  # bytes of all shares

_COLUMNS = rows.Tile(256, 256, 1, False)
_MEAN_ONLY = {"mean_only": True, "keeps_gain": False, "two_ahead": False}


@launcher
def rms_norm_forward(
    device: Device, x: Region, weight: Region | None, eps: float, weight_offset: float
) -> tuple[Region, Region]:
    y = device.empty(x.shape, x.dtype)
    if y.numel == 0:
        return y, copies.full(device, x.shape[:-1], 0.0, torch.float32)
    rstd = device.empty(x.shape[:-1], torch.float32)
    _forward(device, rows.as_rows(device, x), weight, eps, weight_offset, y, rstd)
    return y, rstd


@launcher
def rms_norm_output(device: Device, x: Region, weight: Region | None, eps: float, weight_offset: float) -> Region:
    """Without rstd, where nobody will ask for a gradient."""
    y = device.empty(x.shape, x.dtype)
    if y.numel:
        _forward(device, rows.as_rows(device, x), weight, eps, weight_offset, y, None)
    return y


def _forward(
    device: Device, x: Region, weight: Region | None, eps: float, offset: float, y: Region | None, rstd: Region | None
) -> None:
    """Either of y and rstd, or both."""
    at = rows.layout(device, rows.tile(device, x.shape[1], rows.words(x.dtype)), x)
    variant = {
        "weight": "" if weight is None else DTYPES[weight.dtype], "normalises": y is not None, "keeps": rstd is not None,
    }  # fmt: skip
    sides = _weight(device, weight)
    if rstd is not None:
        sides["rstd"] = rstd.with_shape(x.shape[:1])
    rows.run(device, "rms_norm", at, (eps, offset), variant, {"x": x}, "y", y and y.with_shape(x.shape), sides)


def _weight(device: Device, weight: Region | None) -> dict[str, Region]:
    """As ``(1, width)``, to bind: whole vectors of it where rows are whole vectors."""
    if weight is None:
        return {}
    dense = copies.contiguous(device, weight)
    if dense.offset % 4:
        dense = copies.copied(device, dense)
    return {"weight": dense.with_shape((1, *dense.shape))}


@launcher
def rms_norm_backward(
    device: Device,
    grad: Region,
    x: Region,
    weight: Region | None,
    rstd: Region | None,
    eps: float,
    weight_offset: float,
) -> tuple[Region, Region]:
    """Without a weight, its gradient has no elements."""
    dx = device.empty(x.shape, x.dtype)
    if dx.numel == 0:
        dweight = (
            device.empty((0,), x.dtype) if weight is None else copies.full(device, weight.shape, 0.0, weight.dtype)
        )
        return dx, dweight
    flat, g = rows.as_rows(device, x), rows.as_rows(device, grad)
    count, width = flat.shape
    if rstd is None:
        rstd = device.empty((count,), torch.float32)
        _forward(device, flat, None, eps, 0.0, None, rstd)
    rstd = copies.contiguous(device, rstd).with_shape((count,))
    sides = {"rstd": rstd, **_weight(device, weight)}
    # Beside x and the gradient, four columns of dweight are held.
    words = rows.words(x.dtype, 2) + (0 if weight is None else 4)
    tile = rows.tile(device, width, words)
    at = rows.layout(device, tile, flat, g)
    variant: dict[str, Any] = {"weight": "" if weight is None else DTYPES[weight.dtype]}
    result = dx.with_shape(flat.shape)
    if tile.walks:
        sides["mean"] = device.empty((count,), torch.float32)
        rows.run(
            device, "rms_norm_backward", at, (weight_offset, 0, 0), variant | _MEAN_ONLY,
            {"x": flat, "g": g}, "", None, sides,
        )  # fmt: skip
        at = rows.layout(device, _COLUMNS, flat, g)
        name, variant = "rms_norm_columns", variant | {"unroll": UNROLL}
    else:
        few = tile.held <= MOST_WITH_SPARE
        name, variant = "rms_norm_backward", variant | {
            "mean_only": False, "keeps_gain": few and weight is not None, "two_ahead": few and x.dtype.itemsize == 2,
        }  # fmt: skip
    shares = _shares(device, count, width, at.tile.rows)
    grid = (-(-width // 1024), shares) if tile.walks else -(-shares // at.tile.rows)
    if weight is not None:
        sides["parts"] = device.empty((shares, -(-width // 4) * 4), torch.float32)
    for first, length in rows.pieces(device, flat, g, result):
        numbers = (weight_offset, shares, int(first > 0))
        rows.run_piece(
            device, name, at, first, length, grid, numbers, variant, {"x": flat, "g": g}, "dx", result, sides
        )  # fmt: skip
    if weight is None:
        return dx, device.empty((0,), x.dtype)
    return dx, _added(device, sides["parts"], weight.dtype, width)


def _shares(device: Device, count: int, width: int, rows_per_group: int) -> int:
    enough = max(count // ROWS_PER_SHARE, min(count, FEWEST_SHARES))
    room = min(_WIDEST_PARTS, device.capabilities.binding_bytes - 512) // (4 * width + 12)
    return max(2, min(enough, MOST_GROUPS * rows_per_group, room) // 2 * 2)


def _added(device: Device, parts: Region, dtype: torch.dtype, width: int) -> Region:
    """dweight from its shares."""
    shares, columns = parts.shape
    blocks = -(-columns // (4 * ACROSS))
    slices = min(64, shares // 256)
    if slices > 1 and blocks < 64:  # few columns: too few workgroups would add up many rows each
        parts = _added_slices(device, parts, device.empty((slices, columns), torch.float32), blocks)
    return _added_slices(device, parts, device.empty((1, width), dtype), blocks).with_shape((width,))


def _added_slices(device: Device, parts: Region, sums: Region, blocks: int) -> Region:
    shares, columns = parts.shape
    slices = sums.shape[0]
    kernel = device.kernel("rms_norm_weight", dtype=DTYPES[sums.dtype], across=ACROSS)
    device.run(kernel, (blocks, slices), (shares, columns // 4, -(-shares // slices)), parts=parts, sums=sums)
    return sums
