// One pass of a stable radix sort of the keys of rows, each with its place: Satish, Harris and Garland, "Designing efficient
// sorting algorithms for manycore GPUs", 2009. Three steps sort by one digit, the lowest digit first:
//
//   count    how often each digit occurs in each tile of a row:      counts (rows, digits, tiles)
//   scan     how many keys of the row come before them, in place:    counts (rows, digits, tiles)
//   scatter  keys and places (rows, count) go where they belong:     sorted_keys, sorted_places (rows, count)
//
// The first pass may turn ids into keys: an id that counts for nothing (outside the table, or the padding) becomes `classes`,
// larger than all others. In a tile each of {{ threads }} threads has a run of {{ run }} neighbouring keys, which keeps the
// sort stable.
//
// variables: step, ids ("" or their dtype: keys are made from them), placed (places come along; else they are 0, 1, …), bits (of
// a digit), threads, run
{% set digits = 2 ** bits %}
{% if step != "scan" %}
{% if ids %}
{{ input("ids", ids, 1) }}
{% else %}
{{ input("keys", "u32", 1) }}
{% endif %}
{% endif %}
{% if step == "scatter" %}
{% if placed %}
{{ input("places", "u32", 1) }}
{% endif %}
{{ input("counts", "u32", 1) }}
{{ output("sorted_keys", "u32", 1) }}
{{ output("sorted_places", "u32", 1) }}
{% else %}
{{ output("counts", "u32", 1) }}
{% endif %}
{{ params("rows: u32, count: u32, tiles: u32, shift: u32, classes: u32, padding: i32") }}

{% if step != "scan" %}
fn key_of(i: u32) -> u32 {
{% if ids %}
    let id = load_ids(i);
    return select(params.classes, u32(id), id >= 0 && u32(id) < params.classes && id != params.padding);
{% else %}
    return load_keys(i);
{% endif %}
}
fn digit_of(key: u32) -> u32 { return (key >> params.shift) & {{ digits - 1 }}u; }
{% endif %}

{% if step == "count" %}
var<workgroup> occurrences: array<atomic<u32>, {{ digits }}>;

@compute @workgroup_size({{ threads }}) {{ main() }}
    let row = workgroup / params.tiles;
    let tile = workgroup % params.tiles;
    if (row >= params.rows) { return; }
    if (thread < {{ digits }}u) { atomicStore(&occurrences[thread], 0u); }
    workgroupBarrier();
    for (var i = thread; i < {{ threads * run }}u; i += {{ threads }}u) {
        let at = tile * {{ threads * run }}u + i;
        if (at < params.count) { atomicAdd(&occurrences[digit_of(key_of(row * params.count + at))], 1u); }
    }
    workgroupBarrier();
    if (thread < {{ digits }}u) { store_counts((row * {{ digits }}u + thread) * params.tiles + tile, atomicLoad(&occurrences[thread])); }
}
{% elif step == "scan" %}
var<workgroup> totals: array<u32, {{ threads }}>;

// A workgroup for each row; each thread adds up a range of its own.
@compute @workgroup_size({{ threads }}) {{ main() }}
    if (workgroup >= params.rows) { return; }
    let entries = {{ digits }}u * params.tiles;
    let each = (entries + {{ threads - 1 }}u) / {{ threads }}u;
    let base = workgroup * entries;
    let first = base + min(thread * each, entries);
    let end = base + min((thread + 1u) * each, entries);
    var total = 0u;
    for (var i = first; i < end; i++) { total += load_counts(i); }
    totals[thread] = total;
    workgroupBarrier();
    for (var reach = 1u; reach < {{ threads }}u; reach *= 2u) {
        var sum = totals[thread];
        if (thread >= reach) { sum += totals[thread - reach]; }
        workgroupBarrier();
        totals[thread] = sum;
        workgroupBarrier();
    }
    var before = totals[thread] - total;
    for (var i = first; i < end; i++) {
        let here = load_counts(i);
        store_counts(i, before);
        before += here;
    }
}
{% else %}
// Where the next key of a digit and a thread goes. The rows of digits are padded by one against bank conflicts.
var<workgroup> next: array<u32, {{ digits * (threads + 1) }}>;

@compute @workgroup_size({{ threads }}) {{ main() }}
    let row = workgroup / params.tiles;
    let tile = workgroup % params.tiles;
    if (row >= params.rows) { return; }
    for (var digit = 0u; digit < {{ digits }}u; digit++) { next[digit * {{ threads + 1 }}u + thread] = 0u; }
    let first = (tile * {{ threads }}u + thread) * {{ run }}u;
    let end = min(first + {{ run }}u, params.count);
    let base = row * params.count;
    for (var i = first; i < end; i++) { next[digit_of(key_of(base + i)) * {{ threads + 1 }}u + thread] += 1u; }
    workgroupBarrier();
    if (thread < {{ digits }}u) {
        var before = load_counts((row * {{ digits }}u + thread) * params.tiles + tile);
        for (var i = 0u; i < {{ threads }}u; i++) {
            let here = next[thread * {{ threads + 1 }}u + i];
            next[thread * {{ threads + 1 }}u + i] = before;
            before += here;
        }
    }
    workgroupBarrier();
    for (var i = first; i < end; i++) {
        let key = key_of(base + i);
        let slot = digit_of(key) * {{ threads + 1 }}u + thread;
        let to = next[slot];
        next[slot] = to + 1u;
        store_sorted_keys(base + to, key);
        store_sorted_places(base + to, {{ "load_places(base + i)" if placed else "i" }});
    }
}
{% endif %}
