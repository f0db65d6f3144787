"""Layer normalisation, beyond the case table: cancellation, constant rows, fixed order, sums of 16 bits, PyTorch."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from backends_under_test import DEVICE, RUNNABLE

import headwise as hw
from headwise import reference
from headwise.backends.cpu import layer_norm as on_cpu
from headwise.testing import compare

F32, BF16 = torch.float32, torch.bfloat16


def gradients(y: torch.Tensor, leaves: list[torch.Tensor], grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(y, leaves, grad)


@pytest.mark.parametrize("given", ["weight and bias", "weight", "bias", "nothing"])
@pytest.mark.parametrize("shape", [(7, 33), (2, 600, 1000)])
def test_agrees_with_pytorch(shape, given):
    x, grad = (torch.randn(shape, dtype=torch.float64) for _ in range(2))
    weight, bias = (torch.randn(shape[-1], dtype=torch.float64) if n in given else None for n in ("weight", "bias"))
    leaves = [v.requires_grad_() for v in (x, weight, bias) if v is not None]
    ours, theirs = hw.layer_norm(x, weight, bias), F.layer_norm(x, shape[-1:], weight, bias)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)
    both = gradients(ours, leaves, grad), gradients(theirs, leaves, grad)
    torch.testing.assert_close(*both, rtol=1e-10, atol=1e-11)


def test_gradients_are_those_of_the_formula():
    x = torch.randn(3, 5, dtype=torch.float64) + 2
    leaves = [v.requires_grad_() for v in (x, *torch.randn(2, 5, dtype=torch.float64))]
    assert torch.autograd.gradcheck(lambda x, w, b: hw.layer_norm(x, w, b, 1e-3), leaves)


# 70000 columns are walked, and in Triton one of two such rows is split.
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("width", [33, 1024, 9000, 70000])
@pytest.mark.parametrize("backend", RUNNABLE)
def test_variance_does_not_cancel(backend, width, rows):
    """A mean a million deviations away from zero: as a difference of means of squares the variance would be noise."""
    if backend == "triton" and width == 70000 and rows == 4 and DEVICE[backend] == "cpu":
        pytest.skip("the interpreter takes a minute; test_triton_rows.py has such rows")
    torch.manual_seed(width)
    x = (torch.randn(rows, width) * 1e-2 + 1e4).to(DEVICE[backend])
    truth = reference.layer_norm(x.double(), eps=0.0)
    torch.testing.assert_close(hw.layer_norm(x, eps=0.0, backend=backend).double(), truth, rtol=1e-4, atol=1e-4)
    leaf, grad = x.double().requires_grad_(), torch.randn_like(x)
    reference.layer_norm(leaf, eps=0.0).backward(grad.double())
    dx = hw.layer_norm_backward(grad, x, eps=0.0, backend=backend)[0]
    torch.testing.assert_close(dx.double(), leaf.grad, rtol=1e-3, atol=1e-3 * leaf.grad.abs().max().item())


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("backend", RUNNABLE)
def test_constant_rows_are_the_bias(backend, dtype):
    """What rounding leaves of the mean is not blown up by rstd."""
    x = torch.full((3, 777), 1000.3, device=DEVICE[backend], dtype=dtype)
    bias = torch.randn(777, device=DEVICE[backend]).to(dtype)
    y = hw.layer_norm(x, torch.ones_like(bias), bias, backend=backend)
    torch.testing.assert_close(y, bias.expand(3, 777), rtol=0, atol=1e-6)
    dx, dweight, dbias = hw.layer_norm_backward(torch.ones_like(x), x, torch.ones_like(bias), bias, backend=backend)
    torch.testing.assert_close(dx, torch.zeros_like(x), rtol=0, atol=1e-3)
    torch.testing.assert_close(dweight, torch.zeros_like(bias), rtol=0, atol=1e-3)
    assert torch.equal(dbias, torch.full_like(bias, 3.0))


@pytest.mark.parametrize("backend", RUNNABLE)
def test_sums_over_rows_are_not_rounded_to_16_bits(backend):
    """In bfloat16 a sum of ones stops at 256."""
    x = torch.tensor([1.0, -1.0], dtype=BF16, device=DEVICE[backend]).repeat(1000, 1)
    weight = torch.ones(2, dtype=BF16, device=DEVICE[backend])
    _, dweight, dbias = hw.layer_norm_backward(torch.ones_like(x), x, weight, weight, eps=0.0, backend=backend)
    assert dweight.tolist() == [1000.0, -1000.0]
    assert dbias.tolist() == [1000.0, 1000.0]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("backend", RUNNABLE)
def test_gives_the_same_bits_every_time(backend, dtype):
    x, grad = (torch.randn(3000, 300, device=DEVICE[backend]).to(dtype) for _ in range(2))
    weight, bias = torch.randn(2, 300, device=DEVICE[backend]).to(dtype)
    y = hw.layer_norm(x, weight, bias, backend=backend)
    known = hw.layer_norm_backward(grad, x, weight, bias, backend=backend)
    for _ in range(4):
        assert torch.equal(hw.layer_norm(x, weight, bias, backend=backend), y)
        assert all(map(torch.equal, hw.layer_norm_backward(grad, x, weight, bias, backend=backend), known))


# One call of PyTorch's kernel, its rows divided among threads; sums by blocks; blocks that our threads share.
@pytest.mark.parametrize(("rows", "width", "dtype"), [(2000, 1024, F32), (9000, 1024, BF16), (40000, 80, F32)], ids=str)
def test_the_same_threads_give_the_same_bits_on_a_busy_machine(rows, width, dtype):
    x, grad, (weight, bias) = (torch.randn(n, width).to(dtype) for n in (rows, rows, 2))
    before, idle = torch.get_num_threads(), threading.Event()

    def burn():
        other = torch.randn(300, 300)
        while not idle.is_set():
            other @ other

    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            known = hw.layer_norm_backward(grad, x, weight, bias, backend="cpu")
            idle.clear()
            load = [threading.Thread(target=burn) for _ in range(2)]
            for thread in load:
                thread.start()
            again = [hw.layer_norm_backward(grad, x, weight, bias, backend="cpu") for _ in range(3)]
            idle.set()
            for thread in load:
                thread.join()
            assert all(torch.equal(a, b) for found in again for a, b in zip(found, known, strict=True))
    finally:
        idle.set()
        torch.set_num_threads(before)


@pytest.mark.parametrize(("rows", "width", "dtype"), [(2000, 1024, F32), (2000, 1024, BF16), (40000, 80, F32)], ids=str)
def test_what_memory_a_result_gets_does_not_change_the_bits(rows, width, dtype, monkeypatch):
    """Fresh memory is written block by block, other memory by one call."""
    x, grad, (weight, bias) = (torch.randn(n, width).to(dtype) for n in (rows, rows, 2))
    found = []
    for fresh in (False, True):
        monkeypatch.setattr(on_cpu, "would_be_fresh", lambda *asked, fresh=fresh: fresh)
        y = hw.layer_norm(x, weight, bias, backend="cpu")
        found.append((y, *hw.layer_norm_backward(grad, x, weight, bias, backend="cpu")))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("backend", RUNNABLE)
def test_sums_over_many_rows_keep_their_digits(backend, far):
    """Added up row by row in float32, as PyTorch's kernel on the CPU does it, a sum loses a digit at 100000 rows."""
    torch.manual_seed(4)
    x, grad, weight = torch.randn(100_000, 16), torch.randn(100_000, 16) + 1, torch.ones(16)
    x[7] += 100 * far
    ours = hw.layer_norm_backward(*(v.to(DEVICE[backend]) for v in (grad, x, weight, weight)), backend=backend)[1:]

    def sums(dtype):
        n = reference.layer_norm(x.to(dtype))
        return (grad.to(dtype) * n).sum(0), grad.to(dtype).sum(0)

    for name, found, exact, plain in zip(("dweight", "dbias"), ours, sums(torch.float64), sums(F32), strict=True):
        error = compare(name, found, exact, plain, noise_scale=exact.abs().max().item())
        assert error.ok, str(error)


