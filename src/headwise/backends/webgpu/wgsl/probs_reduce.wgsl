// Sums over the broadcast dims of a bias, and over the lines of a result that belong to the same row of q.
//
//   x     (B, H, L, K) float32, any strides; L are rows of q, or, if `matched`, lines that each belong to one
//   stats records of probs.wgsl, whose first word is the row of q of a line
//   y     (chunks, N) float32, N the elements of (1 or B, 1 or H, 1 or rows of q, 1 or K): each chunk sums some of the terms
//
// A thread owns one element if y has all columns; a workgroup owns one if columns are summed too.
//
// variables: matched, over_columns
{{ input("x", "f32", 1) }}
{% if matched %}
{{ input("stats", "u32", 4) }}
{% endif %}
{{ output("y", "f32", 1) }}
{{ params("workgroups: u32, blocks: u32, chunks: u32, elements: u32, y_h: u32, y_q: u32, y_k: u32, some_b: u32, some_h: u32,
           some_q: u32, all_b: u32, all_h: u32, all_q: u32, columns: u32, x_b: u32, x_h: u32, x_q: u32, x_k: u32") }}

{% if over_columns %}
var<workgroup> sums: array<f32, 64>;
{% endif %}

@compute @workgroup_size(64) {{ main() }}
    if (workgroup >= params.workgroups) { return; }
    let chunk = workgroup / params.blocks;
{% if over_columns %}
    let element = workgroup % params.blocks;
{% else %}
    let element = min(workgroup % params.blocks * 64u + thread, params.elements - 1u);
{% endif %}
    let k = element % params.y_k;
    let q = element / params.y_k % params.y_q;
    let h = element / params.y_k / params.y_q % params.y_h;
    let b = element / params.y_k / params.y_q / params.y_h;
    // Terms are the entries of x that an element sums: all_* is the size of a dim that is summed over, and 1 otherwise.
    let terms = params.all_b * params.all_h * params.all_q;
    let each = (terms + params.chunks - 1u) / params.chunks;
    var sum = 0.0;
    for (var term = chunk * each; term < min((chunk + 1u) * each, terms); term++) {
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
    if (workgroup % params.blocks * 64u + thread < params.elements) { store_y(chunk * params.elements + element, sum); }
{% endif %}
}
