"""PyTorch's own operator tests as a table: what ``device="webgpu"`` passes, refuses, and gets wrong."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

import headwise.webgpu  # noqa: F401  registers the device
from headwise import testing

DEVICE = "webgpu"
_SAMPLES, _GRADIENT_SAMPLES = 12, 3  # of each operator: software computes them
COMPUTED = (torch.float32, torch.float16, torch.bfloat16)
_MORE = 1 << 12  # elements of the largest tensor of a sample: software computes it

# Random numbers differ from the CPU's by right, and uninitialised memory has no value.
_NOT_COMPARED = {
    "bernoulli",
    "cauchy",
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "exponential",
    "geometric",
    "log_normal",
    "multinomial",
    "new_empty",
    "new_empty_strided",
    "nn.functional.alpha_dropout",
    "nn.functional.dropout",
    "nn.functional.dropout2d",
    "nn.functional.dropout3d",
    "nn.functional.feature_alpha_dropout",
    "nn.functional.multi_head_attention_forward",
    "nn.functional.rrelu",
    "normal",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
    "uniform",
}
# What the CPU alone does: its batch norm in inference leaves out statistics that nobody reads; split points come from there.
_OF_THE_CPU = {"native_batch_norm", "_native_batch_norm_legit", "tensor_split"}
# In 16 bits PyTorch's CPU rounds the statistics that only a backward reads; its GPUs keep them in float32, as we do.
_STATISTICS = {"native_layer_norm", "_batch_norm_with_update"}
# In 16 bits many numbers are equal, and which of them comes first is open. Their values are compared.
_TIES = {"topk"}
# Linear algebra, transforms and sparse tensors: nothing of a transformer; all of it refuses.
_ELSEWHERE = (
    "linalg.",
    "sparse.",
    "fft",
    "special.",
    "to_sparse",
    "stft",
    "istft",
    "nn.functional.conv_trans",
    "svd",
    "cholesky",
    "torch.ops",
)
_AND_YET = ("linalg.vector_norm",)


VERDICTS = ("passes", "in part", "refuses", "wrong")
NOT_JUDGED = "not judged"  # no sample that the CPU takes, and float64, and that is small enough


@dataclass
class Row:
    name: str
    family: str = ""
    in_16_bits: bool = False
    passes: int = 0
    refuses: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        if self.wrong:
            return "wrong"
        if not self.refuses:
            return "passes" if self.passes else NOT_JUDGED
        return "in part" if self.passes else "refuses"


def operators(dtype: torch.dtype = torch.float32) -> Iterator[Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    for op in op_db:
        if (
            dtype not in op.dtypes
            or op.name in _NOT_COMPARED | _OF_THE_CPU
            or op.variant_test_name == "triton_optimized"
            or (op.name in _STATISTICS and dtype.itemsize == 2)
        ):
            continue
        if op.name in _AND_YET or not op.name.startswith(_ELSEWHERE):
            yield op


def row(op: Any, gradients: bool = False, dtype: torch.dtype = torch.float32) -> Row:
    """One operator, over samples that PyTorch draws for it."""
    name = op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")
    made = Row(name, _family(op), dtype.itemsize == 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        for i, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=False)):
            if i == (_GRADIENT_SAMPLES if gradients else _SAMPLES):
                break
            call = (sample.input, sample.args, sample.kwargs)
            if not sample.kwargs.get("dropout_p") and _size(call) <= _MORE:
                _judge(made, op, call, gradients)
    return made


_FAMILIES = {
    "UnaryUfuncInfo": "Functions of one number",
    "BinaryUfuncInfo": "Functions of two numbers",
    "ReductionOpInfo": "Reductions",
}
_NN, _OTHERS = "`torch.nn.functional`", "Others: products, shapes, views, joins, indices, order, factories"


def _family(op: Any) -> str:
    found = _FAMILIES.get(type(op).__name__, _OTHERS)
    return _NN if op.name.startswith("nn.functional.") else found


def _judge(made: Row, op: Any, call: Any, gradients: bool) -> None:
    run = _gradients if gradients else _results
    try:
        plain = run(op, call, "cpu", None)
        truth = run(op, call, "cpu", torch.float64)
    except Exception:  # not for this dtype, or not differentiable
        return
    try:
        found = run(op, call, DEVICE, None)
    except NotImplementedError:
        made.refuses += 1
        return
    except Exception as error:
        made.wrong.append(f"{type(error).__name__}: {error}"[:200])
        return
    noise = max((x.abs().nan_to_num(0, 0, 0).max().item() for x in _floats(call)), default=0.0)
    for ours, theirs, true in zip(found, plain, truth, strict=True):
        if made.in_16_bits and made.name in _TIES and not theirs.dtype.is_floating_point:
            continue
        problem = _problem(ours, theirs, true, noise)
        if problem:
            made.wrong.append(problem)
            return
    made.passes += 1


def _problem(ours: Any, theirs: Any, true: Any, noise: float) -> str:
    if not isinstance(theirs, torch.Tensor):
        return "" if ours == theirs or theirs != theirs else f"{ours} for {theirs}"
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return f"{tuple(ours.shape)} {ours.dtype} for {tuple(theirs.shape)} {theirs.dtype}"
    if not theirs.dtype.is_floating_point:
        return "" if torch.equal(ours.cpu(), theirs) else "other whole numbers"
    truth = true.double()
    no_room = truth.to(theirs.dtype).isinf() & theirs.isinf()  # of a float16
    result = testing.compare("result", ours.cpu(), torch.where(no_room, theirs.double(), truth), theirs, noise)
    return "" if result.ok else str(result)


def _results(op: Any, call: Any, device: str, dtype: torch.dtype | None) -> list[Any]:
    value, args, kwargs = _moved(call, device, dtype)
    return tree_leaves(op.op(value, *args, **kwargs))


def _gradients(op: Any, call: Any, device: str, dtype: torch.dtype | None) -> list[Any]:
    value, args, kwargs = moved = _moved(call, device, dtype)
    leaves = [x.requires_grad_() for x in _floats(moved)]
    results = [y for y in tree_leaves(op.op(value, *args, **kwargs)) if isinstance(y, torch.Tensor) and y.requires_grad]
    weights = [
        torch.arange(1.0, y.numel() + 1, dtype=torch.float64).sin().to(y.dtype).view(y.shape).to(y.device)
        for y in results
    ]
    found = torch.autograd.grad(results, leaves, weights, allow_unused=True) if results else []
    return [g.detach() for g in found if g is not None]


def _moved(call: Any, device: str, dtype: torch.dtype | None) -> Any:
    def move(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return dtype if dtype is not None and x in COMPUTED else x
        x = x.detach()
        return (x.to(dtype) if dtype is not None and x.is_floating_point() else x.clone()).to(device)

    return tree_map(move, call)


def _floats(call: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(call) if isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel()]


def _size(call: Any) -> int:
    return max((x.numel() for x in tree_leaves(call) if isinstance(x, torch.Tensor)), default=0)


# ---------------------------------------------------------------------------------------------------------------- the page

_INTRODUCTION = f"""# Operators of `device="webgpu"`

