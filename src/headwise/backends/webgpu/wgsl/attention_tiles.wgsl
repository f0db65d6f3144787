// The list of tiles of a packed call: which tile of which sequence each workgroup works on. (FlashAttention's varlen kernels
// read cu_seqlens in every block instead.)
//
//   cu, other_cu  (sequences + 1), of the tokens that are tiled and of the others
//   tiles         (total / tile + sequences + 1) entries of eight numbers:
//                 start, length, other_start, other_length, tile, state, sequence, 0
//                 state 0: tokens of a sequence; 1: tokens past the last sequence (no others); 2: nothing to do;
//                 3: cu_seqlens are invalid, all tokens are NaN (start 0, length total)
//
// One workgroup. Each thread takes one sequence of a block of 256; a scan counts the tiles before it.
//
// variables: dtype (of cu), other_dtype
{{ input("cu", dtype, 1) }}
{{ input("other_cu", other_dtype, 1) }}
{{ output("tiles", "i32", 1) }}
{{ params("sequences: u32, total: i32, other_total: i32, longest: i32, other_longest: i32, tile: i32, entries: u32, cu_stride: u32, other_stride: u32") }}

var<workgroup> counts: array<i32, 256>;
var<workgroup> wrong: atomic<u32>;
var<workgroup> wrong_seen: u32;

fn write(entry: u32, start: i32, length: i32, other_start: i32, other_length: i32, tile: i32, state: i32, sequence: u32) {
    if (entry >= params.entries) { return; }
    let at = entry * 8u;
    store_tiles(at, start);
    store_tiles(at + 1u, length);
    store_tiles(at + 2u, other_start);
    store_tiles(at + 3u, other_length);
    store_tiles(at + 4u, tile);
    store_tiles(at + 5u, state);
    store_tiles(at + 6u, i32(sequence));
    store_tiles(at + 7u, 0);
}

@compute @workgroup_size(256)
fn main(@builtin(local_invocation_index) thread: u32) {
    // WGSL says that workgroup memory starts as zeros, but under wgpu it does not.
    if (thread == 0u) { atomicStore(&wrong, 0u); }
    workgroupBarrier();
    // Is every sequence valid?
    if (thread == 0u && (load_cu(0u) != 0 || load_other_cu(0u) != 0)) { atomicOr(&wrong, 1u); }
    for (var i = thread; i < params.sequences; i += 256u) {
        let start = load_cu(i * params.cu_stride);
        let stop = load_cu((i + 1u) * params.cu_stride);
        let other_start = load_other_cu(i * params.other_stride);
        let other_stop = load_other_cu((i + 1u) * params.other_stride);
        // Compared before they are subtracted: differences may wrap.
        let inside = start >= 0 && stop >= start && stop <= params.total
            && other_start >= 0 && other_stop >= other_start && other_stop <= params.other_total;
        if (!inside || stop - start > params.longest || other_stop - other_start > params.other_longest) {
            atomicOr(&wrong, 1u);
        }
    }
    workgroupBarrier();
    if (thread == 0u) { wrong_seen = atomicLoad(&wrong); }
    let bad = workgroupUniformLoad(&wrong_seen) != 0u;
    if (bad) {
        for (var entry = thread; entry < params.entries; entry += 256u) {
            let tile = i32(entry);
            write(entry, 0, params.total, 0, 0, tile, select(2, 3, tile * params.tile < params.total), 0u);
        }
        return;
    }
    var before = 0; // tiles of the sequences of earlier blocks
    for (var block = 0u; block < params.sequences; block += 256u) {
        let i = block + thread;
        var start = 0;
        var length = 0;
        var other_start = 0;
        var other_length = 0;
        if (i < params.sequences) {
            start = load_cu(i * params.cu_stride);
            length = load_cu((i + 1u) * params.cu_stride) - start;
            other_start = load_other_cu(i * params.other_stride);
            other_length = load_other_cu((i + 1u) * params.other_stride) - other_start;
        }
        let mine = (length + params.tile - 1) / params.tile;
        counts[thread] = mine;
        workgroupBarrier();
        for (var reach = 1u; reach < 256u; reach *= 2u) {
            var sum = counts[thread];
            if (thread >= reach) { sum += counts[thread - reach]; }
            workgroupBarrier();
            counts[thread] = sum;
            workgroupBarrier();
        }
        let first = before + counts[thread] - mine;
        for (var tile = 0; tile < mine; tile++) {
            write(u32(first + tile), start, length, other_start, other_length, tile, 0, i);
        }
        let block_tiles = workgroupUniformLoad(&counts[255]);
        before += block_tiles;
    }
    // Tokens past the last sequence, and entries with nothing to do.
    let used = load_cu(params.sequences * params.cu_stride);
    let rest = (params.total - used + params.tile - 1) / params.tile;
    for (var entry = u32(before) + thread; entry < params.entries; entry += 256u) {
        let tile = i32(entry) - before;
        write(entry, used, params.total - used, 0, 0, tile, select(2, 1, tile < rest), 0u);
    }
}
