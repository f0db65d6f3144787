"""Gated linear units on WebGPU: ``wgsl/glu.wgsl``."""

from __future__ import annotations

from typing import Any

from headwise.backends.webgpu import rows
from headwise.backends.webgpu.device import Device
from headwise.backends.webgpu.shaders import DTYPES
from headwise.backends.webgpu.storage import Region

_THREADS = 256


def glu_forward(device: Device, args: Any) -> Region:
    inputs = _halves(args)
    y = device.empty(inputs["gate"].shape, args.gate.dtype)
    _launch(device, args, inputs, {"y": y})
    return y


def glu_backward(device: Device, args: Any) -> tuple[Region, Region | None]:
    dgate = device.empty(args.gate.shape, args.gate.dtype)
    dup = None if args.up is None else device.empty(args.up.shape, args.up.dtype)
    results = {"d": dgate} if dup is None else {"dgate": dgate, "dup": dup}
    _launch(device, args, _halves(args) | {"grad": args.grad}, results)
    return dgate, dup


def _halves(args: Any) -> dict[str, Region]:
    """gate and up, or the views of them in one tensor ``(…, 2 W)``."""
    if args.up is not None:
        return {"gate": args.gate, "up": args.up}
    last, width = len(args.gate.shape) - 1, args.gate.shape[-1] // 2
    return {"gate": args.gate.narrow(last, 0, width), "up": args.gate.narrow(last, width, width)}


def _launch(device: Device, args: Any, inputs: dict[str, Region], results: dict[str, Region]) -> None:
    gate = inputs["gate"]
    if gate.numel == 0:
        return
    if all(x.contiguous and x.offset % 4 == 0 for x in inputs.values()) and "d" not in results:
        mode = "flat"
        matrices = {name: x.with_shape((x.numel, 1)) for name, x in (inputs | results).items()}
    else:
        matrices = {name: rows.as_rows(device, x) for name, x in (inputs | results).items()}
        mode = "rows" if rows.are_aligned(*matrices.values()) else "elements"
    variant = {
        "dtype": DTYPES[gate.dtype], "activation": args.activation, "backward": "grad" in inputs, "halves": "d" in results,
        "mode": mode, "held": 1 if mode == "elements" or gate.itemsize == 4 else 2,
    }  # fmt: skip
    kernel = device.kernel("glu", **variant)
    width = matrices["gate"].shape[1]
    for first, count in rows.pieces(device, *matrices.values()):
        bound = {name: rows.part(x, first, count) for name, x in matrices.items()}
        elements = count * (2 * width if mode == "elements" and "d" in results else width)
        vectors = -(-elements // 4)
        unit = 1 if mode == "elements" else 4
        strides = (bound[name].strides[0] // unit if count > 1 else 0 for name in inputs)
        groups = -(-vectors // (_THREADS * variant["held"]))
        device.run(kernel, groups, (vectors, elements, width // unit, *strides), **bound)
