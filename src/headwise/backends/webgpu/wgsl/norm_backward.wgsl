// Backward of the norms of norm.wgsl, for rows that fit into registers.
//
//   x, g  (rows, width), weight (width), statistics as norm.wgsl leaves them
//   added (rows, width), a gradient that reaches x on another way
//   with n = (x - mean) · rstd and h = g · (weight + offset):
//   dx        (rows, width)    (h - mean(h) - n · mean(h · n)) · rstd + added; no mean(h) unless `centre`
//   partials  (sums, partial_count, width padded to fours)    partial sums over rows, of g · n for dweight, of g for dbias
//
// Partial sum p is over the rows p, p + partial_count, …, in registers; norm_sums.wgsl adds the partial sums in a fixed order.
// Their number is even, so that all rows of one start at the same half of a word.
//
// The next row is loaded while this one is written: its vectors go into registers as soon as these are free. If `two_ahead`,
// it is the row after the next, with two sets of registers used in turn.
//
// `means_only`: longer rows are walked once, for what norm_columns.wgsl, which does the rest, has to know of each row:
//
//   terms     (rows, 2)        rstd, mean(h · n)
//             (rows, 5)        if `centre`: mean, what its rounding left, rstd, mean(h · n), mean(h)
//
// variables: weight, bias ("" or their dtypes; of the bias only whether there is one), centre, added, means_only, keeps_gain
// (does a thread keep the factors of its columns in registers?), two_ahead, and those of rows.wgsl
{% import "rows.wgsl" as rows with context %}
{% import "norm_parts.wgsl" as parts with context %}
{% set inputs = ["x", "g", "added"] if added and not means_only else ["x", "g"] %}
{% for name in inputs %}
{{ rows.read(name) }}
{% endfor %}
{{ parts.read_column("weight", weight) }}
{{ input("statistics", "f32", 1) }}
{{ output("terms", "f32", 1) if means_only else parts.backward_outputs() }}
{{ parts.backward_functions(inputs) }}
{{ rows.sums() }}
{% if centre %}
{{ rows.pair_sums() }}
fn statistics_at(row: u32) -> vec3<f32> {
    return vec3<f32>(load_statistics(row * 3u), load_statistics(row * 3u + 1u), load_statistics(row * 3u + 2u));
}
{% else %}
fn statistics_at(row: u32) -> f32 { return load_statistics(row); }
{% endif %}

{% macro gain_at(chunk, k) %}
{{- "gain%d" % k if keeps_gain else "gain_of(row, %s + %du, lane)" % (chunk, k) }}
{%- endmacro %}

