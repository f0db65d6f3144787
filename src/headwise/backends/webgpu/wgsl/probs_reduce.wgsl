// Sums over the broadcast dims of a bias, and over the rows of a result that show the same row of q.
//
//   x     (B, H, L, K) float32, any strides; L are rows of q, or, `matched`, lines that each show one
//   stats records of probs.wgsl, whose first word says which row of q a line shows
//   y     (chunks, N) float32, N the elements of (1 or B, 1 or H, 1 or rows of q, 1 or K): each chunk sums some of the terms
//
// A thread owns one element where y has all columns, a workgroup one element where it sums over them too.
//
// variables: matched, over_columns
{{ input("x", "f32", 1) }}
{% if matched %}
{{ input("stats", "u32", 4) }}
{% endif %}
{{ output("y", "f32", 1) }}
{{ params("programs: u32, blocks: u32, chunks: u32, elements: u32, y_h: u32, y_q: u32, y_k: u32, some_b: u32, some_h: u32,
           some_q: u32, all_b: u32, all_h: u32, all_q: u32, columns: u32, x_b: u32, x_h: u32, x_q: u32, x_k: u32") }}

{% if over_columns %}
var<workgroup> sums: array<f32, 64>;
{% endif %}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(num_workgroups) workgroups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let program = workgroup.x + workgroup.y * workgroups.x;
    if (program >= params.programs) { return; }
    let chunk = program / params.blocks;
{% if over_columns %}
    let element = program % params.blocks;
{% else %}
    let element = min(program % params.blocks * 64u + thread, params.elements - 1u);
{% endif %}
    let k = element % params.y_k;
    let q = element / params.y_k % params.y_q;
    let h = element / params.y_k / params.y_q % params.y_h;
    let b = element / params.y_k / params.y_q / params.y_h;
    // Terms are the entries of x that belong to an element: all_* of a dim that is summed over, one of another.
    let terms = params.all_b * params.all_h * params.all_q;
    let share = (terms + params.chunks - 1u) / params.chunks;
    var sum = 0.0;
    for (var term = chunk * share; term < min((chunk + 1u) * share, terms); term++) {
        let line = q * params.some_q + term % params.all_q;
{% if matched %}
        if (load_stats(2u * line).x != q) { continue; }
{% endif %}
        let of_h = h * params.some_h + term / params.all_q % params.all_h;
        let of_b = b * params.some_b + term / params.all_q / params.all_h;
        let at = of_b * params.x_b + of_h * params.x_h + line * params.x_q;
{% if over_columns %}
        for (var i = thread; i < params.columns; i += 64u) { sum += load_x(at + i * params.x_k); }
{% else %}
        sum += load_x(at + k * params.x_k);
{% endif %}
    }
{% if over_columns %}
    sums[thread] = sum;
    workgroupBarrier();
    if (thread == 0u) {
        for (var i = 1u; i < 64u; i++) { sum += sums[i]; }
        store_y(chunk * params.elements + element, sum);
    }
{% else %}
    if (program % params.blocks * 64u + thread < params.elements) { store_y(chunk * params.elements + element, sum); }
{% endif %}
}
