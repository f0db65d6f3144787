// Attention backward (Dao, "FlashAttention-2", 2023), one template for both halves of it:
//
//   p_ij = exp(s_ij - lse_i)      ds_ij = p_ij (dO_i · v_j - delta_i)      (s capped: times the slope of the cap)
//   side "queries"   dq_i = scale Σ_j ds_ij k_j
//   side "keys"      dk_j = scale Σ_i ds_ij q_i      dv_j = Σ_i p_ij dO_i      over all query heads of a key head
//
//   q, grad, dq (B, Hq, Sq, ·)   k, v, dk, dv (B, Hk, Sk, ·)   any strides, in vectors of four; packed (1, H, T, ·)
//   stats       see attention_stats.wgsl
//
// A workgroup owns a tile of rows of one side, in registers: {{ lanes }} lanes share {{ rows }} rows, and each has every
// {{ lanes }}th vector of them. The rows of the other side stream through workgroup memory, in chunks of {{ chunk }}. A lane's
// products are parts of sums over the lanes: a transposing butterfly of shuffles (without subgroups: workgroup memory)
// leaves each lane whole scores of one own row, as few as possible, and from there the weights go back to all lanes. Every
// sum has one order: no atomics, and the same bits every time.
//
// One workgroup array per unrolled index: compilers check an index once, and not once per element.
//
{% if chain %}
// As in attention_forward.wgsl, sums go to memory after {{ chain // tile * tile }} streamed rows and begin anew: one long chain of additions would
// lose a digit.
//
{% endif %}
{% if windowed %}
// Heads that are larger than a binding come in windows, one dispatch for each pair of them: own rows and their results, mask
// and bias begin at window_first, streamed rows, and the other dim of mask and bias, at streamed_first. The sums of earlier
// windows of streamed rows, and of query heads of the group, are read again (`resumes`) and go on as a chain does; the last
// dispatch `finishes` them.
//
{% endif %}
// variables: windowed (bool); to, the dtype of the results (float32 where they go to memory on their way);
//            variant (see scores.wgsl), side, dtype, first (vectors of a row of q, k), second (of v, dO), rows, lanes,
//            threads, tile (streamed rows in workgroup memory), chunk, subgroups (bool), chain (rows after which sums go to
//            memory, a tile and more, or 0),
//            want_first, want_second (side "keys": dk, dv)
// parameters: results, mask and bias begin at own row window_first; stats of the first row and length at stats_first and
//             length_first
{% import "scores.wgsl" as scores with context %}
{% set queries = side == "queries" %}
{% set chain = chain // tile * tile %}
{% set own, streamed = (("q", "grad"), ("k", "v")) if queries else (("k", "v"), ("q", "grad")) %}
{% set result_first, result_second = ("dq", "") if queries else ("dk" if want_first else "", "dv" if want_second else "") %}
{% set need_second = result_first != "" %}{# the products dO · v #}
{% set may_hide = variant.mask or variant.bias != "" %}{# single scores, where a tile is wholly visible by the band #}
{% set groups = threads // lanes %}
{% set own_tile = groups * rows %}
{% set chunks = tile // chunk %}
{% set first_each = (first + lanes - 1) // lanes %}{# vectors of a row that a lane has #}
{% set second_each = (second + lanes - 1) // lanes %}
{% set spread = [lanes // rows, chunk] | min if subgroups else 1 %}{# lanes that share the scores of one own row #}
{% set slots = chunk // spread %}{# scores that a lane has of a chunk #}
{{ input("q", dtype, 4) }}
{{ input("k", dtype, 4) }}
{{ input("v", dtype, 4) }}
{{ input("grad", dtype, 4) }}
{{ input("stats", "u32", 2) }}
{% if variant.mask %}
{{ input("mask", "u8", 1) }}
{% endif %}
{% if variant.bias %}
{{ input("bias", variant.bias, 1) }}
{% endif %}
{% if variant.packed %}
{{ input("tiles", "i32", 1) }}
{% endif %}
{% if result_first %}
{{ output(result_first, to, 4) }}
{% endif %}
{% if result_second %}
{{ output(result_second, to, 4) }}
{% endif %}
{% set strides = ["q_b: u32, q_h: u32, q_s: u32, k_b: u32, k_h: u32, k_s: u32, v_b: u32, v_h: u32, v_s: u32, grad_b: u32, grad_h: u32, grad_s: u32"] %}
{% for name in (result_first, result_second) if name %}
{% do strides.append("%s_b: u32, %s_h: u32, %s_s: u32" % (name, name, name)) %}
{% endfor %}
{{ params("tile_count: u32, window_first: i32, window_past: i32, stats_first: u32, length_first: u32, " ~ ("streamed_first: i32, streamed_past: i32, resumes: u32, finishes: u32, " if windowed else "") ~ strides | join(", ") ~ ", " ~ scores.fields(variant)) }}
{% if variant.lengths %}
// The lengths lie before the rows' numbers.
fn load_aux(batch: u32) -> u32 { return load_stats(params.length_first + batch).x; }
{% endif %}
{{ scores.functions(variant) }}
{{ scores.logits(variant) }}
const EMPTY_LSE = 1e30f; // what stats hold for a row that sees nothing

{% for x in range(chunk) %}
var<workgroup> first{{ x }}: array<vec4<f32>, {{ chunks * first_each * lanes }}>;
var<workgroup> second{{ x }}: array<vec4<f32>, {{ chunks * second_each * lanes }}>;
{% endfor %}
{% if not queries %}
var<workgroup> streamed_stats: array<vec2<f32>, {{ tile }}>; // lse, delta
{% endif %}
{% if not subgroups %}
// Parts of sums [own row of the lanes][thread], one row of padding against bank conflicts; weights [own row of the tile].
var<workgroup> parts_first: array<vec4<f32>, {{ rows * (threads + 1) }}>;
{% if need_second %}
var<workgroup> parts_second: array<vec4<f32>, {{ rows * (threads + 1) }}>;
var<workgroup> weights_first: array<vec4<f32>, {{ own_tile }}>;
{% endif %}
{% if result_second %}
var<workgroup> weights_second: array<vec4<f32>, {{ own_tile }}>;
{% endif %}
{% endif %}

{# Load a tile of one streamed tensor: every thread takes the vectors whose place in an array is its own. #}
{% macro load_tile(array, name, vectors, each) %}
{% set width = each * lanes %}
{% set size = chunks * width %}
{% set together = [threads // size, 1] | max %}{# arrays that all threads fill at once #}
    {
{% if together > 1 %}
        let slot = thread % {{ size }}u;
        let part = thread / {{ size }}u;
{% endif %}
{% for x in range(0, chunk, together) %}
{% for y in range((size + threads - 1) // threads) %}
        {
{% if together == 1 %}
            let slot = thread + {{ y * threads }}u;
            let part = 0u;
{% endif %}
            let column = slot % {{ width }}u;
            let row = min(at + i32(slot / {{ width }}u * {{ chunk }}u + {{ x }}u + part), past - 1);
            let value = {{ guarded(name, vectors, width) }};
{% if together == 1 %}
{% if size % threads and (y + 1) * threads > size %}
            if (slot < {{ size }}u) { {{ array }}{{ x }}[slot] = value; }
{% else %}
            {{ array }}{{ x }}[slot] = value;
{% endif %}
{% else %}
{% for z in range([together, chunk - x] | min) %}
            {{ "else " if z }}if (part == {{ z }}u) { {{ array }}{{ x + z }}[slot] = value; }
{% endfor %}
{% endif %}
        }
{% endfor %}
{% endfor %}
    }
{% endmacro %}
{# A vector of a streamed row: zeros past the row's end, and for a query that sees nothing, whose numbers mean nothing. #}
{% macro guarded(name, vectors, width) -%}
{% set value = "load_%s(%s_base + u32(row) * params.%s_s + column)" % (name, name, name) %}
{% set conditions = [] %}
{% if width > vectors %}{% do conditions.append("(column < %du)" % vectors) %}{% endif %}
{% if may_hide and not queries %}{% do conditions.append("(bitcast<f32>(load_stats(stats_base + u32(row)).x) != EMPTY_LSE)") %}{% endif %}
{{- "select(vec4<f32>(), %s, %s)" % (value, conditions | join(" & ")) if conditions else value -}}
{%- endmacro %}
{# Partial products sum{i}_{kk} of own row i and streamed row kk. #}
{% macro products(sum, mine, array, each) %}
{% for kk in range(chunk) %}
{% for i in range(rows) %}
            var {{ sum }}{{ i }}_{{ kk }}: f32;
{% endfor %}
            {
{% for n in range(each) %}
                let other{{ n }} = {{ array }}{{ kk }}[{{ array }}_at + {{ n * lanes }}u];
{% endfor %}
{% for n in range(each) %}
{% for axis in "xyzw" %}
{% for i in range(rows) %}
{% if n == 0 and axis == "x" %}
                {{ sum }}{{ i }}_{{ kk }} = {{ mine }}{{ i }}_0.x * other0.x;
{% else %}
                {{ sum }}{{ i }}_{{ kk }} = fma({{ mine }}{{ i }}_{{ n }}.{{ axis }}, other{{ n }}.{{ axis }}, {{ sum }}{{ i }}_{{ kk }});
{% endif %}
{% endfor %}
{% endfor %}
{% endfor %}
            }
{% endfor %}
{% endmacro %}
{# Sums over the lanes: afterwards lane l has sum_0 … of own row l % rows, for the streamed rows from slot_first on. #}
{% macro reduce_in_registers(sum) %}
{% set state = namespace(step=1, values=[]) %}
{% for i in range(rows) %}
{% set of_row = [] %}
{% for kk in range(chunk) %}{% do of_row.append("%s%d_%d" % (sum, i, kk)) %}{% endfor %}
{% do state.values.append(of_row) %}
{% endfor %}
{% for level in range(8) if 2 ** level < lanes %}
{% set step = 2 ** level %}
{% set lists = state.values %}
{% set next = [] %}
{% if lists | length > 1 %}
{# Half of the own rows stay, the others' parts go to the neighbour. #}
{% for i in range(0, lists | length, 2) %}
{% set kept = [] %}
{% for m in range(lists[i] | length) %}
{% set a, b = lists[i][m], lists[i + 1][m] %}
            let {{ a }}_{{ step }} = select({{ a }}, {{ b }}, odd{{ step }}) + subgroupShuffleXor(select({{ b }}, {{ a }}, odd{{ step }}), {{ step }}u);
{% do kept.append("%s_%d" % (a, step)) %}
{% endfor %}
{% do next.append(kept) %}
{% endfor %}
{% elif lists[0] | length > 1 %}
{# One own row is left: half of the streamed rows stay. #}
{% set kept = [] %}
{% set half = lists[0] | length // 2 %}
{% for m in range(half) %}
{% set a, b = lists[0][m], lists[0][half + m] %}
            let {{ a }}_{{ step }} = select({{ a }}, {{ b }}, odd{{ step }}) + subgroupShuffleXor(select({{ b }}, {{ a }}, odd{{ step }}), {{ step }}u);
{% do kept.append("%s_%d" % (a, step)) %}
{% endfor %}
{% do next.append(kept) %}
{% else %}
            let {{ lists[0][0] }}_{{ step }} = {{ lists[0][0] }} + subgroupShuffleXor({{ lists[0][0] }}, {{ step }}u);
{% do next.append(["%s_%d" % (lists[0][0], step)]) %}
{% endif %}
{% set state.values = next %}
{% endfor %}
{% for m in range(slots) %}
            let {{ sum }}_{{ m }} = {{ state.values[0][m] }};
{% endfor %}
{% endmacro %}
{# The weight of own row i and streamed row kk, from the lane that has it. #}
{% macro weight(name, i, kk) -%}
{% if subgroups -%}
{% set state = namespace(lane=i, step=rows, half=chunk // 2) %}
{% for level in range(8) if state.step < lanes and state.half >= 1 %}
{% set state.lane = state.lane + state.step * (kk // state.half % 2) %}
{% set state.step = state.step * 2 %}
{% set state.half = state.half // 2 %}
{% endfor %}
subgroupShuffle({{ name }}_{{ kk % slots }}, lanes_first + {{ state.lane }}u)
{%- else -%}
{{ name }}{{ i }}.{{ "xyzw"[kk] }}
{%- endif %}
{%- endmacro %}
{# sum{i} += weight(i, kk) · streamed row kk #}
{% macro accumulate(sum, name, array, each) %}
{% for kk in range(chunk) %}
            {
{% for i in range(rows) %}
                let w{{ i }} = {{ weight(name, i, kk) | trim }};
{% endfor %}
{% if may_hide and queries %}
                // A key that is hidden from all of these rows may hold NaN, and zero times NaN is NaN.
                if ((({% for i in range(rows) %}{{ " | " if i }}bitcast<u32>(w{{ i }}){% endfor %}) & 0x7fffffffu) != 0u) {
{% endif %}
{% for n in range(each) %}
                let other{{ n }} = {{ array }}{{ kk }}[{{ array }}_at + {{ n * lanes }}u];
{% for i in range(rows) %}
                {{ sum }}{{ i }}_{{ n }} = fma(vec4<f32>(w{{ i }}), other{{ n }}, {{ sum }}{{ i }}_{{ n }});
{% endfor %}
{% endfor %}
{% if may_hide and queries %}
                }
{% endif %}
            }
{% endfor %}
{% endmacro %}
{# Rows that a workgroup owns, into registers. #}
{% macro load_own(mine, name, vectors, each) %}
{% for i in range(rows) %}
{% for n in range(each) %}
{% set value = "load_%s(%s_base + own_row%d * params.%s_s + lane + %du)" % (name, name, i, name, n * lanes) %}
{% if each * lanes > vectors and n == each - 1 %}
    let {{ mine }}{{ i }}_{{ n }} = select(vec4<f32>(), {{ value }}, lane + {{ n * lanes }}u < {{ vectors }}u);
{% else %}
    let {{ mine }}{{ i }}_{{ n }} = {{ value }};
{% endif %}
{% endfor %}
{% endfor %}
{% endmacro %}
{% macro of_lane(n, vectors, each) -%}
{{ "if (lane + %du < %du) " % (n * lanes, vectors) if each * lanes > vectors and n == each - 1 }}
{%- endmacro %}
{# Sums so far, into the rows of the result. #}
{% macro keep(sum, i, name, vectors, each) %}
            {
                let row = own_first + i32(group * {{ rows }}u) + {{ i }};
                if (row >= window_first && row < window_past) {
                    let {{ name }}_at = {{ name }}_base + u32(row - window_first) * params.{{ name }}_s;
{% for n in range(each) %}
                    {{ of_lane(n, vectors, each) }}{
                        if (has_kept) { {{ sum }}{{ i }}_{{ n }} += load_{{ name }}({{ name }}_at + {{ n * lanes }}u); }
                        store_{{ name }}({{ name }}_at + {{ n * lanes }}u, {{ sum }}{{ i }}_{{ n }});
                    }
{% endfor %}
                }
{% for n in range(each) %}
                {{ sum }}{{ i }}_{{ n }} = vec4<f32>();
{% endfor %}
            }
{% endmacro %}
{% macro store_own(sum, name, vectors, each, factor) %}
{% for n in range(each) %}
            {{ of_lane(n, vectors, each) }}{
{% if chain %}
                if (has_kept) { {{ sum }}_{{ n }} += load_{{ name }}({{ name }}_at + {{ n * lanes }}u); }
{% endif %}
{% if windowed %}
                if (params.finishes == 0u) {
                    store_{{ name }}({{ name }}_at + {{ n * lanes }}u, {{ sum }}_{{ n }});
                } else {
                    store_{{ name }}({{ name }}_at + {{ n * lanes }}u, finished({{ sum }}_{{ n }}{{ factor }}, none, bad));
                }
{% else %}
                store_{{ name }}({{ name }}_at + {{ n * lanes }}u, finished({{ sum }}_{{ n }}{{ factor }}, none, bad));
{% endif %}
            }
{% endfor %}
{% endmacro %}
{# Streamed rows that an own row sees, of those that are bound. #}
{% macro visible(row) -%}
{% set range = "visible_keys(%s + offset, keys)" % row if queries else "visible_queries(%s, queries, keys)" % row %}
{{ "within(%s, streamed_window)" % range if windowed else range }}
{%- endmacro %}
{% if windowed %}
fn within(range: vec2<i32>, window: vec2<i32>) -> vec2<i32> {
    return vec2<i32>(max(range.x, window.x), max(min(range.y, window.y), 0));
}
{% endif %}
fn finished(sum: vec4<f32>, none: bool, bad: bool) -> vec4<f32> {
    let value = select(sum, vec4<f32>(), none);
    return select(value, vec4<f32>(not_a_number()), bad);
}

@compute @workgroup_size({{ threads }})
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(num_workgroups) workgroups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32{{ ", @builtin(subgroup_invocation_id) subgroup_lane: u32" if subgroups }}) {
    let place = workgroup.x + workgroup.y * workgroups.x;
    let own_heads = params.heads{{ "" if queries else " / params.group" }};
    let problems = params.batch * own_heads;
    if (place >= problems * params.tile_count) { return; }
    let own_head = place % problems % own_heads;
    let batch = place % problems / own_heads;
{% if queries and variant.right %}
    // Under a causal mask the last tiles have most to do: they go first.
    let entry = params.tile_count - 1u - place / problems;
{% else %}
    let entry = place / problems;
{% endif %}
{% if variant.packed %}
    let state = load_tiles(entry * 8u + 5u);
    if (state == 2) { return; }
    let bad = state == 3;
    let own_start = u32(load_tiles(entry * 8u));
    let own_count = load_tiles(entry * 8u + 1u);
    let streamed_start = u32(load_tiles(entry * 8u + 2u));
    let streamed_count = load_tiles(entry * 8u + 3u);
    let own_first = load_tiles(entry * 8u + 4u) * {{ own_tile }};
    let {{ "queries" if queries else "keys" }} = own_count;
    let {{ "keys" if queries else "queries" }} = streamed_count;
{% else %}
    let own_start = 0u;
    let streamed_start = 0u;
    let own_count = i32(params.{{ "q" if queries else "k" }}_length);
    let own_first = i32(entry) * {{ own_tile }};
    let queries = i32(params.q_length);
    let length = keys_of(batch);
    let bad = length < 0;
    let keys = max(length, 0);
{% endif %}
    let offset = keys - queries;
    // Results, masks and biases that are too large to bind at once come in windows of own rows.
    let window_first = params.window_first - i32(own_start);
    let window_past = min(params.window_past - i32(own_start), own_count);
    if (own_first >= window_past || own_first + {{ own_tile }} <= window_first) { return; }

    // Streamed rows [start, past) are seen by some own row; all own rows see those in [whole, whole_past).
    let own_last = min(own_first + {{ own_tile }}, {{ "queries" if queries else "keys" }}) - 1;
{% if windowed %}
    let streamed_window = vec2<i32>(params.streamed_first, params.streamed_past) - i32(streamed_start);
{% endif %}
{% if queries %}
    let seen_by_first = {{ visible("own_first") }};
    let seen_by_last = {{ visible("own_last") }};
    let start = seen_by_first.x;
    let past = seen_by_last.y;
    let whole = seen_by_last.x;
    let whole_past = seen_by_first.y;
{% else %}
    let seeing_first = {{ visible("own_first") }};
    let seeing_last = {{ visible("own_last") }};
    let start = seeing_first.x;
    let past = select(0, seeing_last.y, own_last >= own_first);
    let whole = seeing_last.x;
    let whole_past = seeing_first.y;
{% endif %}

    let lane = thread % {{ lanes }}u;
    let group = thread / {{ lanes }}u;
{% if subgroups %}
    let lanes_first = subgroup_lane - subgroup_lane % {{ lanes }}u;
{% for level in range(8) if 2 ** level < lanes %}
    let odd{{ 2 ** level }} = (lane & {{ 2 ** level }}u) != 0u;
{% endfor %}
{% endif %}

{# Of what is bound; they may be below 0, and wrap. #}
{% set own_bound = "(own_start - u32(params.window_first))" if windowed else "own_start" %}
{% set streamed_bound = "(streamed_start - u32(params.streamed_first))" if windowed else "streamed_start" %}
    let {{ own[0] }}_base = batch * params.{{ own[0] }}_b + own_head * params.{{ own[0] }}_h + {{ own_bound }} * params.{{ own[0] }}_s;
    let {{ own[1] }}_base = batch * params.{{ own[1] }}_b + own_head * params.{{ own[1] }}_h + {{ own_bound }} * params.{{ own[1] }}_s;
    let own_exists = max({{ "queries" if queries else "keys" }}, 1) - 1;
{% for i in range(rows) %}
{% if windowed %}
    let own_row{{ i }} = u32(clamp(own_first + i32(group * {{ rows }}u) + {{ i }}, max(window_first, 0), window_past - 1));
{% else %}
    let own_row{{ i }} = u32(min(own_first + i32(group * {{ rows }}u) + {{ i }}, own_exists));
{% endif %}
{% endfor %}
{{ load_own("mine", own[0], first, first_each) }}
{% if need_second %}
{{ load_own("mine_second", own[1], second, second_each) }}
{% endif %}
{% for i in range(rows) %}
{% for n in range(first_each) if result_first %}
    var sum{{ i }}_{{ n }} = vec4<f32>();
{% endfor %}
{% for n in range(second_each) if result_second %}
    var sum_second{{ i }}_{{ n }} = vec4<f32>();
{% endfor %}
{% endfor %}

{% for name in (result_first, result_second) if name %}
    let {{ name }}_base = batch * params.{{ name }}_b + own_head * params.{{ name }}_h + lane;
{% endfor %}
{% if chain %}
    var chained = 0; // rows that are in the sums
    var has_kept = {{ "params.resumes != 0u" if windowed else "false" }};
{% endif %}

    // The own row whose scores this lane computes, what it may see, and from which streamed row of a chunk on.
    let my_row = own_first + i32(group * {{ rows }}u + lane % {{ rows }}u);
{% if may_hide %}
    let my_row_seen = u32(my_row - window_first); // by mask and bias
    let my_row_outside = my_row < window_first || my_row >= window_past;
{% endif %}
    let my_range = {{ visible("my_row") }};
{% if spread > 1 %}
    var slot_first = 0;
{% set state = namespace(step=rows, half=chunk // 2) %}
{% for level in range(8) if state.step < lanes and state.half >= 1 %}
    slot_first += select(0, {{ state.half }}, odd{{ state.step }});
{% set state.step = state.step * 2 %}
{% set state.half = state.half // 2 %}
{% endfor %}
{% else %}
    let slot_first = 0;
{% endif %}

{% if queries %}
    let head = own_head;
    let streamed_head = head / params.group;
    let stats_base = params.stats_first + (batch * params.heads + head) * params.q_length + own_start;
    let own_stats = bitcast<vec2<f32>>(load_stats(stats_base + u32(clamp(my_row, 0, own_exists))));
    let lse = own_stats.x;
    let delta = own_stats.y;
    {
{% else %}
    for (var member = 0u; member < params.group; member++) {
    let head = own_head * params.group + member;
    let streamed_head = head;
    let stats_base = params.stats_first + (batch * params.heads + head) * params.q_length + streamed_start;
{% endif %}
    let {{ streamed[0] }}_base = batch * params.{{ streamed[0] }}_b + streamed_head * params.{{ streamed[0] }}_h + {{ streamed_bound }} * params.{{ streamed[0] }}_s;
    let {{ streamed[1] }}_base = batch * params.{{ streamed[1] }}_b + streamed_head * params.{{ streamed[1] }}_h + {{ streamed_bound }} * params.{{ streamed[1] }}_s;
{% if chain %}
    for (var chain_first = start; chain_first < past; chain_first += {{ chain }}) {
    let chain_past = min(past, chain_first + {{ chain }});
    let more = chain_past - chain_first;
    if (chained + more > {{ chain }}) {
{% for i in range(rows) %}
{% if result_first %}
{{ keep("sum", i, result_first, first, first_each) }}
{% endif %}
{% if result_second %}
{{ keep("sum_second", i, result_second, second, second_each) }}
{% endif %}
{% endfor %}
        has_kept = true;
        chained = 0;
    }
    chained += more;
{% else %}
    let chain_first = start;
    let chain_past = past;
    {
{% endif %}
    for (var at = chain_first; at < chain_past; at += {{ tile }}) {
        workgroupBarrier();
{{ load_tile("first", streamed[0], first, first_each) }}
{{ load_tile("second", streamed[1], second, second_each) }}
{% if not queries %}
{% for y in range(0, tile, threads) %}
        if (thread + {{ y }}u < {{ tile }}u) {
            streamed_stats[thread + {{ y }}u] = bitcast<vec2<f32>>(load_stats(stats_base + u32(min(at + i32(thread + {{ y }}u), past - 1))));
        }
{% endfor %}
{% endif %}
        workgroupBarrier();
        let partial = at < whole || at + {{ tile }} > whole_past;
        for (var i = 0u; i < {{ chunks }}u; i++) {
            let chunk_first = at + i32(i * {{ chunk }}u);
            if (chunk_first >= past) { break; }
{% if subgroups and (variant.left or variant.right) %}
            if (partial && subgroupAll(chunk_first >= my_range.y || chunk_first + {{ chunk }} <= my_range.x)) { continue; }
{% endif %}
            let first_at = i * {{ first_each * lanes }}u + lane;
            let second_at = i * {{ second_each * lanes }}u + lane;
{{ products("s", "mine", "first", first_each) }}
{% if need_second %}
{{ products("dp", "mine_second", "second", second_each) }}
{% endif %}
{% if subgroups %}
{{ reduce_in_registers("s") }}
{% if need_second %}
{{ reduce_in_registers("dp") }}
{% endif %}
{% else %}
{% for i in range(rows) %}
            parts_first[thread + {{ i * (threads + 1) }}u] = vec4<f32>({% for kk in range(4) %}{{ ", " if kk }}s{{ i }}_{{ kk }}{% endfor %});
{% if need_second %}
            parts_second[thread + {{ i * (threads + 1) }}u] = vec4<f32>({% for kk in range(4) %}{{ ", " if kk }}dp{{ i }}_{{ kk }}{% endfor %});
{% endif %}
{% endfor %}
            workgroupBarrier();
            let parts_at = lane % {{ rows }}u * {{ threads + 1 }}u + group * {{ lanes }}u;
            var s_all = parts_first[parts_at];
{% if need_second %}
            var dp_all = parts_second[parts_at];
{% endif %}
{% for other in range(1, lanes) %}
            s_all += parts_first[parts_at + {{ other }}u];
{% if need_second %}
            dp_all += parts_second[parts_at + {{ other }}u];
{% endif %}
{% endfor %}
{% for kk in range(4) %}
            let s_{{ kk }} = s_all.{{ "xyzw"[kk] }};
{% if need_second %}
            let dp_{{ kk }} = dp_all.{{ "xyzw"[kk] }};
{% endif %}
{% endfor %}
{% endif %}
{% for m in range(slots) %}
{% if not queries %}
            let pair{{ m }} = streamed_stats[i * {{ chunk }}u + u32(slot_first + {{ m }})];
{% endif %}
{% set lse = "lse" if queries else "pair%d.x" % m %}
{% set delta = "delta" if queries else "pair%d.y" % m %}
            let capped{{ m }} = logit_of(s_{{ m }});
{% if may_hide %}
            let other_row{{ m }} = u32(chunk_first + slot_first + {{ m }}{{ " - params.streamed_first" if windowed }});
{% set query, key = ("my_row_seen", "other_row%d" % m) if queries else ("other_row%d" % m, "my_row_seen") %}
{% endif %}
{% if variant.bias %}
            let added{{ m }} = bias_of(batch, head, {{ query }}, {{ key }});
            let logit{{ m }} = biased(capped{{ m }}, added{{ m }});
{% else %}
            let logit{{ m }} = capped{{ m }};
{% endif %}
            var p_{{ m }} = exp2((logit{{ m }} - {{ lse }}) * LOG2E);
{% if need_second %}
            var ds_{{ m }} = p_{{ m }} * (dp_{{ m }} - {{ delta }}){{ " * cap_slope(capped%d)" % m if variant.cap }};
{% endif %}
{% if may_hide %}
            // Not ||, which is a branch each: too many for some compilers.
            let hidden{{ m }} = my_row_outside | {{ "masked_out(batch, head, %s, %s)" % (query, key) if variant.mask }}{{ " | " if variant.mask and variant.bias }}{{ "(bitcast<u32>(added%d) == 0xff800000u)" % m if variant.bias }};
            p_{{ m }} = select(p_{{ m }}, 0.0, hidden{{ m }});
{% if need_second %}
            ds_{{ m }} = select(ds_{{ m }}, 0.0, hidden{{ m }});
{% endif %}
{% endif %}
{% endfor %}
            if (partial) {
{% for m in range(slots) %}
                {
                    let row = chunk_first + slot_first + {{ m }};
                    let seen = (row >= my_range.x) & (row < my_range.y);
                    p_{{ m }} = select(0.0, p_{{ m }}, seen);
{% if need_second %}
                    ds_{{ m }} = select(0.0, ds_{{ m }}, seen);
{% endif %}
                }
{% endfor %}
            }
{% if not subgroups %}
            if (lane < {{ rows }}u) {
{% if need_second %}
                weights_first[group * {{ rows }}u + lane] = vec4<f32>(ds_0, ds_1, ds_2, ds_3);
{% endif %}
{% if result_second %}
                weights_second[group * {{ rows }}u + lane] = vec4<f32>(p_0, p_1, p_2, p_3);
{% endif %}
            }
            workgroupBarrier();
{% for i in range(rows) %}
{% if need_second %}
            let ds{{ i }} = weights_first[group * {{ rows }}u + {{ i }}u];
{% endif %}
{% if result_second %}
            let p{{ i }} = weights_second[group * {{ rows }}u + {{ i }}u];
{% endif %}
{% endfor %}
{% endif %}
{% if result_first %}
{{ accumulate("sum", "ds", "first", first_each) }}
{% endif %}
{% if result_second %}
{{ accumulate("sum_second", "p", "second", second_each) }}
{% endif %}
        }
    }
    }
    }

{% for i in range(rows) %}
    {
        let row = own_first + i32(group * {{ rows }}u) + {{ i }};
        if (row >= window_first && row < window_past) {
{% if queries %}
            // A row that sees nothing has no gradient, whatever its inputs hold.
            let none = bitcast<f32>(load_stats(stats_base + u32(row)).x) == EMPTY_LSE;
{% else %}
            let none = row >= keys;
{% endif %}
{% if result_first %}
            let {{ result_first }}_at = {{ result_first }}_base + u32(row - window_first) * params.{{ result_first }}_s;
{{ store_own("sum%d" % i, result_first, first, first_each, " * params.scale") }}
{% endif %}
{% if result_second %}
            let {{ result_second }}_at = {{ result_second }}_base + u32(row - window_first) * params.{{ result_second }}_s;
{{ store_own("sum_second%d" % i, result_second, second, second_each, "") }}
{% endif %}
        }
    }
{% endfor %}
}
