// Merges attention results over different keys by their log-sum-exps (Milakov and Gimelshein, "Online normalizer
// calculation for softmax", 2018).
//
//   lse = log Σ exp(lse_i)        out = Σ exp(lse_i - lse) out_i
//
//   out0 … , lse0 …   (n0, n1, n2, Dv) and (n0, n1, n2), any strides; a part whose lse is -inf is not read
//   out, lse          the same shapes, contiguous
//
// One thread per vector of four: the weights are few, and cheaper to recompute than to share.
//
// variables: dtype (of the parts), to (of the result), parts
{% for i in range(parts) %}
{{ input("out%d" % i, dtype, 4) }}
{{ input("lse%d" % i, "f32", 1) }}
{% endfor %}
{{ output("out", to, 4) }}
{{ output("lse", "f32", 1) }}
{% set fields %}
count: u32, columns: u32, n1: u32, n2: u32
{%- for i in range(parts) %}{% for d in range(3) %}, o{{ i }}_{{ d }}: u32, l{{ i }}_{{ d }}: u32{% endfor %}{% endfor %}
{% endset %}
{{ params(fields) }}

const LOWEST = -3.4028234e38f;
const LOG2E = 1.4426950408889634f;
const LN2 = 0.6931471805599453f;

fn negative_infinity() -> f32 { var bits = 0xff800000u; return bitcast<f32>(bits); }
fn there(lse: f32) -> bool { return bitcast<u32>(lse) != 0xff800000u; }

@compute @workgroup_size(256) {{ main() }}
    let i = workgroup * 256u + thread;
    if (i >= params.count) { return; }
    let column = i % params.columns;
    let row = i / params.columns;
    let i2 = row % params.n2;
    let i1 = row / params.n2 % params.n1;
    let i0 = row / params.n2 / params.n1;
    var highest = LOWEST;
{% for i in range(parts) %}
    let lse_{{ i }} = load_lse{{ i }}(i0 * params.l{{ i }}_0 + i1 * params.l{{ i }}_1 + i2 * params.l{{ i }}_2);
    if (there(lse_{{ i }})) { highest = max(highest, lse_{{ i }}); }
{% endfor %}
    var total = 0.0;
    var sum = vec4<f32>();
{% for i in range(parts) %}
    if (there(lse_{{ i }})) {
        let weight = exp2((lse_{{ i }} - highest) * LOG2E);
        total += weight;
        let at = i0 * params.o{{ i }}_0 + i1 * params.o{{ i }}_1 + i2 * params.o{{ i }}_2;
        sum = fma(vec4<f32>(weight), load_out{{ i }}(at + column), sum);
    }
{% endfor %}
    let empty = {% for i in range(parts) %}!there(lse_{{ i }}){{ " && " if not loop.last }}{% endfor %};
    store_out(i, sum / select(total, 1.0, empty));
    if (column == 0u) { store_lse(row, select(highest + log2(total) * LN2, negative_infinity(), empty)); }
}
