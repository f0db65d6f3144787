"""The same inputs give the same bits, a thousand times over, while other work shakes the machine."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gpu_machine import DEVICE, differing, gpu, ints, normal
from torch import Tensor

import headwise as hw

__all__ = ["gpu"]

SHAPES = {
    "bf16 D 64 causal grouped": (torch.bfloat16, 64, {"causal": True}),
    "f16 D 128 window softcap": (torch.float16, 128, {"window": (200, 0), "softcap": 20.0}),
    "f32 D 80": (torch.float32, 80, {}),
}


def assert_repeats(run: Callable[[], tuple[Tensor, ...]], times: int) -> None:
    first = run()
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    noise = normal(1024, 1024)
    side = torch.cuda.Stream()
    for repeat in range(times):
        # Work on another stream changes which program runs when; memory full of NaN shows what is read unwritten.
        with torch.cuda.stream(side):
            for _ in range(repeat % 4):
                noise = (noise @ noise).clamp_(-1, 1)
        scratch = torch.full(((repeat % 7) * 100_003,), torch.nan, device=DEVICE)
        del scratch
        wrong += differing(first, run())
    torch.cuda.synchronize()
    assert int(wrong) == 0, f"{int(wrong)} elements differed over {times} repeats"


def dense(shape: str) -> tuple[list[Tensor], dict, Tensor]:
    dtype, head_dim, flags = SHAPES[shape]
    q = normal(2, 8, 777, head_dim, seed=1, dtype=dtype)
    k, v = (normal(2, 2, 1000, head_dim, seed=s, dtype=dtype) for s in (2, 3))
    bias, sink = normal(1, 8, 1, 1000, seed=4, dtype=dtype), normal(8, seed=5, dtype=dtype)
    return [q, k, v, bias, sink], flags, normal(2, 8, 777, head_dim, seed=6, dtype=dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_backward_repeats_a_thousand_times(shape):
    inputs, flags, grad = dense(shape)
    q, k, v, bias, sink = leaves = [x.requires_grad_() for x in inputs]
    out = hw.attention(q, k, v, bias=bias, sink=sink, **flags)
    assert_repeats(lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True), 1000)


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_forward_repeats(shape):
    (q, k, v, bias, sink), flags, _ = dense(shape)
    assert_repeats(lambda: hw.attention(q, k, v, bias=bias, sink=sink, return_lse=True, **flags), 200)


def test_packed_attention_repeats():
    cu = ints(0, 300, 300, 301, 1500, 2000)
    q, k, v, grad = (normal(2048, 8, 64, seed=s) for s in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def run() -> tuple[Tensor, ...]:
        out = hw.attention_varlen(q, k, v, cu, cu, 1199, 1199, causal=True)
        return (out.detach(), *torch.autograd.grad(out, leaves, grad))

    assert_repeats(run, 200)


def test_decode_repeats_and_does_not_depend_on_the_batch():
    lengths = ints(5000, 1, 0, 4097)
    q, k, v = normal(4, 32, 128, seed=1), normal(4, 8, 5120, 128, seed=2), normal(4, 8, 5120, 128, seed=3)
    assert_repeats(lambda: hw.attention_decode(q, k, v, lengths, return_lse=True), 200)
    together = hw.attention_decode(q, k, v, lengths, return_lse=True)
    for b in range(4):
        alone = hw.attention_decode(q[b : b + 1], k[b : b + 1], v[b : b + 1], lengths[b : b + 1], return_lse=True)
        assert int(differing(alone, tuple(x[b : b + 1] for x in together))) == 0


def test_the_other_ops_repeat():
    x, weight = normal(3000, 1500, seed=1), normal(1500, seed=2)
    ids = torch.randint(0, 50, (5000,), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    table = normal(50, 1000, seed=3)
    targets = torch.randint(0, 1500, (3000,), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    leaves = [t.requires_grad_() for t in (x, weight, table)]

    def run() -> tuple[Tensor, ...]:
        norm = hw.rms_norm(x, weight)
        rows = hw.embedding(ids, table)
        loss = hw.cross_entropy(hw.softmax(norm), targets) + rows.float().square().mean()
        return (loss.detach(), *torch.autograd.grad(loss, leaves))

    assert_repeats(run, 200)
