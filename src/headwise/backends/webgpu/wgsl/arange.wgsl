// y[i] = start + i step.
//
// variables: dtype, kind (of number)
{% import "numbers.wgsl" as numbers with context %}
{% set width = {"i64": 1, "i16": 2}.get(dtype, 4) %}
{{ output("y", numbers.stored(dtype), width) }}
{{ params(numbers.scalar_fields([kind, kind]) ~ "count: u32") }}

// the functions that are used

fn number(i: u32) -> {{ numbers.TYPES[kind] }} {
{% if kind == "l" %}
    return long_add({{ numbers.scalar(0, kind) }}, long_mul(vec2<u32>(i, 0u), {{ numbers.scalar(1, kind) }}));
{% else %}
    return params.scalar0 + {{ numbers.TYPES[kind] }}(i) * params.scalar1;
{% endif %}
}

@compute @workgroup_size(256) {{ main() }}
    let vector = workgroup * 256u + thread;
    let first = vector * 4u;
    if (first >= params.count) { return; }
{% for j in range(4) %}
    let y{{ j }} = {{ numbers.given("number(first + %du)" % j, kind, dtype) }};
{% endfor %}
{{ numbers.store_four("vector", dtype, "params.count") }}
}
