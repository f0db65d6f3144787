// The order of the elements of rows: places[row, r] = the place of the element of rank r. Equal ones keep their order, and NaN
// counts as the largest.
//
//   x        (rows, width), any strides
//   places   (rows, count), contiguous
//
// mode "rank": a thread counts what comes before its element, and `count` is the width; "pick": a workgroup finds the best,
// and then `count` times the best of what comes after.
//
// variables: x (dtype), kind, descending, mode
{% import "numbers.wgsl" as numbers with context %}
{% set T = numbers.TYPES[kind] %}
{{ input("x", numbers.stored(x), 1) }}
{{ output("places", "i64", 1) }}
{{ params("rows: u32, width: u32, count: u32, x_row: u32, x_column: u32") }}

// the functions that are used

fn value_at(row: u32, column: u32) -> {{ T }} {
    let raw = load_x(row * params.x_row + column * params.x_column);
    return {{ numbers.taken("raw", x, kind) }};
}

{# Does a come before b in the order? #}
fn ahead(a: {{ T }}, a_at: u32, b: {{ T }}, b_at: u32) -> bool {
{% if kind == "f" %}
    if (is_nan(a) && is_nan(b)) { return a_at < b_at; }
    if (is_nan(a)) { return {{ "true" if descending else "false" }}; }
    if (is_nan(b)) { return {{ "false" if descending else "true" }}; }
{% endif %}
{% if kind == "l" %}
    if (all(a == b)) { return a_at < b_at; }
    return {{ "long_less(b, a)" if descending else "long_less(a, b)" }};
{% else %}
    if (a == b) { return a_at < b_at; }
    return a {{ ">" if descending else "<" }} b;
{% endif %}
}

{% if mode == "pick" %}
var<workgroup> best_values: array<{{ T }}, 256>;
var<workgroup> best_places: array<u32, 256>;
{% endif %}

@compute @workgroup_size(256) {{ main() }}
{% if mode == "rank" %}
    let element = workgroup * 256u + thread;
    if (element >= params.rows * params.width) { return; }
    let row = element / params.width;
    let column = element % params.width;
    let mine = value_at(row, column);
    var rank = 0u;
    for (var j = 0u; j < params.width; j++) {
        if (j != column && ahead(value_at(row, j), j, mine, column)) { rank += 1u; }
    }
    store_places(row * params.width + rank, i32(column));
{% else %}
    if (workgroup >= params.rows) { return; }
    let row = workgroup;
    let nowhere = 0xffffffffu;
    var last_value = value_at(row, 0u);
    var last_at = nowhere;
    for (var found = 0u; found < params.count; found++) {
        var best = last_value;
        var best_at = nowhere;
        for (var j = thread; j < params.width; j += 256u) {
            let value = value_at(row, j);
            if (last_at != nowhere && (j == last_at || !ahead(last_value, last_at, value, j))) { continue; }
            if (best_at == nowhere || ahead(value, j, best, best_at)) {
                best = value;
                best_at = j;
            }
        }
        best_values[thread] = best;
        best_places[thread] = best_at;
        workgroupBarrier();
        for (var half = 128u; half > 0u; half = half / 2u) {
            if (thread < half) {
                let at = best_places[thread + half];
                if (at != nowhere && (best_places[thread] == nowhere || ahead(best_values[thread + half], at, best_values[thread], best_places[thread]))) {
                    best_values[thread] = best_values[thread + half];
                    best_places[thread] = at;
                }
            }
            workgroupBarrier();
        }
        last_value = best_values[0];
        last_at = best_places[0];
        workgroupBarrier();
        if (thread == 0u) { store_places(row * params.count + found, i32(last_at)); }
    }
{% endif %}
}
