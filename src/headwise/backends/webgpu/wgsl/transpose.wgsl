// Transpose of matrices, bit by bit.
//
//   x  (batch, rows, columns), elements of 1, 2, 4 or 8 bytes
//   y  (batch, columns, rows)
//
// `blocks`: rows of both are whole vectors of 16 bytes, E elements. A thread reads a block of E by E elements as E vectors,
// transposes it in registers and writes E vectors. Neighbouring threads have neighbouring blocks in both dims, so that reads
// and writes are coalesced without workgroup memory.
//
// else: x has any strides, rows of y are whole words. A tile of 32 by 32 elements goes through workgroup memory.
//
// variables: bytes, of an element; blocks; across, threads of 32 that lie side by side in a row (blocks)
{% if blocks %}
{% set e = 16 // bytes %}
{{ input("x", "u32", 4) }}
{{ output("y", "u32", 4) }}
{{ params("rows: u32, columns: u32, row_tiles: u32, column_tiles: u32, tiles: u32, x_batch: u32, x_row: u32, y_batch: u32, y_row: u32") }}

{# Word w of the vector of column j of a block whose rows are a0, a1, …: their j-th elements. #}
{% macro turned(j, w) -%}
{% if bytes == 8 -%}
a{{ w // 2 }}[{{ 2 * j + w % 2 }}]
{%- elif bytes == 4 -%}
a{{ w }}[{{ j }}]
{%- elif bytes == 2 and j % 2 == 0 -%}
(a{{ 2 * w }}[{{ j // 2 }}] & 0xffffu) | (a{{ 2 * w + 1 }}[{{ j // 2 }}] << 16u)
{%- elif bytes == 2 -%}
(a{{ 2 * w }}[{{ j // 2 }}] >> 16u) | (a{{ 2 * w + 1 }}[{{ j // 2 }}] & 0xffff0000u)
{%- else -%}
{% for i in range(4) %}{{ " | " if i }}(extractBits(a{{ 4 * w + i }}[{{ j // 4 }}], {{ 8 * (j % 4) }}u, 8u) << {{ 8 * i }}u){% endfor %}
{%- endif %}
{%- endmacro %}

@compute @workgroup_size(256) {{ main() }}
    let tile = workgroup;
    if (tile >= params.tiles) { return; }
    let column_tile = tile % params.column_tiles;
    let row_tile = tile / params.column_tiles % params.row_tiles;
    let matrix = tile / params.column_tiles / params.row_tiles;
    // 16 by 16 blocks of a tile: eight fields of {{ across }} by {{ 32 // across }}.
    let field = thread / 32u;
    let column = column_tile * 16u + field % {{ 16 // across }}u * {{ across }}u + thread % {{ across }}u; // in blocks
    let row = row_tile * 16u + field / {{ 16 // across }}u * {{ 32 // across }}u + thread % 32u / {{ across }}u;
    if (column * {{ e }}u >= params.columns || row * {{ e }}u >= params.rows) { return; }
    let from_block = matrix * params.x_batch + row * {{ e }}u * params.x_row + column;
{% for i in range(e) %}
    let a{{ i }} = load_x(from_block + {{ i }}u * params.x_row);
{% endfor %}
    let to_block = matrix * params.y_batch + column * {{ e }}u * params.y_row + row;
{% for j in range(e) %}
    store_y(to_block + {{ j }}u * params.y_row, vec4<u32>({{ turned(j, 0) }}, {{ turned(j, 1) }}, {{ turned(j, 2) }}, {{ turned(j, 3) }}));
{% endfor %}
}
{% else %}
{% set per_word = 4 // bytes if bytes < 4 else 1 %}
{% set value = "vec2<u32>" if bytes == 8 else "u32" %}
{{ input("x", "u%d" % (8 * bytes), 1) }}
{{ output("y", "u%d" % (8 * bytes), per_word) }}
{{ params("rows: u32, columns: u32, row_tiles: u32, column_tiles: u32, tiles: u32, x_batch: u32, x_row: u32, x_column: u32, y_batch: u32, y_row: u32") }}

// A row of the tile is padded by one element, against bank conflicts when columns are read.
var<workgroup> elements: array<{{ value }}, {{ 32 * 33 }}>;

@compute @workgroup_size(256) {{ main() }}
    let tile = workgroup;
    if (tile >= params.tiles) { return; }
    let first_column = tile % params.column_tiles * 32u;
    let first_row = tile / params.column_tiles % params.row_tiles * 32u;
    let matrix = tile / params.column_tiles / params.row_tiles;
    for (var row = thread / 32u; row < 32u; row += 8u) {
        let column = thread % 32u;
        var element = {{ value }}(0u);
        if (first_row + row < params.rows && first_column + column < params.columns) {
            element = load_x(matrix * params.x_batch + (first_row + row) * params.x_row + (first_column + column) * params.x_column);
        }
        elements[row * 33u + column] = element;
    }
    workgroupBarrier();
    for (var i = thread; i < {{ 1024 // per_word }}u; i += 256u) {
        let row = i % {{ 32 // per_word }}u * {{ per_word }}u;
        let column = i / {{ 32 // per_word }}u;
        if (first_row + row < params.rows && first_column + column < params.columns) {
            var word = elements[row * 33u + column];
{% for part in range(1, per_word) %}
            word |= elements[(row + {{ part }}u) * 33u + column] << {{ 8 * bytes * part }}u;
{% endfor %}
            store_y(matrix * params.y_batch + (first_column + column) * params.y_row + (first_row + row) / {{ per_word }}u, word);
        }
    }
}
{% endif %}
