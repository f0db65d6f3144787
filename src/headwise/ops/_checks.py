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
    return tuple_text(x.shape)


def tuple_text(sizes: Any) -> str:
    """As Python writes a tuple, also while torch.compile traces: "(3,)", "(2, 4)"."""
    return "(" + ", ".join(str(s) for s in sizes) + ("," if len(sizes) == 1 else "") + ")"


def tensor(op: str, name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        kind = type(x).__name__
        article = "an" if kind[0] in "aeiouAEIOU" else "a"
        hint = f": torch.tensor({name})" if isinstance(x, (list, tuple)) or hasattr(x, "__array__") else ""
        raise TypeError(f"{op}: {name} is {article} {kind}; it needs to be a torch.Tensor{hint}")
    if x.is_nested:
        raise TypeError(
            f"{op}: {name} is a nested tensor; it needs to be a plain one: pack the sequences end to end "
            "(x.values()) and call attention_varlen with cu_seqlens (x.offsets()), or pad them (x.to_padded_tensor)"
        )


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


def dtype(op: str, name: str, x: Tensor, wanted: torch.dtype) -> None:
    if x.dtype != wanted:
        raise TypeError(f"{op}: {name} has dtype {short(x.dtype)}; it needs {short(wanted)}")


def own_or_float32(op: str, name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    if x.dtype not in (other.dtype, torch.float32):
        own = "" if other.dtype == torch.float32 else f"{short(other.dtype)} (that of {other_name}) or "
        raise TypeError(f"{op}: {name} has dtype {short(x.dtype)}; it needs {own}float32")


def like(op: str, name: str, x: Any, other_name: str, other: Tensor) -> None:
    """Of the shape, dtype and device of the other."""
    floating(op, name, x)
    shape(op, name, x, tuple(other.shape), f"the shape of {other_name}")
    same_dtype(op, name, x, other_name, other)
    same_device(op, name, x, other_name, other)


def per_column(op: str, name: str, x: Any, other_name: str, other: Tensor) -> None:
    """A number for each entry of the other's last dim: of its dtype or float32, on its device."""
    floating(op, name, x)
    shape(op, name, x, (other.shape[-1],), f"(D,), the last dimension of {other_name}")
    own_or_float32(op, name, x, other_name, other)
    same_device(op, name, x, other_name, other)


def dims(op: str, name: str, x: Tensor, count: int, letters: str) -> None:
    if x.dim() != count:
        raise ValueError(f"{op}: {name} has shape {shape_of(x)}; it needs {count} dimensions {letters}")


def at_least_dims(op: str, name: str, x: Tensor, count: int) -> None:
    if x.dim() < count:
        raise ValueError(f"{op}: {name} has shape {shape_of(x)}; it needs at least {count} dimension(s)")


def rows(op: str, name: str, x: Tensor) -> None:
    """A float tensor with a last dim."""
    floating(op, name, x)
    at_least_dims(op, name, x, 1)


def shape(op: str, name: str, x: Tensor, wanted: tuple[int, ...], letters: str) -> None:
    if x.shape != wanted:
        raise ValueError(f"{op}: {name} has shape {shape_of(x)}; it needs {tuple_text(wanted)} = {letters}")


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
