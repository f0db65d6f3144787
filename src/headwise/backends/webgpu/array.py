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

from headwise.backends.webgpu import runtime
from headwise.backends.webgpu.storage import Region


class Array(Tensor):
    """A tensor in the memory of the GPU. Make one with `headwise.webgpu.array`."""

    _region: Region
    _device: runtime.Device

    # Where `headwise` finds the elements, for the choice of a backend and for messages.
    headwise_device = "webgpu"

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, region: Region, device: runtime.Device) -> Array:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, region.shape, strides=region.strides, storage_offset=region.offset, dtype=region.dtype, device="meta"
        )
        made._region, made._device = region, device
        return made

    def torch(self) -> Tensor:
        """A copy on the CPU. Waits for the GPU."""
        device = self._usable()
        with device.lock, runtime.explained_loss():
            return device.read(self._region)

    async def torch_async(self) -> Tensor:
        """As `torch`, to be awaited: other coroutines run while the GPU works."""
        device = self._usable()
        with runtime.explained_loss():
            return await device.read_async(self._region)

    def numpy(self, *, force: bool = False) -> Any:
        """A copy as a numpy array. bfloat16, which numpy does not know, comes as float32."""
        copy = self.torch()
        return (copy.float() if copy.dtype == torch.bfloat16 else copy).numpy()

    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.torch()

    def tolist(self) -> Any:
        return self.torch().tolist()

    def item(self) -> Any:
        return self.torch().item()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(self.numpy(), dtype)

    def __repr__(self, **kwargs: Any) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"headwise.webgpu.Array({tuple(self.shape)}, {kind}, on {self._device.capabilities.name})"

    def _usable(self) -> runtime.Device:
        if self._device is not runtime.device():
            raise runtime.DeviceLost(
                "this array lived on a GPU that was lost since; make it anew with headwise.webgpu.array"
            )
        return self._device

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
    """A copy of a CPU tensor (or of anything `torch.as_tensor` takes) on the GPU."""
    if isinstance(tensor, Array):
        return tensor
    if not isinstance(tensor, Tensor):
        tensor = torch.as_tensor(tensor)
    if tensor.device.type != "cpu":
        raise ValueError(f"array: the tensor is on {tensor.device}; it needs to be on cpu to go to WebGPU")
    device = runtime.device()
    with device.lock, runtime.explained_loss():
        made = Array(device.upload(tensor), device)
    return made.requires_grad_() if tensor.requires_grad else made


def launcher(function: Callable[..., Any]) -> Callable[..., Any]:
    """What makes a function over regions a launcher over tensors: ``function(device, *arguments)``.

    CPU tensors are uploaded and the results read back; arrays stay where they are, and so do the results.
    """

    @functools.wraps(function)
    def launch(*arguments: Any) -> Any:
        device = runtime.device()
        with device.lock, runtime.explained_loss():
            resident = False
            regions = []
            for argument in arguments:
                if type(argument) is Array:
                    resident = True
                    argument._usable()
                    regions.append(argument._region)
                elif isinstance(argument, Tensor):
                    if isinstance(argument, Array):
                        resident = True
                        regions.append(argument._region)
                    else:
                        regions.append(device.upload(argument))
                elif isinstance(argument, (list, tuple)) and argument and isinstance(argument[0], Tensor):
                    resident = resident or isinstance(argument[0], Array)
                    regions.append([x._region if isinstance(x, Array) else device.upload(x) for x in argument])
                else:
                    regions.append(argument)
            results = function(device, *regions)
            if isinstance(results, Region):
                return Array(results, device) if resident else device.read(results)
            give: Callable[[Region], Tensor] = (lambda r: Array(r, device)) if resident else device.read
            made = [give(result) for result in results]
            return made if isinstance(results, list) else tuple(made)

    return launch


