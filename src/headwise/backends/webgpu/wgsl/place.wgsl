// Copy x into a part of y along one dim: y[outer, start + step · i, inner] = x[outer, i, inner]; the rest of y stays.
//
//   x  (outer, count, inner)   y  (outer, n, inner), both contiguous, elements of 1, 2, 4 or 8 bytes
//
// One thread owns one word of y: it puts elements smaller than a word into what is there.
//
// variables: bytes, of an element
{% set bits = 8 * bytes %}
{% set per_word = 4 // bytes if bytes < 4 else 1 %}
{{ input("x", "u%d" % bits, 1) }}
{{ output("y", "u%d" % bits, per_word) }}
{{ params("y_outer: u32, inner: u32, x_count: u32, first: u32, step: u32, count: u32") }}

// Where in x an element of y comes from; 0xffffffff: from nowhere.
fn source_of(element: u32) -> u32 {
    let outer = element / params.y_outer;
    let at = element % params.y_outer;
    let place = at / params.inner;
    if (place < params.first || (place - params.first) % params.step != 0u) { return 0xffffffffu; }
    let i = (place - params.first) / params.step;
    if (i >= params.x_count) { return 0xffffffffu; }
    return (outer * params.x_count + i) * params.inner + at % params.inner;
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let word = (group.x + group.y * groups.x) * 256u + thread;
    if (word * {{ per_word }}u >= params.count) { return; }
{% if per_word == 1 %}
    let source = source_of(word);
    if (source != 0xffffffffu) { store_y(word, load_x(source)); }
{% else %}
    var word_bits = load_y(word);
    for (var part = 0u; part < {{ per_word }}u; part++) {
        let element = word * {{ per_word }}u + part;
        let source = source_of(element);
        if (element < params.count && source != 0xffffffffu) {
            let shift = {{ bits }}u * part;
            word_bits = (word_bits & ~({{ "0xffu" if bytes == 1 else "0xffffu" }} << shift)) | (load_x(source) << shift);
        }
    }
    store_y(word, word_bits);
{% endif %}
}
