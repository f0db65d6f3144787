"""RMSNorm on WebGPU: norms.py, about zero."""

from __future__ import annotations

from typing import Any

from headwise.backends.norm import about_zero
from headwise.backends.webgpu.device import Device
from headwise.backends.webgpu.norms import backward, forward
from headwise.backends.webgpu.storage import Region


def rms_norm_forward(device: Device, args: Any) -> tuple[Region, Region | None]:
    y, _, rstd = forward(device, about_zero(args, args.x), args.with_rstd)
    return y, rstd


def rms_norm_backward(device: Device, args: Any) -> tuple[Region, Region | None]:
    dx, dweight, _ = backward(device, about_zero(args, args.x), args.grad, None, args.rstd)
    return dx, dweight
