// Backward of RMS normalisation for rows that registers hold.
//
//   x, g  (rows, width), weight (width), rstd (rows)
//   with n = x · rstd and h = g · (weight + offset):
//   dx     (rows, width)    (h - n · mean(h · n)) · rstd
//   parts  (shares, width padded to fours)    a share of dweight = sum over rows of g · n
//
// A fixed number of shares takes the rows in turns, share s the rows s, s + shares, …; each keeps its sum of dweight in
// registers, and rms_norm_weight.wgsl adds the shares in order: the bits do not depend on timing. The number of shares is
// even, so that all rows of a share begin alike within a word.
//
// The next row is read while this one is written: a vector's registers take that of the next row as soon as it was used; of
// the row after the next, where `two_ahead`, with two sets of registers in turns.
//
// `mean_only`: rows too long for registers are walked once for mean(h · n) of each row, and rms_norm_columns.wgsl does the
// rest.
//
// variables: weight ("" or its dtype), mean_only, keeps_gain (does a thread keep the factors of its columns in registers?),
// two_ahead, and those of rows.wgsl
{% import "rows.wgsl" as rows with context %}
{% import "rms_norm_gain.wgsl" as gain with context %}
{{ rows.read("x") }}
{{ rows.read("g") }}
{{ gain.read() }}
{{ input("rstd", "f32", 1) }}
{% if mean_only %}
{{ output("mean", "f32", 1) }}
{% else %}
{{ rows.write("dx") }}
{% if weight %}
{{ output("parts", "f32", 4 if aligned else 1) }}
{% endif %}
{% endif %}
{{ params(rows.fields("x, g") ~ ", offset: f32, shares: u32, goes_on: u32") }}
{{ rows.places() }}
{{ gain.functions() }}
{{ rows.reader("x") }}
{{ rows.reader("g") }}
{% if not mean_only %}
{{ rows.writer("dx") }}
{% endif %}
{{ rows.sums() }}

{% macro gain_at(chunk, k) %}
{{- "gain%d" % k if keeps_gain else "gain_of(row, %s + %du, lane)" % (chunk, k) }}
{%- endmacro %}

{% macro fold(chunk, ahead, set="") %}
{% for k in range(held) %}
    products += sum_of(select(
        vec4<f32>(0.0), values_of(x{{ set }}{{ k }}) * r * values_of(g{{ set }}{{ k }}) * {{ gain_at(chunk, k) }},
        inside(row, {{ chunk }} + {{ k }}u, lane)));
{{ rows.refill(["x", "g"], k, ahead, set) }}
{% endfor %}
{% endmacro %}

{% if mean_only %}
{{ rows.entry() }}
{{ rows.row_of_thread() }}
    let r = load_rstd(row);
    var products = 0.0;
{{ rows.load(["x", "g"], "row, 0u") }}
{{ rows.forwards(fold) }}
    let total = row_sum(products, thread);
    if (there && lane == 0u) { store_mean(row, total / f32(params.width)); }
}
{% else %}
{% set sets = ["_even", "_odd"] if two_ahead else [""] %}

{% macro finish(set, write) %}
{% for k in range(held) %}
    {
        let n = values_of(x{{ set }}{{ k }}) * r;
        let g = values_of(g{{ set }}{{ k }});
        let h = g * {{ gain_at("0u", k) }};
{{ rows.refill(["x", "g"], k, "row_ahead, 0u", set) }}
        if (there) {
            {{ write }}_dx(row, {{ k }}u, lane, (h - n * mean) * r);
{% if weight %}
            sum{{ k }} += g * n;
{% endif %}
        }
    }
{% endfor %}
{% endmacro %}

{# One row of every share: row number `turn` of it, whose registers take the one that many turns later. #}
{% macro work(turn, set) %}
    {
        let wanted = ({{ turn }}) * params.shares + share;
        let there = wanted < params.rows && share < params.shares;
        let row = select(0u, wanted, there);
        let far = wanted + {{ sets | length }}u * params.shares;
        let row_ahead = select(row, far, there && far < params.rows);
        let r = r_ahead{{ set }};
        r_ahead{{ set }} = load_rstd(row_ahead);
        var products = 0.0;
{{ fold("0u", "", set) }}
        let mean = row_sum(products, thread) / f32(params.width);
{% if dtype == "bf16" and aligned %}
        if (is_finite(mean)) {
{{ finish(set, "write_finite") }}
        } else {
{{ finish(set, "write") }}
        }
{% else %}
{{ finish(set, "write") }}
{% endif %}
    }
{% endmacro %}

{{ gain.write_part() if weight }}
{{ rows.entry() }}
    let first_share = (group.x + group.y * groups.x) * {{ threads // lanes }}u;
    if (first_share >= params.shares) { return; }
    let share = first_share + thread / {{ lanes }}u;
    let lane = thread % {{ lanes }}u;
{% for k in range(held) %}
{% if weight %}
    var sum{{ k }} = vec4<f32>(0.0);
{% endif %}
{% if keeps_gain %}
    let gain{{ k }} = gain_of(share, {{ k }}u, lane);
{% endif %}
{% endfor %}
{% for set in sets %}
    let first{{ set }} = share + {{ loop.index0 }}u * params.shares;
    let begin{{ set }} = select(0u, first{{ set }}, first{{ set }} < params.rows && share < params.shares);
    var r_ahead{{ set }} = load_rstd(begin{{ set }});
{{ rows.load(["x", "g"], "begin%s, 0u" % set, set) }}
{% endfor %}
    for (var turn = 0u; turn * params.shares + first_share < params.rows; turn += {{ sets | length }}u) {
{% for set in sets %}
{{ work("turn + %du" % loop.index0, set) }}
{% endfor %}
    }
{% if weight %}
    if (share < params.shares) {
{% for k in range(held) %}
        write_part(share, {{ k }}u, lane, sum{{ k }});
{% endfor %}
    }
{% endif %}
}
{% endif %}
