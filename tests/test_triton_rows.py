"""Rows in Triton's interpreter, short and long: softmax, rms_norm and cross entropy in all their kernels.

The interpreter has three multiprocessors (rows.py): one row is few there, and 24 are many. Without it there is nothing to
run here; the conformance suite has long rows on a GPU.
"""

from __future__ import annotations

import pytest
import torch

from headwise import testing
from headwise.cases import cross_entropy as cross_entropy_cases
from headwise.cases import rms_norm as rms_norm_cases
from headwise.cases import softmax as softmax_cases
from headwise.config import settings

if not settings.triton_interpret:
    pytest.skip("for Triton's interpreter (TRITON_INTERPRET=1)", allow_module_level=True)

from triton.runtime.interpreter import InterpretedFunction

from headwise.backends.triton import cross_entropy, rms_norm, softmax

F32, BF16 = torch.float32, torch.bfloat16
SUITES = {
    softmax: softmax_cases.SUITE,
    rms_norm: rms_norm_cases.SUITE,
    cross_entropy: cross_entropy_cases.SUITE,
}

SPLIT = {"_forward_parts", "_forward_join"}
SUMS = {"_backward_rows", "_backward_columns", "_add_parts"}
# By op, shape and dtype: the kernels that forward and backward run in. 33008 columns are read in lines, 33001 one by one.
CALLS = [
    (softmax, (7, 300), F32, {"_forward_held", "_backward_held"}),
    (softmax, (1, 33008), BF16, SPLIT | {"_backward_parts", "_backward_join"}),
    (softmax, (1, 33001), F32, SPLIT | {"_backward_parts", "_backward_join"}),
    (softmax, (5, 70000), BF16, {"_forward_walk", "_backward_walk"}),
    (softmax, (5, 33001), F32, {"_forward_walk", "_backward_walk"}),
    (softmax, (25, 16400), BF16, {"_forward_ahead", "_backward_walk"}),
    (softmax, (25, 16408), BF16, {"_forward_held", "_backward_walk"}),  # a multiple of 8, and not of 16
    (rms_norm, (7, 300), F32, {"_forward_held", "_backward_held", "_add_parts"}),
    (rms_norm, (7, 10000), BF16, {"_forward_held", "_backward_held", "_add_parts"}),  # in two shares
    (rms_norm, (1, 33008), BF16, SPLIT | SUMS),
    (rms_norm, (1, 33001), F32, SPLIT | SUMS),
    (rms_norm, (5, 70000), BF16, {"_forward_walk"} | SUMS),
    (rms_norm, (5, 33001), F32, {"_forward_walk"} | SUMS),
    (cross_entropy, (5, 40000), BF16, {"_cross_entropy"}),
    (cross_entropy, (5, 40001), BF16, {"_cross_entropy"}),
    (cross_entropy, (5, 40000), F32, {"_cross_entropy"}),
]
HELPERS = {
    "_softmax_of", "_gain", "_capped", "_columns", "_ends", "_gradient", "block_columns", "online_softmax", "join_softmax",
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


@pytest.mark.parametrize("op", SUITES, ids=_name)
def test_triton_rows_go_through_every_kernel(op):
    """A kernel that nothing here launches would be one that no test without a GPU runs."""
    kernels = {name for name, value in vars(op).items() if isinstance(value, InterpretedFunction)} - HELPERS
    assert kernels == set().union(*(names for module, _, _, names in CALLS if module is op))
