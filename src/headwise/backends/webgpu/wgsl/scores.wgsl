{#
  What the attention kernels share: which keys a query may see, and the logit of a query and a key. A file of macros:

      {% import "scores.wgsl" as scores with context %}
      {{ scores.inputs(variant) }}            binds mask, bias, aux, where the call has them
      {{ params("…, " ~ scores.strides("q k") ~ ", " ~ scores.fields(variant)) }}
      {{ scores.functions(variant) }}

  `variant` (scores.py): mask ("words", packed as mask_bits.wgsl reads it; "bytes"; ""), bias ("" or its dtype), lengths, sink (bools, both read from aux),
  bias_width (biases of neighbouring keys that are read at once), cap, left, right
  (bools), packed (bool: a packed batch, without mask, bias or lengths), dropout (bool; its seed is read from aux).

  Logits are natural. Every kernel computes them in this order, in float32:

      product = Σ_d q_d · k_d        in any order
      logit   = product · scale      one multiplication: scaling q first would round each element
      logit   = cap(logit)           if there is a cap
      logit   = logit + bias         if there is a bias; a bias of -inf hides the key, whatever the logit

  All exponentials are powers of two. The forward's weights are exp2(fma(logit, LOG2E, -reference)), where the reference is an
  exponent of two, and lse = reference · LN2 + log(Σ weights): weights and lse of a row share the rounding of the reference.
  If only the band applies, weights come from products, exp2(fma(product, power, -reference)) with power = scale · log2(e) and
  lse = reference · (scale / power) + …: one rounding less. A bias may be so large that the rounding of logit · LOG2E exceeds
  any exponent: with a bias, references are natural and weights exp2((logit - reference) · LOG2E). `logits(variant)` defines
  constants, logit_of and biased for these. `capping()` and `no_numbers()` can be used alone.
#}
{% import "dropout.wgsl" as dropout with context %}
{% import "mask_bits.wgsl" as mask_bits with context %}
{% macro pairs(variant) %}
{% if variant.mask %}
{{ input("mask", "u32" if variant.mask == "words" else "u8", 1) }}
{% endif %}
{% if variant.bias %}
{{ input("bias", variant.bias, variant.bias_width) }}
{% endif %}
{% endmacro %}

{% macro inputs(variant) %}
{{ pairs(variant) }}
{% if variant.lengths or variant.sink or variant.dropout %}
{{ input("aux", "u32", 1) }}
{% endif %}
{% endmacro %}

{# All that the backward kernels read. The lengths are at the front of stats, the seed of dropout at the end. #}
{% macro backward_inputs(variant, dtype) %}
{% for name in ("q", "k", "v", "grad") %}
{{ input(name, dtype, 4) }}
{% endfor %}
{{ input("stats", "u32", 2) }}
{{ pairs(variant) }}
{% if variant.lengths or variant.dropout %}
fn load_aux(word: u32) -> u32 { return load_stats(word / 2u)[word % 2u]; }
{% endif %}
{% endmacro %}

{# Fields for the strides of tensors (B, H, S, ·). #}
{% macro strides(names) -%}
{% for name in names.split() %}{{ ", " if not loop.first }}{{ name }}_b: u32, {{ name }}_h: u32, {{ name }}_s: u32{% endfor %}
{%- endmacro %}

{% macro fields(variant) -%}
batch: u32, heads: u32, group: u32, q_length: u32, k_length: u32, left: i32, right: i32, scale: f32, softcap: f32, extents: u32, sinks: u32
{%- if variant.dropout %}, dropped_below: u32, kept_scale: f32, seed: u32, first_batch: u32, first_head: u32{% endif %}
{%- if variant.mask == "words" %}, {{ mask_bits.fields() }}{% elif variant.mask %}, mask_b: u32, mask_h: u32, mask_q: u32, mask_k: u32{% endif %}
{%- if variant.bias %}, bias_b: u32, bias_h: u32, bias_q: u32, bias_k: u32{% endif %}
{%- endmacro %}

{# added{x}: the biases of `count` keys from a key on, of the row at `row`. Keys past the last may get any. #}
{% macro biases(variant, row, key, count) %}
{% set width = variant.bias_width %}
{% for x in range(0, count, width) %}
            let biases{{ x }} = load_bias(({{ row }} + ({{ key }} + {{ x }}u){{ " * params.bias_k) " if width == 1 else ") / %du" % width }});
{% for y in range(width) %}
            let added{{ x + y }} = biases{{ x }}{{ "[%d]" % y if width > 1 }};
{% endfor %}
{% endfor %}
{% endmacro %}

{% macro functions(variant) %}
// What exists of a batch entry or a packed sequence: keys [first_key, keys) and queries [0, queries). Query i has position
// i + keys - queries. `bad`: a length is invalid, and every result of the entry is NaN.
struct Extent { first_key: i32, keys: i32, queries: i32, bad: bool }

{% if variant.lengths %}
fn extent_of(batch: u32) -> Extent {
    let at = params.extents + 4u * batch;
    let keys = bitcast<i32>(load_aux(at));
    return Extent(bitcast<i32>(load_aux(at + 2u)), max(keys, 0), bitcast<i32>(load_aux(at + 1u)), keys < 0);
}
{% elif not variant.packed %}
fn extent_of(batch: u32) -> Extent { return Extent(0, i32(params.k_length), i32(params.q_length), false); }
{% endif %}
{% if variant.sink %}
// The learnable logit of a query head, natural.
fn sink_of(head: u32) -> f32 { return bitcast<f32>(load_aux(params.sinks + head)); }
{% endif %}

// The keys [low, high) that exist and that the band lets a query at `position` see.
fn visible_keys(position: i32, extent: Extent) -> vec2<i32> {
    var low = extent.first_key;
    var high = extent.keys;
{% if variant.left %}
    low = max(low, position - params.left);
{% endif %}
{% if variant.right %}
    high = min(high, position + params.right + 1);
{% endif %}
    return vec2<i32>(low, max(high, 0));
}

// The queries [low, high) that the band lets see `key`, if it exists.
fn visible_queries(key: i32, extent: Extent) -> vec2<i32> {
    var low = 0;
    var high = extent.queries;
    let offset = extent.keys - extent.queries;
{% if variant.right %}
    low = max(0, key - params.right - offset);
{% endif %}
{% if variant.left %}
    high = min(high, key + params.left - offset + 1);
{% endif %}
    return vec2<i32>(low, max(high, 0));
}

{% if variant.mask == "words" %}
{{ mask_bits.functions() }}
{%- elif variant.mask %}
fn masked_out(batch: u32, head: u32, query: u32, key: u32) -> bool {
    return load_mask(batch * params.mask_b + head * params.mask_h + query * params.mask_q + key * params.mask_k) == 0u;
}
{% endif %}
{% if variant.bias %}
// Where the biases of a query begin.
fn bias_row_at(batch: u32, head: u32, query: u32) -> u32 {
    return batch * params.bias_b + head * params.bias_h + query * params.bias_q;
}
{% if variant.bias_width == 1 %}
fn bias_of(batch: u32, head: u32, query: u32, key: u32) -> f32 {
    return load_bias(bias_row_at(batch, head, query) + key * params.bias_k);
}
{% endif %}
{% endif %}
{% if variant.cap %}
{{ capping() }}
{%- endif %}
{% if variant.dropout %}
{{ dropout.functions() }}
{%- endif %}

{{ no_numbers() }}
{%- endmacro %}

{% macro capping() %}
// The built-in tanh may be a difference of exponentials, which overflow for large arguments and cancel for small ones. This
// takes one exponential that cannot overflow, and a polynomial near zero.
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
// WGSL constants may not be infinite or NaN; variables may.
fn negative_infinity() -> f32 { var bits = 0xff800000u; return bitcast<f32>(bits); }
fn not_a_number() -> f32 { var bits = 0x7fc00000u; return bitcast<f32>(bits); }
{% endmacro %}

{% macro logits(variant) %}
const LOG2E = 1.4426950408889634;
const LN2 = 0.6931471805599453;
// The logit of a key that a row does not see. Times LOG2E it is still finite, and far below every reference: the weight is 0.
// Not infinite, because constants cannot be and drivers may assume that nothing is.
const HIDDEN = -2.35e38;
// Visible logits with a bias are clamped to this. (The lowest float as a bias is a common way to hide keys; a row of nothing
// else gets equal weights.)
const LOWEST = -2.3e38;

// The logit, before any bias, of a query and a key with product q·k.
fn logit_of(product: f32) -> f32 { return {{ "cap(product * params.scale)" if variant.cap else "product * params.scale" }}; }
{% if variant.bias %}
fn biased(logit: f32, added: f32) -> f32 {
    let sum = logit + added;
    // A comparison instead of max keeps NaN; -inf is recognised by its bits.
    return select(select(sum, LOWEST, sum < LOWEST), HIDDEN, bitcast<u32>(added) == 0xff800000u);
}
{% endif %}
{% endmacro %}
