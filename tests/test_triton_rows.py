"""Rows in Triton's interpreter, short and long: softmax, rms_norm and cross entropy in all their kernels.

The interpreter has three multiprocessors (gpu.py): one row is few there, and 24 are many. Without it there is nothing to
run here; the conformance suite has long rows on a GPU.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import headwise as hw
from headwise import testing
from headwise.cases import add_rms_norm as add_rms_norm_cases
from headwise.cases import cross_entropy as cross_entropy_cases
from headwise.cases import layer_norm as layer_norm_cases
from headwise.cases import rms_norm as rms_norm_cases
from headwise.cases import softmax as softmax_cases
from headwise.config import settings

if not settings.triton_interpret:
    pytest.skip("for Triton's interpreter (TRITON_INTERPRET=1)", allow_module_level=True)

from triton.runtime.interpreter import InterpretedFunction

from headwise.backends.triton import (
    add_rms_norm,
    cross_entropy,
    layer_norm,
    norm_backward,
    norm_forward,
    rms_norm,
    softmax,
)

F32, BF16 = torch.float32, torch.bfloat16
SUITES = {
    softmax: softmax_cases.SUITE,
    rms_norm: rms_norm_cases.SUITE,
    layer_norm: layer_norm_cases.SUITE,
    add_rms_norm: add_rms_norm_cases.SUITE,
    cross_entropy: cross_entropy_cases.SUITE,
}

ONE_PASS, TWO_PASS = {"_forward_one_pass", "_backward_one_pass"}, {"_forward_two_pass", "_backward_two_pass"}
SPLIT = {"_forward_partials", "_forward_combine"}
SUMS = {"_backward_row_sums", "_backward_columns", "_add_partials"}
# By op, shape and dtype: the kernels that forward and backward run in. 33008 columns are read in lines, 33001 one by one.
CALLS = [
    (softmax, (7, 300), F32, ONE_PASS),
    (softmax, (1, 33008), BF16, SPLIT | {"_backward_partials", "_backward_combine"}),
    (softmax, (1, 33001), F32, SPLIT | {"_backward_partials", "_backward_combine"}),
    (softmax, (5, 70000), BF16, TWO_PASS),
    (softmax, (5, 33001), F32, TWO_PASS),
    (softmax, (25, 16400), BF16, {"_forward_prefetch", "_backward_two_pass"}),
    (softmax, (25, 16408), BF16, {"_forward_one_pass", "_backward_two_pass"}),  # a multiple of 8, and not of 16
    (rms_norm, (7, 300), F32, ONE_PASS | {"_add_partials"}),
    (rms_norm, (7, 10000), BF16, ONE_PASS | {"_add_partials"}),  # backward in two splits
    (rms_norm, (1, 33008), BF16, SPLIT | SUMS),
    (rms_norm, (1, 33001), F32, SPLIT | SUMS),
    (rms_norm, (5, 70000), BF16, {"_forward_two_pass"} | SUMS),
    (rms_norm, (5, 33001), F32, {"_forward_two_pass"} | SUMS),
    (layer_norm, (70, 300), BF16, ONE_PASS | {"_add_partials"}),  # backward: sums of rows stay apart
    (layer_norm, (7, 10000), BF16, ONE_PASS | {"_add_partials"}),
    (layer_norm, (1, 33008), BF16, SPLIT | SUMS),
    (layer_norm, (1, 33001), F32, SPLIT | SUMS),
    (layer_norm, (5, 70000), BF16, {"_forward_two_pass"} | SUMS),
    (layer_norm, (2, 33001), F32, {"_forward_two_pass"} | SUMS),
    (add_rms_norm, (70, 300), BF16, ONE_PASS | {"_add_partials"}),
    (add_rms_norm, (7, 10000), BF16, ONE_PASS | {"_add_partials"}),
    (add_rms_norm, (1, 33008), BF16, SPLIT | SUMS),
    (add_rms_norm, (5, 70000), BF16, {"_forward_two_pass"} | SUMS),
    (add_rms_norm, (2, 33001), F32, {"_forward_two_pass"} | SUMS),
    (cross_entropy, (5, 40000), BF16, {"_cross_entropy", "_reduce"}),
    (cross_entropy, (5, 40001), BF16, {"_cross_entropy", "_reduce"}),
    (cross_entropy, (5, 40000), F32, {"_cross_entropy", "_reduce"}),
]
HELPERS = {
    "_softmax_of", "gain_of", "_plus_bias", "_load", "_moments", "_line_moments", "_rstd", "_store_statistics",
    "_load_statistics", "_row_sums", "_of_rows", "_store_rows", "_add_rows", "_store_partials", "_sum_rows",
    "_capped", "_columns", "_ends", "_gradient", "_online", "_window", "block_columns", "online_softmax",
    "combine_softmax",
}  # fmt: skip


@pytest.fixture
def launched(monkeypatch):
    names = set()
    launch = InterpretedFunction.__getitem__

    def record(kernel, grid):
        names.add(kernel.fn.__name__)
        return launch(kernel, grid)

    monkeypatch.setattr(InterpretedFunction, "__getitem__", record)
    return names


def _name(value):
    if isinstance(value, tuple):
        return " × ".join(map(str, value))
    return value.__name__.rsplit(".", 1)[-1] if value in SUITES else str(value).removeprefix("torch.")


@pytest.mark.parametrize("explicit", [False, True], ids=["eager", "explicit"])
@pytest.mark.parametrize(
    ("op", "shape", "dtype", "kernels"), [pytest.param(*call, id=" ".join(map(_name, call[:3]))) for call in CALLS]
)
def test_triton_rows_are_within_budget(op, shape, dtype, kernels, explicit, launched):
    suite = SUITES[op]
    case = testing.Case(f"rows of {shape[-1]}", {"shape": shape})
    results = testing.measure(suite, case, dtype=dtype, device="cpu", backend="triton", explicit=explicit)
    assert results
    failures = [str(r) for r in results if not r.ok]
    assert not failures, "\n".join(failures)
    assert launched == kernels


NORMS = (rms_norm, layer_norm, add_rms_norm)  # their kernels are in norm_forward.py and norm_backward.py


@pytest.mark.parametrize("op", SUITES, ids=_name)
def test_triton_rows_go_through_every_kernel(op):
    """A kernel that nothing here launches would be one that no test without a GPU runs."""
    modules = (norm_forward, norm_backward) if op in NORMS else (op,)
    found = {name: value for module in modules for name, value in vars(module).items()}
    kernels = {name for name, value in found.items() if isinstance(value, InterpretedFunction)} - HELPERS
    assert kernels == set().union(*(names for module, _, _, names in CALLS if module is op))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("ignore_index", [-100, 2, 2**40])
def test_cross_entropy_sums_more_rows_than_it_takes_at_a_time(ignore_index, dtype, monkeypatch):
    monkeypatch.setattr(cross_entropy, "_REDUCED", 16)
    logits, targets = torch.randn(37, 7, dtype=F32, requires_grad=True), torch.arange(37, dtype=dtype) % 7
    targets[::3] = ignore_index if ignore_index < 2**31 else 0
    expected = F.cross_entropy(logits, targets.long(), ignore_index=ignore_index)
    loss = hw.cross_entropy(logits, targets, ignore_index=ignore_index, backend="triton")
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, logits), torch.autograd.grad(expected, logits))
