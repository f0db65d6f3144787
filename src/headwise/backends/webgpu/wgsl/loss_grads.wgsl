// The gradients that arrive at each row of a loss, side by side.
//
//   grad         (1,) or (rows,)   of the row's loss, before its weight; not there: 0
//   weights      (rows,)           of the rows' losses
//   grad_logprobs, grad_entropy, entropy  (rows,)   not there: 0
//   targets      (rows,)           an ignored row's weight may be anything: 0 is written
//   y            (rows,)           grad · weight; or, where `tilted`, (rows, 4) with the other three
//
// variables: grad, logprob, entropy (are they there?), weighted (the dtype of the weights, "" for none), targets, tilted
{% import "targets.wgsl" as targets_of with context %}
{{ targets_of.declared() }}
{% if grad %}
{{ input("grad", "f32", 1) }}
{% endif %}
{% if weighted %}
{{ input("weights", weighted, 1) }}
{% endif %}
{% if logprob %}
{{ input("grad_logprobs", "f32", 1) }}
{% endif %}
{% if entropy %}
{{ input("grad_entropy", "f32", 1) }}
{{ input("entropy", "f32", 1) }}
{% endif %}
{{ output("y", "f32", 4 if tilted else 1) }}
{{ params("rows: u32, grad_stride: u32, ignored_low: u32, ignored_high: u32") }}

{{ targets_of.functions() }}
@compute @workgroup_size(256) {{ main() }}
    let row = workgroup * 256u + thread;
    if (row < params.rows) {
        let of_loss = {{ "load_grad(row * params.grad_stride)" if grad else "0.0" }}{{ " * load_weights(row)" if weighted }};
{% if tilted %}
        let of_entropy = {{ "vec2<f32>(load_grad_entropy(row), load_entropy(row))" if entropy else "vec2<f32>(0.0)" }};
        let y = vec4<f32>(of_loss, {{ "load_grad_logprobs(row)" if logprob else "0.0" }}, of_entropy);
        store_y(row, select(y, vec4<f32>(0.0), is_ignored(row)));
{% else %}
        store_y(row, select(of_loss, 0.0, is_ignored(row)));
{% endif %}
    }
}
