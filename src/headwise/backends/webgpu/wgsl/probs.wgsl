// Attention probabilities and the gradients of their scores, in two stages that compute the same tiles of logits.
//
//   q       (B, Hq, Sq, D); k (B, Hk, Sk, D); rows (count): the rows of q that are wanted, negative ones from the end
//   stats   (B, Hq, count) records of two vectors of four words:
//             row of q, first key it may see, one past the last, 1 if its row or a length is invalid, 2 if it does not exist
//             reference, scaling, delta, and what the row adds to the gradient of its head's sink, all float32
//           a probability is exp(logit - reference) · scaling, delta the sum of probability times gradient
//   to      (B, Hq, count, columns): the probabilities p, or, given grad, the gradients of q·k:
//           p (grad - delta) · slope of the cap · scale; columns from Sk on are zeros
//   raw     float32, the same without slope and scale: the gradients of what a bias is added to
//
// Under dropout the probabilities, and the gradients that arrive at them, are multiplied with 0 or 1 / (1 - dropout).
//
// stage "stats": a workgroup owns a tile of rows and loops over the keys. Stage "write": one workgroup per tile.
//
// Tiles of 16 · micro rows and 64 keys go through workgroup memory, 16 elements of the head dim at a time; a thread owns
// `micro` rows and 4 keys. The keys of a thread are two pairs of neighbours, because two 16-bit results share a word; in
// workgroup memory the odd keys follow the even ones, so that neighbouring threads read neighbouring rows.
//
// variables: stage, dtype, variant (see scores.wgsl), rows ("" or its dtype), grad (bool), to, raw (bools: what is written),
//            micro
{% import "scores.wgsl" as scores with context %}
{% set width = 1 if dtype == "f32" else 2 %}
{% set stats_stage = stage == "stats" %}
{{ input("q", dtype, 4) }}
{{ input("k", dtype, 4) }}
{% if stats_stage and rows %}
{{ input("rows", rows, 1) }}
{% endif %}
{{ scores.inputs(variant) }}
{% if grad %}
{{ input("grad", dtype, 1) }}
{% endif %}
{% if stats_stage %}
{{ output("stats", "u32", 4) }}
{% else %}
{{ input("stats", "u32", 4) }}
{% if to %}
{{ output("to", dtype, width) }}
{% endif %}
{% if raw %}
{{ output("raw", "f32", 1) }}
{% endif %}
{% endif %}
{{ params("workgroups: u32, tiles: u32, key_tiles: u32, count: u32, columns: u32,
           first_line: u32, d4: u32, row_stride: u32, " ~ scores.strides("q k") ~ ", g_b: u32, g_h: u32, g_q: u32, g_k: u32, "
           ~ scores.fields(variant)) }}
{{ scores.functions(variant) }}
{{ scores.logits(variant) }}

// [row, 4 vectors of the head dim], and one of padding against bank conflicts.
var<workgroup> q_tile: array<vec4<f32>, {{ 16 * micro * 5 }}>;
var<workgroup> k_tile: array<vec4<f32>, {{ 64 * 5 }}>;

// The key of a tile that is in row `place` of k_tile.
fn key_at(place: u32) -> u32 { return place % 32u * 2u + place / 32u; }

{% if stats_stage %}
struct Named {
    row: u32, // of q, as it is bound
    low: i32,
    high: i32,
    state: u32, // 1: invalid; 2: it does not exist
}

fn named(line: u32, extent: Extent) -> Named {
    var found: Named;
    var bad = extent.bad;
{% if rows %}
    let asked = load_rows(line * params.row_stride);
    let length = i32(params.q_length);
    let outside = asked < -length || asked >= length;
    bad = bad || outside;
    found.row = u32(select(select(asked, asked + length, asked < 0), 0, outside));
    let query = i32(found.row);
{% else %}
    found.row = line;
    let query = i32(params.first_line + line);
{% endif %}
    let visible = visible_keys(query + extent.keys - extent.queries, extent);
    found.low = select(visible.x, 0, bad);
    found.high = select(visible.y, 0, bad);
    found.state = select(select(0u, 2u, query >= extent.queries), 1u, bad);
    return found;
}
{% endif %}

