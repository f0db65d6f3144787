"""The norms on WebGPU: ``wgsl/norm*.wgsl``. Of a tensor or of the sum of two, about zero or about the mean.

Backward: one kernel reads rows that fit into registers once, and writes dx and partial sums of dweight and dbias. Longer
rows are read twice: for the means of each row, then by columns for all results. The partial sums are added in a fixed
order.
"""

from __future__ import annotations

from typing import Any

import torch

from headwise.backends.norm import Norm
from headwise.backends.webgpu import copies, rows
from headwise.backends.webgpu.device import Device
from headwise.backends.webgpu.rows import RowKernel, RowTile
from headwise.backends.webgpu.shaders import DTYPES
from headwise.backends.webgpu.storage import Region

# More partial sums of dweight fill the GPU more evenly, but take longer to add up.
MOST_GROUPS = 1024
ROWS_PER_PARTIAL = 64
FEWEST_PARTIALS = 256  # if there are as many rows
ACROSS = 8  # vectors of columns that a workgroup adds up
UNROLL = 4  # long rows that are read at once
MOST_WITH_SPARE = 4  # vectors of a thread that leave registers for the weight and, with 16 bits, a second row ahead
_MOST_PARTIAL_BYTES = 1 << 26

_COLUMNS = RowTile(256, 256, 1, False)
_MEANS_ONLY = {"means_only": True, "keeps_gain": False, "two_ahead": False}


def forward(device: Device, norm: Norm[Region], with_statistics: bool) -> tuple[Region, Region | None, Region | None]:
    """y, h where there is a residual, and the statistics where they are wanted."""
    x = norm.x
    y = device.empty(x.shape, x.dtype)
    h = None if norm.residual is None else device.empty(x.shape, x.dtype)
    if y.numel == 0:
        return y, h, copies.full(device, norm.statistics_shape, 0.0, torch.float32) if with_statistics else None
    statistics = device.empty(norm.statistics_shape, torch.float32) if with_statistics else None
    _normalise(device, norm, y, h, statistics)
    return y, h, statistics


def _normalise(
    device: Device, norm: Norm[Region], y: Region | None, h: Region | None, statistics: Region | None
) -> None:
    """Either of y and the statistics, or both."""
    inputs = {"x": rows.as_rows(device, norm.x)}
    if norm.residual is not None:
        inputs["residual"] = rows.as_rows(device, norm.residual)
    x = inputs["x"]
    tile = rows.tile(device, x.shape[1], rows.words(x.dtype, len(inputs)))
    at = rows.layout(device, tile, *inputs.values())
    variant = {
        "weight": _dtype(norm.weight), "bias": _dtype(norm.bias), "centre": norm.centre, "residual": h is not None,
        "normalises": y is not None, "keeps": statistics is not None,
    }  # fmt: skip
    sides = {**_column(device, "weight", norm.weight), **_column(device, "bias", norm.bias)}
    if statistics is not None:
        sides["statistics"] = _of_rows(statistics, x.shape[0])
    results = {name: result.with_shape(x.shape) for name, result in (("h", h), ("y", y)) if result is not None}
    RowKernel("norm", at, variant, inputs, results, sides).run(device, (norm.eps, norm.weight_offset))


def _of_rows(statistics: Region, count: int) -> Region:
    """(..., 3) or (...,) as (count, 3) or (count,)."""
    return statistics.with_shape((count,) if statistics.numel == count else (count, 3))


def _column(device: Device, name: str, values: Region | None) -> dict[str, Region]:
    """The binding of a weight or a bias, as ``(1, width)``."""
    if values is None:
        return {}
    return {name: copies.contiguous_vectors(device, values).with_leading(2)}


def _dtype(values: Region | None) -> str:
    return "" if values is None else DTYPES[values.dtype]


