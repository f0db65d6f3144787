"""LayerNorm on WebGPU: norms.py, about the mean."""

from __future__ import annotations

from typing import Any

from headwise.backends.webgpu.device import Device
from headwise.backends.webgpu.norms import Norm, backward, forward
from headwise.backends.webgpu.storage import Region


def layer_norm_forward(device: Device, args: Any) -> tuple[Region, Region | None]:
    norm = Norm(args.x, weight=args.weight, bias=args.bias, eps=args.eps, centre=True)
    y, _, statistics = forward(device, norm, args.with_statistics)
    return y, statistics


def layer_norm_backward(device: Device, args: Any) -> tuple[Region, Region | None, Region | None]:
    norm = Norm(args.x, weight=args.weight, bias=args.bias, eps=args.eps, centre=True)
    return backward(device, norm, args.grad, None, args.statistics)
