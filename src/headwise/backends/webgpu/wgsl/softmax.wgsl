// Softmax over rows, and its backward.
//
//   forward    x (rows, width)            y  = exp(x - max) / sum exp(x - max)      a row of -inf gives zeros, or NaN (`strict`)
//   backward   p, g (rows, width)         dx = p · (g - sum p · g)
//
// A row is read into registers whole, or walked: forwards for its statistics, the last part kept, then backwards for the
// results, so that the second read hits the cache. How rows map to threads: rows.wgsl.
//
// variables: backward, strict, and those of rows.wgsl
{% import "rows.wgsl" as rows with context %}
{% set inputs = ["p", "g"] if backward else ["x"] %}
{% for name in inputs %}
{{ rows.read(name) }}
{% endfor %}
{{ rows.write("y") }}
{{ params(rows.fields(inputs | join(", "))) }}
{{ rows.places() }}
{% for name in inputs %}
{{ rows.reader(name) }}
{% endfor %}
{{ rows.writer("y") }}
{{ rows.sums() if backward else rows.softmax(exact=False) }}

{% macro fold(chunk, ahead) %}
{% if backward %}
{% for k in range(held) %}
    state += sum_of(select(vec4<f32>(0.0), values_of(p{{ k }}) * values_of(g{{ k }}), inside(row, {{ chunk }} + {{ k }}u, lane)));
{{ rows.refill(inputs, k, ahead) }}
{% endfor %}
{% else %}
{% for k in range(held) %}
    let z{{ k }} = select(vec4<f32>(nothing), values_of(x{{ k }}), inside(row, {{ chunk }} + {{ k }}u, lane));
{% endfor %}
{{ rows.fold_softmax("x", ahead) }}
{% endif %}
{% endmacro %}

{% macro finish(chunk, ahead, write) %}
    if (there) {
{% for k in range(held) %}
{% if backward %}
        {{ write }}_y(row, {{ chunk }} + {{ k }}u, lane, values_of(p{{ k }}) * (values_of(g{{ k }}) - result));
{% else %}
        {{ write }}_y(row, {{ chunk }} + {{ k }}u, lane, powers(values_of(x{{ k }}), result.x) * scale);
{% endif %}
{{ rows.refill(inputs, k, ahead) }}
{% endfor %}
    }
{% endmacro %}

@compute @workgroup_size({{ threads }}) {{ main() }}
{{ rows.row_of_thread() }}
{% if backward %}
    var state = 0.0;
{% else %}
    let nothing = negative_infinity();
    var state = vec2<f32>(LOWEST, 0.0);
{% endif %}
{{ rows.load(inputs, "row, 0u") }}
{{ rows.forwards(fold) }}
{% if backward %}
    let result = row_sum(state, thread);
{% else %}
    let result = row_softmax(state, thread);
    let scale = unit(result.x) / {{ "result.y" if strict else "select(result.y, 1.0, result.y == 0.0)" }};
{% endif %}
{{ rows.backwards(finish, "is_finite(result)" if backward else "is_finite(scale)") }}
}
