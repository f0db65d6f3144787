"""WGSL from templates: one file per kernel family in ``wgsl/``, rendered with Jinja2.

A variant of a kernel (dtype, masks, head dim, tile sizes, tier) is a set of template variables, never a second file. The
rendered text is plain WGSL for two compilers with two dialects: naga (wgpu) knows subgroups without an ``enable`` line and
refuses it, Tint (browsers) requires it.

A template declares what it binds with these functions, and so every kernel reads and writes its tensors the same way:

``{{ input("x", dtype, 4) }}``    binds x to read, four elements at a time, and defines ``load_x(i) -> vec4<f32>``
``{{ output("y", dtype, 4) }}``   binds y to write, and defines ``store_y(i, value)`` (``y`` may be read back by ``load_y``)
``{{ scattered("y", "u16") }}``   binds y to write bits of one element at a time: ``put_y(i, bits)``
``{{ highest("y") }}``            binds words to raise to the highest of several numbers: ``raise_y(i, number)``
``{{ params("rows: u32, scale: f32") }}``   the numbers of a call, ``params.rows`` …, after all inputs and outputs
``@compute @workgroup_size(256) {{ main() }}``   begins the entry point; ``workgroup`` and ``thread`` are its numbers

dtypes are "f32", "f16", "bf16", "u32", "i32", "i64" (read as i32), and plain bits: "u8", "u16", "u64". Not every device has
16-bit floats, so they are packed in pairs into 32-bit words, and the thread that writes a word writes both halves (so the
width of a 16-bit output is 2 or 4). ``i`` counts vectors of the given width from the start of the tensor.

Another variable, ``native_half``, selects how to round to float16: with the driver's ``pack2x16float``, if a probe has shown
that it rounds to nearest even, or with bit operations, which are right everywhere and ten times as long.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import torch

FOLDER = Path(__file__).parent / "wgsl"

NAGA, TINT = "naga", "tint"

DTYPES = {
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "u8",
    torch.uint8: "u8",
}

# Words that only shaders with subgroups contain, outside comments.
_USES_SUBGROUPS = ("subgroup", "quadSwap", "quadBroadcast")
_COMMENT = re.compile(r"//.*")
_LIBRARY_FILES = ("functions.wgsl", "whole_numbers.wgsl")
# Where a template wants the functions of the library that it uses; `library(name)` gives one of them by name.
_LIBRARY = "// the functions that are used"
_FUNCTION = re.compile(r"(?:fn|struct) (\w+)")
_WORD = re.compile(r"\b[A-Za-z_]\w*\b")
_FORMATS = {"u32": "I", "i32": "i", "f32": "f"}


@dataclass(frozen=True)
class Buffer:
    name: str
    written: bool
    unit: int  # elements per item of its array: where it begins is counted in these


@dataclass(frozen=True)
class Kernel:
    """One variant of a kernel family: rendered WGSL, and how to call it."""

    name: str
    text: str
    buffers: tuple[Buffer, ...]
    _struct: struct.Struct
    _padding: bytes = field(repr=False)
    # The first fields of its parameters: numbers of a call that its record does not know, `scalar0` … They change from call
    # to call (a learning rate, a seed), and a record of every value would be kept otherwise.
    scalars: int = 0

    def pack(self, parameters: Sequence[float], starts: Sequence[int]) -> bytes:
        try:
            return self._struct.pack(*parameters, *starts) + self._padding
        except struct.error as error:
            raise RuntimeError(f"{self.name}: parameters {tuple(parameters)}: {error}") from error


def render(name: str, dialect: str = NAGA, native_half: bool = False, **variant: Any) -> Kernel:
    """The WGSL of kernel family ``name``, the file ``wgsl/<name>.wgsl``, in one variant."""
    declarations = _Declarations(native_half)
    template = _environment().get_template(f"{name}.wgsl")
    body = template.render(
        input=declarations.input, output=declarations.output, scattered=declarations.scattered,
        highest=declarations.highest, params=declarations.params, main=_main, **variant,
    )  # fmt: skip
    body = body.replace(_LIBRARY, _functions(body))
    if dialect == TINT and any(word in _COMMENT.sub("", body) for word in _USES_SUBGROUPS):
        # The lanes that share a row take every branch together: Tint cannot see that.
        body = "enable subgroups;\ndiagnostic(off, subgroup_uniformity);\n" + body
    packed = struct.Struct("<" + "".join(_FORMATS[kind] for kind in declarations.fields.values()))
    scalars = sum(field.startswith("scalar") for field in declarations.fields)
    return Kernel(name, body, tuple(declarations.buffers), packed, b"\0" * (-packed.size % 16), scalars)


@functools.cache
def _library() -> dict[str, str]:
    """The functions of the library by name."""
    found: dict[str, str] = {}
    name = ""
    lines: list[str] = []
    for line in "".join((FOLDER / file).read_text(encoding="utf-8") for file in _LIBRARY_FILES).splitlines():
        head = _FUNCTION.match(line)
        if head is not None:
            name, lines = head[1], []
        if name:
            lines.append(line)
            if line.startswith("}") or (head is not None and line.endswith("}")):
                found[name], name = "\n".join(lines), ""
    return found


def _functions(body: str) -> str:
    """The functions of the library that a text names, and those that they need in turn."""
    if _LIBRARY not in body:
        return ""
    library, found, left = _library(), {}, [body]
    while left:
        for name in _WORD.findall(_COMMENT.sub("", left.pop())):
            if name in library and name not in found and f"fn {name}(" not in body:
                found[name] = library[name]
                left.append(library[name])
    return "\n\n".join(found.values())


def _from_library(name: str, of_four: bool = False) -> str:
    """One function of the library; ``of_four``: of four numbers at once, where its text means the same for a vector."""
    text = _library()[name]
    return text.replace("f32", "vec4<f32>") if of_four else text


@functools.lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
        extensions=["jinja2.ext.do"],
    )
    environment.globals["library"] = _from_library
    return environment


def _main(subgroup_lane: bool = False) -> str:
    """The head of the entry point. ``workgroup`` undoes `device.spread`; ``thread`` counts within the workgroup."""
    more = ", @builtin(subgroup_invocation_id) subgroup_lane: u32" if subgroup_lane else ""
    return (
        "fn main(@builtin(workgroup_id) workgroup_id: vec3<u32>, @builtin(num_workgroups) num_workgroups: vec3<u32>,\n"
        f"        @builtin(local_invocation_index) thread: u32{more}) {{\n"
        "    let workgroup = workgroup_id.x + workgroup_id.y * num_workgroups.x;"
    )


class _Declarations:
    """What one template binds, in order."""

    def __init__(self, native_half: bool) -> None:
        self.buffers: list[Buffer] = []
        self.fields: dict[str, str] = {}
        self._helpers: set[str] = set()
        self._texts = _HELPERS | _NATIVE_HALF if native_half else _HELPERS

    def input(self, name: str, dtype: str, width: int = 1) -> str:
        return self._declare(name, dtype, width, written=False)

    def output(self, name: str, dtype: str, width: int = 1) -> str:
        return self._declare(name, dtype, width, written=True)

    def scattered(self, name: str, dtype: str) -> str:
        """Bits to write one element at a time, in any order: defines ``put_<name>(i, bits)``."""
        binding, start = len(self.buffers) + 1, f"params.{name}_start"
        self.buffers.append(Buffer(name, True, 1))
        if dtype in ("u32", "u64"):
            item, value, put = _layout(name, dtype, 1)[0], _layout(name, dtype, 1)[2], f"{name}[{start} + i] = bits;"
        else:
            size = int(dtype[1:])
            item, value, at = "atomic<u32>", "u32", f"&{name}[({start} + i) / {32 // size}u]"
            shift = f"let shift = ({start} + i) % {32 // size}u * {size}u;"
            put = f"{shift} atomicAnd({at}, ~({2**size - 1}u << shift)); atomicOr({at}, bits << shift);"
        return (
            f"@group(0) @binding({binding}) var<storage, read_write> {name}: array<{item}>;\n"
            f"fn put_{name}(i: u32, bits: {value}) {{ {put} }}\n"
        )

    def highest(self, name: str) -> str:
        """Words that keep the highest of the numbers they are given, in any order: defines ``raise_<name>(i, number)``."""
        binding = len(self.buffers) + 1
        self.buffers.append(Buffer(name, True, 1))
        return (
            f"@group(0) @binding({binding}) var<storage, read_write> {name}: array<atomic<u32>>;\n"
            f"fn raise_{name}(i: u32, number: u32) {{ atomicMax(&{name}[params.{name}_start + i], number); }}\n"
        )

    def params(self, fields: str = "") -> str:
        """Ends the declarations. The start of each tensor in its buffer is a parameter too."""
        for one in filter(None, (part.strip() for part in fields.split(","))):
            name, kind = (word.strip() for word in one.split(":"))
            if kind not in _FORMATS or name in self.fields:
                raise ValueError(f"parameter {one!r}: it needs a new name and one of {', '.join(_FORMATS)}")
            self.fields[name] = kind
        for buffer in self.buffers:
            self.fields[f"{buffer.name}_start"] = "u32"
        if not self.fields:
            raise ValueError("a kernel needs at least one parameter or buffer")
        lines = "".join(f"    {name}: {kind},\n" for name, kind in self.fields.items())
        return f"struct Params {{\n{lines}}}\n@group(0) @binding(0) var<uniform> params: Params;\n"

    def _declare(self, name: str, dtype: str, width: int, written: bool) -> str:
        item, unit, value, unpacked, packed = _layout(name, dtype, width)
        binding = len(self.buffers) + 1
        self.buffers.append(Buffer(name, written, unit))
        access = "read_write" if written else "read"
        lines = [f"@group(0) @binding({binding}) var<storage, {access}> {name}: array<{item}>;"]
        for helper in _helpers_of(dtype, written):
            if helper not in self._helpers:
                self._helpers.add(helper)
                lines.append(self._texts[helper])
        lines.append(f"fn load_{name}(i: u32) -> {value} {{ let at = params.{name}_start + i; return {unpacked}; }}")
        if written:
            if packed is None:
                raise ValueError(f"{name}: a thread cannot write one {dtype} alone; give it a width of 2 or more")
            lines.append(f"fn store_{name}(i: u32, value: {value}) {{ {name}[params.{name}_start + i] = {packed}; }}")
        return "\n".join(lines) + "\n"


def _layout(name: str, dtype: str, width: int) -> tuple[str, int, str, str, str | None]:
    """Item of the array, elements per item, type of a value, expression that reads it at ``at``, and that packs it."""
    at = f"{name}[at]"
    if dtype in ("f32", "u32", "i32"):
        kind = dtype if width == 1 else f"vec{width}<{dtype}>"
        return kind, width, kind, at, "value"
    if dtype == "i64" and width == 1:
        return "vec2<u32>", 1, "i32", f"narrow_i64({at})", "widen_i32(value)"
    if dtype == "u64" and width == 1:
        return "vec2<u32>", 1, "vec2<u32>", at, "value"
    if dtype in ("u8", "u16"):
        per_word = {"u8": 4, "u16": 2}[dtype]
        if width == 1:
            shift, bits = {"u8": ("2u", "8u"), "u16": ("1u", "16u")}[dtype]
            mask = {"u8": "0xffu", "u16": "0xffffu"}[dtype]
            return "u32", 1, "u32", f"({name}[at >> {shift}] >> ({bits} * (at & {per_word - 1}u))) & {mask}", None
        if width == per_word:
            return "u32", width, "u32", at, "value"
    if dtype in ("f16", "bf16"):
        if width == 1:
            return "u32", 1, "f32", f"unpack_{dtype}({name}[at >> 1u])[at & 1u]", None
        if width == 2:
            return "u32", 2, "vec2<f32>", f"unpack_{dtype}({at})", f"pack_{dtype}(value)"
        if width == 4:
            unpacked = f"vec4<f32>(unpack_{dtype}({at}.x), unpack_{dtype}({at}.y))"
            return "vec2<u32>", 4, "vec4<f32>", unpacked, f"vec2<u32>(pack_{dtype}(value.xy), pack_{dtype}(value.zw))"
    raise ValueError(f"{name}: there is no {dtype} of width {width}")


def _helpers_of(dtype: str, written: bool) -> tuple[str, ...]:
    if dtype in ("f16", "bf16"):
        return (f"unpack_{dtype}", f"pack_{dtype}") if written else (f"unpack_{dtype}",)
    if dtype == "i64":
        return ("narrow_i64", "widen_i32") if written else ("narrow_i64",)
    return ()


_HELPERS = {
    "unpack_f16": "fn unpack_f16(word: u32) -> vec2<f32> { return unpack2x16float(word); }",
    # WGSL defines neither how pack2x16float rounds nor what it makes of values that are too large. This rounds to nearest
    # even, keeps NaN and gives infinity above 65504, on every device.
    "pack_f16": """fn half_bits(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    let sign = (bits >> 16u) & 0x8000u;
    let size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) { return sign | 0x7e00u; }
    if (size >= 0x477ff000u) { return sign | 0x7c00u; }
    if (size < 0x38800000u) {
        // Below 2^-14 a half counts in steps of 2^-24.
        if (size < 0x33000000u) { return sign; }
        let shift = 126u - (size >> 23u);
        let mantissa = (size & 0x7fffffu) | 0x800000u;
        let kept = mantissa >> shift;
        let rest = mantissa & ((1u << shift) - 1u);
        let middle = 1u << (shift - 1u);
        return sign | (kept + select(0u, 1u, rest > middle || (rest == middle && (kept & 1u) == 1u)));
    }
    let rounded = size + 0xfffu + ((size >> 13u) & 1u);
    return sign | ((rounded - 0x38000000u) >> 13u);
}
fn pack_f16(value: vec2<f32>) -> u32 { return half_bits(value.x) | (half_bits(value.y) << 16u); }""",
    "unpack_bf16": "fn unpack_bf16(word: u32) -> vec2<f32> "
    "{ return vec2<f32>(bitcast<f32>(word << 16u), bitcast<f32>(word & 0xffff0000u)); }",
    # Rounds to nearest even, into the upper half of a word; NaN stays NaN. Few instructions and no branch: kernels that
    # write bfloat16 spend most of their time here.
    "pack_bf16": """fn brain_bits(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    return select(bits + 0x7fffu + extractBits(bits, 16u, 1u), bits | 0x400000u, (bits & 0x7fffffffu) > 0x7f800000u);
}
fn pack_bf16(value: vec2<f32>) -> u32 { return (brain_bits(value.x) >> 16u) | (brain_bits(value.y) & 0xffff0000u); }""",
    # For ids and lengths: numbers that do not fit 32 bits are out of range anyway, and become the lowest i32.
    "narrow_i64": """fn narrow_i64(words: vec2<u32>) -> i32 {
    let low = bitcast<i32>(words.x);
    let fits = bitcast<i32>(words.y) == (low >> 31u);
    return select(-2147483647 - 1, low, fits);
}""",
    "widen_i32": "fn widen_i32(value: i32) -> vec2<u32> "
    "{ return vec2<u32>(bitcast<u32>(value), bitcast<u32>(value >> 31u)); }",
}

_NATIVE_HALF = {"pack_f16": "fn pack_f16(value: vec2<f32>) -> u32 { return pack2x16float(value); }"}
