// Functions of whole numbers for the pointwise kernels, part of the library of `functions.wgsl`.

fn int_power(x: i32, n: i32) -> i32 {
    if (n < 0) { return select(0, select(1, -1, x == -1 && (n & 1) == 1), abs(x) == 1); }
    var left = n;
    var square = x;
    var y = 1;
    while (left > 0) {
        if ((left & 1) == 1) { y *= square; }
        square *= square;
        left = left >> 1u;
    }
    return y;
}

fn int_floor_div(a: i32, b: i32) -> i32 {
    if (b == 0) { return 0; }
    let whole = a / b;
    return select(whole, whole - 1, whole * b != a && (a < 0) != (b < 0));
}

fn int_trunc_div(a: i32, b: i32) -> i32 { return select(a / select(b, 1, b == 0), 0, b == 0); }

fn int_fmod(a: i32, b: i32) -> i32 { return a - int_trunc_div(a, b) * b; }

fn int_remainder(a: i32, b: i32) -> i32 { return a - int_floor_div(a, b) * b; }

// Whole numbers of 64 bits, as two words, the lower one first.

fn long_of(x: i32) -> vec2<u32> { return vec2<u32>(bitcast<u32>(x), bitcast<u32>(x >> 31u)); }

fn long_is_minus(a: vec2<u32>) -> bool { return (a.y >> 31u) == 1u; }

fn long_add(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    let low = a.x + b.x;
    return vec2<u32>(low, a.y + b.y + select(0u, 1u, low < a.x));
}

fn long_neg(a: vec2<u32>) -> vec2<u32> { return long_add(~a, vec2<u32>(1u, 0u)); }

