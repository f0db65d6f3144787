// A norm of rows: about zero (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019) or, if `centre`, about the
// mean (Ba, Kiros and Hinton, "Layer Normalization", 2016); of x or, with a residual, of h = x + residual, rounded.
//
//   x, residual (rows, width), weight, bias (width)
//   h           (rows, width)    x + residual
//   statistics  (rows)           rstd = 1 / sqrt(mean x² + eps)
//               (rows, 3)        if `centre`: mean, what its rounding left, rstd = 1 / sqrt(mean (x - mean)² + eps)
//   y           (rows, width)    (x - mean) · rstd · (weight + offset) + bias
//
// A row is read into registers whole, or walked: forwards for its statistics, the last part kept, then backwards. How rows map
// to threads: rows.wgsl.
//
// About the mean: deviations are from a pivot, never from zero. In a row that is held that is its mean, in a longer one each
// thread has the mean of the first part that it reads: what this costs in digits, the spread of its elements gives back. What is
// left of the mean (`rest`) is subtracted as well: in a row of equal numbers it would be all that is seen.
//
// variables: weight, bias ("" or their dtypes), centre, residual, normalises, keeps (are y and the statistics written?), and
// those of rows.wgsl
{% import "rows.wgsl" as rows with context %}
{% import "norm_parts.wgsl" as parts with context %}
{% set inputs = ["x", "residual"] if residual else ["x"] %}
{% for name in inputs %}
{{ rows.read(name) }}
{% endfor %}
{{ parts.read_column("weight", weight) }}
{{ parts.read_column("bias", bias) }}
{% if keeps %}
{{ output("statistics", "f32", 1) }}
{% endif %}
{% if residual %}
{{ rows.write("h", "h_seams") }}
{% endif %}
{% if normalises %}
{{ rows.write("y") }}
{% endif %}
{{ params(rows.fields(inputs | join(", ")) ~ ", eps: f32, offset: f32") }}
{{ rows.places() }}
{{ parts.columns() }}
{% for name in inputs %}
{{ rows.reader(name) }}
{% endfor %}
{% if residual %}
{{ rows.writer("h", "h_seams") }}
{{ rows.raw_writer("h") }}
{% endif %}
{% if normalises %}
{{ rows.writer("y") }}
{% endif %}
{{ rows.sums() }}
{% if centre %}
{{ rows.pair_sums() }}
{% endif %}

{# What is normalised, from registers. Rows that are held have h in the place of x; others add again. #}
{% macro value(k) -%}
{{ "values_of(packed(values_of(x%d) + values_of(residual%d)))" % (k, k) if residual and walks else "values_of(x%d)" % k }}
{%- endmacro %}

{% macro inner(k, chunk, what) -%}
select(vec4<f32>(0.0), {{ what }}, inside(row, {{ chunk }} + {{ k }}u, lane))
{%- endmacro %}

{% macro fold(chunk, ahead) %}
{% for k in range(held) %}
{% if residual %}
{% if walks %}
    if (there) { write_raw_h(row, {{ chunk }} + {{ k }}u, lane, packed(values_of(x{{ k }}) + values_of(residual{{ k }}))); }
{% else %}
    x{{ k }} = packed(values_of(x{{ k }}) + values_of(residual{{ k }}));
    if (there) { write_raw_h(row, {{ chunk }} + {{ k }}u, lane, x{{ k }}); }
{% endif %}
{% endif %}
    let v{{ k }} = {{ inner(k, chunk, value(k) ~ (" - pivot" if centre)) }};
    squares += sum_of(v{{ k }} * v{{ k }});
{% if centre %}
    sums += sum_of(v{{ k }});
{% if walks %}
    count += sum_of({{ inner(k, chunk, "vec4<f32>(1.0)") }});
{% endif %}
{% endif %}
{{ rows.refill(inputs, k, ahead) }}
{% endfor %}
{% endmacro %}

{% macro finish(chunk, ahead, write) %}
    if (there) {
{% for k in range(held) %}
        {{ write }}_y(row, {{ chunk }} + {{ k }}u, lane, {{ value_of_result(k, chunk) }});
{{ rows.refill(inputs, k, ahead) }}
{% endfor %}
    }
{% endmacro %}

{% macro value_of_result(k, chunk) -%}
{% set gain = " * r * gain_of(row, %s + %du, lane)" % (chunk, k) %}
{{ "(" ~ value(k) ~ " - mean - rest)" if centre else value(k) }}{{ gain }}
{%- if bias %} + bias_of(row, {{ chunk }} + {{ k }}u, lane){% endif %}
{%- endmacro %}

@compute @workgroup_size({{ threads }}) {{ main() }}
{{ rows.row_of_thread() }}
    var squares = 0.0;
{{ rows.load(inputs, "row, 0u") }}
{% if centre %}
    var sums = 0.0;
    let width = f32(params.width);
    var begin = 0.0;
{% for k in range(held) %}
    begin += sum_of({{ inner(k, "0u", value(k)) }});
{% endfor %}
{% if walks %}
    var count = 0.0;
{% for k in range(held) %}
    count += sum_of({{ inner(k, "0u", "vec4<f32>(1.0)") }});
{% endfor %}
    let pivot = begin / count;
    count = 0.0;
{{ rows.forwards(fold) }}
    // From the moments of each thread's elements to those of the row.
    let above = sums / count; // the pivot
    let spread = max(squares - above * sums, 0.0);
    let mean = row_sum((pivot + above) * count, thread) / width;
    let away = pivot - mean + above;
    let total = row_sums(vec2<f32>(away * count, spread + away * away * count), thread);
{% else %}
    let mean = row_sum(begin, thread) / width;
    let pivot = mean;
{{ rows.forwards(fold) }}
    let total = row_sums(vec2<f32>(sums, squares), thread);
{% endif %}
    let rest = total.x / width;
    let r = inverseSqrt(max(total.y - rest * total.x, 0.0) / width + params.eps);
{% else %}
{{ rows.forwards(fold) }}
    let r = inverseSqrt(row_sum(squares, thread) / f32(params.width) + params.eps);
{% endif %}
{% if keeps %}
{% if centre %}
    if (there && lane == 0u) {
        store_statistics(row * 3u, mean);
        store_statistics(row * 3u + 1u, rest);
        store_statistics(row * 3u + 2u, r);
    }
{% else %}
    if (there && lane == 0u) { store_statistics(row, r); }
{% endif %}
{% endif %}
{% if normalises %}
{{ rows.backwards(finish, "") }}
{% endif %}
}
