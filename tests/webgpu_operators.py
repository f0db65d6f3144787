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


@dataclass
class Row:
    name: str
    passes: int = 0
    refuses: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        return "wrong" if self.wrong else "passes" if not self.refuses else "in part" if self.passes else "refuses"


def operators() -> Iterator[Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    for op in op_db:
        if (
            torch.float32 not in op.dtypes
            or op.name in _NOT_COMPARED | _OF_THE_CPU
            or op.variant_test_name == "triton_optimized"
        ):
            continue
        if op.name in _AND_YET or not op.name.startswith(_ELSEWHERE):
            yield op


def row(op: Any, gradients: bool = False) -> Row:
    """One operator, over samples that PyTorch draws for it."""
    made = Row(op.name + (f".{op.variant_test_name}" if op.variant_test_name else ""))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        for i, sample in enumerate(op.sample_inputs("cpu", torch.float32, requires_grad=False)):
            if i == (_GRADIENT_SAMPLES if gradients else _SAMPLES):
                break
            call = (sample.input, sample.args, sample.kwargs)
            if not sample.kwargs.get("dropout_p") and _size(call) <= _MORE:
                _judge(made, op, call, gradients)
    return made


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
    result = testing.compare("result", ours.cpu(), true.double(), theirs, noise)
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
            return dtype if dtype is not None and x is torch.float32 else x
        x = x.detach()
        return (x.to(dtype) if dtype is not None and x.is_floating_point() else x.clone()).to(device)

    return tree_map(move, call)


def _floats(call: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(call) if isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel()]


def _size(call: Any) -> int:
    return max((x.numel() for x in tree_leaves(call) if isinstance(x, torch.Tensor)), default=0)
