"""``out=``: the operators of the table, written into tensors that are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from headwise.backends.webgpu.array import OPERATORS, Array
from headwise.backends.webgpu.aten.pointwise import checked_cast


def resized(x: Any, shape: Sequence[int], *, memory_format: Any = None) -> Any:
    """What operators of PyTorch do with ``out`` before they write it: one without elements becomes that large."""
    if tuple(x.shape) == tuple(shape):
        return x
    if x.numel():
        raise NotImplementedError(
            f"headwise: a tensor of shape {tuple(x.shape)} on WebGPU, given as out= or to resize_, cannot become "
            f"{tuple(shape)}; give one of that shape, or one without elements"
        )
    larger = torch.empty(tuple(shape), dtype=x.dtype, device=x.device)
    with torch._C._DisableTorchDispatch():
        x.data = larger
    return x


def _written(out: Any, made: Any) -> Any:
    if not isinstance(out, Array):
        raise RuntimeError(f"headwise: out= is on {out.device}, and the result on webgpu; make it there")
    checked_cast(made.dtype, out.dtype)
    return resized(out, made.shape).copy_(made)


def _with_out(function: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """The operator's variant that writes into the arguments called ``names``."""

    def run(*args: Any, **kwargs: Any) -> Any:
        outs = [kwargs.pop(name) for name in names]
        made = function(*args, **kwargs)
        if len(outs) == 1:
            return _written(outs[0], made)
        return tuple([_written(out, x) for out, x in zip(outs, made, strict=True)])

    return run


def _signature(func: Any) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in func._schema.arguments if not a.is_out]


def register() -> None:
    """The variants with ``out=`` of all operators that are in the table by now."""
    for func, function in list(OPERATORS.items()):
        if func.namespace != "aten" or any(a.alias_info is not None for a in func._schema.arguments):
            continue
        packet, signature = func.overloadpacket, _signature(func)
        for overload in packet.overloads():
            variant = getattr(packet, overload)
            names = [a.name for a in variant._schema.arguments if a.is_out]
            if names and _signature(variant) == signature:
                OPERATORS.setdefault(variant, _with_out(function, names))


OPERATORS[torch.ops.aten.resize_.default] = resized
