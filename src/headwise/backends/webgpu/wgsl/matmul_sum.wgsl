// out = partials[0] + partials[1] + … (+ bias, or + out): the float32 products that a matmul made of splits of its k, in their
// order.
//
// A matrix is a row of vectors of four here; of a batch, each matrix has its partials one after the other.
//
// variables: bias (its dtype, or ""), out (dtype), adds (to what is in out)
{{ input("partials", "f32", 4) }}
{% if bias %}
{{ input("bias", bias, 1) }}
{% endif %}
{{ output("out", out, 4) }}
{{ params("vectors: u32, splits: u32, matrices: u32, columns: u32") }}

@compute @workgroup_size(256) {{ main() }}
    let at = workgroup * 256u + thread;
    if (at >= params.vectors * params.matrices) { return; }
    let first = at / params.vectors * params.splits * params.vectors + at % params.vectors;
    var total = load_partials(first);
    for (var i = 1u; i < params.splits; i++) { total += load_partials(first + i * params.vectors); }
{% if bias %}
{% for j in range(4) %}
    total[{{ j }}] += load_bias((at % params.vectors * 4u + {{ j }}u) % params.columns);
{% endfor %}
{% endif %}
    store_out(at, {{ "load_out(at) + " if adds }}total);
}
