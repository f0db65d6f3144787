"""Counting, searching and running extremes: bincount, unique, repeats by numbers, searchsorted, cummax.

Results whose size only the elements know read one number back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from headwise.backends.webgpu import copies
from headwise.backends.webgpu.array import OPERATORS, Array
from headwise.backends.webgpu.aten import elementwise
from headwise.backends.webgpu.aten.rows import scan
from headwise.backends.webgpu.device import Device
from headwise.backends.webgpu.mixed_devices import MixedDevices
from headwise.backends.webgpu.recorder import replayed
from headwise.backends.webgpu.storage import Region

aten = torch.ops.aten


# ------------------------------------------------------------------------------------------------------------- searching


def _searched(device: Device, sequence: Region, x: Region, dtype: torch.dtype, right: bool) -> Region:
    sequence, x = copies.contiguous(device, sequence), copies.contiguous(device, x)
    places = device.empty(x.shape, dtype)
    width = sequence.shape[-1]
    kernel = device.kernel(
        "search", dtype=elementwise.name_of(x.dtype), kind=elementwise.kind_of(x.dtype), to=elementwise.name_of(dtype),
        right=right,
    )  # fmt: skip
    rows = len(sequence.shape) > 1
    parameters = (x.numel, x.shape[-1] if rows else max(x.numel, 1), width, width if rows else 0)
    device.run(kernel, -(-x.numel // 256), parameters, sequence=sequence, x=x, places=places)
    return places


def _searchsorted(
    sequence: Any, x: Any, *, out_int32: bool = False, right: bool = False, side: str | None = None, sorter: Any = None
) -> Any:
    if side is not None and (side not in ("left", "right") or (right and side == "left")):
        raise RuntimeError(f"searchsorted: side is {side!r} and right is {right}; side needs to be 'left' or 'right'")
    if sorter is not None:
        sequence = sequence.gather(-1, sorter)
    if not isinstance(x, torch.Tensor):
        x = torch.full((), x, dtype=torch.result_type(sequence, x), device=sequence.device)
    if not isinstance(x, Array) or not isinstance(sequence, Array):
        raise MixedDevices("searchsorted")
    if sequence.dim() == 0 or (sequence.dim() > 1 and x.shape[:-1] != sequence.shape[:-1]):
        raise RuntimeError(
            f"searchsorted: the sorted sequence is {tuple(sequence.shape)} and the values {tuple(x.shape)}; it needs to be "
            "one row, or to have the values' dims but the last"
        )
    dtype = torch.promote_types(sequence.dtype, x.dtype)
    dtype = torch.uint8 if dtype == torch.bool else dtype
    to = torch.int32 if out_int32 else torch.int64
    if x.numel() == 0 or sequence.shape[-1] == 0:
        return torch.zeros(x.shape, dtype=to, device=x.device)
    return replayed(_searched, [sequence.to(dtype), x.to(dtype)], to, right or side == "right")


def _bucketize(x: Any, boundaries: Array, *, out_int32: bool = False, right: bool = False) -> Any:
    if boundaries.dim() != 1:
        raise RuntimeError(f"bucketize: the boundaries are {tuple(boundaries.shape)}; they need to be one row")
    return _searchsorted(boundaries, x, out_int32=out_int32, right=right)


# -------------------------------------------------------------------------------------------------------------- counting


def _bincount(x: Any, weights: Any = None, minlength: int = 0) -> Any:
    if x.dim() > 1 or x.dtype.is_floating_point or minlength < 0:
        raise RuntimeError(
            f"bincount: {tuple(x.shape)} numbers of {x.dtype} and minlength {minlength}; it needs one row of whole numbers, "
            "none of them negative"
        )
    x = x.long().view(-1)
    size = minlength
    if x.numel():
        lowest, highest = torch.stack([x.amin(), x.amax()]).tolist()
        if lowest < 0:
            raise RuntimeError(f"bincount: {lowest} is among the numbers; they need to be 0 or more")
        size = max(size, highest + 1)
    if weights is None:
        counted = torch.ones((), dtype=torch.int64, device=x.device).expand(x.shape)
    elif tuple(weights.shape) != tuple(x.shape):
        raise RuntimeError(f"bincount: the weights are {tuple(weights.shape)}; they need to be {tuple(x.shape)}")
    else:
        counted = weights
        if weights.dtype != torch.float32:
            raise NotImplementedError(f"headwise: bincount with weights of {weights.dtype} on WebGPU; float32 is there")
    return torch.zeros(size, dtype=counted.dtype, device=x.device).scatter_add(0, x, counted)


def _distinct(values: Any, shape: Any, places: Any, counts: bool) -> Any:
    """The first of each run of equal values; for each element (of places) the run that it is in; how long runs are."""
    starts = torch.ones(values.shape, dtype=torch.bool, device=values.device)
    starts[1:] = values[1:] != values[:-1]
    run = starts.cumsum(0) - 1
    total = int(run[-1]) + 1 if values.numel() else 0
    made = values.new_empty(total).scatter(0, run, values)
    inverse = run if places is None else torch.empty_like(run).scatter(0, places, run)
    found = torch.zeros(total if counts else 0, dtype=torch.int64, device=values.device)
    return made, inverse.view(shape), found.scatter_add(0, run, torch.ones_like(run)) if counts else found


def _unique(x: Any, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False) -> Any:
    values, places = x.reshape(-1).sort(stable=True)
    return _distinct(values, x.shape, places, return_counts)


def _unique_consecutive(x: Any, return_inverse: bool = False, return_counts: bool = False, dim: Any = None) -> Any:
    if dim is not None and x.dim() != 1:
        raise NotImplementedError("headwise: unique_consecutive along a dim is not there on WebGPU; use x.cpu()")
    return _distinct(x.reshape(-1), x.shape, None, return_counts)


def _repeats(repeats: Any, *, output_size: Any = None) -> Any:
    """0, 0, 1, … : each number as often as repeats say."""
    if repeats.dim() != 1 or repeats.dtype not in (torch.int64, torch.int32):
        raise RuntimeError(
            f"repeat_interleave: the repeats are {tuple(repeats.shape)} of {repeats.dtype}; they need to be one row of "
            "int64 or int32"
        )
    ends = repeats.cumsum(0)
    if output_size is None:
        lowest, output_size = torch.stack([repeats.amin().long(), ends[-1]]).tolist() if repeats.numel() else (0, 0)
        if lowest < 0:
            raise RuntimeError(f"repeat_interleave: {lowest} is among the repeats; they need to be 0 or more")
    numbers = torch.arange(output_size, device=repeats.device)
    return _searchsorted(ends, numbers, right=True, out_int32=repeats.dtype == torch.int32)


# ------------------------------------------------------------------------------------------------------ running extremes


def _running(op: str) -> Callable[..., Any]:
    extreme, last = scan(op), scan("max")

    def run(x: Any, dim: int) -> Any:
        if x.dtype == torch.bool:
            values, places = run(x.to(torch.uint8), dim)
            return values.to(torch.bool), places
        if x.dim() == 0 or x.numel() == 0:
            return x.clone(), torch.zeros(x.shape, dtype=torch.int64, device=x.device)
        values = extreme(x, dim, dtype=x.dtype)
        # The place of an extreme is the last one so far where an element equals it; NaN is one.
        steps = [1] * x.dim()
        steps[dim] = x.shape[dim]
        number = torch.arange(x.shape[dim], device=x.device).view(steps)
        holds = (x == values) | x.isnan() if x.dtype.is_floating_point else x == values
        return values, last(torch.where(holds, number, 0), dim)

    return run


OPERATORS |= {
    aten.searchsorted.Tensor: _searchsorted,
    aten.searchsorted.Scalar: _searchsorted,
    aten.bucketize.Tensor: _bucketize,
    aten.bucketize.Scalar: _bucketize,
    aten.bincount.default: _bincount,
    aten._unique.default: lambda x, sorted=True, return_inverse=False: _unique(x)[:2],
    aten._unique2.default: _unique,
    aten.unique_consecutive.default: _unique_consecutive,
    aten.repeat_interleave.Tensor: _repeats,
    aten.cummax.default: _running("max"),
    aten.cummin.default: _running("min"),
}
