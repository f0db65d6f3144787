// Attention of a few new tokens over one split of a sequence's cached keys: "Flash-Decoding", Dao et al., 2023; pages as in
// Kwon et al., "PagedAttention", 2023. decode_merge.wgsl merges the splits.
//
//   q          (B, Hq, Sq, D)
//   k, v       (B, Hk, C, D), (B, Hk, C, Dv); with pages (pages, Hk, page, D), (pages, Hk, page, Dv) and table (B, pages of each)
//   lengths    (B); starts (B): keys before it do not exist
//   partials   (B · Hq · Sq, slots, Dv) float32, each split's own softmax; not written where it saw nothing
//   partial_lses  (B · Hq · Sq, slots), as exponents of two; -inf: the split saw nothing; NaN: a length or a page is invalid
//
// A workgroup serves all query heads of a key head, and all new tokens, with one read of its split. A team of `lanes`
// threads owns every `slots`-th key, and each of its threads some columns of the head dim: keys do not go through workgroup
// memory, and teams exchange sums only at the end. If there are more rows than a thread can hold, other teams work on them
// and read the same keys at the same time, from the cache.
//
// variables: dtype, lengths (its dtype), starts ("" or its dtype), page (keys of one, 0: no pages), ranged (the pool of pages
// is bound in several ranges), several (Sq > 1), left, cap, d4, dv4 (vectors of four in a row), lanes, slots (teams that share
// the keys), sets (of rows), rows (of a thread), keys (of a team at once), subgroups, at_once (vectors of a thread that teams
// exchange at once)
{% import "scores.wgsl" as scores with context %}
{% set teams = slots * sets %}
{% set threads = teams * lanes %}
{% set columns = (d4 + lanes - 1) // lanes %}
{% set v_columns = (dv4 + lanes - 1) // lanes %}
{% set pairs = keys * rows %}
{{ input("q", dtype, 4) }}
{{ input("k", dtype, 4) }}
{{ input("v", dtype, 4) }}
{{ input("lengths", lengths, 1) }}
{% if starts %}
{{ input("starts", starts, 1) }}
{% endif %}
{% if page %}
{{ input("table", "i32", 1) }}
{% endif %}
{{ output("partials", "f32", 4) }}
{{ output("partial_lses", "f32", 1) }}
{{ params("count: u32, key_heads: u32, group: u32, q_length: u32, row_blocks: u32, splits: u32, slots: u32, first_slot: u32,
           capacity: i32, left: i32, range_first: i32, range_past: i32, pages: i32, length_stride: u32, start_stride: u32, table_b: u32,
           table_s: u32, " ~ scores.strides("q k v") ~ ", scale: f32, softcap: f32") }}

const LOWEST = -3.4028234e38f;
const LOG2E = 1.4426950408889634f;

var<workgroup> wrong: atomic<u32>;
var<workgroup> highest_of: array<f32, {{ teams * rows }}>; // [set, slot, row]
var<workgroup> total_of: array<f32, {{ teams * rows }}>;
var<workgroup> whole_highest: array<f32, {{ sets * rows }}>; // [set, row]
var<workgroup> whole_scaling: array<f32, {{ sets * rows }}>;
var<workgroup> gathered: array<vec4<f32>, {{ threads * at_once }}>;
{% if not subgroups %}
var<workgroup> partial: array<f32, {{ teams * pairs * (lanes + 1) }}>; // one more per row of lanes: no two share a bank
var<workgroup> sums: array<f32, {{ teams * pairs }}>;
{% endif %}

{{ scores.no_numbers() }}

{# This lane's vector number c of a row; zeros past the end of the row. #}
{% macro column(load, at, c, size) -%}
{% if (c + 1) * lanes <= size -%}
{{ load }}({{ at }} + lane + {{ c * lanes }}u)
{%- else -%}
select(vec4<f32>(), {{ load }}({{ at }} + min(lane + {{ c * lanes }}u, {{ size - 1 }}u)), lane + {{ c * lanes }}u < {{ size }}u)
{%- endif %}
{%- endmacro %}

// The first slot of a row of this workgroup. A row is a token of a query head; the tokens of a head are neighbours.
fn result_of(batch: u32, key_head: u32, row: u32) -> u32 {
    let head = key_head * params.group + row / params.q_length;
    return ((batch * params.key_heads * params.group + head) * params.q_length + row % params.q_length) * params.slots;
}

{% if cap %}
{{ scores.capping() }}
{% endif %}
{% if page %}
fn page_of(batch: u32, key: i32) -> i32 {
    return load_table(batch * params.table_b + u32(key) / {{ page }}u * params.table_s);
}
{% endif %}

@compute @workgroup_size({{ threads }}) {{ main() }}
    if (workgroup >= params.count) { return; }
    let row_block = workgroup % params.row_blocks;
    let split = workgroup / params.row_blocks % params.splits;
    let key_head = workgroup / params.row_blocks / params.splits % params.key_heads;
    let batch = workgroup / params.row_blocks / params.splits / params.key_heads;
    let first_row = row_block * {{ sets * rows }}u;
    let all_rows = params.group * params.q_length;
    let own_slot = params.first_slot + split;

    let given = load_lengths(batch * params.length_stride);
    let given_start = {{ "load_starts(batch * params.start_stride)" if starts else "0" }};
    let bad = given < 0 || given > params.capacity || given_start < 0 || given_start > params.capacity;
    let first_key = select(given_start, 0, bad);
    let length = select(given, 0, bad);
    if (thread == 0u) { atomicStore(&wrong, select(0u, 1u, bad)); }
    workgroupBarrier();
{% if page %}
    // Some split checks each page with keys of the sequence, also those outside a window.
    let unnamed = first_key / {{ page }};
    let named = max((length + {{ page - 1 }}) / {{ page }} - unnamed, 0);
    let some = (named + i32(params.splits) - 1) / i32(params.splits);
    let past_some = unnamed + min((i32(split) + 1) * some, named);
    for (var i = unnamed + i32(split) * some + i32(thread); i < past_some; i += {{ threads }}) {
        let page = load_table(batch * params.table_b + u32(i) * params.table_s);
        if (page < 0 || page >= params.pages) { atomicStore(&wrong, 1u); }
    }
    workgroupBarrier();
{% endif %}

    // The keys of this split, in whole steps, of those that some row sees and that are bound.
    var low = first_key;
    var high = length;
{% if left %}
    low = max(low, length - i32(params.q_length) - params.left); // the first key that some row sees
{% endif %}
{% if not page %}
    low = max(low, params.range_first);
    high = min(high, params.range_past);
{% endif %}
    let steps = (max(high - low, 0) + {{ slots * keys - 1 }}) / {{ slots * keys }};
    let each = (steps + i32(params.splits) - 1) / i32(params.splits);
    let begin = low + i32(split) * each * {{ slots * keys }};
    let end = min(begin + each * {{ slots * keys }}, high);
    if (begin >= end) {
        if (thread < {{ sets * rows }}u && first_row + thread < all_rows) {
            let nothing = select(negative_infinity(), not_a_number(), atomicLoad(&wrong) != 0u);
            store_partial_lses(result_of(batch, key_head, first_row + thread) + own_slot, nothing);
        }
        return;
    }

    let lane = thread % {{ lanes }}u;
    let team = thread / {{ lanes }}u;
    let slot = team % {{ slots }}u;
    let row_set = team / {{ slots }}u;
    let k_head = key_head * params.k_h{% if not page %} + batch * params.k_b{% endif %};
    let v_head = key_head * params.v_h{% if not page %} + batch * params.v_b{% endif %};

    // Rows past the last are copies of it, and are not written.
{% for r in range(rows) %}
    let row_{{ r }} = min(first_row + row_set * {{ rows }}u + {{ r }}u, all_rows - 1u);
    let token_{{ r }} = row_{{ r }} % params.q_length;
    let q_at_{{ r }} = batch * params.q_b + (key_head * params.group + row_{{ r }} / params.q_length) * params.q_h + token_{{ r }} * params.q_s;
{% for c in range(columns) %}
    let q_{{ r }}_{{ c }} = {{ column("load_q", "q_at_%d" % r, c, d4) }} * (params.scale{% if not cap %} * LOG2E{% endif %});
{% endfor %}
{% if several %}
    let position_{{ r }} = i32(token_{{ r }}) + length - i32(params.q_length);
{% endif %}
    var highest_{{ r }} = LOWEST;
    var total_{{ r }} = 0.0;
{% for c in range(v_columns) %}
    var acc_{{ r }}_{{ c }} = vec4<f32>();
{% endfor %}
{% endfor %}
{% if page %}
{% for j in range(keys) %}
    var page_{{ j }} = page_of(batch, min(begin + {{ j * slots }} + i32(slot), end - 1));
{% endfor %}
{% endif %}

    for (var start = begin; start < end; start += {{ slots * keys }}) {
        // Past the end the last key is read again, because memory behind it may hold NaN.
{% for j in range(keys) %}
        let key_{{ j }} = start + {{ j * slots }} + i32(slot);
        let at_{{ j }} = min(key_{{ j }}, end - 1);
{% if page %}
        let exists_{{ j }} = (page_{{ j }} >= params.range_first) & (page_{{ j }} < params.range_past);
        let in_page_{{ j }} = u32(at_{{ j }}) % {{ page }}u;
        let from_{{ j }} = u32(select(0, page_{{ j }} - params.range_first, exists_{{ j }}));
        let there_{{ j }} = (key_{{ j }} < end) & exists_{{ j }};
        let k_at_{{ j }} = k_head + from_{{ j }} * params.k_b + in_page_{{ j }} * params.k_s;
        let v_at_{{ j }} = v_head + from_{{ j }} * params.v_b + in_page_{{ j }} * params.v_s;
{% else %}
        let there_{{ j }} = key_{{ j }} < end;
        let k_at_{{ j }} = k_head + u32(at_{{ j }} - params.range_first) * params.k_s;
        let v_at_{{ j }} = v_head + u32(at_{{ j }} - params.range_first) * params.v_s;
{% endif %}
{% endfor %}
{% for j in range(keys) %}
{% for c in range(columns) %}
        let k_{{ j }}_{{ c }} = {{ column("load_k", "k_at_%d" % j, c, d4) }};
{% endfor %}
{% endfor %}
{% for j in range(keys) %}
{% for c in range(v_columns) %}
        let v_{{ j }}_{{ c }} = {{ "select(vec4<f32>(), " if ranged }}{{ column("load_v", "v_at_%d" % j, c, dv4) }}{{ ", there_%d)" % j if ranged }};
{% endfor %}
{% endfor %}
{% if page %}
        // Page numbers are read one step ahead, so that keys do not wait for them.
{% for j in range(keys) %}
        page_{{ j }} = page_of(batch, min(key_{{ j }} + {{ slots * keys }}, end - 1));
{% endfor %}
{% endif %}

        // Logits as exponents of two: the products of a lane's columns, summed over its team.
{% for j in range(keys) %}
{% for r in range(rows) %}
        var products_{{ j }}_{{ r }} = q_{{ r }}_0 * k_{{ j }}_0;
{% for c in range(1, columns) %}
        products_{{ j }}_{{ r }} = fma(q_{{ r }}_{{ c }}, k_{{ j }}_{{ c }}, products_{{ j }}_{{ r }});
{% endfor %}
        var s_{{ j }}_{{ r }} = (products_{{ j }}_{{ r }}.x + products_{{ j }}_{{ r }}.y) + (products_{{ j }}_{{ r }}.z + products_{{ j }}_{{ r }}.w);
{% endfor %}
{% endfor %}
{% if subgroups %}
{% for step in (1, 2, 4, 8, 16, 32) if step < lanes %}
{% for j in range(keys) %}
{% for r in range(rows) %}
        s_{{ j }}_{{ r }} += subgroupShuffleXor(s_{{ j }}_{{ r }}, {{ step }}u);
{% endfor %}
{% endfor %}
{% endfor %}
{% elif lanes > 1 %}
{% for j in range(keys) %}
{% for r in range(rows) %}
        partial[(team * {{ pairs }}u + {{ j * rows + r }}u) * {{ lanes + 1 }}u + lane] = s_{{ j }}_{{ r }};
{% endfor %}
{% endfor %}
        workgroupBarrier();
        for (var pair = lane; pair < {{ pairs }}u; pair += {{ lanes }}u) {
            let from_pair = (team * {{ pairs }}u + pair) * {{ lanes + 1 }}u;
            var sum = 0.0;
            for (var i = 0u; i < {{ lanes }}u; i++) { sum += partial[from_pair + i]; }
            sums[team * {{ pairs }}u + pair] = sum;
        }
        workgroupBarrier();
{% for j in range(keys) %}
{% for r in range(rows) %}
        s_{{ j }}_{{ r }} = sums[team * {{ pairs }}u + {{ j * rows + r }}u];
{% endfor %}
{% endfor %}
{% endif %}
{% for r in range(rows) %}
{% for j in range(keys) %}
{% if several %}
        // & instead of &&, which would be too many branches for some compilers.
        let seen_{{ j }}_{{ r }} = there_{{ j }} & (key_{{ j }} <= position_{{ r }}){% if left %} & (key_{{ j }} >= position_{{ r }} - params.left){% endif %};
{% else %}
        let seen_{{ j }}_{{ r }} = there_{{ j }};
{% endif %}
        s_{{ j }}_{{ r }} = select(LOWEST, {{ "cap(s_%d_%d) * LOG2E" % (j, r) if cap else "s_%d_%d" % (j, r) }}, seen_{{ j }}_{{ r }});
{% endfor %}
        let higher_{{ r }} = {% for j in range(keys) %}max(s_{{ j }}_{{ r }}, {% endfor %}highest_{{ r }}{{ ")" * keys }};
        let shrink_{{ r }} = exp2(highest_{{ r }} - higher_{{ r }});
        highest_{{ r }} = higher_{{ r }};
        total_{{ r }} *= shrink_{{ r }};
{% for c in range(v_columns) %}
        acc_{{ r }}_{{ c }} *= shrink_{{ r }};
{% endfor %}
{% for j in range(keys) %}
        let p_{{ j }}_{{ r }} = select(0.0, exp2(s_{{ j }}_{{ r }} - higher_{{ r }}), seen_{{ j }}_{{ r }});
        total_{{ r }} += p_{{ j }}_{{ r }};
{% for c in range(v_columns) %}
        acc_{{ r }}_{{ c }} = fma(vec4<f32>(p_{{ j }}_{{ r }}), v_{{ j }}_{{ c }}, acc_{{ r }}_{{ c }});
{% endfor %}
{% endfor %}
{% endfor %}
    }

    // Combine the teams that shared the keys of a row, in a fixed order.
    if (lane == 0u) {
{% for r in range(rows) %}
        highest_of[team * {{ rows }}u + {{ r }}u] = highest_{{ r }};
        total_of[team * {{ rows }}u + {{ r }}u] = total_{{ r }};
{% endfor %}
    }
    workgroupBarrier();
    if (thread < {{ sets * rows }}u) {
        let of_set = thread / {{ rows }}u * {{ slots * rows }}u + thread % {{ rows }}u;
        var highest = LOWEST;
        for (var i = 0u; i < {{ slots }}u; i++) { highest = max(highest, highest_of[of_set + i * {{ rows }}u]); }
        var total = 0.0;
        for (var i = 0u; i < {{ slots }}u; i++) {
            total += total_of[of_set + i * {{ rows }}u] * exp2(highest_of[of_set + i * {{ rows }}u] - highest);
        }
        let empty = total == 0.0;
        whole_highest[thread] = highest;
        whole_scaling[thread] = 1.0 / select(total, 1.0, empty);
        if (first_row + thread < all_rows) {
            var lse = select(highest + log2(total), negative_infinity(), empty);
            if (atomicLoad(&wrong) != 0u) { lse = not_a_number(); }
            store_partial_lses(result_of(batch, key_head, first_row + thread) + own_slot, lse);
        }
    }
    workgroupBarrier();
{% for r in range(rows) %}
    let factor_{{ r }} = exp2(highest_{{ r }} - whole_highest[row_set * {{ rows }}u + {{ r }}u]) * whole_scaling[row_set * {{ rows }}u + {{ r }}u];
{% endfor %}
{% for first in range(0, rows * v_columns, at_once) %}
{% set now = [at_once, rows * v_columns - first] | min %}
{% for i in range(now) %}
    gathered[{{ i * threads }}u + thread] = acc_{{ (first + i) // v_columns }}_{{ (first + i) % v_columns }} * factor_{{ (first + i) // v_columns }};
{% endfor %}
    workgroupBarrier();
    for (var i = thread; i < {{ now * sets * lanes }}u; i += {{ threads }}u) {
        let vector = i / {{ sets * lanes }}u;
        let of_set = i / {{ lanes }}u % {{ sets }}u;
        let of_lane = i % {{ lanes }}u;
        let row = first_row + of_set * {{ rows }}u + ({{ first }}u + vector) / {{ v_columns }}u;
        let column = ({{ first }}u + vector) % {{ v_columns }}u * {{ lanes }}u + of_lane;
        if (row < all_rows && column < {{ dv4 }}u) {
            var sum = vec4<f32>();
            for (var j = 0u; j < {{ slots }}u; j++) {
                sum += gathered[vector * {{ threads }}u + (of_set * {{ slots }}u + j) * {{ lanes }}u + of_lane];
            }
            store_partials((result_of(batch, key_head, row) + own_slot) * {{ dv4 }}u + column, sum);
        }
    }
{% if first + now < rows * v_columns %}
    workgroupBarrier();
{% endif %}
{% endfor %}
}
