"""New arrays: factories, fills, copies and casts, joins, and parts of zeros."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from headwise.backends.webgpu import copies, runtime
from headwise.backends.webgpu.array import OPERATORS, Array, uploaded
from headwise.backends.webgpu.aten import elementwise, wide
from headwise.backends.webgpu.capture_errors import note_number
from headwise.backends.webgpu.device import Device
from headwise.backends.webgpu.mixed_devices import MixedDevices
from headwise.backends.webgpu.recorder import replayed
from headwise.backends.webgpu.storage import Region, contiguous_strides
from headwise.backends.webgpu.torch_device import DEVICE, backward_in_this_thread, checked

aten = torch.ops.aten
_deterministic: Any = torch.utils.deterministic


# -------------------------------------------------------------------------------------------------------- uninitialised


def empty(shape: tuple[int, ...], dtype: torch.dtype, memory_format: Any = None) -> Array:
    strides = None
    if memory_format not in (None, torch.contiguous_format, torch.preserve_format):
        strides = tuple(torch.empty(shape, dtype=dtype, device="meta", memory_format=memory_format).stride())
    return _new(shape, strides, dtype)


def empty_strided(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Array:
    if 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) != max(math.prod(shape), 1):
        strides = contiguous_strides(shape)  # with gaps or overlaps: as good as any
    return _new(shape, strides, dtype)


def _new(shape: tuple[int, ...], strides: tuple[int, ...] | None, dtype: torch.dtype) -> Array:
    backward_in_this_thread()
    device = runtime.device()
    with device.in_use():
        made = Array(device.empty(shape, dtype, strides), device)
    poisoned = torch.are_deterministic_algorithms_enabled() and _deterministic.fill_uninitialized_memory
    if poisoned and dtype in elementwise.NAMES:
        # Not by a method: PyTorch also comes here where no `__torch_dispatch__` is seen.
        _fill_in_place(made, math.nan if dtype.is_floating_point else dtype is torch.bool or torch.iinfo(dtype).max)
    return made


def _like(x: Array, shape: Any, dtype: torch.dtype | None, device: Any, memory_format: Any = None) -> Any:
    if device is not None and torch.device(device).type != DEVICE.type:
        return torch.empty(tuple(shape), dtype=dtype or x.dtype, device=device)
    like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    if tuple(shape) != tuple(x.shape):
        return empty(tuple(shape), dtype or x.dtype, memory_format)
    made = torch.empty_like(like, memory_format=memory_format or torch.preserve_format)
    return empty_strided(tuple(made.shape), tuple(made.stride()), dtype or x.dtype)


def _empty_like(x: Array, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
                memory_format: Any = None) -> Any:  # fmt: skip
    return _like(x, x.shape, dtype, device, memory_format)


def _new_empty(
    x: Array, size: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Any:
    return _like(x, size, dtype, device, torch.contiguous_format)


def _new_empty_strided(x: Array, size: Any, stride: Any, *, dtype: Any = None, layout: Any = None, device: Any = None,
                       pin_memory: Any = None) -> Any:  # fmt: skip
    if device is not None and torch.device(device).type != DEVICE.type:
        return torch.empty_strided(tuple(size), tuple(stride), dtype=dtype or x.dtype, device=device)
    return empty_strided(tuple(size), tuple(stride), dtype or x.dtype)


# ---------------------------------------------------------------------------------------------------------------- fills


def _fill(device: Device, y: Region, zero: bool) -> tuple[()]:
    if zero and y.contiguous and y.offset == 0 and y.numel * y.itemsize % 4 == 0:
        copies.fill(device, y, 0)
    else:
        kind = elementwise.kind_of(y.dtype)
        elementwise.compute(
            device, "scalar0", "i" if kind == "b" else kind, {}, y, ["i" if kind == "b" else kind], part=True
        )
    return ()


def _fill_in_place(y: Array, value: Any) -> Array:
    from headwise.backends.webgpu.aten.pointwise import packed

    if isinstance(value, torch.Tensor):
        if isinstance(value, Array):
            return cast(Array, y.copy_(value))
        note_number("aten::fill_", value)
        value = value.item()
    kind = elementwise.kind_of(y.dtype)
    if kind == "b":
        value = int(bool(value))
    elif kind in "il" and isinstance(value, float) and not math.isfinite(value):
        value = 0
    replayed(_fill, [y], False, scalars=packed({"f": "f", "l": "q"}.get(kind, "i"), [value]))
    return y


def _zero_in_place(y: Array) -> Array:
    if y.dtype in elementwise.NAMES:
        return _fill_in_place(y, 0)
    replayed(_fill, [y], True)
    return y


# --------------------------------------------------------------------------------------------------------------- copies


def _clone(x: Array, *, memory_format: Any = None) -> Array:
    if memory_format in (None, torch.preserve_format) and not x.is_contiguous():
        made = _like(x, x.shape, None, None)
        replayed(_copied_into, [made, x], False)
        return cast(Array, made)
    if memory_format not in (None, torch.preserve_format, torch.contiguous_format):
        made = empty(tuple(x.shape), x.dtype, memory_format)
        replayed(_copied_into, [made, x], False)
        return made
    return cast(Array, replayed(copies.copied, [x]))


def copy_in_place(y: Any, x: Any, non_blocking: bool = False) -> Any:
    """``y.copy_(x)``, and so ``cache[:, :, 3:4] = x``; from and to the CPU, and to another dtype."""
    if not isinstance(y, Array):
        return y.copy_(x._read())
    elementwise.check_written(y)
    if isinstance(x, Array):
        source = x if x.shape == y.shape else cast(Array, x.detach().expand(y.shape))
    else:
        if x.numel() == 1:
            note_number("aten::copy_", x)
        source = uploaded(x.detach().cpu().to(y.dtype).expand(y.shape))
    shared = y._storage is source._storage
    if shared and y._layout is source._layout:
        return y
    # A kernel may not read a buffer that it writes.
    replayed(_copied_into, [y, source], shared)
    return y


def _copy(x: Any, source: Any, non_blocking: bool = False) -> Any:
    """What `copy_in_place` is in a compiled graph."""
    return torch.empty_like(x).copy_(source)


def _copied_into(device: Device, y: Region, x: Region, copy_first: bool) -> tuple[()]:
    if copy_first:
        x = copies.copied(device, x)
    if x.dtype == y.dtype:
        copies.copy_into(device, x, y, part=True)
    else:
        cast_into(device, x, y, part=True)
    return ()


def cast_into(device: Device, x: Region, y: Region, part: bool = False) -> None:
    if not part and wide.cast(device, x, y):
        return
    kind = elementwise.kind_of(x.dtype)
    elementwise.compute(device, "x", kind, {"x": elementwise.Input(x, kind)}, y, part=part)


def cast_to(device: Device, x: Region, dtype: torch.dtype) -> Region:
    """x itself where it has the dtype, else a copy in its memory order."""
    if x.dtype == dtype:
        return x
    y = device.empty(x.shape, dtype)
    cast_into(device, x, y)
    return y


def _cast(device: Device, x: Region, dtype: torch.dtype, strides: tuple[int, ...]) -> Region:
    y = device.empty(x.shape, dtype, strides)
    if x.dtype == dtype:
        copies.copy_into(device, x, y)
    else:
        cast_into(device, x, y)
    return y


def _to_copy(x: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
             non_blocking: bool = False, memory_format: Any = None) -> Any:  # fmt: skip
    to = DEVICE if device is None else torch.device(device)
    if to.type == DEVICE.type:
        checked(to)
    if not isinstance(x, Array):
        x = x if dtype is None else x.to(dtype)
        return uploaded(x.detach())
    if to.type == "meta":
        return torch.empty_strided(x.shape, x.stride(), dtype=dtype or x.dtype, device="meta")
    if to.type != DEVICE.type:
        copy = x._read()
        return copy.to(device=to, dtype=dtype or copy.dtype, memory_format=memory_format or torch.preserve_format)
    like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    made = torch.empty_like(like, memory_format=memory_format or torch.preserve_format)
    strides = tuple(made.stride())
    if 1 + sum((n - 1) * s for n, s in zip(x.shape, strides, strict=True)) != max(math.prod(x.shape), 1):
        strides = contiguous_strides(tuple(x.shape))
    return replayed(_cast, [x], dtype or x.dtype, strides)


def _item(x: Array) -> Any:
    return x._read().item()


# ---------------------------------------------------------------------------------------------------------------- joins


def _cat(tensors: Any, dim: int = 0) -> Array:
    # Tensors of shape (0,) are left out, whatever the others' shapes are.
    # Autograd passes zeros for a part that nothing depends on; they are on meta where PyTorch does not know the device.
    if not all(isinstance(x, Array) or x.is_meta for x in tensors):
        raise MixedDevices("cat")
    given = [x if isinstance(x, Array) else _zero_in_place(empty(tuple(x.shape), x.dtype)) for x in tensors]
    kept = [x for x in given if tuple(x.shape) != (0,)]
    if not kept:
        return _clone(given[0])
    dtype = kept[0].dtype
    for x in given:
        dtype = torch.promote_types(dtype, x.dtype)
    first = kept[0]
    for x in kept:
        fits = x.dim() == first.dim() and all(
            a == b or d == dim % first.dim() for d, (a, b) in enumerate(zip(x.shape, first.shape, strict=True))
        )
        if not fits:
            raise RuntimeError(
                f"cat: Sizes of tensors must match except in dimension {dim}: {[tuple(x.shape) for x in kept]}"
            )
    return cast(Array, replayed(_joined, kept, dim % first.dim(), dtype))


def _joined(device: Device, *given: Any) -> Region:
    *parts, dim, dtype = given
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    y, start = device.empty(tuple(shape), dtype), 0
    for part in parts:
        target = y.narrow(dim, start, part.shape[dim])
        if part.dtype == dtype:
            copies.copy_into(device, part, target, part=True)
        else:
            cast_into(device, part, target, part=True)
        start += part.shape[dim]
    return y


def _stack(tensors: Sequence[Any], dim: int = 0) -> Array:
    dim %= tensors[0].dim() + 1
    return _cat([x.unsqueeze(dim) for x in tensors], dim)


# -------------------------------------------------------------------------------------------------------- parts of zeros


def _slice_backward(grad: Array, sizes: Any, dim: int, start: int, end: int, step: int) -> Array:
    first = slice(start, end).indices(sizes[dim])[0]
    return cast(Array, replayed(_placed, [grad], tuple(sizes), dim % len(sizes), first, step))


def _select_backward(grad: Array, sizes: Any, dim: int, index: int) -> Array:
    dim %= len(sizes)
    return cast(Array, replayed(_placed, [cast(Array, grad.unsqueeze(dim))], tuple(sizes), dim, index % sizes[dim], 1))


def _placed(device: Device, grad: Region, sizes: tuple[int, ...], dim: int, first: int, step: int) -> Region:
    """Zeros, and the gradient of a part where that part was."""
    y = copies.full(device, sizes, 0.0, grad.dtype)
    strides = (*y.strides[:dim], y.strides[dim] * step, *y.strides[dim + 1 :])
    part = y.narrow(dim, first, grad.shape[dim]).with_shape(grad.shape, strides)
    copies.copy_into(device, grad, part, part=True)
    return y


# -------------------------------------------------------------------------------------------------------------- numbers


def _numbered(device: Device, y: Region) -> tuple[()]:
    kind = elementwise.kind_of(y.dtype)
    device.run(
        device.kernel("arange", dtype=elementwise.name_of(y.dtype), kind=kind),
        -(-y.numel // 1024), (*(0,) * (4 if kind == "l" else 2), y.numel), y=y,
    )  # fmt: skip
    return ()


def _arange(start: Any, end: Any, step: Any = 1, *, dtype: Any = None, layout: Any = None, device: Any = None,
            pin_memory: Any = None) -> Array:  # fmt: skip
    from headwise.backends.webgpu.aten.pointwise import packed

    like = torch.arange(start, end, step, dtype=dtype, device="meta")
    made = empty(tuple(like.shape), like.dtype)
    if made.numel():
        kind = {"f": "f", "l": "q"}.get(elementwise.kind_of(made.dtype), "i")
        replayed(_numbered, [made], scalars=packed(2 * kind, [start, step]))
    return made


def _arange_to(end: Any, **kwargs: Any) -> Array:
    return _arange(0, end, **kwargs)


def _from_cpu(func: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """A small factory whose numbers are made on the CPU and uploaded."""

    def run(*args: Any, device: Any = None, layout: Any = None, pin_memory: Any = None, **kwargs: Any) -> Any:
        return uploaded(func(*args, **kwargs))

    return run


FACTORIES: dict[str, Callable[..., Any]] = {
    "arange": _arange_to, "arange.start": _arange, "arange.start_step": _arange, "linspace": _from_cpu(torch.linspace),
    "logspace": _from_cpu(torch.logspace),
    "eye": _from_cpu(torch.eye), "eye.m": _from_cpu(torch.eye), "randperm": _from_cpu(torch.randperm),
    "tril_indices": _from_cpu(torch.tril_indices), "triu_indices": _from_cpu(torch.triu_indices),
}  # fmt: skip


OPERATORS |= {
    aten.empty_like.default: _empty_like,
    aten.new_empty.default: _new_empty,
    aten.new_empty_strided.default: _new_empty_strided,
    aten.fill_.Scalar: _fill_in_place,
    aten.fill_.Tensor: _fill_in_place,
    aten.zero_.default: _zero_in_place,
    aten.clone.default: _clone,
    aten.copy_.default: copy_in_place,
    aten.copy.default: _copy,
    aten._to_copy.default: _to_copy,
    aten._local_scalar_dense.default: _item,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.slice_backward.default: _slice_backward,
    aten.select_backward.default: _select_backward,
}  # fmt: skip
