{#
  Numbers of any dtype as kernels compute with them. A file of macros. The kinds of numbers: "f" (f32), "i" (i32, for whole
  numbers of up to 32 bits), "l" (64 bits, as two words) and "b" (bool).
#}
{% set TYPES = {"f": "f32", "i": "i32", "l": "vec2<u32>", "b": "bool"} %}
{# What `input` and `output` call the dtype. #}
{% macro stored(dtype) %}{{ {"i8": "u8", "bool": "u8", "i16": "u16", "i64": "u64"}.get(dtype, dtype) }}{% endmacro %}
{# What was loaded, as a number of a kind. #}
{% macro taken(raw, dtype, kind) -%}
{% if dtype in ("f32", "f16", "bf16") -%}
{{ {"f": raw, "i": "i32(%s)" % raw, "l": "long_of_float(%s)" % raw, "b": "is_true(%s)" % raw}[kind] }}
{%- elif dtype == "i64" -%}
{{ {"f": "float_of_long(%s)" % raw, "i": "bitcast<i32>((%s).x)" % raw, "l": raw, "b": "any((%s) != vec2<u32>(0u))" % raw}[kind] }}
{%- else -%}
{% set whole = raw if dtype == "i32" else "extractBits(bitcast<i32>(%s), 0u, %du)" % (raw, {"i8": 8, "i16": 16}[dtype]) if dtype in ("i8", "i16") else "bitcast<i32>(%s)" % raw -%}
{{ {"f": "f32(%s)" % whole, "i": whole, "l": "long_of(%s)" % whole, "b": "(%s != 0)" % whole}[kind] }}
{%- endif %}
{%- endmacro %}
{# A number of a kind, as what is stored: f32 for floats, i32, two words, or bits below the size of the dtype. #}
{% macro given(value, kind, dtype) -%}
{% if dtype in ("f32", "f16", "bf16") -%}
{{ {"f": value, "i": "f32(%s)" % value, "l": "float_of_long(%s)" % value, "b": "select(0.0, 1.0, %s)" % value}[kind] }}
{%- elif dtype == "i64" -%}
{{ {"f": "long_of_float(%s)" % value, "i": "long_of(%s)" % value, "l": value, "b": "vec2<u32>(select(0u, 1u, %s), 0u)" % value}[kind] }}
{%- elif dtype == "bool" -%}
{{ "select(0u, 1u, %s)" % {"f": "is_true(%s)" % value, "i": "(%s) != 0" % value, "l": "any((%s) != vec2<u32>(0u))" % value, "b": value}[kind] }}
{%- else -%}
{% set whole = {"f": "i32(%s)" % value, "i": value, "l": "bitcast<i32>((%s).x)" % value, "b": "select(0, 1, %s)" % value}[kind] -%}
{{ whole if dtype == "i32" else "(bitcast<u32>(%s) & %du)" % (whole, 65535 if dtype == "i16" else 255) }}
{%- endif %}
{%- endmacro %}
{# Parameters for the numbers of a call, and the constants that expressions name them by. #}
{% macro scalar_fields(kinds) -%}
{% for kind in kinds %}{{ "scalar%d: u32, scalar%d_high: u32, " % (loop.index0, loop.index0) if kind == "l" else "scalar%d: %s, " % (loop.index0, TYPES[kind]) }}{% endfor %}
{%- endmacro %}
{% macro scalar(i, kind) -%}
{{ "vec2<u32>(params.scalar%d, params.scalar%d_high)" % (i, i) if kind == "l" else "params.scalar%d" % i }}
{%- endmacro %}
{# Store four numbers, y0 … y3, as vector i of y; beyond the count only what fills the last word. #}
{% macro store_four(i, dtype, count) %}
{% if dtype == "i64" %}
{% for j in range(4) %}
    if ({{ i }} * 4u + {{ j }}u < {{ count }}) { store_y({{ i }} * 4u + {{ j }}u, y{{ j }}); }
{% endfor %}
{% elif dtype == "i16" %}
    store_y({{ i }} * 2u, y0 | (y1 << 16u));
    if ({{ i }} * 4u + 2u < {{ count }}) { store_y({{ i }} * 2u + 1u, y2 | (y3 << 16u)); }
{% elif dtype in ("u8", "i8", "bool") %}
    store_y({{ i }}, y0 | (y1 << 8u) | (y2 << 16u) | (y3 << 24u));
{% else %}
    store_y({{ i }}, vec4<{{ "i32" if dtype == "i32" else "f32" }}>(y0, y1, y2, y3));
{% endif %}
{% endmacro %}
