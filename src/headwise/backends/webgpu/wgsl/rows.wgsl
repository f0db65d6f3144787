{#
  What the row kernels share: how the threads of a workgroup read, reduce and write rows. A file of macros:

      {% import "rows.wgsl" as rows with context %}
      {{ rows.read("x") }}  {{ rows.write("y") }}     bind tensors of rows
      {{ params(rows.fields("x, …") ~ ", …") }}
      {{ rows.places() }}                             Raw, values_of, inside; columns_of where not aligned
      {{ rows.reader("x") }}  {{ rows.writer("y") }}  raw_x(row, chunk, lane) -> Raw, write_y(row, chunk, lane, values)
      {{ rows.reduction("row_sum", "f32", "add") }}   row_sum(value, thread): over the threads of a row

  Template variables (from rows.py): dtype; lanes, threads that share a row; threads of a workgroup, which has
  threads / lanes rows; held, vectors of four elements that a thread keeps in registers, packed as in memory (`Raw`); walks,
  whether a row is longer than lanes · held vectors; subgroup, smallest size of a subgroup, 0 for none; aligned; seams;
  whole, whether aligned rows fill their threads, so that every vector is inside.

  A row is cut into chunks of `lanes` vectors, one for each of its threads. Aligned rows (all start at a multiple of four
  elements and are multiples of four long) are read and written one vector at a time. In other rows neighbouring threads
  take neighbouring elements (float32) or pairs (16 bits: words of the result), four elements in all, and check the column
  of each. A word that two rows share (16 bits, odd width) is not written here: its halves go to `seams` (rows), and
  rows_seams.wgsl joins them. A second result has seams of another name.
#}
{% macro read(name) %}
{{ input(name, dtype, 4 if aligned else 1) }}
{%- endmacro %}

{% macro write(name, seam="seams") %}
{{ output(name, dtype, 4 if aligned else 1 if dtype == "f32" else 2) }}
{%- if seams %}
{{ output(seam, "f32", 1) }}
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
{% if whole %}
fn inside(row: u32, chunk: u32, lane: u32) -> bool { return true; }
{% else %}
fn inside(row: u32, chunk: u32, lane: u32) -> bool { return (chunk * {{ lanes }}u + lane) * 4u < params.width; }
{% endif %}
{% elif dtype == "f32" %}
fn columns_of(row: u32, chunk: u32, lane: u32) -> vec4<i32> {
    return i32(chunk * {{ 4 * lanes }}u + lane) + vec4<i32>(0, {{ lanes }}, {{ 2 * lanes }}, {{ 3 * lanes }});
}
{% else %}
fn columns_of(row: u32, chunk: u32, lane: u32) -> vec4<i32> {
    // Words of the result. If a row starts in the middle of a word, the first half of the word is column -1.
    let begins_inside = row & params.width & 1u;
    let first = i32((chunk * {{ 2 * lanes }}u + lane) * 2u) - i32(begins_inside);
    return first + vec4<i32>(0, 1, {{ 2 * lanes }}, {{ 2 * lanes + 1 }});
}
{% endif %}
{% if not aligned %}
fn inside(row: u32, chunk: u32, lane: u32) -> vec4<bool> {
    // As an unsigned number, column -1 is beyond every width.
    return bitcast<vec4<u32>>(columns_of(row, chunk, lane)) < vec4<u32>(params.width);
}
{% endif %}

{% if dtype == "bf16" and aligned %}
// Rounds two numbers that are not NaN to nearest even: half the instructions of pack_bf16.
fn finite_bits(x: f32) -> u32 { let bits = bitcast<u32>(x); return bits + 0x7fffu + extractBits(bits, 16u, 1u); }
fn pack_finite(value: vec2<f32>) -> u32 { return (finite_bits(value.x) >> 16u) | (finite_bits(value.y) & 0xffff0000u); }
{% endif %}
fn is_finite(x: f32) -> bool { return (bitcast<u32>(x) & 0x7f800000u) != 0x7f800000u; }

// WGSL constants may not be infinite or NaN; variables may.
fn negative_infinity() -> f32 { var bits = 0xff800000u; return bitcast<f32>(bits); }
fn not_a_number() -> f32 { var bits = 0x7fc00000u; return bitcast<f32>(bits); }
{% endmacro %}

{% macro reader(name) %}
{% if aligned %}
fn raw_{{ name }}(row: u32, chunk: u32, lane: u32) -> Raw {
{% if whole %}
    let vector = chunk * {{ lanes }}u + lane;
{% else %}
    let vector = min(chunk * {{ lanes }}u + lane, max(params.width / 4u, 1u) - 1u);
{% endif %}
    return {{ name }}[params.{{ name }}_start + row * params.{{ name }}_stride + vector];
}
{% elif dtype == "f32" %}
fn raw_{{ name }}(row: u32, chunk: u32, lane: u32) -> Raw {
    let column = min(vec4<u32>(columns_of(row, chunk, lane)), vec4<u32>(max(params.width, 1u) - 1u));
    let at = params.{{ name }}_start + row * params.{{ name }}_stride + column;
    return Raw({{ name }}[at.x], {{ name }}[at.y], {{ name }}[at.z], {{ name }}[at.w]);
}
{% else %}
// Elements e and e + 1 as a word; if e is -1, the first half is undefined.
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
{% endmacro %}

{% macro writer(name, seam="seams") %}
{% if aligned %}
fn write_{{ name }}(row: u32, chunk: u32, lane: u32, values: vec4<f32>) {
    if (inside(row, chunk, lane)) { store_{{ name }}(row * (params.width / 4u) + chunk * {{ lanes }}u + lane, values); }
}
{% if dtype == "bf16" %}
fn write_finite_{{ name }}(row: u32, chunk: u32, lane: u32, values: vec4<f32>) {
    if (inside(row, chunk, lane)) {
        let at = params.{{ name }}_start + row * (params.width / 4u) + chunk * {{ lanes }}u + lane;
        {{ name }}[at] = vec2<u32>(pack_finite(values.xy), pack_finite(values.zw));
    }
}
{% endif %}
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
        store_{{ seam }}(row, select(values.x, values.y, column < 0));
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

{# packed(values): what a tensor of rows holds of them. And write_raw_<name>, which writes that; after its writer. #}
{% macro raw_writer(name) %}
{% if dtype == "f32" %}
fn packed(values: vec4<f32>) -> Raw { return values; }
{% else %}
fn packed(values: vec4<f32>) -> Raw { return Raw(pack_{{ dtype }}(values.xy), pack_{{ dtype }}(values.zw)); }
{% endif %}
fn write_raw_{{ name }}(row: u32, chunk: u32, lane: u32, raw: Raw) {
{% if aligned %}
    if (inside(row, chunk, lane)) {
        {{ name }}[params.{{ name }}_start + row * (params.width / 4u) + chunk * {{ lanes }}u + lane] = raw;
    }
{% else %}
    write_{{ name }}(row, chunk, lane, values_of(raw));
{% endif %}
}
{% endmacro %}

{# `value`, combined over `across` neighbouring threads of a subgroup; all of them get the result. #}
{% macro exchange(across, combine) %}
{% for reach in (1, 2, 4, 8, 16, 32, 64) if reach < across %}
    value = {{ combine }}(value, subgroupShuffleXor(value, {{ reach }}u));
{% endfor %}
{% endmacro %}

{#
  Defines a function that combines one value of each thread of a row, in a fixed order; every thread gets the result. All
  threads of the workgroup must call it. `combine`: the name of a function of two values.
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
{{ exchange([lanes, subgroup] | min, combine) }}
{% if shared > 1 %}
    workgroupBarrier(); // the memory may still be read by an earlier call
    if (thread % {{ subgroup }}u == 0u) { {{ name }}_parts[thread / {{ subgroup }}u] = value; }
    workgroupBarrier();
{% set across = [shared, subgroup] | min %}
    // Neighbouring threads take different parts of their row and combine them: all get the result.
    let first = thread / {{ lanes }}u * {{ shared }}u + thread % {{ across }}u;
    value = {{ name }}_parts[first];
{% for i in range(1, shared // across) %}
    value = {{ combine }}(value, {{ name }}_parts[first + {{ i * across }}u]);
{% endfor %}
{{ exchange(across, combine) }}
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

{# The same of two numbers at once: row_sums(values, thread). #}
{% macro pair_sums() %}
fn add_pair(a: vec2<f32>, b: vec2<f32>) -> vec2<f32> { return a + b; }
{{ reduction("row_sums", "vec2<f32>", "add_pair") }}
{% endmacro %}

{# As `exchange`, of (highest, total). #}
{% macro exchange_softmax(across) %}
    {
        var highest = value.x;
{% for reach in (1, 2, 4, 8, 16, 32, 64) if reach < across %}
        highest = max(highest, subgroupShuffleXor(highest, {{ reach }}u));
{% endfor %}
        var total = value.y * exp2((value.x - highest) * LOG2E);
{% for reach in (1, 2, 4, 8, 16, 32, 64) if reach < across %}
        total += subgroupShuffleXor(total, {{ reach }}u);
{% endfor %}
        value = vec2<f32>(highest, total);
    }
{% endmacro %}

{#
  (highest, total) of a whole row: neighbours first find the highest value, and rescale their totals once. Joining pairs
  would take two powers at every step.
#}
{% macro softmax_through_subgroups() %}
{% set shared = lanes // subgroup %}
{% if shared > 1 %}
var<workgroup> row_softmax_parts: array<vec2<f32>, {{ threads // subgroup }}>;
{% endif %}
fn row_softmax(mine: vec2<f32>, thread: u32) -> vec2<f32> {
    var value = mine;
{{ exchange_softmax([lanes, subgroup] | min) }}
{% if shared > 1 %}
{% set across = [shared, subgroup] | min %}
    workgroupBarrier(); // the memory may still be read by an earlier call
    if (thread % {{ subgroup }}u == 0u) { row_softmax_parts[thread / {{ subgroup }}u] = value; }
    workgroupBarrier();
    let first = thread / {{ lanes }}u * {{ shared }}u + thread % {{ across }}u;
    value = row_softmax_parts[first];
{% for i in range(1, shared // across) %}
    value = join(value, row_softmax_parts[first + {{ i * across }}u]);
{% endfor %}
{{ exchange_softmax(across) }}
{% endif %}
    return value;
}
{% endmacro %}

{#
  The highest value and the total of exp(value - highest), online: Milakov and Gimelshein, "Online normalizer calculation
  for softmax", 2018. The difference is taken first, then the power of two: the largest terms are the most exact.

  16-bit kernels are limited by instructions, so there a power takes one fused multiply-add. The product of the highest value
  is rounded before it is subtracted, so the power of the highest value is not quite 1; `unit` divides that out. Above a
  million, neighbouring values are thousands apart: all powers but the highest vanish, and a factor of 1 avoids the rounding.
  `exact`: values are not 16-bit numbers themselves, and need the difference first.
#}
{% macro softmax(exact) %}
const LOWEST = -3.4028234e38; // the first maximum: finite, so that no difference is NaN
const LOG2E = 1.44269504;

fn highest_of(values: vec4<f32>) -> f32 { return max(max(values.x, values.y), max(values.z, values.w)); }
fn sum_of(values: vec4<f32>) -> f32 { return (values.x + values.y) + (values.z + values.w); }
{% if dtype != "f32" and not exact %}
fn factor_of(highest: f32) -> f32 { return select(1.0, LOG2E, abs(highest) < 1e6); }
// exp(values - highest) / unit(highest)
fn powers(values: vec4<f32>, highest: f32) -> vec4<f32> {
    let factor = factor_of(highest);
    return exp2(fma(values, vec4<f32>(factor), vec4<f32>(-(highest * factor))));
}
fn unit(highest: f32) -> f32 {
    let factor = factor_of(highest);
    return exp2(-fma(highest, factor, -(highest * factor)));
}
{% else %}
fn powers(values: vec4<f32>, highest: f32) -> vec4<f32> { return exp2((values - highest) * LOG2E); }
fn unit(highest: f32) -> f32 { return 1.0; }
{% endif %}

// (highest, total) of both.
fn join(a: vec2<f32>, b: vec2<f32>) -> vec2<f32> {
    let highest = max(a.x, b.x);
    return vec2<f32>(highest, a.y * exp2((a.x - highest) * LOG2E) + b.y * exp2((b.x - highest) * LOG2E));
}
{% if subgroup %}
{{ softmax_through_subgroups() }}
{% else %}
{{ reduction("row_softmax", "vec2<f32>", "join") }}
{% endif %}
{% endmacro %}

{#
  Load vectors of the tensors `names` into registers x0, x1, … (with sets: x_even0, …). `refill` loads what is `ahead` (a row
  and a chunk) into a register once its value was used, to overlap the load with the work on others; nothing if that is empty,
  and `next_row` only if `goes_on`.
#}
{% macro load(names, where, set="") %}
{% for k in range(held) %}
{% for name in names %}
    var {{ name }}{{ set }}{{ k }} = raw_{{ name }}({{ where }} + {{ k }}u, lane);
{% endfor %}
{% endfor %}
{% endmacro %}

{% macro refill(names, k, ahead, set="") %}
{% if ahead %}
{% for name in names %}
    {{ "if (goes_on) { " if ahead.startswith("next_row") }}{{ name }}{{ set }}{{ k }} = raw_{{ name }}({{ ahead }} + {{ k }}u, lane);{{ " }" if ahead.startswith("next_row") }}
{% endfor %}
{% endif %}
{% endmacro %}

{# Adds the vectors z0 …, of a tensor `name`, to `state`, a thread's (highest, total). #}
{% macro fold_softmax(name, ahead) %}
    var higher = state.x;
{% for k in range(held) %}
    higher = max(higher, highest_of(z{{ k }}));
{% endfor %}
    var more = 0.0;
{% for k in range(held) %}
    more += sum_of(powers(z{{ k }}, higher));
{{ refill([name], k, ahead) }}
{% endfor %}
    state = vec2<f32>(higher, state.y * exp2((state.x - higher) * LOG2E) + more * unit(higher));
{% endmacro %}

{# row, lane and `there` (does the row exist?) of a thread; workgroups beyond the last row return. #}
{% macro row_of_thread() %}
    let first_row = workgroup * {{ threads // lanes }}u;
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

{# Calls the macro `fold(chunk, ahead)` for each part of a row; the last part stays in registers. #}
{% macro forwards(fold, ahead="") %}
{% if walks %}
    for (var block = 1u; block < params.blocks; block++) {
        let chunk = (block - 1u) * {{ held }}u;
        let next = block * {{ held }}u;
{{ fold("chunk", "row, next") }}
    }
    let last = (params.blocks - 1u) * {{ held }}u;
{% else %}
    let last = 0u;
{% endif %}
{{ fold("last", ahead) }}
{% endmacro %}

{% macro backwards_writing(finish, ahead, write) %}
{% if walks %}
    for (var block = params.blocks - 1u; block > 0u; block--) {
        let chunk = block * {{ held }}u;
        let next = (block - 1u) * {{ held }}u;
{{ finish("chunk", "row, next", write) }}
    }
{% endif %}
{{ finish("0u", ahead, write) }}
{% endmacro %}

{#
  Calls the macro `finish(chunk, ahead, write)` for the part in registers, then for the others from the end, as the last were
  read most recently. `sound`: a condition under which no result is NaN; then bfloat16 is rounded faster.
#}
{% macro backwards(finish, sound, ahead="") %}
{% if sound and dtype == "bf16" and aligned %}
    if ({{ sound }}) {
{{ backwards_writing(finish, ahead, "write_finite") }}
    } else {
{{ backwards_writing(finish, ahead, "write") }}
    }
{% else %}
{{ backwards_writing(finish, ahead, "write") }}
{% endif %}
{% endmacro %}
