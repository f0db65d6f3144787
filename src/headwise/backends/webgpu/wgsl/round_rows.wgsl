// y = x, rounded: float32 sums into the rows of a result.
//
//   x, y  (rows, columns), any stride of rows, all counted in vectors of four
//
// variables: dtype (of y)
{{ input("x", "f32", 4) }}
{{ output("y", dtype, 4) }}
{{ params("rows: u32, columns: u32, x_stride: u32, y_stride: u32") }}

@compute @workgroup_size(256) {{ main() }}
    let i = workgroup * 256u + thread;
    let row = i / params.columns;
    if (row < params.rows) { store_y(row * params.y_stride + i % params.columns, load_x(row * params.x_stride + i % params.columns)); }
}
