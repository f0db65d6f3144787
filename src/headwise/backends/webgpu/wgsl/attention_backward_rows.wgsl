{#
  How attention_backward.wgsl loads, multiplies, sums over lanes and writes rows. A file of macros over the variables of that
  template.

  There is one workgroup array per unrolled index, so that compilers check an index once, not once per element.
#}
{# Load a tile of one streamed tensor: every thread takes the vectors whose place in an array is its own. #}
{% macro load_tile(array, name, vectors, each) %}
{% set width = each * lanes %}
{% set size = chunks * width %}
{% set together = [threads // size, 1] | max %}{# arrays that all threads fill at once #}
    {
{% if together > 1 %}
        let slot = thread % {{ size }}u;
        let part = thread / {{ size }}u;
{% endif %}
{% for x in range(0, chunk, together) %}
{% for y in range((size + threads - 1) // threads) %}
        {
{% if together == 1 %}
            let slot = thread + {{ y * threads }}u;
            let part = 0u;
{% endif %}
            let column = slot % {{ width }}u;
            let row = min(at + i32(slot / {{ width }}u * {{ chunk }}u + {{ x }}u + part), past - 1);
            let value = {{ padded(name, vectors, width) }};
{% if together == 1 %}
{% if size % threads and (y + 1) * threads > size %}
            if (slot < {{ size }}u) { {{ array }}{{ x }}[slot] = value; }
{% else %}
            {{ array }}{{ x }}[slot] = value;
{% endif %}
{% else %}
{% for z in range([together, chunk - x] | min) %}
            {{ "else " if z }}if (part == {{ z }}u) { {{ array }}{{ x + z }}[slot] = value; }
{% endfor %}
{% endif %}
        }
{% endfor %}
{% endfor %}
    }
{% endmacro %}
{# Where to go on from a streamed row: at it, or past rows that the mask hides from every own row; and steps of a loop. #}
{% macro next_of(row) -%}
{% if not variant.mask %}{{ row }}
{%- elif queries %}next_key(batch, head, of_first, of_last, {{ row }}, past)
{%- else %}next_query(batch, head, {{ row }}, past, mask_tile, {{ own_words }}u)
{%- endif %}
{%- endmacro %}
{% macro step(name, rows) -%}
{{ "%s = %s" % (name, next_of("%s + %d" % (name, rows)) | trim) if variant.mask else "%s += %d" % (name, rows) }}
{%- endmacro %}
{# Does the mask hide nothing of a tile? #}
{% macro mask_shows_all() -%}
{% if queries -%}
all_seen(batch, head, of_first, of_last, u32(at), u32(at + {{ streamed_rows - 1 }}))
{%- else -%}
all_seen(batch, head, u32(at), u32(min(at + {{ streamed_rows }}, past) - 1), u32(own_first), u32(max(own_last, own_first)))
{%- endif %}
{%- endmacro %}
{# A vector of a streamed row: zeros past the row's end. #}
{% macro padded(name, vectors, width) -%}
{% set value = "load_%s(%s_base + u32(row) * params.%s_s + column)" % (name, name, name) %}
{{- "select(vec4<f32>(), %s, column < %du)" % (value, vectors) if width > vectors else value -}}
{%- endmacro %}
{# Partial products sum{i}_{kk} of own row i and streamed row kk. #}
{% macro products(sum, mine, array, each) %}
{% for kk in range(chunk) %}
{% for i in range(rows) %}
            var {{ sum }}{{ i }}_{{ kk }}: f32;
{% endfor %}
            {
{% for n in range(each) %}
                let other{{ n }} = {{ array }}{{ kk }}[{{ array }}_at + {{ n * lanes }}u];
{% endfor %}
{% for n in range(each) %}
{% for axis in "xyzw" %}
{% for i in range(rows) %}
{% if n == 0 and axis == "x" %}
                {{ sum }}{{ i }}_{{ kk }} = {{ mine }}{{ i }}_0.x * other0.x;
{% else %}
                {{ sum }}{{ i }}_{{ kk }} = fma({{ mine }}{{ i }}_{{ n }}.{{ axis }}, other{{ n }}.{{ axis }}, {{ sum }}{{ i }}_{{ kk }});
{% endif %}
{% endfor %}
{% endfor %}
{% endfor %}
            }
{% endfor %}
{% endmacro %}
{# Sums over the lanes: afterwards lane l has sum_0 … of own row l % rows, for the streamed rows from slot_first on. #}
{% macro reduce_in_registers(sum) %}
{% set state = namespace(step=1, values=[]) %}
{% for i in range(rows) %}
{% set of_row = [] %}
{% for kk in range(chunk) %}{% do of_row.append("%s%d_%d" % (sum, i, kk)) %}{% endfor %}
{% do state.values.append(of_row) %}
{% endfor %}
{% for level in range(8) if 2 ** level < lanes %}
{% set step = 2 ** level %}
{% set lists = state.values %}
{% set next = [] %}
{% if lists | length > 1 %}
{# Half of the own rows stay, the partial sums of the others go to the neighbour. #}
{% for i in range(0, lists | length, 2) %}
{% set kept = [] %}
{% for m in range(lists[i] | length) %}
{% set a, b = lists[i][m], lists[i + 1][m] %}
            let {{ a }}_{{ step }} = select({{ a }}, {{ b }}, odd{{ step }}) + subgroupShuffleXor(select({{ b }}, {{ a }}, odd{{ step }}), {{ step }}u);
{% do kept.append("%s_%d" % (a, step)) %}
{% endfor %}
{% do next.append(kept) %}
{% endfor %}
{% elif lists[0] | length > 1 %}
{# One own row is left: half of the streamed rows stay. #}
{% set kept = [] %}
{% set half = lists[0] | length // 2 %}
{% for m in range(half) %}
{% set a, b = lists[0][m], lists[0][half + m] %}
            let {{ a }}_{{ step }} = select({{ a }}, {{ b }}, odd{{ step }}) + subgroupShuffleXor(select({{ b }}, {{ a }}, odd{{ step }}), {{ step }}u);
{% do kept.append("%s_%d" % (a, step)) %}
{% endfor %}
{% do next.append(kept) %}
{% else %}
            let {{ lists[0][0] }}_{{ step }} = {{ lists[0][0] }} + subgroupShuffleXor({{ lists[0][0] }}, {{ step }}u);
{% do next.append(["%s_%d" % (lists[0][0], step)]) %}
{% endif %}
{% set state.values = next %}
{% endfor %}
{% for m in range(slots) %}
            let {{ sum }}_{{ m }} = {{ state.values[0][m] }};
{% endfor %}
{% endmacro %}
{# The weight of own row i and streamed row kk, from the lane that has it. #}
{% macro weight(name, i, kk) -%}
{% if subgroups -%}
{% set state = namespace(lane=i, step=rows, half=chunk // 2) %}
{% for level in range(8) if state.step < lanes and state.half >= 1 %}
{% set state.lane = state.lane + state.step * (kk // state.half % 2) %}
{% set state.step = state.step * 2 %}
{% set state.half = state.half // 2 %}
{% endfor %}
subgroupShuffle({{ name }}_{{ kk % slots }}, lanes_first + {{ state.lane }}u)
{%- else -%}
{{ name }}{{ i }}.{{ "xyzw"[kk] }}
{%- endif %}
{%- endmacro %}
{# sum{i} += weight(i, kk) · streamed row kk #}
{% macro accumulate(sum, name, array, each) %}
{% for kk in range(chunk) %}
            {
{% for i in range(rows) %}
                let w{{ i }} = {{ weight(name, i, kk) | trim }};
{% endfor %}
{% if may_hide %}
                // A streamed row that is hidden from all of these rows may hold NaN, and zero times NaN is NaN.
                if ((({% for i in range(rows) %}{{ " | " if i }}bitcast<u32>(w{{ i }}){% endfor %}) & 0x7fffffffu) != 0u) {
{% endif %}
{% for n in range(each) %}
                let other{{ n }} = {{ array }}{{ kk }}[{{ array }}_at + {{ n * lanes }}u];
{% for i in range(rows) %}
                {{ sum }}{{ i }}_{{ n }} = fma(vec4<f32>(w{{ i }}), other{{ n }}, {{ sum }}{{ i }}_{{ n }});
{% endfor %}
{% endfor %}
{% if may_hide %}
                }
{% endif %}
            }
{% endfor %}
{% endmacro %}
{# Rows that a workgroup owns, into registers. #}
{% macro load_own(mine, name, vectors, each) %}
{% for i in range(rows) %}
{% for n in range(each) %}
{% set value = "load_%s(%s_base + own_row%d * params.%s_s + lane + %du)" % (name, name, i, name, n * lanes) %}
{% if each * lanes > vectors and n == each - 1 %}
    let {{ mine }}{{ i }}_{{ n }} = select(vec4<f32>(), {{ value }}, lane + {{ n * lanes }}u < {{ vectors }}u);
{% else %}
    let {{ mine }}{{ i }}_{{ n }} = {{ value }};
{% endif %}
{% endfor %}
{% endfor %}
{% endmacro %}
{% macro of_lane(n, vectors, each) -%}
{{ "if (lane + %du < %du) " % (n * lanes, vectors) if each * lanes > vectors and n == each - 1 }}
{%- endmacro %}
{# Clears the sums of queries that saw no key: they may be NaN, from 0 · NaN. `saw` has the bits of all weights of a lane's own
   row. #}
{% macro drop_unseen() %}
{% if subgroups %}
    {
        var seen = saw;
{% for level in range(8) if rows <= 2 ** level < lanes %}
        seen |= subgroupShuffleXor(seen, {{ 2 ** level }}u);
{% endfor %}
{% for i in range(rows) %}
        if (subgroupShuffle(seen, lanes_first + {{ i }}u) == 0u) { {{ clear("sum", i, first_each) }} }
{% endfor %}
    }
{% else %}
    workgroupBarrier();
    if (lane < {{ rows }}u) { weights_first[group * {{ rows }}u + lane].x = select(0.0, 1.0, saw != 0u); }
    workgroupBarrier();
{% for i in range(rows) %}
    if (weights_first[group * {{ rows }}u + {{ i }}u].x == 0.0) { {{ clear("sum", i, first_each) }} }
{% endfor %}
{% endif %}
    saw = 0u;
{% endmacro %}
{% macro clear(sum, i, each) -%}
{% for n in range(each) %}{{ sum }}{{ i }}_{{ n }} = vec4<f32>(); {% endfor %}
{%- endmacro %}
{# Sums so far, into the rows of the result. #}
{% macro keep(sum, i, name, vectors, each) %}
            {
                let row = own_first + i32(group * {{ rows }}u) + {{ i }};
                if (row >= range_first && row < range_past) {
                    let {{ name }}_at = {{ name }}_base + u32(row - range_first) * params.{{ name }}_s;
{% for n in range(each) %}
                    {{ of_lane(n, vectors, each) }}{
                        if (has_kept) { {{ sum }}{{ i }}_{{ n }} += load_{{ name }}({{ name }}_at + {{ n * lanes }}u); }
                        store_{{ name }}({{ name }}_at + {{ n * lanes }}u, {{ sum }}{{ i }}_{{ n }});
                    }
{% endfor %}
                }
                {{ clear(sum, i, each) }}
            }
{% endmacro %}
{% macro store_own(sum, name, vectors, each, factor) %}
{% for n in range(each) %}
            {{ of_lane(n, vectors, each) }}{
{% if chain %}
                if (has_kept) { {{ sum }}_{{ n }} += load_{{ name }}({{ name }}_at + {{ n * lanes }}u); }
{% endif %}
{% if ranged %}
                if (params.finishes == 0u) {
                    store_{{ name }}({{ name }}_at + {{ n * lanes }}u, {{ sum }}_{{ n }});
                } else {
                    store_{{ name }}({{ name }}_at + {{ n * lanes }}u, finished({{ sum }}_{{ n }}{{ factor }}, none, extent.bad));
                }
{% else %}
                store_{{ name }}({{ name }}_at + {{ n * lanes }}u, finished({{ sum }}_{{ n }}{{ factor }}, none, extent.bad));
{% endif %}
            }
{% endfor %}
{% endmacro %}
