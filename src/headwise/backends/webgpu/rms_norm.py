"""RMSNorm on WebGPU: norms.py, about zero."""

from __future__ import annotations

from typing import Any

from headwise.backends.webgpu.device import Device
from headwise.backends.webgpu.norms import Norm, backward, forward
from headwise.backends.webgpu.storage import Region


def rms_norm_forward(device: Device, args: Any) -> tuple[Region, Region | None]:
    norm = Norm(args.x, weight=args.weight, eps=args.eps, weight_offset=args.weight_offset)
    y, _, rstd = forward(device, norm, args.with_rstd)
    return y, rstd


def rms_norm_backward(device: Device, args: Any) -> tuple[Region, Region | None]:
    norm = Norm(args.x, weight=args.weight, eps=args.eps, weight_offset=args.weight_offset)
    dx, dweight, _ = backward(device, norm, args.grad, None, args.rstd)
    return dx, dweight
