// Rotary position embedding: pairs of elements of a row turned by the angles of its token.
//
//   y_a = x_a c - x_b s      y_b = x_b c + x_a s      c, s: row `position` of the tables; the inverse has -s
//
//   x0, x1     (B, H, S, D), any strides; their numbers of heads differ
//   cos, sin   (rows, R) float32
//   positions  of the tokens, any strides; without them, a token is at its own index. Outside [0, rows) the token is NaN.
//   y0, y1     (B, H, S, D), rows padded to whole vectors
//
// A thread has one item of a row, of up to `heads` heads of a token, which share their angles. aligned: an item is a vector of
// each half of the pairs (or two neighbours, interleaved), or, after all pairs, a vector that passes through. Else an item
// is a vector of y, the elements of which are gathered.
//
// Tables larger than a binding are cut into pieces of rows: each dispatch writes the tokens of its rows, the first also the NaN.
//
// variables: dtype, tensors (1 or 2), positions (their dtype, "" for none), interleaved, inverse, aligned, inside (the heads of
// a token lie side by side), heads
{% set width = 4 if aligned else 1 %}
{% for n in range(tensors) %}
{{ input("x%d" % n, dtype, width) }}
{{ output("y%d" % n, dtype, 4) }}
{% endfor %}
{{ input("cos", "f32", width) }}
{{ input("sin", "f32", width) }}
{% if positions %}
{{ input("positions", positions, 1) }}
{% endif %}
{# tokens: B · S; items: of a row; pairs: vectors (where not aligned, elements) of a row of cos; first: index of the first token;
   rows: of the tables, of which `here` from first_row on are bound #}
{% set fields %}
tokens: u32, length: u32, rows: u32, first_row: u32, here: u32, dim: u32, items: u32, pairs: u32, cos_stride: u32, sin_stride: u32, first: u32, p_b: u32, p_s: u32
{%- for n in range(tensors) %}, heads{{ n }}: u32
{%- for d in "bhsd" %}, x{{ n }}_{{ d }}: u32{% endfor %}{% for d in "bhs" %}, y{{ n }}_{{ d }}: u32{% endfor %}{% endfor %}
{% endset %}
{{ params(fields | replace("\n", "")) }}

fn not_a_number() -> f32 { var bits = 0x7fc00000u; return bitcast<f32>(bits); }

fn position_of(batch: u32, token: u32) -> u32 {
    let at = batch * params.p_b + token * params.p_s;
{% if positions %}
    return bitcast<u32>(load_positions(at)); // negative positions become larger than every table
{% else %}
    return params.first + at;
{% endif %}
}

{% set sign = "-" if inverse else "" %}
{% if aligned %}
// The two vectors of an item in a row; one that passes through is alone.
fn places(item: u32) -> vec2<u32> {
    if (item >= params.pairs) { return vec2<u32>(params.pairs + item); }
    return {{ "vec2<u32>(2u * item, 2u * item + 1u)" if interleaved else "vec2<u32>(item, params.pairs + item)" }};
}
{% endif %}
{% for n in range(tensors) %}
{% if aligned %}
// An item of one row: a and b as they were loaded from `places`.
fn rotate{{ n }}(item: u32, row: u32, to_y: u32, a: vec4<f32>, b: vec4<f32>, c: vec4<f32>, s: vec4<f32>) {
    let at = places(item);
    if (item >= params.pairs) {
        store_y{{ n }}(to_y + at.x, select(vec4<f32>(not_a_number()), a, row < params.here));
        return;
    }
{% if interleaved %}
    let even = vec4<f32>(a.xz, b.xz);
    let odd = vec4<f32>(a.yw, b.yw);
    let y_even = even * c - odd * s;
    let y_odd = odd * c + even * s;
    store_y{{ n }}(to_y + at.x, vec4<f32>(y_even.x, y_odd.x, y_even.y, y_odd.y));
    store_y{{ n }}(to_y + at.y, vec4<f32>(y_even.z, y_odd.z, y_even.w, y_odd.w));
{% else %}
    store_y{{ n }}(to_y + at.x, a * c - b * s);
    store_y{{ n }}(to_y + at.y, b * c + a * s);
{% endif %}
}
{% else %}
fn element{{ n }}(column: u32, row: u32, from_x: u32) -> f32 {
    if (row >= params.here) { return not_a_number(); }
    let x = load_x{{ n }}(from_x + column * params.x{{ n }}_d);
    if (column >= 2u * params.pairs) { return x; }
{% if interleaved %}
    let pair = column / 2u;
    let is_a = column % 2u == 0u;
    let partner = column ^ 1u;
{% else %}
    let is_a = column < params.pairs;
    let pair = select(column - params.pairs, column, is_a);
    let partner = select(pair, pair + params.pairs, is_a);
{% endif %}
    let c = load_cos(row * params.cos_stride + pair);
    let s = {{ sign }}load_sin(row * params.sin_stride + pair);
    let other = load_x{{ n }}(from_x + partner * params.x{{ n }}_d);
    return x * c + select(other, -other, is_a) * s;
}
{% endif %}

fn tile{{ n }}(i: u32) {
    let item = i % params.items;
    let rest = i / params.items;
{% if inside %}
    let groups = (params.heads{{ n }} + {{ heads - 1 }}u) / {{ heads }}u;
    let group = rest % groups;
    let index = rest / groups;
{% else %}
    let group = rest / params.tokens;
    let index = rest % params.tokens;
{% endif %}
    let batch = index / params.length;
    let token = index % params.length;
    let position = position_of(batch, token);
    let known = position < params.rows;
    // Of the bound rows; beyond them if the tables have no such row.
    let row = select(params.here, position - params.first_row, known);
    if (select(params.first_row > 0u, row >= params.here, known)) { return; } // it is another piece's
{% if aligned %}
    var c = vec4<f32>(not_a_number());
    var s = c;
    if (row < params.here && item < params.pairs) {
        c = load_cos(row * params.cos_stride + item);
        s = {{ sign }}load_sin(row * params.sin_stride + item);
    }
{% endif %}
{% if aligned %}
    // All loads first: more of them are under way at once. Beyond the last head it is loaded again, and not written.
    let at = places(item);
    let of_token = batch * params.x{{ n }}_b + token * params.x{{ n }}_s;
{% for k in range(heads) %}
    let from{{ k }} = of_token + min(group * {{ heads }}u + {{ k }}u, params.heads{{ n }} - 1u) * params.x{{ n }}_h;
    let a{{ k }} = load_x{{ n }}(from{{ k }} + at.x);
    let b{{ k }} = load_x{{ n }}(from{{ k }} + at.y);
{% endfor %}
    let to_token = batch * params.y{{ n }}_b + token * params.y{{ n }}_s;
{% for k in range(heads) %}
    if (group * {{ heads }}u + {{ k }}u < params.heads{{ n }}) {
        rotate{{ n }}(item, row, to_token + (group * {{ heads }}u + {{ k }}u) * params.y{{ n }}_h, a{{ k }}, b{{ k }}, c, s);
    }
{% endfor %}
{% else %}
    let last = min(params.heads{{ n }}, (group + 1u) * {{ heads }}u);
    for (var head = group * {{ heads }}u; head < last; head++) {
        let from_x = batch * params.x{{ n }}_b + head * params.x{{ n }}_h + token * params.x{{ n }}_s;
        let to_y = batch * params.y{{ n }}_b + head * params.y{{ n }}_h + token * params.y{{ n }}_s;
        var y = vec4<f32>();
        for (var j = 0u; j < 4u; j++) {
            let column = 4u * item + j;
            if (column < params.dim) { y[j] = element{{ n }}(column, row, from_x); }
        }
        store_y{{ n }}(to_y + item, y);
    }
{% endif %}
}
{% endfor %}

@compute @workgroup_size(256) {{ main() }}
    let i = workgroup * 256u + thread;
{% for n in range(tensors) %}
    let count{{ n }} = params.tokens * ((params.heads{{ n }} + {{ heads - 1 }}u) / {{ heads }}u) * params.items;
{% endfor %}
    if (i < count0) { tile0(i); }
{% if tensors == 2 %}
    else if (i - count0 < count1) { tile1(i - count0); }
{% endif %}
}
