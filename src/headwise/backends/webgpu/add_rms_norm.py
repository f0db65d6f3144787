"""A sum and its RMSNorm on WebGPU: norms.py, of two tensors."""

from __future__ import annotations

from typing import Any

from headwise.backends.norm import about_zero
from headwise.backends.webgpu.device import Device
from headwise.backends.webgpu.norms import backward, forward
from headwise.backends.webgpu.storage import Region


def add_rms_norm_forward(device: Device, args: Any) -> tuple[Region, Region | None, Region | None]:
    return forward(device, about_zero(args, args.x, args.residual), args.with_rstd)


def add_rms_norm_backward(device: Device, args: Any) -> tuple[Region, Region | None]:
    dx, dweight, _ = backward(device, about_zero(args, args.h), args.grad, args.grad_h, args.rstd)
    return dx, dweight
