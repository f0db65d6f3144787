{#
  What the attention kernels share: which keys a query may see, and the logit of a pair. A file of macros:

      {% import "scores.wgsl" as scores with context %}
      {{ scores.inputs(variant) }}            binds mask, bias, aux, where the call has them
      {{ params("…, " ~ scores.fields(variant)) }}
      {{ scores.functions(variant) }}

  `variant` is what `scores.py` made of the call: mask (bool), bias ("" or its dtype), lengths, sink (bools, both read from
  aux), cap, left, right (bools), packed (bool: a batch of sequences one after the other, no mask, no bias).

  Logits here are natural: scale · q·k, capped, plus bias. The kernels fold log2(e) in themselves where they take powers.
#}
{% macro inputs(variant) %}
{% if variant.mask %}
{{ input("mask", "u8", 1) }}
{% endif %}
{% if variant.bias %}
{{ input("bias", variant.bias, 1) }}
{% endif %}
{% if variant.lengths or variant.sink %}
{{ input("aux", "u32", 1) }}
{% endif %}
{% endmacro %}

{% macro fields(variant) -%}
batch: u32, heads: u32, group: u32, q_length: u32, k_length: u32, left: i32, right: i32, scale: f32, softcap: f32
{%- if variant.mask %}, mask_b: u32, mask_h: u32, mask_q: u32, mask_k: u32{% endif %}
{%- if variant.bias %}, bias_b: u32, bias_h: u32, bias_q: u32, bias_k: u32{% endif %}
{%- endmacro %}

{% macro functions(variant) %}
{% if variant.lengths %}
// Keys of a batch entry that exist; -1 where kv_lengths holds nonsense, and then every result of the entry is NaN.
fn keys_of(batch: u32) -> i32 { return bitcast<i32>(load_aux(batch)); }
{% elif not variant.packed %}
fn keys_of(batch: u32) -> i32 { return i32(params.k_length); }
{% endif %}
{% if variant.sink %}
// The learnable logit of a query head, natural.
fn sink_of(head: u32) -> f32 { return bitcast<f32>(load_aux({{ "params.batch + head" if variant.lengths else "head" }})); }
{% endif %}

// The first key that a query at `position` may see, and the one past the last, by the band alone and the keys there are.
// A query i of a sequence sits at position i + keys - queries.
fn visible_keys(position: i32, keys: i32) -> vec2<i32> {
    var low = 0;
    var high = keys;
{% if variant.left %}
    low = max(0, position - params.left);
{% endif %}
{% if variant.right %}
    high = min(keys, position + params.right + 1);
{% endif %}
    return vec2<i32>(low, max(high, 0));
}

// The queries of a sequence that may see `key`, the same seen from the other side: [low, high) of 0 … queries.
fn visible_queries(key: i32, queries: i32, keys: i32) -> vec2<i32> {
    var low = 0;
    var high = queries;
    let offset = keys - queries;
{% if variant.right %}
    low = max(0, key - params.right - offset);
{% endif %}
{% if variant.left %}
    high = min(queries, key + params.left - offset + 1);
{% endif %}
    return vec2<i32>(low, max(high, 0));
}

{% if variant.mask %}
fn masked_out(batch: u32, head: u32, query: u32, key: u32) -> bool {
    return load_mask(batch * params.mask_b + head * params.mask_h + query * params.mask_q + key * params.mask_k) == 0u;
}
{% endif %}
{% if variant.bias %}
fn bias_of(batch: u32, head: u32, query: u32, key: u32) -> f32 {
    return load_bias(batch * params.bias_b + head * params.bias_h + query * params.bias_q + key * params.bias_k);
}
{% endif %}
{% if variant.cap %}
// c · tanh(s / c). Built-in tanh may overflow inside; beyond 15 it is 1 to the last digit of a float.
fn cap(logit: f32) -> f32 { return params.softcap * tanh(clamp(logit / params.softcap, -15.0, 15.0)); }
// The derivative of cap, from its value.
fn cap_slope(capped: f32) -> f32 { let t = capped / params.softcap; return 1.0 - t * t; }
{% endif %}

// Infinity and NaN, which no WGSL constant may be. A variable is no constant.
fn negative_infinity() -> f32 { var bits = 0xff800000u; return bitcast<f32>(bits); }
fn not_a_number() -> f32 { var bits = 0x7fc00000u; return bitcast<f32>(bits); }
{% endmacro %}
