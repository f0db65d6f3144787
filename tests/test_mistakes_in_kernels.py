"""Mistakes that other kernel libraries shipped, each one a named test on every backend: arithmetic and memory.

What a call means is in `test_mistakes`.
"""

from __future__ import annotations

import math
import mmap

import direct_attention as direct
import pytest
import torch
from attention_calls import ints, maker, on_every_backend, ours, packed_call, theirs

import headwise as hw

# Reusing a reduction buffer without a barrier: 2 to 3 % of the steps gave NaN.


def repeated_calls(backend: str):
    m = maker(backend)
    q, k, v = (m.normal(1, 4, 130, 40) for _ in range(3))
    x, weight, logits = m.normal(37, 515), m.normal(515), m.normal(37, 515)
    targets = m.integers(0, 515, 37)
    ids = m.integers(0, 9, 60)
    yield "attention", lambda: hw.attention(q, k, v, causal=True, backend=backend)
    yield "attention_decode", lambda: hw.attention_decode(q[:, :, 0], k, v, ints(backend, 129), backend=backend)
    yield "softmax", lambda: hw.softmax(x, backend=backend)
    yield "rms_norm", lambda: hw.rms_norm(x, weight, backend=backend)
    yield "cross_entropy", lambda: hw.cross_entropy(logits, targets, backend=backend)
    yield "embedding_backward", lambda: hw.embedding_backward(x[:1].expand(60, 515), ids, 9, backend=backend)


@pytest.mark.parametrize(
    "op", ["attention", "attention_decode", "softmax", "rms_norm", "cross_entropy", "embedding_backward"]
)
@on_every_backend
def test_two_hundred_repeats_give_one_answer(backend, op):
    call = dict(repeated_calls(backend))[op]
    first = call()
    assert first.isfinite().all()
    for repeat in range(200):
        assert torch.equal(call(), first), f"repeat {repeat} differs"


@on_every_backend
def test_two_hundred_backward_repeats_give_one_answer(backend):
    m = maker(backend)
    x = [m.normal(1, 4, 130, 40).requires_grad_() for _ in range(3)]
    grad = m.normal(1, 4, 130, 40)

    def gradients():
        out = hw.attention(*x, causal=True, backend=backend)
        return torch.autograd.grad(out, x, grad)

    first = gradients()
    assert all(g.isfinite().all() for g in first)
    for repeat in range(200):
        assert all(map(torch.equal, gradients(), first)), f"repeat {repeat} differs"


