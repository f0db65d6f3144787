"""Elements written by number: scatter, index_put and their kin (``wgsl/scatter.wgsl``).

What would be written out of range is left out. Sources that meet take effect in their order, so the last one wins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from headwise.backends.webgpu import copies, embedding, radix
from headwise.backends.webgpu.array import OPERATORS, Array, array
from headwise.backends.webgpu.aten import elementwise
from headwise.backends.webgpu.aten.indexing import as_numbers, check_numbers, check_sizes, indexed_shape
from headwise.backends.webgpu.capture_errors import note_number
from headwise.backends.webgpu.device import Device
from headwise.backends.webgpu.mixed_devices import MixedDevices
from headwise.backends.webgpu.recorder import replayed
from headwise.backends.webgpu.storage import Region

aten = torch.ops.aten

# An element looks at every source if these are few, or few for all elements together. Else each finds its own.
_FEW, _LOOKS = 8, 1 << 18
_SUMMED_IN_ORDER = 64  # rows; sums of more floats are split


def _scattered(
    device: Device, x: Region, keys: Region, source: Region, sizes: tuple[int, int, int, int], op: str, own: bool,
    key_steps: tuple[int, int, int], source_steps: tuple[int, int, int], wraps: bool,
) -> Region:  # fmt: skip
    """x contiguous; sizes: outer, size, inner, and how many sources there are for each outer and inner place."""
    outer, size, inner, length = sizes
    y = device.empty(x.shape, x.dtype)
    if y.numel == 0:
        return y
    x, keys, source = (copies.contiguous(device, r) for r in (x, keys, source))
    shared = key_steps[0] == key_steps[2] == 0
    count, found = 0, {}
    if length <= _FEW or y.numel * length <= _LOOKS:
        how, found = "look", {"keys": keys}
    else:
        how = "last" if op == "set" else "sorted"
        of_keys, along = (1, 1) if shared else (outer, inner)
        elements, count = of_keys * size * along, of_keys * length * along
        if elements >= 1 << 32 or count >= 1 << 32:
            raise NotImplementedError(f"headwise: {count} sources for {elements} elements on WebGPU: 2^32 at most")
        kernel = device.kernel(
            "scatter_targets",
            keys=elementwise.name_of(keys.dtype),
            to="last" if how == "last" else "targets",
            wraps=wraps,
        )
        parameters = (count, size, along, length, *key_steps, elements)
        if how == "last":
            found["last"] = copies.full(device, (elements,), 0, torch.int32)
            device.run(kernel, -(-count // 256), parameters, keys=keys, last=found["last"])
        else:
            targets = device.empty((1, count), torch.int32)
            device.run(kernel, -(-count // 256), parameters, keys=keys, targets=targets)
            found["targets"], found["sources"] = radix.sorted_keys(device, targets, elements.bit_length())
    kernel = device.kernel(
        "scatter", dtype=elementwise.name_of(x.dtype), kind=elementwise.kind_of(x.dtype), how=how,
        keys=elementwise.name_of(keys.dtype) if how == "look" else "", wraps=wraps and how == "look", shared=shared, op=op,
        own=own,
    )  # fmt: skip
    of_elements = (y.numel, size, inner, length, *key_steps, *source_steps, count)
    device.run(kernel, -(-y.numel // 1024), of_elements, x=x, **found, source=source, y=y)
    return y


def _number(like: Array, value: Any) -> Array:
    return cast(Array, torch.full((1,), value, dtype=like.dtype, device=like.device))


# -------------------------------------------------------------------------------------------------------------- scatter


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
    given = source if isinstance(source, torch.Tensor) else None
    check_numbers("scatter", index)
    check_sizes("scatter", x, dim % max(x.dim(), 1), index, given)
    if given is not None and given.dtype != x.dtype:
        raise RuntimeError(
            f"scatter(): Expected self.dtype to be equal to src.dtype, but got {x.dtype} and {given.dtype}"
        )
    if index.numel() == 0:
        return x.clone()
    if x.dim() == 0 or index.dim() == 0:
        flat = source if given is None else source.view(-1)
        return _scatter(
            cast(Array, x.view(-1)), 0, cast(Array, index.view(-1)), flat, reduce=reduce, include_self=include_self
        ).view(x.shape)
    dim %= x.dim()
    part: Any = x
    for d in range(x.dim()):
        if d != dim:
            part = part.narrow(d, 0, index.shape[d])
    outer, inner = math.prod(index.shape[:dim]), math.prod(index.shape[dim + 1 :])
    length = index.shape[dim]
    along = (length * inner, inner, 1)
    if given is None:
        source, source_steps = _number(x, source), (0, 0, 0)
    else:
        for d in range(x.dim()):
            source = source.narrow(d, 0, index.shape[d])
        source_steps = along
    sizes = (outer, x.shape[dim], inner, length)
    made = replayed(_scattered, [part, index, source], sizes, _OPS[reduce], include_self, along, source_steps, False)
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


# ------------------------------------------------------------------------------------------------------- along one dim


def _along(x: Array, dim: int, index: Array, source: Array, op: str, wraps: bool = False) -> Any:
    """Into x along one dim, as one list of numbers says. source: one element, or as many as the list names."""
    if x.dim() == 0:
        return _along(cast(Array, x.view(1)), 0, index, cast(Array, source.view(-1)), op, wraps).view(())
    dim %= x.dim()
    outer, inner, length = math.prod(x.shape[:dim]), math.prod(x.shape[dim + 1 :]), index.numel()
    if length == 0:
        return x.clone()
    if op == "add" and length > _SUMMED_IN_ORDER and x.dtype.is_floating_point:
        if wraps:
            index = cast(Array, torch.where(index < 0, index + x.shape[dim], index))
        rows = source.movedim(dim, 0).reshape(length, -1)
        summed = replayed(_summed_rows, [rows, index.view(-1)], x.shape[dim])
        return x + summed.view(x.shape[dim], *x.shape[:dim], *x.shape[dim + 1 :]).movedim(0, dim)
    steps = (0, 0, 0) if source.numel() == 1 else (length * inner, inner, 1)
    sizes = (outer, x.shape[dim], inner, length)
    return replayed(_scattered, [x, index, source], sizes, op, True, (0, 1, 0), steps, wraps)


def _write_along(x: Array, dim: int, index: Array, source: Array, wraps: bool = False) -> Array:
    """The same as ``x.copy_(_along(…, "set"))``: what is not written is not copied, where x is contiguous."""
    elementwise.check_written(x)
    if x.dim() == 0 or not x.is_contiguous() or 0 in (index.numel(), x.numel()):
        return cast(Array, x.copy_(_along(x, dim, index, source, "set", wraps)))
    # A kernel may not read a buffer that it writes.
    index, source = (cast(Array, t.clone()) if t._storage is x._storage else t for t in (index, source))
    replayed(_written_along, [x, index, source], dim % x.dim(), wraps)
    return x


def _written_along(device: Device, x: Region, keys: Region, source: Region, dim: int, wraps: bool) -> tuple[()]:
    outer, size, inner, length = math.prod(x.shape[:dim]), x.shape[dim], math.prod(x.shape[dim + 1 :]), keys.numel
    keys, source = (copies.contiguous(device, r) for r in (keys, source))
    name = elementwise.name_of(keys.dtype)
    found = {}
    if length > _FEW:
        found["last"] = copies.full(device, (size,), 0, torch.int32)
        kernel = device.kernel("scatter_targets", keys=name, to="last", wraps=wraps)
        device.run(kernel, -(-length // 256), (length, size, 1, length, 0, 1, 0, size), keys=keys, last=found["last"])
    kernel = device.kernel(
        "write_along", bytes=x.itemsize, keys=name, how="last" if length > _FEW else "look", wraps=wraps
    )
    count = outer * length * inner
    steps = (0, 0, 0) if source.numel == 1 else (length * inner, inner, 1)
    device.run(kernel, -(-count // 256), (count, size, inner, length, *steps), y=x, keys=keys, **found, source=source)
    return ()


def _summed_rows(device: Device, rows: Region, ids: Region, count: int) -> Region:
    return embedding.embedding_backward(device, (rows, ids, count, -1))


def _check_along(name: str, x: Array, dim: int, index: Array, source: Array) -> None:
    check_numbers(name, index, vector=True)
    if x.dtype != source.dtype:
        raise RuntimeError(
            f"{name}: self and source expected to have the same dtype, but got (self) {x.dtype} and (source) {source.dtype}"
        )
    if x.dim() and source.dim() == x.dim():
        dim %= x.dim()
        expected = (*x.shape[:dim], index.numel(), *x.shape[dim + 1 :])
    else:
        expected = (index.numel(),) if source.dim() else ()
    if tuple(source.shape) != expected or (not source.dim() and index.numel() != 1):
        raise RuntimeError(
            f"{name}: the source is {tuple(source.shape)}; for self {tuple(x.shape)} and {index.numel()} numbers of dim "
            f"{dim} it needs to be {expected}"
        )


def _index_add(x: Array, dim: int, index: Array, source: Array, *, alpha: float = 1) -> Any:
    _check_along("index_add", x, dim, index, source)
    return _along(x, dim, index, source if alpha == 1 else cast(Array, source * alpha), "add")


def _index_copy(x: Array, dim: int, index: Array, source: Array) -> Any:
    _check_along("index_copy", x, dim, index, source)
    return _along(x, dim, index, source, "set")


def _index_copy_in_place(x: Array, dim: int, index: Array, source: Array) -> Any:
    _check_along("index_copy", x, dim, index, source)
    return _write_along(x, dim, index, source)


def _index_fill(x: Array, dim: int, index: Array, value: Any, write: Callable[..., Any] | None = None) -> Any:
    check_numbers("index_fill", index, vector=True)
    if isinstance(value, torch.Tensor):
        if value.dim():
            raise RuntimeError(f"index_fill: the value has shape {tuple(value.shape)}; it needs to be one number")
        if not isinstance(value, Array):
            note_number("aten::index_fill_", value)
        value = array(value).to(x.dtype).view(1)
    source = value if isinstance(value, Array) else _number(x, value)
    return _along(x, dim, index, source, "set", wraps=True) if write is None else write(x, dim, index, source, True)


def _index_fill_in_place(x: Array, dim: int, index: Array, value: Any) -> Any:
    return _index_fill(x, dim, index, value, _write_along)


# ------------------------------------------------------------------------------------------------------------ x[…] = y


def _index_put(x: Array, indices: Sequence[Any], values: Any, accumulate: bool = False, unsafe: bool = False) -> Any:
    if not isinstance(values, Array):
        if values.dim():
            raise MixedDevices("index_put")
        note_number("aten::index_put_", values)
        values = array(values)
    masked = _where_masked(x, indices, values, accumulate)
    if masked is not None:
        return masked
    if values.dtype != x.dtype:
        raise RuntimeError(
            f"Index put requires the source and destination dtypes match, got {x.dtype} for the destination and "
            f"{values.dtype} for the source."
        )
    whole = as_numbers(x, indices)
    shape, first, dims, common = indexed_shape(x, whole)
    length = math.prod(common)
    if length == 0 or x.numel() == 0:
        return x.clone()
    values = values.expand(shape)
    # The indexed dims in front, as one; the others behind, as one.
    others = [d for d in range(x.dim()) if d not in dims]
    order = [*dims, *others]
    size, inner = math.prod(x.shape[d] for d in dims), math.prod(x.shape[d] for d in others)
    front = list(range(first, first + len(common)))
    source = values.permute([*front, *[d for d in range(len(shape)) if d not in front]]).reshape(length, inner)
    rows = x.permute(order).reshape(size, inner)
    keys = _place([whole[d].expand(common) for d in dims], [x.shape[d] for d in dims]).reshape(length)
    made = _along(cast(Array, rows), 0, keys, cast(Array, source), "add" if accumulate else "set", wraps=len(dims) == 1)
    back = [order.index(d) for d in range(x.dim())]
    return made.view([x.shape[d] for d in order]).permute(back)


def _index_put_in_place(
    x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False, unsafe: bool = False
) -> Any:
    given = [d for d, index in enumerate(indices) if index is not None]
    index = indices[given[0]] if len(given) == 1 else None
    if (
        isinstance(x, Array) and isinstance(index, Array) and isinstance(values, Array) and not accumulate
        and index.dim() == 1 and index.dtype in (torch.int64, torch.int32) and values.dtype == x.dtype
    ):  # fmt: skip
        shape = (*x.shape[: given[0]], index.numel(), *x.shape[given[0] + 1 :])
        source = values if values.numel() == 1 and values.dim() <= len(shape) else values.expand(shape)
        return _write_along(x, given[0], index, cast(Array, source), wraps=True)
    if isinstance(x, Array):
        elementwise.check_written(x)
    return x.copy_(_index_put(x, indices, values, accumulate))


def _place(indices: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Indices of several dims as one, of the dims as one; -1 where one of them is out of range."""
    if len(indices) == 1:
        return indices[0]
    place, outside = (torch.zeros((), dtype=of, device=indices[0].device) for of in (torch.int64, torch.bool))
    for index, size in zip(indices, sizes, strict=True):
        wrapped = torch.where(index < 0, index + size, index)
        outside = outside | (wrapped < 0) | (wrapped >= size)
        place = place * size + wrapped
    return torch.where(outside, -1, place)