def backward(
    device: Device, norm: Norm[Region], grad: Region, added: Region | None, statistics: Region | None
) -> tuple[Region, Region | None, Region | None]:
    """dx, dweight and dbias; statistics that are None are computed again. norm: of what was normalised, x or h."""
    x, weight, bias = norm.x, norm.weight, norm.bias
    wanted = [p for p in (weight, bias) if p is not None]
    dx = device.empty(x.shape, x.dtype)
    if dx.numel == 0:
        return dx, *_in_places([copies.full(device, p.shape, 0.0, p.dtype) for p in wanted], weight, bias)
    inputs = {"x": rows.as_rows(device, x), "g": rows.as_rows(device, grad)}
    if added is not None:
        inputs["added"] = rows.as_rows(device, added)
    flat = inputs["x"]
    count, width = flat.shape
    if statistics is None:
        statistics = device.empty(norm.statistics_shape, torch.float32)
        _normalise(device, norm._replace(weight=None, bias=None, weight_offset=0.0), None, None, statistics)
    known = {"statistics": _of_rows(copies.contiguous(device, statistics), count)}
    sides, result = _column(device, "weight", weight), {"dx": dx.with_shape(flat.shape)}
    # Besides x and the gradients, registers hold four columns of dweight and of dbias.
    tile = rows.tile(device, width, rows.words(x.dtype, len(inputs)) + 4 * len(wanted))
    variant: dict[str, Any] = {
        "weight": _dtype(weight), "bias": _dtype(bias), "centre": norm.centre, "added": added is not None,
    }  # fmt: skip
    if tile.walks:
        terms = {"terms": device.empty((count, 5 if norm.centre else 2), torch.float32)}
        read = {name: inputs[name] for name in ("x", "g")}
        at = rows.layout(device, tile, *read.values())
        means = RowKernel("norm_backward", at, variant | _MEANS_ONLY, read, {}, {**sides, **known, **terms})
        means.run(device, (norm.weight_offset, 0, 0))
        at, sides = rows.layout(device, _COLUMNS, *inputs.values()), {**sides, **terms}
        name, variant = "norm_columns", variant | {"unroll": UNROLL}
    else:
        at, sides = rows.layout(device, tile, *inputs.values()), {**sides, **known}
        few = tile.held <= MOST_WITH_SPARE
        name, variant = "norm_backward", variant | {
            "means_only": False, "keeps_gain": few and weight is not None, "two_ahead": few and x.itemsize == 2,
        }  # fmt: skip
    partials = _partials(device, count, width * max(1, len(wanted)), at.tile.rows)
    grid = (-(-width // 1024), partials) if tile.walks else -(-partials // at.tile.rows)
    if wanted:
        sides["partials"] = device.empty((len(wanted) * partials, -(-width // 4) * 4), torch.float32)
    kernel = RowKernel(name, at, variant, inputs, result, sides)
    for first, length in kernel.pieces(device):
        kernel.run_piece(device, first, length, grid, (norm.weight_offset, partials, int(first > 0)))
    sums = [
        _sum(device, sides["partials"].narrow(0, i * partials, partials), p.dtype, width) for i, p in enumerate(wanted)
    ]
    return dx, *_in_places(sums, weight, bias)


def _in_places(made: list[Region], weight: Region | None, bias: Region | None) -> tuple[Region | None, Region | None]:
    """What was made for those of weight and bias that are there, each in its place."""
    left = iter(made)
    return None if weight is None else next(left), None if bias is None else next(left)


def _partials(device: Device, count: int, width: int, rows_per_group: int) -> int:
    """width: of all sums together."""
    enough = max(count // ROWS_PER_PARTIAL, min(count, FEWEST_PARTIALS))
    room = min(_MOST_PARTIAL_BYTES, device.capabilities.binding_bytes - 512) // (4 * width + 24)
    return max(2, min(enough, MOST_GROUPS * rows_per_group, room) // 2 * 2)


def _sum(device: Device, partials: Region, dtype: torch.dtype, width: int) -> Region:
    """dweight or dbias from its partial sums."""
    count, columns = partials.shape
    blocks = -(-columns // (4 * ACROSS))
    slices = min(64, count // 256)
    if slices > 1 and blocks < 64:  # few columns: add up slices first, to use more workgroups
        partials = _sum_slices(device, partials, device.empty((slices, columns), torch.float32), blocks)
    return _sum_slices(device, partials, device.empty((1, width), dtype), blocks).with_shape((width,))


def _sum_slices(device: Device, partials: Region, sums: Region, blocks: int) -> Region:
    count, columns = partials.shape
    slices = sums.shape[0]
    kernel = device.kernel("norm_sums", dtype=DTYPES[sums.dtype], across=ACROSS)
    device.run(kernel, (blocks, slices), (count, columns // 4, -(-count // slices)), partials=partials, sums=sums)
    return sums
