// A step of an optimizer in one pass: p and its moments are read and written once.
//
//   p, g, m, v, most   one memory order, side by side; most: the largest v so far (amsgrad)
//   step               the number of this step, one float32
//   rate               the learning rate, where it is a tensor here
//   scale, found       of a gradient scaler: what the gradient is divided by; not 0: nothing is done
//
// law "adam" (decay added to the gradient), "adamw" (decay apart), "sgd".
// scalars of adam: rate, keeps (1 - rate · decay), decay, first (1 - beta1), second, second_left (1 - beta2), eps, and the
// logarithms of both betas: in float32 1 - beta^step has lost its digits. Of sgd: rate, decay, momentum, damped (1 - dampening).
//
// variables: law, p, g, m, v, most, rate (dtypes; "" for none), scaled, checked, maximize, nesterov, first_step
{% import "numbers.wgsl" as numbers with context %}
{% set adam = law != "sgd" %}
{{ output("p", p, 4) }}
{{ output("g", g, 4) if scaled else input("g", g, 4) }}
{% if m %}{{ output("m", m, 4) }}{% endif %}
{% if v %}{{ output("v", v, 4) }}{% endif %}
{% if most %}{{ output("most", most, 4) }}{% endif %}
{% if adam %}{{ input("step", "f32", 1) }}{% endif %}
{% if rate %}{{ input("rate", rate, 1) }}{% endif %}
{% if scaled %}{{ input("scale", "f32", 1) }}{% endif %}
{% if checked %}{{ input("found", "f32", 1) }}{% endif %}
{{ params(numbers.scalar_fields(["f"] * (9 if adam else 4)) ~ "count: u32") }}

// the functions that are used

@compute @workgroup_size(256) {{ main() }}
    let vector = workgroup * 256u + thread;
    if (vector * 4u >= params.count) { return; }
{% if checked %}
    if (load_found(0u) != 0.0) { return; }
{% endif %}
    // What is behind the last element stays as it is.
    let here = vec4<u32>(0u, 1u, 2u, 3u) + vector * 4u < vec4<u32>(params.count);
    let rate = {{ "load_rate(0u)" if rate else "params.scalar0" }};
    let p_before = load_p(vector);
    let g_before = load_g(vector);
    var p_now = p_before;
    var g_now = g_before;
{% if scaled %}
    g_now = g_now / load_scale(0u);
    store_g(vector, select(g_before, g_now, here));
{% endif %}
{% if maximize %}
    g_now = -g_now;
{% endif %}
{% if adam %}
{% if law == "adamw" %}
    p_now = p_now * {{ "(1.0 - rate * params.scalar2)" if rate else "params.scalar1" }};
{% else %}
    g_now = fma(vec4<f32>(params.scalar2), p_now, g_now);
{% endif %}
    let m_before = load_m(vector);
    let v_before = load_v(vector);
    let m_now = fma(vec4<f32>(params.scalar3), g_now - m_before, m_before);
    let v_now = params.scalar4 * v_before + params.scalar5 * g_now * g_now;
    store_m(vector, select(m_before, m_now, here));
    store_v(vector, select(v_before, v_now, here));
{% if most %}
    let most_before = load_most(vector);
    let largest = max(most_before, v_now);
    store_most(vector, select(most_before, largest, here));
{% else %}
    let largest = v_now;
{% endif %}
    let number = load_step(0u);
    let of_m = -expm1_of(number * params.scalar7);
    let of_v = -expm1_of(number * params.scalar8);
    p_now = p_now - (rate / of_m) * (m_now / (sqrt(largest) / sqrt(of_v) + params.scalar6));
{% else %}
    g_now = fma(vec4<f32>(params.scalar1), p_now, g_now);
{% if m %}
    let m_before = load_m(vector);
    let m_now = {{ "g_now" if first_step else "params.scalar2 * m_before + params.scalar3 * g_now" }};
    store_m(vector, select(m_before, m_now, here));
    g_now = {{ "fma(vec4<f32>(params.scalar2), m_now, g_now)" if nesterov else "m_now" }};
{% endif %}
    p_now = p_now - rate * g_now;
{% endif %}
    store_p(vector, select(p_before, p_now, here));
}