PyTorch's own operator tests (OpInfo) on [`device="webgpu"`](webgpu-device.md), written by `scripts/write_operators.py`.
Run on {{device}} with PyTorch {{version}}: up to {_SAMPLES} samples of each operator, of tensors of up to {_MORE}
elements. A result is right if it is within [the error budget](error-budget.md): twice the CPU's own distance from float64,
and a rounding band; whole numbers are equal.

*Passes*: every sample is right. *In part*: some samples raise `NotImplementedError`, often for one option or dtype, and the
others are right. *Refuses*: all of them raise it. *Wrong*: any sample is anything else. Not counted are linear algebra,
transforms, sparse tensors and `torch.special`, which mostly refuse; random numbers, which are others by right; and what the
CPU computes in no such dtype. Gradients have tests of their own (`tests/test_webgpu_operators.py`).
"""


def page(tables: dict[torch.dtype, list[Row]], device: str, version: str) -> str:
    """What the operators of each dtype give, as Markdown; the lists are of float32."""
    lines = [_INTRODUCTION.format(device=device, version=version)]
    lines += [f"| | {' | '.join(VERDICTS)} |", "| --- |" + " ---: |" * len(VERDICTS)]
    for dtype, rows in tables.items():
        lines.append(_counted(str(dtype).removeprefix("torch."), rows))
    rows = tables[torch.float32]
    lines += ["", "By family, in float32:", "", f"| | {' | '.join(VERDICTS)} |", "| --- |" + " ---: |" * len(VERDICTS)]
    families = [*_FAMILIES.values(), _NN, _OTHERS]
    lines += [_counted(family, [r for r in rows if r.family == family]) for family in families]
    for verdict in ("refuses", "in part", "passes"):
        lines += ["", f"## {verdict.capitalize()}, in float32"]
        for family in families:
            names = [f"`{r.name}`" for r in rows if r.family == family and r.verdict == verdict]
            if names:
                lines += ["", f"**{family}**: {', '.join(names)}"]
    return "\n".join(lines) + "\n"


def _counted(name: str, rows: list[Row]) -> str:
    return f"| {name} | {' | '.join(str(sum(r.verdict == v for r in rows)) for v in VERDICTS)} |"


def listed(text: str, verdict: str) -> set[str]:
    """The operators that a page lists under a verdict."""
    part = text.partition(f"## {verdict.capitalize()}, in float32")[2].partition("\n## ")[0]
    lists = [line.partition("**: ")[2] for line in part.splitlines() if line.startswith("**")]
    return {name.strip("`") for line in lists for name in line.split(", ")}
