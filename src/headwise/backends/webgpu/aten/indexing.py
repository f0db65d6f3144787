"""Elements by number: gather, index and their kin (``wgsl/gather.wgsl``), and embeddings.

A number out of range is loud: NaN, or the lowest whole number. Only x[…] counts negative numbers from the end.
"""

from __future__ import annotations

from collections.abc import Sequence
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

# The bits of what is not there; of 64 bits the upper word.
_MISSING = {
    torch.float32: 0x7FC00000, torch.float16: 0x7E00, torch.bfloat16: 0x7FC0, torch.int32: 0x80000000,
    torch.float64: 0x7FF80000, torch.int64: 0x80000000, torch.int16: 0x8000, torch.int8: 0x80,
}  # fmt: skip


def check_numbers(name: str, index: Any, vector: bool = False) -> None:
    """An error if an index holds what are no whole numbers. vector: or if it has more than one dim."""
    if index.numel() and index.dtype not in (torch.int64, torch.int32):
        raise RuntimeError(f"{name}: the index is {index.dtype}; it needs to be int64 or int32")
    if vector and index.dim() > 1:
        raise IndexError(f"{name}: the index has shape {tuple(index.shape)}; it needs to be a vector")


def check_sizes(name: str, x: Any, dim: int, index: Any, source: Any = None) -> None:
    """An error if an index, or its source, has not the dims of x, or is larger than it may be."""
    if index.numel() == 0:
        return
    for other, what in ((index, "index"), (source, "source")):
        if other is not None and max(other.dim(), 1) != max(x.dim(), 1):
            raise RuntimeError(
                f"{name}: the {what} has {other.dim()} dims; it needs to have as many as self, {x.dim()}"
            )
    for d in range(x.dim() if index.dim() else 0):
        if (d != dim and index.shape[d] > x.shape[d]) or (source is not None and index.shape[d] > source.shape[d]):
            of_source = "" if source is None else f", and than the source {list(source.shape)}"
            raise RuntimeError(
                f"{name}: Expected index {list(index.shape)} to be no larger than self {list(x.shape)} apart from dimension "
                f"{dim}{of_source}"
            )


def _gathered(device: Device, x: Region, *given: Any) -> Region:
    """given: the indices, the shape of the result, the step in x of each of its dims, (size, step) of each index, and
    whether negative numbers count from the end."""
    *indices, shape, steps, moves, wraps = given
    y = device.empty(shape, x.dtype)
    if y.numel == 0:
        return y
    if x.numel == 0:
        raise IndexError(f"headwise: numbers {tuple(shape)} of elements of a tensor {x.shape}, which has none")
    merged_shape, merged = copies.merged(shape, [steps, *[i.expanded(shape).strides for i in indices]])
    kernel = device.kernel(
        "gather", bytes=x.itemsize, indices=tuple(elementwise.name_of(i.dtype) for i in indices), dims=len(merged_shape),
        wraps=wraps,
    )  # fmt: skip
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
    check_numbers("gather", index)
    check_sizes("gather", x, dim % max(x.dim(), 1), index)
    if index.numel() == 0:
        return x.new_empty(index.shape)
    if x.dim() == 0:
        return _gather(cast(Array, x.view(1)), 0, index)
    if index.dim() == 0:
        return _gather(x, dim, cast(Array, index.view(1))).view(())
    dim %= x.dim()
    steps = tuple(0 if d == dim else s for d, s in enumerate(x.stride()))
    return replayed(_gathered, [x, index], tuple(index.shape), steps, ((x.shape[dim], x.stride(dim)),), False)


def _index_select(x: Array, dim: int, index: Array) -> Any:
    check_numbers("index_select", index, vector=True)
    if x.dim() == 0:
        return _index_select(cast(Array, x.view(1)), 0, index).view(())
    dim %= x.dim()
    shape = (*x.shape[:dim], index.numel(), *x.shape[dim + 1 :])
    steps = tuple(0 if d == dim else s for d, s in enumerate(x.stride()))
    placed = index.view(-1, *[1] * (x.dim() - dim - 1))
    return replayed(_gathered, [x, placed], shape, steps, ((x.shape[dim], x.stride(dim)),), False)


def as_numbers(x: Array, indices: Sequence[Any]) -> list[Any]:
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
        elif index.dtype not in (torch.int64, torch.int32):
            raise IndexError(f"tensors used as indices must be long, int, byte or bool tensors, and not {index.dtype}")
        else:
            made.append(array(index))
    return made + [None] * (x.dim() - len(made))


def indexed_shape(x: Any, indices: Sequence[Any]) -> tuple[tuple[int, ...], int, list[int], tuple[int, ...]]:
    """Of x[…]: its shape, where the dims of the indices are in it, the dims that are indexed, the indices' common shape."""
    dims = [d for d, index in enumerate(indices) if index is not None]
    common = tuple(torch.broadcast_shapes(*[tuple(indices[d].shape) for d in dims]))
    together = dims == list(range(dims[0], dims[-1] + 1))
    first = dims[0] if together else 0
    rest = [x.shape[d] for d in range(x.dim()) if d not in dims]
    return (*rest[:first], *common, *rest[first:]), first, dims, common


def _index(x: Array, indices: Sequence[Any]) -> Any:
    whole = as_numbers(x, indices)
    shape, first, dims, common = indexed_shape(x, whole)
    rest = [x.stride(d) for d in range(x.dim()) if d not in dims]
    steps = (*rest[:first], *[0] * len(common), *rest[first:])
    after = len(shape) - first - len(common)
    placed = [whole[d].expand(common).view(*common, *[1] * after) if _dense(whole[d], common) else
              whole[d].expand(common).reshape(*common, *[1] * after) for d in dims]  # fmt: skip
    return replayed(_gathered, [x, *placed], shape, steps, tuple((x.shape[d], x.stride(d)) for d in dims), True)


def _dense(index: Array, common: tuple[int, ...]) -> bool:
    return tuple(index.shape) == common


# -------------------------------------------------------------------------------------------------------- by what they hold


def _nonzero(x: Array) -> Any:
    """How many there are is known when the elements have been read back."""
    return array(x._read().nonzero())


def _masked_select(x: Array, mask: Array) -> Any:
    shape = tuple(torch.broadcast_shapes(tuple(x.shape), tuple(mask.shape))) or (1,)
    return _index(cast(Array, x.expand(shape)), [mask.expand(shape)])


def _flip(x: Array, dims: Sequence[int]) -> Any:
    if not dims or x.dim() == 0:
        return x.clone()
    made: Any = x
    for dim in dims:
        backwards = torch.arange(x.shape[dim] - 1, -1, -1, device=x.device)
        made = _index_select(made, dim, cast(Array, backwards))
    return made


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


OPERATORS |= {
    aten.gather.default: _gather,
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _masked_select,
    aten.flip.default: _flip,
    aten.index_select.default: _index_select,
    aten.index.Tensor: _index,
    aten._unsafe_index.Tensor: _index,
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_backward,
}
