// Copy contiguous memory, sixteen bytes per thread: the speed that memory-bound kernels can reach.
{{ input("x", "u32", 4) }}
{{ output("y", "u32", 4) }}
{{ params("vectors: u32") }}

@compute @workgroup_size(256) {{ main() }}
    let i = workgroup * 256u + thread;
    if (i < params.vectors) { store_y(i, load_x(i)); }
}
