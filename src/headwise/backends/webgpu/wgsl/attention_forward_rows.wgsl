{#
  How attention_forward.wgsl loads a tile of keys, computes products, exchanges numbers of a row between the lanes of its team,
  and writes sums to memory. A file of macros over the variables of that template.
#}
{# A tile is loaded in turns: in each, a thread has one place, the same for all keys of a chunk, and fetches its vector into
   registers. If several keys are loaded at once, `part` says which of them a thread fetches. #}
{% macro places() %}
{% for turn in range(turns) %}
    let place{{ turn }} = thread{{ " %% %du" % tile_vectors if together > 1 else " + %du" % (turn * threads) if turn else "" }};
    let spot{{ turn }} = spot_of(place{{ turn }});
{% endfor %}
{% if together > 1 %}
    let part = thread / {{ tile_vectors }}u;
{% endif %}
{% endmacro %}
{% macro fetch() %}
{% for turn in range(turns) %}
{% for x in range(0, unroll, together) %}
        var fetched{{ turn }}_{{ x }} = vec4<f32>();
{% endfor %}
{% set low = turn * threads if together == 1 else 0 %}
{% set high = [low + threads, tile_vectors] | min %}
{% if high <= k_vectors %}
        {
{{ fetch_rows("k", turn, 0, q_vectors, q_row) }}
        }
{% elif low >= k_vectors %}
        {
{{ fetch_rows("v", turn, k_vectors, v_vectors, v_row) }}
        }
{% else %}
        if (place{{ turn }} < {{ k_vectors }}u) {
{{ fetch_rows("k", turn, 0, q_vectors, q_row) }}
        } else {
{{ fetch_rows("v", turn, k_vectors, v_vectors, v_row) }}
        }
{% endif %}
{% endfor %}
{% endmacro %}
{% macro fetch_rows(name, turn, first_place, vectors, row) %}
{% set at = "place%d" % turn if first_place == 0 else "(place%d - %du)" % (turn, first_place) %}
            let key = tile_first + i32({{ at }} / {{ row }}u * {{ unroll }}u){{ " + i32(part)" if together > 1 }};
            let column = {{ at }} % {{ row }}u;
{% for x in range(0, unroll, together) %}
            fetched{{ turn }}_{{ x }} = load_{{ name }}({{ name }}_base + u32(min(key + {{ x }}, last_key)) * params.{{ name }}_s + {{ "column" if row == vectors else "min(column, %du)" % (vectors - 1) }});
{% endfor %}
{% if row != vectors %}
            if (column >= {{ vectors }}u) {
{% for x in range(0, unroll, together) %}
                fetched{{ turn }}_{{ x }} = vec4<f32>();
{% endfor %}
            }
{% endif %}
{% if name == "v" %}
            // Keys that no row sees may hold NaN, and 0 · NaN is NaN.
            if (tile_first + {{ keys }} > past) {
{% for x in range(0, unroll, together) %}
                if (key + {{ x }} > last_key) { fetched{{ turn }}_{{ x }} = vec4<f32>(); }
{% endfor %}
            }
{% endif %}
{% endmacro %}
{% macro put() %}
{% for turn in range(turns) %}
{% for x in range(0, unroll, together) %}
{% for z in range([together, unroll - x] | min) %}
{% set conditions = [] %}
{% if together > 1 %}{% do conditions.append("part == %du" % z) %}{% endif %}
{% if together == 1 and (turn + 1) * threads > tile_vectors %}{% do conditions.append("place%d < %du" % (turn, tile_vectors)) %}{% endif %}
        {{ "if (%s) { " % conditions[0] if conditions }}tile[spot{{ turn }}.x][{{ x + z }}][spot{{ turn }}.y][spot{{ turn }}.z] = fetched{{ turn }}_{{ x }};{{ " }" if conditions }}
{% endfor %}
{% endfor %}
{% endfor %}
{% endmacro %}
{# Where to go on from a key: at it, or past keys that the mask hides from every row of the workgroup. #}
{% macro next_of(key) -%}
{{ "next_key(batch, head, of_first, of_last, %s, past)" % key if variant.mask else key }}
{%- endmacro %}
{# product{i}_{x}: what this lane's elements add to q·k of the row in registers i, with key x of the chunk. #}
{% macro multiply(x) %}
{% for n in range(q_each) %}
                let k{{ n }} = tile[chunk][{{ x }}][{{ n }}][lane];
{% endfor %}
{% for n in range(q_each) %}
{% for i in range(rows) %}
{% if n == 0 %}
                product{{ i }}_{{ x }} = q{{ i }}_0.x * k0.x;
{% endif %}
{% endfor %}
{% for element in "xyzw" if n > 0 or element != "x" %}
{% for i in range(rows) %}
                product{{ i }}_{{ x }} = fma(q{{ i }}_{{ n }}.{{ element }}, k{{ n }}.{{ element }}, product{{ i }}_{{ x }});
{% endfor %}
{% endfor %}
{% endfor %}
{% endmacro %}

{# A number of each lane's own row for the lanes of its team: `publish` it, and then they read it with `of_row`, of the row
   in registers i. #}
{% macro publish(name) %}
{% if not subgroups %}
    workgroupBarrier();
    factors[thread] = {{ name }};
    workgroupBarrier();
{% endif %}
{% endmacro %}
{% macro of_row(name, i) -%}
{{ name if i == 0 else ("subgroupShuffleXor(%s, %du)" % (name, i * apart) if subgroups else "factors[thread ^ %du]" % (i * apart)) }}
{%- endmacro %}
{# Sums so far, with those that memory holds of earlier chains, to memory. #}
{% macro keep(has_kept) %}
        let kept_shrink = exp2((kept_reference - reference){{ to_powers }});
        kept_total = fma(kept_total, kept_shrink, total);
        kept_reference = reference;
        total = 0.0;
{{ publish("kept_shrink") }}
{% for i in range(rows) %}
        {
            let kept_shrink{{ i }} = {{ of_row("kept_shrink", i) }};
            if (inside{{ i }}) {
{% for n in range(v_each) %}
                {{ "if (lane + %du < %du) " % (n * lanes, v_vectors) if (n + 1) * lanes > v_vectors else "" }}{
                    let at = out_base + row{{ i }} * params.out_s + lane + {{ n * lanes }}u;
                    if ({{ has_kept }}) { out{{ i }}_{{ n }} = fma(load_out(at), vec4<f32>(kept_shrink{{ i }}), out{{ i }}_{{ n }}); }
                    store_out(at, out{{ i }}_{{ n }});
                }
{% endfor %}
            }
{% for n in range(v_each) %}
            out{{ i }}_{{ n }} = vec4<f32>();
{% endfor %}
        }
{% endfor %}
{% endmacro %}
{% macro weigh(declaration) %}
{% for x in range(unroll) %}
            {{ declaration }}weight{{ x }} = exp2({{ "(logit%d - reference) * LOG2E" % x if variant.bias else "fma(logit%d, %s, -reference)" % (x, power) }});
{% endfor %}
{% endmacro %}
{# Combines numbered names in pairs: shorter chains of dependent operations. #}
{% macro in_pairs(name, first, count, operation) -%}
{% if count == 1 %}{{ name }}{{ first }}{% else %}{{ operation[0] }}{{ in_pairs(name, first, count // 2, operation) }}{{ operation[1] }}{{ in_pairs(name, first + count // 2, count - count // 2, operation) }}){% endif %}
{%- endmacro %}
