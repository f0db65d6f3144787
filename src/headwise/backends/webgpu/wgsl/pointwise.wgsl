// y = an expression of tensors and numbers, element by element.
//
//   inputs   "flat": in the memory order of y; "one": a single element; "strided": any strides, 0 where it is broadcast;
//            "own": y itself, before
//   y        its elements side by side, in any order of its dims
//
// A thread computes four elements, and so whole words of any dtype. What is behind the last element of y stays as it is.
//
// variables: inputs (name, dtype, mode, kind), scalars (kinds), dtype, kind (of the expression), dims, text (the expression),
// functions (the WGSL functions that it needs), keeps (what is behind the last element)
{% import "numbers.wgsl" as numbers with context %}
{% set wide = ("f32", "f16", "bf16", "i32", "u8", "i8", "bool") %}
{% set needs_place = inputs | selectattr(2, "equalto", "strided") | list | length > 0 %}
{% for name, of, mode, _ in inputs if mode != "own" %}
{{ input(name, numbers.stored(of), 4 if mode == "flat" and of in wide else 1) }}
{% endfor %}
{% set y_width = {"i16": 2, "i64": 1}.get(dtype, 4) %}
{{ output("y", numbers.stored(dtype), y_width) }}
{% set fields = namespace(text=numbers.scalar_fields(scalars) ~ "count: u32") %}
{% if needs_place %}
{% for d in range(1, dims) %}{% set fields.text = fields.text ~ ", n%d: u32" % d %}{% endfor %}
{% for name, _, mode, _ in inputs if mode == "strided" %}{% for d in range(dims) %}{% set fields.text = fields.text ~ ", %s_%d: u32" % (name, d) %}{% endfor %}{% endfor %}
{% endif %}
{{ params(fields.text) }}

// the functions that are used

fn expression({% for name, _, _, kind in inputs %}{{ name }}: {{ numbers.TYPES[kind] }}, {% endfor %}unused: u32) -> {{ numbers.TYPES[kind] }} {
{% for kind in scalars %}
    let scalar{{ loop.index0 }} = {{ numbers.scalar(loop.index0, kind) }};
{% endfor %}
    return {{ text }};
}

{# Four elements, or two, of y as it was. #}
{% macro words(j) %}{{ {"u16": "(before >> %du) & 0xffffu" % (16 * j), "u8": "(before >> %du) & 0xffu" % (8 * j)}.get(numbers.stored(dtype), "before" if y_width == 1 else "before[%d]" % j) }}{% endmacro %}
{% set item = y_width if y_width < 4 else 4 %}

@compute @workgroup_size(256) {{ main() }}
    let vector = workgroup * 256u + thread;
    if (vector * 4u >= params.count) { return; }
{% for name, of, mode, _ in inputs if mode == "flat" and of in wide %}
    let {{ name }}_all = load_{{ name }}(vector);
{% endfor %}
{% for j in range(4) %}
{% if j % item == 0 and (keeps or inputs | selectattr(2, "equalto", "own") | list) %}
{{ "    let before_%d = load_y(vector * %du + %du);" % (j // item, 4 // item, j // item) }}
{% endif %}
    var y{{ j }}: {{ {"f32": "f32", "f16": "f32", "bf16": "f32", "i32": "i32", "i64": "vec2<u32>"}.get(dtype, "u32") }};
    {
{{ "        let before = before_%d;" % (j // item) if keeps or inputs | selectattr(2, "equalto", "own") | list }}
        let element = min(vector * 4u + {{ j }}u, params.count - 1u);
{% if needs_place %}
        var rest = element;
{% for d in range(dims - 1, 0, -1) %}
        let c{{ d }} = rest % params.n{{ d }};
        rest /= params.n{{ d }};
{% endfor %}
        let c0 = rest;
{% endif %}
        let value = expression(
{% for name, of, mode, kind in inputs %}
{% if mode == "own" %}
{% set raw = "(" ~ words(j % item) ~ ")" %}
{% elif mode == "flat" and of in ("u8", "i8", "bool") %}
{% set raw = "((%s_all >> %du) & 0xffu)" % (name, 8 * j) %}
{% elif mode == "flat" and of in wide %}
{% set raw = "%s_all[%d]" % (name, j) %}
{% elif mode == "flat" %}
{% set raw = "load_%s(element)" % name %}
{% elif mode == "one" %}
{% set raw = "load_%s(0u)" % name %}
{% else %}
{% set place = namespace(text="") %}
{% for d in range(dims) %}{% set place.text = place.text ~ (" + " if d else "") ~ "c%d * params.%s_%d" % (d, name, d) %}{% endfor %}
{% set raw = "load_%s(%s)" % (name, place.text) %}
{% endif %}
            {{ numbers.taken(raw, of, kind) }},
{% endfor %}
            0u);
        y{{ j }} = {{ numbers.given("value", kind, dtype) }};
{% if keeps %}
        if (vector * 4u + {{ j }}u >= params.count) { y{{ j }} = {{ words(j % item) }}; }
{% endif %}
    }
{% endfor %}
{{ numbers.store_four("vector", dtype, "params.count") }}
}
