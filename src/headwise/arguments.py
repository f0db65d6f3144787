"""Arguments objects: what travels from an op to its launcher.

Each op has one `NamedTuple` that holds its tensors and its plain numbers, perhaps with others inside (`Packing`, `Flags`).
This module takes them apart and puts them together again: for the schema of a PyTorch operator, which is flat, and for a
record, which runs with the tensors of another call. Backends may import it; it knows neither ops nor kernels.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

Arguments = TypeVar("Arguments", bound=tuple[Any, ...])

_SCHEMA_TYPES: dict[Any, str] = {
    Tensor: "Tensor", list[Tensor]: "Tensor[]", bool: "bool", int: "SymInt", float: "float", str: "str",
}  # fmt: skip


PLAIN, TENSOR, TENSORS, OBJECT = range(4)


class Field(NamedTuple):
    """One field of an arguments object."""

    name: str
    kind: int  # a plain value, a tensor (or None), a list of tensors, or another arguments object (or None)
    type: str  # in a schema: "Tensor", "Tensor?", "Tensor[]", "SymInt", "float", …; "" for an object
    inside: Any = None  # the type of the object
    optional: bool = False


_FIELDS: dict[type, tuple[Field, ...]] = {}  # read by torch.compile, which traces no type hints
_KINDS: dict[type, tuple[int, ...]] = {}


def learn(cls: type) -> None:
    """Read the fields of a type of arguments objects. `Op` does that for every op."""
    fields = tuple(_field(name, hint) for name, hint in typing.get_type_hints(cls).items())
    _FIELDS[cls], _KINDS[cls] = fields, tuple(field.kind for field in fields)
    for field in fields:
        if field.inside is not None:
            learn(field.inside)


def _field(name: str, hint: Any) -> Field:
    optional = False
    if isinstance(hint, types.UnionType):
        (hint,) = (t for t in typing.get_args(hint) if t is not type(None))
        optional = True
    if hint not in _SCHEMA_TYPES:
        return Field(name, OBJECT, "", hint, optional)
    kind = {Tensor: TENSOR, list[Tensor]: TENSORS}.get(hint, PLAIN)
    return Field(name, kind, _SCHEMA_TYPES[hint] + "?" * optional, None, optional)


def schema(cls: type, optional: bool = False) -> str:
    """The parameters of a PyTorch operator that takes these arguments."""
    declared = []
    for field in _FIELDS[cls]:
        if field.inside is not None:
            declared.append(schema(field.inside, optional or field.optional))
        else:
            question = "?" if optional and field.type == "Tensor" else ""
            declared.append(f"{field.type}{question} {field.name}")
    return ", ".join(declared)


def flat(cls: type, args: Any) -> list[Any]:
    """The values of ``args`` in the order of the schema; None stands for an object of type ``cls`` that is not there."""
    values: list[Any] = []
    for i, field in enumerate(_FIELDS[cls]):
        value = None if args is None else args[i]
        if field.inside is not None:
            values += flat(field.inside, value)
        else:
            values.append(0 if value is None and field.type == "SymInt" else value)
    return values


def nested(cls: type[Arguments], values: Iterator[Any], optional: bool = False) -> Arguments | None:
    """The reverse of `flat`. An optional object is there if its first tensor is."""
    made: list[Any] = []
    for field in _FIELDS[cls]:
        made.append(nested(field.inside, values, field.optional) if field.inside is not None else next(values))
    return None if optional and made[0] is None else cls(*made)


def tensors_of(args: tuple[Any, ...]) -> list[Any]:
    """All tensors in order, None where one is not given; the tensors of a list one by one."""
    found: list[Any] = []
    for kind, value in zip(_KINDS[type(args)], args, strict=True):
        if kind == TENSOR:
            found.append(value)
        elif kind == TENSORS:
            found += value
        elif kind == OBJECT and value is not None:
            found += tensors_of(value)
    return found


def split(args: Arguments) -> tuple[list[Any], list[str], Arguments]:
    """The tensors, as `tensors_of` finds them, the names of their fields, and the rest: the same object with None in place
    of every tensor. A record may keep the rest; it keeps no memory alive.
    """
    tensors: list[Any] = []
    names: list[str] = []
    rest: list[Any] = []
    for field, value in zip(_FIELDS[type(args)], args, strict=True):
        if field.kind == PLAIN or (field.kind == OBJECT and value is None):
            rest.append(value)
            continue
        if field.kind == OBJECT:
            more, named, left = split(value)
        else:
            more = value if field.kind == TENSORS else [value]
            named, left = [field.name] * len(more), [None] * len(more) if field.kind == TENSORS else None
        tensors += more
        names += named
        rest.append(left)
    return tensors, names, type(args)(*rest)


def with_tensors(args: Arguments, tensors: Iterable[Any]) -> Arguments:
    """The same arguments with others in place of the tensors, in the order of `tensors_of`."""
    left = iter(tensors)
    made: list[Any] = []
    for kind, value in zip(_KINDS[type(args)], args, strict=True):
        if kind == TENSOR:
            made.append(next(left))
        elif kind == PLAIN or value is None:
            made.append(value)
        elif kind == TENSORS:
            made.append([next(left) for _ in value])
        else:
            made.append(with_tensors(value, left))
    return type(args)(*made)
