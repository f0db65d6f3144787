// y = Σ over chunks of x, in order, in the dtype of y; if `adds`, added to what y holds.
//
//   x  (chunks, elements) float32; y (elements), contiguous
//
// variables: dtype, adds
{% set width = 1 if dtype == "f32" else 2 %}
{{ input("x", "f32", 1) }}
{{ output("y", dtype, width) }}
{{ params("chunks: u32, elements: u32") }}

fn sum_of(element: u32) -> f32 {
    var sum = 0.0;
    for (var i = 0u; i < params.chunks; i++) { sum += load_x(i * params.elements + element); }
    return sum;
}

@compute @workgroup_size(256) {{ main() }}
    let i = workgroup * 256u + thread;
    if (i * {{ width }}u >= params.elements) { return; }
{% if width == 1 %}
    store_y(i, {{ "load_y(i) + " if adds }}sum_of(i));
{% else %}
    // Past the last element the first is summed again; it is not read.
    let odd = select(0u, 2u * i + 1u, 2u * i + 1u < params.elements);
    store_y(i, {{ "load_y(i) + " if adds }}vec2<f32>(sum_of(2u * i), sum_of(odd)));
{% endif %}
}
