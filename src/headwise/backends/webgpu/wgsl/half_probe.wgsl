// Does the driver's pack2x16float round to nearest even? result: how many of the words tried are wrong.
//
// It tries all float16 numbers, the middle between each two neighbours, and the float32 numbers next to these; numbers that
// are too large, which become infinity, and too small; infinity and NaN, which stay. Each is tried in both halves of a word,
// next to itself and next to another number, with all signs of the two.
{{ output("result", "u32", 1) }}
{{ params() }}

const INFINITE_HALF = 0x7c00u; // as bits; the sizes of numbers below are bits, too
const LEAST_NORMAL_HALF = 0x400u;
const INFINITE = 0x7f800000u;

// First four kinds of numbers with one for each thread, then six kinds with one for each finite float16.
const THREADS = 256u;
const BEYOND = 4u * THREADS;
const TRIED = BEYOND + 6u * INFINITE_HALF;

struct Number {
    size: u32,
    half_bits: u32, // the expected result; any NaN stands for all
}

var<workgroup> wrong: atomic<u32>;

// Half of the unit in which a float16 of this size counts, times `halves`: below 2^-14 that is 2^-25.
fn size_of_small(halves: u32) -> u32 { return bitcast<u32>(f32(halves) * bitcast<f32>(0x33000000u)); }

// A float16 as float32; what would follow the largest one is 65536.
fn size_of(half_bits: u32) -> u32 {
    if (half_bits < LEAST_NORMAL_HALF) { return size_of_small(2u * half_bits); }
    return (half_bits << 13u) + 0x38000000u;
}

fn middle_above(half_bits: u32) -> u32 {
    if (half_bits < LEAST_NORMAL_HALF) { return size_of_small(2u * half_bits + 1u); }
    return size_of(half_bits) + 0x1000u;
}

fn near_half(kind: u32, half_bits: u32) -> Number {
    let middle = middle_above(half_bits);
    switch (kind) {
        case 0u: { return Number(size_of(half_bits), half_bits); }
        case 1u: { return Number(size_of(half_bits) + 1u, half_bits); }
        case 2u: { return Number(middle - 1u, half_bits); }
        case 3u: { return Number(middle, half_bits + (half_bits & 1u)); }
        case 4u: { return Number(middle + 1u, half_bits + 1u); }
        default: { return Number(size_of(half_bits + 1u) - 1u, half_bits + 1u); }
    }
}

// Numbers below the lowest middle; from 65536 on; infinity and the largest numbers below it; NaN.
fn beyond_halves(kind: u32, step: u32) -> Number {
    let too_large = size_of(INFINITE_HALF);
    switch (kind) {
        case 0u: { return Number(middle_above(0u) / THREADS * step, 0u); }
        case 1u: { return Number(too_large + (INFINITE - too_large) / (THREADS - 1u) * step, INFINITE_HALF); }
        case 2u: { return Number(INFINITE - step, INFINITE_HALF); }
        default: { return Number(INFINITE + 1u + 0x7fffu * step, INFINITE_HALF + 1u); }
    }
}

fn number(i: u32) -> Number {
    if (i < BEYOND) { return beyond_halves(i / THREADS, i % THREADS); }
    return near_half((i - BEYOND) / INFINITE_HALF, (i - BEYOND) % INFINITE_HALF);
}

fn packed(low: u32, high: u32) -> u32 { return pack2x16float(vec2<f32>(bitcast<f32>(low), bitcast<f32>(high))); }

// NaN may have other bits and lose its sign.
fn differs(half_bits: u32, expected: u32) -> bool {
    let nan = (half_bits & 0x7fffu) > INFINITE_HALF && (expected & 0x7fffu) > INFINITE_HALF;
    return half_bits != expected && !nan;
}

// How many of the words with these two are wrong, over all signs.
fn wrong_beside(low: Number, high: Number) -> u32 {
    var count = 0u;
    for (var signs = 0u; signs < 4u; signs++) {
        let low_sign = (signs & 1u) << 31u;
        let high_sign = (signs & 2u) << 30u;
        let word = packed(low.size | low_sign, high.size | high_sign);
        let expected = (low.half_bits | (low_sign >> 16u)) | (high.half_bits << 16u) | high_sign;
        if (word != expected) {
            count += u32(differs(word & 0xffffu, expected & 0xffffu) || differs(word >> 16u, expected >> 16u));
        }
    }
    return count;
}

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_index) thread: u32) {
    if (thread == 0u) { atomicStore(&wrong, 0u); }
    workgroupBarrier();
    var count = 0u;
    // From both ends: infinity and NaN are then next to large numbers that have to be rounded.
    for (var i = thread; i < TRIED / 2u; i += THREADS) {
        let one = number(i);
        let other = number(TRIED - 1u - i);
        count += wrong_beside(one, one) + wrong_beside(one, other);
        count += wrong_beside(other, one) + wrong_beside(other, other);
    }
    atomicAdd(&wrong, count);
    workgroupBarrier();
    if (thread == 0u) { store_result(0u, atomicLoad(&wrong)); }
}
