{#
  The targets of a loss, int32 or int64, and which of them are ignored. A file of macros, for kernels with the parameters
  ignored_low and ignored_high:

      {% import "targets.wgsl" as targets_of with context %}      the dtype is `targets`
      {{ targets_of.declared() }}         an input
      {{ targets_of.functions() }}        is_ignored(row)
#}
{% macro declared() %}{{ input("targets", "u64" if targets == "i64" else "i32", 1) }}{% endmacro %}

{% macro functions() %}
fn is_ignored(row: u32) -> bool {
{% if targets == "i64" %}
    return all(load_targets(row) == vec2<u32>(params.ignored_low, params.ignored_high));
{% else %}
    let target_bits = bitcast<u32>(load_targets(row));
    return target_bits == params.ignored_low && (0u - (target_bits >> 31u)) == params.ignored_high;
{% endif %}
}
{% endmacro %}
