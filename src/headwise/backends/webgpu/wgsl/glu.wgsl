// Gated linear units: activation(gate) · up, and its backward.
//
//   forward    y     = f(gate) · up
//   backward   dgate = g · up · f'(gate)      dup = g · f(gate)
//
//   gate, up, grad   (rows, width), rows at any distance
//   y, dgate, dup    the same, contiguous; of halves, d (rows, 2 width) holds dgate and dup side by side
//
// mode "flat": all tensors are contiguous, one row; "rows": rows are whole vectors that begin at vectors; "elements": any
// others. There a thread gathers the four elements behind one vector of the result.
//
// variables: dtype, activation, backward, halves, mode, held (vectors of a thread)
{% set width = 1 if mode == "elements" else 4 %}
{{ input("gate", dtype, width) }}
{{ input("up", dtype, width) }}
{% if backward %}
{{ input("grad", dtype, width) }}
{% endif %}
{% set inputs = ["gate", "up", "grad"] if backward else ["gate", "up"] %}
{% if not backward %}
{{ output("y", dtype, 4) }}
{% elif halves %}
{{ output("d", dtype, 4) }}
{% else %}
{{ output("dgate", dtype, 4) }}
{{ output("dup", dtype, 4) }}
{% endif %}
{# count: vectors to compute; elements: of the result; per_row: vectors (of mode "elements": elements) of a row of gate #}
{{ params("count: u32, elements: u32, per_row: u32, gate_stride: u32, up_stride: u32" ~ (", grad_stride: u32" if backward else "")) }}

const LOG2E = 1.4426950408889634f;
const TANH_SLOPE = 1.5957691216057308f; // 2 √(2/π)
const TANH_CUBE = 0.044715f;

struct Value { f: vec4<f32>, slope: vec4<f32> }

{% if activation in ("silu", "gelu_tanh", "sigmoid") %}
struct Sigmoid { s: vec4<f32>, rest: vec4<f32> } // σ(a) and 1 - σ(a)

// The exponential of a negative number does not overflow, and both results are relatively accurate.
fn sigmoid(a: vec4<f32>) -> Sigmoid {
    let power = exp2(-abs(a) * LOG2E);
    let large = 1.0 / (1.0 + power);
    let small = power * large;
    let below = a < vec4<f32>(0.0);
    return Sigmoid(select(large, small, below), select(small, large, below));
}
{% elif activation == "gelu" %}
const INVERSE_ROOT_2PI = 0.3989422804014327f;

{{ library("scaled_tail", of_four=True) }}
{% endif %}

fn activation(a: vec4<f32>) -> Value {
{% if activation == "silu" %}
    let z = sigmoid(a);
    let f = a * z.s;
    return Value(f, z.s + f * z.rest);
{% elif activation == "gelu" %}
    let t = abs(a);
    let power = exp2(t * t * (-0.5 * LOG2E));
    let tail = power * scaled_tail(t);
    let distribution = select(1.0 - tail, tail, a < vec4<f32>(0.0));
    return Value(a * distribution, distribution + a * (power * INVERSE_ROOT_2PI));
{% elif activation == "gelu_tanh" %}
    let z = sigmoid(a * (TANH_SLOPE + TANH_SLOPE * TANH_CUBE * a * a));
    let f = a * z.s;
    return Value(f, z.s + f * z.rest * (TANH_SLOPE + 3.0 * TANH_SLOPE * TANH_CUBE * a * a));
{% elif activation == "sigmoid" %}
    let z = sigmoid(a);
    return Value(z.s, z.s * z.rest);
{% elif activation == "identity" %}
    return Value(a, vec4<f32>(1.0));
{% else %}
    // a <= 0 in bits. Of the comparison of floats a driver (NVIDIA's) made a maximum, and a maximum loses NaN.
    let bits = bitcast<vec4<u32>>(a);
    let off = (bits == vec4<u32>(0u)) | ((bits ^ vec4<u32>(0x80000000u)) <= vec4<u32>(0x7f800000u));
    let positive = select(a, vec4<f32>(0.0), off);
{% if activation == "relu" %}
    return Value(positive, select(vec4<f32>(1.0), vec4<f32>(0.0), off));
{% else %}
    return Value(positive * positive, 2.0 * positive);
{% endif %}
{% endif %}
}

@compute @workgroup_size(256) {{ main() }}
{% if mode == "elements" %}
    let i = workgroup * 256u + thread;
    if (i >= params.count) { return; }
{% for name in inputs %}
    var {{ name }}_values = vec4<f32>();
{% endfor %}
    var second = vec4<bool>(); // the element is of dup
    for (var j = 0u; j < 4u; j++) {
        let element = min(4u * i + j, params.elements - 1u);
{% if backward and halves %}
        var column = element % (2u * params.per_row);
        let row = element / (2u * params.per_row);
        second[j] = column >= params.per_row;
        column -= select(0u, params.per_row, second[j]);
{% else %}
        let column = element % params.per_row;
        let row = element / params.per_row;
{% endif %}
{% for name in inputs %}
        {{ name }}_values[j] = load_{{ name }}(row * params.{{ name }}_stride + column);
{% endfor %}
    }
    let value = activation(gate_values);
{% if not backward %}
    store_y(i, value.f * up_values);
{% elif halves %}
    store_d(i, select(grad_values * up_values * value.slope, grad_values * value.f, second));
{% else %}
    store_dgate(i, grad_values * up_values * value.slope);
    store_dup(i, grad_values * value.f);
{% endif %}
{% else %}
    // All loads first: more of them are under way at once.
{% for k in range(held) %}
    let i{{ k }} = workgroup * {{ 256 * held }}u + {{ 256 * k }}u + thread;
    let at{{ k }} = min(i{{ k }}, params.count - 1u);
{% if mode == "rows" %}
    let row{{ k }} = at{{ k }} / params.per_row;
    let column{{ k }} = at{{ k }} - row{{ k }} * params.per_row;
{% endif %}
{% for name in inputs %}
    let {{ name }}{{ k }} = load_{{ name }}({{ "row%d * params.%s_stride + column%d" % (k, name, k) if mode == "rows" else "at%d" % k }});
{% endfor %}
{% endfor %}
{% for k in range(held) %}
    if (i{{ k }} < params.count) {
        let value = activation(gate{{ k }});
{% if not backward %}
        store_y(i{{ k }}, value.f * up{{ k }});
{% elif halves %}
        let first = row{{ k }} * 2u * params.per_row + column{{ k }};
        store_d(first, grad{{ k }} * up{{ k }} * value.slope);
        store_d(first + params.per_row, grad{{ k }} * value.f);
{% else %}
        store_dgate(i{{ k }}, grad{{ k }} * up{{ k }} * value.slope);
        store_dup(i{{ k }}, grad{{ k }} * value.f);
{% endif %}
    }
{% endfor %}
{% endif %}
}
