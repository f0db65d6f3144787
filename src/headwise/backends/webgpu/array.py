"""Tensors that live on the GPU: `Array`, and the way into and out of a launcher.

An `Array` is a `torch.Tensor` without memory of its own on the CPU: it has shape, strides, dtype and a place in autograd,
and its elements lie in a buffer of the GPU. Ops of Headwise take and return them; of PyTorch's own operators it knows those
that look at the same elements in another shape, and adding, which gradients that meet need. Anything else says so:
``x.torch()`` brings the elements back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.backends.webgpu import replay, runtime
from headwise.backends.webgpu.storage import Region, Storage, numbered

_NOWHERE = torch.device("meta")


class Array(Tensor):
    """A tensor in the memory of the GPU. Make one with `headwise.webgpu.array`."""

    # Elements lie in the storage as the layout says, a region without memory that many arrays may have in common.
    _storage: Storage
    _layout: Region
    _device: runtime.Device

    # Where `headwise` finds the elements, for the choice of a backend and for messages.
    headwise_device = "webgpu"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, region: Region, device: runtime.Device) -> Array:
        made: Array = Tensor._make_wrapper_subclass(
            cls, region.shape, strides=region.strides, storage_offset=region.offset, dtype=region.dtype, device=_NOWHERE
        )
        made._storage, made._layout, made._device = region.storage, region, device
        return made

    @property
    def _region(self) -> Region:
        layout = self._layout
        return layout if layout.storage is self._storage else layout.on(self._storage)

    def headwise_facts(self) -> tuple[Any, ...]:
        """All that a call may depend on but the elements and where they lie: what calls of one kind agree in."""
        return Array, self._layout.key, self.requires_grad

    def torch(self) -> Tensor:
        """A copy on the CPU. Waits for the GPU. Gradients find their way back."""
        if self.requires_grad and torch.is_grad_enabled():
            return _Readback.apply(self)
        return self._read()

    def _read(self) -> Tensor:
        device = self._usable()
        with device.lock, device.explained_loss:
            return device.read(self._region)

    async def torch_async(self) -> Tensor:
        """As `torch`, to be awaited: other coroutines run while the GPU works."""
        device = self._usable()
        with device.explained_loss:
            return await device.read_async(self._region)

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

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        kind = str(self.dtype).removeprefix("torch.")
        return f"headwise.webgpu.Array({tuple(self.shape)}, {kind}, on {self._device.capabilities.name})"

    def _usable(self) -> runtime.Device:
        if self._device is not runtime.device():
            raise runtime.DeviceLost(
                "this array lived on a GPU that was lost since; make it anew with headwise.webgpu.array"
            )
        return self._device

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # An operator of Headwise, reached through PyTorch's dispatcher, knows what to do with arrays.
        if func.namespace == "headwise":
            return func.headwise_run(*args)
        from headwise.backends.webgpu import array_ops

        known = array_ops.KNOWN.get(func)
        if known is None:
            raise NotImplementedError(
                f"headwise: {func} does not run on a headwise.webgpu.Array; bring its elements back with .torch() first"
            )
        return known(*args, **(kwargs or {}))


def array(tensor: Tensor | Any) -> Array:
    """A copy of a CPU tensor (or of anything `torch.as_tensor` takes) on the GPU.

    Of a leaf that wants gradients it is a leaf of its own; through a copy of a result, gradients flow back.
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
    with device.lock, device.explained_loss:
        made = Array(device.upload(tensor), device)
    if tensor.requires_grad:
        made.requires_grad_()
    return made


class _Readback(torch.autograd.Function):
    """An array on the CPU; its gradient goes up again."""

    @staticmethod
    def forward(ctx: Any, x: Array) -> Tensor:
        return x._read()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Array:
        return array(grad)


