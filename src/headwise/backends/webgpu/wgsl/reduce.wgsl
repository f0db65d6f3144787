// y = a reduction of x over some of its dims, for every place in the others.
//
//   x     any strides: kept dims k0 … (their sizes kn0 …), reduced dims r0 …, each a number of dims
//   y     one number for each kept place, in row-major order
//
// mode "group": a workgroup per result, its threads in turn; "thread": a thread per result. A part of the reduced elements
// may be one result (of `length` elements; result = part * places + place), which a second call joins: no chain of sums is
// long, and few results fill a GPU. A thread adds up blocks of `block` elements, and then their sums, for the same reason.
//
// op: "sum", "prod", "max", "min", "argmax", "argmin", "any", "all", "norm" (of the powers; norm_of: 0, 1, 2, "inf", "p"),
// "squares" (sum of squares of what is left when `mean`, of the kept place, is taken away)
// variables: x (dtype), y (dtype), kind (of number: "f", "i", "l"), op, norm_of, kept (number of dims), reduced, mode, block
{% import "numbers.wgsl" as numbers with context %}
{% set T = numbers.TYPES[kind] %}
{{ input("x", numbers.stored(x), 1) }}
{% if op == "squares" %}
{{ input("mean", "f32", 1) }}
{% endif %}
{% if y in ("f16", "bf16", "i16") %}{% set per_thread = 2 %}{% elif y in ("u8", "i8", "bool") %}{% set per_thread = 4 %}{% else %}{% set per_thread = 1 %}{% endif %}
{{ output("y", numbers.stored(y), per_thread) }}
{% set fields = namespace(text="count: u32, results: u32, places: u32, length: u32, power: f32") %}
{% for d in range(kept) %}{% set fields.text = fields.text ~ ", kn%d: u32, ks%d: u32" % (d, d) %}{% endfor %}
{% for d in range(reduced) %}{% set fields.text = fields.text ~ ", rn%d: u32, rs%d: u32" % (d, d) %}{% endfor %}
{{ params(fields.text) }}

// the functions that are used

{% set places = op in ("argmax", "argmin") %}
struct Best { value: {{ T }}, at: u32 }

{% if mode == "group" %}
var<workgroup> shared_values: array<{{ T }}, 256>;
{% if places %}var<workgroup> shared_places: array<u32, 256>;{% endif %}
{% endif %}

fn start_value() -> {{ T }} {
{% if kind == "f" %}
    return {{ {"prod": "1.0", "max": "-infinity()", "argmax": "-infinity()", "min": "infinity()", "argmin": "infinity()", "all": "1.0"}.get(op, "0.0") }};
{% elif kind == "i" %}
    return {{ {"prod": "1", "max": "(-2147483647 - 1)", "argmax": "(-2147483647 - 1)", "min": "2147483647", "argmin": "2147483647", "all": "1"}.get(op, "0") }};
{% else %}
    return {{ {"prod": "vec2<u32>(1u, 0u)", "all": "vec2<u32>(1u, 0u)", "max": "vec2<u32>(0u, 0x80000000u)", "argmax": "vec2<u32>(0u, 0x80000000u)", "min": "vec2<u32>(0xffffffffu, 0x7fffffffu)", "argmin": "vec2<u32>(0xffffffffu, 0x7fffffffu)"}.get(op, "vec2<u32>(0u)") }};
{% endif %}
}

