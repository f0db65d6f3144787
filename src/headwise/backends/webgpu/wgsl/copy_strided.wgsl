// Copy a strided tensor of up to five dims into another of its shape, bit by bit; memory between the elements of y stays as it is.
//
//   x, y  (n0, n1, n2, n3, n4), any strides, elements of 1, 2, 4 or 8 bytes
//
// One thread per element. Several threads may write to one word, so elements smaller than a word are written by atomics.
//
// variables: bytes, of an element
{% import "strided.wgsl" as strided %}
{% set bits = 8 * bytes %}
{{ input("x", "u%d" % bits, 1) }}
{{ scattered("y", "u%d" % bits) }}
{{ params("n1: u32, n2: u32, n3: u32, n4: u32, count: u32, x0: u32, x1: u32, x2: u32, x3: u32, x4: u32, y0: u32, y1: u32, y2: u32, y3: u32, y4: u32") }}

@compute @workgroup_size(256) {{ main() }}
    let element = workgroup * 256u + thread;
    if (element >= params.count) { return; }
{{ strided.coordinates("element") }}
    put_y({{ strided.place("y") }}, load_x({{ strided.place("x") }}));
}
