// Cross entropy of rows of logits and target classes: losses, or the gradient of the logits, or both at once.
//
//   logits   (rows, width): all classes, or in a backward `width` of them from `first_class` on; targets (rows)
//   row_grads (rows): the gradient of each row's loss; with `tilted` four numbers: that, those of log-probability and entropy,
//                     and the entropy itself
//   losses   (rows)       (1 - a) (lse - z_t) + a (lse - mean z) + b lse²      z = c tanh(x / c), or x
//                         times token_weights (rows), where `weighted`
//   stats    (rows, 2)    a reference r, the highest z or near it; total of exp(z - r)
//   logprobs (rows) z_t - lse, entropies (rows) lse - Σ p z: where asked for
//   dlogits  (rows, width)    (exp(z - lse) (1 + 2 b lse) - a / width - (1 - a) [column = t]) (1 - (z / c)²) · row_grad
//
// With a = label_smoothing (Szegedy et al. 2015), b = z_loss (Chowdhery et al. 2022), c = softcap (Gemma 2, 2024). Reference
// and total are stored instead of lse: at an lse of 100 its rounding would cost the gradient two digits.
//
// A row is read into registers whole, or walked: forwards for its statistics, the last part kept, then backwards for the
// gradient, so that the second read hits the cache. A workgroup that works on one row at a time may take several, `groups`
// apart: it loads the next one while it writes the gradient of this one. A row whose target is ignored is 0 throughout, and
// such a workgroup does not read it; a target out of range makes its row NaN. How rows map to threads: rows.wgsl.
//
// variables: targets (their dtype), forward, gradient (what is written), cap, smooth (is there a softcap, a label smoothing?),
// weighted, logprobs, entropy, tilted (see above; the last two not with `sampled`), turns (does a workgroup take several rows, one at a time?), sampled (are references the maximum of few values? see `fold`),
// and those of rows.wgsl
{% import "rows.wgsl" as rows with context %}
{% set alone = lanes == threads %}{# a workgroup works on one row at a time #}
{{ rows.read("logits") }}
{{ input("targets", "u64" if targets == "i64" else "i32", 1) }}
{% if gradient %}
{{ input("row_grads", "f32", 4 if tilted else 1) }}
{% endif %}
{% if forward %}
{% if weighted %}
{{ input("token_weights", weighted, 1) }}
{% endif %}
{{ output("losses", "f32", 1) }}
{{ output("stats", "f32", 2) }}
{% if logprobs %}
{{ output("logprobs", "f32", 1) }}
{% endif %}
{% if entropy %}
{{ output("entropies", "f32", 1) }}
{% endif %}
{% else %}
{{ input("stats", "f32", 2) }}
{% endif %}
{% if gradient %}
{{ rows.write("dlogits") }}
{% endif %}
{{ params(rows.fields("logits") ~ ", groups: u32, grad_stride: u32, classes: u32, first_class: u32, ignored_low: u32, ignored_high: u32, smoothing: f32, z_loss: f32, softcap: f32") }}
{{ rows.places() }}
{{ rows.reader("logits") }}
{% if gradient %}
{{ rows.writer("dlogits") }}
{% endif %}
{{ rows.softmax(exact=cap or sampled) }}
{% if forward and (smooth or entropy) %}
fn add(a: f32, b: f32) -> f32 { return a + b; }
{{ rows.reduction("row_sum", "f32", "add") }}
{% endif %}
{% if entropy or tilted %}
// z less a reference. What is farther away weighs nothing, and -inf would make 0 · inf of it.
const FARTHEST = -1e4;
fn differences(z: vec4<f32>, reference: f32) -> vec4<f32> { return max(z - reference, vec4<f32>(FARTHEST)); }
{% endif %}

// A target as 64 bits, low word first.
fn target_words(row: u32) -> vec2<u32> {
{% if targets == "i64" %}
    return load_targets(row);
{% else %}
    let target_class = load_targets(row);
    return vec2<u32>(bitcast<u32>(target_class), bitcast<u32>(target_class >> 31u));
{% endif %}
}

fn is_ignored(words: vec2<u32>) -> bool { return words.x == params.ignored_low && words.y == params.ignored_high; }

{% if cap %}
// c · tanh(x / c), from exp(-2|u|), which cannot overflow; for small u a polynomial, which is more precise.
fn capped(x: vec4<f32>) -> vec4<f32> {
    let u = x / params.softcap;
    let size = abs(u);
    let e = exp2(size * (-2.0 * LOG2E));
    let squared = u * u;
    let small = size * (1.0 + squared * (-0.33333333 + squared * (0.13333333 + squared * (-0.053968254 + squared * 0.021869489))));
    let t = select((1.0 - e) / (1.0 + e), small, size < vec4<f32>(0.25));
    return params.softcap * select(t, -t, u < vec4<f32>(0.0));
}
{% else %}
fn capped(x: vec4<f32>) -> vec4<f32> { return x; }
{% endif %}

{% if gradient %}
// The gradient, less `away`, of four logits of a row.
fn slope(logits: Raw, reference: f32, factor: {{ "vec2<f32>" if tilted else "f32" }}, away: vec4<f32>) -> vec4<f32> {
    let z = capped(values_of(logits));
{% if tilted %}
    let d = (factor.x - factor.y * differences(z, reference)) * powers(z, reference) - away;
{% else %}
    let d = factor * powers(z, reference) - away;
{% endif %}
{% if cap %}
    let t = z / params.softcap;
    return d * (1.0 - t * t);
{% else %}
    return d;
{% endif %}
}
{% endif %}

{% if entropy %}
// The sum of exp(z - r) (z - r) of values with reference and total `state`, for another reference.
fn moved(state: vec2<f32>, spread: f32, reference: f32) -> f32 {
    return exp2((state.x - reference) * LOG2E) * (spread + state.y * max(state.x - reference, FARTHEST));
}

{% endif %}
{% if sampled %}
// If the powers of a thread sum to more than this, its reference is too low: exponents below 16 are exact enough.
const MOST = 65536.0;

{% endif %}
{# z{k}, the values of the vector in registers k. #}
{% macro value(chunk, k) %}
    let inside{{ k }} = inside(row, {{ chunk }} + {{ k }}u, lane);
    let z{{ k }} = select(vec4<f32>(nothing), capped(values_of(logits{{ k }})), inside{{ k }});
{% if smooth %}
    plain += sum_of(select(vec4<f32>(0.0), z{{ k }}, inside{{ k }}));
{% endif %}
{% endmacro %}
{# The same as `again`, for a `k` that is no constant, from memory: the registers may hold the next part already. #}
{% macro value_again(chunk) %}
            let again = select(vec4<f32>(nothing), values_of(raw_logits(row, {{ chunk }} + k, lane)), inside(row, {{ chunk }} + k, lane));
{% endmacro %}
{#
  Adds a part of a row to `state`. To find the highest value first, a thread would have to keep all values unpacked, in so
  many registers that few threads fit. So with 16 bits the reference is the highest of two vectors of a thread and its
  neighbours: it only needs to be near the highest value. In the rare part where it is not, the powers are computed again.
#}
{% macro fold(chunk, ahead) %}
{% if sampled %}
{% set sample = [held, 2] | min %}
{% for k in range(sample) %}
{{ value(chunk, k) }}
{% endfor %}
    var reference = max(state.x, {{ "max(highest_of(z0), highest_of(z1))" if sample == 2 else "highest_of(z0)" }});
{% for reach in (1, 2, 4, 8, 16, 32, 64) if subgroup and reach < [lanes, subgroup] | min %}
    reference = max(reference, subgroupShuffleXor(reference, {{ reach }}u));
{% endfor %}
    var more = 0.0;
{% for k in range(held) %}
{% if k >= sample %}
{{ value(chunk, k) }}
{% endif %}
    more += sum_of(powers(z{{ k }}, reference));
{{ rows.refill(["logits"], k, ahead) }}
{% endfor %}
    state = vec2<f32>(reference, state.y * exp2((state.x - reference) * LOG2E));
    if (!(more <= MOST)) {
        var higher = reference;
        for (var k = 0u; k < {{ held }}u; k++) {
{{ value_again(chunk) }}
            higher = max(higher, highest_of(again));
        }
        more = 0.0;
        for (var k = 0u; k < {{ held }}u; k++) {
{{ value_again(chunk) }}
            more += sum_of(powers(again, higher));
        }
        state = vec2<f32>(higher, state.y * exp2((state.x - higher) * LOG2E));
    }
    state.y += more;
{% else %}
{% for k in range(held) %}
{{ value(chunk, k) }}
{% endfor %}
{% if entropy %}
    let before = state;
{% endif %}
{{ rows.fold_softmax("logits", ahead) }}
{% if entropy %}
    spread = moved(before, spread, state.x);
{% for k in range(held) %}
    spread += sum_of(powers(z{{ k }}, state.x) * differences(z{{ k }}, state.x)) * unit(state.x);
{% endfor %}
{% endif %}
{% endif %}
{% endmacro %}

{% macro finish(chunk, ahead, write) %}
    if (there) {
{% for k in range(held) %}
{% if aligned %}
        let d{{ k }} = slope(logits{{ k }}, stat.x, factor, vec4<f32>(at_all));
{% else %}
        let hit{{ k }} = columns_of(row, {{ chunk }} + {{ k }}u, lane) == vec4<i32>(i32(target_class));
        let away{{ k }} = at_all + select(vec4<f32>(0.0), vec4<f32>(at_one), vec4<bool>(here) & hit{{ k }});
        let d{{ k }} = slope(logits{{ k }}, stat.x, factor, away{{ k }});
{% endif %}
        {{ write }}_dlogits(row, {{ chunk }} + {{ k }}u, lane, {{ "d%d" % k if alone else "select(d%d, vec4<f32>(0.0), ignored)" % k }});
{{ rows.refill(["logits"], k, ahead) }}
{% endfor %}
    }
{% endmacro %}

{# All that is done with a row; its first part (its last one, where only the gradient is wanted) is in registers. #}
{% macro work(ahead) %}
    let known = words.y == 0u && words.x < params.classes;
    let outside = !known && !ignored;
    // Among the classes that are here; wrapped around where it comes before them.
    let column_of_target = words.x - params.first_class;
    let here = known && column_of_target < params.width;
    let target_class = select(0u, column_of_target, here);
{% if aligned %}
    // The vector of the target, and the thread that has it.
    let target_chunk = target_class / {{ 4 * lanes }}u;
    let target_lane = target_class / 4u % {{ lanes }}u;
    let target_logits = raw_logits(row, target_chunk, target_lane);
{% endif %}
{% if forward %}
    let nothing = negative_infinity();
    var state = vec2<f32>(LOWEST, 0.0);
{% if smooth %}
    var plain = 0.0;
{% endif %}
{% if entropy %}
    var spread = 0.0;
{% endif %}
{{ rows.forwards(fold, "" if gradient else ahead) }}
    let stat = row_softmax(state, thread);
{% if smooth %}
    let mean = row_sum(plain, thread) / f32(params.width);
{% endif %}
{% if entropy %}
    let of_row = row_sum(moved(state, spread, stat.x), thread);
{% endif %}
    if (there && lane == 0u) {
        let log_total = log(stat.y);
{% if aligned %}
        let at_target = capped(values_of(target_logits))[target_class % 4u];
{% else %}
        let at_target = capped(vec4<f32>(load_logits(row * params.logits_stride + target_class))).x;
{% endif %}
        var of_target = log_total + (stat.x - at_target);
{% if sampled %}
        // If the reference is low, both terms are large and would cancel: the logarithm of a quotient is more precise.
        if (abs(stat.x - at_target) < 40.0) { of_target = log(stat.y / powers(vec4<f32>(at_target), stat.x).x); }
{% endif %}
        var loss = {{ "(1.0 - params.smoothing) * " if smooth }}of_target;
{% if smooth %}
        loss += params.smoothing * (log_total + (stat.x - mean));
{% endif %}
        let lse = stat.x + log_total;
        loss += params.z_loss * lse * lse;
{% if weighted %}
        loss *= load_token_weights(row);
{% endif %}
        store_losses(row, select(select(loss, not_a_number(), outside), 0.0, ignored));
        store_stats(row, stat);
{% if logprobs %}
        store_logprobs(row, select(select(-of_target, not_a_number(), outside), 0.0, ignored));
{% endif %}
{% if entropy %}
        store_entropies(row, select(select(log_total - of_row / stat.y, not_a_number(), outside), 0.0, ignored));
{% endif %}
    }
{% else %}
    let stat = load_stats(row);
{% endif %}
{% if gradient %}
{% if tilted %}
    let grads = select(load_row_grads(row), vec4<f32>(not_a_number()), outside);
    let grad = grads.x;
    let log_of_total = log(stat.y);
    let straight = grad * (1.0 + 2.0 * params.z_loss * (stat.x + log_of_total)) - grads.y - grads.z * (grads.w - log_of_total);
    let factor = vec2<f32>(straight, grads.z) * unit(stat.x) / stat.y;
    let at_one = grad{{ " * (1.0 - params.smoothing)" if smooth }} - grads.y;
{% else %}
    let grad = select(load_row_grads(row * params.grad_stride), not_a_number(), outside);
    let factor = grad * unit(stat.x) / stat.y * (1.0 + 2.0 * params.z_loss * (stat.x + log(stat.y)));
    let at_one = grad{{ " * (1.0 - params.smoothing)" if smooth }};
{% endif %}
{% if smooth %}
    let at_all = grad * params.smoothing / f32(params.classes);
{% else %}
    let at_all = 0.0;
{% endif %}
{{ rows.backwards(finish, "is_finite(factor.x)" if tilted else "is_finite(factor)", ahead) }}
{% if aligned %}
    // One thread rewrites the vector of the target: cheaper than a test in every thread and vector.
    if (there && !ignored && here && lane == target_lane) {
        let hit = vec4<u32>(target_class % 4u) == vec4<u32>(0u, 1u, 2u, 3u);
        let away = at_all + select(vec4<f32>(0.0), vec4<f32>(at_one), hit);
        write_dlogits(row, target_chunk, lane, slope(target_logits, stat.x, factor, away));
    }
{% endif %}
{% endif %}
{% endmacro %}

{% set begin = "0u" if forward else "(params.blocks - 1u) * %du" % held %}{# the part of a row that is worked on first #}
{% set ahead = "next_row, " ~ begin if turns else "" %}
@compute @workgroup_size({{ threads }}) {{ main() }}
{% if alone %}
    let lane = thread;
    let there = true;
    let ignored = false;
    let first_row = workgroup;
    if (first_row >= params.groups) { return; }
{% for k in range(held) %}
    var logits{{ k }}: Raw;
{% endfor %}
    if (!is_ignored(target_words(first_row))) {
{% for k in range(held) %}
{{ rows.refill(["logits"], k, "first_row, " ~ begin) }}
{% endfor %}
    }
    for (var row = first_row; row < params.rows; row += params.groups) {
        let words = target_words(row);
{% if turns %}
        let next_row = row + params.groups;
        let goes_on = next_row < params.rows && !is_ignored(target_words(min(next_row, params.rows - 1u)));
{% endif %}
        if (is_ignored(words)) {
{% if forward %}
            if (thread == 0u) {
                store_losses(row, 0.0);
                store_stats(row, vec2<f32>(0.0));
{% if logprobs %}
                store_logprobs(row, 0.0);
{% endif %}
{% if entropy %}
                store_entropies(row, 0.0);
{% endif %}
            }
{% endif %}
{% if gradient %}
            for (var chunk = 0u; chunk < params.blocks * {{ held }}u; chunk++) { write_dlogits(row, chunk, lane, vec4<f32>(0.0)); }
{% endif %}
{% for k in range(held) %}
{{ rows.refill(["logits"], k, ahead) }}
{% endfor %}
        } else {
{{ work(ahead) }}
        }
    }
{% else %}
{{ rows.row_of_thread() }}
    let words = target_words(row);
    let ignored = is_ignored(words);
{{ rows.load(["logits"], "row, 0u") }}
{{ work("") }}
{% endif %}
}
