// y[…, index, …] = (or +=, …) source: every element of y takes the sources that name it, in their order, so that the result is
// the same every time and elements that share a word do not meet.
//
//   y       contiguous (n0 …): what was there before is in `x`, contiguous, too
//   source  (outer, length, inner), where y is (outer, size, inner), or one element: steps of 0 broadcast it
//
// How an element finds its sources:
//
//   "look"    it looks at all keys (outer, length, inner): in which of `size` places each source goes
//   "last"    it takes one, whose place along `length` is one less than in `last`; see scatter_targets.wgsl
//   "sorted"  it finds them among `sources`, whose elements are `targets`, sorted
//
// variables: dtype, kind, how, keys (dtype, or ""), wraps (negative keys count from the end), shared (keys, last, targets and
// sources have no outer and inner dims), op ("set", "add", "mul", "max", "min", "mean"), own (does x take part?)
{% import "numbers.wgsl" as numbers with context %}
{% set T = numbers.TYPES[kind] %}
{% set width = {"i64": 1, "i16": 2}.get(dtype, 4) %}
{% set at_once = 4 %}
{{ input("x", numbers.stored(dtype), 1) }}
{% if how == "look" %}
{{ input("keys", keys, 1) }}
{% elif how == "last" %}
{{ input("last", "u32", 1) }}
{% else %}
{{ input("targets", "u32", 1) }}
{{ input("sources", "u32", 1) }}
{% endif %}
{{ input("source", numbers.stored(dtype), 1) }}
{{ output("y", numbers.stored(dtype), width) }}
{{ params("count: u32, size: u32, inner: u32, length: u32, keys_outer: u32, keys_along: u32, keys_inner: u32, of_outer: u32, of_along: u32, of_inner: u32, sources_count: u32") }}

// the functions that are used

{% if how == "sorted" %}
// The first of the sorted sources of an element, or of what comes after it.
fn first_of(element: u32) -> u32 {
    var low = 0u;
    var high = params.sources_count;
    while (low < high) {
        let middle = low + (high - low) / 2u;
        if (load_targets(middle) < element) { low = middle + 1u; } else { high = middle; }
    }
    return low;
}

{% endif %}
{% macro source_at(j) %}load_source(outer * params.of_outer + {{ j }} * params.of_along + inner * params.of_inner){% endmacro %}
{% macro taken(raw) %}
        let source = {{ numbers.taken(raw, dtype, kind) }};
{% if op == "set" %}
        value = source;
{% else %}
        {{ "" if own else "if (met == 0u) { value = source; } else " }}{
{% if kind == "b" %}
            value = value {{ "||" if op in ("add", "mean", "max") else "&&" }} source;
{% elif op in ("add", "mean") %}
            value = {{ "long_add(value, source)" if kind == "l" else "value + source" }};
{% elif op == "mul" %}
            value = {{ "long_mul(value, source)" if kind == "l" else "value * source" }};
{% else %}
            value = {{ ("long_%s" % op if kind == "l" else "%s_of" % op if kind == "f" else op) }}(value, source);
{% endif %}
        }
{% endif %}
        met += 1u;
{% endmacro %}
fn result_of(at: u32) -> {{ T }} {
    let i = min(at, params.count - 1u);
    let inner = i % params.inner;
    let place = i / params.inner % params.size;
    let outer = i / params.inner / params.size;
    let raw = load_x(i);
    var value = {{ numbers.taken("raw", dtype, kind) }};
    var met = 0u;
{% if how == "look" %}
    for (var j = 0u; j < params.length; j++) {
        var key = load_keys(outer * params.keys_outer + j * params.keys_along + inner * params.keys_inner);
{% if wraps %}
        if (key < 0) { key += i32(params.size); }
{% endif %}
        if (key != i32(place)) { continue; }
        let raw_source = {{ source_at("j") }};
{{ taken("raw_source") }}
    }
{% elif how == "last" %}
    let last = load_last({{ "place" if shared else "i" }});
    if (last > 0u) {
        let raw_source = {{ source_at("(last - 1u)") }};
{{ taken("raw_source") }}
    }
{% else %}
    let element = {{ "place" if shared else "i" }};
    let first = first_of(element);
    let end = first_of(element + 1u);
    // All loads of a few sources before the first use: one element may have many.
    for (var k = first; k < end; k += {{ at_once }}u) {
{% for n in range(at_once) %}
        let j{{ n }} = load_sources(min(k + {{ n }}u, end - 1u)){{ "" if shared else " / params.inner % params.length" }};
{% endfor %}
{% for n in range(at_once) %}
        let raw{{ n }} = {{ source_at("j%d" % n) }};
{% endfor %}
{% for n in range(at_once) %}
        if (k + {{ n }}u < end) {
{{ taken("raw%d" % n) }}
        }
{% endfor %}
    }
{% endif %}
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
