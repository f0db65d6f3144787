"""Autocast on CUDA, and CUDA's backward beside arrays of WebGPU in one process."""

from __future__ import annotations

import pytest
import torch
from gpu_machine import DEVICE, gpu, normal

import headwise as hw

__all__ = ["gpu"]

TARGETS = torch.arange(50) % 11
# By op: shapes of float32 tensors, the call, and whether it computes in autocast's dtype or stays in float32.
CALLS = {
    "attention": ([(2, 2, 50, 8)] * 3, lambda q, k, v: hw.attention(q, k, v, causal=True), True),
    "linear_cross_entropy": ([(50, 8), (11, 8)], lambda h, w: hw.linear_cross_entropy(h, w, TARGETS.to(DEVICE)), True),
    "rms_norm": ([(50, 8), (8,)], hw.rms_norm, False),
    "layer_norm": ([(50, 8), (8,), (8,)], hw.layer_norm, False),
    "softmax": ([(50, 8)], hw.softmax, False),
    "glu": ([(50, 8)] * 2, hw.glu, False),
}


def inputs_of(name):
    return [normal(*shape, seed=i, dtype=torch.float32).requires_grad_() for i, shape in enumerate(CALLS[name][0])]


def under_autocast(call, inputs, dtype):
    with torch.autocast(DEVICE, dtype):
        out = call(*inputs)
    return out, torch.autograd.grad(out, inputs, normal(*out.shape, seed=9, dtype=out.dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_computes_in_the_dtype_that_the_rule_says(name, dtype):
    _, call, low = CALLS[name]
    inputs = inputs_of(name)
    cast = [x.detach().to(dtype if low else torch.float32).requires_grad_() for x in inputs]
    expected = call(*cast)
    for _ in range(2):
        out, grads = under_autocast(call, inputs, dtype)
        assert torch.equal(out, expected)
        assert all(g.dtype == torch.float32 for g in grads)
    of_cast = torch.autograd.grad(expected, cast, normal(*expected.shape, seed=9, dtype=expected.dtype))
    if (name, dtype) != ("linear_cross_entropy", torch.float16):  # there the backward waits for the scale of the loss
        assert all(torch.equal(g, e.float()) for g, e in zip(grads, of_cast, strict=True))


@pytest.mark.parametrize("name", CALLS)
def test_compiled(name):
    out, grads = under_autocast(CALLS[name][1], inputs_of(name), torch.bfloat16)
    compiled = torch.compile(CALLS[name][1], fullgraph=True)
    found, of_compiled = under_autocast(compiled, inputs_of(name), torch.bfloat16)
    assert found.dtype == out.dtype
    for ours, eager in zip((found, *of_compiled), (out, *grads), strict=True):
        torch.testing.assert_close(ours, eager)


def test_arrays_of_webgpu_leave_the_backward_of_cuda_alone():
    pytest.importorskip("wgpu")
    from headwise import webgpu

    weight, on_cuda = torch.randn(5, 8, requires_grad=True), normal(5, 8, dtype=torch.float32).requires_grad_()
    y = hw.softmax(webgpu.array(weight))
    hw.rms_norm(on_cuda * 2, None).square().sum().backward()
    assert on_cuda.grad.abs().sum() > 0
    (y.cpu() ** 2).sum().backward()
    (expected,) = torch.autograd.grad((torch.softmax(weight, -1) ** 2).sum(), weight)
    torch.testing.assert_close(weight.grad, expected)
    assert torch._C._get_privateuse1_backend_name() == "privateuseone"
