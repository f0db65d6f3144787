// dbias = Σ partials, split after split, rounded once.
//
//   partials  (splits, vectors of four) f32   dbias (vectors of four)
//
// variables: dtype
{{ input("partials", "f32", 4) }}
{{ output("dbias", dtype, 4) }}
{{ params("vectors: u32, splits: u32") }}

@compute @workgroup_size(256) {{ main() }}
    let i = workgroup * 256u + thread;
    if (i >= params.vectors) { return; }
    var sum = vec4<f32>();
    for (var split = 0u; split < params.splits; split++) { sum += load_partials(split * params.vectors + i); }
    store_dbias(i, sum);
}
