"""Tensors that live on the GPU.

An `Array` is a `torch.Tensor` without memory on the CPU: it has shape, strides, dtype and a place in autograd, and its
elements are in a GPU buffer. Headwise ops take and return arrays. Of PyTorch's own operators an array supports views, copies
and sums (`array_ops`); any other raises. ``x.torch()`` copies the elements back.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.backends.webgpu import runtime
from headwise.backends.webgpu.storage import Layout, Region, Storage

OPERATORS: dict[Any, Callable[..., Any]] = {}  # PyTorch operators that arrays support; `array_ops` fills it
_make_wrapper = Tensor._make_wrapper_subclass


class Array(Tensor):
    """A tensor in the memory of the GPU. Make one with `headwise.webgpu.array`."""

    _storage: Storage
    _layout: Layout  # how the elements lie in the storage
    _device: runtime.OpenDevice

    headwise_device = "webgpu"  # for the choice of a backend, and for messages
    # An array's part of the cache key. Layouts are unique on their device, and different on another.
    headwise_facts = staticmethod(operator.attrgetter("_layout", "requires_grad"))

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, region: Region, device: runtime.OpenDevice) -> Array:
        return Array._of(device.layout(region), region.storage, device)

    @staticmethod
    def _of(layout: Layout, storage: Storage, device: runtime.OpenDevice) -> Array:
        made: Array = _make_wrapper(Array, *layout.wrapper)
        made._storage, made._layout, made._device = storage, layout, device
        return made

    @property
    def _region(self) -> Region:
        return self._layout.on(self._storage)

    def torch(self) -> Tensor:
        """A copy on the CPU, differentiable. Waits for the GPU."""
        if self.requires_grad and torch.is_grad_enabled():
            return _Readback.apply(self)
        return self._read()

    def _read(self) -> Tensor:
        device = self._usable()
        with device.in_use():
            return device.read(self._region)

    async def torch_async(self) -> Tensor:
        """As `torch`, to be awaited: other coroutines run while the GPU works."""
        device = self._usable()
        try:
            return await device.read_async(self._region)
        except BaseException as error:
            device.explain_loss(error)
            raise

    def numpy(self, *, force: bool = False) -> Any:
        """A copy as a numpy array. bfloat16, which numpy does not know, comes as float32."""
        copy = self._read()
        return (copy.float() if copy.dtype == torch.bfloat16 else copy).numpy()

    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.torch()

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        target = kwargs.get("device", args[0] if args else None)
        if isinstance(target, (str, torch.device)) and torch.device(target).type == "cpu":
            rest = {name: value for name, value in kwargs.items() if name != "device"}
            return self.torch().to(*args[1:], **rest)
        return super().to(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Array:
        made = self.detach().clone().requires_grad_(self.requires_grad)
        memo[id(self)] = made
        return made  # type: ignore[return-value]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a headwise.webgpu.Array lives on the GPU and cannot be saved or sent; save x.torch()")

    def tolist(self) -> Any:
        return self._read().tolist()

    def item(self) -> Any:
        return self._read().item()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(self.numpy(), dtype)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        raise BufferError(
            "a headwise.webgpu.Array has no memory that DLPack can hand over; copy its elements with .torch() or .numpy()"
        )

    __dlpack_device__ = __dlpack__

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        kind = str(self.dtype).removeprefix("torch.")
        return f"headwise.webgpu.Array({tuple(self.shape)}, {kind}, on {self._device.capabilities.name})"

    def _usable(self) -> runtime.OpenDevice:
        """The device, if it is still there."""
        if self._device is not runtime.device():
            raise runtime.DeviceLost(
                "this array lived on a GPU that was lost since; make it anew with headwise.webgpu.array"
            )
        return self._device

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not OPERATORS:
            importlib.import_module("headwise.backends.webgpu.array_ops")
        known = OPERATORS.get(func)
        if known is not None:
            return known(*args, **(kwargs or {}))
        # A Headwise operator that was called through PyTorch's dispatcher.
        if func.namespace == "headwise":
            return func.headwise_run(*args)
        raise NotImplementedError(
            f"headwise: {func} does not run on a headwise.webgpu.Array; bring its elements back with .torch() first"
        )


def array(tensor: Tensor | Any) -> Array:
    """A copy of a CPU tensor (or of anything `torch.as_tensor` takes) on the GPU.

    The copy of a leaf that requires grad is a new leaf. Through the copy of any other tensor, gradients flow back.
    """
    if isinstance(tensor, Array):
        return tensor
    if not isinstance(tensor, Tensor):
        tensor = torch.as_tensor(tensor)
    if tensor.device.type != "cpu":
        raise ValueError(f"array: the tensor is on {tensor.device}; it needs to be on cpu to go to WebGPU")
    if tensor.requires_grad and not tensor.is_leaf and torch.is_grad_enabled():
        return _Upload.apply(tensor)
    device = runtime.device()
    with device.in_use():
        made = Array(device.upload(tensor), device)
    if tensor.requires_grad:
        made.requires_grad_()
    return made


class _Readback(torch.autograd.Function):
    """Array to CPU tensor; the gradient is uploaded."""

    @staticmethod
    def forward(ctx: Any, x: Array) -> Tensor:
        return x._read()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Array:
        return array(grad)


class _Upload(torch.autograd.Function):
    """CPU tensor to array; the gradient is read back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Array:
        return array(x.detach())

    @staticmethod
    def backward(ctx: Any, grad: Array) -> Tensor:
        return grad._read()
