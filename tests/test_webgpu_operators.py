"""PyTorch's operator tests (OpInfo) on ``device="webgpu"``: an operator passes or refuses, and none is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from webgpu_operators import COMPUTED, NOT_JUDGED, listed, operators, row

PAGE = Path(__file__).resolve().parent.parent / "docs" / "webgpu-operators.md"

# Those that a transformer's training and decoding calls, and what people put around it.
_QUICK = {
    "abs",
    "add",
    "addcdiv",
    "addcmul",
    "addmm",
    "amax",
    "argmax",
    "bmm",
    "cat",
    "clamp",
    "cos",
    "cumsum",
    "eq",
    "exp",
    "expand",
    "gather",
    "index_add",
    "index_put",
    "index_select",
    "lerp",
    "log_softmax",
    "logical_and",
    "logsumexp",
    "masked_fill",
    "masked_scatter",
    "matmul",
    "mean",
    "mul",
    "native_layer_norm",
    "neg",
    "nn.functional.cross_entropy",
    "nn.functional.embedding",
    "nn.functional.gelu",
    "nn.functional.linear",
    "nn.functional.scaled_dot_product_attention",
    "nn.functional.silu",
    "norm",
    "pow",
    "repeat",
    "roll",
    "rsqrt",
    "scatter",
    "scatter_add",
    "sigmoid",
    "sin",
    "softmax",
    "sort",
    "split",
    "stack",
    "sub",
    "sum",
    "tanh",
    "topk",
    "tril",
    "unfold",
    "var",
    "where",
}
# Passed when this was written: fewer would be a loss.
_PASSES, _PASSES_IN_16_BITS, _GRADIENTS_IN_PART = 444, 415, 2


def test_the_operators_of_a_transformer_are_right_on_webgpu():
    rows = [row(op) for op in operators() if op.name in _QUICK and not op.variant_test_name]
    assert {r.name for r in rows} == _QUICK
    assert {r.name: r.wrong for r in rows if r.wrong} == {}
    in_part = {"nn.functional.embedding", "logsumexp"}  # some of their samples ask for what is not there
    assert {r.name for r in rows if r.verdict != "passes"} <= in_part


@pytest.mark.slow
@pytest.mark.parametrize("dtype", COMPUTED, ids=str)
def test_no_operator_is_wrong_on_webgpu(dtype):
    rows = [row(op, dtype=dtype) for op in operators(dtype)]
    assert {r.name: r.wrong for r in rows if r.wrong} == {}
    if dtype != torch.float32:
        assert sum(r.verdict == "passes" for r in rows) >= _PASSES_IN_16_BITS
        return
    assert sum(r.verdict == "passes" for r in rows) >= _PASSES
    # What the page says; a refusal may be an operator that another release of PyTorch has no tests for.
    text = PAGE.read_text(encoding="utf-8")
    found = {r.name: r.verdict for r in rows if r.verdict != NOT_JUDGED}
    for verdict in ("passes", "in part", "refuses"):
        assert {name: found[name] for name in listed(text, verdict) & found.keys() if found[name] != verdict} == {}


def test_the_page_of_operators_counts_what_it_lists_webgpu():
    text = PAGE.read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if line.startswith("| float32 |"))
    counts = [int(cell) for cell in line.strip("|").split("|")[1:]]
    assert counts == [*(len(listed(text, verdict)) for verdict in ("passes", "in part", "refuses")), 0]
    assert counts[0] >= _PASSES
    assert [line.split("|")[-2].strip() for line in text.splitlines() if line.startswith("| ") and "0 |" in line] == [
        "0"
    ] * 8


@pytest.mark.slow
def test_the_gradients_of_a_transformers_operators_are_right_on_webgpu():
    chosen = [op for op in operators() if op.name in _QUICK and op.supports_autograd and not op.variant_test_name]
    rows = [row(op, gradients=True) for op in chosen]
    assert {r.name: r.wrong for r in rows if r.wrong} == {}
    assert sum(r.verdict == "passes" for r in rows) >= len(rows) - _GRADIENTS_IN_PART
