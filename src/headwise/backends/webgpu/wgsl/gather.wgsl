// y[place] = x[…, index, …]: elements that whole numbers name, bit by bit.
//
//   x        any strides
//   index0 … whole numbers (int64, int32 or bytes), broadcast over y
//   y        contiguous: its place (c0, c1, …) gives the place in x by strides, and each index moves it by its step
//
// A number out of range gives `missing`, which are the bits of an element (of 64 bits the upper word; the lower one is 0).
//
// variables: bytes (of an element), indices (dtype of each), dims, wraps (negative numbers count from the end)
{% import "numbers.wgsl" as numbers with context %}
{% set bits = 8 * bytes %}
{% set per_word = 4 // bytes if bytes < 4 else 1 %}
{{ input("x", "u%d" % bits, 1) }}
{% for dtype in indices %}
{{ input("index%d" % loop.index0, numbers.stored(dtype), 1) }}
{% endfor %}
{{ output("y", "u%d" % bits, per_word) }}
{% set fields = namespace(text="count: u32, missing: u32") %}
{% for d in range(dims) %}{% set fields.text = fields.text ~ ", n%d: u32, x_%d: u32" % (d, d) %}{% endfor %}
{% for dtype in indices %}{% set i = loop.index0 %}{% set fields.text = fields.text ~ ", size%d: u32, step%d: u32" % (i, i) %}{% for d in range(dims) %}{% set fields.text = fields.text ~ ", index%d_%d: u32" % (i, d) %}{% endfor %}{% endfor %}
{{ params(fields.text) }}

// the functions that are used

fn element(at: u32) -> {{ "vec2<u32>" if bytes == 8 else "u32" }} {
    if (at >= params.count) { return {{ "vec2<u32>(0u)" if bytes == 8 else "0u" }}; }
    var rest = at;
{% for d in range(dims - 1, 0, -1) %}
    let c{{ d }} = rest % params.n{{ d }};
    rest /= params.n{{ d }};
{% endfor %}
    let c0 = rest;
    var place = {% for d in range(dims) %}{{ " + " if d }}c{{ d }} * params.x_{{ d }}{% endfor %};
    var inside = true;
{% for dtype in indices %}
{% set i = loop.index0 %}
    {
        let raw = load_index{{ i }}({% for d in range(dims) %}{{ " + " if d }}c{{ d }} * params.index{{ i }}_{{ d }}{% endfor %});
{% if dtype == "i64" %}
        var number = bitcast<i32>(raw.x);
        if (bitcast<i32>(raw.y) != (number >> 31u)) { inside = false; }
{% else %}
        var number = {{ numbers.taken("raw", dtype, "i") }};
{% endif %}
{% if wraps %}
        if (number < 0) { number += i32(params.size{{ i }}); }
{% endif %}
        if (number < 0 || number >= i32(params.size{{ i }})) { inside = false; }
        place += u32(max(number, 0)) * params.step{{ i }};
    }
{% endfor %}
    if (!inside) { return {{ "vec2<u32>(0u, params.missing)" if bytes == 8 else "params.missing" }}; }
    return load_x(place);
}

@compute @workgroup_size(256) {{ main() }}
    let word = workgroup * 256u + thread;
    if (word * {{ per_word }}u >= params.count) { return; }
{% if per_word == 1 %}
    store_y(word, element(word));
{% else %}
    var packed = 0u;
{% for i in range(per_word) %}
    packed |= (element(word * {{ per_word }}u + {{ i }}u) & {{ 2 ** bits - 1 }}u) << {{ bits * i }}u;
{% endfor %}
    store_y(word, packed);
{% endif %}
}
