// Backward of RMS normalisation for rows that registers do not hold, once mean(h · n) of each row is known
// (rms_norm_backward.wgsl, `mean_only`): no sum over a row is left, so a thread keeps its columns and goes down the rows.
//
//   x, g  (rows, width), weight (width), rstd, mean (rows)
//   dx     (rows, width)    (h - n · mean) · rstd
//   parts  (shares, width padded to fours)    a share of dweight; share s has the rows s, s + shares, …
//
// grid: (chunks of 256 vectors, shares). The number of shares is even: see rms_norm_backward.wgsl.
//
// variables: weight ("" or its dtype), unroll, and those of rows.wgsl with lanes = threads = 256
{% import "rows.wgsl" as rows with context %}
{% import "rms_norm_gain.wgsl" as gain with context %}
{{ rows.read("x") }}
{{ rows.read("g") }}
{{ gain.read() }}
{{ input("rstd", "f32", 1) }}
{{ input("mean", "f32", 1) }}
{{ rows.write("dx") }}
{% if weight %}
{{ output("parts", "f32", 4 if aligned else 1) }}
{% endif %}
{{ params(rows.fields("x, g") ~ ", offset: f32, shares: u32, goes_on: u32") }}
{{ rows.places() }}
{{ gain.functions() }}
{{ rows.reader("x") }}
{{ rows.reader("g") }}
{{ rows.writer("dx") }}
{{ gain.write_part() if weight }}

@compute @workgroup_size({{ threads }})
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let chunk = group.x;
    let share = group.y;
    let gain = gain_of(share, chunk, lane);
    var sum = vec4<f32>(0.0);
    for (var first = share; first < params.rows; first += params.shares * {{ unroll }}u) {
        // All loads before the first use: several rows are on their way from memory at once.
{% for k in range(unroll) %}
        let wanted{{ k }} = first + params.shares * {{ k }}u;
        let row{{ k }} = select(first, wanted{{ k }}, wanted{{ k }} < params.rows);
        let x{{ k }} = raw_x(row{{ k }}, chunk, lane);
        let g{{ k }} = raw_g(row{{ k }}, chunk, lane);
{% endfor %}
{% for k in range(unroll) %}
        if (wanted{{ k }} < params.rows) {
            let r = load_rstd(row{{ k }});
            let n = values_of(x{{ k }}) * r;
            let g = values_of(g{{ k }});
            write_dx(row{{ k }}, chunk, lane, (g * gain - n * load_mean(row{{ k }})) * r);
            sum += g * n;
        }
{% endfor %}
    }
{% if weight %}
    write_part(share, chunk, lane, sum);
{% endif %}
}