def _where_masked(x: Array, indices: Sequence[Any], values: Array, accumulate: bool) -> Any:
    """x[mask] = y with the same y for all that is chosen: nothing has to be read back. None: it is something else."""
    given = [i for i, index in enumerate(indices) if index is not None]
    if len(given) != 1 or not isinstance(indices[given[0]], Array):
        return None
    mask, first = indices[given[0]], given[0]
    after = x.dim() - first - mask.dim()
    if mask.dtype != torch.bool or mask.dim() == 0 or tuple(mask.shape) != tuple(x.shape[first : first + mask.dim()]):
        return None
    if values.numel() == 1 and values.dim() <= after + 1:
        values = cast(Array, values.view(()) if accumulate else values.to(x.dtype).view(()))
    elif values.dim() > after:
        return None
    if values.dtype != x.dtype:
        return None
    wide: Any = mask.view(*mask.shape, *[1] * after)
    return torch.where(wide, x + values if accumulate else values, x)


def _masked_scatter(x: Array, mask: Array, source: Array) -> Any:
    if x.dtype != source.dtype:
        raise RuntimeError(
            f"masked_scatter: expected self and source to have same dtypes but got {x.dtype} and {source.dtype}"
        )
    shape = torch.broadcast_shapes(tuple(x.shape), tuple(mask.shape))
    if source.numel() == 0:  # right if the mask chooses nothing; else as loud as a source that is too short
        source = cast(Array, x.new_full((1,), math.nan if x.dtype.is_floating_point else 0))
    whole: Any = mask.expand(shape).reshape(-1)
    places = (whole.to(torch.int32).cumsum(0) - 1).clamp(min=0)
    return torch.where(mask, source.reshape(-1)[places].view(shape), x)


def _in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: Array, *args: Any, **kwargs: Any) -> Any:
        if isinstance(x, Array):
            elementwise.check_written(x)
        return x.copy_(function(x, *args, **kwargs))

    return run


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
    aten.index_copy_.default: _index_copy_in_place,
    aten.index_fill_.int_Scalar: _index_fill_in_place,
    aten.index_fill_.int_Tensor: _index_fill_in_place,
    aten.index_put_.default: _index_put_in_place,
    aten._index_put_impl_.default: _index_put_in_place,
    aten._unsafe_index_put.default: _index_put,
}
