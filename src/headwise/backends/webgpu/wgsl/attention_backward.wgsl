// Attention backward (Dao, "FlashAttention-2", 2023), one template for both halves of it:
//
//   p_ij = exp(s_ij - lse_i)      ds_ij = p_ij (D_ij dO_i · v_j - delta_i)      (s capped: times the slope of the cap)
//   side "queries"   dq_i = scale Σ_j ds_ij k_j
//   side "keys"      dk_j = scale Σ_i ds_ij q_i      dv_j = Σ_i D_ij p_ij dO_i      over all query heads of a key head
//
//   D is 1, or under dropout 0 or 1 / (1 - dropout)
//
//   q, grad, dq (B, Hq, Sq, ·)   k, v, dk, dv (B, Hk, Sk, ·)   any strides, in vectors of four; packed (1, H, T, ·)
//   stats       see attention_stats.wgsl
//
// A workgroup owns a tile of rows of one side, in registers: {{ lanes }} lanes share {{ rows }} rows, and each has every
// {{ lanes }}th vector of them. The rows of the other side stream through workgroup memory, in chunks of {{ chunk }}. Each lane
// computes partial products. A transposing butterfly of shuffles (without subgroups: workgroup memory) sums them and leaves
// each lane a few scores of one own row; the weights of these go back to all lanes. All sums have a fixed order: no atomics,
// and the same bits every time. The macros for rows are in attention_backward_rows.wgsl.
//
{% if chain %}
// As in attention_forward.wgsl, sums go to memory after {{ chain // streamed_rows * streamed_rows }} streamed rows and start again, for precision.
//
{% endif %}
{% if ranged %}
// Heads that are larger than a binding are cut into ranges, with one dispatch for each pair. Own rows, their results and bias
// start at range_first; streamed rows, and the other dim of the bias, at streamed_first. Sums continue those
// of earlier ranges and query heads of the group (`resumes`), as a chain does; the last dispatch `finishes` them.
//
{% endif %}
// variables: ranged (bool); to, the dtype of the results (float32 where they go to memory on their way);
//            variant (see scores.wgsl), side, dtype, first (vectors of a row of q, k), second (of v, dO), rows, lanes,
//            threads, streamed_rows (in workgroup memory), chunk, subgroups (bool), chain (rows after which sums go to
//            memory, streamed_rows and more, or 0), want_first, want_second (side "keys": dk, dv)
// parameters: results and bias begin at own row range_first; stats of the first row are at stats_first
{% import "scores.wgsl" as scores with context %}
{% set queries = side == "queries" %}
{% set chain = chain // streamed_rows * streamed_rows %}
{% set own, streamed = (("q", "grad"), ("k", "v")) if queries else (("k", "v"), ("q", "grad")) %}
{% set result_first, result_second = ("dq", "") if queries else ("dk" if want_first else "", "dv" if want_second else "") %}
{% set need_second = result_first != "" %}{# the products dO · v #}
{% set may_hide = variant.mask != "" or variant.bias != "" %}{# single scores, where a tile is wholly visible by the band #}
{% set groups = threads // lanes %}
{% set own_tile = groups * rows %}
{% set chunks = streamed_rows // chunk %}
{% set first_each = (first + lanes - 1) // lanes %}{# vectors of a row that a lane has #}
{% set second_each = (second + lanes - 1) // lanes %}
{% set spread = [lanes // rows, chunk] | min if subgroups else 1 %}{# lanes that share the scores of one own row #}
{% set slots = chunk // spread %}{# scores that a lane has of a chunk #}
{% set own_words = [own_tile // 32, 1] | max %}{# of a query, with the bits of the own keys #}
{% import "attention_backward_rows.wgsl" as rows_of with context %}
{{ scores.backward_inputs(variant, dtype) }}
{% if variant.packed %}
{{ input("tiles", "i32", 1) }}
{% endif %}
{% if result_first %}
{{ output(result_first, to, 4) }}
{% endif %}
{% if result_second %}
{{ output(result_second, to, 4) }}
{% endif %}
{% set strides = scores.strides("q k v grad %s %s" % (result_first, result_second)) %}
{{ params("tile_count: u32, range_first: i32, range_past: i32, stats_first: u32, " ~ ("streamed_first: i32, streamed_past: i32, resumes: u32, finishes: u32, " if ranged else "") ~ strides ~ ", " ~ scores.fields(variant)) }}
{{ scores.functions(variant) }}
{{ scores.logits(variant) }}

{% for x in range(chunk) %}
var<workgroup> first{{ x }}: array<vec4<f32>, {{ chunks * first_each * lanes }}>;
var<workgroup> second{{ x }}: array<vec4<f32>, {{ chunks * second_each * lanes }}>;
{% endfor %}
{% if not queries %}
var<workgroup> streamed_stats: array<vec2<f32>, {{ streamed_rows }}>; // lse, delta
{% if variant.mask %}
var<workgroup> streamed_words: array<u32, {{ streamed_rows * own_words }}>; // of the mask
{% endif %}
{% endif %}
{% if not subgroups %}
// Partial sums [own row of the lanes][thread], one row of padding against bank conflicts; weights [own row of the tile].
var<workgroup> partials_first: array<vec4<f32>, {{ rows * (threads + 1) }}>;
{% if need_second %}
var<workgroup> partials_second: array<vec4<f32>, {{ rows * (threads + 1) }}>;
var<workgroup> weights_first: array<vec4<f32>, {{ own_tile }}>;
{% endif %}
{% if result_second %}
var<workgroup> weights_second: array<vec4<f32>, {{ own_tile }}>;
{% endif %}
{% endif %}

{# Streamed rows that an own row sees, of those that are bound. #}
{% macro visible(row) -%}
{% set seen = "visible_keys(%s + offset, extent)" % row if queries else "visible_queries(%s, extent)" % row %}
{{ "within(%s, streamed_range)" % seen if ranged else seen }}
{%- endmacro %}
{% if ranged %}
fn within(seen: vec2<i32>, range: vec2<i32>) -> vec2<i32> {
    return vec2<i32>(max(seen.x, range.x), max(min(seen.y, range.y), 0));
}
{% endif %}
{% if variant.mask %}
// A bit for each of the rows from `first` on, of this lane's slots, that lies in [seen.x, seen.y).
fn within_band(seen: vec2<i32>, first: i32) -> u32 {
    let low = u32(clamp(seen.x - first, 0, {{ slots }}));
    let high = u32(clamp(seen.y - first, 0, {{ slots }}));
    return ((1u << high) - 1u) & ~((1u << low) - 1u);
}
{% endif %}
fn finished(sum: vec4<f32>, none: bool, bad: bool) -> vec4<f32> {
    let value = select(sum, vec4<f32>(), none);
    return select(value, vec4<f32>(not_a_number()), bad);
}

@compute @workgroup_size({{ threads }}) {{ main(subgroup_lane=subgroups) }}
    let own_heads = params.heads{{ "" if queries else " / params.group" }};
    let problems = params.batch * own_heads;
    if (workgroup >= problems * params.tile_count) { return; }
    let own_head = workgroup % problems % own_heads;
    let batch = workgroup % problems / own_heads;
{% if queries and variant.right %}
    // Under a causal mask the last tiles have the most work: they go first.
    let entry = params.tile_count - 1u - workgroup / problems;
{% else %}
    let entry = workgroup / problems;
{% endif %}
{% if variant.packed %}
    let state = load_tiles(entry * 8u + 5u);
    if (state == 2) { return; }
    let own_start = u32(load_tiles(entry * 8u));
    let own_count = load_tiles(entry * 8u + 1u);
    let streamed_start = u32(load_tiles(entry * 8u + 2u));
    let streamed_count = load_tiles(entry * 8u + 3u);
    let own_first = load_tiles(entry * 8u + 4u) * {{ own_tile }};
    let extent = Extent(0, {{ "streamed_count, own_count" if queries else "own_count, streamed_count" }}, state == 3);
{% else %}
    let own_start = 0u;
    let streamed_start = 0u;
    let own_count = i32(params.{{ "q" if queries else "k" }}_length);
    let own_first = i32(entry) * {{ own_tile }};
    let extent = extent_of(batch);
{% endif %}
    let offset = extent.keys - extent.queries;
    let own_past = extent.{{ "queries" if queries else "keys" }};
    // Results and biases that are larger than a binding are cut into ranges of own rows.
    let range_first = params.range_first - i32(own_start);
    let range_past = min(params.range_past - i32(own_start), own_count);
    if (own_first >= range_past || own_first + {{ own_tile }} <= range_first) { return; }

    // Streamed rows [start, past) are seen by some own row; all own rows see those in [whole, whole_past).
    let own_last = min(own_first + {{ own_tile }}, own_past) - 1;
{% if ranged %}
    let streamed_range = vec2<i32>(params.streamed_first, params.streamed_past) - i32(streamed_start);
{% endif %}
    let seen_by_first = {{ visible("own_first") }};
    let seen_by_last = {{ visible("own_last") }};
    let start = seen_by_first.x{{ " / %d * %d" % (variant.bias_width, variant.bias_width) if variant.bias and variant.bias_width > 1 }};
    let past = select(0, seen_by_last.y, own_last >= {{ "own_first" if queries else "max(own_first, extent.first_key)" }});
    let whole = seen_by_last.x;
    let whole_past = seen_by_first.y;

    let lane = thread % {{ lanes }}u;
    let group = thread / {{ lanes }}u;
{% if subgroups %}
    let lanes_first = subgroup_lane - subgroup_lane % {{ lanes }}u;
{% for level in range(8) if 2 ** level < lanes %}
    let odd{{ 2 ** level }} = (lane & {{ 2 ** level }}u) != 0u;
{% endfor %}
{% endif %}

{# Of what is bound; they may be below 0, and wrap. #}
{% set own_bound = "(own_start - u32(params.range_first))" if ranged else "own_start" %}
{% set streamed_bound = "(streamed_start - u32(params.streamed_first))" if ranged else "streamed_start" %}
    let {{ own[0] }}_base = batch * params.{{ own[0] }}_b + own_head * params.{{ own[0] }}_h + {{ own_bound }} * params.{{ own[0] }}_s;
    let {{ own[1] }}_base = batch * params.{{ own[1] }}_b + own_head * params.{{ own[1] }}_h + {{ own_bound }} * params.{{ own[1] }}_s;
    let last_own = max(own_past, 1) - 1;
{% for i in range(rows) %}
{% if ranged %}
    let own_row{{ i }} = u32(clamp(own_first + i32(group * {{ rows }}u) + {{ i }}, max(range_first, 0), range_past - 1));
{% else %}
    let own_row{{ i }} = u32(min(own_first + i32(group * {{ rows }}u) + {{ i }}, last_own));
{% endif %}
{% endfor %}
{{ rows_of.load_own("mine", own[0], first, first_each) }}
{% if need_second %}
{{ rows_of.load_own("mine_second", own[1], second, second_each) }}
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
    var has_kept = {{ "params.resumes != 0u" if ranged else "false" }};
{% endif %}

    // The own row whose scores this lane computes, what it may see, and from which streamed row of a chunk on.
    let my_row = own_first + i32(group * {{ rows }}u + lane % {{ rows }}u);
{% if may_hide %}
{% if variant.bias %}
    let my_row_bound = u32(my_row - range_first); // in what is bound of the bias
{% endif %}
    let my_row_outside = my_row < {{ "range_first" if queries else "max(range_first, extent.first_key)" }} || my_row >= min(range_past, own_past);
{% if queries %}
    var saw = 0u; // bits of all weights of that row
{% endif %}
{% endif %}
    let my_visible = {{ visible("my_row") }};
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
{% if variant.mask %}
    // Queries of this workgroup, and the words of the mask of this lane's own.
    let of_first = u32(max(own_first, range_first));
    let of_last = u32(max(min(own_last, range_past - 1), i32(of_first)));
    let mask_row = mask_row_at(batch, head, clamp(u32(my_row), of_first, of_last));
{% endif %}
{% if variant.bias %}
    let bias_row = bias_row_at(batch, head, my_row_bound);
{% endif %}
    let streamed_head = head / params.group;
    let stats_base = params.stats_first + (batch * params.heads + head) * params.q_length + own_start;
    let own_stats = bitcast<vec2<f32>>(load_stats(stats_base + u32(clamp(my_row, 0, last_own))));
    let lse = own_stats.x;
    let delta = own_stats.y;
    {
{% else %}
{% if variant.mask %}
    // Where the bits of the own keys are.
    let mask_tile = u32(own_first) / 32u;
    let my_word = u32(my_row) / 32u - mask_tile;
    let my_bit = u32(my_row) % 32u;
{% endif %}
    for (var member = 0u; member < params.group; member++) {
    let head = own_head * params.group + member;
    let streamed_head = head;
    let stats_base = params.stats_first + (batch * params.heads + head) * params.q_length + streamed_start;
{% endif %}
{% if variant.dropout %}
    let dropout = dropout_of({{ "u32(load_tiles(entry * 8u + 6u))" if variant.packed else "params.first_batch + batch" }}, head);
{% endif %}
    let {{ streamed[0] }}_base = batch * params.{{ streamed[0] }}_b + streamed_head * params.{{ streamed[0] }}_h + {{ streamed_bound }} * params.{{ streamed[0] }}_s;
    let {{ streamed[1] }}_base = batch * params.{{ streamed[1] }}_b + streamed_head * params.{{ streamed[1] }}_h + {{ streamed_bound }} * params.{{ streamed[1] }}_s;
{% if chain %}
{% if variant.mask %}
    // A chain begins where the last tile of the one before ends: tiles that are skipped move that.
    var at = {{ rows_of.next_of("start") }};
    for (; at < past;) {
    let chain_first = at;
{% else %}
    for (var chain_first = start; chain_first < past; chain_first += {{ chain }}) {
{% endif %}
    let chain_past = min(past, chain_first + {{ chain }});
    let more = chain_past - chain_first;
    if (chained + more > {{ chain }}) {
{% if may_hide and queries %}
{{ rows_of.drop_unseen() }}
{% endif %}
{% for i in range(rows) %}
{% if result_first %}
{{ rows_of.keep("sum", i, result_first, first, first_each) }}
{% endif %}
{% if result_second %}
{{ rows_of.keep("sum_second", i, result_second, second, second_each) }}
{% endif %}
{% endfor %}
        has_kept = true;
        chained = 0;
    }
    chained += more;
{% else %}
    let chain_first = {{ rows_of.next_of("start") }};
    let chain_past = past;
    {
{% endif %}
    for ({{ "" if chain and variant.mask else "var at = chain_first" }}; at < chain_past; {{ rows_of.step("at", streamed_rows) }}) {
        workgroupBarrier();
{{ rows_of.load_tile("first", streamed[0], first, first_each) }}
{{ rows_of.load_tile("second", streamed[1], second, second_each) }}
{% if not queries %}
{% for y in range(0, streamed_rows, threads) %}
        if (thread + {{ y }}u < {{ streamed_rows }}u) {
            streamed_stats[thread + {{ y }}u] = bitcast<vec2<f32>>(load_stats(stats_base + u32(min(at + i32(thread + {{ y }}u), past - 1))));
        }
{% endfor %}
{% if variant.mask %}
{% for y in range(0, streamed_rows * own_words, threads) %}
        if (thread + {{ y }}u < {{ streamed_rows * own_words }}u) {
            let i = thread + {{ y }}u;
            let words_at = mask_row_at(batch, head, u32(min(at + i32(i / {{ own_words }}u), past - 1)));
            streamed_words[i] = load_mask(words_at + (mask_tile + i % {{ own_words }}u) * params.mask_word);
        }
{% endfor %}
{% endif %}
{% endif %}
        workgroupBarrier();
        let partial = at < whole || at + {{ streamed_rows }} > whole_past{{ " || !" ~ rows_of.mask_shows_all() if variant.mask }};
        for (var i = 0u; i < {{ chunks }}u; i++) {
            let chunk_first = at + i32(i * {{ chunk }}u);
            if (chunk_first >= past) { break; }
{% if variant.mask %}
            // Of the rows of this lane's slots, those that its own row sees or is seen by.
            var seen_bits = {{ 2 ** slots - 1 }}u;
            if (partial) {
{% if queries %}
                seen_bits = mask_bits(mask_row, u32(chunk_first + slot_first));
{% else %}
                seen_bits = 0u;
{% for m in range(slots) %}
                seen_bits |= ((streamed_words[(i * {{ chunk }}u + u32(slot_first + {{ m }})) * {{ own_words }}u + my_word] >> my_bit) & 1u) << {{ m }}u;
{% endfor %}
{% endif %}
                seen_bits = select(seen_bits & within_band(my_visible, chunk_first + slot_first), 0u, my_row_outside);
            }
{% if subgroups %}
            if (partial && subgroupAll(seen_bits == 0u)) { continue; }
{% endif %}
{% elif subgroups and (variant.left or variant.right) %}
            if (partial && subgroupAll(chunk_first >= my_visible.y || chunk_first + {{ chunk }} <= my_visible.x)) { continue; }
{% endif %}
{% if variant.bias %}
            // Read before the products, which take long.
{% set streamed_bound = "chunk_first + slot_first" ~ (" - params.streamed_first" if ranged else "") %}
{% if queries %}
{{ scores.biases(variant, "bias_row", "u32(%s)" % streamed_bound, slots) }}
{% else %}
{% for m in range(slots) %}
            let added{{ m }} = bias_of(batch, head, u32({{ streamed_bound }} + {{ m }}), my_row_bound);
{% endfor %}
{% endif %}
{% endif %}
            let first_at = i * {{ first_each * lanes }}u + lane;
            let second_at = i * {{ second_each * lanes }}u + lane;
{{ rows_of.products("s", "mine", "first", first_each) }}
{% if need_second %}
{{ rows_of.products("dp", "mine_second", "second", second_each) }}
{% endif %}
{% if subgroups %}
{{ rows_of.reduce_in_registers("s") }}
{% if need_second %}
{{ rows_of.reduce_in_registers("dp") }}
{% endif %}
{% else %}
{% for i in range(rows) %}
            partials_first[thread + {{ i * (threads + 1) }}u] = vec4<f32>({% for kk in range(4) %}{{ ", " if kk }}s{{ i }}_{{ kk }}{% endfor %});
{% if need_second %}
            partials_second[thread + {{ i * (threads + 1) }}u] = vec4<f32>({% for kk in range(4) %}{{ ", " if kk }}dp{{ i }}_{{ kk }}{% endfor %});
{% endif %}
{% endfor %}
            workgroupBarrier();
            let partials_at = lane % {{ rows }}u * {{ threads + 1 }}u + group * {{ lanes }}u;
            var s_all = partials_first[partials_at];
{% if need_second %}
            var dp_all = partials_second[partials_at];
{% endif %}
{% for other in range(1, lanes) %}
            s_all += partials_first[partials_at + {{ other }}u];
{% if need_second %}
            dp_all += partials_second[partials_at + {{ other }}u];
{% endif %}
{% endfor %}
{% for kk in range(4) %}
            let s_{{ kk }} = s_all.{{ "xyzw"[kk] }};
{% if need_second %}
            let dp_{{ kk }} = dp_all.{{ "xyzw"[kk] }};
{% endif %}
{% endfor %}
{% endif %}
{% if variant.dropout %}
            let kept_of_slots = {{ "kept_keys(dropout, u32(my_row), u32(chunk_first + slot_first), %du)" % slots if queries else "kept_queries(dropout, u32(chunk_first + slot_first), u32(my_row), %du)" % slots }};
{% endif %}
{% for m in range(slots) %}
{% if not queries %}
            let pair{{ m }} = streamed_stats[i * {{ chunk }}u + u32(slot_first + {{ m }})];
{% endif %}
{% set lse = "lse" if queries else "pair%d.x" % m %}
{% set delta = "delta" if queries else "pair%d.y" % m %}
            let capped{{ m }} = logit_of(s_{{ m }});
{% if variant.bias %}
            let logit{{ m }} = biased(capped{{ m }}, added{{ m }});
{% else %}
            let logit{{ m }} = capped{{ m }};
{% endif %}
            var p_{{ m }} = exp2((logit{{ m }} - {{ lse }}) * LOG2E);
{% if need_second %}
            var ds_{{ m }} = p_{{ m }} * ({{ "select(0.0, dp_%d * params.kept_scale, (kept_of_slots & %du) != 0u)" % (m, 2 ** m) if variant.dropout else "dp_%d" % m }} - {{ delta }}){{ " * cap_slope(capped%d)" % m if variant.cap }};
{% endif %}
{% if variant.bias %}
            // | instead of ||, which would be too many branches for some compilers.
            let hidden{{ m }} = my_row_outside | (bitcast<u32>(added{{ m }}) == 0xff800000u);
            p_{{ m }} = select(p_{{ m }}, 0.0, hidden{{ m }});
{% if need_second %}
            ds_{{ m }} = select(ds_{{ m }}, 0.0, hidden{{ m }});
{% endif %}
{% endif %}
{% endfor %}
            if (partial) {
{% for m in range(slots) %}
                {
{% if variant.mask %}
                    let seen = (seen_bits & {{ 2 ** m }}u) != 0u;
{% else %}
                    let row = chunk_first + slot_first + {{ m }};
                    let seen = (row >= my_visible.x) & (row < my_visible.y);
{% endif %}
                    p_{{ m }} = select(0.0, p_{{ m }}, seen);
{% if need_second %}
                    ds_{{ m }} = select(0.0, ds_{{ m }}, seen);
{% endif %}
                }
{% endfor %}
            }
{% if may_hide and queries %}
{% for m in range(slots) %}
            saw |= bitcast<u32>(p_{{ m }});
{% endfor %}
{% endif %}
{% if variant.dropout and result_second %}
{% for m in range(slots) %}
            p_{{ m }} = select(0.0, p_{{ m }}, (kept_of_slots & {{ 2 ** m }}u) != 0u);
{% endfor %}
{% endif %}
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
{{ rows_of.accumulate("sum", "ds", "first", first_each) }}
{% endif %}
{% if result_second %}
{{ rows_of.accumulate("sum_second", "p", "second", second_each) }}
{% endif %}
        }
    }
    }
    }

{% if may_hide and queries %}
{{ rows_of.drop_unseen() }}
{% endif %}
{% for i in range(rows) %}
    {
        let row = own_first + i32(group * {{ rows }}u) + {{ i }};
        if (row >= range_first && row < range_past) {
            // Queries that do not exist or see nothing, and keys that do not exist, have gradient 0, even if they hold NaN.
{% if queries %}
            let seen = visible_keys(row + offset, extent);
            let none = row >= extent.queries || seen.x >= seen.y;
{% else %}
            let none = row >= extent.keys || row < extent.first_key;
{% endif %}
{% if result_first %}
            let {{ result_first }}_at = {{ result_first }}_base + u32(row - range_first) * params.{{ result_first }}_s;
{{ rows_of.store_own("sum%d" % i, result_first, first, first_each, " * params.scale") }}
{% endif %}
{% if result_second %}
            let {{ result_second }}_at = {{ result_second }}_base + u32(row - range_first) * params.{{ result_second }}_s;
{{ rows_of.store_own("sum_second%d" % i, result_second, second, second_each, " * params.kept_scale" if variant.dropout else "") }}
{% endif %}
        }
    }
{% endfor %}
}
