// Does the driver's pack2x16float round a float32 to the nearest float16, and to an even one from the middle between two?
// result: how many of the numbers tried came out otherwise.
//
// Tried are all float16, every middle between neighbours and the float32 on both sides of each, with both signs and in
// both halves of a word; numbers too large, which shall become infinity, and too small; infinity and NaN, which shall stay.
{{ output("result", "u32", 1) }}
{{ params() }}

const INFINITE_HALF = 0x7c00u; // as bits; the sizes of numbers below are bits, too
const LEAST_NORMAL_HALF = 0x400u;
const INFINITE = 0x7f800000u;

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

fn packed(size: u32) -> u32 { return pack2x16float(vec2<f32>(bitcast<f32>(size), bitcast<f32>(size | 0x80000000u))); }

fn expect(size: u32, half_bits: u32) {
    if (packed(size) != (half_bits | ((half_bits | 0x8000u) << 16u))) { atomicAdd(&wrong, 1u); }
}

fn expect_nan(size: u32) {
    let word = packed(size);
    if ((word & 0x7fffu) <= INFINITE_HALF || ((word >> 16u) & 0x7fffu) <= INFINITE_HALF) { atomicAdd(&wrong, 1u); }
}

@compute @workgroup_size(256)
fn main(@builtin(local_invocation_index) thread: u32) {
    if (thread == 0u) { atomicStore(&wrong, 0u); }
    workgroupBarrier();
    for (var one = thread; one < INFINITE_HALF; one += 256u) {
        let middle = middle_above(one);
        expect(size_of(one), one);
        expect(size_of(one) + 1u, one);
        expect(middle - 1u, one);
        expect(middle, one + (one & 1u));
        expect(middle + 1u, one + 1u);
        expect(size_of(one + 1u) - 1u, one + 1u);
    }
    // Each thread tries one of the sizes below the least middle, one above 65536 and one NaN, far from those of the others.
    expect(middle_above(0u) / 256u * thread, 0u);
    expect(size_of(INFINITE_HALF) + (INFINITE - size_of(INFINITE_HALF)) / 255u * thread, INFINITE_HALF);
    expect(INFINITE - thread, INFINITE_HALF);
    expect_nan(INFINITE + 1u + 0x7fffu * thread);
    workgroupBarrier();
    if (thread == 0u) { store_result(0u, atomicLoad(&wrong)); }
}
