"""Inputs that are legal and rare: vectors with gaps, offsets that wrap, results that are changed in place."""

from __future__ import annotations

import math

import pytest
import torch
from backends_under_test import DEVICE, RUNNABLE, verdict

import headwise as hw
from headwise.ops.attention import decode

BACKENDS = [b for b in RUNNABLE if verdict("attention", b) is None]


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def _normal(backend, *shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE[backend])


def _with_gaps(x):
    """The same vector, with something else between its elements."""
    return torch.stack([x, torch.full_like(x, 77)], 1).flatten()[::2]


def _results(call, *leaves):
    leaves = [x.detach().requires_grad_() for x in leaves]
    out, lse = call(*leaves)
    return [out, lse, *torch.autograd.grad(out.square().sum() + lse.nan_to_num(neginf=0).sum(), leaves)]


@pytest.mark.parametrize("layout", ["gaps", "expanded"])
def test_lengths_and_sinks_of_any_stride(backend, layout):
    q, k, v = (_normal(backend, 3, 2, 9, 8, seed=i) for i in range(3))
    lengths = torch.tensor([3, 3, 3] if layout == "expanded" else [3, 9, 5], device=q.device)
    sink = torch.tensor([0.5, 0.5] if layout == "expanded" else [0.5, -1.0], device=q.device)

    def strided(x):
        return x[:1].expand(x.shape) if layout == "expanded" else _with_gaps(x)

    def attention(lengths, sink):
        return _results(
            lambda q, k, v: hw.attention(
                q, k, v, kv_lengths=lengths, sink=sink, causal=True, return_lse=True, backend=backend
            ),
            q, k, v,
        )  # fmt: skip

    def decode(lengths, sink):
        return _results(
            lambda q, k, v: hw.attention_decode(q, k, v, lengths, sink=sink, return_lse=True, backend=backend),
            q[:, :, :2], k, v,
        )  # fmt: skip

    for call in (attention, decode):
        for wanted, found in zip(call(lengths, sink), call(strided(lengths), strided(sink)), strict=True):
            assert torch.equal(wanted, found)
    wanted, found = (
        hw.attention_probs(q, k, kv_lengths=n, sink=s, backend=backend)
        for n, s in ((lengths, sink), (strided(lengths), strided(sink)))
    )
    assert torch.equal(wanted, found)


def test_a_sink_of_any_stride_in_a_packed_batch(backend):
    q, k, v = (_normal(backend, 9, 2, 8, seed=i) for i in range(3))
    offsets = torch.tensor([0, 4, 9], dtype=torch.int32, device=q.device)
    sink = torch.tensor([0.5, -1.0], device=q.device)
    wanted, found = (
        _results(
            lambda q, k, v, s=s: hw.attention_varlen(
                q, k, v, offsets, offsets, 5, 5, sink=s, return_lse=True, backend=backend
            ),
            q, k, v,
        )
        for s in (sink, _with_gaps(sink))
    )  # fmt: skip
    for a, b in zip(wanted, found, strict=True):
        assert torch.equal(a, b)


def test_offsets_whose_differences_wrap_are_loud(backend):
    q = _normal(backend, 5, 1, 8)
    # In 32 bits every difference is a billion or less and positive, and the last offset is the number of tokens.
    wrapping = torch.tensor([0, 10**9, 2 * 10**9, 3 * 10**9 - 2**32, 4 * 10**9 - 2**32, 5], device=q.device)
    out = hw.attention_varlen(
        q, q, q, wrapping.to(torch.int32), wrapping.to(torch.int32), 10**9, 10**9, backend=backend
    )
    assert out.isnan().all()


@pytest.mark.parametrize("sink", [None, 0.0, -math.inf])
@pytest.mark.parametrize("hidden_by", ["causal", "mask", "packed", "decode"])
def test_a_row_that_sees_nothing_is_zeros_though_its_neighbours_see_nan(backend, hidden_by, sink):
    q, k, v = (_normal(backend, 1, 2, n, 16, seed=n) for n in (40, 32, 33))
    v = v[:, :, :32].contiguous()
    v[:, :, 3] = math.nan
    q.requires_grad_()
    given = {"sink": None if sink is None else torch.full((2,), sink, device=q.device), "return_lse": True}
    if hidden_by == "decode":
        lengths = torch.tensor([32], device=q.device)
        out, lse = hw.attention_decode(q.detach(), k, v, lengths=lengths, backend=backend, **given)
    elif hidden_by == "packed":
        packed = [x[0].transpose(0, 1) for x in (q, k, v)]
        offsets = (torch.tensor([0, n], dtype=torch.int32, device=q.device) for n in (40, 32))
        out, lse = hw.attention_varlen(*packed, *offsets, 40, 32, causal=True, backend=backend, **given)
        out, lse = out.transpose(0, 1)[None], lse[None]
    elif hidden_by == "mask":
        mask = torch.arange(40, device=q.device)[:, None] + torch.zeros(32, device=q.device) >= 8
        out, lse = hw.attention(q, k, v, mask=mask, backend=backend, **given)
    else:
        out, lse = hw.attention(q, k, v, causal=True, backend=backend, **given)
    empty = torch.arange(40, device=q.device) < 8
    assert (lse[:, :, empty] == (-math.inf if sink is None else sink)).all()
    assert (lse[:, :, ~empty] > -math.inf).all()
    assert (out[:, :, empty] == 0).all()
    assert out[:, :, 11:].isnan().all()
    if hidden_by != "decode":
        assert (torch.autograd.grad(out.nan_to_num().sum(), q)[0][:, :, empty] == 0).all()