# bf16 rounding turning NaN into -0 or Inf.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@on_every_backend
def test_nan_stays_nan_through_rounding(backend, dtype):
    m = maker(backend, dtype)
    q, k, v = (m.normal(1, 2, 70, 16) for _ in range(3))
    # The payloads that a "+0x7fff, shift by 16" rounding carries over into Inf, 0 and -0, and the usual one.
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    top = torch.iinfo(bits).max
    v.view(bits)[0, 0, 3, 0] = top
    v.view(bits)[0, 0, 3, 5] = -1
    v[0, 0, 69, 7] = math.nan
    assert v.isnan().sum() == 3
    out = hw.attention(q, k, v, backend=backend)
    expected = torch.zeros(1, 2, 70, 16, dtype=torch.bool)
    expected[0, 0, :, [0, 5, 7]] = True
    assert torch.equal(out.isnan().cpu(), expected)

    x = m.normal(6, 96)
    x.view(bits)[1, 0] = top
    x.view(bits)[2, 5] = -1
    rows = torch.tensor([False, True, True, False, False, False])
    for y in (hw.softmax(x, backend=backend), hw.rms_norm(x, None, backend=backend)):
        assert torch.equal(y.isnan().all(-1).cpu(), rows)
        assert torch.equal(y.isnan().any(-1).cpu(), rows)
    loss = hw.cross_entropy(x, torch.zeros(6, dtype=torch.int64, device=x.device), reduction="none", backend=backend)
    assert torch.equal(loss.isnan().cpu(), rows)
    assert torch.equal(hw.transpose(x, backend=backend).view(bits), x.view(bits).T)
    looked_up = hw.embedding(torch.tensor([1, 0, 2], device=x.device), x, backend=backend)
    assert torch.equal(looked_up.isnan().any(-1).cpu(), torch.tensor([True, False, True]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@on_every_backend
def test_nan_query_gives_a_nan_row_and_no_other(backend, dtype):
    m = maker(backend, dtype)
    q, k, v = (m.normal(1, 2, 70, 16) for _ in range(3))
    q[0, 1, 13, 2] = math.nan
    out = hw.attention(q, k, v, backend=backend)
    expected = torch.zeros(1, 2, 70, dtype=torch.bool)
    expected[0, 1, 13] = True
    assert torch.equal(out.isnan().all(-1).cpu(), expected)
    assert torch.equal(out.isnan().any(-1).cpu(), expected)


# 32-bit offsets that wrap at rows × vocabulary.


def far_apart(rows: torch.Tensor) -> torch.Tensor:
    """The same (N, C) values as a view whose last row starts past 2³¹ elements.

    On the CPU the memory is mapped and never touched between the rows, so that it costs a page per row.
    """
    n = rows.shape[0]
    stride = 2**31 // (n - 1) + 64
    elements = (n - 1) * stride + rows.shape[1]
    if rows.device.type == "cpu":
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        storage = torch.frombuffer(mmap.mmap(-1, elements * rows.element_size(), flags=flags), dtype=rows.dtype)
    else:
        storage = torch.empty(elements, dtype=rows.dtype, device=rows.device)
    view = storage.as_strided(rows.shape, (stride, 1))
    view.copy_(rows)
    assert view[-1].storage_offset() > 2**31 - 1
    return view


def test_far_apart_holds_the_values():
    rows = torch.randn(5, 7).half()
    assert torch.equal(far_apart(rows), rows)


@on_every_backend
def test_offsets_of_attention_pass_2_to_the_31(backend):
    m = maker(backend, torch.float16)
    q, k, v = (m.normal(70, 16) for _ in range(3))
    grad = m.normal(1, 1, 70, 16)

    def run(q, k, v):
        leaves = [x[None, None].detach().requires_grad_() for x in (q, k, v)]
        out = hw.attention(*leaves, causal=True, backend=backend)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    for near, far in zip(run(q, k, v), run(far_apart(q), far_apart(k), far_apart(v)), strict=True):
        assert torch.equal(near, far)


@on_every_backend
def test_offsets_of_decode_pass_2_to_the_31(backend):
    m = maker(backend, torch.float16)
    q, k, v = m.normal(1, 1, 16), m.normal(70, 16), m.normal(70, 16)
    lengths = ints(backend, 70)
    near = hw.attention_decode(q, k[None, None], v[None, None], lengths, backend=backend)
    far = hw.attention_decode(q, far_apart(k)[None, None], far_apart(v)[None, None], lengths, backend=backend)
    assert torch.equal(near, far)
    pages_k, pages_v = (x.view(7, 10 * 16) for x in (k, v))
    table = torch.tensor([[6, 0, 3, 5, 1, 2, 4]], dtype=torch.int32, device=q.device)
    near = hw.attention_decode(
        q, *(p.view(7, 1, 10, 16) for p in (pages_k, pages_v)), lengths, block_table=table, backend=backend
    )
    far_pages = [far_apart(p).unflatten(1, (1, 10, 16)) for p in (pages_k, pages_v)]
    far = hw.attention_decode(q, *far_pages, lengths, block_table=table, backend=backend)
    assert torch.equal(near, far)


@on_every_backend
def test_offsets_of_packed_attention_pass_2_to_the_31(backend):
    m = maker(backend, torch.float16)
    rows = [m.normal(70, 2 * 16) for _ in range(3)]
    call = packed_call(backend, [0, 30, 70], [0, 30, 70], causal=True)
    near = call(*(x.unflatten(1, (2, 16)) for x in rows))
    far = call(*(far_apart(x).unflatten(1, (2, 16)) for x in rows))
    assert all(map(torch.equal, near, far))


@pytest.mark.parametrize("op", ["softmax", "rms_norm", "cross_entropy", "embedding", "transpose", "glu", "rope"])
@on_every_backend
def test_offsets_of_rows_times_vocabulary_pass_2_to_the_31(backend, op):
    m = maker(backend, torch.float16)
    x = m.normal(9, 300)
    targets = m.integers(0, 300, 9)
    ids = torch.tensor([8, 0, 8, 7, 3], device=x.device)
    tables = [m.normal(9, 40, dtype=torch.float32) for _ in range(2)]
    run = {
        "softmax": lambda x: hw.softmax(x, backend=backend),
        "rms_norm": lambda x: hw.rms_norm(x, None, backend=backend),
        "cross_entropy": lambda x: hw.cross_entropy(x, targets, backend=backend),
        "embedding": lambda x: hw.embedding(ids, x, backend=backend),
        "transpose": lambda x: hw.transpose(x, backend=backend),
        "glu": lambda x: hw.glu(x, backend=backend),
        "rope": lambda x: hw.rope(x.unflatten(1, (3, 100)), *tables, backend=backend),
    }[op]
    far_x = far_apart(x).requires_grad_()
    near_x = x.requires_grad_()
    near, far = run(near_x), run(far_x)
    assert torch.equal(near, far)
    (near_grad,) = torch.autograd.grad(near.float().square().sum(), near_x)
    (far_grad,) = torch.autograd.grad(far.float().square().sum(), far_x)
    assert torch.equal(near_grad, far_grad)


# A reduction that needs a power-of-two block and gets 96 threads.


@pytest.mark.parametrize("columns", [1, 3, 33, 95, 96, 97, 160, 1000])
@on_every_backend
def test_reduction_over_a_width_that_is_no_power_of_two(backend, columns):
    m = maker(backend)
    ones = torch.ones(4, columns, device=m.device)
    # Integers up to 2²⁴ add up exactly in any order: what is lost or counted twice shows in every digit.
    assert hw.softmax(ones, backend=backend).tolist() == [[pytest.approx(1 / columns, rel=1e-6)] * columns] * 4
    spike = torch.zeros(columns, columns, device=m.device).fill_diagonal_(math.sqrt(columns))
    torch.testing.assert_close(hw.rms_norm(spike, None, eps=0.0, backend=backend), spike, rtol=1e-6, atol=0)
    loss = hw.cross_entropy(ones, torch.arange(4, device=m.device) % columns, reduction="none", backend=backend)
    assert loss.tolist() == [pytest.approx(math.log(columns), rel=1e-6)] * 4


@pytest.mark.parametrize("size", [1, 3, 33, 95, 96, 97, 111, 160])
@on_every_backend
def test_attention_over_sizes_that_are_no_power_of_two(backend, size):
    m = maker(backend)
    x = {"q": m.normal(1, 2, size, size), "k": m.normal(1, 1, size + 1, size), "v": m.normal(1, 1, size + 1, size)}
    direct.assert_within_budget(ours(backend), theirs(), x)


# Gradients left unwritten when every target is padding.


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@on_every_backend
def test_only_padding_targets_give_zero_gradients(backend, reduction):
    m = maker(backend)
    logits = m.normal(13, 500).requires_grad_()
    targets = torch.full((13,), -100, device=m.device)
    loss = hw.cross_entropy(logits, targets, reduction=reduction, backend=backend)
    assert (loss == 0).all()
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    assert grad.shape == logits.shape
    assert (grad == 0).all()


@on_every_backend
def test_only_padding_targets_give_zero_gradients_in_one_pass(backend):
    logits = maker(backend).normal(13, 500)
    targets = torch.full((13,), -100, device=logits.device)
    loss, grad = hw.cross_entropy_forward_backward(logits, targets, backend=backend)
    assert loss == 0
    assert (grad == 0).all()


@on_every_backend
def test_padding_targets_do_not_count_in_the_mean(backend):
    logits = maker(backend).normal(13, 500).requires_grad_()
    targets = torch.arange(13, device=logits.device)
    targets[::2] = -100
    loss = hw.cross_entropy(logits, targets, backend=backend)
    (grad,) = torch.autograd.grad(loss, logits)
    kept = logits.detach().double()[1::2]
    rows = torch.arange(6, device=logits.device)
    expected = (kept.logsumexp(-1) - kept[rows, targets[1::2]]).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert (grad[::2] == 0).all()
    one_hot = torch.nn.functional.one_hot(targets[1::2], 500)
    torch.testing.assert_close(grad[1::2].double(), (kept.softmax(-1) - one_hot) / 6, rtol=1e-4, atol=1e-9)
