"""PyTorch's pointwise operators on arrays, from the expressions in `rules`: as functions and in place."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

from headwise.backends.webgpu.array import OPERATORS, Array, uploaded
from headwise.backends.webgpu.aten import elementwise
from headwise.backends.webgpu.aten.rules import RULES, Rule
from headwise.backends.webgpu.capture_errors import note_number
from headwise.backends.webgpu.device import Device
from headwise.backends.webgpu.recorder import replayed
from headwise.backends.webgpu.storage import Region

aten = torch.ops.aten

# Names of arguments that WGSL has other plans for.
_RENAMED = {"self": "x", "input": "x", "min": "least", "max": "most"}
_FORMATS = {"f": "f", "i": "i", "l": "q", "b": "i"}
_NUMBERS = (int, float, bool)
_MOST_KEPT = 4096
_DOUBLE = "float64"  # in the form of a call: a number of that dtype, which is a float32 here
_CAST = ("other", "exponent")  # numbers whose dtype has to fit what is written in place
_IN_FLOATS = ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT


class Pointwise:
    """One overload of one operator."""

    def __init__(self, func: Any, rule: Rule) -> None:
        arguments = func._schema.arguments
        self.func, self.rule, self.name = func, rule, func._schema.name
        self.names = [a.name for a in arguments]
        self.places = {a.name: i for i, a in enumerate(arguments)}
        self.defaults = [a.default_value for a in arguments]
        self.count = len(arguments)
        self.in_place = bool(arguments and arguments[0].alias_info is not None and arguments[0].alias_info.is_write)
        # Most calls of these leave their factor out; then it is no number of the call.
        self.factor = self.places.get("alpha") if self.name.rstrip("_") in ("aten::add", "aten::sub") else None
        self.scalar_formats: dict[tuple[Any, ...], str] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) < self.count:
            args = (*args, *self.defaults[len(args) :])
            if kwargs:
                given = list(args)
                for name, value in kwargs.items():
                    given[self.places[name]] = value
                args = tuple(given)
        arrays: list[Any] = []
        numbers: list[Any] = []
        form: list[Any] = []
        alpha = self.factor
        for place, x in enumerate(args):
            kind = type(x)
            if place == alpha and x == 1:
                form.append((1,))
            elif kind is Array:
                arrays.append(x)
                form.append(None)
            elif kind is float or kind is int or kind is bool:
                numbers.append(x)
                form.append(kind)
            elif isinstance(x, torch.Tensor):
                if isinstance(x, Array):
                    arrays.append(x)
                    form.append(None)
                elif x.device.type == "cpu" and x.dim() == 0:
                    # A number with a dtype of its own, which takes part in type promotion as a tensor of no dims does.
                    note_number(self.name, x)
                    wide = x.dtype is torch.float64
                    arrays.append(uploaded(x.detach().float() if wide else x.detach()))
                    form.append(_DOUBLE if wide else None)
                else:
                    raise RuntimeError(
                        f"headwise: {self.name} was given a tensor on {x.device} beside one on webgpu; "
                        "bring them together with .to()"
                    )
            else:
                form.append((x,))
        constants = self.rule.constants
        if constants:
            form += [
                args[self.places[c]] for c in constants if c in self.places and type(args[self.places[c]]) in _NUMBERS
            ]
        twins: tuple[Any, ...] = ()
        if self.in_place:
            if type(args[0]) is not Array:
                raise RuntimeError(f"headwise: {self.name} would write into a tensor on the CPU from one on webgpu")
            elementwise.check_written(args[0])
            of = args[0]._storage
            twins = tuple([x._storage is of for x in arrays])
        shape = (self, tuple(form))
        scalars = None
        if numbers:
            formats = self.scalar_formats.get((shape[1], *[x._layout for x in arrays]))
            if formats is None:
                formats = self._formats(arrays, shape[1])
                self.scalar_formats[shape[1], *[x._layout for x in arrays]] = formats
            if formats:
                scalars = packed(formats, numbers)
        made = replayed(_launch, arrays, shape, twins, scalars=scalars)
        return args[0] if self.in_place else made

    def _formats(self, arrays: Sequence[Array], form: tuple[Any, ...]) -> str:
        if len(self.scalar_formats) >= _MOST_KEPT:
            self.scalar_formats.clear()
        plan = _Plan(self, [x._region for x in arrays], form)
        return "".join(_FORMATS[kind] for kind in plan.scalars)


def packed(formats: str, numbers: Sequence[Any]) -> bytes:
    values = [x if f == "f" else int(x) for f, x in zip(formats, numbers, strict=True)]
    try:
        return struct.pack("<" + formats, *values)
    except (OverflowError, struct.error):
        # As PyTorch casts a number: floats become infinite, whole numbers lose their upper bits.
        bits = {"i": 32, "q": 64}
        parts = [
            struct.pack("<f", float(torch.tensor(float(x), dtype=torch.float64).float()))
            if f == "f" else (int(x) & (1 << bits[f]) - 1).to_bytes(bits[f] // 8, "little")
            for f, x in zip(formats, values, strict=True)
        ]  # fmt: skip
        return b"".join(parts)


class _Plan:
    """What is computed for arguments of one form: dtypes, expression, result."""

    def __init__(self, op: Pointwise, regions: Sequence[Region], form: Sequence[Any]) -> None:
        rule, left = op.rule, iter(regions)
        self.inputs: dict[str, Region] = {}
        given: dict[str, Any] = {}
        numbers: list[str] = []
        call: list[Any] = []
        promoted: list[Any] = []
        for name, of in zip(op.names, form, strict=False):
            renamed = _RENAMED.get(name, name)
            if of is None or of is _DOUBLE:
                region = next(left)
                self.inputs[renamed] = region
                call.append(_meta(region) if of is None else torch.empty((), dtype=torch.float64, device="meta"))
                if name not in rule.bools:
                    promoted.append(call[-1])
            elif type(of) is type:
                numbers.append(renamed)
                call.append(of(1))
                if name not in ("alpha", "value") or "masked_fill" in op.name:
                    promoted.append(call[-1])
            else:
                given[name] = of[0]
                call.append(of[0])
        extra = list(form[len(op.names) :])
        for name in rule.constants:
            if name in op.places and type(form[op.places[name]]) is type and extra:
                call[op.places[name]] = given[name] = extra.pop(0)
        given.setdefault("alpha", 2)
        positional = [v for v, a in zip(call, op.func._schema.arguments, strict=True) if not a.kwarg_only]
        keywords = {a.name: v for v, a in zip(call, op.func._schema.arguments, strict=True) if a.kwarg_only}
        made = op.func(*positional, **keywords)
        self.result: torch.Tensor = made[0] if isinstance(made, (tuple, list)) else made
        common = elementwise_dtypes(*promoted, type_promotion_kind=_IN_FLOATS)[1]
        if op.in_place and not rule.answers:
            checked_cast(_dtype_of_all(op, call), self.result.dtype)
        if (rule.floats or "div" in op.name) and self.result.dtype.is_floating_point and not common.is_floating_point:
            common = torch.float32
        if not rule.answers and self.result.dtype.is_floating_point:
            common = self.result.dtype
        self.kind = elementwise.kind_of(common)
        if rule.floats:
            self.kind = "f"
        elif self.kind == "b" and "b" not in rule.of:
            self.kind = "i"
        if self.kind not in rule.of:
            raise NotImplementedError(f"headwise: {op.name} of {common} is not there on WebGPU; use x.cpu()")
        text = rule.of[self.kind]
        given["dtype"] = common
        text = text(given) if callable(text) else text
        self.scalars = [self.kind] * len(numbers)
        for i, name in enumerate(numbers):
            if name not in elementwise.WORD.findall(text) and name not in (*rule.constants, "alpha"):
                raise NotImplementedError(f"headwise: {op.name} with {name} is not there on WebGPU; use x.cpu()")
            text = _replaced(text, name, f"scalar{i}" if self.kind != "b" else f"(scalar{i} != 0)")
        if self.kind == "b":
            self.scalars = ["i"] * len(numbers)
        self.text = text
        self.kinds = {n: "b" if n in rule.bools else self.kind for n in self.inputs}
        self.answer = "b" if rule.answers else self.kind


def _replaced(text: str, name: str, by: str) -> str:
    return elementwise.WORD.sub(lambda found: by if found[0] == name else found[0], text)


def _dtype_of_all(op: Pointwise, call: Sequence[Any]) -> torch.dtype:
    """The common dtype of what an operator in place reads: tensors, and the numbers of plain arithmetic."""
    given = [
        x for name, x in zip(op.names, call, strict=True)
        if name not in op.rule.bools and (isinstance(x, torch.Tensor) or (name in _CAST and type(x) in _NUMBERS))
    ]  # fmt: skip
    return elementwise_dtypes(*given, type_promotion_kind=_IN_FLOATS)[1]


def checked_cast(found: torch.dtype, to: torch.dtype) -> None:
    """An error where a result of one dtype may not be written into a tensor of another: floats into whole numbers."""
    if not torch.can_cast(found, to):
        names = [str(dtype).removeprefix("torch.") for dtype in (found, to)]
        raise RuntimeError(f"result type {names[0]} can't be cast to the desired output type {names[1]}")


def _meta(region: Region) -> torch.Tensor:
    return torch.empty_strided(region.shape, region.strides, dtype=region.dtype, device="meta")


def _launch(device: Device, *given: Any) -> Any:
    *regions, (op, form), twins = given
    plan = _Plan(op, regions, form)
    result = plan.result
    inputs = {name: elementwise.Input(region, plan.kinds[name]) for name, region in plan.inputs.items()}
    if op.in_place:
        out = next(iter(plan.inputs.values()))
        for name, shared in zip(list(inputs), twins, strict=True):
            region = inputs[name].region
            assert region is not None
            if region is out or (shared and _same(region, out)):
                inputs[name] = elementwise.Input(None, plan.kinds[name])
            elif shared:  # a kernel may not read a buffer that it writes
                from headwise.backends.webgpu import copies

                inputs[name] = inputs[name]._replace(region=copies.copied(device, region))
        elementwise.compute(device, plan.text, plan.answer, inputs, out, plan.scalars, part=True)
        return ()
    out = device.empty(tuple(result.shape), result.dtype, _dense(result))
    elementwise.compute(device, plan.text, plan.answer, inputs, out, plan.scalars)
    return out


def _same(a: Region, b: Region) -> bool:
    return (a.offset, a.shape, a.strides, a.dtype) == (b.offset, b.shape, b.strides, b.dtype)


def _dense(x: torch.Tensor) -> tuple[int, ...] | None:
    """Its strides, where they leave no gaps."""
    if x.is_contiguous() or x.numel() == 0:
        return None
    span = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return x.stride() if span == x.numel() else None


def _register() -> None:
    for name, rule in RULES.items():
        for suffix in ("", "_"):
            packet = getattr(aten, name + suffix, None) or getattr(aten, f"_{name}{suffix}", None)
            if packet is None:
                continue
            for overload in packet.overloads():
                func = getattr(packet, overload)
                returns = [str(r.type) for r in func._schema.returns]
                if any(a.is_out for a in func._schema.arguments) or returns != ["Tensor"] or overload == "decimals":
                    continue
                run = Pointwise(func, rule)
                OPERATORS[func] = _filled(run) if name == "masked_fill" else run


def _filled(fill: Pointwise) -> Any:
    """The value is made a number of x's dtype: x stays what it is where the mask is False."""

    def run(x: Any, mask: Any, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return fill(x, mask, value.to(x.dtype))
        if not x.dtype.is_floating_point:
            kind = bool if x.dtype == torch.bool else int
            limits = (0, 1) if kind is bool else (torch.iinfo(x.dtype).min, torch.iinfo(x.dtype).max)
            if not (math.isfinite(value) and (kind is bool or limits[0] <= int(value) <= limits[1])):
                raise RuntimeError(f"value cannot be converted to type {x.dtype} without overflow")
            value = kind(value)
        return fill(x, mask, value)

    return run


_register()
