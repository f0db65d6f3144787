"""The order of elements along a dim: sort and top-k.

Short rows are ranked, every element against every other; a few elements of a row are picked one by one
(``wgsl/order.wgsl``); all else is a radix sort of keys whose order is that of the elements (``wgsl/sort_keys.wgsl``).
"""

from __future__ import annotations

from typing import Any

import torch

from headwise.backends.webgpu import copies, radix
from headwise.backends.webgpu.array import OPERATORS, Array
from headwise.backends.webgpu.aten import elementwise, making
from headwise.backends.webgpu.device import Device
from headwise.backends.webgpu.recorder import replayed
from headwise.backends.webgpu.storage import Region

aten = torch.ops.aten

_RANKED = 1024  # elements of a row up to which each is compared with each
_PICKED = 16  # elements that are picked one by one
_KEY_BITS = {"f16": 19, "bf16": 16, "i16": 16, "i8": 8, "u8": 8, "bool": 1}  # floats of 16 bits are read as 32


def _ordered(device: Device, x: Region, dim: int, count: int, descending: bool) -> Region:
    """The places of the first ``count`` elements in the order."""
    others = [d for d in range(len(x.shape)) if d != dim]
    rows = copies.contiguous(device, x.permuted([*others, dim]))
    width = x.shape[dim]
    lines = x.numel // width
    if width > _RANKED and count > _PICKED:
        sorted_places = _by_keys(device, rows, lines, width, descending)
        first = sorted_places.with_shape((*rows.shape[:-1], width)).narrow(len(others), 0, count)
        places = making.cast_to(device, first, torch.int64)
    else:
        mode = "rank" if count == width else "pick"
        kind = elementwise.kind_of(x.dtype)
        kernel = device.kernel(
            "order", x=elementwise.name_of(x.dtype), kind="i" if kind == "b" else kind, descending=descending, mode=mode
        )
        places = device.empty((*rows.shape[:-1], count), torch.int64)
        groups = -(-lines * width // 256) if mode == "rank" else lines
        device.run(kernel, groups, (lines, width, count, width, 1), x=rows, places=places)
    order = list(range(len(others)))
    order.insert(dim, len(others))
    return places.permuted(order)


def _by_keys(device: Device, rows: Region, lines: int, width: int, descending: bool) -> Region:
    name = elementwise.name_of(rows.dtype)
    bits = _KEY_BITS.get(name, 32)
    places = None
    # 64 bits are sorted by their lower words, and what comes of that by their upper ones.
    for half in ("low", "high") if name == "i64" else ("",):
        variant = {"x": name, "descending": descending, "half": half, "placed": places is not None, "bits": bits}
        keys = device.empty((lines, width), torch.int32)
        bound: dict[str, Region] = {} if places is None else {"places": places}
        parameters = (lines, width, width, 1)
        device.run(
            device.kernel("sort_keys", **variant), -(-lines * width // 256), parameters, x=rows, **bound, keys=keys
        )
        _, places = radix.sorted_keys(device, keys, bits, places)
    assert places is not None
    return places


def _sorted(x: Array, dim: int, count: int, descending: bool) -> Any:
    if x.dim() == 0:
        return x.clone(), torch.zeros((), dtype=torch.int64, device=x.device)
    dim %= x.dim()
    if x.numel() == 0 or count == 0:
        shape = (*x.shape[:dim], count, *x.shape[dim + 1 :])
        return x.new_empty(shape), torch.zeros(shape, dtype=torch.int64, device=x.device)
    places = replayed(_ordered, [x], dim, count, descending)
    return x.gather(dim, places), places


def _sort(x: Array, dim: int = -1, descending: bool = False) -> Any:
    return _sorted(x, dim, x.shape[dim] if x.dim() else 1, descending)


def _stable_sort(x: Array, *, stable: Any = None, dim: int = -1, descending: bool = False) -> Any:
    return _sort(x, dim, descending)


def _topk(x: Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    if x.dim() and not 0 <= k <= x.shape[dim]:
        raise RuntimeError(f"topk: selected index k out of range: k is {k}, and the dim has {x.shape[dim]} elements")
    return _sorted(x, dim, k, largest)


OPERATORS |= {
    aten.sort.default: _sort,
    aten.sort.stable: _stable_sort,
    aten.topk.default: _topk,
}
