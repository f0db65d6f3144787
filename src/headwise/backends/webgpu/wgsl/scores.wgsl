{#
  What the attention kernels share: which keys a query may see, and the logit of a pair. A file of macros:

      {% import "scores.wgsl" as scores with context %}
      {{ scores.inputs(variant) }}            binds mask, bias, aux, where the call has them
      {{ params("…, " ~ scores.fields(variant)) }}
      {{ scores.functions(variant) }}

  `variant` is what `scores.py` made of the call: mask (bool), bias ("" or its dtype), lengths, sink (bools, both read from
  aux), cap, left, right (bools), packed (bool: a batch of sequences one after the other, no mask, no bias).

  Logits here are natural, and every kernel computes them in this order, all in float32:

      product = Σ_d q_d · k_d        in any order
      logit   = product · scale      one multiplication: q is never scaled beforehand, which would round each element
      logit   = cap(logit)           where there is a cap
      logit   = logit + bias         where there is a bias; a bias of -inf hides the key, whatever the logit

  Powers are taken of two. The forward's weights are exp2(fma(logit, LOG2E, -reference)) with a reference in powers of two,
  and lse = reference · LN2 + log(Σ weights): the one rounding of the reference is the same for the row's weights and its
  lse. Where nothing but the band comes in between, it takes them from products, exp2(fma(product, power, -reference)) with
  power = scale · log2(e) and lse = reference · (scale / power) + …: one rounding less. A bias may be any float, and the
  rounding of such a product larger than all powers there are: where there is one, references are natural and weights
  exp2((logit - reference) · LOG2E). `logits(variant)` defines these for kernels that want them: constants, logit_of,
  biased. `capping()` and `no_numbers()` are there alone too.
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
{{ capping() }}
{%- endif %}

{{ no_numbers() }}
{%- endmacro %}

{% macro capping() %}
// The built-in tanh may be a difference of exponentials, which overflow where it is large and lose all digits where it is
// small. Here: one exponential that cannot overflow, and a polynomial near zero.
fn tanh_of(u: f32) -> f32 {
    let size = abs(u);
    let e = exp2(-2.8853900817779268 * size);
    let square = u * u;
    let small = size * (1.0 + square * (-0.33333333 + square * (0.13333333 + square * (-0.053968254 + square * 0.021869489))));
    let t = select((1.0 - e) / (1.0 + e), small, size < 0.25);
    return select(t, -t, u < 0.0);
}
// c · tanh(s / c).
fn cap(logit: f32) -> f32 { return params.softcap * tanh_of(logit / params.softcap); }
// The derivative of cap, from its value.
fn cap_slope(capped: f32) -> f32 { let t = capped / params.softcap; return 1.0 - t * t; }
{% endmacro %}

{% macro no_numbers() %}
// Infinity and NaN, which no WGSL constant may be. A variable is no constant.
fn negative_infinity() -> f32 { var bits = 0xff800000u; return bitcast<f32>(bits); }
fn not_a_number() -> f32 { var bits = 0x7fc00000u; return bitcast<f32>(bits); }
{% endmacro %}

{% macro logits(variant) %}
const LOG2E = 1.4426950408889634;
const LN2 = 0.6931471805599453;
// The logit of a key that a row does not see. Times LOG2E it is still a float, and far below every reference: the weight is
// 0. Constants cannot be infinite, and drivers may take it that nothing is.
const HIDDEN = -2.35e38;
// No logit that a bias was added to, and that is seen, is lower. (A bias of the lowest float is a common way to hide keys:
// a row of them gets equal weights, and half of it is still far above.)
const LOWEST = -2.3e38;

// The logit, before any bias, of a query and a key with product q·k.
fn logit_of(product: f32) -> f32 { return {{ "cap(product * params.scale)" if variant.cap else "product * params.scale" }}; }
{% if variant.bias %}
fn biased(logit: f32, added: f32) -> f32 {
    let sum = logit + added;
    // Compared, not clamped: a NaN stays one. -inf is told by its bits.
    return select(select(sum, LOWEST, sum < LOWEST), HIDDEN, bitcast<u32>(added) == 0xff800000u);
}
{% endif %}
{% endmacro %}
