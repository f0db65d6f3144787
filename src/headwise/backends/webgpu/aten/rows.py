"""What works along a dim: softmax, layer norm, running sums; and triangles."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import torch

from headwise.backends.norm import Norm
from headwise.backends.webgpu import copies, norms, softmax
from headwise.backends.webgpu.array import OPERATORS, Array
from headwise.backends.webgpu.aten import elementwise, making
from headwise.backends.webgpu.aten.elementwise import Input, compute
from headwise.backends.webgpu.aten.reductions import reduced
from headwise.backends.webgpu.device import Device
from headwise.backends.webgpu.recorder import replayed
from headwise.backends.webgpu.storage import Region

aten = torch.ops.aten

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def _floats(name: str, x: Array) -> None:
    if x.dtype not in _FLOATS:
        raise NotImplementedError(f"headwise: {name} of {x.dtype} on WebGPU; floats are, or use x.cpu()")


# -------------------------------------------------------------------------------------------------------------- softmax


def _last(x: Region, dim: int) -> Region:
    """The dim at the end."""
    order = [d for d in range(len(x.shape)) if d != dim]
    return x.permuted([*order, dim])


def _first(x: Region, dim: int) -> Region:
    """Undoes `_last`."""
    order = list(range(len(x.shape) - 1))
    order.insert(dim, len(x.shape) - 1)
    return x.permuted(order)


def _softmax_of(device: Device, x: Region, dim: int) -> Region:
    rows = _last(x, dim)
    return _first(softmax.softmax_forward(device, SimpleNamespace(x=rows), strict=True), dim)


def _softmax(x: Array, dim: int, half_to_float: bool = False) -> Array:
    _floats("softmax", x)
    if half_to_float:
        x = cast(Array, x.float())
    if x.dim() == 0:
        return cast(Array, _softmax(cast(Array, x.view(1)), 0).view(()))
    if x.shape[dim] == 0:
        return cast(Array, x.clone())
    return cast(Array, replayed(_softmax_of, [x], dim % x.dim()))


def _softmax_gradient(device: Device, grad: Region, y: Region, dim: int) -> Region:
    args = SimpleNamespace(probs=_last(y, dim), grad=_last(grad, dim))
    return _first(softmax.softmax_backward(device, args), dim)


def _softmax_backward(grad: Array, y: Array, dim: int, dtype: torch.dtype) -> Any:
    if y.dim() == 0:
        return torch.zeros_like(grad)
    if grad.dtype != y.dtype or y.shape[dim] == 0:
        return (grad - (grad * y).sum(dim, keepdim=True)) * y
    made = replayed(_softmax_gradient, [grad, y], dim % y.dim())
    return made if made.dtype == dtype else made.to(dtype)


def _log_softmax_of(device: Device, x: Region, dim: int) -> Region:
    highest = reduced(device, x, [dim], "max", torch.float32, keepdim=True)
    # What is infinite stays what it is: no difference of infinities.
    powers = device.empty(x.shape, torch.float32)
    compute(
        device, "exp_of(x - select(h, 0.0, is_inf(h)))", "f", {"x": Input(x, "f"), "h": Input(highest, "f")}, powers
    )
    total = reduced(device, powers, [dim], "sum", torch.float32, keepdim=True)
    y = device.empty(x.shape, x.dtype)
    inputs = {"x": Input(x, "f"), "h": Input(highest, "f"), "t": Input(total, "f")}
    compute(device, "select((x - h) - log_of(t), not_a_number(), is_inf(h))", "f", inputs, y)
    return y


def _log_softmax(x: Array, dim: int, half_to_float: bool = False) -> Array:
    _floats("log_softmax", x)
    if half_to_float:
        x = cast(Array, x.float())
    if x.dim() == 0:
        return cast(Array, x - x)
    if x.shape[dim] == 0:
        return cast(Array, x.clone())
    return cast(Array, replayed(_log_softmax_of, [x], dim % x.dim()))


def _log_softmax_gradient(device: Device, grad: Region, y: Region, dim: int, dtype: torch.dtype) -> Region:
    total = reduced(device, grad, [dim], "sum", torch.float32, keepdim=True)
    dx = device.empty(y.shape, dtype)
    compute(device, "g - exp_of(y0) * t", "f", {"g": Input(grad, "f"), "y0": Input(y, "f"), "t": Input(total, "f")}, dx)
    return dx


def _log_softmax_backward(grad: Array, y: Array, dim: int, dtype: torch.dtype) -> Any:
    if y.dim() == 0:
        return torch.zeros_like(grad)
    return replayed(_log_softmax_gradient, [grad, y], dim % y.dim(), dtype)


# ----------------------------------------------------------------------------------------------------------- layer norm


def _norm_of(x: Region, weight: Region | None, bias: Region | None, width: int, eps: float) -> Norm[Region]:
    flat = [None if p is None else p.with_shape((width,)) for p in (weight, bias)]
    return Norm(x, weight=flat[0], bias=flat[1], eps=eps, centre=True)


def _layer_normed(device: Device, *given: Any) -> Any:
    x, *parameters, has, width, eps = given
    left = iter([copies.contiguous(device, p) for p in parameters])
    weight, bias = (next(left) if there else None for there in has)
    count = x.numel // width
    rows = (x if x.contiguous else copies.copied(device, x)).with_shape((count, width))
    y, _, _ = norms.forward(device, _norm_of(rows, weight, bias, width, eps), False)
    mean = reduced(device, rows, [1], "sum", torch.float32)
    scaled = device.empty(mean.shape, torch.float32)
    compute(device, f"x * f32({1 / width!r})", "f", {"x": Input(mean, "f")}, scaled)
    squares = reduced(device, rows, [1], "squares", torch.float32, mean=scaled)
    rstd = device.empty(mean.shape, torch.float32)
    compute(device, f"1.0 / sqrt(x * f32({1 / width!r}) + f32({eps!r}))", "f", {"x": Input(squares, "f")}, rstd)
    return y.with_shape(x.shape), scaled, rstd


def _layer_norm(x: Array, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    _floats("layer_norm", x)
    dims = len(shape)
    if tuple(x.shape[x.dim() - dims :]) != tuple(shape):
        raise RuntimeError(
            f"Given normalized_shape={list(shape)}, expected input with shape [*, {list(shape)}], "
            f"but got input of size {list(x.shape)}"
        )
    width = math.prod(shape)
    statistics = (*x.shape[: x.dim() - dims], *[1] * dims)
    if x.numel() == 0:
        return torch.empty_like(x), *(torch.zeros(statistics, device=x.device) for _ in range(2))
    given = [p for p in (weight, bias) if p is not None]
    y, mean, rstd = replayed(_layer_normed, [x, *given], (weight is not None, bias is not None), width, eps)
    return y, mean.view(statistics), rstd.view(statistics)


def _layer_norm_backward(
    grad: Array, x: Array, shape: Any, mean: Array, rstd: Array, weight: Any, bias: Any, mask: Any
) -> Any:
    width = math.prod(shape)
    if x.numel() == 0:
        zeros = [None if p is None else torch.zeros_like(p) for p in (weight, bias)]
        return torch.empty_like(x), *zeros
    given = [p for p in (weight, bias) if p is not None]
    if grad.dtype != x.dtype:
        grad = cast(Array, grad.to(x.dtype))
    made = replayed(
        _layer_norm_from_statistics, [grad, x, mean, rstd, *given], (weight is not None, bias is not None), width
    )
    dx, dweight, dbias = made
    return (
        dx if mask[0] else None,
        dweight.view(shape) if mask[1] and dweight is not None else None,
        dbias.view(shape) if mask[2] and dbias is not None else None,
    )


def _layer_norm_from_statistics(
    device: Device, grad: Region, x: Region, mean: Region, rstd: Region, *given: Any
) -> Any:
    *parameters, has, width = given
    left = iter(parameters)
    weight, bias = (next(left) if there else None for there in has)
    count = x.numel // width
    rows, grads = (copies.contiguous(device, r).with_shape((count, width)) for r in (x, grad))
    means, scales = (copies.contiguous(device, r).with_shape((count, 1)) for r in (mean, rstd))
    normed = device.empty((count, width), torch.float32)
    compute(
        device, "(x - m) * r", "f", {"x": Input(rows, "f"), "m": Input(means, "f"), "r": Input(scales, "f")}, normed
    )
    flat = None if weight is None else copies.contiguous(device, weight).with_shape((1, width))
    weighted = device.empty((count, width), torch.float32)
    factor = {} if flat is None else {"w": Input(flat, "f")}
    compute(device, "g * w" if factor else "g", "f", {"g": Input(grads, "f"), **factor}, weighted)
    first = reduced(device, weighted, [1], "sum", torch.float32, keepdim=True)
    product = device.empty((count, width), torch.float32)
    compute(device, "g * n", "f", {"g": Input(weighted, "f"), "n": Input(normed, "f")}, product)
    second = reduced(device, product, [1], "sum", torch.float32, keepdim=True)
    dx = device.empty((count, width), x.dtype)
    inputs = {
        "g": Input(weighted, "f"),
        "n": Input(normed, "f"),
        "r": Input(scales, "f"),
        "a": Input(first, "f"),
        "b": Input(second, "f"),
    }
    compute(device, f"r * (g - (a + n * b) * f32({1 / width!r}))", "f", inputs, dx)
    dweight = dbias = None
    if weight is not None:
        compute(device, "g * n", "f", {"g": Input(grads, "f"), "n": Input(normed, "f")}, product)
        dweight = reduced(device, product, [0], "sum", weight.dtype)
    if bias is not None:
        dbias = reduced(device, grads, [0], "sum", bias.dtype)
    return dx.with_shape(x.shape), dweight, dbias


# ----------------------------------------------------------------------------------------------------------- group norm


def _group_norm(x: Array, weight: Any, bias: Any, batch: int, channels: int, size: int, groups: int, eps: float) -> Any:
    """In float32, and rounded once: PyTorch's decomposition rounds after each step."""
    _floats("group_norm", x)
    wide: Any = x.float().reshape(batch, groups, channels // groups * size)
    variance, mean = torch.var_mean(wide, 2, correction=0, keepdim=True)
    rstd = (variance + eps).rsqrt()
    y = ((wide - mean) * rstd).view(batch, channels, size)
    if weight is not None:
        y = y * weight.view(-1, 1)
    if bias is not None:
        y = y + bias.view(-1, 1)
    return y.to(x.dtype).view(x.shape), mean.to(x.dtype).flatten(1), rstd.to(x.dtype).flatten(1)


# --------------------------------------------------------------------------------------------------------- running sums


def _scanned(device: Device, x: Region, dim: int, op: str, dtype: torch.dtype) -> Region:
    kind = elementwise.kind_of(dtype)
    between = {"f": torch.float32, "i": torch.int32, "l": torch.int64}[kind]
    y = device.empty(x.shape, between)
    outer, length, inner = math.prod(x.shape[:dim]), x.shape[dim], math.prod(x.shape[dim + 1 :])
    x = copies.contiguous(device, x)
    kernel = device.kernel("scan", x=elementwise.name_of(x.dtype), y=elementwise.name_of(between), kind=kind, op=op)
    steps = (length * inner, inner, 1)
    device.run(kernel, outer * inner, (outer * inner, length, inner, *steps, -(-length // 256)), x=x, y=y)
    return making.cast_to(device, y, dtype)


def scan(op: str) -> Callable[..., Any]:
    def run(x: Array, dim: int, *, dtype: Any = None) -> Any:
        to = dtype or (x.dtype if x.dtype.is_floating_point else torch.int64)
        if x.dtype != to and not (to.is_floating_point and x.dtype.is_floating_point):
            x = cast(Array, x.to(to))
        if x.dim() == 0 or x.numel() == 0:
            return x.to(to).clone()
        return replayed(_scanned, [x], dim % x.dim(), op, to)

    return run


# ------------------------------------------------------------------------------------------------------------ triangles


def _triangle(lower: bool) -> Callable[..., Any]:
    def run(x: Array, diagonal: int = 0) -> Any:
        rows = torch.arange(x.shape[-2], dtype=torch.int32, device=x.device).unsqueeze(1)
        columns = torch.arange(x.shape[-1], dtype=torch.int32, device=x.device)
        away = columns - rows
        return torch.where(
            away <= diagonal if lower else away >= diagonal, x, torch.zeros((), dtype=x.dtype, device=x.device)
        )

    return run


def _in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *args, **kwargs: x.copy_(function(x, *args, **kwargs))


_TRIANGLES = {"tril": _triangle(True), "triu": _triangle(False)}

OPERATORS |= {
    aten._softmax.default: _softmax,
    aten._softmax_backward_data.default: _softmax_backward,
    aten._log_softmax.default: _log_softmax,
    aten._log_softmax_backward_data.default: _log_softmax_backward,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.native_group_norm.default: _group_norm,
    aten.cumsum.default: scan("sum"),
    aten.cumprod.default: scan("prod"),
    aten.cumsum_.default: _in_place(scan("sum")),
    aten.cumprod_.default: _in_place(scan("prod")),
    aten.tril.default: _TRIANGLES["tril"],
    aten.triu.default: _TRIANGLES["triu"],
    aten.tril_.default: _in_place(_TRIANGLES["tril"]),
    aten.triu_.default: _in_place(_TRIANGLES["triu"]),
}
