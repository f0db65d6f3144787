// Writes the words that two rows of an odd number of 16-bit elements share; rows.wgsl leaves them out.
//
//   seams  (rows), the last element of rows 0, 2, …, the first of rows 1, 3, …
//   y      (rows, width); the word with the end of row 2i and the start of row 2i + 1 is written
//
// variables: dtype
{{ input("seams", "f32", 1) }}
{{ output("y", dtype, 2) }}
{{ params("rows: u32, width: u32") }}

@compute @workgroup_size(256) {{ main() }}
    let even = (workgroup * 256u + thread) * 2u;
    if (even >= params.rows) { return; }
    var halves = vec2<f32>(load_seams(even), 0.0); // past the last row there is room for half a word
    if (even + 1u < params.rows) { halves.y = load_seams(even + 1u); }
    store_y(((even + 1u) * params.width - 1u) >> 1u, halves);
}
