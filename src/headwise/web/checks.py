"""Cases of every op, forward and backward, with golden results, for the page to check a GPU with.

The cases are smaller than those of the tables, since they are downloaded, but use the same suites. Golden results are
the oracle's in float64, and the allowed difference is the error budget, in both of its norms. They are stored in
float32; the budget is larger by the rounding error of that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise import testing
from headwise.cases import SUITES
from headwise.testing import Arguments, Case, Outputs, Suite
from headwise.web.recording import Output, Program, recording, region
from headwise.web.tiers import Tier

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
ALL = (F32, F16, BF16)

STORED = torch.float32


class Golden(NamedTuple):
    """The expected output: its elements in the order of memory, and the largest absolute errors allowed."""

    elements: Tensor
    rms: float
    largest: float


class Check(NamedTuple):
    op: str
    case: str
    dtype: torch.dtype
    call: str  # in words
    program: Program
    golden: dict[str, Golden]


class Row(NamedTuple):
    """A row of the table below."""

    name: str
    parameters: dict[str, Any]  # of the suite
    dtypes: Sequence[torch.dtype] = (F32,)
    gradients: bool = True


def _operators(a: Tensor, b: Tensor, long: Tensor) -> Outputs:
    """PyTorch's own operators."""
    ordered, places = torch.sort(a, dim=-1, stable=True)  # 16-bit numbers tie
    row = long.reshape(1, -1)  # long rows have kernels of their own
    ordered_row, of_row = torch.sort(row, dim=-1, stable=True)
    return {
        "plus": a + b,
        "joined": torch.cat([a, b], -1),
        "totals": a.sum(-1),
        "running": a.cumsum(-1),
        "ordered": ordered,
        "ordered, a long row": ordered_row,
        "found": torch.searchsorted(ordered, b).to(a.dtype),
        "scattered": a.scatter_add(-1, places, b),
        "scattered, a long row": row.scatter_add(-1, of_row, row),
        "put in places, a long row": row.scatter(-1, of_row, row),
        "put in columns": a.clone().index_copy_(-1, places[0], b),
        "convolved": torch.nn.functional.conv1d(a[:, None], b[:2, None, :3], stride=2, padding=1),
        "few rows": long[:3] @ long.mT,
        "splits of k": long @ long.mT,
        "wide and back": a.float().double().float(),
    }


def _sum_join_copy(arguments: Arguments, backend: str | None = None) -> Outputs:
    """What arrays do besides the ops: gradients are added, parts joined, memory copied."""
    from headwise.backends.webgpu import copies, runtime
    from headwise.backends.webgpu.array import Array

    a, b, long = arguments["a"], arguments["b"], arguments["long"]
    device = runtime.device()
    copy = device.empty(tuple(a.shape), a.dtype)
    copies.copy_flat(device, region(a), copy)
    added = Array(copies.added(device, region(a), region(b)), device)
    return {"sum": added, "copy": Array(copy, device)} | _operators(a, b, long)


ARRAYS = Suite(
    op="arrays",
    cases=(),
    make=lambda maker, shape, long: {"a": maker.normal(*shape), "b": maker.normal(*shape), "long": maker.normal(*long)},
    run=_sum_join_copy,
    reference=lambda arguments: (
        {
            "sum": arguments["a"] + arguments["b"],
            "copy": arguments["a"],
        }
        | _operators(arguments["a"], arguments["b"], arguments["long"])
    ),
)

