"""Rotary position embedding on WebGPU: ``wgsl/rope.wgsl``, one dispatch for x, or for q and k."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from headwise.backends.webgpu import copies, rows, scores
from headwise.backends.webgpu.device import Device
from headwise.backends.webgpu.shaders import DTYPES
from headwise.backends.webgpu.storage import Region

_HEADS = 4  # of a thread, where there are so many


class _Job(NamedTuple):
    """A tensor to rotate, where its rows go, and where its tokens' positions are."""

    x: Region  # (B, H, S, D)
    y: Region  # (B, H, S, D), rows padded to whole vectors
    positions: Region  # (B, H, S), with a stride of 0 over heads


def rope_forward(device: Device, args: Any) -> tuple[Region, ...]:
    return _rotated(device, args, inverse=False)


def rope_backward(device: Device, args: Any) -> tuple[Region, ...]:
    return _rotated(device, args, inverse=True)


def _rotated(device: Device, args: Any, inverse: bool) -> tuple[Region, ...]:
    results, jobs = [], []
    for x in args.xs:
        if len(x.shape) == 3:
            y = scores.empty_rows(device, x.shape, x.dtype)
            wide, written = scores.heads_outside(x), scores.heads_outside(y.written)
        else:
            y = scores.empty_rows(device, x.shape, x.dtype, scores.like_heads(x, x.shape[-1])[1])
            wide, written = x, y.written
        results.append(y)
        if x.numel:
            jobs.append(_Job(wide, written, _positions(args.positions, wide)))
    if all(copies.fits(device, region) for job in jobs for region in job):
        launches = [jobs] if jobs else []
    else:
        launches = [[_Job(*piece)] for job in jobs for piece in copies.pieces(device, *job, dims=3)]
    for launch in launches:
        _launch(device, args, launch, inverse)
    return tuple(scores.finish(device, y) for y in results)


def _positions(positions: Region | None, x: Region) -> Region:
    batch, heads, length, _ = x.shape
    if positions is None:
        # Nothing is bound: of what a piece begins with, its offset is the index of its first token.
        return Region(x.storage, torch.int32, (batch, heads, length), (0, 0, 1))
    of_batch = positions.strides[0] if len(positions.shape) == 2 else 0
    return positions.with_shape((batch, heads, length), (of_batch, 0, positions.strides[-1]))


def _launch(device: Device, args: Any, jobs: Sequence[_Job], inverse: bool) -> None:
    x, _, positions = jobs[0]
    batch, _, length, dim = x.shape
    known, pairs = args.cos.shape
    given = args.positions is not None
    aligned = dim % 4 == pairs % 4 == 0 and all(_is_aligned(job.x) for job in jobs)
    tables = [_table(device, t, aligned) for t in (args.cos, args.sin)]
    unit = 4 if aligned else 1
    heads_at_once = min(_HEADS, max(job.x.shape[1] for job in jobs))
    items = (dim - pairs) // 4 if aligned else -(-dim // 4)
    variant = {
        "dtype": DTYPES[x.dtype], "tensors": len(jobs), "positions": DTYPES[args.positions.dtype] if given else "",
        "interleaved": args.interleaved, "inverse": inverse, "aligned": aligned,
        "inside": jobs[0].y.strides[1] < jobs[0].y.strides[2], "heads": heads_at_once,
    }  # fmt: skip
    strides = [t.strides[0] // unit if known > 1 else 0 for t in tables]
    where = (0 if given else positions.offset, positions.strides[0], positions.strides[2])
    numbers, bound, threads = [], {"positions": positions} if given else {}, 0
    for n, job in enumerate(jobs):
        heads = job.x.shape[1]
        x_strides = (s // unit for s in job.x.broadcast_strides[:3])
        numbers += [heads, *x_strides, job.x.strides[3], *scores.vectors(job.y)]
        bound |= {f"x{n}": job.x, f"y{n}": job.y}
        threads += batch * length * -(-heads // heads_at_once) * items
    kernel, groups = device.kernel("rope", **variant), -(-threads // 256)
    for first_row, here in rows.pieces(device, *tables) if known else [(0, 0)]:
        cos, sin = (rows.part(t, first_row, here) for t in tables)
        sizes = (batch * length, length, known, first_row, here, dim, items, pairs // unit)
        device.run(kernel, groups, (*sizes, *strides, *where, *numbers), cos=cos, sin=sin, **bound)


def _is_aligned(x: Region) -> bool:
    """Do its rows begin at whole vectors, their elements side by side?"""
    return x.strides[3] == 1 and x.offset % 4 == 0 and all(stride % 4 == 0 for stride in x.broadcast_strides[:3])


def _table(device: Device, table: Region, aligned: bool) -> Region:
    """cos or sin with rows as the kernel reads them: a copy only where they lie otherwise."""
    if table.numel == 0 or (table.strides[1] == 1 and not (aligned and (table.offset % 4 or table.strides[0] % 4))):
        return table
    return copies.copied(device, table)
