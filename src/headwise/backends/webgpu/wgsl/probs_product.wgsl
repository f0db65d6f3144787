// The matmuls in the backward of attention probabilities: out = d · k, or out = dᵀ · q over all rows of a key head.
//
//   d       (B, Hq, count, columns): gradients of q·k, columns a multiple of four
//   x       rows of k (B, Hk, Sk, D), or of q (B, Hq, Sq, D)
//   stats   records of probs.wgsl, whose first word says which row of q each row of d belongs to
//   before  float32, of out's shape, added to the result: the sums over rows of earlier dispatches
//   out     (B, Hq, count, D), or transposed (B, Hk, Sk, D)
//
// Tiles of 64 × 64 over 16 terms at a time; a thread owns 4 rows and one vector of four columns.
//
// Keys that no query sees, and rows that see nothing, may hold NaN, and their d is 0: numbers that are not finite are read as
// 0. If they were seen, d is NaN already.
//
// variables: dtype, to (dtype of out), transposed, adds (bool: there is before)
{{ input("d", dtype, 4) }}
{{ input("x", dtype, 4) }}
{% if transposed %}
{{ input("stats", "u32", 4) }}
{% endif %}
{% if adds %}
{{ input("before", "f32", 4) }}
{% endif %}
{{ output("out", to, 4) }}
{{ params("workgroups: u32, row_tiles: u32, column_tiles: u32, heads: u32, group: u32, count: u32, k_length: u32,
           columns4: u32, d4: u32, x_b: u32, x_h: u32, x_s: u32") }}

{% if transposed %}
var<workgroup> d_tile: array<vec4<f32>, 256>; // [term, 16 vectors of rows]
{% else %}
var<workgroup> d_tile: array<vec4<f32>, 320>; // [row, 4 vectors of terms], and one of padding against bank conflicts
{% endif %}
var<workgroup> x_tile: array<vec4<f32>, 256>; // [term, 16 vectors of columns]

fn finite(value: vec4<f32>) -> vec4<f32> {
    let exponent = vec4<u32>(0x7f800000u);
    return select(value, vec4<f32>(), (bitcast<vec4<u32>>(value) & exponent) == exponent);
}

@compute @workgroup_size(256) {{ main() }}
    if (workgroup >= params.workgroups) { return; }
    let column_tile = workgroup % params.column_tiles;
    let first = workgroup / params.column_tiles % params.row_tiles * 64u;
    let matrix = workgroup / params.column_tiles / params.row_tiles; // (batch, query head), or (batch, key head)
    let own_column = thread % 16u;
    let own_row = thread / 16u;
    let column = column_tile * 16u + own_column;
{% if transposed %}
    let rows = params.k_length;
    let key_heads = params.heads / params.group;
    let batch = matrix / key_heads;
    let lines = params.group * params.count; // rows of d of this key head, one after the other
    let first_line = matrix * lines;
    let terms = lines;
{% else %}
    let rows = params.count;
    let batch = matrix / params.heads;
    let key_head = matrix % params.heads / params.group;
    let terms = params.k_length;
{% endif %}
    var sum_0 = vec4<f32>();
    var sum_1 = vec4<f32>();
    var sum_2 = vec4<f32>();
    var sum_3 = vec4<f32>();
    for (var start = 0u; start < terms; start += 16u) {
        let term = start + own_row; // whose row of x this thread loads
        let there = term < terms && column < params.d4;
        var brought = vec4<f32>();
        workgroupBarrier();
{% if transposed %}
        let line = min(term, terms - 1u);
        let rows4 = first / 4u + own_column;
        var of_d = vec4<f32>();
        if (term < terms && rows4 < params.columns4) { of_d = load_d((first_line + line) * params.columns4 + rows4); }
        d_tile[thread] = of_d;
        if (there) {
            let head = matrix % key_heads * params.group + line / params.count;
            let row = load_stats(2u * (first_line + line)).x;
            brought = finite(load_x(batch * params.x_b + head * params.x_h + row * params.x_s + column));
        }
{% else %}
        let line = min(first + thread / 4u, rows - 1u);
        let terms4 = start / 4u + thread % 4u;
        var of_d = vec4<f32>();
        if (terms4 < params.columns4) { of_d = load_d((matrix * rows + line) * params.columns4 + terms4); }
        d_tile[thread / 4u * 5u + thread % 4u] = of_d;
        if (there) { brought = finite(load_x(batch * params.x_b + key_head * params.x_h + term * params.x_s + column)); }
{% endif %}
        x_tile[thread] = brought;
        workgroupBarrier();
{% if transposed %}
        for (var i = 0u; i < 16u; i++) {
            let d = d_tile[i * 16u + own_row];
            let x = x_tile[i * 16u + own_column];
{% for r in range(4) %}
            sum_{{ r }} = fma(vec4<f32>(d[{{ r }}]), x, sum_{{ r }});
{% endfor %}
        }
{% else %}
        for (var i = 0u; i < 4u; i++) {
            let x_0 = x_tile[i * 64u + own_column];
            let x_1 = x_tile[i * 64u + 16u + own_column];
            let x_2 = x_tile[i * 64u + 32u + own_column];
            let x_3 = x_tile[i * 64u + 48u + own_column];
{% for r in range(4) %}
            let d_{{ r }} = d_tile[(own_row + {{ 16 * r }}u) * 5u + i];
            sum_{{ r }} = fma(vec4<f32>(d_{{ r }}.x), x_0, sum_{{ r }});
            sum_{{ r }} = fma(vec4<f32>(d_{{ r }}.y), x_1, sum_{{ r }});
            sum_{{ r }} = fma(vec4<f32>(d_{{ r }}.z), x_2, sum_{{ r }});
            sum_{{ r }} = fma(vec4<f32>(d_{{ r }}.w), x_3, sum_{{ r }});
{% endfor %}
        }
{% endif %}
    }
    if (column < params.d4) {
{% for r in range(4) %}
        write(matrix * rows, first + {{ "own_row * 4u + %du" % r if transposed else "own_row + %du" % (16 * r) }}, rows, column, sum_{{ r }});
{% endfor %}
    }
}

fn write(before: u32, row: u32, rows: u32, column: u32, sum: vec4<f32>) {
    if (row >= rows) { return; }
    let at = (before + row) * params.d4 + column;
    store_out(at, sum{{ " + load_before(at)" if adds }});
}
