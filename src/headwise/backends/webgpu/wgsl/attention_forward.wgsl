// Attention forward, dense and packed: out = softmax(scale · q kᵀ, capped, biased, masked) v, and its log-sum-exp.
// Dao, "FlashAttention-2", 2023; a reference that follows the maximum only loosely is from FlashAttention-4.
//
//   q    (B, Hq, Sq, D)     out  (B, Hq, Sq, Dv)     lse  (B, Hq, Sq)
//   k    (B, Hk, Sk, D)     v    (B, Hk, Sk, Dv)     packed: B is 1, S counts all tokens, `tiles` lists the sequences
//
// A workgroup owns {{ threads // lanes * rows }} rows of queries of one head and loops over the keys they see, in tiles of {{ keys }}. Tiles
// of K and V are in workgroup memory, q and the sums of out in registers: {{ lanes }} threads, the lanes of a team, share {{ rows }}
// rows, and each owns every {{ lanes }}th vector of four elements of them.
{% if apart > 1 %}
// Lanes are {{ apart }} threads apart: threads side by side then read the same vectors of a tile.
{% endif %}
//
// Lane c holds row i ^ c of its team in registers i. So lanes c and c ^ i both hold the row of the other in registers i, and
// sums over the team, and weights on the way back, are plain exchanges between the two, with nothing to select. They go
// through subgroups, or else through workgroup memory.
//
{% if chain %}
// One long chain of float32 additions loses precision. So after every {{ chain // keys * keys }} keys the sums go to memory, into the rows
// of out, and start again in registers.
//
{% endif %}
{% if ranged %}
// A key head that is larger than a binding is cut into ranges of keys, with one dispatch each: k and v start at key_first.
// The results of earlier ranges are read again (`resumes`) and continue as a chain does: the sums of a row, not yet divided
// by its total, and in one vector after them the reference and the total. The last range (`finishes`) divides. An lse could
// not replace these two: next to a large reference, float32 has no digits for the logarithm of the total.
//
{% endif %}
// variables: dtype; to, the dtype of out (float32 where it goes to memory on its way); ranged (bool);
//            variant (scores.py); q_vectors, v_vectors: D and Dv in vectors of four; subgroups (bool);
//            chain: keys after which sums go to memory (a tile and more), 0 for never;
//            direct (bool): weights come from products in one multiplication and addition, with no logits in between;
//            rows, lanes, threads, keys, unroll, apart: a `ForwardTile` (tiles.py). rows <= lanes, apart: powers of two;
//            unroll, the keys that are worked on at once, divides keys.
{% import "scores.wgsl" as scores with context %}
{% set hides = variant.mask or variant.bias %}
{% set chain = chain // keys * keys %}
{% set q_each = (q_vectors + lanes - 1) // lanes %}
{% set v_each = (v_vectors + lanes - 1) // lanes %}
{% set q_row = q_each * lanes %}
{% set v_row = v_each * lanes %}
{% set chunks = keys // unroll %}
{% set k_vectors = chunks * q_row %}{# of one key of each chunk of a tile: of K, and of K and V #}
{% set tile_vectors = chunks * (q_row + v_row) %}
{% set steps = [1, 2, 4, 8, 16, 32, 64] %}
{% set width = [unroll, 4] | min %}
{% set kind = "f32" if width == 1 else "vec%d<f32>" % width %}
{# References are natural with a bias, and exponents of two otherwise (see scores.wgsl). The first is below all logits that are
   seen, unless their product is the lowest float32. If `direct`, what is called a logit below is still a product. #}
{% set to_powers = " * LOG2E" if variant.bias else "" %}
{% set first_reference = "LOWEST" if variant.bias else "params.first_reference" if direct else "HIDDEN" %}
{% set hidden = "params.hidden" if direct else "HIDDEN" %}
{% set power = "params.power" if direct else "LOG2E" %}{# of a logit, as an exponent of two #}
{# How a tile is loaded: each thread takes one vector of a key of each chunk. If there are fewer vectors than threads, several
   keys are loaded at once; otherwise it takes several turns. #}
{% set together = [threads // tile_vectors, 1] | max %}
{% set turns = (tile_vectors + threads - 1) // threads %}
{% import "attention_forward_rows.wgsl" as rows_of with context %}
{{ input("q", dtype, 4) }}
{{ input("k", dtype, 4) }}
{{ input("v", dtype, 4) }}
{{ scores.inputs(variant) }}
{% if variant.packed %}
{{ input("tiles", "i32", 1) }}
{% endif %}
{{ output("out", to, 4) }}
{{ output("lse", "f32", 1) }}
{{ params(("power: f32, natural: f32, hidden: f32, first_reference: f32, " if direct else "") ~ "blocks: u32, first_row: u32, rows: u32, " ~ scores.strides("q k v out") ~ ", lse_b: u32, lse_h: u32, " ~ ("key_first: i32, key_past: i32, resumes: u32, finishes: u32, " if ranged else "") ~ scores.fields(variant)) }}
{{ scores.functions(variant) }}
{{ scores.logits(variant) }}
// How far a row's maximum may rise above its reference before the reference follows.
const SLACK = 8.0;

// [chunk of keys][key of the chunk][vector of a lane: of K, then of V][lane]; rows are padded with zeros to a multiple of the
// lanes. In the loop over chunks only the chunk and the lane vary: the compiler has two indices to check.
var<workgroup> tile: array<array<array<array<vec4<f32>, {{ lanes }}>, {{ q_each + v_each }}>, {{ unroll }}>, {{ chunks }}>;

// The (chunk, vector, lane) of each of the {{ tile_vectors }} vectors of one key of every chunk, first those of K.
fn spot_of(place: u32) -> vec3<u32> {
    if (place < {{ k_vectors }}u) { return vec3<u32>(place / {{ q_row }}u, place % {{ q_row }}u / {{ lanes }}u, place % {{ lanes }}u); }
    let of_v = place - {{ k_vectors }}u;
    return vec3<u32>(of_v / {{ v_row }}u, of_v % {{ v_row }}u / {{ lanes }}u + {{ q_each }}u, of_v % {{ lanes }}u);
}
{% if not subgroups %}
// What threads exchange: products of {{ width }} keys with the rows of others, weights, factors of a row{{ ", and the keys that it sees" if hides }}.
{% for part in range(unroll // width) %}
{% for i in range(1 if lanes == rows else 0, rows) %}
var<workgroup> products{{ i }}_{{ part }}: array<{{ kind }}, {{ threads }}>;
{% endfor %}
var<workgroup> weights_{{ part }}: array<{{ kind }}, {{ threads }}>;
{% endfor %}
var<workgroup> factors: array<f32, {{ threads }}>;
{% if hides %}
var<workgroup> seen_keys: array<u32, {{ threads }}>;
{% endif %}
{% endif %}
{% if hides %}

// A bit for each key of a chunk that lies in [seen.x, seen.y).
fn within_band(seen: vec2<i32>, chunk_first: i32) -> u32 {
    let low = u32(clamp(seen.x - chunk_first, 0, {{ unroll }}));
    let high = u32(clamp(seen.y - chunk_first, 0, {{ unroll }}));
    return ((1u << high) - 1u) & ~((1u << low) - 1u);
}
{% endif %}

{# Keys that a row at `position` sees, of those that are bound. #}
{% macro visible(position) -%}
{{ "within(visible_keys(%s, extent), range)" % position if ranged else "visible_keys(%s, extent)" % position }}
{%- endmacro %}
{% if ranged %}
fn within(seen: vec2<i32>, range: vec2<i32>) -> vec2<i32> {
    return vec2<i32>(max(seen.x, range.x), max(min(seen.y, range.y), 0));
}

{% endif %}
@compute @workgroup_size({{ threads }}) {{ main() }}
    // The last block of rows goes first: under a causal mask it has the most work.
    let pairs = params.batch * params.heads;
    if (workgroup >= pairs * params.blocks) { return; }
    let block = params.blocks - 1u - workgroup / pairs;
    let batch = workgroup % pairs / params.heads;
    let head = workgroup % params.heads;
    let key_head = head / params.group;
{% if variant.packed %}
    let state = load_tiles(8u * block + 5u);
    if (state == 2) { return; }
    let first_token = load_tiles(8u * block);
    let first_key_token = u32(load_tiles(8u * block + 2u));
    let rows_past = load_tiles(8u * block + 1u);
    // Tokens past the last sequence do not exist.
    let extent = Extent(0, load_tiles(8u * block + 3u), select(rows_past, 0, state == 1), state == 3);
    let first_query = load_tiles(8u * block + 4u) * {{ threads // lanes * rows }};
{% else %}
    let first_token = 0;
    let first_key_token = 0u;
    let extent = extent_of(batch);
    let rows_past = i32(params.q_length); // rows that do not exist are written as well
    let first_query = i32(params.first_row) + i32(block) * {{ threads // lanes * rows }};
{% endif %}

{% if variant.dropout %}
    let dropout = dropout_of({{ "u32(load_tiles(8u * block + 6u))" if variant.packed else "params.first_batch + batch" }}, head);
{% endif %}

    // Keys [first, past) are seen by some row of this workgroup, those in [whole_first, whole_past) by all.
    let offset = extent.keys - extent.queries;
{% if ranged %}
    let range = vec2<i32>(params.key_first, params.key_past) - i32(first_key_token);
{% endif %}
    let of_top = {{ visible("first_query + offset") }};
    let of_bottom = {{ visible("min(first_query + %d, extent.queries) - 1 + offset" % (threads // lanes * rows)) }};
    let first = of_top.x{{ " / %d * %d" % (variant.bias_width, variant.bias_width) if variant.bias and variant.bias_width > 1 }};
    let past = select(0, of_bottom.y, first_query < extent.queries);
    let last_key = max(past, 1) - 1;
    let whole_first = of_bottom.x;
    let whole_past = of_top.y;

    // The row that this lane sums for: its own of the team.
    let lane = thread / {{ apart }}u % {{ lanes }}u;
    let team = thread / {{ apart * lanes }}u * {{ apart }}u + thread % {{ apart }}u;
    let own = lane % {{ rows }}u;
    let team_query = first_query + i32(team * {{ rows }}u);
    let query = team_query + i32(own);
    // Only some rows are bound if a tensor is larger than a binding.
    let row = u32(first_token + query) - params.first_row;
    let inside = query < rows_past && row < params.rows;
    let exists = inside && query < extent.queries;
    let seen = select(vec2<i32>(0), {{ visible("query + offset") }}, exists);

{% if variant.mask %}
    // Queries of this workgroup, and the words of this lane's own.
    let of_first = u32(first_query);
    let of_last = u32(max(min(first_query + {{ threads // lanes * rows }}, i32(params.first_row + params.rows)), first_query + 1) - 1);
    let mask_row = mask_row_at(batch, head, select(of_first, u32(query), inside));
{% endif %}
{% if variant.bias %}
    let bias_row = bias_row_at(batch, head, select(0u, row, inside));
{% endif %}
    let q_base = batch * params.q_b + head * params.q_h;
{% set first_bound = "(first_key_token - u32(params.key_first))" if ranged else "first_key_token" %}{# may wrap #}
    let k_base = batch * params.k_b + key_head * params.k_h + {{ first_bound }} * params.k_s;
    let v_base = batch * params.v_b + key_head * params.v_h + {{ first_bound }} * params.v_s;
{% for i in range(rows) %}
    let row{{ i }} = u32(first_token + team_query + i32(own ^ {{ i }}u)) - params.first_row;
    let inside{{ i }} = team_query + i32(own ^ {{ i }}u) < rows_past && row{{ i }} < params.rows;
    let q_at{{ i }} = q_base + select(0u, row{{ i }}, inside{{ i }}) * params.q_s;
{% for n in range(q_each) %}
{% if (n + 1) * lanes > q_vectors %}
    let q{{ i }}_{{ n }} = select(vec4<f32>(), load_q(q_at{{ i }} + min(lane + {{ n * lanes }}u, {{ q_vectors - 1 }}u)), lane + {{ n * lanes }}u < {{ q_vectors }}u);
{% else %}
    let q{{ i }}_{{ n }} = load_q(q_at{{ i }} + lane + {{ n * lanes }}u);
{% endif %}
{% endfor %}
{% for n in range(v_each) %}
    var out{{ i }}_{{ n }} = vec4<f32>();
{% endfor %}
{% endfor %}
    // Of this lane's own row: weights are powers of two, 2^({{ "(logit - reference) · log2(e)" if variant.bias else "q·k · power - reference" if direct else "logit · log2(e) - reference" }}).
    var reference = {{ first_reference }};
    var total = 0.0;
{% if chain %}
    // What memory holds of this row: its sum of weights, and the reference of both.
    var kept_total = 0.0;
    var kept_reference = {{ first_reference }};
{% endif %}
{% if ranged %}
    let resumes = params.resumes != 0u;
    let so_far_at = batch * params.out_b + head * params.out_h + row * params.out_s + {{ v_vectors }}u;
    if (resumes && inside) {
        let so_far = load_out(so_far_at);
        if (so_far.y != 0.0) {
            kept_reference = so_far.x;
            kept_total = so_far.y;
            reference = kept_reference;
        }
    }
    storageBarrier(); // several lanes read what one of them writes in the end
{% endif %}

{{ rows_of.places() }}
    let out_base = batch * params.out_b + head * params.out_h;
{% if chain and variant.mask %}
    var has_kept = {{ "resumes" if ranged else "false" }};
    var begun = false;
    // A chain begins where the last tile of the one before ends: tiles that are skipped move that.
    var tile_first = {{ rows_of.next_of("first") }};
    for (; tile_first < past;) {
    if (begun) {
{{ rows_of.keep("has_kept") }}
        has_kept = true;
    }
    begun = true;
    let chain_past = min(past, tile_first + {{ chain }});
{% elif chain %}
    for (var chain_first = first; chain_first < past; chain_first += {{ chain }}) {
    if (chain_first > first) {
{{ rows_of.keep("%schain_first > first + %d" % ("resumes || " if ranged else "", chain)) }}
    }
    let chain_past = min(past, chain_first + {{ chain }});
{% else %}
    let chain_first = {{ rows_of.next_of("first") }};
    let chain_past = past;
    {
{% endif %}
    for ({{ "" if chain and variant.mask else "var tile_first = chain_first" }}; tile_first < chain_past; {{ "tile_first = " ~ rows_of.next_of("tile_first + %d" % keys) if variant.mask else "tile_first += %d" % keys }}) {
{% if hides %}
        // Do all rows see all of the tile, by the band{{ " and the mask" if variant.mask }}?
        let whole = tile_first >= whole_first && tile_first + {{ keys }} <= whole_past{{ " && all_seen(batch, head, of_first, of_last, u32(tile_first), u32(tile_first + %d))" % (keys - 1) if variant.mask }};
{% endif %}
{{ rows_of.fetch() }}
        workgroupBarrier();
{{ rows_of.put() }}
        workgroupBarrier();
{% if not hides %}
        let whole = tile_first >= whole_first && tile_first + {{ keys }} <= whole_past;
{% endif %}
        for (var chunk = 0u; chunk < {{ chunks }}u; chunk++) {
            let chunk_first = tile_first + i32(chunk * {{ unroll }}u);
{% if hides %}
            // The keys of the chunk that this lane's own row sees.
            var seen_bits = {{ 2 ** unroll - 1 }}u;
            if (!whole) { seen_bits = within_band(seen, chunk_first){{ " & mask_bits(mask_row, u32(chunk_first))" if variant.mask }}; }
{% endif %}
{% if subgroups %}
            if (!whole && subgroupAll({{ "seen_bits == 0u" if hides else "chunk_first >= seen.y || chunk_first + %d <= seen.x" % unroll }})) { continue; }
{% else %}
            if (chunk_first >= past) { break; }
{% endif %}

{% if variant.bias %}
            // Read before the products, which take long.
{{ scores.biases(variant, "bias_row", "u32(chunk_first)", unroll) }}
{% endif %}
            // Products of q and k: each lane's partial sum, then summed over the team.
{% for x in range(unroll) %}
{% for i in range(rows) %}
            var product{{ i }}_{{ x }}: f32;
{% endfor %}
            {
{{ rows_of.multiply(x) }}
{% if subgroups %}
{% for step in steps if step < rows %}
{% for i in range(0, rows, 2 * step) %}
                product{{ i }}_{{ x }} += subgroupShuffleXor(product{{ i + step }}_{{ x }}, {{ step * apart }}u);
{% endfor %}
{% endfor %}
{% for step in steps if rows <= step < lanes %}
                product0_{{ x }} += subgroupShuffleXor(product0_{{ x }}, {{ step * apart }}u);
{% endfor %}
{% endif %}
            }
{% endfor %}
{% if not subgroups %}
{% for part in range(unroll // width) %}
{% for i in range(1 if lanes == rows else 0, rows) %}
            products{{ i }}_{{ part }}[thread] = {{ kind }}({% for x in range(width) %}{{ ", " if x else "" }}product{{ i }}_{{ part * width + x }}{% endfor %});
{% endfor %}
{% endfor %}
            workgroupBarrier();
{% for part in range(unroll // width) %}
            {
                var sum = {{ kind }}({% for x in range(width) %}{{ ", " if x else "" }}product0_{{ part * width + x }}{% endfor %});
{% for other in range(1, lanes) %}
                sum += products{{ other % rows }}_{{ part }}[thread ^ {{ other * apart }}u];
{% endfor %}
{% for x in range(width) %}
                product0_{{ part * width + x }} = sum{{ "[%d]" % x if width > 1 else "" }};
{% endfor %}
            }
{% endfor %}
{% endif %}

            // Logits of this lane's own row.
{% for x in range(unroll) %}
            var logit{{ x }} = {{ "product0_%d" % x if direct else "logit_of(product0_%d)" % x }};
{% if variant.bias %}
            logit{{ x }} = biased(logit{{ x }}, added{{ x }});
            seen_bits &= select(0xffffffffu, {{ 2 ** 32 - 1 - 2 ** x }}u, logit{{ x }} == HIDDEN);
{% endif %}
{% endfor %}
            if (!whole) {
{% for x in range(unroll) %}
                logit{{ x }} = select({{ hidden }}, logit{{ x }}, {{ "(seen_bits & %du) != 0u" % 2 ** x if hides else "chunk_first + %d >= seen.x && chunk_first + %d < seen.y" % (x, x) }});
{% endfor %}
            }

            // The reference follows the highest logit, but rarely: weights may be as large as 2^SLACK. With subgroups they are
            // computed before it is known whether the reference moves, which takes long to find out, and again if it does.
            let highest = {{ rows_of.in_pairs("logit", 0, unroll, ("max(", ", ")) }}{{ "" if variant.bias else " * " ~ power }};
{% if subgroups %}
{{ rows_of.weigh("var ") }}
            if (subgroupAny(highest > reference + SLACK)) {
                let higher = max(highest, reference);
                let shrink = exp2((reference - higher){{ to_powers }});
                reference = higher;
                total *= shrink;
{% for i in range(rows) %}
                let shrink{{ i }} = {{ rows_of.of_row("shrink", i) }};
{% for n in range(v_each) %}
                out{{ i }}_{{ n }} *= shrink{{ i }};
{% endfor %}
{% endfor %}
{{ rows_of.weigh("") }}
            }
{% else %}
            var shrink = 1.0;
            if (highest > reference + SLACK) {
                shrink = exp2((reference - highest){{ to_powers }});
                reference = highest;
                total *= shrink;
            }
{{ rows_of.weigh("var ") }}
{% endif %}
            total += {{ rows_of.in_pairs("weight", 0, unroll, ("(", " + ")) }};
{% if variant.dropout %}
            let kept_of_chunk = kept_keys(dropout, u32(query), u32(chunk_first), {{ unroll }}u);
{% for x in range(unroll) %}
            weight{{ x }} = select(0.0, weight{{ x }}, (kept_of_chunk & {{ 2 ** x }}u) != 0u);
{% endfor %}
{% endif %}
{% if hides and subgroups %}
            // Keys that no row of the team sees may hold NaN, and 0 · NaN is NaN.
            var seen_by_team = seen_bits;
{% if not variant.bias %}
            if (!whole) {
{% else %}
            {
{% endif %}
{% for step in steps if step < rows %}
                seen_by_team |= subgroupShuffleXor(seen_by_team, {{ step * apart }}u);
{% endfor %}
            }
{% endif %}
{% if not subgroups %}
{% if hides %}
            seen_keys[thread] = seen_bits;
{% endif %}
            factors[thread] = shrink;
{% for part in range(unroll // width) %}
            weights_{{ part }}[thread] = {{ kind }}({% for x in range(width) %}{{ ", " if x else "" }}weight{{ part * width + x }}{% endfor %});
{% endfor %}
            workgroupBarrier();
{% if hides %}
            // Keys that no row of the team sees may hold NaN, and 0 · NaN is NaN.
            let seen_by_team = seen_bits{% for i in range(1, rows) %} | seen_keys[thread ^ {{ i * apart }}u]{% endfor %};
{% endif %}
{% for i in range(rows) %}
            {
                let shrink{{ i }} = {{ "factors[thread ^ %du]" % (i * apart) if i else "shrink" }};
                if (shrink{{ i }} != 1.0) {
{% for n in range(v_each) %}
                    out{{ i }}_{{ n }} *= shrink{{ i }};
{% endfor %}
                }
            }
{% if i %}
{% for part in range(unroll // width) %}
            let weights{{ i }}_{{ part }} = weights_{{ part }}[thread ^ {{ i * apart }}u];
{% endfor %}
{% endif %}
{% endfor %}
{% endif %}

            // Weights times v, each lane its own elements of all rows of the team.
{% for x in range(unroll) %}
            {
{% for n in range(v_each) %}
                {{ "var" if hides else "let" }} v{{ n }} = tile[chunk][{{ x }}][{{ q_each + n }}][lane];
{% endfor %}
{% for i in range(rows) %}
{% if i == 0 %}
                let w0 = weight{{ x }};
{% elif subgroups %}
                let w{{ i }} = subgroupShuffleXor(weight{{ x }}, {{ i * apart }}u);
{% else %}
                let w{{ i }} = weights{{ i }}_{{ x // width }}{{ "[%d]" % (x % width) if width > 1 else "" }};
{% endif %}
{% endfor %}
{% if hides %}
                if ((seen_by_team & {{ 2 ** x }}u) == 0u) {
{% for n in range(v_each) %}
                    v{{ n }} = vec4<f32>();
{% endfor %}
                }
{% endif %}
{% for i in range(rows) %}
{% for n in range(v_each) %}
                out{{ i }}_{{ n }} = fma(vec4<f32>(w{{ i }}), v{{ n }}, out{{ i }}_{{ n }});
{% endfor %}
{% endfor %}
            }
{% endfor %}
        }
    }
    }

{% if chain %}
{% if not variant.mask %}
    let has_kept = {{ "resumes || " if ranged }}past - first > {{ chain }};
{% endif %}
    var kept_factor = exp2((kept_reference - reference){{ to_powers }});
    total = fma(kept_total, kept_factor, total);
{% endif %}
    let empty = total == 0.0 || !exists;
    var factor = 1.0;
{% if variant.sink %}
    if (!empty) {
        let at_sink = sink_of(head){{ "" if variant.bias else " * LOG2E" }};
        let higher = max(reference, at_sink);
        factor = exp2((reference - higher){{ to_powers }});
        total = total * factor + exp2((at_sink - higher){{ to_powers }});
        reference = higher;
    }
{% endif %}
    var row_lse = {{ "reference + log(total)" if variant.bias else "fma(reference, %s, log(total))" % ("params.natural" if direct else "LN2") }};
    if (empty) { row_lse = negative_infinity(); }
{% if variant.sink %}
    if (empty && exists) { row_lse = sink_of(head); }
{% endif %}
{% if ranged %}
    let so_far = vec4<f32>(reference, total, 0.0, 0.0);
    if (params.finishes != 0u) { factor = factor / total{{ " * params.kept_scale" if variant.dropout }}; }
    factor = select(factor, 0.0, empty);
{% else %}
    factor = select(factor / total{{ " * params.kept_scale" if variant.dropout }}, 0.0, empty);
{% endif %}
{% if chain %}
    kept_factor *= factor;
{% endif %}
{% if variant.lengths or variant.packed %}
    if (extent.bad) { row_lse = not_a_number(); }
{% endif %}
    if (lane < {{ rows }}u && inside) {
        store_lse(batch * params.lse_b + head * params.lse_h + row, row_lse);
{% if ranged %}
        store_out(so_far_at, so_far);
{% endif %}
    }
{{ rows_of.publish("factor") }}
{% for i in range(rows) %}
    let factor{{ i }} = {{ rows_of.of_row("factor", i) }};
{% endfor %}
{% if chain %}
{{ rows_of.publish("kept_factor") }}
{% for i in range(rows) %}
    let kept_factor{{ i }} = {{ rows_of.of_row("kept_factor", i) }};
{% endfor %}
{% endif %}
{% for i in range(rows) %}
    if (inside{{ i }}) {
{% for n in range(v_each) %}
        {{ "if (lane + %du < %du) " % (n * lanes, v_vectors) if (n + 1) * lanes > v_vectors else "" }}{
            let at = out_base + row{{ i }} * params.out_s + lane + {{ n * lanes }}u;
            var result = out{{ i }}_{{ n }} * factor{{ i }};
{% if chain %}
            if (has_kept) { result = fma(load_out(at), vec4<f32>(kept_factor{{ i }}), result); }
{% endif %}
            result = select(result, vec4<f32>(), factor{{ i }} == 0.0);
{% if variant.lengths or variant.packed %}
            if (extent.bad) { result = vec4<f32>(not_a_number()); }
{% endif %}
            store_out(at, result);
        }
{% endfor %}
    }
{% endfor %}
}
