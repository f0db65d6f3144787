"""Elements by number: gather, index, scatter and their kin (``wgsl/gather.wgsl``, ``wgsl/scatter.wgsl``), and embeddings.

A number out of range is loud where it is read: NaN, or the lowest whole number. What would be written there is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch

from headwise.backends.webgpu import copies, embedding
from headwise.backends.webgpu.array import OPERATORS, Array, array
from headwise.backends.webgpu.aten import elementwise
from headwise.backends.webgpu.device import Device
from headwise.backends.webgpu.recorder import replayed
from headwise.backends.webgpu.shaders import DTYPES
from headwise.backends.webgpu.storage import Region

aten = torch.ops.aten

_LOOKED_THROUGH = 64  # sources that an element looks through; sums of more floats are sorted first
_MISSING = {torch.float32: 0x7FC00000, torch.float16: 0x7E00, torch.bfloat16: 0x7FC0, torch.int32: 0x80000000}


def _gathered(device: Device, x: Region, *given: Any) -> Region:
    """given: the indices, the shape of the result, the step in x of each of its dims, and (size, step) of each index."""
    *indices, shape, steps, moves = given
    y = device.empty(shape, x.dtype)
    if y.numel == 0:
        return y
    if x.numel == 0:
        return copies.full(device, shape, math.nan if x.dtype.is_floating_point else 0, x.dtype)
    merged_shape, merged = copies.merged(shape, [steps, *[i.expanded(shape).strides for i in indices]])
    kernel = device.kernel(
        "gather", bytes=x.itemsize, indices=tuple(elementwise.name_of(i.dtype) for i in indices), dims=len(merged_shape)
    )
    per_word = max(1, 4 // x.itemsize)
    parameters = [y.numel, _MISSING.get(x.dtype, 0)]
    for size, step in zip(merged_shape, merged[0], strict=True):
        parameters += [size, step]
    for (size, step), of in zip(moves, merged[1:], strict=True):
        parameters += [size, step, *of]
    bound = {f"index{i}": index for i, index in enumerate(indices)}
    device.run(kernel, -(-y.numel // (256 * per_word)), tuple(parameters), x=x, **bound, y=y)
    return y


def _gather(x: Array, dim: int, index: Array, *, sparse_grad: bool = False) -> Any:
    if x.dim() == 0:
        return x.expand(index.shape).clone()
    if index.dim() == 0:
        return _gather(x, dim, cast(Array, index.view(1))).view(())
    dim %= x.dim()
    steps = tuple(0 if d == dim else s for d, s in enumerate(x.stride()))
    return replayed(_gathered, [x, index], tuple(index.shape), steps, ((x.shape[dim], x.stride(dim)),))


def _index_select(x: Array, dim: int, index: Array) -> Any:
    if x.dim() == 0:
        return x.clone()
    dim %= x.dim()
    shape = (*x.shape[:dim], index.numel(), *x.shape[dim + 1 :])
    steps = tuple(0 if d == dim else s for d, s in enumerate(x.stride()))
    placed = index.view(-1, *[1] * (x.dim() - dim - 1))
    return replayed(_gathered, [x, placed], shape, steps, ((x.shape[dim], x.stride(dim)),))


def _whole(x: Array, indices: Sequence[Any]) -> list[Any]:
    """The indices of x[…] as whole numbers: masks become places, which have to be read back."""
    made: list[Any] = []
    for index in indices:
        if index is None:
            made.append(None)
        elif index.dtype in (torch.bool, torch.uint8):
            here = index._read() if isinstance(index, Array) else index
            at = len(made)
            if tuple(here.shape) != tuple(x.shape[at : at + here.dim()]):
                raise IndexError(
                    f"The shape of the mask {list(here.shape)} at index {at} does not match "
                    f"the shape of the indexed tensor {list(x.shape)}"
                )
            made += [array(part) for part in here.nonzero(as_tuple=True)]
        else:
            made.append(array(index))
    return made + [None] * (x.dim() - len(made))


def _indexed_shape(x: Any, indices: Sequence[Any]) -> tuple[tuple[int, ...], int, list[int], tuple[int, ...]]:
    """Of x[…]: its shape, where the dims of the indices are in it, the dims that are indexed, the indices' common shape."""
    dims = [d for d, index in enumerate(indices) if index is not None]
    common = tuple(torch.broadcast_shapes(*[tuple(indices[d].shape) for d in dims]))
    together = dims == list(range(dims[0], dims[-1] + 1))
    first = dims[0] if together else 0
    rest = [x.shape[d] for d in range(x.dim()) if d not in dims]
    return (*rest[:first], *common, *rest[first:]), first, dims, common


