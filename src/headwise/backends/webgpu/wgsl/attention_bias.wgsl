// The gradient of an attention bias: ds, summed over the dims that the bias is broadcast over.
//
//   ds_ij = exp(s_ij - lse_i) (D_ij dO_i · v_j - delta_i)      D is 1, or under dropout 0 or 1 / (1 - dropout)
//
//   q, grad (B, Hq, Sq, ·)   k, v (B, Hk, Sk, ·)   stats: see attention_stats.wgsl
//   partials f32, (splits, and then the shape of the bias), any strides
//
// A workgroup owns a tile of 32 × 32 of the bias (one row or one key wide if the bias is) and loops over its split of the
// tiles of scores that read it; 8 × 8 threads compute 4 × 4 scores each, every eighth row and key. attention_bias_sum.wgsl
// adds the splits in order.
//
// variables: variant (see scores.wgsl), dtype, first (vectors of a row of q, k), second (of v, dO),
//            per_batch, per_head, per_query, per_key (bools: dims that the bias has)
{% import "scores.wgsl" as scores with context %}
{{ scores.backward_inputs(variant, dtype) }}
{{ output("partials", "f32", 1) }}
{{ params("splits: u32, add: u32, range_first: i32, range_past: i32, stats_first: u32, " ~ scores.strides("q k v grad") ~ ", partials_split: u32, partials_b: u32, partials_h: u32, partials_q: u32, partials_k: u32, " ~ scores.fields(variant)) }}
{{ scores.functions(variant) }}
{{ scores.logits(variant) }}

// Four vectors of each of 32 rows and 32 keys; sums of the threads' scores, where the bias is one row or one key wide.
{% for x in range(4) %}
var<workgroup> of_rows{{ x }}: array<vec4<f32>, 32>;
var<workgroup> of_keys{{ x }}: array<vec4<f32>, 32>;
{% endfor %}
{% if not (per_query and per_key) %}
var<workgroup> sums: array<f32, 288>;
{% endif %}