{# Products of the tile that begins at `start`, one vector of four keys per row: sum_0 … #}
{% macro products(start) %}
{% for i in range(micro) %}
    var sum_{{ i }} = vec4<f32>();
{% endfor %}
    let k_at = batch * params.k_b + key_head * params.k_h + min({{ start }} + key_at(thread / 4u), params.k_length - 1u) * params.k_s;
    for (var chunk = 0u; chunk < params.d4; chunk += 4u) {
        let column = chunk + thread % 4u;
        let inside = column < params.d4;
        workgroupBarrier();
{% if micro == 4 %}
        q_tile[thread / 4u * 5u + thread % 4u] = select(vec4<f32>(), load_q(q_at + min(column, params.d4 - 1u)), inside);
{% else %}
        if (thread < {{ 64 * micro }}u) {
            q_tile[thread / 4u * 5u + thread % 4u] = select(vec4<f32>(), load_q(q_at + min(column, params.d4 - 1u)), inside);
        }
{% endif %}
        k_tile[thread / 4u * 5u + thread % 4u] = select(vec4<f32>(), load_k(k_at + min(column, params.d4 - 1u)), inside);
        workgroupBarrier();
        for (var c = 0u; c < 4u; c++) {
            let k_0 = k_tile[own_key * 5u + c];
            let k_1 = k_tile[(own_key + 16u) * 5u + c];
            let k_2 = k_tile[(own_key + 32u) * 5u + c];
            let k_3 = k_tile[(own_key + 48u) * 5u + c];
{% for i in range(micro) %}
            let q_{{ i }} = q_tile[(own_row + {{ 16 * i }}u) * 5u + c];
            sum_{{ i }} += vec4<f32>(dot(q_{{ i }}, k_0), dot(q_{{ i }}, k_1), dot(q_{{ i }}, k_2), dot(q_{{ i }}, k_3));
{% endfor %}
        }
    }
{% endmacro %}

{% if variant.mask %}
fn in_view(batch: u32, head: u32, row: u32, key: u32, seen: bool) -> bool {
    if (seen) { return !masked_out(batch, head, row, key); }
    return false;
}
{% endif %}

// The logit of a pair, from the one before the bias.
fn whole_logit(capped: f32, batch: u32, head: u32, row: u32, key: u32) -> f32 {
    return {{ "biased(capped, bias_of(batch, head, row, key))" if variant.bias else "capped" }};
}
{% if variant.dropout %}
// A probability, or its gradient, after dropout. row: of q, as it is bound.
fn dropped(batch: u32, head: u32, row: u32, key: u32, x: f32) -> f32 {
    let drop = dropout_of(params.first_batch + batch, head);
    return select(0.0, x * params.kept_scale, kept(drop, row{{ "" if rows else " + params.first_line" }}, key));
}
{% endif %}
// exp of a difference of logits, which is taken first because a bias may be any float (see scores.wgsl).
fn power(difference: f32) -> f32 { return exp2(difference * LOG2E); }

@compute @workgroup_size(256) {{ main() }}
    if (workgroup >= params.workgroups) { return; }
    let key_tile = workgroup % params.key_tiles;
    let first = workgroup / params.key_tiles % params.tiles * {{ 16 * micro }}u;
    let head = workgroup / params.key_tiles / params.tiles % params.heads;
    let batch = workgroup / params.key_tiles / params.tiles / params.heads;
    let key_head = head / params.group;
    let records = (batch * params.heads + head) * params.count;
    let own_key = thread % 16u;
    let own_row = thread / 16u;
    let last = params.count - 1u;
    // The row of q that this thread loads into workgroup memory.
    let brought = min(first + thread / 4u, last);
{% if stats_stage %}
    let extent = extent_of(batch);
    let q_at = batch * params.q_b + head * params.q_h + named(brought, extent).row * params.q_s;
{% for i in range(micro) %}
    let row_{{ i }} = named(min(first + own_row + {{ 16 * i }}u, last), extent);
    var highest_{{ i }} = LOWEST;
    var total_{{ i }} = 0.0;
    var moved_{{ i }} = 0.0;
{% endfor %}
{% if rows %}
    let begin = u32(extent.first_key) / 64u * 64u;
    let end = u32(extent.keys);
{% else %}
    let offset = i32(params.first_line) + extent.keys - extent.queries;
    let begin = u32(visible_keys(i32(first) + offset, extent).x) / 64u * 64u;
    let end = u32(visible_keys(i32(min(first + {{ 16 * micro - 1 }}u, last)) + offset, extent).y);
{% endif %}
    for (var start = begin; start < end; start += 64u) {
{{ products("start") }}
{% for i in range(micro) %}
        {
            var logits = vec4<f32>(LOWEST);
            var seen = vec4<bool>();
{% if grad %}
            var g = vec4<f32>();
{% endif %}
{% for j in range(4) %}
            let key_{{ j }} = start + key_at(own_key + {{ 16 * j }}u);
            seen[{{ j }}] = i32(key_{{ j }}) >= row_{{ i }}.low && i32(key_{{ j }}) < row_{{ i }}.high;
{% if variant.mask %}
            seen[{{ j }}] = in_view(batch, head, row_{{ i }}.row, key_{{ j }}, seen[{{ j }}]);
{% endif %}
            if (seen[{{ j }}]) {
                logits[{{ j }}] = whole_logit(logit_of(sum_{{ i }}[{{ j }}]), batch, head, row_{{ i }}.row, key_{{ j }});
{% if grad %}
                let line = min(first + own_row + {{ 16 * i }}u, last);
                g[{{ j }}] = load_grad(batch * params.g_b + head * params.g_h + line * params.g_q + key_{{ j }} * params.g_k);
{% if variant.dropout %}
                g[{{ j }}] = dropped(batch, head, row_{{ i }}.row, key_{{ j }}, g[{{ j }}]);
{% endif %}
{% endif %}
            }
{% endfor %}
            let higher = max(highest_{{ i }}, max(max(logits.x, logits.y), max(logits.z, logits.w)));
            let shrink = power(highest_{{ i }} - higher);
            let weights = select(vec4<f32>(), exp2((logits - higher) * LOG2E), seen);
            total_{{ i }} = total_{{ i }} * shrink + dot(weights, vec4<f32>(1.0));
{% if grad %}
            moved_{{ i }} = moved_{{ i }} * shrink + dot(weights, g);
{% endif %}
            highest_{{ i }} = higher;
        }
{% endfor %}
    }
    // Combine the sixteen threads that share a row, in order.
{% for i in range(micro) %}
    workgroupBarrier();
    k_tile[thread] = vec4<f32>(highest_{{ i }}, total_{{ i }}, moved_{{ i }}, 0.0);
    workgroupBarrier();
    if (own_key == 0u && first + own_row + {{ 16 * i }}u < params.count) {
        var highest = LOWEST;
        for (var other = 0u; other < 16u; other++) { highest = max(highest, k_tile[thread + other].x); }
        var total = 0.0;
        var moved = 0.0;
        for (var other = 0u; other < 16u; other++) {
            let theirs = k_tile[thread + other];
            let weight = power(theirs.x - highest);
            total += theirs.y * weight;
            moved += theirs.z * weight;
        }
        finish(records + first + own_row + {{ 16 * i }}u, row_{{ i }}, head, highest, total, moved);
    }
{% endfor %}
}

