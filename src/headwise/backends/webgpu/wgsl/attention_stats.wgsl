// What the backward kernels of attention need to know of a row beside its tensors (Dao, "FlashAttention-2", 2023):
//
//   delta = rowsum(dO ∘ O) - dlse
//   stats (one pair per batch entry, (kv_lengths[b] or -1 for nonsense, 0); then B · Hq · Sq pairs (lse, delta))
//
//   out, grad (B, Hq, Sq, Dv) any strides; lse, grad_lse (B, Hq, Sq) any strides
//
// A row that sees nothing has lse -inf: it is kept as a large number, so that all its weights are 0, with a delta of 0.
// {{ lanes }} threads share a row, {{ 256 // lanes }} rows a workgroup.
//
// variables: dtype, dlse (bool), lengths ("" or dtype), vectors (of four, in a row), lanes
{{ input("result", dtype, 4) }}
{{ input("grad", dtype, 4) }}
{{ input("lse", "u32", 1) }}
{% if dlse %}
{{ input("grad_lse", "f32", 1) }}
{% endif %}
{% if lengths %}
{{ input("lengths", lengths, 1) }}
{% endif %}
{{ output("stats", "u32", 2) }}
{{ params("batch: u32, heads: u32, q_length: u32, k_length: i32, result_b: u32, result_h: u32, result_s: u32, grad_b: u32, grad_h: u32, grad_s: u32, lse_b: u32, lse_h: u32, lse_s: u32, dlse_b: u32, dlse_h: u32, dlse_s: u32, length_stride: u32, length_count: u32, stats_first: u32") }}

const EMPTY_LSE = 1e30f;
const NEGATIVE_INFINITY_BITS = 0xff800000u;

var<workgroup> sums: array<f32, 256>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(num_workgroups) workgroups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let rows = params.batch * params.heads * params.q_length;
    let place = workgroup.x + workgroup.y * workgroups.x;
    let own = place * {{ 256 // lanes }}u + thread / {{ lanes }}u;
    let lane = thread % {{ lanes }}u;
    let row = min(own, max(rows, 1u) - 1u);
    let queries = max(params.q_length, 1u);
    let query = row % queries;
    let head = row / queries % params.heads;
    let batch = row / queries / params.heads;
    let result_at = batch * params.result_b + head * params.result_h + query * params.result_s;
    let grad_at = batch * params.grad_b + head * params.grad_h + query * params.grad_s;
    var sum = 0.0;
    for (var i = lane; i < {{ vectors }}u; i += {{ lanes }}u) {
        sum += dot(load_result(result_at + i), load_grad(grad_at + i));
    }
    sums[thread] = sum;
    workgroupBarrier();
    if (lane == 0u && own < rows) {
        var delta = 0.0;
        for (var i = 0u; i < {{ lanes }}u; i++) { delta += sums[thread + i]; }
{% if dlse %}
        delta -= load_grad_lse(batch * params.dlse_b + head * params.dlse_h + query * params.dlse_s);
{% endif %}
        let lse = load_lse(batch * params.lse_b + head * params.lse_h + query * params.lse_s);
        let empty = lse == NEGATIVE_INFINITY_BITS;
        store_stats(params.stats_first + own, vec2<u32>(select(lse, bitcast<u32>(EMPTY_LSE), empty), select(bitcast<u32>(delta), 0u, empty)));
    }
{% if lengths %}
    // The first workgroup has the lengths as well.
    if (place == 0u) {
        for (var i = thread; i < params.length_count; i += 256u) {
            let length = load_lengths(i * params.length_stride);
            let bad = length < 0 || length > params.k_length;
            store_stats(i, vec2<u32>(bitcast<u32>(select(length, -1, bad)), 0u));
        }
    }
{% endif %}
}
