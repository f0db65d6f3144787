{#
  How the attention kernels read a packed mask (mask_words.py). A file of macros; `fields` are the last of PackedMask.

  A kernel walks over the tiles of keys, or of queries, of which some is seen: `next_key` and `next_query` skip the others.
  Where all of a tile is seen (`all_seen`), it does not look at the bits.
#}
{% macro fields() -%}
mask_b: u32, mask_h: u32, mask_block: u32, mask_row: u32, mask_word: u32, mask_some: u32, mask_whole: u32, mask_first: u32
{%- endmacro %}

{% macro functions() %}
// Where the block of a query begins.
fn mask_block_at(batch: u32, head: u32, query: u32) -> u32 {
    return batch * params.mask_b + head * params.mask_h + (query - params.mask_first) / 64u * params.mask_block;
}
// Where the words of a query begin.
fn mask_row_at(batch: u32, head: u32, query: u32) -> u32 {
    return mask_block_at(batch, head, query) + (query - params.mask_first) % 64u * params.mask_row;
}
// The bits of 32 keys from `key` on, of the row at `at`. Those past the last key may be anything.
fn mask_bits(at: u32, key: u32) -> u32 {
    let word = at + key / 32u * params.mask_word;
    let shift = key % 32u;
    // In two steps: a shift by 32 would be one by 0.
    return (load_mask(word) >> shift) | ((load_mask(word + params.mask_word) << (31u - shift)) << 1u);
}
// Does query `query`, which exists, see `key`?
fn masked_out(batch: u32, head: u32, query: u32, key: u32) -> bool {
    return ((load_mask(mask_row_at(batch, head, query) + key / 32u * params.mask_word) >> (key % 32u)) & 1u) == 0u;
}
// States of 32 tiles of keys, from key 1024 · n on: is some of the blocks of queries [first, past] seen?
fn mask_some(batch: u32, head: u32, first: u32, last: u32, n: u32) -> u32 {
    var some = 0u;
    for (var query = first; query / 64u <= last / 64u; query += 64u) {
        some |= load_mask(mask_block_at(batch, head, query) + params.mask_some + n * params.mask_word);
    }
    return some;
}
// The first key from `key` on, or of a later tile, of which queries [first, last] see some. `past` and more: there is none.
fn next_key(batch: u32, head: u32, first: u32, last: u32, key: i32, past: i32) -> i32 {
    var at = key;
    while (at < past) {
        let tile = u32(at) / 32u;
        let some = mask_some(batch, head, first, last, tile / 32u) >> (tile % 32u);
        if (some != 0u) { return max(at, i32((tile + countTrailingZeros(some)) * 32u)); }
        at = i32((tile / 32u + 1u) * 1024u);
    }
    return at;
}
// The first query from `query` on, or of a later block, that sees some of `count` tiles of keys, the first of them `tile`, all
// described by one word.
fn next_query(batch: u32, head: u32, query: i32, past: i32, tile: u32, count: u32) -> i32 {
    var at = query;
    while (at < past) {
        let some = mask_some(batch, head, u32(at), u32(at), tile / 32u) >> (tile % 32u);
        if (extractBits(some, 0u, count) != 0u) { return at; }
        at = (at / 64 + 1) * 64;
    }
    return at;
}
// Do queries [first, last] see all of keys [key, last_key]?
fn all_seen(batch: u32, head: u32, first: u32, last: u32, key: u32, last_key: u32) -> bool {
    var whole = 1u;
    for (var query = first; query / 64u <= last / 64u; query += 64u) {
        let states = mask_block_at(batch, head, query) + params.mask_whole;
        for (var tile = key / 32u; tile <= last_key / 32u; tile++) {
            whole &= load_mask(states + tile / 32u * params.mask_word) >> (tile % 32u);
        }
    }
    return whole != 0u;
}
{% endmacro %}
