{#
  Which probabilities dropout drops: Philox 4x32-10 (Salmon et al., 2011). docs/contract.md has the mapping. One counter serves
  eight entries: queries i and i + 8, keys j, j + 1, j + 8 and j + 9. A file of macros:

      {% import "dropout.wgsl" as dropout with context %}
      {{ dropout.functions() }}          needs load_aux, and the fields of scores.wgsl for a variant with dropout
#}
{% import "philox.wgsl" as philox %}
{% macro functions() %}
// What the counters of all entries of a head have in common: the seed, and the numbers of batch entry (or sequence) and head.
struct Dropout { seed: vec2<u32>, batch: u32, head: u32{{ ", row: u32, key: u32" if variant.dropout >= 5 }} }

fn dropout_of(batch: u32, head: u32) -> Dropout {
    let seed = vec2<u32>(load_aux(params.seed), load_aux(params.seed + 1u));
{% if variant.dropout == 1 %}
    return Dropout(seed, batch, params.first_head + head);
{% else %}
    // The call is a part of a larger one: numbers of its first batch entry and head{{ ", query and key" if variant.dropout >= 5 }}.
    return Dropout(seed, load_aux(params.seed + 2u) + batch, load_aux(params.seed + 4u) + params.first_head + head
                   {{- ", load_aux(params.seed + 6u), load_aux(params.seed + 8u)" if variant.dropout >= 5 }});
{% endif %}
}

{{ philox.functions() }}
fn random_words(drop: Dropout, query: u32, key: u32) -> vec4<u32> {
    return philox(vec4<u32>(key & 0xfffffff6u, drop.head, query & 0xfffffff7u, drop.batch), drop.seed);
}

// Is an entry kept, given the words of its counter?
fn is_kept(words: vec4<u32>, query: u32, key: u32) -> bool {
    let of_row = select(words.xy, words.zw, (query & 8u) != 0u);
    let word = select(of_row.x, of_row.y, (key & 8u) != 0u);
    return select(word & 0xffffu, word >> 16u, (key & 1u) != 0u) >= params.dropped_below;
}

{% set query, key, first = ("(query + drop.row)", "(key + drop.key)", "(first + drop.key)") if variant.dropout >= 5 else ("query", "key", "first") %}
fn kept(drop: Dropout, query: u32, key: u32) -> bool {
    return is_kept(random_words(drop, {{ query }}, {{ key }}), {{ query }}, {{ key }});
}

// A bit for each of `count` keys from the first on: is it kept? Neighbours share a counter.
fn kept_keys(drop: Dropout, query: u32, first: u32, count: u32) -> u32 {
    var bits = 0u;
    var words = vec4<u32>();
    for (var x = 0u; x < count; x++) {
        if (x == 0u || (({{ first }} + x) & 1u) == 0u) { words = random_words(drop, {{ query }}, {{ first }} + x); }
        bits |= select(0u, 1u, is_kept(words, {{ query }}, {{ first }} + x)) << x;
    }
    return bits;
}

// The same for queries, which share none.
fn kept_queries(drop: Dropout, first: u32, key: u32, count: u32) -> u32 {
    var bits = 0u;
    for (var x = 0u; x < count; x++) { bits |= select(0u, 1u, kept(drop, first + x, key)) << x; }
    return bits;
}
{% endmacro %}