@pytest.mark.parametrize("heads_inside", [False, True])
def test_results_may_be_changed_in_place(backend, heads_inside):
    x = _normal(backend, 1, 5, 2, 8).transpose(1, 2) if heads_inside else _normal(backend, 1, 2, 5, 8)
    x = x.detach().requires_grad_()
    out = hw.attention(x, x, x, backend=backend)
    wanted = torch.autograd.grad((out * 2).sum(), x, retain_graph=True)[0]
    other = hw.attention(x, x, x, backend=backend)
    # Backward needs the result itself: a change is allowed, and noticed.
    other.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(other.sum(), x)
    assert wanted.isfinite().all()


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("tokens", [None, 1, 3])
def test_results_of_decoding_may_be_changed_in_place(backend, tokens, paged):
    q = _normal(backend, 2, 4, 8) if tokens is None else _normal(backend, 2, 4, tokens, 8)
    cache = _normal(backend, 2, 2, 9, 8)
    lengths = torch.tensor([9, 4], device=q.device)
    table = torch.tensor([[0], [1]], dtype=torch.int32, device=q.device) if paged else None
    q.requires_grad_()
    out, lse = hw.attention_decode(q, cache, cache, lengths, block_table=table, return_lse=True, backend=backend)
    assert not out._is_view()
    assert not lse._is_view()
    before, lse_before = out.detach().clone(), lse.detach().clone()
    out += 1
    lse += 1
    assert torch.equal(out, before + 1)
    assert torch.equal(lse, lse_before + 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), q)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_output_is_the_same_whatever_else_is_asked_for(backend, dtype):
    """What only a backward reads is left out where nobody will ask for a gradient."""
    q, k, v = (_normal(backend, 2, 4, 37, 16, seed=i).to(dtype) for i in range(3))
    x, weight = _normal(backend, 5, 48).to(dtype), _normal(backend, 48, seed=1).to(dtype)
    for _ in range(2):  # the second time it is a call like an earlier one
        alone = hw.attention(q, k, v, causal=True, backend=backend)
        assert isinstance(alone, torch.Tensor)
        with_lse, lse = hw.attention(q, k, v, causal=True, return_lse=True, backend=backend)
        assert lse.shape == q.shape[:3]
        with_gradient = hw.attention(q.clone().requires_grad_(), k, v, causal=True, backend=backend)
        with_gradient.sum().backward()
        assert torch.equal(alone, with_lse)
        assert torch.equal(alone, with_gradient)
        normalised = hw.rms_norm(x, weight, backend=backend)
        assert torch.equal(normalised, hw.rms_norm(x.clone().requires_grad_(), weight, backend=backend))


def test_values_are_found_in_the_keys_by_where_they_lie():
    k = torch.randn(2, 1, 6, 40)
    same = decode._is_part_of
    assert same(k[..., :32], k)
    assert not same(k, k)  # then they are read as any values are
    for v in (k[..., 8:], k[..., :32].clone(), k[1:, ..., :32], k.clone()[..., :32]):
        assert not same(v, k)
    for x in (None, 3.0, torch.nn.Parameter(k)):
        assert not same(x, k)
    assert not same(*(torch.empty(2, 1, 6, n, device="meta") for n in (32, 40)))
    assert not torch.func.vmap(lambda v, k: torch.tensor(same(v, k)))(k[..., :32], k).any()


def test_heads_of_576_and_512(backend):
    """The forward of absorbed latent attention, where a backend has it; the others say what they hold."""
    q, k, v = (_normal(backend, *shape) for shape in ((1, 2, 20, 576), (1, 1, 70, 576), (1, 1, 70, 512)))
    if backend == "triton":
        with pytest.raises(ValueError, match="its kernels hold heads of at most 512, and this head dim is 576"):
            hw.attention(q, k, v, causal=True, backend=backend)
        return
    out = hw.attention(q, k, v, causal=True, backend=backend)
    truth = hw.reference.attention(*(x.double().cpu() for x in (q, k, v)), causal=True)[0]
    torch.testing.assert_close(out.cpu(), truth.float(), atol=1e-5, rtol=1e-5)
