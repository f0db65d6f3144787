"""Float32 results from 16-bit inputs on CUDA. Weights are rounded to 16 bits there, results are not."""

from __future__ import annotations

import pytest
import torch
from gpu_machine import gpu, normal

import headwise as hw
from headwise.ops.attention import unrounded

__all__ = ["gpu"]

FLAGS = {"window": (300, 0), "scale": 0.2, "softcap": None, "deterministic": True}


def far_off(ours, truth):
    return ((ours.cpu().double() - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_not_rounded_is_nearer_to_float64(gpu, dtype, head_dim):
    q, k, v, grad = (normal(2, heads, 700, head_dim, seed=i, dtype=dtype) for i, heads in enumerate((4, 2, 2, 4)))
    rounded, lse = hw.attention(q, k, v, return_lse=True, **FLAGS)
    out, _ = unrounded.attention(q, k, v, backend=None, **FLAGS)
    wide = [x.cpu().double() for x in (grad, q, k, v)]
    truth = hw.attention(*wide[1:], backend="cpu", **FLAGS)
    assert (rounded.dtype, out.dtype) == (dtype, torch.float32)
    assert far_off(out, truth) < far_off(rounded, truth)

    true = hw.attention_backward(*wide, rounded.cpu().double(), lse.cpu().double(), backend="cpu", **FLAGS)
    low = hw.attention_backward(grad, q, k, v, rounded, lse, **FLAGS)
    high = unrounded.attention_backward(grad, q, k, v, rounded, lse, backend=None, **FLAGS)
    for ours, theirs, x in zip(high, low, true, strict=True):
        assert (ours.dtype, theirs.dtype) == (torch.float32, dtype)
        assert far_off(ours, x) < far_off(theirs, x)
