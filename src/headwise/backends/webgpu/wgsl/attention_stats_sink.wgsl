// The gradient of the sinks:  dsink_h = -Σ exp(sink_h - lse) · delta   over all rows of head h, batch after batch.
//
//   stats        see attention_stats.wgsl. A row that sees nothing has lse = sink, and adds dlse; one that does not exist has
//                delta 0.
//   sink, dsink  (Hq)
//
// One workgroup per pair of heads (16-bit results are written in pairs): each thread takes every 256th row, and a tree adds
// up the threads.
//
// variables: dtype, lengths (bool)
{{ input("sink", dtype, 1) }}
{{ input("stats", "u32", 2) }}
{{ output("dsink", dtype, 2) }}
{{ params("batch: u32, heads: u32, q_length: u32, sink_stride: u32") }}

const LOG2E = 1.4426950408889634;

var<workgroup> sums: array<vec2<f32>, 256>;

fn not_a_number() -> f32 { var bits = 0x7fc00000u; return bitcast<f32>(bits); }

fn of_head(head: u32, thread: u32) -> f32 {
    let sink = load_sink(head * params.sink_stride);
    var sum = 0.0;
    for (var batch = 0u; batch < params.batch; batch++) {
{% if lengths %}
        if (bitcast<i32>(load_stats(2u * batch).x) < 0) { return not_a_number(); }
{% endif %}
        let first = 2u * params.batch + (batch * params.heads + head) * params.q_length;
        for (var row = thread; row < params.q_length; row += 256u) {
            let own = bitcast<vec2<f32>>(load_stats(first + row));
            sum -= exp2((sink - own.x) * LOG2E) * own.y;
        }
    }
    return sum;
}

@compute @workgroup_size(256) {{ main() }}
    let pair = workgroup;
    let head = pair * 2u;
    if (head >= params.heads) { return; }
    sums[thread] = vec2<f32>(of_head(head, thread), of_head(min(head + 1u, params.heads - 1u), thread));
    workgroupBarrier();
    for (var reach = 128u; reach > 0u; reach /= 2u) {
        if (thread < reach) { sums[thread] += sums[thread + reach]; }
        workgroupBarrier();
    }
    if (thread == 0u) { store_dsink(pair, sums[0]); }
}
