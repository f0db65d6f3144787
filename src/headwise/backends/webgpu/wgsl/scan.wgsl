// Running sums, products or extremes along a dim: y[…, i, …] = x[…, 0, …] + … + x[…, i, …].
//
//   x   (outer, length, inner), any strides of these three
//   y   contiguous, in numbers of 32 or 64 bits
//
// A workgroup has a line; a thread a piece of it, which it adds up, and again once it is known what comes before. No chain of
// sums is long: a piece is added up in blocks, the pieces before it in sixteens, and what comes before is added last.
//
// variables: x (dtype), y (dtype: "f32", "i32", "i64"), kind, op ("sum", "prod", "max", "min")
{% import "numbers.wgsl" as numbers with context %}
{% set T = numbers.TYPES[kind] %}
{{ input("x", numbers.stored(x), 1) }}
{{ output("y", numbers.stored(y), 1) }}
{{ params("lines: u32, length: u32, inner: u32, x_outer: u32, x_along: u32, x_inner: u32, piece: u32") }}

// the functions that are used

const BLOCK = 16u;

var<workgroup> pieces: array<{{ T }}, 256>;
var<workgroup> sixteens: array<{{ T }}, 16>;

fn joined(a: {{ T }}, b: {{ T }}) -> {{ T }} {
    return {{ {"sum": "long_add(a, b)", "prod": "long_mul(a, b)", "max": "long_max(a, b)", "min": "long_min(a, b)"}[op] if kind == "l" else "a + b" if op == "sum" else "a * b" if op == "prod" else ("%s_of(a, b)" if kind == "f" else "%s(a, b)") % op }};
}

fn element(base: u32, i: u32) -> {{ T }} {
    let raw = load_x(base + i * params.x_along);
    return {{ numbers.taken("raw", x, kind) }};
}

@compute @workgroup_size(256) {{ main() }}
    if (workgroup >= params.lines) { return; }
    let outer = workgroup / params.inner;
    let inner = workgroup % params.inner;
    let base = outer * params.x_outer + inner * params.x_inner;
    let first = thread * params.piece;
    let end = min(first + params.piece, params.length);
    let nothing = {{ {"sum": {"f": "0.0", "i": "0", "l": "vec2<u32>(0u)"}, "prod": {"f": "1.0", "i": "1", "l": "vec2<u32>(1u, 0u)"}, "max": {"f": "-infinity()", "i": "(-2147483647 - 1)", "l": "vec2<u32>(0u, 0x80000000u)"}, "min": {"f": "infinity()", "i": "2147483647", "l": "vec2<u32>(0xffffffffu, 0x7fffffffu)"}}[op][kind] }};
    var state = nothing;
    for (var block = first; block < end; block += BLOCK) {
        var local = nothing;
        for (var i = block; i < min(block + BLOCK, end); i++) { local = joined(local, element(base, i)); }
        state = joined(state, local);
    }
    pieces[thread] = state;
    workgroupBarrier();
    state = nothing;
    for (var i = thread & ~15u; i < thread; i++) { state = joined(state, pieces[i]); }
    if (thread % 16u == 15u) { sixteens[thread / 16u] = joined(state, pieces[thread]); }
    workgroupBarrier();
    var before = nothing;
    for (var i = 0u; i < thread / 16u; i++) { before = joined(before, sixteens[i]); }
    before = joined(before, state);
    var blocks = nothing;
    for (var block = first; block < end; block += BLOCK) {
        var local = nothing;
        for (var i = block; i < min(block + BLOCK, end); i++) {
            local = joined(local, element(base, i));
            let sum = joined(before, joined(blocks, local));
            store_y((outer * params.length + i) * params.inner + inner, {{ numbers.given("sum", kind, y) }});
        }
        blocks = joined(blocks, local);
    }
}
