"""The CPU backend: huge pages for large results, and blocks that threads share."""

from __future__ import annotations

import mmap
import sys

import pytest
import torch

import headwise as hw
from headwise.backends.cpu import linear_cross_entropy, memory
from headwise.backends.cpu.threads import Shared, in_threads


def test_advice_stays_inside_the_tensor(monkeypatch):
    given = []
    monkeypatch.setattr(memory, "_from_c", lambda *which: lambda *call: given.append(call))
    x = memory.huge_pages(torch.empty(3 << 20, dtype=torch.float32))
    ((first, size, advice),) = given
    assert advice == mmap.MADV_HUGEPAGE
    assert first % (2 << 20) == size % (2 << 20) == 0
    assert x.data_ptr() <= first < first + size <= x.data_ptr() + x.nbytes
    assert size >= x.nbytes - (4 << 20)
    memory.huge_pages(torch.empty(1000))
    assert len(given) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="Linux says which pages are there")
@pytest.mark.parametrize("written", [0.0, 0.3, 0.7, 1.0])
def test_memory_is_fresh_until_it_is_written_to(monkeypatch, written):
    pages = mmap.mmap(-1, 40 << 20)
    lent = torch.frombuffer(pages, dtype=torch.bfloat16)
    lent[: int(written * lent.numel())] = 1.0
    monkeypatch.setattr(torch, "empty", lambda *asked, **options: lent)
    assert memory.would_be_fresh(lent.shape, lent.dtype) is (written < 0.5)
    assert not memory.would_be_fresh((1000,), torch.float32)  # the C library keeps those


def test_each_item_goes_to_one_thread(monkeypatch):
    before, found = torch.get_num_threads(), []
    torch.set_num_threads(3)
    try:
        items = Shared(range(1000))
        in_threads(lambda thread, threads: found.extend(items), most=3)
    finally:
        torch.set_num_threads(before)
    assert sorted(found) == list(range(1000))


def _rows():
    return torch.randn(700, 1100), torch.randn(700, 1100), torch.randn(1100)


def _loss(dtype=torch.bfloat16):
    hidden, weight = torch.randn(96, 64).to(dtype).requires_grad_(), torch.randn(500, 64).to(dtype).requires_grad_()
    loss = hw.linear_cross_entropy(hidden, weight, torch.arange(96))
    return torch.autograd.grad(loss, (hidden, weight))


CALLS = {
    "rms_norm": lambda: hw.rms_norm_backward(*_rows()),
    "softmax": lambda: (hw.softmax(_rows()[0].reshape(-1, 35000)),),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_threads_do_not_change_the_bits(call):
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            torch.manual_seed(1)
            found.append([x for x in call() if x is not None])
    finally:
        torch.set_num_threads(before)
    for others in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], others, strict=True))


@pytest.mark.parametrize("columns", [16385, 100_000])
def test_a_long_row_sums_to_one(columns):
    """The kernel's own sum of the peaked rows is off by 1e-6 and more."""
    torch.manual_seed(0)
    x = torch.cat(
        [torch.randn(6, columns) * 8, torch.full((1, columns), -torch.inf), torch.full((1, columns), torch.nan)]
    )
    probs = hw.softmax(x)
    assert ((probs[:6].double().sum(-1) - 1).abs() < 7e-7).all()
    assert (probs[6] == 0).all()
    assert probs[7].isnan().all()


def test_bfloat16_gradients_of_few_and_many_logits(monkeypatch):
    """Kept in bfloat16 or made again: both follow float64."""
    torch.manual_seed(2)
    few = _loss()
    torch.manual_seed(2)
    monkeypatch.setattr(linear_cross_entropy, "KEPT", 0)
    monkeypatch.setattr(linear_cross_entropy, "CHUNK", 96 * 128)
    many = _loss()
    torch.manual_seed(2)
    hidden, weight = (torch.randn(n, 64).bfloat16().double().requires_grad_() for n in (96, 500))
    loss = torch.nn.functional.cross_entropy(hidden @ weight.T, torch.arange(96))
    for exact, *ours in zip(torch.autograd.grad(loss, (hidden, weight)), few, many, strict=True):
        for found in ours:
            assert (found.double() - exact).norm() < 4e-3 * exact.norm()


def test_packed_sequences_of_one_length_have_the_bits_of_the_batched_call():
    torch.manual_seed(3)
    q, k, v, grad = (torch.randn(7 * 16, 4, 32).requires_grad_() for _ in range(4))
    offsets = torch.arange(8, dtype=torch.int32) * 16
    out, lse = hw.attention_varlen(q, k, v, offsets, offsets, 16, 16, causal=True, return_lse=True)
    batch = [x.detach().unflatten(0, (7, 16)).transpose(1, 2).requires_grad_() for x in (q, k, v)]
    expected, expected_lse = hw.attention(*batch, causal=True, return_lse=True)
    assert torch.equal(out, expected.transpose(1, 2).flatten(0, 1))
    assert torch.equal(lse, expected_lse.transpose(0, 1).flatten(1))
    found = torch.autograd.grad(out, (q, k, v), grad)
    of_batch = torch.autograd.grad(expected, batch, grad.unflatten(0, (7, 16)).transpose(1, 2))
    for x, y in zip(found, of_batch, strict=True):
        assert torch.equal(x, y.transpose(1, 2).flatten(0, 1))
