"""A sum and its RMSNorm on WebGPU: norms.py, of two tensors."""

from __future__ import annotations

from typing import Any

from headwise.backends.webgpu.device import Device
from headwise.backends.webgpu.norms import Norm, backward, forward
from headwise.backends.webgpu.storage import Region


def add_rms_norm_forward(device: Device, args: Any) -> tuple[Region, Region | None, Region | None]:
    norm = Norm(args.x, args.residual, args.weight, eps=args.eps, weight_offset=args.weight_offset)
    return forward(device, norm, args.with_rstd)


def add_rms_norm_backward(device: Device, args: Any) -> tuple[Region, Region | None]:
    norm = Norm(args.h, weight=args.weight, eps=args.eps, weight_offset=args.weight_offset)
    dx, dweight, _ = backward(device, norm, args.grad, args.grad_h, args.rstd)
    return dx, dweight