fn finish(record: u32, row: Named, head: u32, highest: f32, total: f32, moved: f32) {
    let empty = total == 0.0;
    var reference = select(highest, 0.0, empty);
    var scaling = select(1.0 / select(total, 1.0, empty), 0.0, empty);
    var delta = moved * scaling;
    var of_sink = 0.0;
{% if variant.sink %}
    if (!empty) {
        let at_sink = sink_of(head);
        reference = max(highest, at_sink);
        let shrunk = power(highest - reference);
        let joined = power(at_sink - reference);
        scaling = 1.0 / (total * shrunk + joined);
        delta = moved * shrunk * scaling;
        of_sink = -joined * scaling * delta;
    }
{% endif %}
    if (row.state == 1u) { of_sink = not_a_number(); }
    if (row.state == 2u) { of_sink = 0.0; }
    store_stats(2u * record, vec4<u32>(row.row, u32(row.low), u32(row.high), row.state));
    store_stats(2u * record + 1u, bitcast<vec4<u32>>(vec4<f32>(reference, scaling, delta, of_sink)));
}
{% else %}
    let start = key_tile * 64u;
    let q_at = batch * params.q_b + head * params.q_h + load_stats(2u * (records + brought)).x * params.q_s;
{% if rows %}
    let some_seen = start < params.k_length;
{% else %}
    // In consecutive rows the first sees the lowest key of all, and the last the highest.
    let lowest = load_stats(2u * (records + first)).y;
    let past = load_stats(2u * (records + min(first + {{ 16 * micro - 1 }}u, last))).z;
    let some_seen = start < past && start + 64u > lowest;
{% endif %}
{% for i in range(micro) %}
    var logits_{{ i }} = vec4<f32>();
{% endfor %}
    if (some_seen) {
{{ products("start") }}
{% for i in range(micro) %}
        logits_{{ i }} = vec4<f32>(logit_of(sum_{{ i }}.x), logit_of(sum_{{ i }}.y), logit_of(sum_{{ i }}.z), logit_of(sum_{{ i }}.w));
{% endfor %}
    }
{% for i in range(micro) %}
    write_row(batch, head, records, first + own_row + {{ 16 * i }}u, start, own_key, logits_{{ i }});
{% endfor %}
}

