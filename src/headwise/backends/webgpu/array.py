"""Tensors that live on the GPU.

An `Array` is a `torch.Tensor` of the device "webgpu": it has shape, strides, dtype and a place in autograd, and its elements
are in a GPU buffer. Headwise ops take and return arrays, and so do PyTorch's own operators as far as `aten` has them; others
raise.
``x.cpu()`` and ``x.torch()`` copy the elements back.
"""

from __future__ import annotations

import importlib
import math
import operator
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.backends.webgpu import runtime
from headwise.backends.webgpu.capture_errors import ReadInCapture
from headwise.backends.webgpu.mixed_devices import MixedDevices, explained
from headwise.backends.webgpu.storage import Layout, Region, Storage
from headwise.backends.webgpu.subclass import VisibleToTwoCallers, refused
from headwise.backends.webgpu.torch_device import DEVICE, NAME, REGISTERED, backward_in_this_thread

OPERATORS: dict[Any, Callable[..., Any]] = {}  # PyTorch operators that arrays support; `aten` fills it
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

    @property
    def data(self) -> Tensor:
        """The same elements, unknown to autograd; ``x.data = y`` gives x the memory of y."""
        found: Tensor = Tensor.data.__get__(self)  # type: ignore[attr-defined]
        return found

    @data.setter
    def data(self, other: Tensor) -> None:
        if not isinstance(other, Array):
            raise TypeError(f"x.data = y: x is on webgpu and y on {other.device}; bring y there with y.to(x.device)")
        Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self._storage, self._layout, self._device = other._storage, other._layout, other._device

    def untyped_storage(self) -> Any:
        """PyTorch's, and a number in place of its address: safetensors compares addresses to find shared memory."""
        found, address = Tensor.untyped_storage(self), id(self._storage.buffer)
        found.data_ptr = lambda: address  # type: ignore[method-assign]
        return found

    def data_ptr(self) -> int:
        """A number that tensors over the same memory agree in; nothing lies there."""
        return id(self._storage.buffer) + self._layout.offset * self.dtype.itemsize

    def torch(self) -> Tensor:
        """A copy on the CPU, differentiable. Waits for the GPU."""
        if not REGISTERED and self.requires_grad and torch.is_grad_enabled():
            return _Readback.apply(self)
        return self.to("cpu") if REGISTERED else self._read()

    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.torch()

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        target = kwargs.get("device", args[0] if args else None)
        if not REGISTERED and isinstance(target, (str, torch.device)) and torch.device(target).type == "cpu":
            rest = {name: value for name, value in kwargs.items() if name != "device"}
            return self.torch().to(*args[1:], **rest)
        return super().to(*args, **kwargs)

    def _read(self, by: str | None = None) -> Tensor:
        """by: who asks, where that is no operator of PyTorch's."""
        device = self._usable()
        with device.in_use():
            if device.capture is not None:
                raise ReadInCapture(by)
            return device.read(self._region)

    async def torch_async(self) -> Tensor:
        """As `torch`, to be awaited: other coroutines run while the GPU works."""
        device = self._usable()
        if device.capture is not None:
            raise ReadInCapture("torch_async()")
        try:
            return await device.read_async(self._region)
        except BaseException as error:
            device.explain_loss(error)
            raise

    def numpy(self, *, force: bool = False) -> Any:
        """A copy as a numpy array. bfloat16, which numpy does not know, comes as float32."""
        copy = self._read("numpy()")
        return (copy.float() if copy.dtype == torch.bfloat16 else copy).numpy()

    def __deepcopy__(self, memo: dict[int, Any]) -> Array:
        if not self.is_leaf:
            raise RuntimeError(
                "only tensors that were made by the user can be deep-copied; this array has a history: detach() it first"
            )
        made = self.detach().clone().requires_grad_(self.requires_grad)
        made = torch.nn.Parameter(made, self.requires_grad) if _is_parameter(self) else made
        if self.grad is not None:
            made.grad = self.grad.clone()
        memo[id(self)] = made
        return made  # type: ignore[return-value]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """The elements are saved from the CPU, and loaded to this device again. What shared memory is apart then."""
        if not REGISTERED:
            raise TypeError("an array on a GPU that PyTorch does not know cannot be saved or sent; save x.torch()")
        of_cpu = (self.detach()._read(), self.dtype, NAME, self.requires_grad and self.is_leaf)  # type: ignore[attr-defined]
        if _is_parameter(self):
            data = self.detach()
            return torch._utils._rebuild_parameter, (data, self.requires_grad, OrderedDict())
        return torch._utils._rebuild_device_tensor_from_cpu_tensor, of_cpu

    __tensor_flatten__ = VisibleToTwoCallers(refused)
    __tensor_unflatten__ = VisibleToTwoCallers(refused)

    def __coerce_same_metadata_as_tangent__(self, metadata: Any, expected: Any = None) -> Array:
        """A compiled backward was traced for plain tensors of the device: an array is one."""
        return self

    def tolist(self) -> Any:
        return self._read("tolist()").tolist()

    def item(self) -> Any:
        return self._read("item()").item()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(self.numpy(), dtype)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        raise BufferError(
            "a headwise.webgpu.Array has no memory that DLPack can hand over; copy its elements with .torch() or .numpy()"
        )

    __dlpack_device__ = __dlpack__

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        text = repr(self.detach()._read("printing"))  # type: ignore[attr-defined]
        history = ", requires_grad=True" if self.requires_grad else ""
        history = f", grad_fn=<{self.grad_fn.name()}>" if self.grad_fn is not None else history
        text = f"{text[:-1]}, device='{self.device}'{history})"
        return f"Parameter containing:\n{text}" if _is_parameter(self) else text

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else format(repr(self), spec)

    def _usable(self) -> runtime.OpenDevice:
        """The device, if it is still there."""
        if self._device is not runtime.device():
            raise runtime.DeviceLost(
                "this array lived on a GPU that was lost since, or on the other side of headwise.webgpu.portable(); make it "
                "anew with headwise.webgpu.array"
            )
        return self._device

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        try:
            known = OPERATORS.get(func)
            if known is None:
                known = _missing(func)
            return known(*args, **kwargs) if kwargs else known(*args)
        except BaseException as error:
            if isinstance(error, ReadInCapture) and error.operator is None:
                error.operator = func
            mixed = None
            if isinstance(error, (AttributeError, MixedDevices)):  # a tensor on the CPU has no layout
                mixed = explained(func, args, kwargs or {})
            if torch._C._current_graph_task_id() != -1:
                return _raised_after_backward(func, args, kwargs or {}, mixed or error)
            if mixed is None:
                raise
            raise mixed from None


