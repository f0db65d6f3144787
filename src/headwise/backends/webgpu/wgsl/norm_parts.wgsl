{#
  What the norms share: the gain (weight + offset, or 1 without a weight) and the bias of each column; and of the two backward
  kernels what they read, and how they write dx and the partial sums of dweight and dbias. A file of macros, used beside
  rows.wgsl; the kernel has a parameter `offset`.

  variables: weight, bias ("" or their dtypes), and those of rows.wgsl; of the backward kernels also centre and added
#}
{% import "rows.wgsl" as rows with context %}
{% macro read_column(name, dtype) %}
{% if dtype %}
{{ input(name, dtype, 4 if aligned else 1) }}
{% endif %}
{% endmacro %}

{# <name>_at(row, chunk, lane): what a tensor (width) has for the columns of a vector. #}
{% macro column_reader(name) %}
{% if aligned %}
fn {{ name }}_at(row: u32, chunk: u32, lane: u32) -> vec4<f32> {
    return load_{{ name }}(min(chunk * {{ lanes }}u + lane, max(params.width / 4u, 1u) - 1u));
}
{% else %}
fn {{ name }}_at(row: u32, chunk: u32, lane: u32) -> vec4<f32> {
    let column = vec4<u32>(clamp(columns_of(row, chunk, lane), vec4<i32>(0), vec4<i32>(i32(params.width) - 1)));
    return vec4<f32>(load_{{ name }}(column.x), load_{{ name }}(column.y), load_{{ name }}(column.z), load_{{ name }}(column.w));
}
{% endif %}
{% endmacro %}

{% macro gains() %}
{% if weight %}
{{ column_reader("weight") }}
fn gain_of(row: u32, chunk: u32, lane: u32) -> vec4<f32> { return weight_at(row, chunk, lane) + params.offset; }
{% else %}
fn gain_of(row: u32, chunk: u32, lane: u32) -> vec4<f32> { return vec4<f32>(1.0); }
{% endif %}
{% endmacro %}

{# gain_of and, with a bias, bias_of. #}
{% macro columns() %}
{{ gains() }}
{% if bias %}
{{ column_reader("bias") }}
fn bias_of(row: u32, chunk: u32, lane: u32) -> vec4<f32> { return bias_at(row, chunk, lane); }
{% endif %}
{% endmacro %}

{# Parameters and functions of both backward kernels, after all inputs and outputs. names: the tensors of rows. #}
{% macro backward_functions(names) %}
{{ params(rows.fields(names | join(", ")) ~ ", offset: f32, partial_count: u32, goes_on: u32") }}
{{ rows.places() }}
{{ gains() }}
{% for name in names %}
{{ rows.reader(name) }}
{% endfor %}
{% endmacro %}

{#
  Binds dx and, if they are wanted, partials (sums, partial_count, width padded to fours) of dweight, then of dbias, and defines
  write_dx and write_partial. Where the rows come in several pieces, all but the first add to the partial sums (`goes_on`). A
  partial sum begins within a word as its rows do.
#}
{% macro backward_outputs() %}
{{ rows.write("dx") }}
{{ rows.writer("dx") }}
{% if weight or bias %}
{{ output("partials", "f32", 4 if aligned else 1) }}
fn write_partial(which: u32, partial: u32, chunk: u32, lane: u32, values: vec4<f32>) {
{% if aligned %}
    if (!inside(partial, chunk, lane)) { return; }
    let at = (which * params.partial_count + partial) * (params.width / 4u) + chunk * {{ lanes }}u + lane;
    store_partials(at, select(values, values + load_partials(at), params.goes_on == 1u));
{% else %}
    let column = columns_of(partial, chunk, lane);
    for (var i = 0u; i < 4u; i++) {
        if (column[i] >= 0 && column[i] < i32(params.width)) {
            let at = (which * params.partial_count + partial) * ((params.width + 3u) / 4u * 4u) + u32(column[i]);
            store_partials(at, select(values[i], values[i] + load_partials(at), params.goes_on == 1u));
        }
    }
{% endif %}
}
{% endif %}
{% endmacro %}
