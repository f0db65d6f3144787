// Where each x would be put into a sorted row: places = how many elements of the row are less (right: not greater) than it.
//
//   sequence  (rows, width), or one row for all (row_step 0)
//   x         (count), per_row of them for each row
//   places    (count)
//
// variables: dtype (of both), kind, to ("i64" or "i32"), right
{% import "numbers.wgsl" as numbers with context %}
{% set T = numbers.TYPES[kind] %}
{{ input("sequence", numbers.stored(dtype), 1) }}
{{ input("x", numbers.stored(dtype), 1) }}
{{ output("places", to, 1) }}
{{ params("count: u32, per_row: u32, width: u32, row_step: u32") }}

// the functions that are used

fn reaches(element: {{ T }}, x: {{ T }}) -> bool {
{% if kind == "l" %}
    return {{ "long_less(x, element)" if right else "!long_less(element, x)" }};
{% else %}
    return element {{ ">" if right else ">=" }} x{{ " && !is_nan(element) && !is_nan(x)" if kind == "f" }};
{% endif %}
}

@compute @workgroup_size(256) {{ main() }}
    let i = workgroup * 256u + thread;
    if (i >= params.count) { return; }
    let raw = load_x(i);
    let x = {{ numbers.taken("raw", dtype, kind) }};
    let row = i / params.per_row * params.row_step;
    var low = 0u;
    var high = params.width;
    while (low < high) {
        let middle = low + (high - low) / 2u;
        let raw_element = load_sequence(row + middle);
        if (reaches({{ numbers.taken("raw_element", dtype, kind) }}, x)) { high = middle; } else { low = middle + 1u; }
    }
    store_places(i, i32(low));
}
