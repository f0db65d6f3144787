// y = x, rounded: rows of float32 that a result was summed up in, into the rows of the result.
//
//   x, y  (rows, columns), rows at any distance, all counted in vectors of four
//
// variables: dtype (of y)
{{ input("x", "f32", 4) }}
{{ output("y", dtype, 4) }}
{{ params("rows: u32, columns: u32, x_stride: u32, y_stride: u32") }}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let i = (group.x + group.y * groups.x) * 256u + thread;
    let row = i / params.columns;
    if (row < params.rows) { store_y(row * params.y_stride + i % params.columns, load_x(row * params.x_stride + i % params.columns)); }
}
