// Packs a bool mask: see mask_words.py.
//
//   mask   (B, H, Sq, Sk) bytes, any strides
//   words  (B, H, blocks of {{ 64 }} queries, words of a block): for each query of a block a word for every 32 keys, the first key in
//          its lowest bit, zeros past the last; then for every 32 words a word of bits "some key is seen by some query of the
//          block", and then as many of bits "all keys are seen by all queries of the block"
//
// `before` queries of the block were packed by earlier dispatches; this one adds to their states.
//
// A workgroup packs the words of one block that one word of states describes: 64 queries, 1024 keys.
//
// variables: neighbours (bool: keys are neighbours in memory), one_key (bool: one key stands for all; its word is all ones or
//            all zeros, and so are its states)
{{ input("mask", "u8", 1) }}
{{ output("words", "u32", 1) }}
{{ params("heads: u32, blocks: u32, queries: u32, before: u32, keys: u32, mask_b: u32, mask_h: u32, mask_q: u32, mask_k: u32, width: u32, some: u32, states: u32, words_b: u32, words_h: u32, words_block: u32") }}

// [query][word], one column of padding against bank conflicts.
var<workgroup> tile: array<u32, {{ 64 * 33 }}>;
// Of 8 rows of threads, then of the block: some, whole.
var<workgroup> seen: array<vec2<u32>, 256>;

{% if neighbours %}
// The bits of 32 neighbouring bytes from byte `at` on: words of four bytes, shifted to where the bytes begin.
fn packed(at: u32) -> u32 {
    let first = (params.mask_start + at) / 4u;
    let shift = (params.mask_start + at) % 4u * 8u;
    var low = mask[first];
    var bits = 0u;
{% for i in range(8) %}
    {
        let high = mask[first + {{ i + 1 }}u];
        // In two steps: a shift by 32 would be one by 0.
        let four = (low >> shift) | ((high << (31u - shift)) << 1u);
        // The highest bit of each byte that is not zero; a multiplication gathers them.
        let ones = ((((four & 0x7f7f7f7fu) + 0x7f7f7f7fu) | four) & 0x80808080u) >> 7u;
        bits |= ((ones * 0x10204080u) >> 28u) << {{ 4 * i }}u;
        low = high;
    }
{% endfor %}
    return bits;
}
{% elif one_key %}
fn packed(at: u32) -> u32 { return select(0u, 0xffffffffu, load_mask(at) != 0u); }
{% else %}
fn packed(at: u32) -> u32 {
    var bits = 0u;
    for (var i = 0u; i < 32u; i++) { bits |= select(0u, 1u << i, load_mask(at + i * params.mask_k) != 0u); }
    return bits;
}
{% endif %}

// Bits of a word that stand for keys.
fn there(word: u32) -> u32 {
{% if one_key %}
    return 0xffffffffu;
{% else %}
    let keys = params.keys - word * 32u;
    return select(0xffffffffu, (1u << (keys % 32u)) - 1u, keys < 32u);
{% endif %}
}

@compute @workgroup_size(256) {{ main() }}
    let column = workgroup % params.states;
    let block = workgroup / params.states % params.blocks;
    let entry = workgroup / params.states / params.blocks;
    let batch = entry / params.heads;
    let head = entry % params.heads;
    let first_query = block * 64u;
    let first_word = column * 32u;
    let mask_base = batch * params.mask_b + head * params.mask_h + first_query * params.mask_q;
    let queries = select(0u, min(params.queries - first_query, 64u), first_query < params.queries);
    let count = min(params.width - first_word, 32u);

    // Threads side by side read what lies side by side: words of a query, or queries.
    for (var i = thread; i < 2048u; i += 256u) {
        let word = {{ "i % 32u" if neighbours else "i / 64u" }};
        let query = {{ "i / 32u" if neighbours else "i % 64u" }};
        if (query < queries && word < count) {
            let at = mask_base + query * params.mask_q + (first_word + word) * 32u * params.mask_k;
            tile[query * 33u + word] = packed(at) & there(first_word + word);
        }
    }
    workgroupBarrier();

    let to = batch * params.words_b + head * params.words_h + block * params.words_block;
    let own = thread % 32u;
    var some = 0u;
    var whole = 0xffffffffu;
    if (own < count) {
        for (var query = thread / 32u; query < queries; query += 8u) {
            let bits = tile[query * 33u + own];
            store_words(to + (params.before + query) * params.width + first_word + own, bits);
            some |= bits;
            whole &= bits | ~there(first_word + own);
        }
    }
    seen[thread] = vec2<u32>(some, whole);
    workgroupBarrier();
    if (thread < 32u) {
        for (var i = 1u; i < 8u; i++) {
            some |= seen[thread + i * 32u].x;
            whole &= seen[thread + i * 32u].y;
        }
        seen[thread] = vec2<u32>(some, whole);
    }
    workgroupBarrier();
    if (thread == 0u) {
        var states = vec2<u32>();
        for (var i = 0u; i < 32u; i++) {
            let of_word = seen[{{ "0u" if one_key else "i" }}];
            states |= vec2<u32>(select(0u, 1u << i, of_word.x != 0u), select(0u, 1u << i, of_word.y == 0xffffffffu));
        }
        let states_at = to + params.some + column;
        if (params.before > 0u) {
            states.x |= load_words(states_at);
            states.y &= load_words(states_at + params.states);
        }
        store_words(states_at, states.x);
        store_words(states_at + params.states, states.y);
    }
}
