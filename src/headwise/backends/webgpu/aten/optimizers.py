"""Fused optimizers (``fused=True``), a dispatch for each parameter (``wgsl/optimizer.wgsl``), and the gradient scaler."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import torch

from headwise.backends.webgpu.array import OPERATORS, Array
from headwise.backends.webgpu.device import Device
from headwise.backends.webgpu.recorder import replayed
from headwise.backends.webgpu.shaders import DTYPES
from headwise.backends.webgpu.storage import Region

aten = torch.ops.aten
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_LISTS = ("p", "g", "m", "v", "most")
_TYPED = (*_LISTS, "rate")


def _launch(device: Device, *given: Any) -> tuple[()]:
    *regions, names, law, flags = given
    bound: dict[str, Region] = dict(zip(names, regions, strict=True))
    p = bound["p"]
    dtypes = {name: DTYPES[bound[name].dtype] if name in bound else "" for name in _TYPED}
    kernel = device.kernel(
        "optimizer", law=law, **dtypes, scaled="scale" in bound, checked="found" in bound, **dict(flags)
    )
    blank = (0.0,) * kernel.scalars
    most = (device.capabilities.binding_bytes - 512) // 16 * 4
    for first in range(0, p.numel, most):
        count = min(most, p.numel - first)
        flat = {
            name: x.with_shape((p.numel,)).narrow(0, first, count) if name in _LISTS else x for name, x in bound.items()
        }
        device.run(kernel, -(-count // 1024), (*blank, count), **flat)
    return ()


def _update(arrays: dict[str, Any], law: str, flags: dict[str, bool], numbers: Sequence[float]) -> None:
    """Of one parameter."""
    p = arrays["p"]
    if p.numel() == 0:
        return
    seen: set[int] = set()
    copied: dict[str, Any] = {}
    for name, x in arrays.items():
        if not isinstance(x, Array) or x.dtype not in _FLOATS:
            raise NotImplementedError(
                f"headwise: fused optimizers on WebGPU take floats there; {name} is {x.dtype} on {x.device}"
            )
        if name in _LISTS:
            # A kernel may not read a buffer that it writes under another name.
            if not p.is_contiguous() or not x.is_contiguous() or x.storage_offset() % 4 or id(x._storage) in seen:
                copied[name] = x.clone(memory_format=torch.contiguous_format)
            seen.add(id(x._storage))
    run = arrays | copied
    scalars = struct.pack(f"<{len(numbers)}f", *numbers)
    replayed(_launch, list(run.values()), tuple(run), law, tuple(flags.items()), scalars=scalars)
    for name, x in copied.items():
        if name != "g" or "scale" in arrays:
            arrays[name].copy_(x)


def _of_scaler(scale: Any, found: Any) -> dict[str, Any]:
    return {name: x for name, x in (("scale", scale), ("found", found)) if x is not None}


def _rated(lr: Any, others: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """A learning rate on the GPU stays there, so that a captured step reads what it is then."""
    return (0.0, others | {"rate": lr}) if isinstance(lr, Array) else (float(lr), others)


def _adam(law: str) -> Any:
    def run(
        ps: Any, gs: Any, ms: Any, vs: Any, mosts: Any, steps: Any, *, lr: Any, beta1: float, beta2: float,
        weight_decay: float, eps: float, amsgrad: bool, maximize: bool, grad_scale: Any = None, found_inf: Any = None,
    ) -> None:  # fmt: skip
        others = _of_scaler(grad_scale, found_inf)
        # Read back, where a kernel would bind nine buffers with it.
        rate, others = (float(lr), others) if amsgrad and len(others) == 2 else _rated(lr, others)
        numbers = (rate, 1 - rate * weight_decay, weight_decay, 1 - beta1, beta2, 1 - beta2, eps,
                   math.log(beta1) if beta1 else -math.inf, math.log(beta2) if beta2 else -math.inf)  # fmt: skip
        flags = {"maximize": maximize, "nesterov": False, "first_step": False}
        for i, p in enumerate(ps):
            arrays = {"p": p, "g": gs[i], "m": ms[i], "v": vs[i]} | ({"most": mosts[i]} if amsgrad else {})
            _update(arrays | {"step": steps[i]} | others, law, flags, numbers)

    return run


def _sgd(
    ps: Any, gs: Any, ms: Any, *, weight_decay: float, momentum: float, lr: Any, dampening: float, nesterov: bool,
    maximize: bool, is_first_step: bool, grad_scale: Any = None, found_inf: Any = None,
) -> None:  # fmt: skip
    flags = {"maximize": maximize, "nesterov": nesterov, "first_step": is_first_step}
    rate, others = _rated(lr, _of_scaler(grad_scale, found_inf))
    for i, p in enumerate(ps):
        arrays = {"p": p, "g": gs[i]} | ({"m": ms[i]} if ms else {})
        _update(arrays | others, "sgd", flags, (rate, weight_decay, momentum, 1 - dampening))


def _unscaled(gradients: Sequence[Any], found: Any, inverse: Any) -> None:
    """Multiply each by `inverse`, and note in `found` whether any element is not finite."""
    for grad in gradients:
        grad.mul_(inverse)
        found.copy_(torch.maximum(found, (~torch.isfinite(grad)).any().to(found.dtype)))


def _scale_updated(scale: Any, tracker: Any, found: Any, growth: float, backoff: float, interval: int) -> Any:
    bad, next_count = found != 0, tracker + 1
    due = next_count == interval
    grown = scale * growth
    grown = torch.where(torch.isfinite(grown) & due, grown, scale)
    tracker.copy_(torch.where(bad | due, torch.zeros_like(tracker), next_count))
    return scale.copy_(torch.where(bad, scale * backoff, grown))


OPERATORS |= {
    aten._fused_adam_.default: _adam("adam"),
    aten._fused_adam_.tensor_lr: _adam("adam"),
    aten._fused_adamw_.default: _adam("adamw"),
    aten._fused_adamw_.tensor_lr: _adam("adamw"),
    aten._fused_sgd_.default: _sgd,
    aten._fused_sgd_.tensor_lr: _sgd,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscaled,
    aten._amp_update_scale_.default: _scale_updated,
}
