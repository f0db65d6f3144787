"""Argument checks shared by the ops. Every message names the op, the argument, what it got and what it needs."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

FLOATS = frozenset((torch.float32, torch.float16, torch.bfloat16, torch.float64))
INDICES = (torch.int32, torch.int64)


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def shape_of(x: Tensor) -> str:
    return "(" + ", ".join(str(s) for s in x.shape) + ")"


def device_type(x: Tensor) -> str:
    """``x.device.type``; asking for the two common ones costs the host a fifth of that.

    A tensor on a GPU that PyTorch does not know (`headwise.webgpu.Array`) says itself where it lives.
    """
    if x.is_cuda:
        return "cuda"
    if x.is_cpu:
        return "cpu"
    return getattr(x, "headwise_device", None) or x.device.type


def tensor(op: str, name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{op}: {name} is a {type(x).__name__}; it needs to be a torch.Tensor")


def floating(op: str, name: str, x: Any) -> None:
    tensor(op, name, x)
    if x.dtype not in FLOATS:
        raise TypeError(f"{op}: {name} has dtype {short(x.dtype)}; it needs float32, float16, bfloat16 or float64")


def integer(op: str, name: str, x: Any, allowed: tuple[torch.dtype, ...] = INDICES) -> None:
    tensor(op, name, x)
    if x.dtype not in allowed:
        raise TypeError(f"{op}: {name} has dtype {short(x.dtype)}; it needs {' or '.join(map(short, allowed))}")


def same_dtype(op: str, name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    if x.dtype != other.dtype:
        raise TypeError(
            f"{op}: {name} has dtype {short(x.dtype)} and {other_name} has {short(other.dtype)}; "
            "they need to be of one dtype"
        )


def same_device(op: str, name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    if x.device != other.device or hasattr(x, "headwise_device") != hasattr(other, "headwise_device"):
        places = [getattr(t, "headwise_device", t.device) for t in (x, other)]
        raise ValueError(
            f"{op}: {name} is on {places[0]} and {other_name} on {places[1]}; they need to be on one device"
        )


def dims(op: str, name: str, x: Tensor, count: int, letters: str) -> None:
    if x.dim() != count:
        raise ValueError(f"{op}: {name} has shape {shape_of(x)}; it needs {count} dimensions {letters}")


def at_least_dims(op: str, name: str, x: Tensor, count: int) -> None:
    if x.dim() < count:
        raise ValueError(f"{op}: {name} has shape {shape_of(x)}; it needs at least {count} dimension(s)")


def shape(op: str, name: str, x: Tensor, wanted: tuple[int, ...], letters: str) -> None:
    if x.shape != wanted:
        wanted_text = "(" + ", ".join(str(s) for s in wanted) + ")"
        raise ValueError(f"{op}: {name} has shape {shape_of(x)}; it needs {wanted_text} = {letters}")


def boolean(op: str, name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{op}: {name} is {value!r}; it needs to be True or False")


def number(op: str, name: str, value: Any) -> float:
    """A finite Python number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{op}: {name} is {value!r}; it needs to be a number")
    if not -math.inf < value < math.inf:  # torch.compile traces a comparison, and not math.isfinite
        raise ValueError(f"{op}: {name} is {value!r}; it needs to be finite")
    return float(value)


def positive(op: str, name: str, value: Any) -> float:
    value = number(op, name, value)
    if value <= 0:
        raise ValueError(f"{op}: {name} is {value!r}; it needs to be positive")
    return value


def not_negative(op: str, name: str, value: Any) -> float:
    value = number(op, name, value)
    if value < 0:
        raise ValueError(f"{op}: {name} is {value!r}; it needs to be zero or positive")
    return value


def whole(op: str, name: str, value: Any, low: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{op}: {name} is {value!r}; it needs to be a whole number")
    if value < low:
        raise ValueError(f"{op}: {name} is {value}; it needs to be at least {low}")
    return value  # type: ignore[return-value]  # a SymInt while torch.compile traces


def wants_gradient(*tensors: Tensor | None) -> bool:
    if torch.is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                return True
    return False
