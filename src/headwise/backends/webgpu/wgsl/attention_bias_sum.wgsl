// dbias = Σ parts, share after share, rounded once.
//
//   parts  (shares, vectors of four) f32   dbias (vectors of four)
//
// variables: dtype
{{ input("parts", "f32", 4) }}
{{ output("dbias", dtype, 4) }}
{{ params("vectors: u32, shares: u32") }}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(num_workgroups) workgroups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let i = (workgroup.x + workgroup.y * workgroups.x) * 256u + thread;
    if (i >= params.vectors) { return; }
    var sum = vec4<f32>();
    for (var share = 0u; share < params.shares; share++) { sum += load_parts(share * params.vectors + i); }
    store_dbias(i, sum);
}