@pytest.mark.parametrize("backend", RUNNABLE)
def test_one_bad_number_spoils_its_row_alone(backend):
    x = torch.randn(5, 300, device=DEVICE[backend])
    x[1, 7], x[3, 299] = float("nan"), float("inf")
    y = hw.layer_norm(x, backend=backend)
    assert y.isnan().all(-1).tolist() == [False, True, False, True, False]
    assert y[::2].isfinite().all()


@pytest.mark.parametrize("backend", RUNNABLE)
def test_dtypes_of_the_results(backend):
    x = torch.randn(3, 8, device=DEVICE[backend], dtype=BF16, requires_grad=True)
    weight, bias = (torch.randn(8, device=DEVICE[backend]).to(d).requires_grad_() for d in (F32, BF16))
    y = hw.layer_norm(x, weight, bias, backend=backend)
    y.sum().backward()
    assert [v.dtype for v in (y, x.grad, weight.grad, bias.grad)] == [BF16, BF16, F32, BF16]


@pytest.mark.parametrize("backend", RUNNABLE)
def test_no_rows_give_gradients_of_zeros(backend):
    x, weight = torch.empty(0, 9, device=DEVICE[backend]), torch.ones(9, device=DEVICE[backend])
    _, dweight, dbias = hw.layer_norm_backward(x, x, weight, weight, backend=backend)
    assert torch.equal(dweight, torch.zeros_like(weight))
    assert torch.equal(dbias, torch.zeros_like(weight))


@pytest.mark.parametrize("given", [True, False])
def test_opcheck(given):
    x, grad, weight = torch.randn(2, 3, 8), torch.randn(2, 3, 8), torch.randn(8) if given else None
    torch.library.opcheck(torch.ops.headwise.layer_norm_backward, (grad, x, weight, weight, None, 1e-5, "cpu"))
    x.requires_grad_()
    torch.library.opcheck(torch.ops.headwise.layer_norm_forward, (x, weight, weight, 1e-5, True, "cpu"))
