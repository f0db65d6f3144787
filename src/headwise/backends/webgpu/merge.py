"""Merging of partial attention results on WebGPU.

A kernel binds eight tensors, so three parts are merged at once. More of them are merged by threes first, into float32;
merging is associative. The backward works out the merged result again in float32, then goes from part to part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from headwise.backends.webgpu import scores
from headwise.backends.webgpu.array import launcher
from headwise.backends.webgpu.runtime import Device
from headwise.backends.webgpu.shaders import DTYPES
from headwise.backends.webgpu.storage import Region

_PARTS = 3
_BACKWARD_ROWS = 8  # of a workgroup


@launcher
def merge_attention(device: Device, outs: list[Region], lses: list[Region]) -> tuple[Region, Region]:
    rows = scores.empty_rows(device, outs[0].shape, outs[0].dtype)
    lse = device.empty(lses[0].shape, torch.float32)
    if lse.numel:
        outs = [_four_dims(scores.aligned(device, x)) for x in outs]
        _merge(device, outs, [_three_dims(x) for x in lses], _four_dims(rows.written), _three_dims(lse))
    return scores.finish(device, rows), lse


@launcher
def merge_attention_backward(
    device: Device, grad_out: Region, grad_lse: Region, outs: list[Region], lses: list[Region], out: Region, lse: Region
) -> list[Region]:
    d_outs = [scores.empty_rows(device, x.shape, x.dtype) for x in outs]
    d_lses = [device.empty(x.shape, torch.float32) for x in lses]
    if lse.numel:
        _backward(device, grad_out, grad_lse, outs, lses, [rows.written for rows in d_outs], d_lses)
    return [scores.finish(device, rows) for rows in d_outs] + d_lses


def _merge(
    device: Device, outs: Sequence[Region], lses: Sequence[Region], out: Region | None = None, lse: Region | None = None
) -> tuple[Region, Region]:
    """Merge into ``out`` and ``lse``, or into new float32 ones. All have four and three dims; rows are aligned."""
    if len(outs) > _PARTS:
        groups = range(0, len(outs), _PARTS)
        merged = [_merge(device, outs[i : i + _PARTS], lses[i : i + _PARTS]) for i in groups]
        return _merge(device, [o for o, _ in merged], [x for _, x in merged], out, lse)
    if out is None or lse is None:
        shape = (*outs[0].shape[:-1], -(-outs[0].shape[-1] // 4) * 4)
        out, lse = device.empty(shape, torch.float32), device.empty(shape[:-1], torch.float32)
    kernel = device.kernel("merge", dtype=DTYPES[outs[0].dtype], to=DTYPES[out.dtype], parts=len(outs))
    for to, to_lse, *parts in _pieces(device, out, lse, *outs, *lses):
        columns = to.shape[-1] // 4
        count = to_lse.numel * columns
        strides, regions = [], {}
        for i in range(len(outs)):
            part, part_lse = parts[i], parts[len(outs) + i]
            regions[f"out{i}"], regions[f"lse{i}"] = part, part_lse
            for stride, lse_stride in zip(scores.vectors(part), part_lse.strides, strict=True):
                strides += [stride, lse_stride]
        parameters = (count, columns, *to.shape[1:3], *strides)
        device.run(kernel, -(-count // 256), parameters, **regions, out=to, lse=to_lse)
    return out, lse


def _backward(
    device: Device, grad_out: Region, grad_lse: Region, outs: Sequence[Region], lses: Sequence[Region],
    d_outs: Sequence[Region], d_lses: Sequence[Region],
) -> None:  # fmt: skip
    outs, (grad,) = ([_four_dims(scores.aligned(device, x)) for x in xs] for xs in (outs, [grad_out]))
    lses = [_three_dims(x) for x in lses]
    merged, merged_lse = _merge(device, outs, lses)
    kernel = device.kernel("merge_backward", dtype=DTYPES[grad.dtype])
    for out, lse, d_out, d_lse in zip(outs, lses, d_outs, d_lses, strict=True):
        names = ("part_out", "part_lse", "grad", "grad_lse", "out", "lse", "d_out", "d_lse")
        regions = (
            out, lse, grad, _three_dims(grad_lse), merged, merged_lse, _four_dims(d_out), _three_dims(d_lse),
        )  # fmt: skip
        for piece in _pieces(device, *regions):
            part, part_lse, g, g_lse = piece[:4]
            rows = part_lse.numel
            parameters = (
                rows, part.shape[-1] // 4, *part.shape[1:3], *scores.vectors(part), *part_lse.strides,
                *scores.vectors(g), *g_lse.strides,
            )  # fmt: skip
            device.run(kernel, -(-rows // _BACKWARD_ROWS), parameters, **dict(zip(names, piece, strict=True)))


def _pieces(device: Device, *regions: Region) -> Iterator[tuple[Region, ...]]:
    """The regions, all of the same first three dims; in halves, and halves of those, where one is too large to bind.

    Halves of the outermost dim that has some: a contiguous tensor's stay contiguous.
    """
    most = device.capabilities.binding_bytes
    if all(x.storage.size <= most or _span_bytes(x) <= most - 512 for x in regions):
        yield regions
        return
    dim = next((d for d, size in enumerate(regions[0].shape[:3]) if size > 1), None)
    if dim is None:
        yield regions  # one row, and still too large: the device says so
        return
    half, size = regions[0].shape[dim] // 2, regions[0].shape[dim]
    yield from _pieces(device, *(x.narrow(dim, 0, half) for x in regions))
    yield from _pieces(device, *(x.narrow(dim, half, size - half) for x in regions))


def _span_bytes(x: Region) -> int:
    low, high = x.span()
    return (high - low) * x.itemsize


def _four_dims(x: Region) -> Region:
    missing = 4 - len(x.shape)
    return x if missing == 0 else x.with_shape((1,) * missing + x.shape, (0,) * missing + x.strides)


def _three_dims(x: Region) -> Region:
    missing = 3 - len(x.shape)
    return x if missing == 0 else x.with_shape((1,) * missing + x.shape, (0,) * missing + x.strides)
