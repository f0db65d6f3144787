// The loss of a batch from the losses of its rows, or the gradient of each row's loss from that of the loss: one number.
//
//   targets  (N,)   rows whose target is `ignored` (64 bits, in two words) do not count in a mean
//   x        (N,)   losses of the rows; or (1,), the gradient of the loss, which is 1 if not `given`
//   y        (1,)   sum of x, or x itself; divided by the number of rows that count, where `mean`; with `weights` (N,), by the
//                   sum of theirs, and 0 where that is 0
//
// One workgroup, in a fixed order: a thread takes every 256th row, four at once; a tree adds up the threads.
//
// variables: targets, a dtype; mean; gradient; given; weighted, the dtype of the weights of a mean ("" for none)
{% import "targets.wgsl" as targets_of with context %}
{% set at_once = 4 %}
{{ targets_of.declared() }}
{% if given %}
{{ input("x", "f32", 1) }}
{% endif %}
{% if weighted %}
{{ input("weights", weighted, 1) }}
{% endif %}
{{ output("y", "f32", 1) }}
{{ params("rows: u32, ignored_low: u32, ignored_high: u32") }}

var<workgroup> sums: array<f32, 256>;
{% set number = "f32" if weighted else "u32" %}
var<workgroup> counts: array<{{ number }}, 256>;

{{ targets_of.functions() }}
{% if weighted %}
fn not_a_number() -> f32 { var bits = 0x7fc00000u; return bitcast<f32>(bits); }
{% endif %}

@compute @workgroup_size(256)
fn main(@builtin(local_invocation_index) thread: u32) {
    var sum = 0.0;
    var count = {{ number }}(0);
{% if mean or not gradient %}
    for (var first = thread; first < params.rows; first += {{ 256 * at_once }}u) {
        // All loads before the first use, so that they overlap.
{% for k in range(at_once) %}
        let there{{ k }} = first + {{ 256 * k }}u < params.rows;
        let row{{ k }} = select(first, first + {{ 256 * k }}u, there{{ k }});
{% if not gradient %}
        let x{{ k }} = load_x(row{{ k }});
{% endif %}
{% if mean %}
        let counts{{ k }} = there{{ k }} && !is_ignored(row{{ k }});
{% endif %}
{% endfor %}
{% for k in range(at_once) %}
{% if not gradient %}
        sum += select(0.0, x{{ k }}, there{{ k }});
{% endif %}
{% if mean %}
        count += select({{ number }}(0), {{ "load_weights(row%d)" % k if weighted else "1u" }}, counts{{ k }});
{% endif %}
{% endfor %}
    }
{% endif %}
    sums[thread] = sum;
    counts[thread] = count;
    workgroupBarrier();
    for (var half = 128u; half > 0u; half /= 2u) {
        if (thread < half) {
            sums[thread] += sums[thread + half];
            counts[thread] += counts[thread + half];
        }
        workgroupBarrier();
    }
    if (thread == 0u) {
        let y = {{ "sums[0]" if not gradient else "load_x(0u)" if given else "1.0" }};
{% if weighted %}
        // Not y · 0, which a compiler may take for 0 whatever y is.
        let finite = (bitcast<u32>(y) & 0x7f800000u) != 0x7f800000u;
        store_y(0u, select(y / counts[0], select(not_a_number(), 0.0, finite), counts[0] == 0.0));
{% else %}
        store_y(0u, y{{ " / f32(max(counts[0], 1u))" if mean }});
{% endif %}
    }
}
