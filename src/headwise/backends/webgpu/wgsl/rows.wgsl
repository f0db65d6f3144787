{#
  What the row kernels share: how the threads of a workgroup read, reduce and write rows. A file of macros:

      {% import "rows.wgsl" as rows with context %}
      {{ rows.read("x") }}  {{ rows.write("y") }}     bind tensors of rows
      {{ params(rows.fields("x, …") ~ ", …") }}
      {{ rows.places() }}                             Raw, values_of, columns_of, inside
      {{ rows.reader("x") }}  {{ rows.writer("y") }}  raw_x(row, chunk, lane) -> Raw, write_y(row, chunk, lane, values)
      {{ rows.reduction("row_sum", "f32", "add") }}   row_sum(value, thread): over the threads of a row

  Template variables (rows.py makes them): dtype; lanes, threads that share a row; threads, of a workgroup, which so has
  threads / lanes rows; held, vectors of four elements that a thread keeps in registers, in the packed form `Raw` they have
  in memory; walks, whether a row is longer than lanes · held vectors; subgroup, smallest size of a subgroup, 0 for none;
  aligned; seams.

  A row is cut into chunks of `lanes` vectors, one for each thread of it. Aligned rows (all begin at a multiple of four
  elements and are multiples of four long) are read and written a vector at a time. In others the threads take single
  elements (float32) or pairs (16 bits: words of the result) side by side, four elements in all, and look at each one's
  column. A word that two rows share (16 bits, odd rows) belongs to neither: its halves go to `seams` (rows), and
  rows_seams.wgsl puts them together.
#}
{% macro read(name) %}
{{ input(name, dtype, 4 if aligned else 1) }}
{%- endmacro %}

{% macro write(name) %}
{{ output(name, dtype, 4 if aligned else 1 if dtype == "f32" else 2) }}
{%- if seams %}
{{ output("seams", "f32", 1) }}
{%- endif %}
{%- endmacro %}

{% macro fields(names) -%}
rows: u32, width: u32, blocks: u32
{%- for name in names.split(",") %}, {{ name | trim }}_stride: u32{% endfor %}
{%- endmacro %}

{% macro places() %}
alias Raw = {{ "vec4<f32>" if dtype == "f32" else "vec2<u32>" }};

{% if dtype == "f32" %}
fn values_of(raw: Raw) -> vec4<f32> { return raw; }
{% else %}
fn values_of(raw: Raw) -> vec4<f32> { return vec4<f32>(unpack_{{ dtype }}(raw.x), unpack_{{ dtype }}(raw.y)); }
{% endif %}

{% if aligned %}
fn columns_of(row: u32, chunk: u32, lane: u32) -> vec4<i32> {
    return i32((chunk * {{ lanes }}u + lane) * 4u) + vec4<i32>(0, 1, 2, 3);
}
fn inside(row: u32, chunk: u32, lane: u32) -> bool { return (chunk * {{ lanes }}u + lane) * 4u < params.width; }
{% elif dtype == "f32" %}
fn columns_of(row: u32, chunk: u32, lane: u32) -> vec4<i32> {
    return i32(chunk * {{ 4 * lanes }}u + lane) + vec4<i32>(0, {{ lanes }}, {{ 2 * lanes }}, {{ 3 * lanes }});
}
{% else %}
fn columns_of(row: u32, chunk: u32, lane: u32) -> vec4<i32> {
    // Words of the result; where a row begins in the middle of one, the first half of it is column -1.
    let begins_inside = row & params.width & 1u;
    let first = i32((chunk * {{ 2 * lanes }}u + lane) * 2u) - i32(begins_inside);
    return first + vec4<i32>(0, 1, {{ 2 * lanes }}, {{ 2 * lanes + 1 }});
}
{% endif %}
{% if not aligned %}
fn inside(row: u32, chunk: u32, lane: u32) -> vec4<bool> {
    // A column of -1 is beyond every width as an unsigned number.
    return bitcast<vec4<u32>>(columns_of(row, chunk, lane)) < vec4<u32>(params.width);
}
{% endif %}

// Infinity and NaN, which no WGSL constant may be. A variable is no constant.
fn negative_infinity() -> f32 { var bits = 0xff800000u; return bitcast<f32>(bits); }
fn not_a_number() -> f32 { var bits = 0x7fc00000u; return bitcast<f32>(bits); }
{% endmacro %}

{% macro reader(name) %}
{% if aligned %}
fn raw_{{ name }}(row: u32, chunk: u32, lane: u32) -> Raw {
    let vector = min(chunk * {{ lanes }}u + lane, max(params.width / 4u, 1u) - 1u);
    return {{ name }}[params.{{ name }}_start + row * params.{{ name }}_stride + vector];
}
fn element_{{ name }}(row: u32, column: u32) -> f32 {
    let values = values_of({{ name }}[params.{{ name }}_start + row * params.{{ name }}_stride + column / 4u]);
    return values[column % 4u];
}
{% else %}
{% if dtype == "f32" %}
fn raw_{{ name }}(row: u32, chunk: u32, lane: u32) -> Raw {
    let column = min(vec4<u32>(columns_of(row, chunk, lane)), vec4<u32>(max(params.width, 1u) - 1u));
    let at = params.{{ name }}_start + row * params.{{ name }}_stride + column;
    return Raw({{ name }}[at.x], {{ name }}[at.y], {{ name }}[at.z], {{ name }}[at.w]);
}
{% else %}
// Elements e and e + 1 as a word; e may be -1, and then the first is anything.
fn pair_{{ name }}(e: i32) -> u32 {
    let word = {{ name }}[u32(max(e, 0)) >> 1u];
    if ((e & 1) == 0) { return word; }
    return (word >> 16u) | ({{ name }}[u32(e + 1) >> 1u] << 16u);
}
fn raw_{{ name }}(row: u32, chunk: u32, lane: u32) -> Raw {
    let first = min(columns_of(row, chunk, lane).xz, vec2<i32>(max(i32(params.width), 1) - 1));
    let at = i32(params.{{ name }}_start + row * params.{{ name }}_stride) + first;
    return Raw(pair_{{ name }}(at.x), pair_{{ name }}(at.y));
}
{% endif %}
fn element_{{ name }}(row: u32, column: u32) -> f32 { return load_{{ name }}(row * params.{{ name }}_stride + column); }
{% endif %}
{% endmacro %}

{% macro writer(name) %}
{% if aligned %}
fn write_{{ name }}(row: u32, chunk: u32, lane: u32, values: vec4<f32>) {
    if (inside(row, chunk, lane)) { store_{{ name }}(row * (params.width / 4u) + chunk * {{ lanes }}u + lane, values); }
}
{% elif dtype == "f32" %}
fn write_{{ name }}(row: u32, chunk: u32, lane: u32, values: vec4<f32>) {
    let column = vec4<u32>(columns_of(row, chunk, lane));
    for (var i = 0u; i < 4u; i++) {
        if (column[i] < params.width) { store_{{ name }}(row * params.width + column[i], values[i]); }
    }
}
{% else %}
fn write_pair_{{ name }}(row: u32, column: i32, values: vec2<f32>) {
    let width = i32(params.width);
    if (column >= width) { return; }
{% if seams %}
    if (column < 0 || column + 1 == width) {
        store_seams(row, select(values.x, values.y, column < 0));
        return;
    }
{% endif %}
    store_{{ name }}(u32(i32(row) * width + column) >> 1u, values);
}
fn write_{{ name }}(row: u32, chunk: u32, lane: u32, values: vec4<f32>) {
    let column = columns_of(row, chunk, lane);
    write_pair_{{ name }}(row, column.x, values.xy);
    write_pair_{{ name }}(row, column.z, values.zw);
}
{% endif %}
{% endmacro %}

{#
  A function that combines one value of each thread of a row, in a fixed order; every thread gets the result. To be called
  by all threads of the workgroup. `combine` names a function of two values.
#}
{% macro reduction(name, type, combine) %}
{% set shared = lanes // subgroup if subgroup else lanes %}
{% if shared > 1 %}
var<workgroup> {{ name }}_parts: array<{{ type }}, {{ threads // subgroup if subgroup else threads }}>;
{% endif %}
{% if shared > 16 and not subgroup %}
var<workgroup> {{ name }}_sums: array<{{ type }}, {{ threads // 16 }}>;
{% endif %}
fn {{ name }}(mine: {{ type }}, thread: u32) -> {{ type }} {
    var value = mine;
{% if subgroup %}
{% for reach in (1, 2, 4, 8, 16, 32, 64) if reach < subgroup and reach < lanes %}
    value = {{ combine }}(value, subgroupShuffleXor(value, {{ reach }}u));
{% endfor %}
{% if shared > 1 %}
    workgroupBarrier(); // the memory may still be read by an earlier call
    if (thread % {{ subgroup }}u == 0u) { {{ name }}_parts[thread / {{ subgroup }}u] = value; }
    workgroupBarrier();
    let first = thread / {{ lanes }}u * {{ shared }}u;
    value = {{ name }}_parts[first];
    for (var i = 1u; i < {{ shared }}u; i++) { value = {{ combine }}(value, {{ name }}_parts[first + i]); }
{% endif %}
{% elif shared > 16 %}
    // Two rounds: a sixteenth of the threads combine sixteen values each, then every thread combines theirs.
    workgroupBarrier(); // the memory may still be read by an earlier call
    {{ name }}_parts[thread] = mine;
    workgroupBarrier();
    let first = thread / {{ lanes }}u * {{ lanes }}u;
    let lane = thread % {{ lanes }}u;
    if (lane < {{ lanes // 16 }}u) {
        value = {{ name }}_parts[first + lane];
        for (var i = 1u; i < 16u; i++) { value = {{ combine }}(value, {{ name }}_parts[first + lane + i * {{ lanes // 16 }}u]); }
        {{ name }}_sums[first / 16u + lane] = value;
    }
    workgroupBarrier();
    value = {{ name }}_sums[first / 16u];
    for (var i = 1u; i < {{ lanes // 16 }}u; i++) { value = {{ combine }}(value, {{ name }}_sums[first / 16u + i]); }
{% elif shared > 1 %}
    workgroupBarrier(); // the memory may still be read by an earlier call
    {{ name }}_parts[thread] = mine;
    workgroupBarrier();
    let first = thread / {{ lanes }}u * {{ lanes }}u;
    value = {{ name }}_parts[first];
    for (var i = 1u; i < {{ lanes }}u; i++) { value = {{ combine }}(value, {{ name }}_parts[first + i]); }
{% endif %}
    return value;
}
{% endmacro %}

{% macro sums() %}
fn add(a: f32, b: f32) -> f32 { return a + b; }
fn sum_of(values: vec4<f32>) -> f32 { return (values.x + values.y) + (values.z + values.w); }
{{ reduction("row_sum", "f32", "add") }}
{% endmacro %}

{#
  Highest value and total of exp(value - highest), as values come: Milakov and Gimelshein, "Online normalizer calculation
  for softmax", 2018. Differences first, then the power of two: the largest terms, which matter most, are the most exact.
#}
{% macro softmax() %}
const LOWEST = -3.4028234e38; // a maximum to start from that is finite, so that no difference is NaN
const LOG2E = 1.44269504;

fn highest_of(values: vec4<f32>) -> f32 { return max(max(values.x, values.y), max(values.z, values.w)); }
fn sum_of(values: vec4<f32>) -> f32 { return (values.x + values.y) + (values.z + values.w); }
fn powers(values: vec4<f32>, highest: f32) -> vec4<f32> { return exp2((values - highest) * LOG2E); }

// (highest, total) of both.
fn join(a: vec2<f32>, b: vec2<f32>) -> vec2<f32> {
    let highest = max(a.x, b.x);
    return vec2<f32>(highest, a.y * exp2((a.x - highest) * LOG2E) + b.y * exp2((b.x - highest) * LOG2E));
}
{{ reduction("row_softmax", "vec2<f32>", "join") }}
{% endmacro %}

{# Adds the vectors z0 … to `state`, a thread's (highest, total). #}
{% macro fold_softmax() %}
    var higher = state.x;
{% for k in range(held) %}
    higher = max(higher, highest_of(z{{ k }}));
{% endfor %}
    var more = state.y * exp2((state.x - higher) * LOG2E);
{% for k in range(held) %}
    more += sum_of(powers(z{{ k }}, higher));
{% endfor %}
    state = vec2<f32>(higher, more);
{% endmacro %}

{# row, lane and `there` (is it a row of its own?) of a thread; ends workgroups beyond the last row. #}
{% macro row_of_thread() %}
    let first_row = (group.x + group.y * groups.x) * {{ threads // lanes }}u;
    if (first_row >= params.rows) { return; }
{% if lanes == threads %}
    let row = first_row;
    let lane = thread;
    let there = true;
{% else %}
    let row = min(first_row + thread / {{ lanes }}u, params.rows - 1u);
    let lane = thread % {{ lanes }}u;
    let there = first_row + thread / {{ lanes }}u < params.rows;
{% endif %}
{% endmacro %}

{# A row's statistics: `load` and `fold` (macros over a first chunk) part by part; the last part stays in registers. #}
{% macro forwards(load, fold) %}
{% if walks %}
    for (var block = 0u; block + 1u < params.blocks; block++) {
        let chunk = block * {{ held }}u;
{{ load("chunk") }}
{{ fold("chunk") }}
    }
    let last = (params.blocks - 1u) * {{ held }}u;
{% else %}
    let last = 0u;
{% endif %}
{{ load("last") }}
{{ fold("last") }}
{% endmacro %}

{# A row's results: `finish` the part that is in registers, then the others, from the end: they were read last. #}
{% macro backwards(load, finish) %}
{{ finish("last") }}
{% if walks %}
    for (var block = params.blocks - 1u; block > 0u; block--) {
        let chunk = (block - 1u) * {{ held }}u;
{{ load("chunk") }}
{{ finish("chunk") }}
    }
{% endif %}
{% endmacro %}

{% macro entry() -%}
@compute @workgroup_size({{ threads }})
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
{%- endmacro %}