{# sum{i}{j} = products of rows i and keys j of two tensors #}
{% macro products(sum, of_rows, of_keys, vectors) %}
{% for i in range(4) %}
{% for j in range(4) %}
            var {{ sum }}{{ i }}{{ j }} = 0.0;
{% endfor %}
{% endfor %}
            for (var column = 0u; column < {{ vectors }}u; column += 4u) {
                workgroupBarrier();
{% for x in range(4) %}
                // Threads 0 … 31 take the rows, 32 … 63 the keys.
                {
                    let inside = column + {{ x }}u < {{ vectors }}u;
                    let at = min(column + {{ x }}u, {{ vectors - 1 }}u);
                    if (thread < 32u) {
                        of_rows{{ x }}[thread] = select(vec4<f32>(), load_{{ of_rows }}({{ of_rows }}_base + at), inside);
                    } else {
                        of_keys{{ x }}[thread - 32u] = select(vec4<f32>(), load_{{ of_keys }}({{ of_keys }}_base + at), inside);
                    }
                }
{% endfor %}
                workgroupBarrier();
{% for x in range(4) %}
                {
{% for i in range(4) %}
                    let row{{ i }} = of_rows{{ x }}[down + {{ 8 * i }}u];
                    let key{{ i }} = of_keys{{ x }}[across + {{ 8 * i }}u];
{% endfor %}
{% for i in range(4) %}
{% for j in range(4) %}
                    {{ sum }}{{ i }}{{ j }} += dot(row{{ i }}, key{{ j }});
{% endfor %}
{% endfor %}
                }
{% endfor %}
            }
{% endmacro %}
fn keep(at: u32, sum: f32, bad: bool) {
    let value = select(sum, not_a_number(), bad);
    if (params.add != 0u) {
        store_partials(at, load_partials(at) + value);
    } else {
        store_partials(at, value);
    }
}

@compute @workgroup_size(64) {{ main() }}
    let across = thread % 8u;
    let down = thread / 8u;
    // Masks and biases that are larger than a binding are cut into ranges of queries.
    let q_tiles = (u32(params.range_past - params.range_first) + 31u) / 32u;
    let k_tiles = (params.k_length + 31u) / 32u;

    // The tile of the bias, and the number of tiles of scores that read it: one for each combination of the broadcast dims.
    var rest = workgroup;
    var readers = 1u;
{% for per, name, count in ((per_key, "own_k", "k_tiles"), (per_query, "own_q", "q_tiles"), (per_head, "own_h", "params.heads"), (per_batch, "own_b", "params.batch")) %}
{% if per %}
    let {{ name }} = rest % {{ count }};
    rest /= {{ count }};
{% else %}
    let {{ name }} = 0u;
    readers *= {{ count }};
{% endif %}
{% endfor %}
    let split = rest;
    if (split >= params.splits) { return; }

{% for i in range(4) %}
{% for j in range(4) %}
    var sum{{ i }}{{ j }} = 0.0;
{% endfor %}
{% endfor %}
    var any_bad = false;
    for (var reader = split; reader < readers; reader += params.splits) {
        var place = reader;
{% for per, name, own, count in ((per_key, "k_tile", "own_k", "k_tiles"), (per_query, "q_tile", "own_q", "q_tiles"), (per_head, "head", "own_h", "params.heads"), (per_batch, "batch", "own_b", "params.batch")) %}
{% if per %}
        let {{ name }} = {{ own }};
{% else %}
        let {{ name }} = place % {{ count }};
        place /= {{ count }};
{% endif %}
{% endfor %}
        let extent = extent_of(batch);
        any_bad = any_bad || extent.bad;
        let offset = extent.keys - extent.queries;
        let past_row = min(params.range_past, extent.queries);
        let q_first = params.range_first + i32(q_tile * 32u);
        let k_first = i32(k_tile * 32u);
        let first_visible = visible_keys(q_first + offset, extent);
        let last_visible = visible_keys(min(q_first + 32, past_row) - 1 + offset, extent);
        if (q_first < past_row && k_first < last_visible.y && k_first + 32 > first_visible.x{{ " && next_key(batch, head, u32(q_first), u32(min(q_first + 32, past_row) - 1), k_first, k_first + 32) == k_first" if variant.mask }}) {
            let key_head = head / params.group;
            let row_at = u32(min(q_first + i32(thread % 32u), past_row - 1));
            let key_at = u32(min(k_first + i32(thread % 32u), extent.keys - 1));
            let q_base = batch * params.q_b + head * params.q_h + row_at * params.q_s;
            let grad_base = batch * params.grad_b + head * params.grad_h + row_at * params.grad_s;
            let k_base = batch * params.k_b + key_head * params.k_h + key_at * params.k_s;
            let v_base = batch * params.v_b + key_head * params.v_h + key_at * params.v_s;
{{ products("s", "q", "k", first) }}
{{ products("dp", "grad", "v", second) }}
{% if variant.dropout %}
            let dropout = dropout_of(params.first_batch + batch, head);
{% endif %}
            let stats_base = params.stats_first + (batch * params.heads + head) * params.q_length;
{% for i in range(4) %}
            {
                let row = q_first + i32(down) + {{ 8 * i }};
                let visible = visible_keys(row + offset, extent);
                let query = u32(min(row, past_row - 1));
                let query_bound = query - u32(params.range_first); // in what is bound of the bias
                let own = bitcast<vec2<f32>>(load_stats(stats_base + query));
{% for j in range(4) %}
                {
                    let key = k_first + i32(across) + {{ 8 * j }};
                    let inside = u32(min(key, extent.keys - 1));
                    let added = bias_of(batch, head, query_bound, inside);
                    let logit = biased(logit_of(s{{ i }}{{ j }}), added);
{% if variant.dropout %}
                    let dp = select(0.0, dp{{ i }}{{ j }} * params.kept_scale, kept(dropout, query, inside));
{% else %}
                    let dp = dp{{ i }}{{ j }};
{% endif %}
                    let ds = exp2((logit - own.x) * LOG2E) * (dp - own.y);
                    // & instead of &&, which would be so many branches that a compiler runs out of memory.
                    var seen = (row < past_row) & (key >= visible.x) & (key < visible.y) & (bitcast<u32>(added) != 0xff800000u);
{% if variant.mask %}
                    seen = seen & !masked_out(batch, head, query, inside);
{% endif %}
                    sum{{ i }}{{ j }} += select(0.0, ds, seen);
                }
{% endfor %}
            }
{% endfor %}
        }
    }

    let base = split * params.partials_split + own_b * params.partials_b + own_h * params.partials_h;
    let rows = u32(params.range_past - params.range_first);
    let row = own_q * 32u + down;
    let key = own_k * 32u + across;
{% if per_query and per_key %}
{% for i in range(4) %}
{% for j in range(4) %}
    if (row + {{ 8 * i }}u < rows && key + {{ 8 * j }}u < params.k_length) {
        keep(base + (row + {{ 8 * i }}u) * params.partials_q + (key + {{ 8 * j }}u) * params.partials_k, sum{{ i }}{{ j }}, any_bad);
    }
{% endfor %}
{% endfor %}
{% elif per_query %}
{% for i in range(4) %}
    sums[(down + {{ 8 * i }}u) * 9u + across] = sum{{ i }}0 + sum{{ i }}1 + sum{{ i }}2 + sum{{ i }}3;
{% endfor %}
    workgroupBarrier();
    if (thread < 32u && own_q * 32u + thread < rows) {
        var all = 0.0;
        for (var i = 0u; i < 8u; i++) { all += sums[thread * 9u + i]; }
        keep(base + (own_q * 32u + thread) * params.partials_q, all, any_bad);
    }
{% elif per_key %}
{% for j in range(4) %}
    sums[(across + {{ 8 * j }}u) * 9u + down] = sum0{{ j }} + sum1{{ j }} + sum2{{ j }} + sum3{{ j }};
{% endfor %}
    workgroupBarrier();
    if (thread < 32u && own_k * 32u + thread < params.k_length) {
        var all = 0.0;
        for (var i = 0u; i < 8u; i++) { all += sums[thread * 9u + i]; }
        keep(base + (own_k * 32u + thread) * params.partials_k, all, any_bad);
    }
{% else %}
    var own_sum = 0.0;
{% for i in range(4) %}
    own_sum += sum{{ i }}0 + sum{{ i }}1 + sum{{ i }}2 + sum{{ i }}3;
{% endfor %}
    sums[thread] = own_sum;
    workgroupBarrier();
    if (thread == 0u) {
        var all = 0.0;
        for (var i = 0u; i < 64u; i++) { all += sums[i]; }
        keep(base, all, any_bad);
    }
{% endif %}
}