# Kernels of attention are long, and a browser without a GPU takes a second or two for each: cases share them where they
# can (head dim 16, causal).
CASES: dict[str, list[Row]] = {
    "attention": [
        Row("full", {"sq": 100, "sk": 130, "hq": 1, "d": 64}),
        Row("causal", {"sq": 100, "d": 16, "causal": True}, ALL),
        Row("causal, more queries than keys", {"sq": 100, "sk": 60, "hq": 1, "d": 16, "causal": True}),
        Row("grouped heads 4:1, heads inside", {"sq": 80, "hq": 4, "hk": 1, "d": 16, "layout": "bshd", "causal": True}),
        Row("causal, head dim 128", {"sq": 80, "hq": 2, "d": 128, "causal": True}, (F16,), False),
        Row("window (7, 3)", {"sq": 100, "hq": 1, "d": 16, "window": (7, 3)}),
        Row("causal, window (20, 0)", {"sq": 100, "hq": 1, "d": 16, "causal": True, "window": (20, 0)}),
        Row("mask with empty rows", {"sq": 80, "hq": 1, "d": 16, "mask": (80, 80), "empty_rows": True, "chance": 0.1}),
        Row("bias", {"sq": 70, "hq": 1, "d": 16, "bias": (1, 1, 70, 70)}),
        Row("lengths", {"b": 3, "sq": 40, "sk": 75, "hq": 1, "d": 16, "lengths": [75, 0, 33]}),
        Row(
            "padding on both sides, sink",
            {
                "b": 3, "sq": 40, "sk": 60, "hq": 1, "d": 16, "q_lengths": [40, 17, 0], "lengths": [60, 17, 33],
                "kv_starts": [5, 0, 10], "causal": True, "sink": True,
            },
        ),
        Row("softcap", {"sq": 90, "hq": 1, "d": 16, "softcap": 5.0, "scale": 0.5}),
        Row("dropout", {"b": 2, "sq": 70, "sk": 50, "hq": 4, "hk": 2, "d": 16, "dropout": 0.3, "dropout_seed": 2**40 + 7}),
        Row("sink", {"sq": 70, "sk": 50, "hq": 4, "hk": 2, "d": 16, "sink": True, "causal": True}),
        Row("no keys", {"sq": 8, "sk": 0, "d": 16, "sink": True, "causal": True}),
        Row(
            "everything at once",
            {
                "b": 2, "sq": 50, "sk": 75, "hq": 4, "hk": 2, "d": 37, "dv": 22, "layout": "bshd", "causal": True,
                "window": (40, 10), "mask": (2, 1, 50, 75), "bias": (4, 1, 75), "lengths": [75, 61], "softcap": 10.0,
                "sink": True, "chance": 0.9,
            },
            (BF16,),
        ),
    ],
    "attention_varlen": [
        Row("causal", {"q_lengths": [90, 3, 40], "hq": 1, "d": 16, "causal": True}),
        Row("empty sequences", {"q_lengths": [0, 40, 0, 0, 30, 0], "d": 16, "causal": True}),
        Row("fewer queries than keys", {"q_lengths": [1, 9, 20], "k_lengths": [30, 9, 70], "d": 16, "causal": True}),
        Row("rows past the end", {"q_lengths": [40, 20], "trailing": 20, "d": 16, "causal": True}),
        Row("dropout", {"q_lengths": [40, 3, 0, 30], "d": 16, "causal": True, "dropout": 0.2, "dropout_seed": -1}),
        Row(
            "window, grouped heads, softcap, sink",
            {"q_lengths": [40, 0, 30], "hq": 4, "hk": 2, "d": 16, "window": (10, 0), "softcap": 9.0, "sink": True},
            (BF16,),
        ),
    ],
    "attention_decode": [
        Row("contiguous", {"lengths": [70, 1, 0, 90], "capacity": 96, "hq": 4, "hk": 1, "d": 16}, (F32, BF16)),
        Row("speculative tokens", {"lengths": [50, 4, 2], "capacity": 64, "sq": 4, "hk": 1, "d": 16}),
        Row(
            "window, softcap, sink, left padding",
            {
                "lengths": [60, 0, 70], "starts": [40, 0, 10], "capacity": 80, "d": 32, "window": (31, 0), "softcap": 8.0,
                "sink": True,
            },
            (F32, BF16),
            False,
        ),
        Row("three splits, head dim 128", {"lengths": [90], "capacity": 96, "d": 128, "num_splits": 3}, (F32,), False),
        # For gradients, pages are gathered outside of WebGPU.
        Row("paged", {"lengths": [100, 16, 0, 33], "page_size": 16, "d": 32}, (F16,), False),
        Row(
            "paged, all flags",
            {"lengths": [60, 47], "page_size": 16, "sq": 2, "d": 32, "window": (40, 0), "softcap": 20.0, "sink": True},
            (F32,),
            False,
        ),
    ],
    "attention_probs": [
        Row("causal", {"sq": 80, "hq": 1, "d": 32, "causal": True}),
        Row(
            "causal, window (20, 0), grouped heads",
            {"sq": 70, "hq": 2, "hk": 1, "d": 16, "causal": True, "window": (20, 0)},
            ALL,
        ),
        Row("rows", {"sq": 70, "hq": 1, "d": 16, "causal": True, "rows": [0, 7, -1, 7, 69]}),
        Row("dropout", {"b": 2, "sq": 40, "sk": 50, "d": 16, "dropout": 0.4, "dropout_seed": 5}),
        Row(
            "mask, bias, lengths, softcap, sink",
            {
                "b": 2, "sq": 40, "sk": 50, "d": 16, "mask": (40, 50), "empty_rows": True, "bias": (2, 40, 50),
                "lengths": [50, 21], "q_lengths": [40, 30], "kv_starts": [11, 3], "softcap": 10.0, "sink": True,
            },
        ),
    ],
    "merge_attention": [
        Row("two parts", {"parts": 2, "shape": (2, 2, 20, 40)}, (F32, BF16)),
        Row("packed", {"parts": 3, "shape": (30, 2, 32), "packed": True}),
        Row("far apart", {"parts": 3, "shape": (2, 2, 15, 32), "spread": 60.0}),
    ],
    "softmax": [
        Row("rows of 111", {"shape": (7, 111)}, ALL),
        Row("rows of 2048", {"shape": (3, 2048)}),
        Row("rows of 17001", {"shape": (1, 17001)}),
        Row("rows of -inf", {"shape": (10, 130), "empty_rows": True}),
        Row("strided", {"shape": (6, 5, 77), "strided": True}),
    ],
    "cross_entropy": [
        Row("mean", {"shape": (12, 1111)}, ALL),
        Row(
            "sum, every option",
            {
                "shape": (20, 257), "reduction": "sum", "label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 20.0,
                "ignored": "some",
            },
        ),
        Row("none, NaN in ignored rows", {"shape": (20, 130), "reduction": "none", "ignored": "some", "poison": True}),
        Row("targets outside", {"shape": (30, 70), "outside": True, "reduction": "none"}),
        Row("17001 classes", {"shape": (1, 17001)}),
    ],
    "linear_cross_entropy": [
        Row("mean", {"tokens": (37,), "width": 40, "classes": 300}, ALL),
        Row(
            "none, every option and result",
            {
                "tokens": (21,), "width": 23, "classes": 131, "reduction": "none", "label_smoothing": 0.1, "z_loss": 1e-3,
                "softcap": 20.0, "ignored": "some", "bias": True, "weights": "float32", "return_logprobs": True,
                "return_entropy": True,
            },
        ),
    ],
    "embedding": [
        Row("width 111", {"ids": (3, 20), "table": (50, 111)}, ALL),
        Row("one id throughout", {"ids": (300,), "table": (20, 33), "different": 1}),
        Row("padding, ids outside", {"ids": (5, 31), "table": (23, 40), "outside": True, "padding_idx": 4}),
        Row("many ids", {"ids": (3000,), "table": (400, 4)}),
    ],
    "rms_norm": [
        Row("width 111", {"shape": (7, 111)}, ALL),
        Row("width 2048", {"shape": (3, 2048)}),
        Row("width 17001", {"shape": (1, 17001)}),
        Row("many rows", {"shape": (600, 12)}),
        Row("no weight", {"shape": (9, 130), "weight": "none"}),
        Row("weight in float32, offset 1", {"shape": (20, 257), "weight": "float32", "weight_offset": 1.0}, (BF16,)),
        Row("leading dims turned", {"shape": (6, 5, 77), "layout": "turned"}),
    ],
    "layer_norm": [
        Row("width 111", {"shape": (7, 111)}, ALL),
        Row("width 2048, no bias", {"shape": (3, 2048), "bias": "none"}),
        Row("width 17001", {"shape": (1, 17001)}),
        Row("mean a million deviations away", {"shape": (5, 1100), "mean": 1e4, "scale": 1e-2}),
        Row("many rows, weight in float32", {"shape": (600, 12), "weight": "float32"}, (BF16,)),
    ],
    "add_rms_norm": [
        Row("width 111", {"shape": (7, 111)}, ALL),
        Row("width 17001", {"shape": (1, 17001)}),
        Row("many rows, weight offset 1", {"shape": (600, 12), "weight_offset": 1.0}),
        Row("no weight, leading dims turned", {"shape": (6, 5, 77), "weight": "none", "layout": "turned"}, (BF16,)),
    ],
    "glu": [
        Row("silu", {"shape": (9, 128)}, ALL),
        Row("halves of an odd width, gelu", {"shape": (7, 33), "layout": "halves", "activation": "gelu"}, (F32, BF16)),
        Row("halves, gelu_tanh", {"shape": (7, 32), "layout": "halves", "activation": "gelu_tanh"}),
        Row("tail of gelu", {"shape": (5, 64), "shift": -5.0, "scale": 0.5, "activation": "gelu"}),
        Row("relu2", {"shape": (7, 40), "activation": "relu2"}),
        Row("large gates, sigmoid", {"shape": (7, 40), "scale": 50.0, "activation": "sigmoid"}),
    ],
    "rope": [
        Row("q and k, heads inside", {"h": 4, "hk": 2, "s": 20, "layout": "bshd"}, ALL),
        Row("interleaved, packed", {"h": 3, "s": 12, "layout": "packed", "interleaved": True}),
        Row("part of an odd head", {"h": 2, "s": 12, "d": 37, "r": 9}, (F32, BF16)),
        Row("positions outside", {"h": 2, "s": 12, "d": 40, "r": 12, "positions": "outside"}),
    ],
    "transpose": [
        Row("odd sizes", {"shape": (33, 65)}, ALL),
        Row("blocks", {"shape": (80, 96)}, (F32, BF16)),
        Row("batch of small", {"shape": (50, 7, 9)}),
        Row("every second column", {"shape": (3, 40, 35), "layout": "every second column"}),
    ],
    "arrays": [Row("sum, join, copy", {"shape": (9, 41), "long": (8, 512)}, (F32, BF16))],
}  # fmt: skip