struct Entry {
    to: f32,
    raw: f32,
}

// What belongs to a row and a key, from its logit before the bias.
fn entry(batch: u32, head: u32, line: u32, what: vec4<u32>, how: vec4<f32>, key: u32, capped: f32) -> Entry {
    if (key >= params.k_length) { return Entry(0.0, 0.0); }
    if (what.w == 1u) { return Entry(not_a_number(), not_a_number()); }
    var seen = what.w == 0u && key >= what.y && key < what.z;
{% if variant.mask %}
    seen = in_view(batch, head, what.x, key, seen);
{% endif %}
    if (!seen) { return Entry(0.0, 0.0); }
    let p = power(whole_logit(capped, batch, head, what.x, key) - how.x) * how.y;
{% if grad %}
    let g = load_grad(batch * params.g_b + head * params.g_h + line * params.g_q + key * params.g_k);
    let moved = p * ({{ "dropped(batch, head, what.x, key, g)" if variant.dropout else "g" }} - how.z);
    return Entry(moved * params.scale{% if variant.cap %} * cap_slope(capped){% endif %}, moved);
{% else %}
{% if variant.dropout %}
    return Entry(dropped(batch, head, what.x, key, p), 0.0);
{% else %}
    return Entry(p, p);
{% endif %}
{% endif %}
}

// The keys of a thread: two pairs of neighbours.
fn write_row(batch: u32, head: u32, records: u32, line: u32, start: u32, own_key: u32, capped: vec4<f32>) {
    if (line >= params.count) { return; }
    let what = load_stats(2u * (records + line));
    let how = bitcast<vec4<f32>>(load_stats(2u * (records + line) + 1u));
    for (var pair = 0u; pair < 2u; pair++) {
        let key = start + 2u * own_key + 32u * pair;
        let even = entry(batch, head, line, what, how, key, select(capped.x, capped.y, pair == 1u));
        let odd = entry(batch, head, line, what, how, key + 1u, select(capped.z, capped.w, pair == 1u));
        let at = (records + line) * params.columns + key;
{% if to and width == 2 %}
        if (key < params.columns) { store_to(at / 2u, vec2<f32>(even.to, odd.to)); }
{% elif to %}
        if (key < params.columns) { store_to(at, even.to); }
        if (key + 1u < params.columns) { store_to(at + 1u, odd.to); }
{% endif %}
{% if raw %}
        if (key < params.columns) { store_raw(at, even.raw); }
        if (key + 1u < params.columns) { store_raw(at + 1u, odd.raw); }
{% endif %}
    }
}
{% endif %}
