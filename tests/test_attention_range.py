"""The far ends of what attention takes: head dims, dtypes, logits, strides, zero sizes."""

from __future__ import annotations

import math

import direct_attention as direct
import pytest
import torch
from attention_calls import ints, maker, on_every_backend, ours, packed_call, theirs
from backends_under_test import RUNNABLE

import headwise as hw
from headwise.backends.registry import BACKENDS

DOUBLE = [b.name for b in BACKENDS if b.name in RUNNABLE and torch.float64 in b.rules.DTYPES]


@pytest.mark.parametrize(
    ("D", "Dv"),
    [
        (1, 1),
        (1, 256),
        (256, 1),
        (64, 64),
        (80, 80),
        (96, 96),
        (111, 111),
        (128, 192),
        (192, 128),
        (255, 3),
        (256, 256),
    ],
)
@on_every_backend
def test_head_dims_up_to_256_both_ways(backend, D, Dv):
    m = maker(backend)
    x = {"q": m.normal(1, 4, 70, D), "k": m.normal(1, 2, 90, D), "v": m.normal(1, 2, 90, Dv)}
    direct.assert_within_budget(ours(backend, causal=True), theirs(causal=True), x)


@pytest.mark.parametrize(("D", "Dv"), [(512, 512), (512, 64), (64, 512), (300, 400)])
@on_every_backend
def test_head_dims_up_to_512_forward_and_decode(backend, D, Dv):
    m = maker(backend)
    x = {"q": m.normal(2, 4, 70, D), "k": m.normal(2, 2, 90, D), "v": m.normal(2, 2, 90, Dv)}
    direct.assert_within_budget(ours(backend, causal=True), theirs(causal=True), x, backward=False)
    direct.assert_within_budget(
        lambda q: hw.attention_decode(q, x["k"], x["v"], ints(backend, 90, 31), return_lse=True, backend=backend),
        lambda q: direct.decode(q, x["k"].to(q.dtype), x["v"].to(q.dtype), [90, 31]),
        {"q": x["q"][:, :, 0]},
        backward=False,
    )


