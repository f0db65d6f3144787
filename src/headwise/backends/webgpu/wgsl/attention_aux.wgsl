// kv_lengths and sink of a call, in any dtype and stride, side by side in one buffer: kernels may bind eight, and a call
// with everything has nine.
//
//   aux  (B lengths as i32, -1 for nonsense; then Hq sinks as f32)
//
// variables: lengths ("" or dtype), sink ("" or dtype)
{% if lengths %}
{{ input("lengths", lengths, 1) }}
{% endif %}
{% if sink %}
{{ input("sink", sink, 1) }}
{% endif %}
{{ output("aux", "u32", 1) }}
{{ params("batch: u32, heads: u32, longest: i32, length_stride: u32, sink_stride: u32") }}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(num_workgroups) workgroups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let i = (workgroup.x + workgroup.y * workgroups.x) * 64u + thread;
{% if lengths %}
    if (i < params.batch) {
        let length = load_lengths(i * params.length_stride);
        store_aux(i, bitcast<u32>(select(length, -1, length < 0 || length > params.longest)));
    }
{% endif %}
{% if sink %}
    if (i < params.heads) {
        store_aux(i + params.batch, bitcast<u32>(load_sink(i * params.sink_stride)));
    }
{% endif %}
}
