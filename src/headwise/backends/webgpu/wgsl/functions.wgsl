// Functions of one number for the pointwise kernels. WGSL promises little of its own: exp may be off by 3 + 2|x| units, sin by
// 2^-11, and what becomes of NaN is open. The polynomials are those of Cephes (Moshier), good to about one unit.
// `shaders.py` takes the functions that a kernel names, and those that they name; a template asks for one by `library(name)`.

fn is_nan(x: f32) -> bool { return (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u; }

fn is_inf(x: f32) -> bool { return (bitcast<u32>(x) & 0x7fffffffu) == 0x7f800000u; }

// As PyTorch makes bools of floats: all but zeros are true, and NaN is.
fn is_true(x: f32) -> bool { return (bitcast<u32>(x) & 0x7fffffffu) != 0u; }

// Compilers refuse constants that are not finite.
fn infinity() -> f32 { var bits = 0x7f800000u; return bitcast<f32>(bits); }

fn not_a_number() -> f32 { var bits = 0x7fc00000u; return bitcast<f32>(bits); }

fn is_minus(x: f32) -> bool { return (bitcast<u32>(x) >> 31u) == 1u; }

fn with_sign(size: f32, like: f32) -> f32 { return bitcast<f32>((bitcast<u32>(size) & 0x7fffffffu) | (bitcast<u32>(like) & 0x80000000u)); }

fn power_of_two(n: i32) -> f32 { return bitcast<f32>(bitcast<u32>(n + 127) << 23u); }

// (e^r - 1 - r) / r^2 for |r| < 0.35.
fn exp_polynomial(r: f32) -> f32 {
    var p = 1.9875691500e-4 * r + 1.3981999507e-3;
    p = p * r + 8.3334519073e-3;
    p = p * r + 4.1665795894e-2;
    p = p * r + 1.6666665459e-1;
    return p * r + 5.0000001201e-1;
}

fn exp_of(x: f32) -> f32 {
    if (is_nan(x)) { return x; }
    let a = clamp(x, -104.0, 89.0);
    let n = round(a * 1.4426950408889634);
    var r = a - n * 0.693359375;
    r = r + n * 2.12194440e-4;
    let y = exp_polynomial(r) * (r * r) + r + 1.0;
    let whole = i32(n);
    let half = whole / 2;
    return y * power_of_two(half) * power_of_two(whole - half);
}

// x = 2^e (1 + bits / 2^23), x > 0: the bits and e. Of subnormal numbers, too.
fn mantissa_and_exponent(x: f32) -> vec2<i32> {
    var bits = bitcast<u32>(x);
    var e = -127;
    if (bits < 0x800000u) {
        bits = bitcast<u32>(x * 8388608.0);
        e -= 23;
    }
    return vec2<i32>(i32(bits & 0x7fffffu), e + i32(bits >> 23u));
}

// log((1 + t) / (1 - t)) for |t| < 0.18.
fn log_of_ratio(t: f32) -> f32 {
    let z = t * t;
    return 2.0 * (t + t * z * (0.33333333 + z * (0.2 + z * (0.14285714 + z * (0.11111111 + z * 0.09090909)))));
}

fn log_of(x: f32) -> f32 {
    if (is_nan(x) || x < 0.0) { return not_a_number(); }
    if (x == 0.0) { return -infinity(); }
    if (is_inf(x)) { return x; }
    let split = mantissa_and_exponent(x);
    var e = split.y + 1;
    var m = bitcast<f32>(u32(split.x) | 0x3f000000u);
    if (m < 0.70710678) {
        e -= 1;
        m = m + m - 1.0;
    } else {
        m = m - 1.0;
    }
    let z = m * m;
    var p = 7.0376836292e-2 * m - 1.1514610310e-1;
    p = p * m + 1.1676998740e-1;
    p = p * m - 1.2420140846e-1;
    p = p * m + 1.4249322787e-1;
    p = p * m - 1.6668057665e-1;
    p = p * m + 2.0000714765e-1;
    p = p * m - 2.4999993993e-1;
    p = p * m + 3.3333331174e-1;
    let y = p * m * z - 2.12194440e-4 * f32(e) - 0.5 * z;
    return m + y + 0.693359375 * f32(e);
}

// No 1 + x - 1 here: compilers take it for x.
fn log1p_of(x: f32) -> f32 {
    if (is_nan(x)) { return x; }
    if (abs(x) > 0.3) { return log_of(1.0 + x); }
    return log_of_ratio(x / (2.0 + x));
}

fn expm1_of(x: f32) -> f32 {
    if (is_nan(x)) { return x; }
    if (abs(x) > 0.34) { return exp_of(x) - 1.0; }
    return exp_polynomial(x) * (x * x) + x;
}

fn tanh_of(x: f32) -> f32 {
    if (is_nan(x)) { return x; }
    let a = abs(x);
    if (a > 9.2) { return with_sign(1.0, x); }
    if (a >= 0.625) { return with_sign(1.0 - 2.0 / (exp_of(2.0 * a) + 1.0), x); }
    let z = x * x;
    var p = -5.70498872745e-3 * z + 2.06390887954e-2;
    p = p * z - 5.37397155531e-2;
    p = p * z + 1.33314422036e-1;
    p = p * z - 3.33332819422e-1;
    return p * z * x + x;
}

fn sinh_of(x: f32) -> f32 {
    if (is_nan(x)) { return x; }
    if (abs(x) > 1.0) {
        let e = exp_of(0.5 * abs(x));
        return with_sign(0.5 * e * e - 0.5 / e / e, x);
    }
    let z = x * x;
    return ((2.03721912945e-4 * z + 8.33028376239e-3) * z + 1.66667160211e-1) * z * x + x;
}

fn cosh_of(x: f32) -> f32 {
    let e = exp_of(0.5 * abs(x));
    return 0.5 * e * e + 0.5 / e / e;
}

struct Turn { rest: f32, quarter: i32 }

// Payne and Hanek's reduction: x = whole * 2^e, and of 2/π only the 96 bits matter that neither are whole turns times whole nor
// below what is kept. Words of 2/π after a word of zeros; for |x| from 128 on.
fn turn_of_any(x: f32) -> Turn {
    let bits = bitcast<u32>(x) & 0x7fffffffu;
    let whole = (bits & 0x7fffffu) | 0x800000u;
    var two_over_pi = array<u32, 8>(
        0u, 0xa2f9836eu, 0x4e441529u, 0xfc2757d1u, 0xf534ddc0u, 0xdb629599u, 0x3c439041u, 0xfe5163abu
    );
    let skipped = (bits >> 23u) - 120u;
    let first = skipped / 32u;
    let shift = skipped % 32u;
    var window: array<u32, 3>;
    for (var i = 0u; i < 3u; i++) {
        let after = (two_over_pi[first + i + 1u] >> 1u) >> (31u - shift);
        window[i] = (two_over_pi[first + i] << shift) | after;
    }
    // The lower 96 bits of the product: two of quarter turns, and the rest behind the point.
    let carry = upper(whole, window[2]);
    let middle = whole * window[1] + carry;
    let high = whole * window[0] + upper(whole, window[1]) + select(0u, 1u, middle < carry);
    var quarter = i32(high >> 30u);
    var part = vec2<u32>((middle << 2u) | ((whole * window[2]) >> 30u), (high << 2u) | (middle >> 30u));
    let over = long_is_minus(part); // more than half a quarter
    if (over) {
        quarter += 1;
        part = long_neg(part);
    }
    var scale = 1.5707963267948966 / 4294967296.0;
    if (part.y == 0u) {
        part = vec2<u32>(0u, part.x);
        scale /= 4294967296.0;
    }
    let zeros = countLeadingZeros(part.y);
    let digits = (part.y << zeros) | ((part.x >> 1u) >> (31u - zeros % 32u));
    let rest = f32(digits) * scale * power_of_two(-i32(zeros));
    let minus = is_minus(x);
    return Turn(select(rest, -rest, over != minus), select(quarter, -quarter, minus));
}

// The parts of π/2 have eleven bits and n has thirteen, so that their products are exact. They are whole numbers first: of
// n * a + n * b compilers make n * (a + b), which is rounded.
fn turn_of(x: f32) -> Turn {
    if (abs(x) > 12800.0) { return turn_of_any(x); }
    let n = i32(round(x * 0.6366197723675814));
    var r = x - f32(n * 1608) * power_of_two(-10);
    r = r - f32(n * 2029) * power_of_two(-22);
    r = r - f32(n * 1297) * power_of_two(-34);
    r = r - f32(n) * 2.563344151594519e-12;
    return Turn(r, n);
}

fn sine_of_part(y: f32) -> f32 {
    let z = y * y;
    return ((-1.9515295891e-4 * z + 8.3321608736e-3) * z - 1.6666654611e-1) * z * y + y;
}

fn cosine_of_part(y: f32) -> f32 {
    let z = y * y;
    return ((2.443315711809948e-5 * z - 1.388731625493765e-3) * z + 4.166664568298827e-2) * z * z - 0.5 * z + 1.0;
}

fn sin_of(x: f32) -> f32 {
    if (is_nan(x) || is_inf(x)) { return not_a_number(); }
    let t = turn_of(x);
    let y = select(sine_of_part(t.rest), cosine_of_part(t.rest), (t.quarter & 1) == 1);
    return select(y, -y, (t.quarter & 2) == 2);
}

fn cos_of(x: f32) -> f32 {
    if (is_nan(x) || is_inf(x)) { return not_a_number(); }
    let t = turn_of(x);
    let y = select(cosine_of_part(t.rest), sine_of_part(t.rest), (t.quarter & 1) == 1);
    return select(y, -y, ((t.quarter + 1) & 2) == 2);
}

fn atan_of(x: f32) -> f32 {
    if (is_nan(x)) { return x; }
    var a = abs(x);
    var y = 0.0;
    if (a > 2.414213562373095) {
        y = 1.5707963267948966;
        a = -1.0 / a;
    } else if (a > 0.4142135623730950) {
        y = 0.7853981633974483;
        a = (a - 1.0) / (a + 1.0);
    }
    let z = a * a;
    y += (((8.05374449538e-2 * z - 1.38776856032e-1) * z + 1.99777106478e-1) * z - 3.33329491539e-1) * z * a + a;
    return with_sign(y, x);
}

fn asin_of_part(x: f32, z: f32) -> f32 {
    return ((((4.2163199048e-2 * z + 2.4181311049e-2) * z + 4.5470025998e-2) * z + 7.4953002686e-2) * z + 1.6666752422e-1) * z * x + x;
}

fn asin_of(x: f32) -> f32 {
    let a = abs(x);
    if (is_nan(x) || a > 1.0) { return not_a_number(); }
    if (a <= 0.5) { return asin_of_part(x, x * x); }
    let z = 0.5 * (1.0 - a);
    return with_sign(1.5707963267948966 - 2.0 * asin_of_part(sqrt(z), z), x);
}

fn acos_of(x: f32) -> f32 {
    let a = abs(x);
    if (is_nan(x) || a > 1.0) { return not_a_number(); }
    if (a <= 0.5) { return 1.5707963267948966 - asin_of_part(x, x * x); }
    let z = 0.5 * (1.0 - a);
    let y = 2.0 * asin_of_part(sqrt(z), z);
    return select(y, 3.141592653589793 - y, x < 0.0);
}

fn asinh_of(x: f32) -> f32 {
    let a = abs(x);
    if (is_nan(x) || is_inf(x)) { return x; }
    if (a > 1e9) { return with_sign(log_of(a) + 0.6931471805599453, x); }
    return with_sign(log1p_of(a + a * a / (1.0 + sqrt(1.0 + a * a))), x);
}

fn acosh_of(x: f32) -> f32 {
    if (is_nan(x) || x < 1.0) { return not_a_number(); }
    if (x > 1e9) { return log_of(x) + 0.6931471805599453; }
    let t = x - 1.0;
    return log1p_of(t + sqrt(2.0 * t + t * t));
}

fn atanh_of(x: f32) -> f32 {
    let a = abs(x);
    if (is_nan(x) || a > 1.0) { return not_a_number(); }
    if (a == 1.0) { return with_sign(infinity(), x); }
    return with_sign(0.5 * log1p_of(2.0 * a / (1.0 - a)), x);
}

// The tail of the normal law beyond t >= 0, erfc(t / √2) / 2, over exp(-t² / 2): p(w) / (t + 3) with w = 1 - 6 / (t + 3), a
// least-squares fit on [0, 14.5], off by 5e-8. 1 + erf(x / √2), with its cancellation, would be off by a sixth at x = -5.
fn scaled_tail(t: f32) -> f32 {
    let v = 1.0 / (t + 3.0);
    let w = 1.0 - 6.0 * v;
    var p = -0.00026298913871869445 * w - 0.0008977542747743428;
    p = p * w + 0.0010747318156063557;
    p = p * w + 0.006920006591826677;
    p = p * w - 0.010480092838406563;
    p = p * w - 0.04725528508424759;
    p = p * w + 0.23001940548419952;
    p = p * w - 0.5093322992324829;
    p = p * w + 0.7290836572647095;
    return p * v;
}

// The distribution function of the normal law, and its density.
fn normal_distribution(x: f32) -> f32 {
    if (is_nan(x)) { return x; }
    let t = abs(x);
    if (t > 14.5) { return select(1.0, 0.0, x < 0.0); }
    let tail = exp_of(-0.5 * t * t) * scaled_tail(t);
    return select(1.0 - tail, tail, x < 0.0);
}

fn normal_density(x: f32) -> f32 { return exp_of(-0.5 * x * x) * 0.3989422804014327; }

fn erf_of(x: f32) -> f32 {
    if (is_nan(x)) { return x; }
    let a = abs(x);
    if (a > 4.0) { return with_sign(1.0, x); }
    if (a > 1.0) { return with_sign(1.0 - 2.0 * exp_of(-a * a) * scaled_tail(a * 1.4142135623730951), x); }
    let z = x * x;
    var p = 7.853861353153693e-5 * z - 8.010193625184903e-4;
    p = p * z + 5.188327685732524e-3;
    p = p * z - 2.685381193529856e-2;
    p = p * z + 1.128358514861418e-1;
    p = p * z - 3.761262582423300e-1;
    return x * (p * z + 1.128379165726710);
}

fn gelu_of(x: f32) -> f32 { return select(x * normal_distribution(x), 0.0, x < -14.5); }

fn gelu_slope(x: f32) -> f32 { return normal_distribution(x) + select(x * normal_density(x), 0.0, abs(x) > 14.5); }

// The exponential of a negative number does not overflow, and small results keep their digits.
fn sigmoid_of(x: f32) -> f32 {
    if (is_nan(x)) { return x; }
    let power = exp_of(-abs(x));
    let large = 1.0 / (1.0 + power);
    return select(large, power * large, x < 0.0);
}

fn sigmoid_slope(x: f32) -> f32 { return sigmoid_of(x) * sigmoid_of(-x); }

fn gelu_tanh_of(x: f32) -> f32 {
    return select(x * sigmoid_of(1.5957691216057308 * (x + 0.044715 * x * x * x)), 0.0, x < -20.0);
}

fn gelu_tanh_slope(x: f32) -> f32 {
    if (abs(x) > 20.0) { return select(0.0, 1.0, x > 0.0); }
    let u = 1.5957691216057308 * (x + 0.044715 * x * x * x);
    return sigmoid_of(u) + x * sigmoid_slope(u) * 1.5957691216057308 * (1.0 + 0.134145 * x * x);
}

fn silu_of(x: f32) -> f32 { return select(x * sigmoid_of(x), 0.0, x < -110.0); }

fn silu_slope(x: f32) -> f32 {
    if (x < -110.0) { return 0.0; }
    return sigmoid_of(x) + x * sigmoid_slope(x);
}

fn softplus_of(x: f32, beta: f32, threshold: f32) -> f32 {
    if (x * beta > threshold) { return x; }
    return log1p_of(exp_of(x * beta)) / beta;
}

fn log_sigmoid_of(x: f32) -> f32 { return min_of(x, 0.0) - log1p_of(exp_of(-abs(x))); }

fn max_of(a: f32, b: f32) -> f32 {
    if (is_nan(a)) { return a; }
    if (is_nan(b)) { return b; }
    return max(a, b);
}

fn min_of(a: f32, b: f32) -> f32 {
    if (is_nan(a)) { return a; }
    if (is_nan(b)) { return b; }
    return min(a, b);
}

fn sign_of(x: f32) -> f32 {
    if (is_nan(x)) { return 0.0; }
    return sign(x);
}

// NaN stays: of a comparison of floats alone a driver (NVIDIA's) makes a maximum, and a maximum loses it.
fn relu_of(x: f32) -> f32 { return select(x, 0.0, is_minus(x) && !is_nan(x)); }

fn trunc_div(a: f32, b: f32) -> f32 { return trunc(a / b); }

fn floor_div(a: f32, b: f32) -> f32 {
    if (b == 0.0 || is_nan(a) || is_nan(b)) { return a / b; }
    if (is_inf(a)) { return not_a_number(); }
    let rest = fmod_of(a, b);
    var whole = (a - rest) / b;
    if (rest != 0.0 && (rest < 0.0) != (b < 0.0)) { whole -= 1.0; }
    let low = floor(whole);
    return select(low, low + 1.0, whole - low > 0.5);
}

// Exact: subtracts b times powers of two, largest first.
fn fmod_of(a: f32, b: f32) -> f32 {
    if (b == 0.0 || is_nan(a) || is_nan(b) || is_inf(a)) { return not_a_number(); }
    let size = abs(b);
    var rest = abs(a);
    if (is_inf(b) || rest < size) { return a; }
    let steps = i32(bitcast<u32>(rest) >> 23u) - i32(bitcast<u32>(size) >> 23u);
    for (var i = steps; i >= 0; i--) {
        let scaled = size * power_of_two(min(i, 127)) * power_of_two(max(i - 127, 0));
        if (rest >= scaled) { rest -= scaled; }
    }
    return with_sign(rest, a);
}

fn remainder_of(a: f32, b: f32) -> f32 {
    let rest = fmod_of(a, b);
    return select(rest, rest + b, rest != 0.0 && (rest < 0.0) != (b < 0.0));
}

fn whole_power(x: f32, n: i32) -> f32 {
    var left = abs(n);
    var square = x;
    var y = 1.0;
    while (left > 0) {
        if ((left & 1) == 1) { y *= square; }
        square *= square;
        left = left >> 1u;
    }
    return select(y, 1.0 / y, n < 0);
}

// x^y for x >= 0, as 2^(y e) times 2^(y log2 m), x = m 2^e: of the exponent, only the part of m is rounded.
fn power_of_size(x: f32, y: f32) -> f32 {
    if (x == 0.0) { return select(select(infinity(), 0.0, y > 0.0), 1.0, y == 0.0); }
    if (is_inf(x)) { return select(select(0.0, x, y > 0.0), 1.0, y == 0.0); }
    if (is_inf(y)) { return select(select(0.0, infinity(), (x > 1.0) == (y > 0.0)), 1.0, x == 1.0); }
    let split = mantissa_and_exponent(x);
    var e = split.y;
    var m = bitcast<f32>(u32(split.x) | 0x3f800000u);
    if (m > 1.4142135) {
        m *= 0.5;
        e += 1;
    }
    let part = log_of_ratio((m - 1.0) / (m + 1.0));
    let product = y * f32(e);
    if (abs(product) > 400.0) { return select(0.0, infinity(), product > 0.0); }
    let n = round(product);
    let rest = fma(y, f32(e), -n) * 0.6931471805599453 + y * part;
    let power = exp_of(rest);
    let whole = i32(n);
    return power * power_of_two(whole / 4) * power_of_two(whole / 4) * power_of_two(whole / 4) * power_of_two(whole - whole / 4 * 3);
}

fn pow_of(x: f32, y: f32) -> f32 {
    if (y == 0.0 || x == 1.0) { return 1.0; }
    if (is_nan(x) || is_nan(y)) { return not_a_number(); }
    let whole = y == floor(y);
    if (whole && abs(y) <= 32.0) { return whole_power(x, i32(y)); }
    let size = power_of_size(abs(x), y);
    if (!is_minus(x)) { return size; }
    let odd = whole && abs(y) < 16777216.0 && (i32(abs(y)) & 1) == 1;
    if (!whole && !is_inf(x) && x != 0.0) { return not_a_number(); }
    return select(size, -size, odd);
}

fn atan2_of(y: f32, x: f32) -> f32 {
    if (is_nan(x) || is_nan(y)) { return not_a_number(); }
    if (is_inf(x) && is_inf(y)) { return with_sign(select(0.7853981633974483, 2.356194490192345, x < 0.0), y); }
    if (x == 0.0 && y == 0.0) { return with_sign(select(0.0, 3.141592653589793, is_minus(x)), y); }
    if (x == 0.0) { return with_sign(1.5707963267948966, y); }
    let a = atan_of(abs(y / x));
    return with_sign(select(a, 3.141592653589793 - a, x < 0.0), y);
}
