// Copy memory as it lies, sixteen bytes per thread: the measure of what memory-bound kernels can reach.
{{ input("x", "u32", 4) }}
{{ output("y", "u32", 4) }}
{{ params("vectors: u32") }}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let i = (group.x + group.y * groups.x) * 256u + thread;
    if (i < params.vectors) {
        store_y(i, load_x(i));
    }
}