fn long_sub(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> { return long_add(a, long_neg(b)); }

fn long_abs(a: vec2<u32>) -> vec2<u32> { return select(a, long_neg(a), long_is_minus(a)); }

// The upper word of a product of two words: WGSL has only the lower one.
fn upper(a: u32, b: u32) -> u32 {
    let a0 = a & 0xffffu;
    let a1 = a >> 16u;
    let b0 = b & 0xffffu;
    let b1 = b >> 16u;
    let middle = a1 * b0 + ((a0 * b0) >> 16u);
    return a1 * b1 + (middle >> 16u) + ((a0 * b1 + (middle & 0xffffu)) >> 16u);
}

fn long_mul(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> { return vec2<u32>(a.x * b.x, upper(a.x, b.x) + a.x * b.y + a.y * b.x); }

fn long_less(a: vec2<u32>, b: vec2<u32>) -> bool {
    return select(bitcast<i32>(a.y) < bitcast<i32>(b.y), a.x < b.x, a.y == b.y);
}

fn long_min(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> { return select(b, a, long_less(a, b)); }

fn long_max(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> { return select(a, b, long_less(a, b)); }

fn long_not_less(a: vec2<u32>, b: vec2<u32>) -> bool { return select(a.y > b.y, a.x >= b.x, a.y == b.y); }

fn long_trunc_div(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    if (all(b == vec2<u32>(0u))) { return vec2<u32>(0u); }
    let size = long_abs(b);
    let whom = long_abs(a);
    var rest = vec2<u32>(0u);
    var whole = vec2<u32>(0u);
    for (var i = 63u; i < 64u; i--) {
        let bit = select((whom.x >> (i & 31u)) & 1u, (whom.y >> (i & 31u)) & 1u, i > 31u);
        rest = vec2<u32>((rest.x << 1u) | bit, (rest.y << 1u) | (rest.x >> 31u));
        whole = vec2<u32>(whole.x << 1u, (whole.y << 1u) | (whole.x >> 31u));
        if (long_not_less(rest, size)) {
            rest = long_sub(rest, size);
            whole.x |= 1u;
        }
    }
    return select(whole, long_neg(whole), long_is_minus(a) != long_is_minus(b));
}

fn long_floor_div(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    let whole = long_trunc_div(a, b);
    let exact = all(long_mul(whole, b) == a);
    return select(long_sub(whole, vec2<u32>(1u, 0u)), whole, exact || long_is_minus(a) == long_is_minus(b));
}

fn long_fmod(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> { return long_sub(a, long_mul(long_trunc_div(a, b), b)); }

fn long_remainder(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> { return long_sub(a, long_mul(long_floor_div(a, b), b)); }

fn long_power(x: vec2<u32>, n: vec2<u32>) -> vec2<u32> {
    let odd = (n.x & 1u) == 1u;
    if (long_is_minus(n)) {
        let one = vec2<u32>(1u, 0u);
        return select(select(vec2<u32>(0u), one, all(x == one)), select(one, x, odd), all(x == vec2<u32>(0xffffffffu)));
    }
    var left = n;
    var square = x;
    var y = vec2<u32>(1u, 0u);
    while (any(left != vec2<u32>(0u))) {
        if ((left.x & 1u) == 1u) { y = long_mul(y, square); }
        square = long_mul(square, square);
        left = vec2<u32>((left.x >> 1u) | (left.y << 31u), left.y >> 1u);
    }
    return y;
}

fn long_left(a: vec2<u32>, by: vec2<u32>) -> vec2<u32> {
    if (by.y != 0u || by.x >= 64u) { return vec2<u32>(0u); }
    if (by.x >= 32u) { return vec2<u32>(0u, a.x << (by.x - 32u)); }
    if (by.x == 0u) { return a; }
    return vec2<u32>(a.x << by.x, (a.y << by.x) | (a.x >> (32u - by.x)));
}

fn long_right(a: vec2<u32>, by: vec2<u32>) -> vec2<u32> {
    let high = bitcast<i32>(a.y);
    let sign = bitcast<u32>(high >> 31u);
    if (by.y != 0u || by.x >= 64u) { return vec2<u32>(sign); }
    if (by.x >= 32u) { return vec2<u32>(bitcast<u32>(high >> (by.x - 32u)), sign); }
    if (by.x == 0u) { return a; }
    return vec2<u32>((a.x >> by.x) | (a.y << (32u - by.x)), bitcast<u32>(high >> by.x));
}

fn int_left(a: i32, by: i32) -> i32 {
    if (by < 0 || by > 31) { return 0; }
    return a << u32(by);
}

fn int_right(a: i32, by: i32) -> i32 {
    if (by < 0 || by > 31) { return a >> 31u; }
    return a >> u32(by);
}

fn long_sign(a: vec2<u32>) -> vec2<u32> {
    if (all(a == vec2<u32>(0u))) { return a; }
    return select(vec2<u32>(1u, 0u), vec2<u32>(0xffffffffu), long_is_minus(a));
}

// Rounded once, to nearest even: the first 24 digits, and what is behind them.
fn float_of_long(a: vec2<u32>) -> f32 {
    var size = long_abs(a);
    var scale = 1.0;
    if (size.y != 0u) {
        let zeros = countLeadingZeros(size.y);
        let behind = size.x << zeros;
        size.x = (size.y << zeros) | ((size.x >> 1u) >> (31u - zeros)) | select(0u, 1u, behind != 0u);
        scale = power_of_two(32 - i32(zeros));
    }
    if (size.x >= 0x1000000u) {
        let drop = 8u - countLeadingZeros(size.x);
        let half = 1u << (drop - 1u);
        let lost = size.x & (2u * half - 1u);
        let kept = size.x >> drop;
        size.x = (kept + select(0u, 1u, lost > half || (lost == half && (kept & 1u) == 1u))) << drop;
        // All digits but the first 24 are zeros, but for the one that a carry leads to.
        if (size.x == 0u) { size.x = 1u; scale *= 4294967296.0; }
    }
    let y = f32(size.x) * scale;
    return select(y, -y, long_is_minus(a));
}

fn long_of_float(x: f32) -> vec2<u32> {
    let size = trunc(abs(x));
    let high = floor(size / 4294967296.0);
    let y = vec2<u32>(u32(size - high * 4294967296.0), u32(high));
    return select(y, long_neg(y), x < 0.0);
}
