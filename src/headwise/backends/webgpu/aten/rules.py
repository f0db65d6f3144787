"""What PyTorch's pointwise operators compute, as WGSL expressions of their arguments.

An expression names the arguments as the schema does (``self`` as ``x``); numbers become parameters of the kernel. There is
one for each kind of number that an operator takes: "f" floats, "i" whole numbers of up to 32 bits, "l" of 64, "b" bool.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

# Arguments that are no tensors, by name; numbers among them are parameters. And dtype: what is computed in.
Given = Mapping[str, Any]
Expression = str | Callable[[Given], str]


class Rule(NamedTuple):
    of: Mapping[str, Expression]  # by kind
    floats: bool = False  # computed in floats, whatever the arguments are
    answers: bool = False  # gives bool
    bools: tuple[str, ...] = ()  # arguments that are bool, and do not take part in type promotion
    constants: tuple[str, ...] = ()  # numbers that the expression looks at: a kernel for each


def _float(text: Expression) -> Rule:
    return Rule({"f": text}, floats=True)


def _plain(f: Expression, i: Expression, l: Expression, b: Expression | None = None) -> Rule:  # noqa: E741
    return Rule({"f": f, "i": i, "l": l} | ({} if b is None else {"b": b}))


def _compare(sign: str) -> Rule:
    long = {
        "==": "all(x == other)", "!=": "any(x != other)", "<": "long_less(x, other)", ">": "long_less(other, x)",
        "<=": "!long_less(other, x)", ">=": "!long_less(x, other)",
    }[sign]  # fmt: skip
    no_nan = (
        f"(x {sign} other) && !is_nan(x) && !is_nan(other)"
        if sign != "!="
        else "(x != other) || is_nan(x) || is_nan(other)"
    )
    bools = f"(select(0, 1, x) {sign} select(0, 1, other))"
    return Rule({"f": no_nan, "i": f"x {sign} other", "l": long, "b": bools}, answers=True)


def _with_alpha(f: str, l: str, long_alpha: str, b: str) -> Rule:  # noqa: E741
    def text(plain: str, scaled: str) -> Callable[[Given], str]:
        return lambda given: plain if given.get("alpha", 1) == 1 else scaled

    sign = f[2]
    floats = text(f, f"x {sign} alpha * other")
    return Rule({"f": floats, "i": floats, "l": text(l, long_alpha), "b": b}, constants=())


def _divide(given: Given) -> str:
    return {None: "x / other", "trunc": "trunc_div(x, other)", "floor": "floor_div(x, other)"}[
        given.get("rounding_mode")
    ]


def _divide_whole(kind: str) -> Callable[[Given], str]:
    prefix = {"i": "int", "l": "long"}[kind]
    return lambda given: f"{prefix}_{given['rounding_mode']}_div(x, other)"


def _clamp(low: str, high: str) -> Callable[[Given], str]:
    def text(given: Given) -> str:
        y = "x"
        if given.get("min", "") is not None:
            y = low.format(y)
        if given.get("max", "") is not None:
            y = high.format(y)
        return y

    return text


_CLAMP = _plain(
    _clamp("max_of({}, least)", "min_of({}, most)"), _clamp("max({}, least)", "min({}, most)"),
    _clamp("long_max({}, least)", "long_min({}, most)"),
)  # fmt: skip


def _gelu(exact: str, tanh: str) -> Callable[[Given], str]:
    return lambda given: tanh if given.get("approximate", "none") == "tanh" else exact


def _power(given: Given) -> str:
    exponent = given.get("exponent")
    known = {
        2: "x * x",
        3: "x * x * x",
        1: "x",
        0.5: "sqrt(x)",
        -1: "1.0 / x",
        -0.5: "1.0 / sqrt(x)",
        0: "1.0",
        -2: "1.0 / (x * x)",
    }
    return known.get(exponent, "pow_of(x, exponent)") if isinstance(exponent, int | float) else "pow_of(x, exponent)"


def _whole_power(text: str) -> Callable[[Given], str]:
    def checked(given: Given) -> str:
        if isinstance(exponent := given.get("exponent"), int) and exponent < 0:
            raise RuntimeError("Integers to negative integer powers are not allowed.")
        return text

    return checked


_LOGIT = "log_of(min_of(max_of(x, eps), 1.0 - eps) / (1.0 - min_of(max_of(x, eps), 1.0 - eps)))"


def _replaced(given: Given) -> str:
    def number(name: str, otherwise: str) -> str:
        return otherwise if given.get(name, "") is None else name

    largest = {torch.float16: "65504.0", torch.bfloat16: "bitcast<f32>(0x7f7f0000u)"}.get(
        given["dtype"], "bitcast<f32>(0x7f7fffffu)"
    )
    signed = f"select({number('neginf', f'-{largest}')}, {number('posinf', largest)}, x > 0.0)"
    return f"select(select(x, {signed}, is_inf(x)), {number('nan', '0.0')}, is_nan(x))"


_BITS = {"and": "&", "or": "|", "xor": "^"}
_LONG_ZERO = "vec2<u32>(0u)"

RULES: dict[str, Rule] = {
    # one argument
    "neg": _plain("-x", "-x", "long_neg(x)"),
    "abs": _plain("abs(x)", "abs(x)", "long_abs(x)", "x"),
    "sgn": _plain("sign_of(x)", "sign(x)", "long_sign(x)", "x"),
    "sign": _plain("sign_of(x)", "sign(x)", "long_sign(x)", "x"),
    "relu": _plain("relu_of(x)", "max(x, 0)", f"long_max(x, {_LONG_ZERO})"),
    "square": _plain("x * x", "x * x", "long_mul(x, x)"),
    "ceil": _plain("ceil(x)", "x", "x"),
    "floor": _plain("floor(x)", "x", "x"),
    "round": _plain("round(x)", "x", "x"),
    "trunc": _plain("trunc(x)", "x", "x"),
    "frac": Rule({"f": "x - trunc(x)"}),
    "positive": _plain("x", "x", "x", "x"),
    "bitwise_not": Rule({"i": "~x", "l": "~x", "b": "!x"}),
    "logical_not": Rule({"f": "!is_true(x)", "i": "x == 0", "l": f"all(x == {_LONG_ZERO})", "b": "!x"}, answers=True),
    "isnan": Rule({"f": "is_nan(x)", "i": "x != x", "l": "any(x != x)", "b": "x != x"}, answers=True),
    "isinf": Rule({"f": "is_inf(x)", "i": "x != x", "l": "any(x != x)", "b": "x != x"}, answers=True),
    "isposinf": Rule({"f": "is_inf(x) && x > 0.0", "i": "x != x", "l": "any(x != x)", "b": "x != x"}, answers=True),
    "isneginf": Rule({"f": "is_inf(x) && x < 0.0", "i": "x != x", "l": "any(x != x)", "b": "x != x"}, answers=True),
    "signbit": Rule({"f": "is_minus(x)", "i": "x < 0", "l": "long_is_minus(x)", "b": "x != x"}, answers=True),
    **{name: _float(f"{name}_of(x)") for name in (
        "exp", "log", "log1p", "expm1", "tanh", "sinh", "cosh", "sin", "cos", "atan", "asin", "acos", "asinh", "acosh",
        "atanh", "erf", "sigmoid", "silu",
    )},
    "tan": _float("sin_of(x) / cos_of(x)"),
    "sqrt": _float("sqrt(x)"),
    "rsqrt": _float("1.0 / sqrt(x)"),
    "reciprocal": _float("1.0 / x"),
    "exp2": _float("pow_of(2.0, x)"),
    "log2": _float("log_of(x) * 1.4426950408889634"),
    "log10": _float("log_of(x) * 0.4342944819032518"),
    "erfc": _float(
        "select(1.0 - erf_of(x), 2.0 * exp_of(-x * x) * scaled_tail(x * 1.4142135623730951), x > 0.5 && x < 10.0)"
    ),
    "special_ndtr": _float("normal_distribution(x)"),
    "log_sigmoid_forward": _float("log_sigmoid_of(x)"),
    "deg2rad": _float("x * 0.017453292519943295"),
    "rad2deg": _float("x * 57.29577951308232"),
    "gelu": _float(_gelu("gelu_of(x)", "gelu_tanh_of(x)")),
    "hardtanh": _plain("min_of(max_of(x, min_val), max_val)", "min(max(x, min_val), max_val)",
                       "long_min(long_max(x, min_val), max_val)"),
    "hardsigmoid": _float("min_of(max_of(x + 3.0, 0.0), 6.0) / 6.0"),
    "hardswish": _float("x * min_of(max_of(x + 3.0, 0.0), 6.0) / 6.0"),
    "leaky_relu": _float("select(x, x * negative_slope, x < 0.0)"),
    "elu": _float("select(x * scale, scale * alpha * expm1_of(x * input_scale), x < 0.0)"),
    "softplus": _float("softplus_of(x, beta, threshold)"),
    "mish": _float("x * tanh_of(softplus_of(x, 1.0, 20.0))"),
    "softshrink": _float("select(select(0.0, x + lambd, x < -lambd), x - lambd, x > lambd) + select(0.0, x, is_nan(x))"),
    "hardshrink": _float("select(x, 0.0, x >= -lambd && x <= lambd)"),
    "threshold": _plain("select(x, value, x <= threshold && !is_nan(x))", "select(x, value, x <= threshold)",
                        "select(x, value, !long_less(threshold, x))"),
    "logit": _float(lambda given: "log_of(x / (1.0 - x))" if given.get("eps", 0) is None else _LOGIT),
    "nan_to_num": Rule({"f": _replaced}),
    "atan2": _float("atan2_of(x, other)"),
    # two
    "add": _with_alpha("x + other", "long_add(x, other)", "long_add(x, long_mul(alpha, other))", "x || other"),
    "sub": _with_alpha("x - other", "long_sub(x, other)", "long_sub(x, long_mul(alpha, other))", "x != other"),
    "rsub": _plain("other - alpha * x", "other - alpha * x", "long_sub(other, long_mul(alpha, x))"),
    "mul": _plain("x * other", "x * other", "long_mul(x, other)", "x && other"),
    "div": Rule({"f": _divide, "i": _divide_whole("i"), "l": _divide_whole("l")}),
    "floor_divide": _plain("floor_div(x, other)", "int_floor_div(x, other)", "long_floor_div(x, other)"),
    "remainder": _plain("remainder_of(x, other)", "int_remainder(x, other)", "long_remainder(x, other)"),
    "fmod": _plain("fmod_of(x, other)", "int_fmod(x, other)", "long_fmod(x, other)"),
    "pow": Rule({"f": _power, "i": _whole_power("int_power(x, exponent)"),
                 "l": _whole_power("long_power(x, exponent)")}, constants=("exponent",)),
    "maximum": _plain("max_of(x, other)", "max(x, other)", "long_max(x, other)", "x || other"),
    "minimum": _plain("min_of(x, other)", "min(x, other)", "long_min(x, other)", "x && other"),
    "fmax": Rule({"f": "select(select(max(x, other), x, is_nan(other)), other, is_nan(x))",
                  "i": "max(x, other)", "l": "long_max(x, other)"}),
    "fmin": Rule({"f": "select(select(min(x, other), x, is_nan(other)), other, is_nan(x))",
                  "i": "min(x, other)", "l": "long_min(x, other)"}),
    "copysign": _float("with_sign(x, other)"),
    "hypot": Rule({"f": "sqrt(x * x + other * other)"}),
    "xlogy": _float("select(select(x * log_of(other), 0.0, x == 0.0), other, is_nan(other))"),
    "eq": _compare("=="), "ne": _compare("!="), "lt": _compare("<"),
    "le": _compare("<="), "gt": _compare(">"), "ge": _compare(">="),
    **{f"bitwise_{name}": Rule({
        "i": f"x {sign} other", "l": f"x {sign} other", "b": f"x {'!=' if sign == '^' else sign} other",
    })
       for name, sign in _BITS.items()},
    **{name: Rule({"i": f"int_{way}(x, other)", "l": f"long_{way}(x, other)"})
       for name, way in (("__lshift__", "left"), ("__ilshift__", "left"), ("bitwise_left_shift", "left"),
                         ("__rshift__", "right"), ("__irshift__", "right"), ("bitwise_right_shift", "right"))},
    **{f"logical_{name}": Rule({
        "f": f"is_true(x) {sign} is_true(other)", "i": f"(x != 0) {sign} (other != 0)",
        "l": f"any(x != {_LONG_ZERO}) {sign} any(other != {_LONG_ZERO})", "b": f"x {sign} other",
    }, answers=True) for name, sign in (("and", "&&"), ("or", "||"), ("xor", "!="))},
    "clamp": _CLAMP,
    "clamp_min": _plain("max_of(x, least)", "max(x, least)", "long_max(x, least)"),
    "clamp_max": _plain("min_of(x, most)", "min(x, most)", "long_min(x, most)"),
    "prelu_kernel": _float("select(weight * x, x, x > 0.0)"),
    # three
    "where": Rule(dict.fromkeys("filb", "select(other, x, condition)"), bools=("condition",)),
    "masked_fill": Rule(dict.fromkeys("filb", "select(x, value, mask)"), bools=("mask",)),
    "addcmul": _plain("x + value * tensor1 * tensor2", "x + value * tensor1 * tensor2",
                      "long_add(x, long_mul(value, long_mul(tensor1, tensor2)))"),
    "addcdiv": _float("x + value * (tensor1 / tensor2)"),
    "lerp": _float("select(end - (end - x) * (1.0 - weight), x + weight * (end - x), abs(weight) < 0.5)"),
    # backward
    "threshold_backward": _plain("select(grad_output, 0.0, x <= threshold)", "select(grad_output, 0, x <= threshold)",
                                 f"select(grad_output, {_LONG_ZERO}, !long_less(threshold, x))"),
    "gelu_backward": _float(_gelu("grad_output * gelu_slope(x)", "grad_output * gelu_tanh_slope(x)")),
    "silu_backward": _float("grad_output * silu_slope(x)"),
    "sigmoid_backward": _float("grad_output * (1.0 - output) * output"),
    "tanh_backward": _float("grad_output * (1.0 - output * output)"),
    "logit_backward": _float(lambda given: (
        "select(grad_output / (x * (1.0 - x)), not_a_number(), x < 0.0 || x > 1.0)" if given.get("eps", 0) is None else
        "select(0.0, grad_output / (x * (1.0 - x)), x >= eps && x <= 1.0 - eps)"
    )),
    "hardtanh_backward": _float("select(grad_output, 0.0, x <= min_val || x >= max_val)"),
    "hardsigmoid_backward": _float("select(0.0, grad_output / 6.0, x > -3.0 && x < 3.0)"),
    "hardswish_backward": _float("select(select(grad_output * (x / 3.0 + 0.5), grad_output, x >= 3.0), 0.0, x <= -3.0)"),
    "leaky_relu_backward": Rule({"f": "select(grad_output * negative_slope, grad_output, x > 0.0)"}, floats=True,
                                constants=("self_is_result",)),
    "hardshrink_backward": _float("select(grad_out, 0.0, x >= -lambd && x <= lambd)"),
    "softshrink_backward": _float("select(grad_output, 0.0, x >= -lambd && x <= lambd)"),
    "softplus_backward": _float("select(grad_output * sigmoid_of(x * beta), grad_output, x * beta > threshold)"),
    "elu_backward": Rule({"f": lambda given: (
        "select(grad_output * scale, grad_output * input_scale * (self_or_result + alpha * scale), self_or_result <= 0.0)"
        if given["is_result"] else
        "select(grad_output * scale, grad_output * input_scale * alpha * scale * exp_of(self_or_result * input_scale), "
        "self_or_result <= 0.0)"
    )}, floats=True, constants=("is_result",)),
    "mse_loss_elements": _float("(x - other) * (x - other)"),
}  # fmt: skip
