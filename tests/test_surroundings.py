"""What surrounds a call must not change what it means: inference mode, threads, strides of saved results."""

from __future__ import annotations

import pytest
import torch
from attention_calls import on_every_backend
from backends_under_test import DEVICE

import headwise as hw


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def _qkv(device: str, length: int = 600, heads: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(1, heads, length, 32, generator=generator).to(device) for _ in range(3)]


@on_every_backend
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_inference_mode_gives_the_same_bits(backend, softcap, three_threads):
    q, k, v = _qkv(DEVICE[backend])
    plain = hw.attention(q, k, v, softcap=softcap, backend=backend)
    with torch.inference_mode():
        assert torch.equal(hw.attention(q, k, v, softcap=softcap, backend=backend), plain)


@on_every_backend
def test_cross_entropy_in_inference_mode_with_threads(backend, three_threads):
    logits = torch.randn(8, 200_000, device=DEVICE[backend])
    targets = torch.arange(8, device=DEVICE[backend])
    plain = hw.cross_entropy(logits, targets, backend=backend)
    with torch.inference_mode():
        assert torch.equal(hw.cross_entropy(logits, targets, backend=backend), plain)


@on_every_backend
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # of PyTorch's own forward mode
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:FutureWarning")  # the same, from PyTorch 2.15 on
def test_forward_mode_gradients_raise(backend):
    x = torch.randn(3, 5, device=DEVICE[backend])
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda y: hw.softmax(y, backend=backend), (x,), (torch.ones_like(x),))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match="forward-mode"):
            hw.softmax(dual, backend=backend)


@on_every_backend
def test_saved_results_may_have_any_strides(backend):
    q, k, v = _qkv(DEVICE[backend], 130)
    out, lse = hw.attention(q, k, v, causal=True, return_lse=True, backend=backend)
    grad = torch.randn_like(out)
    plain = hw.attention_backward(grad, q, k, v, out, lse, causal=True, backend=backend)

    def scattered(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)

    found = hw.attention_backward(
        scattered(grad), q, k, v, scattered(out), scattered(lse), causal=True, backend=backend
    )
    for a, b in zip(plain, found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("extra", [1, 100, 255])
def test_causal_with_a_few_more_keys_builds_no_square_mask(extra):
    length = 4096
    q, k, v = torch.randn(1, 1, length, 8), *torch.randn(2, 1, 1, length + extra, 8)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        hw.attention(q, k, v, causal=True, backend="cpu")
    largest = max(event.cpu_memory_usage for event in profiler.events())
    assert largest < length * length // 8


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bits_do_not_depend_on_the_number_of_threads(threads):
    before = torch.get_num_threads()
    results = []
    for count in (1, threads):
        torch.set_num_threads(count)
        try:
            q, k, v = (x.requires_grad_() for x in _qkv("cpu", 900, heads=3))
            out = hw.attention(q, k, v, causal=True, softcap=20.0, backend="cpu")
            results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
        finally:
            torch.set_num_threads(before)
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_a_page_table_without_pages_has_gradients():
    q = torch.randn(2, 4, 16, requires_grad=True)
    cache = torch.randn(3, 2, 8, 16, requires_grad=True)
    table = torch.zeros(2, 0, dtype=torch.int32)
    out = hw.attention_decode(q, cache, cache, torch.zeros(2, dtype=torch.int32), block_table=table, backend="cpu")
    dq, dcache = torch.autograd.grad(out.sum(), (q, cache))
    assert out.abs().max() == 0
    assert dq.abs().max() == 0
    assert dcache.abs().max() == 0


def test_ignore_index_does_not_wrap_around():
    logits, targets = torch.randn(4, 9), torch.tensor([0, 1, 2, 3], dtype=torch.int32)
    plain = hw.cross_entropy(logits, targets, backend="cpu")
    assert torch.equal(hw.cross_entropy(logits, targets, ignore_index=2**32 + 1, backend="cpu"), plain)


def test_a_negative_length_is_loud_in_the_bias_too():
    q, k, v = _qkv("cpu", 20)
    bias = torch.zeros(20, 20, requires_grad=True)
    out = hw.attention(q, k, v, bias=bias, kv_lengths=torch.tensor([-1]), backend="cpu")
    (dbias,) = torch.autograd.grad(out.sum(), bias)
    assert dbias.isnan().all()
