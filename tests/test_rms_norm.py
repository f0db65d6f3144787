"""RMS normalisation, beyond the case table: rstd, fixed order, PyTorch's machinery, agreement with PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from backends_under_test import DEVICE, RUNNABLE

import headwise as hw
from headwise import nn


@pytest.mark.parametrize("with_weight", [True, False])
@pytest.mark.parametrize("shape", [(7, 33), (2, 600, 1000)])
def test_agrees_with_pytorch(shape, with_weight):
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(shape[-1], dtype=torch.float64, requires_grad=True) if with_weight else None
    grad = torch.randn(shape, dtype=torch.float64)
    leaves = [x, weight] if with_weight else [x]
    ours, theirs = hw.rms_norm(x, weight, eps=1e-5), F.rms_norm(x, shape[-1:], weight, eps=1e-5)
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(
        torch.autograd.grad(ours, leaves, grad), torch.autograd.grad(theirs, leaves, grad), rtol=1e-11, atol=1e-11
    )


@pytest.mark.parametrize("weight_offset", [0.0, 1.0])
def test_gradients_are_those_of_the_formula(weight_offset):
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: hw.rms_norm(x, w, 1e-3, weight_offset), (x, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", RUNNABLE)
def test_backward_takes_rstd_or_computes_it(backend, dtype):
    x = torch.randn(40, 130).to(DEVICE[backend], dtype)
    grad, weight = torch.randn(40, 130).to(x), torch.randn(130).to(x)
    rstd = torch.rsqrt(x.float().square().mean(-1) + 1e-6)
    given = hw.rms_norm_backward(grad, x, weight, rstd=rstd, backend=backend)
    computed = hw.rms_norm_backward(grad, x, weight, backend=backend)
    torch.testing.assert_close(given, computed)


@pytest.mark.parametrize("backend", RUNNABLE)
def test_without_weight_there_is_no_weight_gradient(backend):
    x = torch.randn(4, 9, device=DEVICE[backend])
    dx, dweight = hw.rms_norm_backward(torch.ones_like(x), x, None, backend=backend)
    assert dweight is None
    assert dx.shape == x.shape


@pytest.mark.parametrize("backend", RUNNABLE)
def test_no_rows_give_a_weight_gradient_of_zeros(backend):
    x, weight = torch.empty(0, 9, device=DEVICE[backend]), torch.ones(9, device=DEVICE[backend])
    _, dweight = hw.rms_norm_backward(x, x, weight, backend=backend)
    assert torch.equal(dweight, torch.zeros_like(weight))


@pytest.mark.parametrize("backend", RUNNABLE)
def test_gives_the_same_bits_every_time(backend):
    x, grad = torch.randn(3000, 300, device=DEVICE[backend]), torch.randn(3000, 300, device=DEVICE[backend])
    weight = torch.randn(300, device=DEVICE[backend])
    y, gradients = hw.rms_norm(x, weight, backend=backend), hw.rms_norm_backward(grad, x, weight, backend=backend)
    for _ in range(5):
        assert torch.equal(hw.rms_norm(x, weight, backend=backend), y)
        again = hw.rms_norm_backward(grad, x, weight, backend=backend)
        assert all(torch.equal(a, b) for a, b in zip(again, gradients, strict=True))


@pytest.mark.parametrize("backend", RUNNABLE)
def test_squares_that_leave_float16_are_no_trouble(backend):
    x = torch.full((2, 64), 1000.0, dtype=torch.float16, device=DEVICE[backend])
    assert torch.equal(hw.rms_norm(x, None, backend=backend), torch.ones_like(x))


@pytest.mark.parametrize("backend", RUNNABLE)
def test_dtypes_of_the_results(backend):
    x = torch.randn(3, 8, device=DEVICE[backend], dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(8, device=DEVICE[backend], requires_grad=True)
    y = hw.rms_norm(x, weight, backend=backend)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)


def test_weight_of_another_dtype_is_refused():
    with pytest.raises(TypeError, match=r"weight has dtype float16; it needs bfloat16 \(that of x\) or float32"):
        hw.rms_norm(torch.zeros(2, 4, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.float16))


def test_second_order_raises():
    x = torch.randn(2, 5, requires_grad=True)
    (dx,) = torch.autograd.grad(hw.rms_norm(x, None).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="second-order"):
        dx.sum().backward()


@pytest.mark.parametrize("with_weight", [True, False])
def test_opcheck(with_weight):
    x, grad = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    weight = torch.randn(8) if with_weight else None
    rstd = torch.rsqrt(x.square().mean(-1) + 1e-6)
    torch.library.opcheck(torch.ops.headwise.rms_norm_backward, (grad, x, weight, rstd, 1e-6, 0.0, "cpu"))
    torch.library.opcheck(torch.ops.headwise.rms_norm_backward, (grad, x, weight, None, 1e-6, 0.0, "cpu"))
    x.requires_grad_()
    torch.library.opcheck(torch.ops.headwise.rms_norm_forward, (x, weight, 1e-6, 1.0, True, "cpu"))


def test_one_compiled_function_takes_every_shape():
    torch._dynamo.reset()
    compiled = torch.compile(hw.rms_norm, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((3, 5, 17), (2, 9, 40), (6, 4, 111)):
        x, weight = torch.randn(shape, requires_grad=True), torch.randn(shape[-1], requires_grad=True)
        ours, eager = compiled(x, weight, 1e-5, 1.0), hw.rms_norm(x, weight, 1e-5, 1.0)
        assert torch.equal(ours, eager)
        gradients = [torch.autograd.grad(y.square().sum(), (x, weight)) for y in (ours, eager)]
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_module():
    x = torch.randn(3, 6)
    plain, gemma = nn.RMSNorm(6), nn.RMSNorm(6, weight_offset=1.0)
    assert torch.equal(plain.weight, torch.ones(6))
    assert torch.equal(gemma.weight, torch.zeros(6))
    assert torch.equal(plain(x), gemma(x))
    assert torch.equal(plain(x), nn.RMSNorm(6, elementwise_affine=False)(x))
