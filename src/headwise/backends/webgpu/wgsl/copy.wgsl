// Copy a strided tensor of up to five dims into a dense one, bit by bit.
//
//   x  (n0, n1, n2, n3, kept), any strides, elements of 1, 2, 4 or 8 bytes
//   y  (n0, n1, n2, n3, n4), contiguous; columns from `kept` on are zeros
//
// One thread owns one word of y (two words for elements of 8 bytes), so that elements smaller than a word meet no race.
//
// variables: bytes, of an element
{% set bits = 8 * bytes %}
{% set per_word = 4 // bytes if bytes < 4 else 1 %}
{{ input("x", "u%d" % bits, 1) }}
{{ output("y", "u%d" % bits, per_word) }}
{{ params("n1: u32, n2: u32, n3: u32, n4: u32, kept: u32, s0: u32, s1: u32, s2: u32, s3: u32, s4: u32, count: u32") }}

fn source_of(element: u32) -> u32 {
    let c4 = element % params.n4;
    var rest = element / params.n4;
    let c3 = rest % params.n3;
    rest /= params.n3;
    let c2 = rest % params.n2;
    rest /= params.n2;
    let c1 = rest % params.n1;
    let c0 = rest / params.n1;
    return c0 * params.s0 + c1 * params.s1 + c2 * params.s2 + c3 * params.s3 + c4 * params.s4;
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let word = (group.x + group.y * groups.x) * 256u + thread;
    if (word * {{ per_word }}u >= params.count) { return; }
{% if per_word == 1 %}
    var value = load_x(source_of(word));
    if (word % params.n4 >= params.kept) { value = {{ "vec2<u32>(0u)" if bytes == 8 else "0u" }}; }
    store_y(word, value);
{% else %}
    var word_bits = 0u;
    for (var part = 0u; part < {{ per_word }}u; part++) {
        let element = word * {{ per_word }}u + part;
        if (element < params.count && element % params.n4 < params.kept) {
            word_bits |= load_x(source_of(element)) << ({{ bits }}u * part);
        }
    }
    store_y(word, word_bits);
{% endif %}
}
