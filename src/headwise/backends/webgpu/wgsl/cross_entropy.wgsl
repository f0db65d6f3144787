// Cross entropy of rows of logits and target classes: losses, or the gradient of the logits, or both at once.
//
//   logits   (rows, width), targets (rows), row_grads (rows): the gradient of each row's loss
//   losses   (rows)       (1 - a) (lse - z_t) + a (lse - mean z) + b lse²      z = c tanh(x / c), or x
//   stats    (rows, 2)    highest z, total of exp(z - highest)
//   dlogits  (rows, width)    (exp(z - lse) (1 + 2 b lse) - a / width - (1 - a) [column = t]) (1 - (z / c)²) · row_grad
//
// With a = label_smoothing (Szegedy et al. 2015), b = z_loss (Chowdhery et al. 2022), c = softcap (Gemma 2, 2024). Highest
// and total are kept, not lse: at an lse of 100 its own rounding would cost the gradient two digits.
//
// A row is read into registers whole, or walked: forwards for its statistics, the last part kept, then backwards for the
// gradient, so that the second reading meets the cache. Nothing of the size of the logits is stored but the gradient. A row
// whose target is ignored is 0 throughout, and is not read where a workgroup has it to itself; a target out of range makes
// its row NaN. How rows lie on threads: rows.wgsl.
//
// variables: targets (their dtype), forward, gradient (what is written), cap, smooth (is there a softcap, a label smoothing?),
// and those of rows.wgsl
{% import "rows.wgsl" as rows with context %}
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
{{ params(rows.fields("logits") ~ ", grad_stride: u32, ignored_low: u32, ignored_high: u32, smoothing: f32, z_loss: f32, softcap: f32") }}
{{ rows.places() }}
{{ rows.reader("logits") }}
{% if gradient %}
{{ rows.writer("dlogits") }}
{% endif %}
{{ rows.softmax() }}
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

{% macro load(chunk) %}
{% for k in range(held) %}
    let x{{ k }} = raw_logits(row, {{ chunk }} + {{ k }}u, lane);
{% endfor %}
{% endmacro %}

{% macro fold(chunk) %}
{% for k in range(held) %}
    let inside{{ k }} = inside(row, {{ chunk }} + {{ k }}u, lane);
    let z{{ k }} = select(vec4<f32>(nothing), capped(values_of(x{{ k }})), inside{{ k }});
{% if smooth %}
    plain += sum_of(select(vec4<f32>(0.0), z{{ k }}, inside{{ k }}));
{% endif %}
{% endfor %}
    {{ rows.fold_softmax() }}
{% endmacro %}

{% macro finish(chunk) %}
    if (there) {
{% for k in range(held) %}
        let z{{ k }} = capped(values_of(x{{ k }}));
        var d{{ k }} = factor * powers(z{{ k }}, stat.x){{ " - at_all" if smooth }};
{% if aligned %}
        if (({{ chunk }} + {{ k }}u) * {{ lanes }}u + lane == target_class / 4u) { d{{ k }} -= at_target; }
{% else %}
        d{{ k }} -= select(vec4<f32>(0.0), vec4<f32>(at_one), columns_of(row, {{ chunk }} + {{ k }}u, lane) == vec4<i32>(i32(target_class)));
{% endif %}
{% if cap %}
        let t{{ k }} = z{{ k }} / params.softcap;
        d{{ k }} *= 1.0 - t{{ k }} * t{{ k }};
{% endif %}
{% if lanes < threads %}
        d{{ k }} = select(d{{ k }}, vec4<f32>(0.0), ignored);
{% endif %}
        write_dlogits(row, {{ chunk }} + {{ k }}u, lane, d{{ k }});
{% endfor %}
    }
{% endmacro %}

{{ rows.entry() }}
{{ rows.row_of_thread() }}
    let words = target_words(row);
    let known = words.y == 0u && words.x < params.width;
    let ignored = words.x == params.ignored_low && words.y == params.ignored_high;
    let outside = !known && !ignored;
    let target_class = select(0u, words.x, known);
{% if lanes == threads %}
    if (ignored) {
{% if forward %}
        if (thread == 0u) {
            store_losses(row, 0.0);
            store_stats(row, vec2<f32>(0.0));
        }
{% endif %}
{% if gradient %}
        for (var chunk = 0u; chunk < params.blocks * {{ held }}u; chunk++) { write_dlogits(row, chunk, lane, vec4<f32>(0.0)); }
{% endif %}
        return;
    }
{% endif %}
{% if forward %}
    let nothing = negative_infinity();
    var state = vec2<f32>(LOWEST, 0.0);
{% if smooth %}
    var plain = 0.0;
{% endif %}
{{ rows.forwards(load, fold) }}
    let stat = row_softmax(state, thread);
{% if smooth %}
    let mean = row_sum(plain, thread) / f32(params.width);
{% endif %}
    if (there && lane == 0u) {
        let log_total = log(stat.y);
        let at_target = capped(vec4<f32>(element_logits(row, target_class))).x;
        var loss = {{ "(1.0 - params.smoothing) * " if smooth }}(log_total + (stat.x - at_target));
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
    let last = (params.blocks - 1u) * {{ held }}u;
{{ load("last") }}
{% endif %}
{% if gradient %}
    let grad = select(load_row_grads(row * params.grad_stride), not_a_number(), outside);
    let factor = grad / stat.y * (1.0 + 2.0 * params.z_loss * (stat.x + log(stat.y)));
    let at_one = grad{{ " * (1.0 - params.smoothing)" if smooth }};
{% if smooth %}
    let at_all = grad * params.smoothing / f32(params.width);
{% endif %}
{% if aligned %}
    let at_target = select(vec4<f32>(0.0), vec4<f32>(at_one), vec4<u32>(target_class % 4u) == vec4<u32>(0u, 1u, 2u, 3u));
{% endif %}
{{ rows.backwards(load, finish) }}
{% endif %}
}