def _index(x: Array, indices: Sequence[Any]) -> Any:
    whole = _whole(x, indices)
    shape, first, dims, common = _indexed_shape(x, whole)
    rest = [x.stride(d) for d in range(x.dim()) if d not in dims]
    steps = (*rest[:first], *[0] * len(common), *rest[first:])
    after = len(shape) - first - len(common)
    placed = [whole[d].expand(common).view(*common, *[1] * after) if _dense(whole[d], common) else
              whole[d].expand(common).reshape(*common, *[1] * after) for d in dims]  # fmt: skip
    return replayed(_gathered, [x, *placed], shape, steps, tuple((x.shape[d], x.stride(d)) for d in dims))


def _dense(index: Array, common: tuple[int, ...]) -> bool:
    return tuple(index.shape) == common


# -------------------------------------------------------------------------------------------------------------- writing


def _scattered(
    device: Device, x: Region, keys: Region, source: Region, sizes: tuple[int, int, int, int], op: str, own: bool,
    key_steps: tuple[int, ...], source_steps: tuple[int, ...],
) -> Region:  # fmt: skip
    """x contiguous; sizes: outer, size, inner, and how many sources there are for each outer and inner place."""
    _, size, inner, length = sizes
    y = device.empty(x.shape, x.dtype)
    if y.numel == 0:
        return y
    x, keys, source = (copies.contiguous(device, r) for r in (x, keys, source))
    kernel = device.kernel(
        "scatter", dtype=elementwise.name_of(x.dtype), kind=elementwise.kind_of(x.dtype),
        keys=elementwise.name_of(keys.dtype), op=op, own=own,
    )  # fmt: skip
    parameters = (y.numel, size, inner, length, *key_steps, *source_steps)
    device.run(kernel, -(-y.numel // 1024), parameters, x=x, keys=keys, source=source, y=y)
    return y


def _number(like: Array, value: Any) -> Array:
    return cast(Array, torch.full((1,), value, dtype=like.dtype, device=like.device))


_OPS = {
    None: "set",
    "add": "add",
    "sum": "add",
    "multiply": "mul",
    "prod": "mul",
    "amax": "max",
    "amin": "min",
    "mean": "mean",
}


def _scatter(
    x: Array, dim: int, index: Array, source: Any, *, reduce: str | None = None, include_self: bool = True
) -> Any:
    if index.numel() == 0:
        return x.clone()
    if x.dim() == 0:
        flat = source.view(1) if isinstance(source, Array) else source
        return _scatter(
            cast(Array, x.view(1)), 0, cast(Array, index.view(1)), flat, reduce=reduce, include_self=include_self
        ).view(())
    dim %= x.dim()
    part: Any = x
    for d in range(x.dim()):
        if d != dim:
            if index.shape[d] > x.shape[d]:
                raise RuntimeError(
                    f"Expected index {list(index.shape)} to be no larger than self "
                    f"{list(x.shape)} apart from dimension {dim}"
                )
            part = part.narrow(d, 0, index.shape[d])
    outer, inner = math.prod(index.shape[:dim]), math.prod(index.shape[dim + 1 :])
    length = index.shape[dim]
    along = (length * inner, inner, 1)
    if isinstance(source, Array):
        if source.dtype != x.dtype:
            raise RuntimeError(
                f"scatter(): Expected self.dtype to be equal to src.dtype, but got {x.dtype} and {source.dtype}"
            )
        for d in range(x.dim()):
            source = source.narrow(d, 0, index.shape[d])
        source_steps = along
    else:
        source, source_steps = _number(x, source), (0, 0, 0)
    sizes = (outer, x.shape[dim], inner, length)
    made = replayed(_scattered, [part, index, source], sizes, _OPS[reduce], include_self, along, source_steps)
    if tuple(part.shape) == tuple(x.shape):
        return made
    whole = x.clone()
    target: Any = whole
    for d in range(x.dim()):
        if d != dim:
            target = target.narrow(d, 0, index.shape[d])
    target.copy_(made)
    return whole


def _scatter_add(x: Array, dim: int, index: Array, source: Array) -> Any:
    return _scatter(x, dim, index, source, reduce="add")


def _scatter_reduce(x: Array, dim: int, index: Array, source: Array, reduce: str, *, include_self: bool = True) -> Any:
    return _scatter(x, dim, index, source, reduce=reduce, include_self=include_self)


def _along(x: Array, dim: int, index: Array, source: Array, op: str) -> Any:
    """Into x along one dim, as one list of numbers says."""
    if x.dim() == 0:
        return _along(cast(Array, x.view(1)), 0, index, cast(Array, source.view(-1)), op).view(())
    dim %= x.dim()
    outer, inner, length = math.prod(x.shape[:dim]), math.prod(x.shape[dim + 1 :]), index.numel()
    if length == 0:
        return x.clone()
    if op == "add" and length > _LOOKED_THROUGH and x.dtype.is_floating_point:
        rows = source.movedim(dim, 0).reshape(length, -1)
        summed = replayed(_summed_rows, [rows, index.view(-1)], x.shape[dim])
        return x + summed.view(x.shape[dim], *x.shape[:dim], *x.shape[dim + 1 :]).movedim(0, dim)
    source = cast(Array, source.expand(*x.shape[:dim], length, *x.shape[dim + 1 :]))
    sizes = (outer, x.shape[dim], inner, length)
    return replayed(_scattered, [x, index, source], sizes, op, True, (0, 1, 0), (length * inner, inner, 1))


def _summed_rows(device: Device, rows: Region, ids: Region, count: int) -> Region:
    keys = ids
    return embedding.embedding_backward(device, (rows, keys, count, -1))


def _index_add(x: Array, dim: int, index: Array, source: Array, *, alpha: float = 1) -> Any:
    return _along(x, dim, index, source if alpha == 1 else cast(Array, source * alpha), "add")


def _index_copy(x: Array, dim: int, index: Array, source: Array) -> Any:
    return _along(x, dim, index, source, "set")


def _index_fill(x: Array, dim: int, index: Array, value: Any) -> Any:
    filled = value.expand(()) if isinstance(value, Array) else _number(x, value)
    return _along(x, dim, index, cast(Array, filled.view([1] * x.dim())), "set")


def _index_put(x: Array, indices: Sequence[Any], values: Array, accumulate: bool = False, unsafe: bool = False) -> Any:
    whole = _whole(x, indices)
    shape, first, dims, common = _indexed_shape(x, whole)
    length = math.prod(common)
    if length == 0 or x.numel() == 0:
        return x.clone()
    values = cast(Array, array(values).expand(shape))
    # The indexed dims in front, as one; the others behind, as one.
    others = [d for d in range(x.dim()) if d not in dims]
    order = [*dims, *others]
    size, inner = math.prod(x.shape[d] for d in dims), math.prod(x.shape[d] for d in others)
    keys: Any = None
    for d in dims:
        index = whole[d].expand(common)
        if len(dims) > 1:
            index = torch.where(index < 0, index + x.shape[d], index)
        keys = index if keys is None else keys * x.shape[d] + index
    front = list(range(first, first + len(common)))
    source = values.permute(*front, *[d for d in range(len(shape)) if d not in front]).reshape(length, inner)
    rows = x.permute(order).reshape(size, inner)
    flat = keys.reshape(length)
    if accumulate:
        made = _along(cast(Array, rows), 0, flat, cast(Array, source), "add")
    else:
        made = replayed(
            _scattered, [rows, flat, source], (1, size, inner, length), "set", True, (0, 1, 0), (0, inner, 1)
        )
    back = [order.index(d) for d in range(x.dim())]
    return made.view([x.shape[d] for d in order]).permute(back)


def _masked_scatter(x: Array, mask: Array, source: Array) -> Any:
    shape = torch.broadcast_shapes(tuple(x.shape), tuple(mask.shape))
    whole: Any = mask.expand(shape).reshape(-1)
    places = (whole.to(torch.int32).cumsum(0) - 1).clamp(min=0)
    return torch.where(mask, source.reshape(-1)[places].view(shape), x)


def _nonzero(x: Array) -> Any:
    """How many there are is known when the elements have been read back."""
    return array(x._read().nonzero())


def _masked_select(x: Array, mask: Array) -> Any:
    shape = tuple(torch.broadcast_shapes(tuple(x.shape), tuple(mask.shape))) or (1,)
    return _index(cast(Array, x.expand(shape)), [mask.expand(shape)])


def _flip(x: Array, dims: Sequence[int]) -> Any:
    made: Any = x
    for dim in dims:
        backwards = torch.arange(x.shape[dim] - 1, -1, -1, device=x.device) if x.dim() else None
        made = made if backwards is None else _index_select(made, dim, cast(Array, backwards))
    return made if dims else x.clone()


def _in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *args, **kwargs: x.copy_(function(x, *args, **kwargs))


# ------------------------------------------------------------------------------------------------------------ embedding


def _embedding(weight: Array, ids: Array, padding_idx: int = -1, scale_grad: bool = False, sparse: bool = False) -> Any:
    if weight.dtype not in DTYPES or ids.dtype not in (torch.int32, torch.int64) or weight.dim() != 2:
        return _index_select(weight, 0, cast(Array, ids.reshape(-1))).view(*ids.shape, *weight.shape[1:])
    return replayed(_embedded, [weight, ids])


def _embedded(device: Device, weight: Region, ids: Region) -> Region:
    return embedding.embedding_forward(device, SimpleNamespace(ids=ids, weight=weight))


def _embedding_backward(grad: Array, ids: Array, count: int, padding: int, scale_grad: bool) -> Any:
    if scale_grad:
        raise NotImplementedError("headwise: scale_grad_by_freq is not there on WebGPU; use x.cpu()")
    return replayed(_embedding_gradient, [grad, ids], count, padding)


def _embedding_gradient(device: Device, grad: Region, ids: Region, count: int, padding: int) -> Region:
    return embedding.embedding_backward(device, (grad, ids, count, padding))


_WRITERS: dict[str, Callable[..., Any]] = {
    "scatter.src": _scatter, "scatter.value": _scatter, "scatter.reduce": _scatter, "scatter.value_reduce": _scatter,
    "scatter_add": _scatter_add, "scatter_reduce.two": _scatter_reduce, "index_add": _index_add, "index_copy": _index_copy,
    "index_fill.int_Scalar": _index_fill, "index_fill.int_Tensor": _index_fill, "index_put": _index_put,
    "masked_scatter": _masked_scatter,
}  # fmt: skip

for _name, _function in _WRITERS.items():
    _packet, _, _overload = _name.partition(".")
    OPERATORS[getattr(getattr(aten, _packet), _overload or "default")] = _function
    OPERATORS[getattr(getattr(aten, _packet + "_"), _overload or "default")] = _in_place(_function)

OPERATORS |= {
    aten.gather.default: _gather,
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _masked_select,
    aten.flip.default: _flip,
    aten.index_select.default: _index_select,
    aten.index.Tensor: _index,
    aten._unsafe_index.Tensor: _index,
    aten._index_put_impl_.default: _in_place(_index_put),
    aten._unsafe_index_put.default: _index_put,
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_backward,
}
