// Merges the splits of decode.wgsl in a fixed order: one workgroup per row, which is a token of a query head.
//
//   partials   (B · Hq · Sq, slots, Dv), partial_lses (B · Hq · Sq, slots), from decode.wgsl
//   sink       (Hq), a logit that joins the denominator
//   out        (B, Hq, Sq, Dv); lse (B · Hq · Sq), natural
//
// The `chains` threads that own the same columns take the splits in turn; then the chains are merged in order.
//
// variables: dtype, sink ("" or its dtype), dv4 (vectors of four in a row), columns (threads beside each other: a power of
// two), chains
{{ input("partials", "f32", 4) }}
{{ input("partial_lses", "f32", 1) }}
{% if sink %}
{{ input("sink", sink, 1) }}
{% endif %}
{{ output("out", dtype, 4) }}
{{ output("lse", "f32", 1) }}
{{ params("count: u32, heads: u32, q_length: u32, slots: u32, sink_stride: u32, o_b: u32, o_h: u32, o_s: u32") }}
{% set threads = columns * chains %}

const LOWEST = -3.4028234e38f;
const LOG2E = 1.4426950408889634f;
const LN2 = 0.6931471805599453f;

var<workgroup> sums: array<vec4<f32>, {{ threads }}>; // [chain, column]
var<workgroup> highest_of: array<f32, {{ chains }}>;
var<workgroup> total_of: array<f32, {{ chains }}>;

fn negative_infinity() -> f32 { var bits = 0xff800000u; return bitcast<f32>(bits); }
fn not_a_number() -> f32 { var bits = 0x7fc00000u; return bitcast<f32>(bits); }
fn is_nan(x: f32) -> bool { return (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u; }

@compute @workgroup_size({{ threads }}) {{ main() }}
    let row = workgroup;
    if (row >= params.count) { return; }
    let token = row % params.q_length;
    let head = row / params.q_length % params.heads;
    let batch = row / params.q_length / params.heads;
    let chain = thread / {{ columns }}u;
    for (var first = 0u; first < {{ dv4 }}u; first += {{ columns }}u) {
        let column = first + thread % {{ columns }}u;
        var highest = LOWEST;
        var total = 0.0;
        var sum = vec4<f32>();
        for (var i = chain; i < params.slots; i += {{ chains }}u) {
            let split_lse = load_partial_lses(row * params.slots + i);
            if (is_nan(split_lse)) {
                total = not_a_number();
            } else if (bitcast<u32>(split_lse) != 0xff800000u) { // a split that saw nothing wrote no partials
                let higher = max(highest, split_lse);
                let shrink = exp2(highest - higher);
                let weight = exp2(split_lse - higher);
                total = total * shrink + weight;
                sum *= shrink;
                if (column < {{ dv4 }}u) {
                    sum += weight * load_partials((row * params.slots + i) * {{ dv4 }}u + column);
                }
                highest = higher;
            }
        }
        sums[thread] = sum;
        if (column == first) {
            highest_of[chain] = highest;
            total_of[chain] = total;
        }
        workgroupBarrier();
        if (chain == 0u && column < {{ dv4 }}u) {
            for (var i = 1u; i < {{ chains }}u; i++) {
                let higher = max(highest, highest_of[i]);
                let before = exp2(highest - higher);
                let weight = exp2(highest_of[i] - higher);
                total = total * before + total_of[i] * weight;
                sum = sum * before + sums[i * {{ columns }}u + thread] * weight;
                highest = higher;
            }
            var row_lse = (highest + log2(total)) * LN2;
            var scaling = 1.0 / total;
            if (is_nan(total)) {
                row_lse = not_a_number();
                scaling = not_a_number();
            } else if (total == 0.0) {
                row_lse = {{ "load_sink(head * params.sink_stride)" if sink else "negative_infinity()" }};
                scaling = 0.0;
            } else {
{% if sink %}
                let at_sink = load_sink(head * params.sink_stride) * LOG2E;
                let higher = max(highest, at_sink);
                let shrunk = exp2(highest - higher);
                total = total * shrunk + exp2(at_sink - higher);
                row_lse = (higher + log2(total)) * LN2;
                scaling = shrunk / total;
{% endif %}
            }
            store_out(batch * params.o_b + head * params.o_h + token * params.o_s + column, sum * scaling);
            if (column == 0u) { store_lse(row, row_lse); }
        }
        workgroupBarrier();
    }
}