{# Is the value at the first place better than that at the second? NaN is best, the first of equals is better. #}
{% if places %}
fn better(a: Best, b: Best) -> bool {
    if (b.at == 0xffffffffu) { return true; }
    if (a.at == 0xffffffffu) { return false; }
{% if kind == "f" %}
    if (is_nan(a.value) || is_nan(b.value)) { return is_nan(a.value) && (!is_nan(b.value) || a.at < b.at); }
    if (a.value == b.value) { return a.at < b.at; }
    return a.value {{ ">" if op == "argmax" else "<" }} b.value;
{% elif kind == "i" %}
    if (a.value == b.value) { return a.at < b.at; }
    return a.value {{ ">" if op == "argmax" else "<" }} b.value;
{% else %}
    if (all(a.value == b.value)) { return a.at < b.at; }
    return {{ "long_less(b.value, a.value)" if op == "argmax" else "long_less(a.value, b.value)" }};
{% endif %}
}
{% endif %}

fn joined(a: {{ T }}, b: {{ T }}) -> {{ T }} {
{% if op in ("sum", "squares") or (op == "norm" and norm_of != "inf") %}
    return {{ "long_add(a, b)" if kind == "l" else "a + b" }};
{% elif op == "prod" %}
    return {{ "long_mul(a, b)" if kind == "l" else "a * b" }};
{% elif op == "max" or (op == "norm" and norm_of == "inf") %}
    return {{ {"f": "max_of(a, b)", "i": "max(a, b)", "l": "long_max(a, b)"}[kind] }};
{% elif op == "min" %}
    return {{ {"f": "min_of(a, b)", "i": "min(a, b)", "l": "long_min(a, b)"}[kind] }};
{% elif op == "any" %}
    return {{ {"f": "select(0.0, 1.0, is_true(a) || is_true(b))", "i": "a | b", "l": "a | b"}[kind] }};
{% elif op == "all" %}
    return {{ {"f": "select(0.0, 1.0, is_true(a) && is_true(b))", "i": "select(0, 1, a != 0 && b != 0)", "l": "vec2<u32>(select(0u, 1u, any(a != vec2<u32>(0u)) && any(b != vec2<u32>(0u))), 0u)"}[kind] }};
{% else %}
    return a;
{% endif %}
}

fn one(base: u32, at: u32, place: u32) -> {{ T }} {
    var rest = at;
    var i = base;
{% for d in range(reduced - 1, -1, -1) %}
{% if d %}
    i += rest % params.rn{{ d }} * params.rs{{ d }};
    rest /= params.rn{{ d }};
{% else %}
    i += rest * params.rs0;
{% endif %}
{% endfor %}
    let raw = load_x(i);
    let value = {{ numbers.taken("raw", x, kind) }};
{% if op == "squares" %}
    let away = value - load_mean(place);
    return away * away;
{% elif op == "norm" %}
{% if norm_of == 0 %}
    return select(0.0, 1.0, is_true(value));
{% elif norm_of in (1, "inf") %}
    return abs(value);
{% elif norm_of == 2 %}
    return value * value;
{% else %}
    return pow_of(abs(value), params.power);
{% endif %}
{% elif op in ("any", "all") %}
    return {{ {"f": "select(0.0, 1.0, is_true(value))", "i": "select(0, 1, value != 0)", "l": "vec2<u32>(select(0u, 1u, any(value != vec2<u32>(0u))), 0u)"}[kind] }};
{% else %}
    return value;
{% endif %}
}

fn base_of(place: u32) -> u32 {
    var rest = place;
    var i = 0u;
{% for d in range(kept - 1, -1, -1) %}
{% if d %}
    i += rest % params.kn{{ d }} * params.ks{{ d }};
    rest /= params.kn{{ d }};
{% else %}
    i += rest * params.ks0;
{% endif %}
{% endfor %}
    return i;
}

{# The reduction of every `step`-th element from the first on. #}
fn walked(result: u32, first: u32, step: u32) -> Best {
    let place = result % params.places;
    let part = result / params.places;
    let base = base_of(place);
    let end = min((part + 1u) * params.length, params.count);
    var best = Best(start_value(), 0xffffffffu);
{% if places %}
    for (var at = part * params.length + first; at < end; at += step) {
        let here = Best(one(base, at, place), at);
        if (better(here, best)) { best = here; }
    }
{% else %}
    var at = part * params.length + first;
    while (at < end) {
        let stop = min(end, at + {{ block }}u * step);
        var value = start_value();
        for (; at < stop; at += step) { value = joined(value, one(base, at, place)); }
        best.value = joined(best.value, value);
    }
{% endif %}
    return best;
}

@compute @workgroup_size(256) {{ main() }}
{% set answer = "vec2<u32>(best.at, 0u)" if y == "i64" else "bitcast<i32>(best.at)" %}
{% if mode == "group" %}
{# results that share a word are walked one after the other #}
{% for j in range(per_thread) %}
    let result{{ j }} = workgroup * {{ per_thread }}u + {{ j }}u;
    var best{{ j }} = Best(start_value(), 0xffffffffu);
    if (result{{ j }} < params.results) { best{{ j }} = walked(result{{ j }}, thread, 256u); }
    shared_values[thread] = best{{ j }}.value;
{% if places %}    shared_places[thread] = best{{ j }}.at;{% endif %}

    workgroupBarrier();
    for (var half = 128u; half > 0u; half = half / 2u) {
        if (thread < half) {
{% if places %}
            let other = Best(shared_values[thread + half], shared_places[thread + half]);
            if (better(other, best{{ j }})) { best{{ j }} = other; }
            shared_places[thread] = best{{ j }}.at;
{% else %}
            best{{ j }}.value = joined(best{{ j }}.value, shared_values[thread + half]);
{% endif %}
            shared_values[thread] = best{{ j }}.value;
        }
        workgroupBarrier();
    }
{% endfor %}
    if (thread != 0u || workgroup * {{ per_thread }}u >= params.results) { return; }
    let item = workgroup;
{% else %}
    let item = workgroup * 256u + thread;
    if (item * {{ per_thread }}u >= params.results) { return; }
{% for j in range(per_thread) %}
    var best{{ j }} = Best(start_value(), 0xffffffffu);
    if (item * {{ per_thread }}u + {{ j }}u < params.results) { best{{ j }} = walked(item * {{ per_thread }}u + {{ j }}u, 0u, 1u); }
{% endfor %}
{% endif %}
{% for j in range(per_thread) %}
{% if places %}
    let y{{ j }} = {{ answer.replace("best", "best%d" % j) }};
{% else %}
    let y{{ j }} = {{ numbers.given("best%d.value" % j, kind, y) }};
{% endif %}
{% endfor %}
{% if y in ("f16", "bf16") %}
    store_y(item, vec2<f32>(y0, y1));
{% elif y == "i16" %}
    store_y(item, y0 | (y1 << 16u));
{% elif per_thread == 4 %}
    store_y(item, y0 | (y1 << 8u) | (y2 << 16u) | (y3 << 24u));
{% else %}
    store_y(item, y0);
{% endif %}
}
