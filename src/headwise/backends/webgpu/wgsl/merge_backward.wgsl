// The gradients of one part of merge.wgsl.
//
//   w = exp(lse_i - lse)        d out_i = w g        d lse_i = w (g · (out_i - out) + g_lse)
//
//   part_out, part_lse, grad, grad_lse   (n0, n1, n2, Dv) and (n0, n1, n2), any strides
//   out, lse                             the merged result in float32, contiguous
//   d_out, d_lse                         contiguous
//
// Sixteen threads per row; their sums are added in workgroup memory, in a fixed order.
//
// variables: dtype
{{ input("part_out", dtype, 4) }}
{{ input("part_lse", "f32", 1) }}
{{ input("grad", dtype, 4) }}
{{ input("grad_lse", "f32", 1) }}
{{ input("out", "f32", 4) }}
{{ input("lse", "f32", 1) }}
{{ output("d_out", dtype, 4) }}
{{ output("d_lse", "f32", 1) }}
{{ params("rows: u32, columns: u32, n1: u32, n2: u32, o_0: u32, o_1: u32, o_2: u32, l_0: u32, l_1: u32, l_2: u32,
           g_0: u32, g_1: u32, g_2: u32, gl_0: u32, gl_1: u32, gl_2: u32") }}

const LOG2E = 1.4426950408889634f;

var<workgroup> sums: array<f32, 128>;

@compute @workgroup_size(128) {{ main() }}
    let first = workgroup * 8u;
    if (first >= params.rows) { return; }
    let row = min(first + thread / 16u, params.rows - 1u);
    let inside = first + thread / 16u < params.rows;
    let lane = thread % 16u;
    let i2 = row % params.n2;
    let i1 = row / params.n2 % params.n1;
    let i0 = row / params.n2 / params.n1;
    let part_lse = load_part_lse(i0 * params.l_0 + i1 * params.l_1 + i2 * params.l_2);
    // A part that saw nothing has weight 0, even if its rows were never written.
    let there = bitcast<u32>(part_lse) != 0xff800000u;
    let weight = select(0.0, exp2((part_lse - load_lse(row)) * LOG2E), there);
    let o_at = i0 * params.o_0 + i1 * params.o_1 + i2 * params.o_2;
    let g_at = i0 * params.g_0 + i1 * params.g_1 + i2 * params.g_2;
    var moved = 0.0;
    for (var c = lane; c < params.columns; c += 16u) {
        let g = load_grad(g_at + c);
        if (there) { moved += dot(g, load_part_out(o_at + c) - load_out(row * params.columns + c)); }
        if (inside) { store_d_out(row * params.columns + c, select(vec4<f32>(), weight * g, there)); }
    }
    sums[thread] = moved;
    workgroupBarrier();
    if (lane == 0u && inside) {
        for (var i = 1u; i < 16u; i++) { moved += sums[thread + i]; }
        let g_lse = load_grad_lse(i0 * params.gl_0 + i1 * params.gl_1 + i2 * params.gl_2);
        store_d_lse(row, select(0.0, weight * (moved + g_lse), there));
    }
}
