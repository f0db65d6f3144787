// RMS normalisation: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
//
//   x (rows, width), weight (width)
//   rstd  (rows)          1 / sqrt(mean x² + eps)
//   y     (rows, width)   x · rstd · (weight + offset)
//
// A row is read into registers whole, or walked: forwards for its mean, the last part kept, then backwards. How rows lie on
// threads: rows.wgsl.
//
// variables: weight ("" or its dtype), normalises, keeps (are y and rstd written?), and those of rows.wgsl
{% import "rows.wgsl" as rows with context %}
{% import "rms_norm_gain.wgsl" as gain with context %}
{{ rows.read("x") }}
{{ gain.read() }}
{% if keeps %}
{{ output("rstd", "f32", 1) }}
{% endif %}
{% if normalises %}
{{ rows.write("y") }}
{% endif %}
{{ params(rows.fields("x") ~ ", eps: f32, offset: f32") }}
{{ rows.places() }}
{{ gain.functions() }}
{{ rows.reader("x") }}
{% if normalises %}
{{ rows.writer("y") }}
{% endif %}
{{ rows.sums() }}

{% macro fold(chunk, ahead) %}
{% for k in range(held) %}
    let v{{ k }} = select(vec4<f32>(0.0), values_of(x{{ k }}), inside(row, {{ chunk }} + {{ k }}u, lane));
    squares += sum_of(v{{ k }} * v{{ k }});
{{ rows.refill(["x"], k, ahead) }}
{% endfor %}
{% endmacro %}

{% macro finish(chunk, ahead, write) %}
    if (there) {
{% for k in range(held) %}
        {{ write }}_y(row, {{ chunk }} + {{ k }}u, lane, values_of(x{{ k }}) * r * gain_of(row, {{ chunk }} + {{ k }}u, lane));
{{ rows.refill(["x"], k, ahead) }}
{% endfor %}
    }
{% endmacro %}

{{ rows.entry() }}
{{ rows.row_of_thread() }}
    var squares = 0.0;
{{ rows.load(["x"], "row, 0u") }}
{{ rows.forwards(fold) }}
    let r = inverseSqrt(row_sum(squares, thread) / f32(params.width) + params.eps);
{% if keeps %}
    if (there && lane == 0u) { store_rstd(row, r); }
{% endif %}
{% if normalises %}
{{ rows.backwards(finish, "") }}
{% endif %}
}
