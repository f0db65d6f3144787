"""Numbers and tensors in registers, and pointers, as `gluon_on_cpu` has them: PyTorch tensors behind Gluon's operators."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch


def plain(x: Any) -> Any:
    return x.x if isinstance(x, Value) else x


class Value:
    """A tensor in registers, or a number."""

    def __init__(self, x: Any) -> None:
        self.x = x if isinstance(x, torch.Tensor) else torch.tensor(x)

    dtype = property(lambda self: self.x.dtype)
    shape = property(lambda self: tuple(self.x.shape))
    type = property(lambda self: SimpleNamespace(layout=None))

    def __bool__(self) -> bool:
        return bool(self.x)

    def __index__(self) -> int:
        return int(self.x)

    def __getitem__(self, at: Any) -> Value:
        return Value(self.x[at])

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Value:
        return Value(self.x.view(dtype) if bitcast else self.x.to(dtype))

    def reshape(self, shape: list[int]) -> Value:
        return Value(self.x.reshape(shape))

    def permute(self, order: tuple[int, ...]) -> Value:
        return Value(self.x.permute(order))


def _divided(a: Any, b: Any) -> Any:
    return torch.div(torch.as_tensor(a), b, rounding_mode="trunc")


_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "truediv": lambda a, b: a / b,
    "floordiv": _divided,
    "mod": lambda a, b: torch.fmod(torch.as_tensor(a), b),
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "lshift": lambda a, b: a << b,
    "rshift": lambda a, b: a >> b,
}
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
}


def _operator(function: Callable[[Any, Any], Any], swapped: bool) -> Callable[[Value, Any], Any]:
    def apply(self: Value, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        other = plain(other)
        return Value(function(other, self.x) if swapped else function(self.x, other))

    return apply


for _name, _function in (_OPERATIONS | _COMPARISONS).items():
    setattr(Value, f"__{_name}__", _operator(_function, False))
    if _name in _OPERATIONS:
        setattr(Value, f"__r{_name}__", _operator(_function, True))
Value.__neg__ = lambda self: Value(-self.x)  # type: ignore[attr-defined]
Value.__hash__ = None  # type: ignore[assignment]


class Pointer:
    def __init__(self, memory: Any, at: Any = 0) -> None:
        self.memory, self.at = memory, at

    def __add__(self, steps: Any) -> Pointer:
        return Pointer(self.memory, self.at + plain(steps))

    __radd__ = __add__

    def __sub__(self, steps: Any) -> Pointer:
        return Pointer(self.memory, self.at - plain(steps))

    def to(self, dtype: Any, bitcast: bool = False) -> Pointer:
        return self


def load(pointer: Pointer, mask: Any = True, other: Any = 0) -> Value:
    at, there = torch.broadcast_tensors(torch.as_tensor(pointer.at), torch.as_tensor(plain(mask)))
    found = pointer.memory[torch.where(there, at, 0).long()]
    return Value(torch.where(there, found, torch.as_tensor(other, dtype=found.dtype)))


def store(pointer: Pointer, value: Any, mask: Any = True) -> None:
    at, there, x = torch.broadcast_tensors(
        torch.as_tensor(pointer.at), torch.as_tensor(plain(mask)), torch.as_tensor(plain(value))
    )
    pointer.memory[at[there].long()] = x[there].to(pointer.memory.dtype)


def where(condition: Any, a: Any, b: Any) -> Value:
    condition, a, b = map(torch.as_tensor, map(plain, (condition, a, b)))
    if a.dtype != b.dtype and a.dim() != b.dim():  # a number takes the kind of the tensor
        kind = a.dtype if a.dim() > b.dim() else b.dtype
        a, b = a.to(kind), b.to(kind)
    return Value(torch.where(condition, a, b))


def pair(function: Callable[..., Any]) -> Callable[..., Value]:
    def apply(a: Any, b: Any, propagate_nan: Any = None) -> Value:
        a, b = torch.as_tensor(plain(a)), torch.as_tensor(plain(b))
        return Value(function(a, b))

    return apply