def checks(tiers: Sequence[Tier]) -> Iterator[tuple[Check, ...]]:
    """All checks, each for every tier: only the programs differ. An op without rows above uses its quick cases."""
    others = {op: suite.cases for op, suite in SUITES.items() if op not in CASES}
    quick = {op: [Row(c.name, dict(c.params)) for c in cases if "quick" in c.tags] for op, cases in others.items()}
    for op, rows in (CASES | quick).items():
        suite = ARRAYS if op == ARRAYS.op else SUITES[op]
        for row in rows:
            judged = suite if row.gradients else replace(suite, differentiable=())
            for dtype in row.dtypes:
                yield check(judged, Case(row.name, row.parameters), dtype, tiers)


def check(suite: Suite, case: Case, dtype: torch.dtype, tiers: Sequence[Tier]) -> tuple[Check, ...]:
    maker = testing.maker_of(suite, case, dtype)
    arguments = suite.make(maker, **case.params)
    output_grads: dict[str, Tensor | None] = {}  # drawn for the first tier
    programs = [_record(suite, arguments, maker, output_grads, tier) for tier in tiers]
    dtypes = {name: output.dtype for name, output in programs[0].outputs.items()}
    truth, plain = testing.expected(suite, arguments, maker, output_grads, dtypes)
    noise = testing.noise_scales(truth)
    made = []
    for program in programs:
        golden = {
            name: _golden(output, truth[name], plain[name], noise[name]) for name, output in program.outputs.items()
        }
        made.append(Check(suite.op, case.name, dtype, _in_words(suite.op, arguments), program, golden))
    return tuple(made)


