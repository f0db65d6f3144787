"""Masks on WebGPU: tiles that are hidden are skipped, and everything else is computed once."""

from __future__ import annotations

import pytest
import torch

import headwise as hw
import headwise.webgpu
from headwise.backends.webgpu import runtime
from headwise.config import settings


def error(q: int, k: int, mask: torch.Tensor, **flags) -> float:
    """Of the result and the gradients, against float64; of the largest number of each."""
    *tensors, grad = (torch.randn(1, 1, n, 16) for n in (q, k, k, q))

    def run(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(dtype).to(device).requires_grad_() for x in tensors]
        out = hw.attention(*leaves, mask=mask.to(device), **flags)
        gradients = torch.autograd.grad(out, leaves, grad.to(dtype).to(device))
        return [x.detach().cpu().double() for x in (out, *gradients)]

    pairs = zip(run("webgpu", torch.float32), run("cpu", torch.float64), strict=True)
    return max(((ours - true).abs().max() / true.abs().max()).item() for ours, true in pairs)


@pytest.mark.parametrize(("q", "k", "window"), [(5, 1300, (1205, 3)), (1300, 5, (2, 1203))], ids=["keys", "queries"])
def test_what_is_skipped_moves_the_chains_after_it(q, k, window):
    """Float32 sums over many rows are cut into chains: none is in two of them, wherever a band begins."""
    torch.manual_seed(0)
    seen = torch.zeros(max(q, k), dtype=torch.bool)
    for first in (64, 128, 576, 640, 1152):
        seen[first : first + 64] = True
    assert error(q, k, seen.view((1, k) if k > q else (q, 1)).expand(q, k), window=window) < 3e-6


@pytest.mark.parametrize("queries", [257, 276])
def test_a_mask_larger_than_a_binding_whose_last_block_is_short(monkeypatch, queries):
    monkeypatch.setattr(settings, "webgpu_binding_bytes", 16384)
    runtime.forget()
    torch.manual_seed(0)
    try:
        mask = torch.rand(1, 1, queries, 100) < 0.5
        mask[:, :, -40:, :64] = False
        assert error(queries, 100, mask) < 3e-6
    finally:
        monkeypatch.undo()
        runtime.forget()
