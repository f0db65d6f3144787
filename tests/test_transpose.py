"""Transpose, beyond the case table: every dtype, aliasing, conjugate views, PyTorch's machinery."""

from __future__ import annotations

import pytest
import torch
from backends_under_test import DEVICE, RUNNABLE

import headwise as hw

DTYPES = [
    torch.bool,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    *(getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2") if hasattr(torch, name)),
]


def _random_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5
    # Any bits will do, NaN included: nothing may be computed on the way.
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    return raw.view(dtype).view(shape)


@pytest.mark.parametrize("shape", [(70, 99), (3, 80, 75)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", RUNNABLE)
def test_moves_the_bits_of_every_dtype(backend, dtype, shape):
    x = _random_bits(dtype, *shape)
    y = hw.transpose(x.to(DEVICE[backend]), backend=backend).cpu()
    assert y.dtype == dtype
    assert y.is_contiguous()
    assert torch.equal(y.view(torch.uint8), x.transpose(-1, -2).contiguous().view(torch.uint8))


def test_sixteen_bytes_are_too_many():
    with pytest.raises(TypeError, match="transpose: x has dtype complex128 of 16 bytes"):
        hw.transpose(torch.zeros(2, 3, dtype=torch.complex128))


@pytest.mark.parametrize("backend", RUNNABLE)
def test_result_is_a_copy_even_where_a_view_would_do(backend):
    x = torch.zeros(4, 5, device=DEVICE[backend]).t()
    y = hw.transpose(x, backend=backend)
    y += 1
    assert x.eq(0).all()


def test_conjugate_and_negative_views_are_resolved():
    x = torch.randn(5, 7, dtype=torch.complex64)
    assert torch.equal(hw.transpose(x.conj()), x.conj().t())
    assert torch.equal(hw.transpose(x.conj().imag), x.conj().imag.t())


@pytest.mark.parametrize("backend", RUNNABLE)
def test_conjugate_gradients_are_resolved(backend):
    x = torch.randn(5, 7, dtype=torch.complex64, device=DEVICE[backend], requires_grad=True)
    grad = torch.randn(7, 5, dtype=torch.complex64, device=DEVICE[backend])
    for arriving in (grad, grad.conj(), grad.conj()):
        (found,) = torch.autograd.grad(hw.transpose(x, backend=backend), x, arriving)
        assert torch.equal(found, arriving.t())


def test_is_linear_to_any_order():
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(hw.transpose, x)
    assert torch.autograd.gradgradcheck(hw.transpose, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_opcheck(dtype):
    x = torch.ones(3, 4, 5, dtype=dtype)
    torch.library.opcheck(torch.ops.headwise.transpose_forward, (x, "cpu"))
    if dtype == torch.float32:
        torch.library.opcheck(torch.ops.headwise.transpose_forward, (x.requires_grad_(), "cpu"))


def test_one_compiled_function_takes_every_shape():
    torch._dynamo.reset()
    compiled = torch.compile(hw.transpose, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((3, 5, 17), (2, 90, 80), (6, 4, 111)):
        x = torch.randn(shape, requires_grad=True)
        y = compiled(x)
        assert torch.equal(y, x.transpose(-1, -2))
        assert torch.equal(torch.autograd.grad(y.square().sum(), x)[0], 2 * x)
