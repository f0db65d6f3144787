// out = a b (+ bias, or + out): sums in float32.
//
//   a    (m, k)   the elements of a row side by side (`a_along` "k"), or those of a column ("m")
//   b    (k, n)   the same: "n", or "k" (the rows of a weight (n, k) that is multiplied from the right, transposed)
//   out  (m, n)   the elements of a row side by side
//   bias (n,)
//
// Of a batch, each has a matrix for every entry, at any distance. With `split_k`, out has a matrix for every split of k as well,
// and `matmul_sum.wgsl` adds them up.
//
// A workgroup has a tile of out, a thread of_m × of_n of it in registers: groups of four rows and of four columns, as far apart as
// there are threads. Per step, `deep` columns of a and rows of b come into workgroup memory as float32, by vectors of four along m and
// along n: an operand that lies along k is turned. Steps are unrolled, so that the address of what a thread reads is one
// number and a constant. Threads of a subgroup of 32 are 4 × 8, in an order in which neighbours read the same vector. Tiles of
// eight rows of tiles follow each other, so that they share what they read of b.
//
// variables: a, b, bias (dtypes; bias "" for none), out (dtype), a_along, b_along, a_vectors, b_vectors, out_vectors (do lines begin and end
// at multiples of four elements?), adds (to what is in out), batched, split_k (is k cut?), tile (m, n, deep, of_m, of_n), stages (steps
// in workgroup memory: 1 or 2), chain (products in one chain of additions; 0: all. The sums of a chain go to out, where those of the
// next are added: in registers a second set of sums costs a quarter of the speed)
{% set BM, BN, BK, TM, TN = tile %}
{% set DOWN, ACROSS = BM // TM, BN // TN %}{# threads along m and along n #}
{% set THREADS = DOWN * ACROSS %}
{% set A_STEP, B_STEP = BM // 4 + 1, BN // 4 + 1 %}{# vectors of a row of a tile, and one to spread the banks #}
{{ input("a", a, 4 if a_vectors else 1) }}
{{ input("b", b, 4 if b_vectors else 1) }}
{% if bias %}
{{ input("bias", bias, 1) }}
{% endif %}
{{ output("out", out, 4 if out_vectors else 1) }}
{{ params("m: u32, n: u32, k: u32, a_stride: u32, b_stride: u32, out_stride: u32, m_tiles: u32, n_tiles: u32" ~ (", a_batch: u32, b_batch: u32, out_batch: u32, batches: u32" if batched or split_k else "") ~ (", split: u32, splits: u32" if split_k else "")) }}
{% if batched or split_k %}

// Where the matrices of this workgroup begin.
var<private> a_first: u32;
var<private> b_first: u32;
var<private> out_first: u32;
{% endif %}

{% for stage in range(stages) %}
var<workgroup> a_tile{{ stage }}: array<array<vec4<f32>, {{ A_STEP }}>, {{ BK }}>;
var<workgroup> b_tile{{ stage }}: array<array<vec4<f32>, {{ B_STEP }}>, {{ BK }}>;
{% endfor %}

{% macro more(x) %}{{ " + %s_first" % x if batched or split_k }}{% endmacro %}
{# raw_x(line, at): elements at … at + 3 of a line as they lie in memory, zeros beyond its end and beyond the last line; four_x(raw): their
   values. They are unpacked when they are needed, not where a thread would wait for them. #}
{% set PACKED = {"a": a_vectors and a != "f32", "b": b_vectors and b != "f32"} %}
{% macro reader(x, vectors, lines, length) %}
{% if PACKED[x] %}
alias Raw_{{ x }} = vec2<u32>;
fn four_{{ x }}(raw: Raw_{{ x }}) -> vec4<f32> { return vec4<f32>(unpack_{{ a if x == "a" else b }}(raw.x), unpack_{{ a if x == "a" else b }}(raw.y)); }
{% else %}
alias Raw_{{ x }} = vec4<f32>;
fn four_{{ x }}(raw: Raw_{{ x }}) -> vec4<f32> { return raw; }
{% endif %}
fn raw_{{ x }}(line: u32, at: u32) -> Raw_{{ x }} {
    var values = Raw_{{ x }}();
{% if vectors %}
    if (line < {{ lines }} && at < {{ length }}) {
        let i = line * params.{{ x }}_stride + at / 4u{{ more(x) }};
        values = {{ "%s[params.%s_start + i]" % (x, x) if PACKED[x] else "load_%s(i)" % x }};
    }
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

{# The vectors of an operand that a thread brings to its tile: `fetch` reads them, `keep` writes them. #}
{% macro fetch(x, along, columns, first, at) %}
{% set items = BK * columns // 4 %}
{% for i in range((items + THREADS - 1) // THREADS) %}
{% set item = "(thread + %du)" % (i * THREADS) %}
{% if along == "k" %}
            {{ x }}{{ i }} = raw_{{ x }}({{ first }} + {{ item }} / {{ BK // 4 }}u, {{ at }} + {{ item }} % {{ BK // 4 }}u * 4u);
{% else %}
            {{ x }}{{ i }} = raw_{{ x }}({{ at }} + {{ item }} / {{ columns // 4 }}u, {{ first }} + {{ item }} % {{ columns // 4 }}u * 4u);
{% endif %}
{% endfor %}
{% endmacro %}
{% macro keep(x, along, columns, stage) %}
{% set items = BK * columns // 4 %}
{% for i in range((items + THREADS - 1) // THREADS) %}
{% set item = "(thread + %du)" % (i * THREADS) %}
            {{ "if (%s < %du) " % (item, items) if (i + 1) * THREADS > items }}{
{% if along == "k" %}
                let down = {{ item }} % {{ BK // 4 }}u * 4u;
                let across = {{ item }} / {{ BK // 4 }}u;
                let values = four_{{ x }}({{ x }}{{ i }});
{% for j in range(4) %}
                {{ x }}_tile{{ stage }}[down + {{ j }}u][across / 4u][across % 4u] = values[{{ j }}];
{% endfor %}
{% else %}
                {{ x }}_tile{{ stage }}[{{ item }} / {{ columns // 4 }}u][{{ item }} % {{ columns // 4 }}u] = four_{{ x }}({{ x }}{{ i }});
{% endif %}
            }
{% endfor %}
{% endmacro %}
{% macro fetch_both(at) %}
{{ fetch("a", a_along, BM, "first_row", at) }}
{{ fetch("b", b_along, BN, "first_column", at) }}
{% endmacro %}
{% macro keep_both(stage) %}
{{ keep("a", a_along, BM, stage) }}
{{ keep("b", b_along, BN, stage) }}
{% endmacro %}
{% macro multiply(stage) %}
{% for i in range(BK) %}
        {
{% for r in range(TM // 4) %}
            let rows{{ r }} = a_tile{{ stage }}[{{ i }}][down{{ " + %du" % (r * DOWN) if r }}];
{% endfor %}
{% for c in range(TN // 4) %}
            let columns{{ c }} = b_tile{{ stage }}[{{ i }}][across{{ " + %du" % (c * ACROSS) if c }}];
{% endfor %}
{% for r in range(TM) %}
{% for c in range(TN // 4) %}
            sum{{ r }}_{{ c }} = fma(vec4<f32>(rows{{ r // 4 }}.{{ "xyzw"[r % 4] }}), columns{{ c }}, sum{{ r }}_{{ c }});
{% endfor %}
{% endfor %}
        }
{% endfor %}
{% endmacro %}

@compute @workgroup_size({{ THREADS }}) {{ main() }}
{% if batched or split_k %}
    let tile = workgroup % (params.m_tiles * params.n_tiles);
    let matrix = workgroup / (params.m_tiles * params.n_tiles);
    if (matrix >= params.batches{{ " * params.splits" if split_k }}) { return; }
{% if split_k %}
    let entry = matrix / params.splits;
    let begin = matrix % params.splits * params.split;
{% if not chain %}
    let end = min(begin + params.split, params.k);
{% endif %}
{% else %}
    let entry = matrix;
{% endif %}
    a_first = entry * params.a_batch;
    b_first = entry * params.b_batch;
    out_first = matrix * params.out_batch;
{% else %}
    let tile = workgroup;
    if (tile >= params.m_tiles * params.n_tiles) { return; }
{% endif %}
{% if not split_k %}
    let begin = 0u;
    let {{ "last" if chain else "end" }} = params.k;
{% elif chain %}
    let last = min(begin + params.split, params.k);
{% endif %}
    let of_group = 8u * params.n_tiles;
    let first_tile = tile / of_group * 8u;
    let height = min(params.m_tiles - first_tile, 8u);
    let first_row = (first_tile + tile % of_group % height) * {{ BM }}u;
    let first_column = tile % of_group / height * {{ BN }}u;
{% if ACROSS % 8 == 0 and DOWN % 4 == 0 %}
    let lane = thread % 32u;
    let across = thread / 32u % {{ ACROSS // 8 }}u * 8u + (lane >> 1u) % 8u;
    let down = thread / {{ 4 * ACROSS }}u * 4u + lane % 2u + lane / 16u * 2u;
{% else %}
    let across = thread % {{ ACROSS }}u;
    let down = thread / {{ ACROSS }}u;
{% endif %}
{% for x, columns in (("a", BM), ("b", BN)) %}
{% for i in range((BK * columns // 4 + THREADS - 1) // THREADS) %}
    var {{ x }}{{ i }} = Raw_{{ x }}();
{% endfor %}
{% endfor %}
{% if chain %}
    for (var first = begin; first < last; first += {{ chain }}u) {
    let end = min(first + {{ chain }}u, last);
    let again = first > begin;
{% else %}
    let first = begin;
{% endif %}
{% for r in range(TM) %}
{% for c in range(TN // 4) %}
    var sum{{ r }}_{{ c }} = vec4<f32>(0.0);
{% endfor %}
{% endfor %}
    {
{{ fetch_both("first") }}
    }
{% if stages == 2 %}
    {
{{ keep_both(0) }}
    }
    workgroupBarrier();
{% endif %}
    for (var k0 = first; k0 < end; k0 += {{ BK * stages }}u) {
{% if stages == 1 %}
{{ keep_both(0) }}
        workgroupBarrier();
        if (k0 + {{ BK }}u < end) {
{{ fetch_both("k0 + %du" % BK) }}
        }
{{ multiply(0) }}
        workgroupBarrier();
{% else %}
{% for stage in range(2) %}
{% set at = "k0 + %du" % (BK * (stage + 1)) %}
        if ({{ at }} < end) {
{{ fetch_both(at) }}
        }
        {{ "if (k0 + %du < end) {" % BK if stage else "{" }}
{{ multiply(stage) }}
        }
{{ keep_both(1 - stage) }}
        workgroupBarrier();
{% endfor %}
{% endif %}
    }
{% for c in range(TN // 4) %}
    {
        let column = first_column + (across{{ " + %du" % (c * ACROSS) if c }}) * 4u;
{% if bias %}
        var more = vec4<f32>(0.0);
{% for j in range(4) %}
        if ({{ "!again && " if chain }}column + {{ j }}u < params.n) { more[{{ j }}] = load_bias(column + {{ j }}u); }
{% endfor %}
{% endif %}
{% for r in range(TM) %}
        {
            let row = first_row + (down{{ " + %du" % (r // 4 * DOWN) if r >= 4 }}) * 4u + {{ r % 4 }}u;
            var value = sum{{ r }}_{{ c }}{{ " + more" if bias }};
{% if out_vectors %}
            if (row < params.m && column < params.n) {
                let at = row * params.out_stride + column / 4u{{ more("out") }};
{% if adds or chain %}
                {{ "if (again) " if not adds }}{ value += load_out(at); }
{% endif %}
                store_out(at, value);
            }
{% else %}
{% for j in range(4) %}
            if (row < params.m && column + {{ j }}u < params.n) {
                let at{{ j }} = row * params.out_stride + column + {{ j }}u{{ more("out") }};
{% if adds or chain %}
                {{ "if (again) " if not adds }}{ value[{{ j }}] += load_out(at{{ j }}); }
{% endif %}
                store_out(at{{ j }}, value[{{ j }}]);
            }
{% endfor %}
{% endif %}
        }
{% endfor %}
    }
{% endfor %}
{% if chain %}
    }
{% endif %}
}
