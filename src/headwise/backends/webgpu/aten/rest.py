"""What no table has: PyTorch's decompositions, copies to the CPU where they were asked for, and else an error."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch._C import DispatchKey

from headwise.backends.webgpu.array import OPERATORS, Array, uploaded
from headwise.backends.webgpu.aten.results import resized
from headwise.backends.webgpu.torch_device import DEVICE


class _Fallback:
    allowed = False
    copies: ClassVar[Counter[str]] = Counter()


def fallback(allowed: bool = True) -> None:
    """Shall operators that WebGPU does not have run on the CPU? They are counted: `fallbacks`."""
    _Fallback.allowed = allowed


def fallbacks() -> dict[str, int]:
    """How often each operator ran on the CPU."""
    return dict(_Fallback.copies)


# Decompositions that read elements, or loop.
_REFUSED = {"aten::nonzero", "aten::masked_select"}


def missing(func: Any) -> Callable[..., Any]:
    """What runs an operator that `OPERATORS` does not have; kept there where that does not depend on `fallback`."""
    if func.namespace == "headwise":  # a Headwise operator that was called through PyTorch's dispatcher
        OPERATORS[func] = func.headwise_run
        return OPERATORS[func]
    name = func._schema.name
    if func.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd):
        OPERATORS[func] = func.decompose
        return OPERATORS[func]
    # PyTorch's decompositions of its operators; its kernels that call others; and its reference implementations, which
    # mostly end in primitives of the tracer.
    found = torch._decomp.decomposition_table.get(func) if name not in _REFUSED else None
    of_operators = found is not None and inspect.unwrap(found).__module__ == "torch._decomp.decompositions"
    calls_others = func.namespace == "aten" and name not in _REFUSED
    calls_others = calls_others and func.has_kernel_for_dispatch_key(DispatchKey.CompositeExplicitAutograd)
    if calls_others and not of_operators:
        OPERATORS[func] = lambda *args, **kwargs: func._op_dk(DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
        return OPERATORS[func]
    if found is not None:
        OPERATORS[func] = _decomposed(func, found)
        return OPERATORS[func]
    return lambda *args, **kwargs: _elsewhere(func, args, kwargs)


class _NoPrimitive(NotImplementedError):
    """A decomposition ended in a primitive of PyTorch's tracer, which nothing runs here."""


def _decomposed(func: Any, decomposition: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            made = decomposition(*args, **kwargs)
            return _elsewhere(func, args, kwargs) if made is NotImplemented else made
        except _NoPrimitive:
            return _elsewhere(func, args, kwargs)

    return run


def _elsewhere(func: Any, args: Any, kwargs: Any) -> Any:
    """On the CPU where that was asked for, or an error."""
    if func.namespace == "prims":
        raise _NoPrimitive(str(func))
    if not _Fallback.allowed:
        raise NotImplementedError(
            f"headwise: {func} is not there on WebGPU. x.cpu() brings a tensor to the CPU, where it is; "
            "headwise.webgpu.fallback(True) does that wherever it is needed, and counts it"
        )
    return _on_the_cpu(func, args, kwargs)


def _on_the_cpu(func: Any, args: Any, kwargs: Any) -> Any:
    _Fallback.copies[str(func)] += 1
    copied: dict[int, tuple[Any, torch.Tensor]] = {}

    def to_cpu(x: Any) -> Any:
        if isinstance(x, Array):
            known = copied.get(id(x))
            if known is None:
                known = copied[id(x)] = (x, x._read())
            return known[1]
        if isinstance(x, (list, tuple)):
            return type(x)(to_cpu(y) for y in x)
        return torch.device("cpu") if isinstance(x, torch.device) and x.type == DEVICE.type else x

    def back(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            same = next((array for array, cpu in copied.values() if cpu is x), None)
            return uploaded(x) if same is None else same
        return type(x)(back(y) for y in x) if isinstance(x, (list, tuple)) else x

    made = func(*to_cpu(args), **{name: to_cpu(x) for name, x in kwargs.items()})
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            for x in given if isinstance(given, (list, tuple)) else [given]:
                if isinstance(x, Array):
                    _written_back(func, argument.name, x, copied[id(x)][1])
    return back(made)


def _written_back(func: Any, name: str, x: Array, cpu: torch.Tensor) -> None:
    if cpu.shape != x.shape and x.numel():
        raise RuntimeError(
            f"headwise: {func} makes {name} {tuple(cpu.shape)}, and it was given {tuple(x.shape)}; a tensor on WebGPU keeps "
            "its size, so pass one of that shape"
        )
    resized(x, cpu.shape).copy_(cpu)
