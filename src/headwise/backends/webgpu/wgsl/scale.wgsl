// x = x · factor in place, rounded once; a factor of 1 leaves x as it is.
//
//   x (4 · vectors,), factor (1,) float32
//
// variables: dtype (of x)
{{ input("factor", "f32", 1) }}
{{ output("x", dtype, 4) }}
{{ params("vectors: u32") }}

@compute @workgroup_size(256) {{ main() }}
    let i = workgroup * 256u + thread;
    let by = load_factor(0u);
    // By its bits: a comparison of numbers may take NaN for equal.
    if (i < params.vectors && bitcast<u32>(by) != 0x3f800000u) { store_x(i, load_x(i) * by); }
}
