// Rows of a table by id, bit by bit.
//
//   ids     (places)
//   weight  (classes, columns), rows at any distance
//   y       (places, columns), contiguous; an id outside [0, classes) gives a row of NaN
//
// A thread owns one item of y: a vector of four words, a word, or, if rows are not whole words, a word of two 16-bit
// elements, maybe of two rows. A table larger than a binding is cut into pieces of rows: each writes its own rows, the first
// one also the NaN.
//
// variables: ids (their dtype), width (words of an item; 0 for two halves of a word)
{{ input("ids", ids, 1) }}
{% if width %}
{{ input("weight", "u32", width) }}
{{ output("y", "u32", width) }}
{% else %}
{{ input("weight", "u16", 1) }}
{{ output("y", "u16", 2) }}
{% endif %}
{{ params("items: u32, elements: u32, columns: u32, weight_stride: u32, classes: u32, first: u32, here: u32, nan: u32") }}

{% set value = "vec4<u32>" if width == 4 else "u32" %}
struct Element { bits: {{ value }}, written: bool }

// Element i of y, and whether this piece of the table writes it.
fn element_of(i: u32) -> Element {
    let id = bitcast<u32>(load_ids(i / params.columns)); // negative ids become larger than every table
    let row = id - params.first;
    if (row < params.here && id < params.classes) { return Element(load_weight(row * params.weight_stride + i % params.columns), true); }
    return Element({{ value }}(params.nan), params.first == 0u && id >= params.classes);
}

@compute @workgroup_size(256) {{ main() }}
    let item = workgroup * 256u + thread;
    if (item >= params.items) { return; }
{% if width %}
    let element = element_of(item);
    if (element.written) { store_y(item, element.bits); }
{% else %}
    var word = load_y(item);
    let low = element_of(2u * item);
    if (low.written) { word = (word & 0xffff0000u) | (low.bits & 0xffffu); }
    if (2u * item + 1u < params.elements) {
        let high = element_of(2u * item + 1u);
        if (high.written) { word = (word & 0xffffu) | (high.bits << 16u); }
    }
    store_y(item, word);
{% endif %}
}
