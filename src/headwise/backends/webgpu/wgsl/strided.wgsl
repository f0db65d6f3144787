{#
  Elements of a strided tensor of five dims (n0, n1, n2, n3, n4), counted in row-major order. A file of macros.
#}
{# The coordinates c0 … c4 of an element. #}
{% macro coordinates(element) -%}
    let c4 = {{ element }} % params.n4;
    var rest = {{ element }} / params.n4;
    let c3 = rest % params.n3;
    rest /= params.n3;
    let c2 = rest % params.n2;
    rest /= params.n2;
    let c1 = rest % params.n1;
    let c0 = rest / params.n1;
{%- endmacro %}
{# Where it is in a tensor with these strides, whose names end in 0 … 4. #}
{% macro place(strides) -%}
{% for dim in range(5) %}{{ " + " if dim }}c{{ dim }} * params.{{ strides }}{{ dim }}{% endfor %}
{%- endmacro %}
