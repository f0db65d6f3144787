// out = a b (+ bias, or + out): sums in float32.
//
//   a    (m, k)   the elements of a row side by side (`a_along` "k"), or those of a column ("m")
//   b    (k, n)   the same: "n", or "k" (the rows of a weight (n, k) that is multiplied from the right, transposed)
//   out  (m, n)   the elements of a row side by side
//   bias (n,)
//
// Of a batch, each has a matrix for every entry, at any distance.
//
// A workgroup of 128 threads has a tile of 64 × 128; a thread 8 × 8 of it in registers, in two halves of its columns. Per
// step, 16 columns of a and 16 rows of b come into workgroup memory as float32, by vectors of four along m and along n: an operand
// that lies along k is turned, four by four, in registers. Tiles of eight rows of tiles follow each other, so that they share
// what they read of b. The launcher splits a long k: a single chain of additions would lose digits.
//
// variables: a, b, bias (dtypes; bias "" for none), out (dtype), a_along, b_along, a_vectors, b_vectors, out_vectors (do lines begin and end
// at multiples of four elements?), adds (to what is in out), batched
{% set BM, BN, BK, THREADS = 64, 128, 16, 128 %}
{% set A_STEP, B_STEP = BM // 4 + 1, BN // 4 + 1 %}{# vectors of a row of a tile, and one to spread the banks #}
{{ input("a", a, 4 if a_vectors else 1) }}
{{ input("b", b, 4 if b_vectors else 1) }}
{% if bias %}
{{ input("bias", bias, 1) }}
{% endif %}
{{ output("out", out, 4 if out_vectors else 1) }}
{{ params("m: u32, n: u32, k: u32, a_stride: u32, b_stride: u32, out_stride: u32, m_tiles: u32, n_tiles: u32" ~ (", a_batch: u32, b_batch: u32, out_batch: u32, batches: u32" if batched else "")) }}
{% if batched %}

// Where the matrices of this workgroup begin.
var<private> a_first: u32;
var<private> b_first: u32;
var<private> out_first: u32;
{% endif %}

var<workgroup> a_tile: array<vec4<f32>, {{ BK * A_STEP }}>;
var<workgroup> b_tile: array<vec4<f32>, {{ BK * B_STEP }}>;

{% macro more(x) %}{{ " + %s_first" % x if batched }}{% endmacro %}
{# four_x(line, at): elements at … at + 3 of a line, zeros beyond its end and beyond the last line. #}
{% macro reader(x, vectors, lines, length) %}
fn four_{{ x }}(line: u32, at: u32) -> vec4<f32> {
    var values = vec4<f32>(0.0);
{% if vectors %}
    if (line < {{ lines }} && at < {{ length }}) { values = load_{{ x }}(line * params.{{ x }}_stride + at / 4u{{ more(x) }}); }
{% else %}
{% for i in range(4) %}
    if (line < {{ lines }} && at + {{ i }}u < {{ length }}) { values[{{ i }}] = load_{{ x }}(line * params.{{ x }}_stride + at + {{ i }}u{{ more(x) }}); }
{% endfor %}
{% endif %}
    return values;
}
{% endmacro %}
{{ reader("a", a_vectors, "params.m" if a_along == "k" else "params.k", "params.k" if a_along == "k" else "params.m") }}
{{ reader("b", b_vectors, "params.n" if b_along == "k" else "params.k", "params.k" if b_along == "k" else "params.n") }}

{# Brings BK × `columns` of an operand to its tile. #}
{% macro bring(x, along, columns, first, step) %}
{% if along == "k" %}
{% set items = BK // 4 * columns // 4 %}
{{ "        if (thread < %du) {" % items if items < THREADS else "        {" }}
            let across = thread / {{ BK // 4 }}u;
            let down = thread % {{ BK // 4 }}u * 4u;
{% for i in range(4) %}
            let line{{ i }} = four_{{ x }}({{ first }} + across * 4u + {{ i }}u, k0 + down);
{% endfor %}
{% for i in range(4) %}
            {{ x }}_tile[(down + {{ i }}u) * {{ step }}u + across] = vec4<f32>(line0[{{ i }}], line1[{{ i }}], line2[{{ i }}], line3[{{ i }}]);
{% endfor %}
        }
{% else %}
{% for i in range(BK * columns // 4 // THREADS) %}
        {
            let item = thread + {{ i * THREADS }}u;
            let down = item / {{ columns // 4 }}u;
            let across = item % {{ columns // 4 }}u;
            {{ x }}_tile[down * {{ step }}u + across] = four_{{ x }}(k0 + down, {{ first }} + across * 4u);
        }
{% endfor %}
{% endif %}
{% endmacro %}

@compute @workgroup_size({{ THREADS }}) {{ main() }}
{% if batched %}
    let tile = workgroup % (params.m_tiles * params.n_tiles);
    let entry = workgroup / (params.m_tiles * params.n_tiles);
    if (entry >= params.batches) { return; }
    a_first = entry * params.a_batch;
    b_first = entry * params.b_batch;
    out_first = entry * params.out_batch;
{% else %}
    let tile = workgroup;
    if (tile >= params.m_tiles * params.n_tiles) { return; }
{% endif %}
    let of_group = 8u * params.n_tiles;
    let first_tile = tile / of_group * 8u;
    let height = min(params.m_tiles - first_tile, 8u);
    let first_row = (first_tile + tile % of_group % height) * {{ BM }}u;
    let first_column = tile % of_group / height * {{ BN }}u;
    let across = thread % {{ BN // 8 }}u;
    let down = thread / {{ BN // 8 }}u;
{% for i in range(8) %}
    var left{{ i }} = vec4<f32>(0.0);
    var right{{ i }} = vec4<f32>(0.0);
{% endfor %}
    for (var k0 = 0u; k0 < params.k; k0 += {{ BK }}u) {
{{ bring("a", a_along, BM, "first_row", A_STEP) }}
{{ bring("b", b_along, BN, "first_column", B_STEP) }}
        workgroupBarrier();
        for (var i = 0u; i < {{ BK }}u; i++) {
            let upper = a_tile[i * {{ A_STEP }}u + down * 2u];
            let lower = a_tile[i * {{ A_STEP }}u + down * 2u + 1u];
            let of_left = b_tile[i * {{ B_STEP }}u + across];
            let of_right = b_tile[i * {{ B_STEP }}u + {{ BN // 8 }}u + across];
{% for i in range(8) %}
{% set factor = "vec4<f32>(%s.%s)" % ("upper" if i < 4 else "lower", "xyzw"[i % 4]) %}
            left{{ i }} = fma({{ factor }}, of_left, left{{ i }});
            right{{ i }} = fma({{ factor }}, of_right, right{{ i }});
{% endfor %}
        }
        workgroupBarrier();
    }
{% for side in ("left", "right") %}
    {
        let column = first_column + across * 4u{{ " + %du" % (BN // 2) if side == "right" }};
{% if bias %}
        var more = vec4<f32>(0.0);
{% for i in range(4) %}
        if (column + {{ i }}u < params.n) { more[{{ i }}] = load_bias(column + {{ i }}u); }
{% endfor %}
{% endif %}
{% for i in range(8) %}
        {
            let row = first_row + down * 8u + {{ i }}u;
            let value = {{ side }}{{ i }}{{ " + more" if bias }};
{% if out_vectors %}
            if (row < params.m && column < params.n) {
                let at = row * params.out_stride + column / 4u{{ more("out") }};
                store_out(at, {{ "load_out(at) + " if adds }}value);
            }
{% else %}
{% for j in range(4) %}
            if (row < params.m && column + {{ j }}u < params.n) {
                let at{{ j }} = row * params.out_stride + column + {{ j }}u{{ more("out") }};
                store_out(at{{ j }}, {{ "load_out(at%d) + " % j if adds }}value[{{ j }}]);
            }
{% endfor %}
{% endif %}
        }
{% endfor %}
    }
{% endfor %}
}
