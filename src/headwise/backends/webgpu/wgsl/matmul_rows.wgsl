// out = a b (+ bias) for a few rows of a, as fast as b can be read: sums in float32.
//
//   a    (m, k)   the elements of a row side by side, m at most `rows`
//   b    (k, n)   the elements of a row side by side (`b_along` "n"), or those of a column ("k": a weight (n, k), transposed)
//   out  (m, n)   contiguous; with `split_k`, float32 and one for every split of k, which `matmul_sum.wgsl` adds up
//   bias (n,)
//
// b is read once, straight into registers, several vectors of four at a time. Along k: `lanes` threads share `columns` columns
// and read them side by side. Along n: `lanes` threads side by side have four columns each, and the rows of b go round among the
// others. Sums of threads that share a column meet in workgroup memory.
//
// variables: a, b, bias (dtypes; bias "" for none), out (dtype), b_along, rows, threads, lanes, columns (of a team; along n: 4 · lanes),
// ahead (vectors read at a time), split_k (is k cut?)
{{ input("a", a, 4 if b_along == "k" else 1) }}
{{ input("b", b, 4) }}
{% if bias %}
{{ input("bias", bias, 4) }}
{% endif %}
{{ output("out", out, 4) }}
{{ params("m: u32, n: u32, k: u32, a_stride: u32, b_stride: u32, split: u32") }}
{% set TEAMS = threads // lanes %}
{% set COLUMNS = columns * TEAMS if b_along == "k" else 4 * lanes %}{# of a workgroup #}

var<workgroup> sums: array<vec4<f32>, {{ rows * COLUMNS // 4 }}>;
{% if b_along == "k" %}
{% set at_once = [rows, 16 // columns] | min %}{# rows whose sums meet at once #}
{% set VALUES = at_once * columns %}
{% set SLICES = threads // (TEAMS * VALUES) %}
var<workgroup> thread_sums: array<array<f32, {{ threads + 1 }}>, {{ VALUES }}>;
var<workgroup> slices: array<array<f32, {{ TEAMS * VALUES }}>, {{ SLICES }}>;
{% else %}
var<workgroup> thread_sums: array<array<vec4<f32>, {{ lanes }}>, {{ TEAMS }}>;
{% endif %}

@compute @workgroup_size({{ threads }}) {{ main() }}
    let groups = (params.n + {{ COLUMNS - 1 }}u) / {{ COLUMNS }}u;
    let first_column = workgroup % groups * {{ COLUMNS }}u;
{% if split_k %}
    let begin = workgroup / groups * params.split;
    let end = min(begin + params.split, params.k);
    let to = workgroup / groups * params.m;
    if (begin >= params.k) { return; }
{% else %}
    let begin = 0u;
    let end = params.k;
    let to = 0u;
{% endif %}
    // Beyond the last row: the last one again, whose sums are not written.
{% for r in range(rows) %}
    let row{{ r }} = min({{ r }}u, params.m - 1u) * params.a_stride;
{% endfor %}
    let team = thread / {{ lanes }}u;
    let lane = thread % {{ lanes }}u;
{% if b_along == "k" %}
    let column = first_column + team * {{ columns }}u;
{% for r in range(rows) %}
{% for c in range(columns) %}
    var sum{{ r }}_{{ c }} = 0.0;
{% endfor %}
{% endfor %}
    for (var at = begin / 4u + lane; at < end / 4u; at += {{ lanes * ahead }}u) {
{% for u in range(ahead) %}
{% for c in range(columns) %}
        var b{{ u }}_{{ c }} = vec4<f32>(0.0);
{% endfor %}
{% endfor %}
{% for u in range(ahead) %}
{% for r in range(rows) %}
        var a{{ u }}_{{ r }} = vec4<f32>(0.0);
{% endfor %}
        if (at + {{ u * lanes }}u < end / 4u) {
{% for c in range(columns) %}
            if (column + {{ c }}u < params.n) { b{{ u }}_{{ c }} = load_b((column + {{ c }}u) * params.b_stride + at + {{ u * lanes }}u); }
{% endfor %}
{% for r in range(rows) %}
            a{{ u }}_{{ r }} = load_a(row{{ r }} + at + {{ u * lanes }}u);
{% endfor %}
        }
{% endfor %}
{% for u in range(ahead) %}
{% for r in range(rows) %}
{% for c in range(columns) %}
        sum{{ r }}_{{ c }} += dot(a{{ u }}_{{ r }}, b{{ u }}_{{ c }});
{% endfor %}
{% endfor %}
{% endfor %}
    }
{% for first in range(0, rows, at_once) %}
{% for r in range(at_once) %}
{% for c in range(columns) %}
    thread_sums[{{ r * columns + c }}][thread] = sum{{ first + r }}_{{ c }};
{% endfor %}
{% endfor %}
    workgroupBarrier();
    {
        let whose = thread % {{ TEAMS * VALUES }}u;
        let slice = thread / {{ TEAMS * VALUES }}u;
        let from_thread = whose / {{ VALUES }}u * {{ lanes }}u + slice * {{ lanes // SLICES }}u;
        var share = 0.0;
{% for i in range(lanes // SLICES) %}
        share += thread_sums[whose % {{ VALUES }}u][from_thread + {{ i }}u];
{% endfor %}
        slices[slice][whose] = share;
    }
    workgroupBarrier();
    if (thread < {{ TEAMS * VALUES }}u) {
        var total = 0.0;
{% for i in range(SLICES) %}
        total += slices[{{ i }}][thread];
{% endfor %}
        let of_column = thread / {{ VALUES }}u * {{ columns }}u + thread % {{ columns }}u;
        let row = {{ first }}u + thread % {{ VALUES }}u / {{ columns }}u;
        let place = row * {{ COLUMNS }}u + of_column;
        sums[place / 4u][place % 4u] = total;
    }
    workgroupBarrier();
{% endfor %}
{% else %}
    let column = first_column + lane * 4u;
{% for r in range(rows) %}
    var sum{{ r }} = vec4<f32>(0.0);
{% endfor %}
    for (var at = begin + team; at < end; at += {{ TEAMS * ahead }}u) {
{% for u in range(ahead) %}
        var b{{ u }} = vec4<f32>(0.0);
{% for r in range(rows) %}
        var a{{ u }}_{{ r }} = 0.0;
{% endfor %}
        if (at + {{ u * TEAMS }}u < end && column < params.n) {
            b{{ u }} = load_b((at + {{ u * TEAMS }}u) * params.b_stride + column / 4u);
{% for r in range(rows) %}
            a{{ u }}_{{ r }} = load_a(row{{ r }} + at + {{ u * TEAMS }}u);
{% endfor %}
        }
{% endfor %}
{% for u in range(ahead) %}
{% for r in range(rows) %}
        sum{{ r }} = fma(vec4<f32>(a{{ u }}_{{ r }}), b{{ u }}, sum{{ r }});
{% endfor %}
{% endfor %}
    }
{% for r in range(rows) %}
    thread_sums[team][lane] = sum{{ r }};
    workgroupBarrier();
    if (team == 0u) {
        var total = vec4<f32>(0.0);
        for (var i = 0u; i < {{ TEAMS }}u; i++) { total += thread_sums[i][lane]; }
        sums[{{ r * lanes }}u + lane] = total;
    }
    workgroupBarrier();
{% endfor %}
{% endif %}
    for (var item = thread; item < {{ rows * COLUMNS // 4 }}u; item += {{ threads }}u) {
        let row = item / {{ COLUMNS // 4 }}u;
        let vector = first_column / 4u + item % {{ COLUMNS // 4 }}u;
        if (row < params.m && vector * 4u < params.n) {
            store_out((to + row) * (params.n / 4u) + vector, sums[item]{{ " + load_bias(vector)" if bias }});
        }
    }
}
