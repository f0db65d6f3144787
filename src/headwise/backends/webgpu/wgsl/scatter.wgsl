// y[…, index, …] = (or +=, …) source: every element of y looks for the sources that name it, in their order, so that the
// result is the same every time and elements that share a word do not meet.
//
//   y       contiguous (n0 …): what was there before is in `x`, contiguous, too
//   keys    (outer, length, inner), where y is (outer, size, inner): in which of `size` places each source goes
//   source  the same, or one element
//
// Steps of 0 broadcast keys and source.
//
// variables: dtype, kind, keys (dtype), op ("set", "add", "mul", "max", "min", "mean"), own (does x take part?)
{% import "numbers.wgsl" as numbers with context %}
{% set T = numbers.TYPES[kind] %}
{% set width = {"i64": 1, "i16": 2}.get(dtype, 4) %}
{{ input("x", numbers.stored(dtype), 1) }}
{{ input("keys", numbers.stored(keys), 1) }}
{{ input("source", numbers.stored(dtype), 1) }}
{{ output("y", numbers.stored(dtype), width) }}
{{ params("count: u32, size: u32, inner: u32, length: u32, keys_outer: u32, keys_along: u32, keys_inner: u32, of_outer: u32, of_along: u32, of_inner: u32") }}

// the functions that are used

fn result_of(at: u32) -> {{ T }} {
    let i = min(at, params.count - 1u);
    let inner = i % params.inner;
    let place = i / params.inner % params.size;
    let outer = i / params.inner / params.size;
    let raw = load_x(i);
    var value = {{ numbers.taken("raw", dtype, kind) }};
    var met = 0u;
    for (var j = 0u; j < params.length; j++) {
        let raw_key = load_keys(outer * params.keys_outer + j * params.keys_along + inner * params.keys_inner);
        var key = {{ numbers.taken("raw_key", keys, "i") }};
        if (key < 0) { key += i32(params.size); }
        if (key != i32(place)) { continue; }
        let raw_source = load_source(outer * params.of_outer + j * params.of_along + inner * params.of_inner);
        let source = {{ numbers.taken("raw_source", dtype, kind) }};
{% if not own %}
        if (met == 0u) { value = source; met = 1u; continue; }
{% endif %}
{% if op == "set" %}
        value = source;
{% elif op in ("add", "mean") %}
        value = {{ "long_add(value, source)" if kind == "l" else "value || source" if kind == "b" else "value + source" }};
{% elif op == "mul" %}
        value = {{ "long_mul(value, source)" if kind == "l" else "value && source" if kind == "b" else "value * source" }};
{% else %}
        value = {{ ("long_%s" % op if kind == "l" else "%s_of" % op if kind == "f" else op) }}(value, source);
{% endif %}
        met += 1u;
    }
{% if op == "mean" %}
    let sources = met{{ " + 1u" if own }};
    if (sources > 1u) { value = {{ {"f": "value / f32(sources)", "i": "int_floor_div(value, i32(sources))", "l": "long_floor_div(value, vec2<u32>(sources, 0u))"}[kind] }}; }
{% endif %}
    return value;
}

@compute @workgroup_size(256) {{ main() }}
    let vector = workgroup * 256u + thread;
    if (vector * 4u >= params.count) { return; }
{% for j in range(4) %}
    let value{{ j }} = result_of(vector * 4u + {{ j }}u);
    let y{{ j }} = {{ numbers.given("value%d" % j, kind, dtype) }};
{% endfor %}
{{ numbers.store_four("vector", dtype, "params.count") }}
}
