// y[…, index, …] = source in place: only what is written is touched, a row of a long cache. Where keys meet, the last source
// wins.
//
//   y       (outer, size, inner), contiguous
//   keys    (length)
//   source  (outer, length, inner), or one element: steps of 0 broadcast it
//   last    (size): one more than the last place of each key; see scatter_targets.wgsl
//
// variables: bytes (of an element), keys (dtype), how (as in scatter.wgsl: "look" at all keys, or in "last"), wraps (negative
// keys count from the end)
{{ scattered("y", "u%d" % (8 * bytes)) }}
{{ input("keys", keys, 1) }}
{% if how == "last" %}
{{ input("last", "u32", 1) }}
{% endif %}
{{ input("source", "u%d" % (8 * bytes), 1) }}
{{ params("count: u32, size: u32, inner: u32, length: u32, of_outer: u32, of_along: u32, of_inner: u32") }}

fn key_of(j: u32) -> i32 {
    let key = load_keys(j);
    return {{ "select(key, key + i32(params.size), key < 0)" if wraps else "key" }};
}

@compute @workgroup_size(256) {{ main() }}
    let i = workgroup * 256u + thread;
    if (i >= params.count) { return; }
    let inner = i % params.inner;
    let j = i / params.inner % params.length;
    let outer = i / params.inner / params.length;
    let key = key_of(j);
    if (key < 0 || key >= i32(params.size)) { return; }
{% if how == "look" %}
    for (var k = j + 1u; k < params.length; k++) {
        if (key_of(k) == key) { return; }
    }
{% else %}
    if (load_last(u32(key)) != j + 1u) { return; }
{% endif %}
    let bits = load_source(outer * params.of_outer + j * params.of_along + inner * params.of_inner);
    put_y((outer * params.size + u32(key)) * params.inner + inner, bits);
}
