// Every word of y becomes `word`.
{{ output("y", "u32", 1) }}
{{ params("words: u32, word: u32") }}

@compute @workgroup_size(256) {{ main() }}
    let i = workgroup * 256u + thread;
    if (i < params.words) { store_y(i, params.word); }
}
