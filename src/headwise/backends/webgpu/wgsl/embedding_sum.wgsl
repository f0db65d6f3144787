// Sums of the rows of a gradient that have the same id, from sorted ids, in the order of their places.
//
//   keys     (count), sorted; those from `classes` on get nothing
//   places   (count), rows of the gradient
//   g        (places, columns), rows at any distance, columns a multiple of four
//   dweight  (classes, columns), zeros before; rows from `first` to `first + here` are written
//   partials (chunks, 2, columns)
//
// chunks   The sorted ids are cut into chunks of {{ chunk }}. An id within one chunk is summed and written; one that crosses
//          chunks leaves a partial sum in each: number 0 if it started in an earlier chunk, 1 if it starts here.
// join     The chunk where such an id starts adds up its partial sums in order. One id is as parallel as many.
//
// variables: step, dtype (of g), to (of dweight), chunk, lanes (threads that share a chunk; a workgroup has 256 / lanes of them)
{{ input("keys", "u32", 1) }}
{% if step == "chunks" %}
{{ input("places", "u32", 1) }}
{{ input("g", dtype, 4) }}
{% endif %}
{{ output("dweight", to, 4) }}
{% if step == "chunks" %}
{{ output("partials", "f32", 4) }}
{% else %}
{{ input("partials", "f32", 4) }}
{% endif %}
{{ params("count: u32, chunks: u32, vectors: u32, g_stride: u32, dweight_stride: u32, classes: u32, first: u32, here: u32") }}
{% set unroll = 4 if step == "chunks" else 8 %}

fn write(key: u32, vector: u32, sum: vec4<f32>) {
    let row = key - params.first;
    if (row < params.here) { store_dweight(row * params.dweight_stride + vector, sum); }
}

{% if step == "chunks" %}
fn key_after(i: u32) -> u32 {
    if (i + 1u >= params.count) { return 0xffffffffu; }
    return load_keys(i + 1u);
}

fn sum_chunk(chunk: u32, vector: u32) {
    let first = chunk * {{ chunk }}u;
    let end = min(first + {{ chunk }}u, params.count);
    var key = load_keys(first);
    var continued = false;
    if (first > 0u) { continued = load_keys(first - 1u) == key; }
    var sum = vec4<f32>(0.0);
    for (var i = first; i < end && key < params.classes; i += {{ unroll }}u) {
        // All loads before the first use.
{% for k in range(unroll) %}
        let g{{ k }} = load_g(load_places(min(i + {{ k }}u, end - 1u)) * params.g_stride + vector);
        let after{{ k }} = key_after(min(i + {{ k }}u, end - 1u));
{% endfor %}
{% for k in range(unroll) %}
        if (i + {{ k }}u < end && key < params.classes) {
            sum += g{{ k }};
            let ends = after{{ k }} != key;
            if (ends || i + {{ k + 1 }}u == end) {
                if (ends && !continued) {
                    write(key, vector, sum);
                } else {
                    store_partials((chunk * 2u + select(1u, 0u, continued)) * params.vectors + vector, sum);
                }
                sum = vec4<f32>(0.0);
                continued = false;
            }
            key = after{{ k }};
        }
{% endfor %}
    }
}
{% else %}
// One past the last place of the key, by binary search; it is known to be at `from_here`.
fn end_of(key: u32, from_here: u32) -> u32 {
    var low = from_here;
    var high = params.count;
    while (high - low > 1u) {
        let middle = low + (high - low) / 2u;
        if (load_keys(middle) == key) { low = middle; } else { high = middle; }
    }
    return high;
}

fn sum_chunk(chunk: u32, vector: u32) {
    let first = chunk * {{ chunk }}u;
    let following = first + {{ chunk }}u;
    if (following >= params.count) { return; }
    let key = load_keys(following);
    if (key >= params.classes || load_keys(following - 1u) != key) { return; }
    // It started here unless the whole chunk is this id and the one before the chunk is too.
    if (first > 0u && load_keys(first) == key) {
        if (load_keys(first - 1u) == key) { return; }
    }
    let last = (end_of(key, following) - 1u) / {{ chunk }}u;
    var sum = load_partials((chunk * 2u + 1u) * params.vectors + vector);
    var part = chunk + 1u;
    for (; part + {{ unroll - 1 }}u <= last; part += {{ unroll }}u) {
{% for k in range(unroll) %}
        let p{{ k }} = load_partials((part + {{ k }}u) * 2u * params.vectors + vector);
{% endfor %}
        sum += ((p0 + p1) + (p2 + p3)) + ((p4 + p5) + (p6 + p7));
    }
    for (; part <= last; part++) { sum += load_partials(part * 2u * params.vectors + vector); }
    write(key, vector, sum);
}
{% endif %}

@compute @workgroup_size(256) {{ main() }}
    let across = (params.vectors + {{ lanes - 1 }}u) / {{ lanes }}u;
    let chunk = workgroup / across * {{ 256 // lanes }}u + thread / {{ lanes }}u;
    let vector = workgroup % across * {{ lanes }}u + thread % {{ lanes }}u;
    if (chunk < params.chunks && vector < params.vectors) { sum_chunk(chunk, vector); }
}
