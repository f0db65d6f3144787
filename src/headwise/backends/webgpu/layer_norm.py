"""LayerNorm on WebGPU: norms.py, about the mean."""

from __future__ import annotations

from typing import Any

from headwise.backends.norm import about_mean
from headwise.backends.webgpu.device import Device
from headwise.backends.webgpu.norms import backward, forward
from headwise.backends.webgpu.storage import Region


def layer_norm_forward(device: Device, args: Any) -> tuple[Region, Region | None]:
    y, _, statistics = forward(device, about_mean(args, args.x), args.with_statistics)
    return y, statistics


def layer_norm_backward(device: Device, args: Any) -> tuple[Region, Region | None, Region | None]:
    return backward(device, about_mean(args, args.x), args.grad, None, args.statistics)
