"""Views of arrays: other shapes and strides over the same memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from headwise.backends.webgpu import copies
from headwise.backends.webgpu.array import OPERATORS, Array
from headwise.backends.webgpu.recorder import replayed
from headwise.backends.webgpu.storage import Layout, Region

aten = torch.ops.aten

_VIEWS = (
    aten.alias.default, aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default,
    aten.transpose.int, aten.t.default, aten.permute.default, aten.slice.Tensor, aten.select.int,
    aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.expand.default,
    aten.as_strided.default, aten.split.Tensor, aten.unbind.int, aten.split_with_sizes.default, aten.chunk.default,
    aten.diagonal.default, aten.unfold.default, aten.swapaxes.default, aten.movedim.int, aten.view_as.default,
    aten.lift_fresh.default, aten.narrow.default,
)  # fmt: skip
_MOST_KEPT = 1 << 14
_kept: dict[tuple[Any, ...], Layout | list[Layout]] = {}


def _view(func: Any) -> Callable[..., Any]:
    def view(x: Array, *args: Any, **kwargs: Any) -> Any:
        layout = x._layout
        try:
            key = (func, layout, *[tuple(a) if type(a) is list else a for a in args])
        except TypeError:
            key = (func, layout, repr(args))
        found = None if kwargs else _kept.get(key)
        if found is None:
            found = _seen(func, x, args, kwargs)
            if not kwargs:
                if len(_kept) >= _MOST_KEPT:
                    _kept.clear()
                _kept[key] = found
        if type(found) is list:
            return [Array._of(part, x._storage, x._device) for part in found]
        return Array._of(found, x._storage, x._device)  # type: ignore[arg-type]

    return view


def _seen(func: Any, x: Array, args: Any, kwargs: Any) -> Layout | list[Layout]:
    region = x._region
    # Run on a meta tensor, the operator gives the shape and strides of the view.
    low, high = region.span()
    whole = torch.empty(max(high, low) + 1, dtype=x.dtype, device="meta")
    found = func(whole.as_strided(region.shape, region.strides, region.offset), *args, **kwargs)

    def of(meta: torch.Tensor) -> Layout:
        made = Region(region.storage, meta.dtype, tuple(meta.shape), tuple(meta.stride()), int(meta.storage_offset()))
        return x._device.layout(made)

    return [of(meta) for meta in found] if isinstance(found, (list, tuple)) else of(found)


def _detach(x: Array) -> Array:
    """A view; but a copy, if autograd is about to keep x as a ``.grad`` while other arrays share its memory.

    Autograd adds to a ``.grad`` in place, so its memory must not be shared: ``x`` and ``w`` in ``x + w.t()`` get the same
    gradient.
    """
    if _is_being_kept(x) and _owners(x) > _ONE_OWNER:
        copy: Array = replayed(copies.copied, [x])
        return copy
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


OPERATORS |= {
    **{func: _view(func) for func in _VIEWS if not func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)},
    aten.detach.default: _detach,
    aten.view.dtype: _view_dtype,
}  # fmt: skip
