// The gradient of an attention bias: ds, summed over the dims that the bias is broadcast over.
//
//   ds_ij = exp(s_ij - lse_i) (dO_i · v_j - delta_i)
//
//   q, grad (B, Hq, Sq, ·)   k, v (B, Hk, Sk, ·)   stats: see attention_stats.wgsl
//   parts   f32, (shares, and then the shape of the bias), any strides
//
// A workgroup owns a tile of 32 × 32 of the bias (one row or one key wide where the bias is) and walks, in order, over its
// share of the tiles of scores that read it; 8 × 8 threads compute 4 × 4 scores each, every eighth row and key. Shares are
// added up in order afterwards (attention_bias_sum.wgsl). No memory but for a few copies of the bias.
//
// variables: variant (see scores.wgsl), dtype, first (vectors of a row of q, k), second (of v, dO),
//            per_batch, per_head, per_query, per_key (bools: dims that the bias has)
{% import "scores.wgsl" as scores with context %}
{{ input("q", dtype, 4) }}
{{ input("k", dtype, 4) }}
{{ input("v", dtype, 4) }}
{{ input("grad", dtype, 4) }}
{{ input("stats", "u32", 2) }}
{% if variant.mask %}
{{ input("mask", "u8", 1) }}
{% endif %}
{{ input("bias", variant.bias, 1) }}
{{ output("parts", "f32", 1) }}
{{ params("shares: u32, add: u32, window_first: i32, window_past: i32, stats_first: u32, length_first: u32, q_b: u32, q_h: u32, q_s: u32, k_b: u32, k_h: u32, k_s: u32, v_b: u32, v_h: u32, v_s: u32, grad_b: u32, grad_h: u32, grad_s: u32, parts_share: u32, parts_b: u32, parts_h: u32, parts_q: u32, parts_k: u32, " ~ scores.fields(variant)) }}
{% if variant.lengths %}
// The lengths lie before the rows' numbers.
fn load_aux(batch: u32) -> u32 { return load_stats(params.length_first + batch).x; }
{% endif %}
{{ scores.functions(variant) }}
{{ scores.logits(variant) }}
const EMPTY_LSE = 1e30f; // what stats hold for a row that sees nothing

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
        store_parts(at, load_parts(at) + value);
    } else {
        store_parts(at, value);
    }
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(num_workgroups) workgroups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let across = thread % 8u;
    let down = thread / 8u;
    // Masks and biases that are too large to bind at once come in windows of queries.
    let q_tiles = (u32(params.window_past - params.window_first) + 31u) / 32u;
    let k_tiles = (params.k_length + 31u) / 32u;

    // Which tile of the bias, and everything that reads it: every combination of the dims left out.
    var rest = workgroup.x + workgroup.y * workgroups.x;
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
    let share = rest;
    if (share >= params.shares) { return; }

{% for i in range(4) %}
{% for j in range(4) %}
    var sum{{ i }}{{ j }} = 0.0;
{% endfor %}
{% endfor %}
    var any_bad = false;
    for (var reader = share; reader < readers; reader += params.shares) {
        var place = reader;
{% for per, name, own, count in ((per_key, "k_tile", "own_k", "k_tiles"), (per_query, "q_tile", "own_q", "q_tiles"), (per_head, "head", "own_h", "params.heads"), (per_batch, "batch", "own_b", "params.batch")) %}
{% if per %}
        let {{ name }} = {{ own }};
{% else %}
        let {{ name }} = place % {{ count }};
        place /= {{ count }};
{% endif %}
{% endfor %}
        let length = keys_of(batch);
        any_bad = any_bad || length < 0;
        let keys = max(length, 0);
        let queries = i32(params.q_length);
        let offset = keys - queries;
        let q_first = params.window_first + i32(q_tile * 32u);
        let k_first = i32(k_tile * 32u);
        let first_range = visible_keys(q_first + offset, keys);
        let last_range = visible_keys(min(q_first + 32, params.window_past) - 1 + offset, keys);
        if (k_first < last_range.y && k_first + 32 > first_range.x) {
            let key_head = head / params.group;
            let row_at = u32(min(q_first + i32(thread % 32u), queries - 1));
            let key_at = u32(min(k_first + i32(thread % 32u), keys - 1));
            let q_base = batch * params.q_b + head * params.q_h + row_at * params.q_s;
            let grad_base = batch * params.grad_b + head * params.grad_h + row_at * params.grad_s;
            let k_base = batch * params.k_b + key_head * params.k_h + key_at * params.k_s;
            let v_base = batch * params.v_b + key_head * params.v_h + key_at * params.v_s;
{{ products("s", "q", "k", first) }}
{{ products("dp", "grad", "v", second) }}
            let stats_base = params.stats_first + (batch * params.heads + head) * params.q_length;
{% for i in range(4) %}
            {
                let row = q_first + i32(down) + {{ 8 * i }};
                let range = visible_keys(row + offset, keys);
                let query = u32(min(row, params.window_past - 1));
                let query_seen = query - u32(params.window_first); // by mask and bias
                let own = bitcast<vec2<f32>>(load_stats(stats_base + query));
                let alive = row < params.window_past && own.x != EMPTY_LSE;
{% for j in range(4) %}
                {
                    let key = k_first + i32(across) + {{ 8 * j }};
                    let inside = u32(min(key, keys - 1));
                    let added = bias_of(batch, head, query_seen, inside);
                    let logit = biased(logit_of(s{{ i }}{{ j }}), added);
                    let ds = exp2((logit - own.x) * LOG2E) * (dp{{ i }}{{ j }} - own.y);
                    // Not &&, which is a branch each: sixteen times three of them in a loop, and a compiler runs out of memory.
                    var seen = alive & (key >= range.x) & (key < range.y) & (bitcast<u32>(added) != 0xff800000u);
{% if variant.mask %}
                    seen = seen & !masked_out(batch, head, query_seen, inside);
{% endif %}
                    sum{{ i }}{{ j }} += select(0.0, ds, seen);
                }
{% endfor %}
            }
{% endfor %}
        }
    }

    let base = share * params.parts_share + own_b * params.parts_b + own_h * params.parts_h;
    let rows = u32(params.window_past - params.window_first);
    let row = own_q * 32u + down;
    let key = own_k * 32u + across;
{% if per_query and per_key %}
{% for i in range(4) %}
{% for j in range(4) %}
    if (row + {{ 8 * i }}u < rows && key + {{ 8 * j }}u < params.k_length) {
        keep(base + (row + {{ 8 * i }}u) * params.parts_q + (key + {{ 8 * j }}u) * params.parts_k, sum{{ i }}{{ j }}, any_bad);
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
        keep(base + (own_q * 32u + thread) * params.parts_q, all, any_bad);
    }
{% elif per_key %}
{% for j in range(4) %}
    sums[(across + {{ 8 * j }}u) * 9u + down] = sum0{{ j }} + sum1{{ j }} + sum2{{ j }} + sum3{{ j }};
{% endfor %}
    workgroupBarrier();
    if (thread < 32u && own_k * 32u + thread < params.k_length) {
        var all = 0.0;
        for (var i = 0u; i < 8u; i++) { all += sums[thread * 9u + i]; }
        keep(base + (own_k * 32u + thread) * params.parts_k, all, any_bad);
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
