// Cross entropy of rows of logits and target classes: losses, or the gradient of the logits, or both at once.
//
//   logits   (rows, width), targets (rows), row_grads (rows): the gradient of each row's loss
//   losses   (rows)       (1 - a) (lse - z_t) + a (lse - mean z) + b lse²      z = c tanh(x / c), or x
//   stats    (rows, 2)    a reference r, the highest z or near it; total of exp(z - r)
//   dlogits  (rows, width)    (exp(z - lse) (1 + 2 b lse) - a / width - (1 - a) [column = t]) (1 - (z / c)²) · row_grad
//
// With a = label_smoothing (Szegedy et al. 2015), b = z_loss (Chowdhery et al. 2022), c = softcap (Gemma 2, 2024). Reference
// and total are kept, not lse: at an lse of 100 its own rounding would cost the gradient two digits.
//
// A row is read into registers whole, or walked: forwards for its statistics, the last part kept, then backwards for the
// gradient, so that the second reading meets the cache. Nothing of the size of the logits is stored but the gradient. A
// workgroup that has a row to itself may take several in turn, `groups` apart: the next one is then on its way while the
// gradient of this one is written. A row whose target is ignored is 0 throughout, and such a workgroup does not read it; a target out of range
// makes its row NaN. How rows lie on threads: rows.wgsl.
//
// variables: targets (their dtype), forward, gradient (what is written), cap, smooth (is there a softcap, a label smoothing?),
// turns (does a workgroup that has a row to itself take several?), sampled (are references looked for among few values? see
// `fold`), and those of rows.wgsl
{% import "rows.wgsl" as rows with context %}
{% set alone = lanes == threads %}{# a workgroup has a row to itself #}
{{ rows.read("logits") }}
{{ input("targets", "u64" if targets == "i64" else "i32", 1) }}
{% if gradient %}
{{ input("row_grads", "f32", 1) }}
{% endif %}
{% if forward %}
{{ output("losses", "f32", 1) }}
{{ output("stats", "f32", 2) }}
{% else %}
{{ input("stats", "f32", 2) }}
{% endif %}
{% if gradient %}
{{ rows.write("dlogits") }}
{% endif %}
{{ params(rows.fields("logits") ~ ", groups: u32, grad_stride: u32, ignored_low: u32, ignored_high: u32, smoothing: f32, z_loss: f32, softcap: f32") }}
{{ rows.places() }}
{{ rows.reader("logits") }}
{% if gradient %}
{{ rows.writer("dlogits") }}
{% endif %}
{{ rows.softmax(exact=cap or sampled) }}
{% if smooth and forward %}
fn add(a: f32, b: f32) -> f32 { return a + b; }
{{ rows.reduction("row_sum", "f32", "add") }}
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
// c · tanh(x / c) by way of exp(-2|u|), which cannot overflow; a polynomial where u is small and digits would go.
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
fn slope(logits: Raw, reference: f32, factor: f32, away: vec4<f32>) -> vec4<f32> {
    let z = capped(values_of(logits));
    let d = factor * powers(z, reference) - away;
{% if cap %}
    let t = z / params.softcap;
    return d * (1.0 - t * t);
{% else %}
    return d;
{% endif %}
}
{% endif %}

{% if sampled %}
// What the powers of a thread may sum up to, before a reference is too low for them: exponents below 16 are exact enough.
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
  A part of a row into `state`. Looking for the highest value first means that all of them wait for it, unpacked: so many
  registers that few threads have room. So 16 bits take for a reference the highest of two vectors, their own and
  their neighbours', which needs to be near the highest of all, and no more. In the rare part where it is not, they begin again.
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
{{ rows.fold_softmax("logits", ahead) }}
{% endif %}
{% endmacro %}

{% macro finish(chunk, ahead, write) %}
    if (there) {
{% for k in range(held) %}
{% if aligned %}
        let d{{ k }} = slope(logits{{ k }}, stat.x, factor, vec4<f32>(at_all));
{% else %}
        let hit{{ k }} = columns_of(row, {{ chunk }} + {{ k }}u, lane) == vec4<i32>(i32(target_class));
        let away{{ k }} = at_all + select(vec4<f32>(0.0), vec4<f32>(at_one), hit{{ k }});
        let d{{ k }} = slope(logits{{ k }}, stat.x, factor, away{{ k }});
{% endif %}
        {{ write }}_dlogits(row, {{ chunk }} + {{ k }}u, lane, {{ "d%d" % k if alone else "select(d%d, vec4<f32>(0.0), ignored)" % k }});
{{ rows.refill(["logits"], k, ahead) }}
{% endfor %}
    }
{% endmacro %}

{# All that is done with a row; its first part (its last one, where only the gradient is wanted) is in registers. #}
{% macro work(ahead) %}
    let known = words.y == 0u && words.x < params.width;
    let outside = !known && !ignored;
    let target_class = select(0u, words.x, known);
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
{{ rows.forwards(fold, "" if gradient else ahead) }}
    let stat = row_softmax(state, thread);
{% if smooth %}
    let mean = row_sum(plain, thread) / f32(params.width);
{% endif %}
    if (there && lane == 0u) {
        let log_total = log(stat.y);
{% if aligned %}
        let at_target = capped(values_of(target_logits))[target_class % 4u];
{% else %}
        let at_target = capped(vec4<f32>(element_logits(row, target_class))).x;
{% endif %}
        var of_target = log_total + (stat.x - at_target);
{% if sampled %}
        // Where the reference is low both are large, and their digits would go: the logarithm of a quotient keeps them.
        if (abs(stat.x - at_target) < 40.0) { of_target = log(stat.y / powers(vec4<f32>(at_target), stat.x).x); }
{% endif %}
        var loss = {{ "(1.0 - params.smoothing) * " if smooth }}of_target;
{% if smooth %}
        loss += params.smoothing * (log_total + (stat.x - mean));
{% endif %}
        let lse = stat.x + log_total;
        loss += params.z_loss * lse * lse;
        store_losses(row, select(select(loss, not_a_number(), outside), 0.0, ignored));
        store_stats(row, stat);
    }
{% else %}
    let stat = load_stats(row);
{% endif %}
{% if gradient %}
    let grad = select(load_row_grads(row * params.grad_stride), not_a_number(), outside);
    let factor = grad * unit(stat.x) / stat.y * (1.0 + 2.0 * params.z_loss * (stat.x + log(stat.y)));
    let at_one = grad{{ " * (1.0 - params.smoothing)" if smooth }};
{% if smooth %}
    let at_all = grad * params.smoothing / f32(params.width);
{% else %}
    let at_all = 0.0;
{% endif %}
{{ rows.backwards(finish, "is_finite(factor)", ahead) }}
{% if aligned %}
    // One thread writes one vector again, rather than all of them ask for each of theirs whether the target is in it.
    if (there && !ignored && lane == target_lane) {
        let hit = vec4<u32>(target_class % 4u) == vec4<u32>(0u, 1u, 2u, 3u);
        let away = at_all + select(vec4<f32>(0.0), vec4<f32>(at_one), hit);
        write_dlogits(row, target_chunk, lane, slope(target_logits, stat.x, factor, away));
    }
{% endif %}
{% endif %}
{% endmacro %}

{% set begin = "0u" if forward else "(params.blocks - 1u) * %du" % held %}{# the part of a row that is worked on first #}
{% set ahead = "next_row, " ~ begin if turns else "" %}
{{ rows.entry() }}
{% if alone %}
    let lane = thread;
    let there = true;
    let ignored = false;
    let first_row = group.x + group.y * groups.x;
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
