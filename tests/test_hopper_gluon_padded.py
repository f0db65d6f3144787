"""Padded batches that the Hopper kernels run as packed ones, with the kernels' own source run by `gluon_on_cpu`.

What does not exist, and what nobody sees, is NaN.
"""

from __future__ import annotations

import direct_attention as direct
import pytest
import torch
from gluon_on_cpu import OnCpu
from test_hopper_interpreted import assert_close, normal
from test_hopper_padded import (
    BATCH,
    HEADS,
    KEY_HEADS,
    KEYS,
    LENGTHS,
    QUERIES,
    arguments,
    for_small_calls,
    inside,
    nothing_to_see,
)

from headwise.backends.triton.hopper import coverage, padded, padding
from headwise.ops.attention._arguments import AttentionBackward

__all__ = ["for_small_calls"]  # a fixture that all tests here have
CALLS = [
    ("both ends", (None, 0), True, 64, 64, 0.0),
    ("all", (60, 5), True, 64, 64, 4.0),
    ("all", (None, None), False, 80, 80, 0.0),
    ("queries", (60, 5), False, 96, 96, 30.0),
    ("starts", (None, 0), True, 128, 128, 0.0),
    ("all", (None, 0), True, 192, 128, 4.0),
    ("starts", (None, None), False, 160, 160, 0.0),
]


@pytest.mark.parametrize(("name", "window", "sink", "dim", "value_dim", "cap"), CALLS, ids=str)
def test_padded(name, window, sink, dim, value_dim, cap, monkeypatch):
    monkeypatch.setattr(coverage, "BACKWARD_UNEQUAL", coverage.BACKWARD_UNEQUAL._replace(least_tiles=0))
    x = {"q": inside(BATCH, HEADS, QUERIES, dim, seed=1), "k": inside(BATCH, KEY_HEADS, KEYS, dim, seed=2)}
    x["v"] = inside(BATCH, KEY_HEADS, KEYS, value_dim, seed=3)
    if sink:
        x["sink"] = normal(HEADS, seed=4, dtype=torch.float32)
    lengths = {key: torch.tensor(value, dtype=torch.int64) for key, value in LENGTHS[name].items()}
    grads = inside(BATCH, HEADS, QUERIES, value_dim, seed=5), normal(BATCH, HEADS, QUERIES, seed=6, dtype=torch.float32)
    expected = direct.results_of(
        lambda **t: direct.attention(**t, **lengths, window=window, softcap=cap or None), x, grads, torch.float64
    )
    nothing_to_see(x, lengths, window, grads)
    call = arguments(x, lengths, window, dim)
    call = call._replace(flags=call.flags._replace(softcap=cap))
    assert padding.covers_forward(call) is padding.covers_backward(call) is None
    out, lse = padded.forward(OnCpu(dim), call)
    assert_close(out, expected["0"])
    assert torch.equal(lse.isinf(), expected["1"].isinf())
    assert torch.allclose(lse.double(), expected["1"], atol=1e-4)
    found = padded.backward(OnCpu(dim), AttentionBackward(grads[0], grads[1], out, lse, call, False, sink))
    for n, grad in zip(("q", "k", "v", "bias", "sink"), found, strict=True):
        assert (grad is None) == (n not in x)
        if grad is not None:
            assert_close(grad, expected[f"grad of {n}"])
