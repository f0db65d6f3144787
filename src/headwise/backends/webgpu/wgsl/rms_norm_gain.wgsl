{#
  The factor of each column in RMS normalisation, weight + offset, or 1 without a weight, and the writing of a share of the
  weight's gradient. A file of macros, beside rows.wgsl: the kernel has parameters `offset`, and `goes_on` for shares.

  variables: weight ("" or its dtype), aligned
#}
{% macro read() %}
{% if weight %}
{{ input("weight", weight, 4 if aligned else 1) }}
{% endif %}
{% endmacro %}

{% macro functions() %}
{% if not weight %}
fn gain_of(row: u32, chunk: u32, lane: u32) -> vec4<f32> { return vec4<f32>(1.0); }
{% elif aligned %}
fn gain_of(row: u32, chunk: u32, lane: u32) -> vec4<f32> {
    return load_weight(min(chunk * {{ lanes }}u + lane, max(params.width / 4u, 1u) - 1u)) + params.offset;
}
{% else %}
fn gain_of(row: u32, chunk: u32, lane: u32) -> vec4<f32> {
    let column = vec4<u32>(clamp(columns_of(row, chunk, lane), vec4<i32>(0), vec4<i32>(i32(params.width) - 1)));
    return vec4<f32>(load_weight(column.x), load_weight(column.y), load_weight(column.z), load_weight(column.w)) + params.offset;
}
{% endif %}
{% endmacro %}

{#
  parts (shares, width padded to fours). Where the rows come in several pieces, all but the first add to what is there.
  A share begins within a word as its rows do.
#}
{% macro write_part() %}
fn write_part(share: u32, chunk: u32, lane: u32, values: vec4<f32>) {
{% if aligned %}
    if (!inside(share, chunk, lane)) { return; }
    let at = share * (params.width / 4u) + chunk * {{ lanes }}u + lane;
    store_parts(at, select(values, values + load_parts(at), params.goes_on == 1u));
{% else %}
    let column = columns_of(share, chunk, lane);
    for (var i = 0u; i < 4u; i++) {
        if (column[i] >= 0 && column[i] < i32(params.width)) {
            let at = share * ((params.width + 3u) / 4u * 4u) + u32(column[i]);
            store_parts(at, select(values[i], values[i] + load_parts(at), params.goes_on == 1u));
        }
    }
{% endif %}
}
{% endmacro %}
