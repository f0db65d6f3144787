"""Expressions over tensors, element by element: ``wgsl/pointwise.wgsl``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from headwise.backends.webgpu import copies
from headwise.backends.webgpu.device import Device
from headwise.backends.webgpu.storage import Region

NAMES = {
    torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64", torch.int32: "i32",
    torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "bool",
}  # fmt: skip
_STEP = 4  # elements of a thread
WORD = re.compile(r"\b[A-Za-z_]\w*\b")


class Input(NamedTuple):
    region: Region | None  # None: what is in the result before
    kind: str  # of number that it becomes


def name_of(dtype: torch.dtype) -> str:
    """A dtype as shaders name it."""
    if dtype not in NAMES:
        raise NotImplementedError(
            f"headwise: WebGPU computes nothing in {str(dtype).removeprefix('torch.')}; use a smaller dtype, or x.cpu()"
        )
    return NAMES[dtype]


def kind_of(dtype: torch.dtype) -> str:
    """The kind of number that a dtype is computed in."""
    name = name_of(dtype)
    return {"i64": "l", "bool": "b"}.get(name, "f" if "f" in name else "i")


def check_written(x: Any) -> None:
    """An error if elements of an array that is to be written share memory."""
    if x._layout.overlaps:
        raise RuntimeError(
            f"headwise: a tensor of shape {tuple(x.shape)} and strides {tuple(x.stride())} is written in place, and more "
            "than one element of it refers to a single memory location, as in expanded tensors. clone() it first"
        )


def compute(
    device: Device, text: str, kind: str, inputs: dict[str, Input], out: Region, scalars: Sequence[str] = (),
    part: bool = False,
) -> None:  # fmt: skip
    """out = text, for inputs that broadcast to it.

    text     WGSL: an expression of the names in ``inputs``, and of scalar0 …, numbers that come with the call
    kind     of what the expression gives
    scalars  their kinds
    part     out is part of a larger tensor, whose other elements stay
    """
    if out.numel == 0:
        return
    order = sorted(range(len(out.shape)), key=lambda d: -out.strides[d] if out.shape[d] > 1 else 0)
    target = out.permuted(order)
    if not target.contiguous or target.offset % _STEP:
        made = device.empty(out.shape, out.dtype)
        read = {name: x._replace(region=x.region or out) for name, x in inputs.items()}
        compute(device, text, kind, read, made, scalars)
        copies.copy_into(device, made, out, part=True)
        return
    given = {name: x.region.expanded(out.shape).permuted(order) for name, x in inputs.items() if x.region is not None}
    shape, strides = copies.merged(target.shape, [x.strides for x in given.values()])
    fields = tuple(
        (name, name_of((out if x.region is None else x.region).dtype),
         "own" if x.region is None else _mode(given[name], shape, strides[list(given).index(name)]), x.kind)
        for name, x in inputs.items()
    )  # fmt: skip
    strided = [strides[list(given).index(name)] for name, _, mode, _ in fields if mode == "strided"]
    kernel = device.kernel(
        "pointwise", inputs=fields, scalars=tuple(scalars), dtype=name_of(out.dtype), kind=kind,
        dims=len(shape) if strided else 1, text=text, keeps=part and target.numel % _STEP != 0,
    )  # fmt: skip
    blank = (0,) * kernel.scalars
    if strided:
        sizes = (*shape[1:], *[s for of in strided for s in of])
        bound = {name: given[name] for name, _, mode, _ in fields if mode != "own"}
        device.run(kernel, _groups(target.numel), (*blank, target.numel, *sizes), **bound, y=target)
        return
    most = (device.capabilities.binding_bytes - 512) // 8 // _STEP * _STEP
    flat = {
        name: given[name].with_shape((1,), (1,)) if mode == "one" else given[name].with_shape((target.numel,))
        for name, _, mode, _ in fields if mode != "own"
    }  # fmt: skip
    if all(copies.fits(device, x) for x in (target, *given.values())):
        most = target.numel
    for first in range(0, target.numel, most):
        count = min(most, target.numel - first)
        bound = {name: x if x.numel == 1 else x.narrow(0, first, count) for name, x in flat.items()}
        piece = target.with_shape((target.numel,)).narrow(0, first, count)
        device.run(kernel, _groups(count), (*blank, count), **bound, y=piece)


def _groups(count: int) -> int:
    return -(-count // (256 * _STEP))


def _mode(x: Region, shape: tuple[int, ...], strides: tuple[int, ...]) -> str:
    if all(s == 0 for s in strides):
        return "one"
    if len(shape) == 1 and strides == (1,) and (x.offset % _STEP == 0 or x.itemsize == 8 or x.dtype == torch.int16):
        return "flat"
    return "strided"
