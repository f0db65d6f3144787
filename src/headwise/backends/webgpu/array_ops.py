"""The few operators of PyTorch that an `Array` knows: views, copies, filling, and the sum that gradients meet in."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import torch

from headwise.backends.webgpu import copies, runtime
from headwise.backends.webgpu.array import Array, launcher
from headwise.backends.webgpu.storage import Region

aten = torch.ops.aten

_VIEWS = (
    aten.alias.default, aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default,
    aten.transpose.int, aten.t.default, aten.permute.default, aten.slice.Tensor, aten.select.int,
    aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.expand.default,
    aten.as_strided.default, aten.split.Tensor, aten.unbind.int, aten.split_with_sizes.default, aten.chunk.default,
)  # fmt: skip


def _view(func: Any) -> Callable[..., Any]:
    def view(x: Array, *args: Any, **kwargs: Any) -> Any:
        region = x._region
        # PyTorch knows the rules; on a tensor without memory it says what the view would be.
        low, high = region.span()
        whole = torch.empty(max(high, low) + 1, dtype=x.dtype, device="meta")
        found = func(whole.as_strided(region.shape, region.strides, region.offset), *args, **kwargs)

        def of(meta: torch.Tensor) -> Array:
            made = Region(region.storage, meta.dtype, meta.shape, meta.stride(), int(meta.storage_offset()))
            return Array(made, x._device)

        return [of(meta) for meta in found] if isinstance(found, (list, tuple)) else of(found)

    return view


def _detach(x: Array) -> Array:
    """A view; but of a gradient that autograd is about to keep and whose memory others refer to, a copy.

    What autograd keeps as somebody's ``.grad`` it adds to in place later: that must not be the memory of another gradient
    (one of ``x`` and of ``w`` in ``x + w.t()``), nor of anything else.
    """
    return _clone(x) if _is_being_kept(x) and _owners(x) > _ONE_OWNER else Array(x._region, x._device)


def _is_being_kept(x: Array) -> bool:
    """Is this the node of a leaf, detaching the gradient that it will keep?"""
    if torch._C._current_graph_task_id() == -1:
        return False
    node = torch._C._current_autograd_node()
    if node is None or node.name() != "torch::autograd::AccumulateGrad":
        return False
    if not x.is_leaf:
        return True  # an output that was saved, and is a gradient now
    # The leaf itself, and what is its .grad already, are detached by somebody's hook.
    leaf = node.variable  # type: ignore[attr-defined]
    return not x.requires_grad and leaf.grad is not x


def _owners(x: Any) -> int:
    storage = x._region.storage
    return sys.getrefcount(storage)


# What `_owners` says of a storage that only one array refers to: releases of Python count differently.
_ONE_OWNER = _owners(SimpleNamespace(_region=SimpleNamespace(storage=object())))


def _view_dtype(x: Array, dtype: torch.dtype) -> Array:
    """The same bits under another name."""
    if dtype.itemsize != x.dtype.itemsize:
        raise NotImplementedError(f"headwise: an Array of {x.dtype} seen as {dtype}, which is of another size")
    return Array(x._region.as_dtype(dtype), x._device)


def _clone(x: Array, memory_format: Any = None) -> Array:
    device = x._usable()
    with device.lock, device.explained_loss:
        return Array(copies.copied(device, x._region), device)


def _stays(device: Any) -> None:
    if device is not None and torch.device(device).type != "meta":
        raise NotImplementedError(
            f"headwise: a tensor on {device} like a headwise.webgpu.Array; make it like x.torch()"
        )


def _filled(value: float) -> Callable[..., Any]:
    def like(x: Array, *sizes: Any, dtype: torch.dtype | None = None, device: Any = None, **kwargs: Any) -> Array:
        _stays(device)
        device = x._usable()
        shape = tuple(sizes[0]) if sizes else tuple(x.shape)
        with device.lock, device.explained_loss:
            return Array(copies.full(device, shape, value, dtype or x.dtype), device)

    return like


def _empty(x: Array, *sizes: Any, dtype: torch.dtype | None = None, device: Any = None, **kwargs: Any) -> Array:
    _stays(device)
    device = x._usable()
    shape = tuple(sizes[0]) if sizes else tuple(x.shape)
    with device.lock, device.explained_loss:
        return Array(device.empty(shape, dtype or x.dtype), device)


def _empty_strided(x: Array, size: Any, stride: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Array:
    device = x._usable()
    shape, strides = tuple(size), tuple(stride)
    if 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) > max(math.prod(shape), 1):
        raise NotImplementedError(f"headwise: an Array of shape {shape} with strides {strides}, which leave gaps")
    with device.lock, device.explained_loss:
        return Array(device.empty(shape, dtype or x.dtype, strides), device)


def _copy_in_place(y: Array, x: Any, non_blocking: bool = False) -> Array:
    """Into dense memory, in whatever order its dims lie."""
    if not (isinstance(x, Array) and isinstance(y, Array)) or x.shape != y.shape or x.dtype != y.dtype:
        raise NotImplementedError("headwise: copying into an Array needs another of its shape and dtype")
    device = y._usable()
    with device.lock, device.explained_loss:
        source, target = x._region, y._region
        order = sorted(range(len(target.shape)), key=lambda d: -target.strides[d])
        source, target = (
            r.with_shape([r.shape[d] for d in order], [r.strides[d] for d in order]) for r in (source, target)
        )
        if not target.contiguous or target.offset % 4:
            raise NotImplementedError("headwise: copying into a part of an Array")
        if source.storage is target.storage:
            source = copies.copied(device, source)
        copies.copy_into(device, source, target, part=True)
    return y


_ADDED = (torch.float32, torch.float16, torch.bfloat16, torch.int32)


def _add(a: Array, b: Any, *, alpha: float = 1) -> Array:
    alike = isinstance(a, Array) and isinstance(b, Array) and a.shape == b.shape and a.dtype == b.dtype
    if not alike or alpha != 1 or a.dtype not in _ADDED:
        raise NotImplementedError(
            "headwise: adding arrays on WebGPU needs two of one shape and dtype, of floats or int32; "
            "bring them back with .torch() first"
        )
    return _sum(a, b)


def _add_in_place(a: Array, b: Any, *, alpha: float = 1) -> Array:
    return _copy_in_place(a, _add(a, b, alpha=alpha))


def _slice_backward(grad: Array, sizes: Any, dim: int, start: int, end: int, step: int) -> Array:
    return _placed(grad, sizes, dim, slice(start, end).indices(sizes[dim])[0], step)


def _select_backward(grad: Array, sizes: Any, dim: int, index: int) -> Array:
    dim %= len(sizes)
    return _placed(cast(Array, grad.unsqueeze(dim)), sizes, dim, index % sizes[dim], 1)


def _placed(grad: Array, sizes: Any, dim: int, start: int, step: int) -> Array:
    """Zeros, and the gradient of a part where that part was."""
    device = grad._usable()
    with device.lock, device.explained_loss:
        y = copies.full(device, tuple(sizes), 0.0, grad.dtype)
        copies.place(device, grad._region, y, dim % len(sizes), start, step)
        return Array(y, device)


def _cat(tensors: Any, dim: int = 0) -> Array:
    first = next(x for x in tensors if isinstance(x, Array))
    # Autograd fills in zeros for a part of a split that nothing depends on; without memory, as it thinks arrays are.
    filled_in = torch._C._current_graph_task_id() != -1
    if any(x.dtype != first.dtype or not (isinstance(x, Array) or (filled_in and x.is_meta)) for x in tensors):
        raise NotImplementedError("headwise: joining arrays needs all of them on WebGPU, of one dtype")
    device, dim = first._usable(), dim % first.dim()
    shape = list(first.shape)
    shape[dim] = sum(x.shape[dim] for x in tensors)
    with device.lock, device.explained_loss:
        y, start = device.empty(tuple(shape), first.dtype), 0
        for x in tensors:
            part = x._region if isinstance(x, Array) else copies.full(device, x.shape, 0.0, x.dtype)
            copies.place(device, part, y, dim, start)
            start += x.shape[dim]
        return Array(y, device)


def _stack(tensors: Any, dim: int = 0) -> Array:
    dim %= tensors[0].dim() + 1
    return _cat([x.unsqueeze(dim) for x in tensors], dim)


@launcher
def _sum(device: runtime.Device, a: Region, b: Region) -> Region:
    x, other = copies.contiguous(device, a), copies.contiguous(device, b)
    if x.offset % 4:
        x = copies.copied(device, x)
    if other.offset % 4:
        other = copies.copied(device, other)
    return copies.added(device, x, other)


def _to_copy(x: Array, *, dtype: torch.dtype | None = None, device: Any = None, **kwargs: Any) -> torch.Tensor:
    if device is not None and torch.device(device).type == "cpu":
        copy = x.torch()
        return copy if dtype is None else copy.to(dtype)
    raise NotImplementedError("headwise: an Array changes neither dtype nor GPU; bring it back with .torch() first")


KNOWN: dict[Any, Callable[..., Any]] = {
    **{func: _view(func) for func in _VIEWS},
    aten.detach.default: _detach,
    aten.view.dtype: _view_dtype,
    aten.clone.default: _clone,
    aten.zeros_like.default: _filled(0.0),
    aten.ones_like.default: _filled(1.0),
    aten.new_zeros.default: _filled(0.0),
    aten.empty_like.default: _empty,
    aten.new_empty.default: _empty,
    aten.new_ones.default: _filled(1.0),
    aten.new_empty_strided.default: _empty_strided,
    aten.copy_.default: _copy_in_place,
    aten.add.Tensor: _add,
    aten.add_.Tensor: _add_in_place,
    aten.slice_backward.default: _slice_backward,
    aten.select_backward.default: _select_backward,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten._to_copy.default: _to_copy,
}