def _missing(func: Any) -> Callable[..., Any]:
    """What runs an operator that the table does not have."""
    aten = importlib.import_module("headwise.backends.webgpu.aten")
    found: Callable[..., Any] = OPERATORS.get(func) or aten.missing(func)
    return found


def _raised_after_backward(func: Any, args: Any, kwargs: Any, error: BaseException) -> Any:
    """NaN in place of the results, and the error at the end of the backward pass.

    An error that leaves an operator within a backward pass ends the process: on the way PyTorch calls the device's guard,
    which is Python, while the error is set, and may not raise there (seen in 2.13).
    """

    def to_meta(x: Any) -> Any:
        if isinstance(x, Tensor):
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        return type(x)(map(to_meta, x)) if isinstance(x, (list, tuple)) else x

    def to_nan(x: Any) -> Any:
        if isinstance(x, Tensor):
            device = runtime.device()
            made = Array(device.empty(tuple(x.shape), x.dtype), device)
            return made.fill_(math.nan) if x.is_floating_point() else made.zero_()
        return type(x)(map(to_nan, x)) if isinstance(x, (list, tuple)) else x

    def raise_it() -> None:
        raise error

    try:
        kwargs = {
            name: torch.device("meta") if isinstance(x, torch.device) else to_meta(x) for name, x in kwargs.items()
        }
        results = to_nan(func(*to_meta(args), **kwargs))
    except Exception:  # what PyTorch itself cannot tell the shapes of
        likes = sorted((x for x in args if isinstance(x, Tensor)), key=lambda x: -x.numel())
        results = tuple(to_nan(likes[0]) for _ in func._schema.returns)
        results = results if len(results) > 1 else results[0]
    torch.autograd.Variable._execution_engine.queue_callback(raise_it)
    return results


def _is_parameter(x: Array) -> bool:
    return getattr(x, "_is_param", False)


def array(tensor: Tensor | Any) -> Array:
    """A copy of a CPU tensor (or of anything `torch.as_tensor` takes) on the GPU: ``tensor.to("webgpu")``.

    Gradients flow back through it, to a parameter as to any other tensor that requires grad.
    """
    if isinstance(tensor, Array):
        return tensor
    if not isinstance(tensor, Tensor):
        tensor = torch.as_tensor(tensor)
    if tensor.device.type != "cpu":
        raise ValueError(f"array: the tensor is on {tensor.device}; it needs to be on cpu to go to WebGPU")
    if tensor.requires_grad and torch.is_grad_enabled():
        return tensor.to(DEVICE) if REGISTERED else _Upload.apply(tensor)  # type: ignore[return-value]
    return uploaded(tensor)


def uploaded(tensor: Tensor, constant: bool = False) -> Array:
    """The elements of a CPU tensor in memory of the GPU; nothing for autograd. constant: as in `OpenDevice.upload`."""
    backward_in_this_thread()
    device = runtime.device()
    with device.in_use():
        return Array(device.upload(tensor, constant), device)


class _Readback(torch.autograd.Function):
    """Array to CPU tensor; the gradient is uploaded. Where PyTorch does not know the device."""

    @staticmethod
    def forward(ctx: Any, x: Array) -> Tensor:
        return x._read()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Array:
        return uploaded(grad)


class _Upload(torch.autograd.Function):
    """CPU tensor to array; the gradient is read back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Array:
        return uploaded(x.detach())

    @staticmethod
    def backward(ctx: Any, grad: Array) -> Tensor:
        return grad._read()