{# (x - mean) · rstd, from registers #}
{% macro normal(set, k) -%}
{{ "(values_of(x%s%d) - mean - rest) * r" % (set, k) if centre else "values_of(x%s%d) * r" % (set, k) }}
{%- endmacro %}

{% macro statistics_of(row) %}
{% if centre %}
    let mean = {{ row }}.x;
    let rest = {{ row }}.y;
    let r = {{ row }}.z;
{% else %}
    let r = {{ row }};
{% endif %}
{% endmacro %}

{% macro fold(chunk, ahead, set="") %}
{% for k in range(held) %}
{% if centre %}
    {
        let h = select(
            vec4<f32>(0.0), values_of(g{{ set }}{{ k }}) * {{ gain_at(chunk, k) }}, inside(row, {{ chunk }} + {{ k }}u, lane));
        products += vec2<f32>(sum_of(h), sum_of(h * {{ normal(set, k) }}));
    }
{% else %}
    products += sum_of(select(
        vec4<f32>(0.0), {{ normal(set, k) }} * values_of(g{{ set }}{{ k }}) * {{ gain_at(chunk, k) }},
        inside(row, {{ chunk }} + {{ k }}u, lane)));
{% endif %}
{{ rows.refill(["x", "g"], k, ahead, set) }}
{% endfor %}
{% endmacro %}

{# Declares `products` before the rows are folded, and the means of the row after it. #}
{% macro means(fold_rows) %}
{% if centre %}
    var products = vec2<f32>(0.0);
{{ fold_rows }}
    let means = row_sums(products, thread) / f32(params.width);
    let mean_of_h = means.x;
    let mean_of_product = means.y;
{% else %}
    var products = 0.0;
{{ fold_rows }}
    let mean_of_product = row_sum(products, thread) / f32(params.width);
{% endif %}
{% endmacro %}

{% if means_only %}
@compute @workgroup_size({{ threads }}) {{ main() }}
{{ rows.row_of_thread() }}
    let of_row = statistics_at(row);
{{ statistics_of("of_row") }}
{{ rows.load(["x", "g"], "row, 0u") }}
{{ means(rows.forwards(fold)) }}
    if (there && lane == 0u) {
{% set terms = ["mean", "rest", "r", "mean_of_product", "mean_of_h"] if centre else ["r", "mean_of_product"] %}
{% for term in terms %}
        store_terms(row * {{ terms | length }}u + {{ loop.index0 }}u, {{ term }});
{% endfor %}
    }
}
{% else %}
{% set sets = ["_even", "_odd"] if two_ahead else [""] %}

{% macro finish(set, write) %}
{% for k in range(held) %}
    {
        let n = {{ normal(set, k) }};
        let g = values_of(g{{ set }}{{ k }});
        let h = g * {{ gain_at("0u", k) }};
{% if added %}
        let more = values_of(added{{ set }}{{ k }});
{% endif %}
{{ rows.refill(inputs, k, "row_ahead, 0u", set) }}
        if (there) {
            {{ write }}_dx(row, {{ k }}u, lane, (h - n * mean_of_product{{ " - mean_of_h" if centre }}) * r{{ " + more" if added }});
{% if weight %}
            sum{{ k }} += g * n;
{% endif %}
{% if bias %}
            bias_sum{{ k }} += g;
{% endif %}
        }
    }
{% endfor %}
{% endmacro %}

{# Row number `turn` of each partial sum. Its registers are refilled with the row that the same set holds next. #}
{% macro work(turn, set) %}
    {
        let wanted = ({{ turn }}) * params.partial_count + partial;
        let there = wanted < params.rows && partial < params.partial_count;
        let row = select(0u, wanted, there);
        let far = wanted + {{ sets | length }}u * params.partial_count;
        let row_ahead = select(row, far, there && far < params.rows);
{{ statistics_of("ahead" ~ set) }}
        ahead{{ set }} = statistics_at(row_ahead);
{{ means(fold("0u", "", set)) }}
{% if dtype == "bf16" and aligned and not added %}
        if (is_finite(mean_of_product{{ " + mean_of_h" if centre }})) {
{{ finish(set, "write_finite") }}
        } else {
{{ finish(set, "write") }}
        }
{% else %}
{{ finish(set, "write") }}
{% endif %}
    }
{% endmacro %}

@compute @workgroup_size({{ threads }}) {{ main() }}
    let first_partial = workgroup * {{ threads // lanes }}u;
    if (first_partial >= params.partial_count) { return; }
    let partial = first_partial + thread / {{ lanes }}u;
    let lane = thread % {{ lanes }}u;
{% for k in range(held) %}
{% if weight %}
    var sum{{ k }} = vec4<f32>(0.0);
{% endif %}
{% if bias %}
    var bias_sum{{ k }} = vec4<f32>(0.0);
{% endif %}
{% if keeps_gain %}
    let gain{{ k }} = gain_of(partial, {{ k }}u, lane);
{% endif %}
{% endfor %}
{% for set in sets %}
    let first{{ set }} = partial + {{ loop.index0 }}u * params.partial_count;
    let begin{{ set }} = select(0u, first{{ set }}, first{{ set }} < params.rows && partial < params.partial_count);
    var ahead{{ set }} = statistics_at(begin{{ set }});
{{ rows.load(inputs, "begin%s, 0u" % set, set) }}
{% endfor %}
    for (var turn = 0u; turn * params.partial_count + first_partial < params.rows; turn += {{ sets | length }}u) {
{% for set in sets %}
{{ work("turn + %du" % loop.index0, set) }}
{% endfor %}
    }
{% if weight or bias %}
    if (partial < params.partial_count) {
{% for k in range(held) %}
{% if weight %}
        write_partial(0u, partial, {{ k }}u, lane, sum{{ k }});
{% endif %}
{% if bias %}
        write_partial({{ "1u" if weight else "0u" }}, partial, {{ k }}u, lane, bias_sum{{ k }});
{% endif %}
{% endfor %}
    }
{% endif %}
}
{% endif %}
