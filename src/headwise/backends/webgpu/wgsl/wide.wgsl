// float64 by its bits: what a gradient scaler does with one number (x.double().reciprocal().float()). Rounded to nearest even.
//
//   op "widened": y = x, float32 to float64; "narrowed": float64 to float32; "inverse": 1 / x, float64
//
// A float64 is two words, the lower one first: 52 bits of mantissa, 11 of exponent, the sign.
//
// variables: op
{{ input("x", "f32" if op == "widened" else "u64", 1) }}
{{ output("y", "f32" if op == "narrowed" else "u64", 1) }}
{{ params("count: u32") }}

{% if op == "widened" %}
fn result(number: f32) -> vec2<u32> {
    let bits = bitcast<u32>(number);
    var exponent = (bits >> 23u) & 0xffu;
    var mantissa = bits & 0x7fffffu;
    if (exponent == 0xffu) {
        exponent = 2047u;
    } else if (exponent != 0u) {
        exponent += 896u;
    } else if (mantissa != 0u) {
        let shift = countLeadingZeros(mantissa) - 8u;
        mantissa = (mantissa << shift) & 0x7fffffu;
        exponent = 897u - shift;
    }
    return vec2<u32>(mantissa << 29u, (bits & 0x80000000u) | (exponent << 20u) | (mantissa >> 3u));
}
{% elif op == "narrowed" %}
fn result(x: vec2<u32>) -> f32 {
    let minus = x.y & 0x80000000u;
    let exponent = i32((x.y >> 20u) & 2047u) - 896;
    let mantissa = ((x.y & 0xfffffu) << 3u) | (x.x >> 29u);
    let rest = x.x & 0x1fffffffu;
    if (exponent == 1151) {
        var special = 0x7f800000u;
        if (mantissa != 0u || rest != 0u) { special = 0x7fc00000u; }
        return bitcast<f32>(minus | special);
    }
    if (exponent >= 255) {
        var most = 0x7f800000u;
        return bitcast<f32>(minus | most);
    }
    if (exponent < -23) { return bitcast<f32>(minus); }
    if (exponent >= 1) {
        let kept = (u32(exponent) << 23u) | mantissa;
        let up = rest > 0x10000000u || (rest == 0x10000000u && (kept & 1u) == 1u);
        return bitcast<f32>(minus | (kept + select(0u, 1u, up)));
    }
    // Below the smallest normal number.
    let shift = u32(1 - exponent);
    let whole = mantissa | 0x800000u;
    let kept = whole >> shift;
    let lost = whole & ((1u << shift) - 1u);
    let half = 1u << (shift - 1u);
    let up = lost > half || (lost == half && (rest != 0u || (kept & 1u) == 1u));
    return bitcast<f32>(minus | (kept + select(0u, 1u, up)));
}
{% else %}
fn doubled(x: vec2<u32>) -> vec2<u32> { return vec2<u32>(x.x << 1u, (x.y << 1u) | (x.x >> 31u)); }

fn less(a: vec2<u32>, b: vec2<u32>) -> bool { return a.y < b.y || (a.y == b.y && a.x < b.x); }

fn without(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> { return vec2<u32>(a.x - b.x, a.y - b.y - select(0u, 1u, a.x < b.x)); }

fn result(x: vec2<u32>) -> vec2<u32> {
    let minus = x.y & 0x80000000u;
    var exponent = i32((x.y >> 20u) & 2047u);
    var mantissa = vec2<u32>(x.x, x.y & 0xfffffu);
    let blank = mantissa.x == 0u && mantissa.y == 0u;
    if (exponent == 2047) { return select(vec2<u32>(0u, 0x7ff80000u), vec2<u32>(0u, minus), blank); }
    if (exponent == 0) {
        if (blank) { return vec2<u32>(0u, minus | 0x7ff00000u); }
        exponent = 1;
        while ((mantissa.y & 0x100000u) == 0u) {
            mantissa = doubled(mantissa);
            exponent--;
        }
    }
    mantissa.y |= 0x100000u;
    // 2^106 / mantissa, bit by bit: 54 bits of it, one more than are kept, and whether something is left.
    var quotient = vec2<u32>(1u, 0u);
    var left = without(vec2<u32>(0u, 0x200000u), mantissa);
    var target_exponent = 2045 - exponent;
    if (mantissa.x == 0u && mantissa.y == 0x100000u) {
        left = vec2<u32>(0u);
        target_exponent++;
    }
    for (var bit = 0; bit < 53; bit++) {
        left = doubled(left);
        quotient = doubled(quotient);
        if (!less(left, mantissa)) {
            left = without(left, mantissa);
            quotient.x |= 1u;
        }
    }
    if (target_exponent >= 2047) { return vec2<u32>(0u, minus | 0x7ff00000u); }
    // Below the smallest normal number a bit or two more are dropped.
    let dropped = u32(max(1, 2 - target_exponent));
    let lost = quotient.x & ((1u << dropped) - 1u);
    let half = 1u << (dropped - 1u);
    var kept = vec2<u32>((quotient.x >> dropped) | (quotient.y << (32u - dropped)), quotient.y >> dropped);
    if (lost > half || (lost == half && (left.x != 0u || left.y != 0u || (kept.x & 1u) == 1u))) {
        kept.x++;
        kept.y += select(0u, 1u, kept.x == 0u);
    }
    // The leading bit of a normal number adds one to the exponent below it.
    return vec2<u32>(kept.x, minus | (kept.y + (u32(max(target_exponent - 1, 0)) << 20u)));
}
{% endif %}

@compute @workgroup_size(256) {{ main() }}
    let i = workgroup * 256u + thread;
    if (i < params.count) { store_y(i, result(load_x(i))); }
}
