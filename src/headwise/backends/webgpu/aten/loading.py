"""``torch.load(…, map_location="webgpu")``: a private way into PyTorch (seen in 2.13).

PyTorch would make a storage on the device, and the slot for devices that are written in Python has no allocator: the
process ends. So the storage stays on the CPU, under a class that names this device: `torch._utils._rebuild_tensor` then
makes an array and hands it the storage in ``set_``, which uploads it. If PyTorch finds the device of a storage in another
way, tensors load to the CPU; tests/test_webgpu_saving.py sees it.
"""

from __future__ import annotations

from typing import Any

import torch

from headwise.backends.webgpu.array import OPERATORS, Array, uploaded
from headwise.backends.webgpu.torch_device import DEVICE, NAME, REGISTERED, checked

_BEFORE_PYTORCHS = 9  # of its deserializers the first is 10


class _OfAFile(torch.UntypedStorage):
    """What a file holds of a storage, on its way to the GPU."""

    device = DEVICE
    there: Array | None = None  # its elements on the GPU; tensors that shared a storage share it again


def _untagged(storage: Any) -> None:
    """Where a storage is that is saved: PyTorch's own know."""


def _deserialized(storage: Any, location: str) -> Any:
    if location.partition(":")[0] != NAME:
        return None
    checked(torch.device(location))
    storage.__class__ = _OfAFile
    return storage


def _set(x: Array, storage: Any, offset: int, size: Any, stride: Any = ()) -> Array:
    if not isinstance(storage, _OfAFile):
        raise NotImplementedError("headwise: set_ of a storage on WebGPU; x.data = y gives x the memory of y")
    if storage.there is None or storage.there.dtype != x.dtype:
        whole = torch.empty(0, dtype=x.dtype).set_(storage, 0, (storage.nbytes() // x.dtype.itemsize,), (1,))
        storage.there = uploaded(whole)
    x.data = storage.there.as_strided(size, stride, offset)
    return x


if REGISTERED:
    torch.serialization.register_package(_BEFORE_PYTORCHS, _untagged, _deserialized)
    OPERATORS[torch.ops.aten.set_.source_Storage_storage_offset] = _set
