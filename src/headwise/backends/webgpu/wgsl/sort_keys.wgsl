// Elements of rows as words whose order is theirs: smaller elements have smaller keys (descending: larger ones), equal ones the
// same, and NaN counts as the largest.
//
//   x       (rows, width), any strides
//   places  (rows, width): the element of each key; without them 0, 1, …
//   keys    (rows, width)
//
// variables: x (dtype), descending, half ("low" or "high" word of 64 bits; "" for others), placed, bits (of a key)
{% import "numbers.wgsl" as numbers with context %}
{{ input("x", numbers.stored(x), 1) }}
{% if placed %}
{{ input("places", "u32", 1) }}
{% endif %}
{{ output("keys", "u32", 1) }}
{{ params("rows: u32, width: u32, x_row: u32, x_column: u32") }}

// the functions that are used

fn key_at(row: u32, column: u32) -> u32 {
    let raw = load_x(row * params.x_row + column * params.x_column);
{% if half == "low" %}
    return raw.x;
{% elif half == "high" %}
    return raw.y ^ 0x80000000u;
{% elif x in ("f32", "f16", "bf16") %}
    // Floats are ordered by their bits, negative ones the other way round. 16-bit floats have zeros below.
    if (is_nan(raw)) { return {{ 2 ** bits - 1 }}u; }
    let word = bitcast<u32>(raw);
    if ((word & 0x7fffffffu) == 0u) { return {{ 2 ** (bits - 1) }}u; }
    return (select(word ^ 0x80000000u, ~word, (word & 0x80000000u) != 0u)) >> {{ 32 - bits }}u;
{% elif x in ("bool", "u8") %}
    return raw;
{% else %}
    return bitcast<u32>({{ numbers.taken("raw", x, "i") }}) {{ "^" if bits == 32 else "+" }} {{ 2 ** (bits - 1) }}u;
{% endif %}
}

@compute @workgroup_size(256) {{ main() }}
    let i = workgroup * 256u + thread;
    if (i >= params.rows * params.width) { return; }
    let key = key_at(i / params.width, {{ "load_places(i)" if placed else "i % params.width" }});
    store_keys(i, {{ "~key" if descending and bits == 32 else "%du - key" % (2 ** bits - 1) if descending else "key" }});
}
