"""The PyTorch operators that an `Array` supports: views, copies, fills, and sums, which autograd needs."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch

from headwise.backends.webgpu import copies
from headwise.backends.webgpu.array import OPERATORS, Array, array
from headwise.backends.webgpu.device import Device
from headwise.backends.webgpu.recorder import replayed
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
        # Run on a meta tensor, the operator gives the shape and strides of the view.
        low, high = region.span()
        whole = torch.empty(max(high, low) + 1, dtype=x.dtype, device="meta")
        found = func(whole.as_strided(region.shape, region.strides, region.offset), *args, **kwargs)

        def of(meta: torch.Tensor) -> Array:
            made = Region(region.storage, meta.dtype, meta.shape, meta.stride(), int(meta.storage_offset()))
            return Array(made, x._device)

        return [of(meta) for meta in found] if isinstance(found, (list, tuple)) else of(found)

    return view


def _detach(x: Array) -> Array:
    """A view; but a copy, if autograd is about to keep x as a ``.grad`` while other arrays share its memory.

    Autograd adds to a ``.grad`` in place, so its memory must not be shared: ``x`` and ``w`` in ``x + w.t()`` get the same
    gradient.
    """
    if _is_being_kept(x) and _owners(x) > _ONE_OWNER:
        return _clone(x)
    return Array._of(x._layout, x._storage, x._device)


def _is_being_kept(x: Array) -> bool:
    """Is autograd detaching x to keep it as the ``.grad`` of a leaf?"""
    if torch._C._current_graph_task_id() == -1:
        return False
    node = torch._C._current_autograd_node()
    if node is None or node.name() != "torch::autograd::AccumulateGrad":
        return False
    if not x.is_leaf:
        return True  # a saved output that became a gradient
    # A hook may detach the leaf itself, or its present .grad.
    leaf = node.variable  # type: ignore[attr-defined]
    return not x.requires_grad and leaf.grad is not x


def _owners(x: Any) -> int:
    return sys.getrefcount(x._storage)


# The count for a storage that one array refers to. It differs between Python versions.
_ONE_OWNER = _owners(SimpleNamespace(_storage=object()))


def _view_dtype(x: Array, dtype: torch.dtype) -> Array:
    """The same bits as another dtype."""
    if dtype.itemsize != x.dtype.itemsize:
        raise NotImplementedError(f"headwise: an Array of {x.dtype} seen as {dtype}, which is of another size")
    region = x._region
    return Array(Region(region.storage, dtype, region.shape, region.strides, region.offset), x._device)


def _clone(x: Array, memory_format: Any = None) -> Array:
    return replayed(copies.copied, [x])


def _stays(device: Any) -> None:
    if device is not None and torch.device(device).type != "meta":
        raise NotImplementedError(
            f"headwise: a tensor on {device} like a headwise.webgpu.Array; make it like x.torch()"
        )


def _filled(value: float) -> Callable[..., Any]:
    def like(x: Array, *sizes: Any, dtype: torch.dtype | None = None, device: Any = None, **kwargs: Any) -> Array:
        _stays(device)
        return replayed(_full, [x], tuple(sizes[0]) if sizes else tuple(x.shape), value, dtype or x.dtype)

    return like


def _full(device: Device, x: Region, shape: tuple[int, ...], value: float, dtype: torch.dtype) -> Region:
    return copies.full(device, shape, value, dtype)


def _empty(x: Array, *sizes: Any, dtype: torch.dtype | None = None, device: Any = None, **kwargs: Any) -> Array:
    _stays(device)
    return _new(x, tuple(sizes[0]) if sizes else tuple(x.shape), None, dtype)


def _empty_strided(x: Array, size: Any, stride: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Array:
    shape, strides = tuple(size), tuple(stride)
    if 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) > max(math.prod(shape), 1):
        raise NotImplementedError(f"headwise: an Array of shape {shape} with strides {strides}, which leave gaps")
    return _new(x, shape, strides, dtype)


def _new(x: Array, shape: tuple[int, ...], strides: tuple[int, ...] | None, dtype: torch.dtype | None) -> Array:
    device = x._usable()
    with device.in_use():
        return Array(device.empty(shape, dtype or x.dtype, strides), device)


def _copy_in_place(y: Array, x: Any, non_blocking: bool = False) -> Array:
    """``y.copy_(x)``, and so ``cache[:, :, 3:4] = x``; a CPU tensor is uploaded."""
    if not isinstance(y, Array) or x.dtype != y.dtype or not (isinstance(x, Array) or x.device.type == "cpu"):
        raise NotImplementedError(
            "headwise: copying into an Array needs another one, or a CPU tensor, of its dtype; bring it back with .torch()"
        )
    source = cast(Array, array(x.detach()).expand(y.shape))
    # A kernel may not read a buffer that it writes.
    replayed(_copied_into, [y, source], y._storage is source._storage)
    return y


def _copied_into(device: Device, y: Region, x: Region, copy_first: bool) -> tuple[()]:
    copies.copy_into(device, copies.copied(device, x) if copy_first else x, y, part=True)
    return ()


_ADDED = (torch.float32, torch.float16, torch.bfloat16, torch.int32)


def _add(a: Array, b: Any, *, alpha: float = 1) -> Array:
    alike = isinstance(a, Array) and isinstance(b, Array) and a.shape == b.shape and a.dtype == b.dtype
    if not alike or alpha != 1 or a.dtype not in _ADDED:
        raise NotImplementedError(
            "headwise: adding arrays on WebGPU needs two of one shape and dtype, of floats or int32; "
            "bring them back with .torch() first"
        )
    return replayed(copies.added, [a, b])


def _add_in_place(a: Array, b: Any, *, alpha: float = 1) -> Array:
    return _copy_in_place(a, _add(a, b, alpha=alpha))


def _slice_backward(grad: Array, sizes: Any, dim: int, start: int, end: int, step: int) -> Array:
    first = slice(start, end).indices(sizes[dim])[0]
    return replayed(_placed, [grad], tuple(sizes), dim % len(sizes), first, step)


def _select_backward(grad: Array, sizes: Any, dim: int, index: int) -> Array:
    dim %= len(sizes)
    return replayed(_placed, [cast(Array, grad.unsqueeze(dim))], tuple(sizes), dim, index % sizes[dim], 1)


def _placed(device: Device, grad: Region, sizes: tuple[int, ...], dim: int, first: int, step: int) -> Region:
    """Zeros, and the gradient of a part where that part was."""
    y = copies.full(device, sizes, 0.0, grad.dtype)
    strides = (*y.strides[:dim], y.strides[dim] * step, *y.strides[dim + 1 :])
    part = y.narrow(dim, first, grad.shape[dim]).with_shape(grad.shape, strides)
    copies.copy_into(device, grad, part, part=True)
    return y


def _cat(tensors: Any, dim: int = 0) -> Array:
    first = next(x for x in tensors if isinstance(x, Array))
    # For a part of a split that nothing depends on, autograd passes zeros: a meta tensor, as arrays look like to it.
    filled_in = torch._C._current_graph_task_id() != -1
    if any(x.dtype != first.dtype or not (isinstance(x, Array) or (filled_in and x.is_meta)) for x in tensors):
        raise NotImplementedError("headwise: joining arrays needs all of them on WebGPU, of one dtype")
    # The shape of each of these zeros; None for an array.
    shapes = tuple(None if isinstance(x, Array) else tuple(x.shape) for x in tensors)
    return replayed(_joined, [x for x in tensors if isinstance(x, Array)], shapes, dim % first.dim())


def _joined(device: Device, *given: Any) -> Region:
    *regions, shapes, dim = given
    left = iter(regions)
    parts = [next(left) if shape is None else copies.full(device, shape, 0.0, regions[0].dtype) for shape in shapes]
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    y, start = device.empty(tuple(shape), parts[0].dtype), 0
    for part in parts:
        copies.copy_into(device, part, y.narrow(dim, start, part.shape[dim]), part=True)
        start += part.shape[dim]
    return y


def _stack(tensors: Sequence[Any], dim: int = 0) -> Array:
    dim %= tensors[0].dim() + 1
    return _cat([x.unsqueeze(dim) for x in tensors], dim)


def _to_copy(x: Array, *, dtype: torch.dtype | None = None, device: Any = None, **kwargs: Any) -> torch.Tensor:
    if device is not None and torch.device(device).type == "cpu":
        copy = x.torch()
        return copy if dtype is None else copy.to(dtype)
    raise NotImplementedError("headwise: an Array changes neither dtype nor GPU; bring it back with .torch() first")


OPERATORS |= {
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
