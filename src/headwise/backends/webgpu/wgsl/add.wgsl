// y = a + b, elementwise over dense tensors of one layout; sums in float32, rounded once.
//
// variables: dtype
{{ input("a", dtype, 4) }}
{{ input("b", dtype, 4) }}
{{ output("y", dtype, 4) }}
{{ params("vectors: u32") }}

@compute @workgroup_size(256) {{ main() }}
    let i = workgroup * 256u + thread;
    if (i < params.vectors) { store_y(i, load_a(i) + load_b(i)); }
}
