// Copies lengths and sinks, of any dtype and stride, and a seed into one buffer: a kernel may bind only eight.
//
//   aux  (B, 4) as i32: keys (-1 if a length is invalid), queries, first key, 0; see `Extent` in scores.wgsl
//        then (Hq) as f32: sinks; from seed_at on, two words each: the seed of dropout, and where the call lies
//
// variables: kv_lengths, q_lengths, kv_starts, sink (each "" or its dtype), seed (how many numbers: 0, 1, 3, 5, 6)
{% set lengths = kv_lengths or q_lengths or kv_starts %}
{% for name, dtype in (("kv_lengths", kv_lengths), ("q_lengths", q_lengths), ("kv_starts", kv_starts), ("sink", sink)) if dtype %}
{{ input(name, dtype, 1) }}
{% endfor %}
{% if seed %}
{{ input("seed", "u32", 1) }}
{% endif %}
{{ output("aux", "u32", 1) }}
{{ params("batch: u32, heads: u32, k_length: i32, q_length: i32, sinks: u32, kv_lengths_stride: u32, q_lengths_stride: u32, kv_starts_stride: u32, sink_stride: u32" ~ (", seed_at: u32" if seed else "")) }}

@compute @workgroup_size(64) {{ main() }}
    let i = workgroup * 64u + thread;
{% if lengths %}
    if (i < params.batch) {
        let keys = {{ "load_kv_lengths(i * params.kv_lengths_stride)" if kv_lengths else "params.k_length" }};
        let queries = {{ "load_q_lengths(i * params.q_lengths_stride)" if q_lengths else "params.q_length" }};
        let first_key = {{ "load_kv_starts(i * params.kv_starts_stride)" if kv_starts else "0" }};
        let bad = keys < 0 || keys > params.k_length || queries < 0 || queries > params.q_length || first_key < 0 || first_key > params.k_length;
        store_aux(4u * i, bitcast<u32>(select(keys, -1, bad)));
        store_aux(4u * i + 1u, u32(select(queries, params.q_length, bad)));
        store_aux(4u * i + 2u, u32(select(first_key, 0, bad)));
        store_aux(4u * i + 3u, 0u);
    }
{% endif %}
{% if sink %}
    if (i < params.heads) { store_aux(params.sinks + i, bitcast<u32>(load_sink(i * params.sink_stride))); }
{% endif %}
{% if seed %}
    if (i < {{ 2 * seed }}u) { store_aux(params.seed_at + i, load_seed(i)); }
{% endif %}
}
