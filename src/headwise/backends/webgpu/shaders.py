"""WGSL from templates: one file per kernel family in ``wgsl/``, rendered with Jinja2.

A variant of a kernel (dtype, masks, head dim, tile sizes, tier) is a set of template variables, never a second file. The
rendered text is plain WGSL for two compilers with two dialects: naga (wgpu) knows subgroups without an ``enable`` line and
refuses it, Tint (browsers) requires it.

A template declares what it binds with three functions, and so every kernel reads and writes its tensors the same way:

``{{ input("x", dtype, 4) }}``    binds x to read, four elements at a time, and defines ``load_x(i) -> vec4<f32>``
``{{ output("y", dtype, 4) }}``   binds y to write, and defines ``store_y(i, value)`` (``y`` may be read back by ``load_y``)
``{{ params("rows: u32, scale: f32") }}``   the numbers of a call, ``params.rows`` …, after all inputs and outputs

dtypes are "f32", "f16", "bf16", "u32", "i32", "i64" (read as i32), and bits without meaning: "u8", "u16", "u64". WGSL has
no 16-bit floats that every device knows: they lie in words, two each, and one thread owns both halves when it writes (so
the width of a 16-bit output is 2, 4 or 8). ``i`` counts vectors of the given width from where the tensor begins; with
width 1 it counts elements.

How numbers are rounded to float16 is one more variable, ``native_half``: by the driver's ``pack2x16float``, on devices that
were found to round to nearest even with it, or by bits, which is right everywhere and ten times as long.
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

# A shader that says this, and not in a comment, uses subgroups.
_USES_SUBGROUPS = ("subgroup", "quadSwap", "quadBroadcast")
_COMMENT = re.compile(r"//.*")
_FORMATS = {"u32": "I", "i32": "i", "f32": "f"}


@dataclass(frozen=True)
class Buffer:
    name: str
    written: bool
    unit: int  # elements per item of its array: where it begins is counted in these


@dataclass(frozen=True)
class Source:
    """A rendered shader, and how to call it."""

    name: str
    text: str
    buffers: tuple[Buffer, ...]
    _struct: struct.Struct
    _padding: bytes = field(repr=False)

    def pack(self, parameters: Sequence[float], starts: Sequence[int]) -> bytes:
        try:
            return self._struct.pack(*parameters, *starts) + self._padding
        except struct.error as error:
            raise RuntimeError(f"{self.name}: parameters {tuple(parameters)}: {error}") from error


def render(name: str, dialect: str = NAGA, native_half: bool = False, **variant: Any) -> Source:
    """The WGSL of kernel family ``name``, the file ``wgsl/<name>.wgsl``, in one variant."""
    declarations = _Declarations(native_half)
    body = (
        _environment()
        .get_template(f"{name}.wgsl")
        .render(input=declarations.input, output=declarations.output, params=declarations.params, **variant)
    )
    if dialect == TINT and any(word in _COMMENT.sub("", body) for word in _USES_SUBGROUPS):
        # The lanes that share a row take every branch together: Tint cannot see that.
        body = "enable subgroups;\ndiagnostic(off, subgroup_uniformity);\n" + body
    packed = struct.Struct("<" + "".join(_FORMATS[kind] for kind in declarations.fields.values()))
    return Source(name, body, tuple(declarations.buffers), packed, b"\0" * (-packed.size % 16))


@functools.lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
        extensions=["jinja2.ext.do"],
    )


class _Declarations:
    """What one template binds, numbered in the order it says so."""

    def __init__(self, native_half: bool) -> None:
        self.buffers: list[Buffer] = []
        self.fields: dict[str, str] = {}
        self._helpers: set[str] = set()
        self._texts = _HELPERS | _NATIVE_HALF if native_half else _HELPERS

    def input(self, name: str, dtype: str, width: int = 1) -> str:
        return self._declare(name, dtype, width, written=False)

    def output(self, name: str, dtype: str, width: int = 1) -> str:
        return self._declare(name, dtype, width, written=True)

    def params(self, fields: str = "") -> str:
        """Closes the declarations: every buffer's start joins the parameters."""
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
    # WGSL leaves the rounding of pack2x16float to the driver, and values too large for it to anybody: this rounds to
    # nearest even, keeps NaN and gives infinity beyond 65504, on every device.
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
    # To nearest even, in the upper half of a word; a NaN stays one, whatever its low bits. Few instructions and no branch:
    # they are what a kernel that writes bfloat16 spends most on.
    "pack_bf16": """fn brain_bits(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    return select(bits + 0x7fffu + extractBits(bits, 16u, 1u), bits | 0x400000u, (bits & 0x7fffffffu) > 0x7f800000u);
}
fn pack_bf16(value: vec2<f32>) -> u32 { return (brain_bits(value.x) >> 16u) | (brain_bits(value.y) & 0xffff0000u); }""",
    # Ids and lengths: whatever does not fit 32 bits is out of every range anyway.
    "narrow_i64": """fn narrow_i64(words: vec2<u32>) -> i32 {
    let low = bitcast<i32>(words.x);
    let fits = bitcast<i32>(words.y) == (low >> 31u);
    return select(-2147483647 - 1, low, fits);
}""",
    "widen_i32": "fn widen_i32(value: i32) -> vec2<u32> "
    "{ return vec2<u32>(bitcast<u32>(value), bitcast<u32>(value >> 31u)); }",
}

_NATIVE_HALF = {"pack_f16": "fn pack_f16(value: vec2<f32>) -> u32 { return pack2x16float(value); }"}
