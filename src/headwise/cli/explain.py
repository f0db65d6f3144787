"""``headwise explain OP``: every backend's verdict on a call of these sizes and flags, and which one is chosen.

No tensor is allocated: the op's own checks see tensors of the meta device, the backends see the device asked for. The
exit code is 1 where no backend runs the call.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from rich.text import Text
from torch import Tensor

from headwise.backends.registry import ARCHITECTURES
from headwise.cases import SUITES
from headwise.cli import _terminal
from headwise.ops import _explain
from headwise.testing import maker_of


class Inputs(NamedTuple):
    """Makes the arguments of a described call: shapes and dtypes, no data."""

    dtype: torch.dtype
    gradient: bool

    def floats(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device="meta", requires_grad=self.gradient)

    def ints(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def bools(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bool, device="meta")


class Described(NamedTuple):
    """An op that can be described on the command line."""

    options: tuple[str, ...]
    arguments: Callable[[Inputs, argparse.Namespace], tuple[tuple[Any, ...], dict[str, Any]]]
    defaults: dict[str, int] = {}  # noqa: RUF012  # where they differ from _SIZES


def _of_case(make: Inputs, o: argparse.Namespace) -> tuple[tuple[Any, ...], dict[str, Any]]:
    suite = SUITES[o.op]
    if o.case not in (None, *(case.name for case in suite.cases)):
        raise ValueError(f"--case {o.case} is not known; there are: {', '.join(case.name for case in suite.cases)}")
    case = suite.cases[0] if o.case is None else suite.case(o.case)
    made = suite.make(maker_of(suite, case, make.dtype), **case.params)
    for name, x in made.items():
        if isinstance(x, Tensor):
            made[name] = x.to("meta").requires_grad_(make.gradient and name in suite.differentiable)
    return (), made


def _attention(make: Inputs, o: argparse.Namespace) -> tuple[tuple[Any, ...], dict[str, Any]]:
    q = make.floats(o.b, o.hq, o.sq, o.d)
    k = make.floats(o.b, o.hk, o.sk, o.d)
    v = make.floats(o.b, o.hk, o.sk, o.dv)
    return (q, k, v), {**_score_flags(make, o), **_dense_flags(make, o), "deterministic": o.deterministic}


def _attention_probs(make: Inputs, o: argparse.Namespace) -> tuple[tuple[Any, ...], dict[str, Any]]:
    q, k = make.floats(o.b, o.hq, o.sq, o.d), make.floats(o.b, o.hk, o.sk, o.d)
    return (q, k), {**_score_flags(make, o), **_dense_flags(make, o)}


def _attention_varlen(make: Inputs, o: argparse.Namespace) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """B sequences of Sq queries and Sk keys each, packed."""
    q = make.floats(o.b * o.sq, o.hq, o.d)
    k = make.floats(o.b * o.sk, o.hk, o.d)
    v = make.floats(o.b * o.sk, o.hk, o.dv)
    offsets = make.ints(o.b + 1), make.ints(o.b + 1)
    flags = {**_score_flags(make, o), "causal": o.causal, "deterministic": o.deterministic}
    return (q, k, v, *offsets, o.sq, o.sk), flags


def _attention_decode(make: Inputs, o: argparse.Namespace) -> tuple[tuple[Any, ...], dict[str, Any]]:
    q = make.floats(o.b, o.hq, o.sq, o.d)
    flags = {**_score_flags(make, o), "kv_starts": make.ints(o.b) if o.kv_starts else None}
    if o.page_size is None:
        k, v = make.floats(o.b, o.hk, o.sk, o.d), make.floats(o.b, o.hk, o.sk, o.dv)
    else:
        pages = -(-o.sk // o.page_size)
        k = make.floats(o.b * pages, o.hk, o.page_size, o.d)
        v = make.floats(o.b * pages, o.hk, o.page_size, o.dv)
        flags["block_table"] = make.ints(o.b, pages)
    return (q, k, v, make.ints(o.b)), flags


def _merge_attention(make: Inputs, o: argparse.Namespace) -> tuple[tuple[Any, ...], dict[str, Any]]:
    outs = [make.floats(o.b, o.hq, o.sq, o.dv) for _ in range(2)]
    lses = [make.floats(o.b, o.hq, o.sq, dtype=torch.float32) for _ in range(2)]
    return (outs, lses), {}


def _rms_norm(make: Inputs, o: argparse.Namespace) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (make.floats(o.n, o.d), make.floats(o.d)), {}


def _softmax(make: Inputs, o: argparse.Namespace) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (make.floats(o.n, o.v),), {}


def _embedding(make: Inputs, o: argparse.Namespace) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (make.ints(o.n, dtype=torch.int64), make.floats(o.v, o.d)), {}


def _cross_entropy(make: Inputs, o: argparse.Namespace) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (make.floats(o.n, o.v), make.ints(o.n, dtype=torch.int64)), {"softcap": o.softcap}


def _transpose(make: Inputs, o: argparse.Namespace) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (make.floats(o.n, o.d),), {}


def _score_flags(make: Inputs, o: argparse.Namespace) -> dict[str, Any]:
    """What every attention op but merge takes."""
    sink = make.floats(o.hq, dtype=torch.float32) if o.sink else None
    flags = {"window": o.window, "scale": o.scale, "softcap": o.softcap, "sink": sink}
    return flags | {"dropout": o.dropout} if getattr(o, "dropout", None) is not None else flags


def _dense_flags(make: Inputs, o: argparse.Namespace) -> dict[str, Any]:
    return {
        "causal": o.causal,
        "mask": make.bools(1, 1, o.sq, o.sk) if o.mask else None,
        "bias": make.floats(1, o.hq, o.sq, o.sk) if o.bias else None,
        **{name: make.ints(o.b) if getattr(o, name) else None for name in _LENGTHS},
    }


_HEADS = ("b", "hq", "hk", "sq", "sk", "d", "dv")
_SCORES = ("window", "scale", "softcap", "sink")
_LENGTHS = ("kv_lengths", "q_lengths", "kv_starts")
_DENSE = ("causal", *_SCORES, "dropout", "mask", "bias", *_LENGTHS)

OPS = {
    "attention": Described((*_HEADS, *_DENSE, "deterministic"), _attention),
    "attention_varlen": Described((*_HEADS, "causal", *_SCORES, "dropout", "deterministic"), _attention_varlen),
    "attention_decode": Described(
        (*_HEADS, *_SCORES, "kv_starts", "page_size"), _attention_decode, {"sq": 1, "sk": 4096}
    ),
    "attention_probs": Described((*_HEADS[:-1], *_DENSE), _attention_probs),
    "merge_attention": Described(("b", "hq", "sq", "d", "dv"), _merge_attention),
    "rms_norm": Described(("n", "d"), _rms_norm),
    "softmax": Described(("n", "v"), _softmax),
    "embedding": Described(("n", "v", "d"), _embedding),
    "cross_entropy": Described(("n", "v", "softcap"), _cross_entropy),
    "transpose": Described(("n", "d"), _transpose),
}
# An op without a row of its own is described by a case of its suite.
OPS |= {op: Described(("case",), _of_case) for op in SUITES if op not in OPS}

_SIZES: dict[str, tuple[int | None, str]] = {
    "b": (1, "batch"),
    "hq": (8, "query heads"),
    "hk": (None, "key heads (default: as many as query heads)"),
    "sq": (1024, "queries"),
    "sk": (None, "keys (default: as many as queries)"),
    "d": (64, "head dim of q and k; features of a row"),
    "dv": (None, "head dim of v (default: that of q and k)"),
    "n": (4096, "rows"),
    "v": (32000, "vocabulary; length of a row"),
    "page_size": (None, "the cache is paged, with pages of this many keys"),
}
_SWITCHES = {
    "causal": "a query sees no key after its own position",
    "mask": "with a bool mask (Sq, Sk)",
    "bias": "with a bias (Hq, Sq, Sk)",
    "kv_lengths": "with a number of keys per batch entry",
    "q_lengths": "with a number of queries per batch entry",
    "kv_starts": "with a first key per batch entry",
    "sink": "with a sink logit per head",
}
_GPUS = ", ".join(ARCHITECTURES)
_NUMBERS = {
    "scale": "of the logits (default: 1/sqrt(D))",
    "softcap": "c · tanh(s / c)",
    "dropout": "chance with which a probability is dropped",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    ops = parser.add_subparsers(metavar="op", dest="op", required=True, title="ops")
    for name, described in OPS.items():
        _add_options(ops.add_parser(name, help=f"a call of headwise.{name}"), described)


def _add_options(parser: argparse.ArgumentParser, described: Described) -> None:
    parser.add_argument("--dtype", default="float32", help="float32, float16, bfloat16, float64; f32, bf16, …")
    parser.add_argument("--device", help="where the tensors are: cpu (the default), cuda, webgpu")
    parser.add_argument(
        "--arch", choices=ARCHITECTURES, metavar="ARCH", help=f"on a GPU that need not be here: {_GPUS}"
    )
    parser.add_argument("--gradient", action="store_true", help="the inputs require gradients")
    parser.add_argument("--backend", help="ask for this backend by name")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    for option in described.options:
        flag = "--" + option.replace("_", "-")
        if option in _SIZES:
            default, meaning = _SIZES[option]
            default = described.defaults.get(option, default)
            told = f"{meaning.partition(' (')[0]} (default: {default})" if default is not None else meaning
            parser.add_argument(flag, type=_size, default=default, metavar="N", help=told)
        elif option in _SWITCHES:
            parser.add_argument(flag, action="store_true", help=_SWITCHES[option])
        elif option == "case":
            parser.add_argument(flag, metavar="NAME", help="a case of headwise check (default: the first one)")
        elif option == "deterministic":
            parser.add_argument("--no-deterministic", dest=option, action="store_false", help="allow sums in any order")
        elif option in _NUMBERS:
            parser.add_argument(flag, type=float, metavar="X", help=_NUMBERS[option])
        else:
            parser.add_argument(flag, type=_window, metavar="L,R", help="keys left and right; an empty side: all")


def run(args: argparse.Namespace) -> int:
    _fill_defaults(args)
    if args.arch and args.device not in (None, "cuda"):
        raise _terminal.UsageError(f"--arch {args.arch} is a GPU of --device cuda, not of {args.device}")
    inputs = Inputs(_terminal.dtype(args.dtype), args.gradient)
    try:
        positional, keywords = OPS[args.op].arguments(inputs, args)
        described = _explain.describe(args.op, *positional, **keywords, backend=args.backend)
        explanation = _explain.judge(described, args.device or "cpu", args.arch)
    except (TypeError, ValueError) as error:  # the op refuses such a call, or there is no such backend
        raise _terminal.UsageError(re.sub(r"\bbackend='([^']*)'", r"--backend \1", str(error))) from error
    if args.json:
        _terminal.print_json(explanation.to_json())
    else:
        _print(explanation)
    return 0 if explanation.chosen is not None else 1


def call_of(words: list[str], prog: str) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """The op and the arguments of a call in the words of this command, for another one."""
    parser = argparse.ArgumentParser(prog=prog, add_help=False)
    add_arguments(parser)
    args = parser.parse_args(words)
    _fill_defaults(args)
    inputs = Inputs(_terminal.dtype(args.dtype), args.gradient)
    return args.op, *OPS[args.op].arguments(inputs, args)


def _print(explanation: _explain.Explanation) -> None:
    console = _terminal.console()
    console.print(Text(explanation.headline(), "bold"))
    table = _terminal.table("", "backend", "verdict")
    for v in explanation.verdicts:
        chosen = v.backend == explanation.chosen
        table.add_row("→" if chosen else "", Text(v.backend, "bold" if chosen else ""), _terminal.verdict(v.reason))
    console.print(table)
    if explanation.chosen is not None:
        console.print(f"Runs on [bold green]{explanation.chosen}[/bold green].")
        if explanation.note is not None:
            console.print(Text(explanation.note.replace("; ", "\n")))
    else:
        console.print(Text(f"ValueError: {explanation.error}", "red"))
        if explanation.call.device == "cuda" and explanation.call.arch is None:
            console.print(Text(f"For a GPU that is not here: --arch {_GPUS}", "dim"))
    if explanation.hint is not None:
        console.print(Text(f"Note: {explanation.hint}", "yellow"))


def _fill_defaults(args: argparse.Namespace) -> None:
    for name, follows in (("hk", "hq"), ("sk", "sq"), ("dv", "d")):
        if getattr(args, name, 0) is None:
            setattr(args, name, getattr(args, follows))


def _size(text: str) -> int:
    try:
        size = int(text)
    except ValueError:
        size = -1
    if size < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: a whole number from 0")
    return size


def _window(text: str) -> tuple[int | None, int | None]:
    left, comma, right = (part.strip() for part in text.partition(","))
    try:
        if comma:
            return int(left) if left else None, int(right) if right else None
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a pair of numbers of keys, as 127,0 or ,0 (left unbounded)")