class _Upload(torch.autograd.Function):
    """A CPU tensor on the GPU; its gradient comes down again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Array:
        return array(x.detach())

    @staticmethod
    def backward(ctx: Any, grad: Array) -> Tensor:
        return grad._read()


def launcher(function: Callable[..., Any]) -> Callable[..., Any]:
    """What makes a function over regions a launcher over tensors: ``function(device, *arguments)``.

    CPU tensors are uploaded and the results read back; arrays stay where they are, and so do the results.
    """

    @functools.wraps(function)
    def launch(*arguments: Any) -> Any:
        device = runtime.device()
        with device.lock:
            try:
                storages: list[Storage] = []
                key = _key_of(device, function, arguments, storages)
                if key is None:
                    return _launch_anew(device, function, arguments)
                plan = device.plans.get(numbered(key))
                if plan is None:
                    return _launch_and_keep(device, function, arguments, numbered(key), storages)
                return _replayed(device, plan, storages)
            except BaseException as error:
                device.explained_loss.explain(error)
                raise

    def prepare(*arguments: Any) -> Callable[..., Any]:
        """What is left to do for launches that differ from this one in the elements of its arrays alone."""
        return _prepared(launch, function, arguments)

    launch.prepare = prepare  # type: ignore[attr-defined]
    return launch


def _prepared(
    launch: Callable[..., Any], function: Callable[..., Any], arguments: tuple[Any, ...]
) -> Callable[..., Any]:
    # What is kept must not keep an array alive.
    plain = tuple(None if isinstance(a, Tensor) else a for a in arguments)
    # By which of the arrays lie in one memory: the number of the plan.
    numbers: dict[Any, int] = {}

    def run(*tensors: Any) -> Any:
        device = runtime.device()
        storages = []
        for x in tensors:
            if x is not None:
                if type(x) is not Array or x._device is not device:
                    return launch(*tensors, *plain[len(tensors) :])
                storages.append(x._storage)
        count = len(storages)
        if count == 1:
            shared: Any = None
        elif count == 2:
            shared = storages[0] is storages[1]
        else:
            shared = tuple(map(storages.index, storages))
        with device.lock:
            plan = device.plans.get(numbers.get(shared))
            if plan is not None:
                try:
                    return _replayed(device, plan, storages)
                except BaseException as error:
                    device.explained_loss.explain(error)
                    raise
        key = _key_of(device, function, (*tensors, *plain[len(tensors) :]), [])
        if key is not None:
            numbers[shared] = numbered(key)
        return launch(*tensors, *plain[len(tensors) :])

    return run


def _key_of(
    device: runtime.Device, function: Callable[..., Any], arguments: tuple[Any, ...], storages: list[Storage]
) -> tuple[Any, ...] | None:
    """All that a launcher may know of a call on arrays, whose memory is put into ``storages``; None for other calls."""
    key: list[Any] = [function]
    for argument in arguments:
        if type(argument) is Array:
            if argument._device is not device:
                argument._usable()
            _add_array(argument, key, storages)
        elif isinstance(argument, list) and all(type(x) is Array and x._device is device for x in argument):
            for x in argument:
                _add_array(x, key, storages)
            key.append(len(argument))
        elif isinstance(argument, (Tensor, list)):
            return None
        else:
            key.append(argument)
    return tuple(key) if storages else None


def _add_array(x: Array, key: list[Any], storages: list[Storage]) -> None:
    storage, number = x._storage, x._layout.key
    # Which arguments lie in one memory is part of what a call is.
    key.append((storages.index(storage), number) if storage in storages else number)
    storages.append(storage)


def _replayed(device: runtime.Device, plan: replay.Plan, storages: list[Storage]) -> Any:
    plan.replay(device, storages)
    if plan.kind is None:
        return _array_of(plan.results[0], storages, device)
    return plan.kind([_array_of(result, storages, device) for result in plan.results])


def _array_of(result: replay.Result, storages: list[Storage], device: runtime.Device) -> Array:
    """As `Array`; PyTorch makes a plain one in half the time, and is faster with arguments that have no names."""
    which, layout, plain = result
    if not plain:
        return Array(layout.on(storages[which]), device)
    made: Array = _make_plain(Array, layout.shape, None, None, None, layout.dtype, torch.strided, _NOWHERE)
    made._storage, made._layout, made._device = storages[which], layout, device
    return made


_make_plain = Tensor._make_wrapper_subclass


def _launch_and_keep(
    device: runtime.Device, function: Callable[..., Any], arguments: tuple[Any, ...], number: int, given: list[Storage]
) -> Any:
    device.trace = trace = runtime.Trace()
    try:
        results = function(device, *(_region_of(a) for a in arguments))
    finally:
        device.trace = None
    plan = replay.plan_of(trace, given, results)
    if plan is not None:
        replay.keep(device, number, plan)
    return _given(results, lambda region: Array(region, device))


def _region_of(argument: Any) -> Any:
    if isinstance(argument, list):
        return [x._region for x in argument]
    return argument._region if isinstance(argument, Array) else argument


def _launch_anew(device: runtime.Device, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """With CPU tensors, which are uploaded, or lists of tensors."""
    resident = False

    def region_of(x: Any) -> Any:
        nonlocal resident
        if isinstance(x, Array):
            x._usable()
            resident = True
            return x._region
        return device.upload(x) if isinstance(x, Tensor) else x

    regions = [
        [region_of(x) for x in argument] if isinstance(argument, list) else region_of(argument)
        for argument in arguments
    ]
    results = function(device, *regions)
    return _given(results, (lambda region: Array(region, device)) if resident else device.read)


def _given(results: Any, give: Callable[[Region], Tensor]) -> Any:
    if isinstance(results, Region):
        return give(results)
    return type(results)([give(result) for result in results])
