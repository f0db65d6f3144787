// Backward of the norms for rows that do not fit into registers, once their means are known (norm_backward.wgsl, `means_only`).
// No sum over a row is left, so a thread owns columns and loops over rows.
//
//   x, g, added  (rows, width), weight (width)
//   terms        (rows, 2)    rstd, mean(h · n)
//                (rows, 5)    if `centre`: mean, what its rounding left, rstd, mean(h · n), mean(h)
//   dx           (rows, width)    (h - mean(h) - n · mean(h · n)) · rstd + added
//   partials     (sums, partial_count, width padded to fours)    partial sums of dweight and dbias, see norm_backward.wgsl
//
// grid: (chunks of 256 vectors, partial_count).
//
// variables: weight, bias ("" or their dtypes), centre, added, unroll, and those of rows.wgsl with lanes = threads = 256
{% import "rows.wgsl" as rows with context %}
{% import "norm_parts.wgsl" as parts with context %}
{% set inputs = ["x", "g", "added"] if added else ["x", "g"] %}
{% for name in inputs %}
{{ rows.read(name) }}
{% endfor %}
{{ parts.read_column("weight", weight) }}
{{ input("terms", "f32", 1) }}
{{ parts.backward_outputs() }}
{{ parts.backward_functions(inputs) }}
{% set terms = ["mean", "rest", "r", "mean_of_product", "mean_of_h"] if centre else ["r", "mean_of_product"] %}

@compute @workgroup_size({{ threads }})
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let chunk = group.x;
    let partial = group.y;
    let gain = gain_of(partial, chunk, lane);
    var sum = vec4<f32>(0.0);
    var bias_sum = vec4<f32>(0.0);
    for (var first = partial; first < params.rows; first += params.partial_count * {{ unroll }}u) {
        // All loads before the first use, so that they overlap.
{% for k in range(unroll) %}
        let wanted{{ k }} = first + params.partial_count * {{ k }}u;
        let row{{ k }} = select(first, wanted{{ k }}, wanted{{ k }} < params.rows);
{% for name in inputs %}
        let {{ name }}{{ k }} = raw_{{ name }}(row{{ k }}, chunk, lane);
{% endfor %}
{% endfor %}
{% for k in range(unroll) %}
        if (wanted{{ k }} < params.rows) {
{% for term in terms %}
            let {{ term }} = load_terms(row{{ k }} * {{ terms | length }}u + {{ loop.index0 }}u);
{% endfor %}
            let n = {{ "(values_of(x%d) - mean - rest)" % k if centre else "values_of(x%d)" % k }} * r;
            let g = values_of(g{{ k }});
            let result = (g * gain - n * mean_of_product{{ " - mean_of_h" if centre }}) * r;
            write_dx(row{{ k }}, chunk, lane, result{{ " + values_of(added%d)" % k if added }});
            sum += g * n;
            bias_sum += g;
        }
{% endfor %}
    }
{% if weight %}
    write_partial(0u, partial, chunk, lane, sum);
{% endif %}
{% if bias %}
    write_partial({{ "1u" if weight else "0u" }}, partial, chunk, lane, bias_sum);
{% endif %}
}
