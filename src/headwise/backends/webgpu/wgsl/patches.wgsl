// The patches of a convolution, and the sum of patches back to where they came from.
//
//   image  (batch, channels, i0, …)
//   cols   patch_rows "outside": (channels, k0, …, batch, o0, …); "inside": (batch, channels, k0, …, o0, …)
//
// Both contiguous. Element k of the patch at o is image element o * stride + k * dilation - pad, 0 outside the image.
//
// sums false: y = cols from x = image. sums true: y = image, the sum over its places in cols, in a fixed order, from x = cols.
//
// variables: x, y (dtypes), dims, order ("outside", "inside"), sums
{% import "numbers.wgsl" as numbers with context %}
{{ input("x", x, 1) }}
{{ output("y", y, 4) }}
{% set fields = namespace(text="count: u32, batch: u32, channels: u32") %}
{% for d in range(dims) %}{% for name in ("image", "kernel", "out", "stride", "pad", "dilation") %}{% set fields.text = fields.text ~ ", %s%d: u32" % (name, d) %}{% endfor %}{% endfor %}
{{ params(fields.text) }}

// the functions that are used

{# `of` = index of an element along `sizes`, taken apart; leaves the rest in `rest`. #}
{% macro apart(names, sizes) %}
{% for d in range(dims - 1, -1, -1) %}
    let {{ names }}{{ d }} = rest % params.{{ sizes }}{{ d }};
    rest /= params.{{ sizes }}{{ d }};
{% endfor %}
{% endmacro %}
fn element(at: u32) -> f32 {
    if (at >= params.count) { return 0.0; }
    var rest = at;
{% if sums %}
{{ apart("i", "image") }}
    let channel = rest % params.channels;
    let entry = rest / params.channels;
    var total = 0.0;
{% for d in range(dims) %}
    for (var k{{ d }} = 0u; k{{ d }} < params.kernel{{ d }}; k{{ d }}++) {
        let away{{ d }} = i{{ d }} + params.pad{{ d }} - k{{ d }} * params.dilation{{ d }};
        let o{{ d }} = away{{ d }} / params.stride{{ d }};
        // Left of the first patch the difference wraps around, and is beyond the last.
        if (o{{ d }} >= params.out{{ d }} || away{{ d }} % params.stride{{ d }} != 0u) { continue; }
{% endfor %}
        var place = {{ "channel" if order == "outside" else "entry * params.channels + channel" }};
{% for d in range(dims) %}        place = place * params.kernel{{ d }} + k{{ d }};
{% endfor %}
{% if order == "outside" %}        place = place * params.batch + entry;
{% endif %}
{% for d in range(dims) %}        place = place * params.out{{ d }} + o{{ d }};
{% endfor %}
        total += load_x(place);
{% for d in range(dims) %}
    }
{% endfor %}
    return total;
{% else %}
{{ apart("o", "out") }}
{% if order == "outside" %}
    let entry = rest % params.batch;
    rest /= params.batch;
{% endif %}
{{ apart("k", "kernel") }}
    let channel = rest % params.channels;
{% if order == "inside" %}
    let entry = rest / params.channels;
{% endif %}
    var place = entry * params.channels + channel;
{% for d in range(dims) %}
    let i{{ d }} = o{{ d }} * params.stride{{ d }} + k{{ d }} * params.dilation{{ d }} - params.pad{{ d }};
    if (i{{ d }} >= params.image{{ d }}) { return 0.0; }
    place = place * params.image{{ d }} + i{{ d }};
{% endfor %}
    return load_x(place);
{% endif %}
}

@compute @workgroup_size(256) {{ main() }}
    let vector = workgroup * 256u + thread;
    if (vector * 4u >= params.count) { return; }
{% for j in range(4) %}
    let y{{ j }} = element(vector * 4u + {{ j }}u);
{% endfor %}
{{ numbers.store_four("vector", y, "params.count") }}
}
