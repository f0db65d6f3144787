// y: random numbers. Elements 4 i … 4 i + 3 come from the counter (i, call, upper word of call, 0) under the key (seed).
//
// variables: dtype, law: "uniform" (from scalar4, a range of scalar5), "normal" (mean, deviation), "exponential" (rate),
// "bernoulli" (chance), "whole" (from scalar4, as many as scalar5); digits (of a uniform number)
{% import "numbers.wgsl" as numbers with context %}
{% import "philox.wgsl" as philox %}
{% set width = {"i64": 1, "i16": 2}.get(dtype, 4) %}
{% set last = "u32" if law == "whole" else "f32" %}
{% set kind = "i" if law == "whole" else "f" %}
{{ output("y", numbers.stored(dtype), width) }}
{{ params("scalar0: u32, scalar1: u32, scalar2: u32, scalar3: u32, scalar4: %s, scalar5: %s, count: u32" % (last, last)) }}

// the functions that are used
{{ philox.functions() }}

// In [0, 1).
fn fraction(word: u32) -> f32 { return f32(word >> {{ 32 - digits }}u) * {{ "%.12e" % (0.5 ** digits) }}; }

// In (0, 1].
fn chance(word: u32) -> f32 { return (f32(word >> 8u) + 1.0) * 5.9604644775390625e-8; }

@compute @workgroup_size(256) {{ main() }}
    let i = workgroup * 256u + thread;
    if (i * 4u >= params.count) { return; }
    let words = philox(vec4<u32>(i, params.scalar2, params.scalar3, 0u), vec2<u32>(params.scalar0, params.scalar1));
{% if law == "normal" %}
    // Box and Muller: two words make two numbers.
    let size = vec2<f32>(sqrt(-2.0 * log_of(chance(words.x))), sqrt(-2.0 * log_of(chance(words.z))));
    let turn = vec2<f32>(fraction(words.y), fraction(words.w)) * 6.283185307179586;
    let all = vec4<f32>(size.x * cos_of(turn.x), size.x * sin_of(turn.x), size.y * cos_of(turn.y), size.y * sin_of(turn.y)) * params.scalar5 + params.scalar4;
{% endif %}
{% for j in range(4) %}
{% if law == "uniform" %}
    let number{{ j }} = fraction(words[{{ j }}]) * params.scalar5 + params.scalar4;
{% elif law == "normal" %}
    let number{{ j }} = all[{{ j }}];
{% elif law == "exponential" %}
    // Above zero: a clock of no time would ring for what has no chance.
    let number{{ j }} = max(-log_of(chance(words[{{ j }}])), 5.9604644775390625e-8) / params.scalar4;
{% elif law == "bernoulli" %}
    let number{{ j }} = select(0.0, 1.0, fraction(words[{{ j }}]) < params.scalar4);
{% else %}
    let number{{ j }} = bitcast<i32>(params.scalar4 + select(words[{{ j }}] % max(params.scalar5, 1u), words[{{ j }}], params.scalar5 == 0u));
{% endif %}
    let y{{ j }} = {{ numbers.given("number%d" % j, kind, dtype) }};
{% endfor %}
{{ numbers.store_four("i", dtype, "params.count") }}
}
