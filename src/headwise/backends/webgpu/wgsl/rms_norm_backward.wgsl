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
// `mean_only`: rows too long for registers are walked once for mean(h · n) of each row, and rms_norm_columns.wgsl does the
// rest.
//
// variables: weight ("" or its dtype), mean_only, and those of rows.wgsl
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

{% macro load(chunk) %}
{% for k in range(held) %}
    let x{{ k }} = raw_x(row, {{ chunk }} + {{ k }}u, lane);
    let g{{ k }} = raw_g(row, {{ chunk }} + {{ k }}u, lane);
{% endfor %}
{% endmacro %}

{% macro fold(chunk) %}
{% for k in range(held) %}
    products += sum_of(select(
        vec4<f32>(0.0), values_of(x{{ k }}) * r * values_of(g{{ k }}) * gain_of(row, {{ chunk }} + {{ k }}u, lane),
        inside(row, {{ chunk }} + {{ k }}u, lane)));
{% endfor %}
{% endmacro %}

{% if mean_only %}
{{ rows.entry() }}
{{ rows.row_of_thread() }}
    let r = load_rstd(row);
    var products = 0.0;
    for (var block = 0u; block < params.blocks; block++) {
        let chunk = block * {{ held }}u;
{{ load("chunk") }}
{{ fold("chunk") }}
    }
    let total = row_sum(products, thread);
    if (there && lane == 0u) { store_mean(row, total / f32(params.width)); }
}
{% else %}
{{ gain.write_part() if weight }}
{{ rows.entry() }}
    let first_share = (group.x + group.y * groups.x) * {{ threads // lanes }}u;
    if (first_share >= params.shares) { return; }
    let share = first_share + thread / {{ lanes }}u;
    let lane = thread % {{ lanes }}u;
{% if weight %}
{% for k in range(held) %}
    var sum{{ k }} = vec4<f32>(0.0);
{% endfor %}
{% endif %}
    for (var turn = 0u; turn * params.shares + first_share < params.rows; turn++) {
        let wanted = turn * params.shares + share;
        let there = wanted < params.rows && share < params.shares;
        let row = select(0u, wanted, there);
        let r = load_rstd(row);
{{ load("0u") }}
        var products = 0.0;
{{ fold("0u") }}
        let mean = row_sum(products, thread) / f32(params.width);
        if (there) {
{% for k in range(held) %}
            let n{{ k }} = values_of(x{{ k }}) * r;
            let h{{ k }} = values_of(g{{ k }}) * gain_of(row, {{ k }}u, lane);
            write_dx(row, {{ k }}u, lane, (h{{ k }} - n{{ k }} * mean) * r);
{% if weight %}
            sum{{ k }} += values_of(g{{ k }}) * n{{ k }};
{% endif %}
{% endfor %}
        }
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
