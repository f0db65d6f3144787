// Copy a strided tensor of up to five dims into a dense one, bit by bit.
//
//   x  (n0, n1, n2, n3, kept), any strides, elements of 1, 2, 4 or 8 bytes
//   y  (n0, n1, n2, n3, n4), contiguous; columns from `kept` on are zeros
//
// One thread owns one word of y (two words for elements of 8 bytes), so that elements smaller than a word do not race.
//
// variables: bytes, of an element
{% import "strided.wgsl" as strided %}
{% set bits = 8 * bytes %}
{% set per_word = 4 // bytes if bytes < 4 else 1 %}
{{ input("x", "u%d" % bits, 1) }}
{{ output("y", "u%d" % bits, per_word) }}
{{ params("n1: u32, n2: u32, n3: u32, n4: u32, kept: u32, s0: u32, s1: u32, s2: u32, s3: u32, s4: u32, count: u32") }}

fn source_of(element: u32) -> {{ "vec2<u32>" if bytes == 8 else "u32" }} {
{{ strided.coordinates("element") }}
    if (element >= params.count || c4 >= params.kept) { return {{ "vec2<u32>(0u)" if bytes == 8 else "0u" }}; }
    return load_x({{ strided.place("s") }});
}

@compute @workgroup_size(256) {{ main() }}
    let word = workgroup * 256u + thread;
    if (word * {{ per_word }}u >= params.count) { return; }
{% if per_word == 1 %}
    store_y(word, source_of(word));
{% else %}
    var packed = 0u;
{% for i in range(per_word) %}
    packed |= source_of(word * {{ per_word }}u + {{ i }}u) << {{ bits * i }}u;
{% endfor %}
    store_y(word, packed);
{% endif %}
}
