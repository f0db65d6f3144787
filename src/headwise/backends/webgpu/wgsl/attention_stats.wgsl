// Statistics of a row for the backward kernels of attention (Dao, "FlashAttention-2", 2023):
//
//   delta = rowsum(dO ∘ O) - dlse
//   stats (pairs of words: two for each batch entry, which attention_aux.wgsl writes; then B · Hq · Sq pairs (lse, delta))
//
//   result, grad (B, Hq, Sq, Dv) any strides; lse, grad_lse (B, Hq, Sq) any strides
//
// The lse of a row that saw nothing is -inf: it becomes a large number, so that all weights of the row are 0, and delta is 0.
// Where O is 0, dO is ignored, even NaN: O is 0 throughout in a row that saw nothing but a sink.
// {{ lanes }} threads share a row, {{ 256 // lanes }} rows a workgroup.
//
// variables: dtype, dlse (bool), vectors (of four, in a row), lanes
{{ input("result", dtype, 4) }}
{{ input("grad", dtype, 4) }}
{{ input("lse", "u32", 1) }}
{% if dlse %}
{{ input("grad_lse", "f32", 1) }}
{% endif %}
{{ output("stats", "u32", 2) }}
{{ params("batch: u32, heads: u32, q_length: u32, result_b: u32, result_h: u32, result_s: u32, grad_b: u32, grad_h: u32, grad_s: u32, lse_b: u32, lse_h: u32, lse_s: u32, dlse_b: u32, dlse_h: u32, dlse_s: u32, stats_first: u32") }}

const EMPTY_LSE = 1e30f;
const NEGATIVE_INFINITY_BITS = 0xff800000u;

var<workgroup> sums: array<f32, 256>;

@compute @workgroup_size(256) {{ main() }}
    let rows = params.batch * params.heads * params.q_length;
    let own = workgroup * {{ 256 // lanes }}u + thread / {{ lanes }}u;
    let lane = thread % {{ lanes }}u;
    let row = min(own, max(rows, 1u) - 1u);
    let query = row % params.q_length;
    let head = row / params.q_length % params.heads;
    let batch = row / params.q_length / params.heads;
    let result_at = batch * params.result_b + head * params.result_h + query * params.result_s;
    let grad_at = batch * params.grad_b + head * params.grad_h + query * params.grad_s;
    var sum = 0.0;
    for (var i = lane; i < {{ vectors }}u; i += {{ lanes }}u) {
        let o = load_result(result_at + i);
        sum += dot(o, select(load_grad(grad_at + i), vec4<f32>(), o == vec4<f32>()));
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
}
