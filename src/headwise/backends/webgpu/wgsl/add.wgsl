// y = a + b, elementwise over dense tensors of one layout; sums in float32, rounded once.
//
// variables: dtype
{{ input("a", dtype, 4) }}
{{ input("b", dtype, 4) }}
{{ output("y", dtype, 4) }}
{{ params("vectors: u32") }}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let i = (group.x + group.y * groups.x) * 256u + thread;
    if (i < params.vectors) {
        store_y(i, load_a(i) + load_b(i));
    }
}