@pytest.mark.parametrize("backend", DOUBLE)
def test_float64_is_float64_throughout(backend):
    m = maker(backend, torch.float64)
    generator = torch.Generator().manual_seed(0)
    x = {
        n: torch.randn(1, h, 300, 16, generator=generator, dtype=torch.float64).to(m.device)
        for n, h in (("q", 4), ("k", 2), ("v", 2))
    }
    grads = (torch.randn(1, 4, 300, 16, generator=generator, dtype=torch.float64).to(m.device),)
    for flags in ({"causal": True}, {"window": (50, 3), "softcap": 2.0}):
        found = direct.results_of(lambda f=flags, **t: (hw.attention(**t, **f, backend=backend),), x, grads)
        truth = direct.results_of(lambda f=flags, **t: theirs(**f)(**t)[:1], x, grads)
        for name, value in found.items():
            torch.testing.assert_close(value, truth[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("size", [30.0, 3e3, 1e6])
@on_every_backend
def test_large_logits_do_not_overflow(backend, size):
    m = maker(backend)
    q, k, v = m.normal(1, 2, 70, 16), m.normal(1, 2, 200, 16), m.normal(1, 2, 200, 16)
    winner = torch.arange(70, device=m.device) * 2
    k[:, :, winner] = q / q.square().sum(-1, keepdim=True)  # the logit of the winner is `size`, the others' are less
    k[:, :, 1::2] = 0
    k[:, :, 140:] = 0
    mask = torch.zeros(70, 200, dtype=torch.bool, device=m.device)
    mask[:, 1::2] = True
    mask[torch.arange(70), winner] = True
    out, lse = hw.attention(q, k, v, mask=mask, scale=size, return_lse=True, backend=backend)
    torch.testing.assert_close(out, v[:, :, winner], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, torch.full_like(lse, size), rtol=1e-5, atol=0)


@on_every_backend
def test_logits_far_below_zero_are_not_an_empty_row(backend):
    """Every logit is about -3e3: exp of it is 0, and its softmax is not."""
    m = maker(backend)
    x = {"q": m.normal(1, 2, 70, 16), "k": m.normal(1, 2, 200, 16), "v": m.normal(1, 2, 200, 16)}
    bias = torch.full((1, 1, 70, 200), -3e3, device=m.device)
    out, lse = hw.attention(**x, bias=bias, return_lse=True, backend=backend)
    plain, plain_lse = hw.attention(**x, return_lse=True, backend=backend)
    torch.testing.assert_close(out, plain, rtol=2e-3, atol=1e-3)
    torch.testing.assert_close(lse, plain_lse - 3e3, rtol=1e-6, atol=0)
    sunk = hw.attention(**x, bias=bias, sink=torch.full((2,), -3e3, device=m.device), backend=backend)
    shown = hw.attention(**x, sink=torch.zeros(2, device=m.device), backend=backend)
    torch.testing.assert_close(sunk, shown, rtol=2e-3, atol=1e-3)


@on_every_backend
def test_sink_joins_the_denominator_only(backend):
    m = maker(backend)
    x = {"q": m.normal(1, 2, 70, 16), "k": m.normal(1, 2, 90, 16), "v": m.normal(1, 2, 90, 16)}
    sink = torch.tensor([0.7, 4.0], device=m.device)
    out, lse = hw.attention(**x, return_lse=True, backend=backend)
    sunk, sunk_lse = hw.attention(**x, sink=sink, return_lse=True, backend=backend)
    expected_lse = torch.logaddexp(lse.double(), sink.double()[None, :, None])
    torch.testing.assert_close(sunk_lse.double(), expected_lse, rtol=1e-6, atol=1e-6)
    share = torch.exp(lse.double() - expected_lse)[..., None]
    torch.testing.assert_close(sunk.double(), out.double() * share, rtol=1e-4, atol=1e-6)
    probs = hw.attention_probs(x["q"], x["k"], sink=sink, backend=backend)
    torch.testing.assert_close(probs.sum(-1).double(), share[..., 0], rtol=1e-5, atol=0)
    nothing = hw.attention(**x, sink=torch.full((2,), -math.inf, device=m.device), backend=backend)
    torch.testing.assert_close(nothing, out, rtol=1e-5, atol=1e-6)


@on_every_backend
def test_softcap_comes_before_bias(backend):
    m = maker(backend)
    x = {"q": m.normal(1, 2, 70, 16) * 5, "k": m.normal(1, 2, 90, 16), "v": m.normal(1, 2, 90, 16)}
    x["bias"] = m.normal(1, 2, 70, 90) * 5
    direct.assert_within_budget(ours(backend, softcap=2.0), theirs(softcap=2.0), x)


@on_every_backend
def test_last_dim_of_one_element_has_no_stride(backend):
    """(B, H, 1, S) transposed: the stride of a dim of size 1 is never used, whatever it says."""
    m = maker(backend)
    x = {"q": m.normal(1, 2, 1, 70).mT, "k": m.normal(1, 2, 1, 90).mT, "v": m.normal(1, 2, 1, 90).mT}
    assert x["q"].stride(-1) == 70
    direct.assert_within_budget(ours(backend), theirs(), x)


@on_every_backend
def test_inputs_that_share_memory(backend):
    """q, k and v as slices of one projection, which is how models hold them."""
    m = maker(backend)
    joined = m.normal(2, 70, 3, 4, 16)
    x = dict(zip("qkv", (t.transpose(1, 2) for t in joined.unbind(2)), strict=True))
    direct.assert_within_budget(ours(backend, causal=True), theirs(causal=True), x)
    packed = dict(zip("qkv", joined[0].unbind(1), strict=True))
    direct.assert_within_budget(
        packed_call(backend, [0, 30, 70], [0, 30, 70], causal=True),
        lambda q, k, v: direct.varlen(q, k, v, [0, 30, 70], [0, 30, 70], causal=True),
        packed,
    )


ZERO_SIZES = {
    "no batch": (0, 4, 2, 5, 7),
    "no queries": (2, 4, 2, 0, 7),
    "no keys": (2, 4, 2, 5, 0),
    "nothing": (2, 4, 2, 0, 0),
}


@pytest.mark.parametrize("name", ZERO_SIZES)
@on_every_backend
def test_zero_sizes_are_ordinary(backend, name):
    B, Hq, Hk, Sq, Sk = ZERO_SIZES[name]
    m = maker(backend)
    x = [m.normal(B, Hq, Sq, 8), m.normal(B, Hk, Sk, 8), m.normal(B, Hk, Sk, 6)]
    flags = {
        "causal": True,
        "bias": m.normal(B, 1, Sq, Sk),
        "mask": m.coin(1, 1, Sq, Sk),
        "kv_lengths": m.integers(0, Sk + 1, B),
        "softcap": 3.0,
    }
    for extra in ({}, flags):
        leaves = [t.requires_grad_() for t in x]
        out, lse = hw.attention(*leaves, **extra, return_lse=True, backend=backend)
        assert out.shape == (B, Hq, Sq, 6)
        assert lse.shape == (B, Hq, Sq)
        assert (out == 0).all()
        assert (lse == -math.inf).all()
        grads = torch.autograd.grad([out, lse], leaves, [torch.ones_like(out), torch.ones_like(lse)])
        assert all(g.shape == t.shape and (g == 0).all() for g, t in zip(grads, leaves, strict=True))
        probs = hw.attention_probs(x[0], x[1], backend=backend)
        assert probs.shape == (B, Hq, Sq, Sk)
    out = hw.attention_decode(x[0].detach(), x[1].detach(), x[2].detach(), m.integers(0, Sk + 1, B), backend=backend)
    assert out.shape == (B, Hq, Sq, 6)
    assert (out == 0).all()


@on_every_backend
def test_packed_batch_of_no_sequences(backend):
    m = maker(backend)
    bounds = ints(backend, 0)
    out, lse = hw.attention_varlen(
        m.normal(3, 4, 8), m.normal(5, 2, 8), m.normal(5, 2, 6), bounds, bounds, 0, 0, return_lse=True, backend=backend
    )
    assert torch.equal(out, torch.zeros(3, 4, 6, device=m.device))
    assert torch.equal(lse, torch.full((4, 3), -math.inf, device=m.device))
