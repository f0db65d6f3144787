"""add_rms_norm, beyond the case table: h is the rounded sum, both results have gradients, nothing needless is kept."""

from __future__ import annotations

import pytest
import torch
from backends_under_test import DEVICE, RUNNABLE

import headwise as hw
from headwise import reference

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def inputs(backend: str, dtype: torch.dtype, *shape: int) -> list[torch.Tensor]:
    return [torch.randn(shape, device=DEVICE[backend]).to(dtype) for _ in range(4)]


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("width", [64, 333, 5000])
@pytest.mark.parametrize("backend", RUNNABLE)
def test_the_norm_is_that_of_the_rounded_sum(backend, width, dtype):
    """The bits of two calls: in float32 a sum that is not rounded normalises to other numbers."""
    x, residual, grad, _ = inputs(backend, dtype, 13, width)
    weight = torch.randn(width, device=x.device).to(dtype)
    y, h = hw.add_rms_norm(x, residual, weight, backend=backend)
    assert torch.equal(h, x + residual)
    assert torch.equal(y, hw.rms_norm(h, weight, backend=backend))
    dx, dresidual, dweight = hw.add_rms_norm_backward(grad, None, h, weight, backend=backend)
    apart = hw.rms_norm_backward(grad, h, weight, backend=backend)
    torch.testing.assert_close((dx, dweight), apart)
    assert dresidual is dx


@pytest.mark.parametrize("which", ["y", "h", "both"])
@pytest.mark.parametrize("backend", RUNNABLE)
def test_the_gradient_of_each_result_reaches_both_inputs(backend, which):
    x, residual, grad, grad_h = inputs(backend, F32, 5, 96)
    weight = torch.randn(96, device=x.device)

    def gradients(op, leaves):
        results = dict(zip(("y", "h"), op(*leaves), strict=True))
        wanted = [name for name in results if which in (name, "both")]
        given = [{"y": grad, "h": grad_h}[name].to(leaves[0].dtype) for name in wanted]
        return torch.autograd.grad([results[name] for name in wanted], leaves, given, allow_unused=True)

    ours = gradients(
        lambda *a: hw.add_rms_norm(*a, backend=backend), [v.clone().requires_grad_() for v in (x, residual, weight)]
    )
    truth = gradients(reference.add_rms_norm, [v.double().requires_grad_() for v in (x, residual, weight)])
    for a, b in zip(ours, truth, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)
    assert ours[0].abs().max() > 0.1


def test_gradients_are_those_of_the_formula():
    leaves = [
        v.requires_grad_() for v in (*torch.randn(2, 3, 5, dtype=torch.float64), torch.randn(5, dtype=torch.float64))
    ]
    assert torch.autograd.gradcheck(lambda x, r, w: hw.add_rms_norm(x, r, w, 1e-3, 1.0), leaves)


@pytest.mark.parametrize("backend", RUNNABLE)
def test_the_gradient_of_h_is_added_before_rounding(backend):
    """2⁻⁸ and a little more than 1: rounded apart, the sum in bfloat16 would be 1."""
    h = torch.tensor([[1.0, -1.0]], dtype=BF16, device=DEVICE[backend])
    grad = torch.tensor([[2**-8 * 1.5, 2**-8 * 1.5]], dtype=BF16, device=DEVICE[backend])
    dx, _, _ = hw.add_rms_norm_backward(grad, torch.ones_like(h), h, eps=0.0, backend=backend)
    assert dx.tolist() == [[1 + 2**-7, 1 + 2**-7]]


@pytest.mark.parametrize("backend", RUNNABLE)
def test_the_sum_over_rows_is_not_rounded_to_16_bits(backend):
    h = torch.ones(1000, 8, dtype=BF16, device=DEVICE[backend])
    weight = torch.ones(8, dtype=BF16, device=DEVICE[backend])
    _, _, dweight = hw.add_rms_norm_backward(h, h, h, weight, eps=0.0, backend=backend)
    assert dweight.tolist() == [1000.0] * 8


@pytest.mark.parametrize("backend", RUNNABLE)
def test_gives_the_same_bits_every_time(backend):
    x, residual, grad, grad_h = inputs(backend, F32, 3000, 300)
    weight = torch.randn(300, device=x.device)
    known = hw.add_rms_norm(x, residual, weight, backend=backend)
    of_known = hw.add_rms_norm_backward(grad, grad_h, known[1], weight, backend=backend)
    for _ in range(4):
        assert all(map(torch.equal, hw.add_rms_norm(x, residual, weight, backend=backend), known))
        again = hw.add_rms_norm_backward(grad, grad_h, known[1], weight, backend=backend)
        assert all(map(torch.equal, again, of_known))


@pytest.mark.parametrize("backend", RUNNABLE)
def test_one_tensor_may_be_both_inputs(backend):
    x = torch.randn(4, 40, device=DEVICE[backend], requires_grad=True)
    y, h = hw.add_rms_norm(x, x, backend=backend)
    assert torch.equal(h, 2 * x)
    (y.sum() + h.sum()).backward()
    leaf = x.detach().double().requires_grad_()
    sum(v.sum() for v in reference.add_rms_norm(leaf, leaf)).backward()
    torch.testing.assert_close(x.grad.double(), leaf.grad, rtol=1e-4, atol=1e-5)


def test_a_gradient_may_be_changed_in_place():
    """Both inputs get one tensor from the backward, and each its own gradient from autograd."""
    x, residual = (torch.randn(2, 8, requires_grad=True) for _ in range(2))
    sum(v.sum() for v in hw.add_rms_norm(x, residual)).backward()
    expected = residual.grad.clone()
    x.grad.zero_()
    assert torch.equal(residual.grad, expected)


def test_autograd_keeps_h_and_not_the_inputs():
    kept: list[torch.Tensor] = []
    x, residual, weight = (torch.randn(*s, requires_grad=True) for s in ((4, 8), (4, 8), (8,)))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        _, h = hw.add_rms_norm(x, residual, weight)
    assert {t.data_ptr() for t in kept} >= {h.data_ptr(), weight.data_ptr()}
    assert not {t.data_ptr() for t in kept} & {x.data_ptr(), residual.data_ptr()}


@pytest.mark.parametrize("with_weight", [True, False])
def test_opcheck(with_weight):
    x, residual, grad, grad_h = (torch.randn(2, 3, 8) for _ in range(4))
    weight = torch.randn(8) if with_weight else None
    for given in (grad_h, None):
        torch.library.opcheck(
            torch.ops.headwise.add_rms_norm_backward, (grad, given, x, weight, None, 1e-6, 0.0, "cpu")
        )
    x.requires_grad_()
    torch.library.opcheck(torch.ops.headwise.add_rms_norm_forward, (x, residual, weight, 1e-6, 1.0, True, "cpu"))
