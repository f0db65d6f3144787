"""Merging of partial attention results on WebGPU.

A kernel binds eight tensors, so it merges up to three parts. More parts are first merged in threes, into float32; merging is
associative. The backward recomputes the merged result in float32, then runs once per part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from headwise.backends.webgpu import copies, scores
from headwise.backends.webgpu.device import Device
from headwise.backends.webgpu.shaders import DTYPES
from headwise.backends.webgpu.storage import Region

_PARTS = 3
_BACKWARD_ROWS = 8  # of a workgroup


def merge_attention(device: Device, args: Any) -> tuple[Region, Region]:
    outs, lses = args.outs, args.lses
    rows = scores.empty_rows(device, outs[0].shape, outs[0].dtype)
    lse = device.empty(lses[0].shape, torch.float32)
    if lse.numel:
        outs = [scores.aligned(device, x).with_leading(4) for x in outs]
        _merge(device, outs, [x.with_leading(3) for x in lses], rows.written.with_leading(4), lse.with_leading(3))
    return scores.finish(device, rows), lse


def merge_attention_backward(device: Device, args: Any) -> tuple[Region, ...]:
    d_outs = [scores.empty_rows(device, x.shape, x.dtype) for x in args.outs]
    d_lses = [device.empty(x.shape, torch.float32) for x in args.lses]
    if args.lse.numel:
        _backward(device, args, [rows.written for rows in d_outs], d_lses)
    return *(scores.finish(device, rows) for rows in d_outs), *d_lses


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
    for to, to_lse, *parts in copies.pieces(device, out, lse, *outs, *lses, dims=3):
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


def _backward(device: Device, args: Any, d_outs: Sequence[Region], d_lses: Sequence[Region]) -> None:
    outs, (grad,) = ([scores.aligned(device, x).with_leading(4) for x in xs] for xs in (args.outs, [args.grad_out]))
    lses = [x.with_leading(3) for x in args.lses]
    merged, merged_lse = _merge(device, outs, lses)
    kernel = device.kernel("merge_backward", dtype=DTYPES[grad.dtype])
    names = ("part_out", "part_lse", "grad", "grad_lse", "out", "lse", "d_out", "d_lse")
    for out, lse, d_out, d_lse in zip(outs, lses, d_outs, d_lses, strict=True):
        results = (d_out.with_leading(4), d_lse.with_leading(3))
        regions = (out, lse, grad, args.grad_lse.with_leading(3), merged, merged_lse, *results)
        for piece in copies.pieces(device, *regions, dims=3):
            part, part_lse, g, g_lse = piece[:4]
            rows = part_lse.numel
            parameters = (
                rows, part.shape[-1] // 4, *part.shape[1:3], *scores.vectors(part), *part_lse.strides,
                *scores.vectors(g), *g_lse.strides,
            )  # fmt: skip
            device.run(kernel, -(-rows // _BACKWARD_ROWS), parameters, **dict(zip(names, piece, strict=True)))
