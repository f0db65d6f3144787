// Copy a strided tensor of up to five dims into a dense one, bit by bit.
//
//   x  (n0, n1, n2, n3, kept), any strides, elements of 1, 2, 4 or 8 bytes
//   y  (n0, n1, n2, n3, n4), contiguous; columns from `kept` on are zeros
//
// One thread owns one word of y (two words for elements of 8 bytes), so that elements smaller than a word meet no race.
//
// A tensor larger than a binding is copied in boxes, one dispatch each, low <= coordinates < high. A dispatch sees `count`
// elements of y from its element `origin` on, and of x what lies from its element `skipped` on; what is outside of the box
// stays as it is.
//
// variables: bytes, of an element; boxed
{% set bits = 8 * bytes %}
{% set per_word = 4 // bytes if bytes < 4 else 1 %}
{% set dims = range(5) %}
{{ input("x", "u%d" % bits, 1) }}
{{ output("y", "u%d" % bits, per_word) }}
{{ params("n1: u32, n2: u32, n3: u32, n4: u32, kept: u32, s0: u32, s1: u32, s2: u32, s3: u32, s4: u32, count: u32"
          ~ (", origin: u32, skipped: u32, low0: u32, low1: u32, low2: u32, low3: u32, low4: u32, high0: u32, high1: u32,"
             ~ "high2: u32, high3: u32, high4: u32" if boxed else "")) }}

struct Source {
    element: u32,
    kept: bool,  // else it is a zero
    inside: bool,  // of the box
}

fn source_of(element: u32) -> Source {
    let c4 = element % params.n4;
    var rest = element / params.n4;
    let c3 = rest % params.n3;
    rest /= params.n3;
    let c2 = rest % params.n2;
    rest /= params.n2;
    let c1 = rest % params.n1;
    let c0 = rest / params.n1;
    let at = c0 * params.s0 + c1 * params.s1 + c2 * params.s2 + c3 * params.s3 + c4 * params.s4;
{% if boxed %}
    let inside = {% for d in dims %}c{{ d }} >= params.low{{ d }} && c{{ d }} < params.high{{ d }}{{ " && " if not loop.last }}{% endfor %};
    // Modulo 2^32: the difference is small even where its parts are not.
    return Source(at - params.skipped, c4 < params.kept, inside);
{% else %}
    return Source(at, c4 < params.kept, true);
{% endif %}
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let word = (group.x + group.y * groups.x) * 256u + thread;
    if (word * {{ per_word }}u >= params.count) { return; }
    var bits = {{ "load_y(word)" if boxed else "vec2<u32>(0u)" if bytes == 8 else "0u" }};
{% if per_word == 1 %}
    let source = source_of({{ "params.origin + " if boxed }}word);
    if (source.inside) {
        if (source.kept) { bits = load_x(source.element); } else { bits = {{ "vec2<u32>(0u)" if bytes == 8 else "0u" }}; }
    }
{% else %}
    for (var part = 0u; part < {{ per_word }}u; part++) {
        let element = word * {{ per_word }}u + part;
        let source = source_of({{ "params.origin + " if boxed }}element);
        if (element < params.count && source.inside) {
{% if boxed %}
            bits &= ~({{ 2**bits - 1 }}u << ({{ bits }}u * part));
{% endif %}
            if (source.kept) { bits |= load_x(source.element) << ({{ bits }}u * part); }
        }
    }
{% endif %}
    store_y(word, bits);
}
