// Where each source goes: the number of its element in y (outer, size, inner).
//
//   keys     (outer, length, inner): in which of `size` places each source goes. Steps of 0 broadcast them
//   targets  (outer, length, inner): the number of the element, `nowhere` for a key that is out of range
//   last     (outer, size, inner), zeros before: one more than the place along `length` of the last source of each element
//
// variables: keys ("i64" or "i32"), to ("targets" or "last"), wraps (negative keys count from the end)
{{ input("keys", keys, 1) }}
{{ output("targets", "u32", 1) if to == "targets" else highest("last") }}
{{ params("count: u32, size: u32, inner: u32, length: u32, keys_outer: u32, keys_along: u32, keys_inner: u32, nowhere: u32") }}

@compute @workgroup_size(256) {{ main() }}
    let i = workgroup * 256u + thread;
    if (i >= params.count) { return; }
    let inner = i % params.inner;
    let j = i / params.inner % params.length;
    let outer = i / params.inner / params.length;
    var key = load_keys(outer * params.keys_outer + j * params.keys_along + inner * params.keys_inner);
{% if wraps %}
    if (key < 0) { key += i32(params.size); }
{% endif %}
    let inside = key >= 0 && key < i32(params.size);
    let target_element = (outer * params.size + u32(max(key, 0))) * params.inner + inner;
{% if to == "targets" %}
    store_targets(i, select(params.nowhere, target_element, inside));
{% else %}
    if (inside) { raise_last(target_element, j + 1u); }
{% endif %}
}
