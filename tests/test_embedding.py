"""Embedding, beyond the case table: bad ids, exact sums, fixed order, PyTorch's machinery, agreement with PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from backends_under_test import DEVICE, RUNNABLE

import headwise as hw
from headwise import nn
from headwise.config import settings


@pytest.mark.parametrize("bad", [-1, 10, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("backend", RUNNABLE)
def test_id_outside_the_table_gives_nan_for_its_row_alone(backend, bad):
    ids = torch.tensor([[3, bad, 0], [9, 1, bad]], device=DEVICE[backend])
    weight = torch.randn(10, 5, device=DEVICE[backend], requires_grad=True)
    rows = hw.embedding(ids, weight, backend=backend)
    assert torch.equal(rows.isnan().all(-1), ids == bad)
    assert torch.equal(rows.isnan().any(-1), ids == bad)
    rows.sum().backward()
    expected = torch.zeros(10)
    expected[[3, 0, 9, 1]] = 1
    assert torch.equal(weight.grad.cpu(), expected.unsqueeze(-1).expand(10, 5))


@pytest.mark.parametrize("backend", RUNNABLE)
def test_bad_id_is_nan_for_every_id_of_an_empty_table(backend):
    ids = torch.tensor([0, 4], device=DEVICE[backend])
    assert hw.embedding(ids, torch.empty(0, 3, device=DEVICE[backend]), backend=backend).isnan().all()
    grad = torch.ones(2, 3, device=DEVICE[backend])
    assert hw.embedding_backward(grad, ids, 0, backend=backend).shape == (0, 3)


@pytest.mark.parametrize("backend", RUNNABLE)
def test_validate_names_the_first_bad_id(backend, monkeypatch):
    monkeypatch.setattr(settings, "validate", True)
    ids = torch.tensor([[3, 1, 0], [9, 12, -4]], device=DEVICE[backend])
    weight = torch.randn(10, 5, device=DEVICE[backend])
    with pytest.raises(ValueError, match=r"embedding: ids\[1, 1\] is 12; it needs to be from 0 to 9"):
        hw.embedding(ids, weight, backend=backend)
    with pytest.raises(ValueError, match=r"embedding_backward: ids\[1, 1\] is 12"):
        hw.embedding_backward(torch.ones(2, 3, 5, device=DEVICE[backend]), ids, 10, backend=backend)
    hw.embedding(ids.clamp(0, 9), weight, backend=backend)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("backend", RUNNABLE)
def test_sum_over_an_id_repeated_16384_times_is_exact(backend, dtype):
    """Added up in bfloat16 the sum would stop at 256; every partial sum here is a whole number that float32 holds."""
    count, width = 16384, 48
    ids = torch.full((count,), 3, device=DEVICE[backend])
    grad = torch.randint(-1, 3, (count, width)).to(DEVICE[backend], dtype)
    dweight = hw.embedding_backward(grad, ids, 7, backend=backend).cpu()
    assert torch.equal(dweight[3], grad.cpu().double().sum(0).to(dtype))
    assert dweight[[0, 1, 2, 4, 5, 6]].eq(0).all()


@pytest.mark.parametrize("backend", RUNNABLE)
def test_sum_of_repeated_ids_rounds_once(backend):
    ids = torch.randint(0, 40, (3000,), device=DEVICE[backend])
    grad = torch.randn(3000, 64).to(DEVICE[backend], torch.bfloat16)
    ours = hw.embedding_backward(grad, ids, 50, backend=backend).cpu()
    exact = torch.zeros(50, 64, dtype=torch.float64).index_add_(0, ids.cpu(), grad.cpu().double())
    # Half a unit in the last place of bfloat16, and what float32 loses on sums that nearly cancel.
    assert ((ours.double() - exact).abs() <= exact.abs() * 2.0**-8 + 1e-4).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", RUNNABLE)
def test_backward_gives_the_same_bits_every_time(backend, dtype):
    ids = torch.randint(0, 30, (5000,), device=DEVICE[backend])
    grad = torch.randn(5000, 70).to(DEVICE[backend], dtype)
    first = hw.embedding_backward(grad, ids, 2000, backend=backend)
    for _ in range(5):
        assert torch.equal(hw.embedding_backward(grad, ids, 2000, backend=backend), first)


def test_bits_do_not_depend_on_the_number_of_threads():
    ids, grad = torch.randint(0, 3000, (6000,)), torch.randn(6000, 33)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(hw.embedding_backward(grad, ids, 3000))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(r, results[0]) for r in results)


def test_ids_are_left_alone():
    ids = torch.tensor([1, -7, 2, 99])
    before = ids.clone()
    hw.embedding_backward(torch.ones(4, 2), ids, 3, padding_idx=1)
    hw.embedding(ids, torch.ones(3, 2))
    assert torch.equal(ids, before)


@pytest.mark.parametrize("padding_idx", [None, 0, 4, -1, -11])
def test_agrees_with_pytorch(padding_idx):
    ids = torch.randint(0, 11, (6, 20))
    weight = torch.randn(11, 8, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(6, 20, 8, dtype=torch.float64)
    ours, theirs = hw.embedding(ids, weight, padding_idx), F.embedding(ids, weight, padding_idx)
    assert torch.equal(ours, theirs)
    torch.testing.assert_close(
        torch.autograd.grad(ours, weight, grad), torch.autograd.grad(theirs, weight, grad), rtol=1e-14, atol=1e-14
    )


@pytest.mark.parametrize("padding_idx", [11, -12])
def test_padding_outside_the_table_is_refused(padding_idx):
    with pytest.raises(ValueError, match="embedding: padding_idx is"):
        hw.embedding(torch.tensor([1]), torch.zeros(11, 2), padding_idx)


def test_second_order_raises():
    weight = torch.randn(4, 3, requires_grad=True)
    y = hw.embedding(torch.tensor([1, 1]), weight)
    (dweight,) = torch.autograd.grad(y.square().sum(), weight, create_graph=True)
    with pytest.raises(NotImplementedError, match="second-order"):
        dweight.sum().backward()


def test_opcheck():
    ids, grad = torch.tensor([[1, 2, 1], [0, 3, 3]]), torch.randn(2, 3, 4)
    weight = torch.randn(5, 4, requires_grad=True)
    torch.library.opcheck(torch.ops.headwise.embedding_forward, (ids, weight, 3, 5, "cpu"))
    torch.library.opcheck(torch.ops.headwise.embedding_backward, (grad, ids, 5, -1, "cpu"))


def test_one_compiled_function_takes_every_shape():
    torch._dynamo.reset()
    compiled = torch.compile(hw.embedding, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows, width, count in ((10, 8, 5), (33, 24, 70), (7, 111, 20)):
        weight = torch.randn(rows, width, requires_grad=True)
        ids = torch.randint(0, rows, (2, count))
        ours, eager = compiled(ids, weight, -2), hw.embedding(ids, weight, -2)
        assert torch.equal(ours, eager)
        assert torch.equal(*(torch.autograd.grad(y.square().sum(), weight)[0] for y in (ours, eager)))


def test_module():
    module = nn.Embedding(7, 4, padding_idx=-2)
    assert module.weight[5].eq(0).all()
    ids = torch.tensor([[1, 5], [5, 6]])
    module(ids).sum().backward()
    assert module.weight.grad.sum(-1).tolist() == [0, 4, 0, 0, 0, 0, 4]
    assert torch.equal(module(ids), F.embedding(ids, module.weight))
