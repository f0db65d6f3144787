// Sums over the rows of a matrix, in a fixed order.
//
//   partials  (partial_count, vectors · 4)
//   sums      (slices, vectors · 4), the sums of `each` rows
//
// grid: (blocks of {{ across }} vectors of columns, slices). {{ 256 // across }} threads of a workgroup share a vector: they take the
// rows of the slice in turn, and a tree adds up their sums.
//
// variables: dtype (of sums), across
{% set down = 256 // across %}
{{ input("partials", "f32", 4) }}
{{ output("sums", dtype, 4) }}
{{ params("partial_count: u32, vectors: u32, each: u32") }}

var<workgroup> of_threads: array<vec4<f32>, 256>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let vector = group.x * {{ across }}u + thread % {{ across }}u;
    let column = min(vector, params.vectors - 1u);
    var sum = vec4<f32>(0.0);
    let end = min((group.y + 1u) * params.each, params.partial_count);
    var row = group.y * params.each + thread / {{ across }}u;
    for (; row + {{ 3 * down }}u < end; row += {{ 4 * down }}u) {
        let a = load_partials(row * params.vectors + column);
        let b = load_partials((row + {{ down }}u) * params.vectors + column);
        let c = load_partials((row + {{ 2 * down }}u) * params.vectors + column);
        let d = load_partials((row + {{ 3 * down }}u) * params.vectors + column);
        sum += (a + b) + (c + d);
    }
    for (; row < end; row += {{ down }}u) { sum += load_partials(row * params.vectors + column); }
    of_threads[thread] = sum;
    workgroupBarrier();
    for (var half = 128u; half >= {{ across }}u; half /= 2u) {
        if (thread < half) { of_threads[thread] += of_threads[thread + half]; }
        workgroupBarrier();
    }
    if (thread < {{ across }}u && vector < params.vectors) { store_sums(group.y * params.vectors + vector, of_threads[thread]); }
}