def placed(value: Any) -> Any:
    """An argument with its tensors on the recording device."""
    from headwise.webgpu import array

    if isinstance(value, Tensor):
        return array(value)
    if isinstance(value, (list, tuple)) and any(isinstance(x, Tensor) for x in value):
        return type(value)(array(x) for x in value)
    return value


def _record(
    suite: Suite, arguments: Arguments, maker: testing.Maker, output_grads: dict[str, Tensor | None], tier: Tier
) -> Program:
    with recording(tier.capabilities) as tape:
        values = {name: placed(value) for name, value in arguments.items()}
        if isinstance(seed := values.get("dropout_seed"), int):  # an input: a call would write the number to the device
            values["dropout_seed"] = placed(torch.tensor([seed]))
        leaves = _leaves(suite, values)
        outputs = suite.run(values, None)
        for name, out in outputs.items():
            if name not in output_grads:
                output_grads[name] = maker.normal(*out.shape, dtype=out.dtype)
        results = {name: out.detach() for name, out in outputs.items()}
        targets = {name: out for name, out in outputs.items() if out.requires_grad}
        if targets:
            given = [placed(output_grads[name]) for name in targets]
            grads = torch.autograd.grad(list(targets.values()), list(leaves.values()), given, allow_unused=True)
            results.update({f"grad of {name}": g for name, g in zip(leaves, grads, strict=True) if g is not None})
        return tape.program(results)


def _leaves(suite: Suite, values: Arguments) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name in suite.differentiable:
        value = values.get(name)
        if isinstance(value, Tensor):
            found[name] = value.requires_grad_()
        elif isinstance(value, (list, tuple)):
            found.update({f"{name}[{i}]": x.requires_grad_() for i, x in enumerate(value)})
    return found


def _golden(output: Output, truth: Tensor, plain: Tensor, noise: float) -> Golden:
    budget = testing.budget(truth, plain, output.dtype, noise)
    stored = torch.finfo(STORED).eps / 2
    rms, largest = (budget.l2 + stored) * budget.norm, (budget.max + stored) * budget.peak
    return Golden(in_memory_order(truth, output), rms, largest)


def in_memory_order(x: Tensor, output: Output) -> Tensor:
    """The elements of x in the order of the output's memory."""
    flat = torch.empty(x.numel(), dtype=STORED)
    flat.as_strided(output.shape, output.strides).copy_(x)
    return flat


def _in_words(op: str, arguments: Arguments) -> str:
    def say(value: Any) -> str:
        if isinstance(value, Tensor):
            return "[" + ", ".join(map(str, value.shape)) + "]"
        if isinstance(value, (list, tuple)) and any(isinstance(x, Tensor) for x in value):
            return f"{len(value)} × {say(value[0])}"
        return repr(value)

    given = {name: value for name, value in arguments.items() if value is not None}
    return f"{op}({', '.join(f'{name}={say(value)}' for name, value in given.items())})"
