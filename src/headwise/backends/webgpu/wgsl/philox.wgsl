{#
  Random bits by a counter: Philox 4x32-10 (Salmon et al., 2011). A file of macros.
#}
{% macro functions() %}
{{ library("upper") }}

fn philox(first: vec4<u32>, first_key: vec2<u32>) -> vec4<u32> {
    var c = first;
    var key = first_key;
    for (var turn = 0; turn < 10; turn++) {
        c = vec4<u32>(upper(0xCD9E8D57u, c.z) ^ c.y ^ key.x, 0xCD9E8D57u * c.z, upper(0xD2511F53u, c.x) ^ c.w ^ key.y, 0xD2511F53u * c.x);
        key += vec2<u32>(0x9E3779B9u, 0xBB67AE85u);
    }
    return c;
}
{% endmacro %}
