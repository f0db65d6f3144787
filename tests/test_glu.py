"""Gated linear units, beyond the case table: what the backward keeps and leaves alone, tails, one rounding, one launch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from backends_under_test import DEVICE, RUNNABLE
from torch.utils.checkpoint import checkpoint

import headwise as hw
from headwise.config import settings
from headwise.ops.glu import ACTIVATIONS

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
each_backend = pytest.mark.parametrize("backend", RUNNABLE)
each_activation = pytest.mark.parametrize("activation", ACTIVATIONS)


def leaves(backend, *shape, dtype=F32, count=2):
    draw = torch.Generator().manual_seed(len(shape))
    return [torch.randn(shape, generator=draw).to(DEVICE[backend], dtype).requires_grad_() for _ in range(count)]


@each_activation
def test_gradients_are_those_of_the_formula(activation):
    gate, up = (x.double().detach().requires_grad_() for x in leaves("cpu", 4, 6))
    assert torch.autograd.gradcheck(lambda g, u: hw.glu(g, u, activation), (gate, up))
    assert torch.autograd.gradcheck(lambda g: hw.glu(g, activation=activation), gate)


@each_backend
@each_activation
def test_backward_changes_no_input_and_runs_twice(backend, activation):
    """A backward that reuses the memory of its saved inputs gives other gradients the second time."""
    gate, up = leaves(backend, 9, 40)
    before = gate.detach().clone(), up.detach().clone()
    y = hw.glu(gate, up, activation, backend=backend)
    grad = torch.ones_like(y)
    kept = grad.clone()
    once = torch.autograd.grad(y, (gate, up), grad, retain_graph=True)
    once = [x.clone() for x in once]
    twice = torch.autograd.grad(y, (gate, up), grad)
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))
    assert torch.equal(gate.detach(), before[0])
    assert torch.equal(up.detach(), before[1])
    assert torch.equal(grad, kept)


@pytest.mark.parametrize("halves", [True, False])
@each_backend
def test_checkpointing(backend, halves):
    """The inputs are used again after the backward: by the layer before, whose output they are."""
    x, weight = leaves(backend, 24, 24)

    def layer(x):
        both = torch.tanh(x @ weight)
        y = hw.glu(both, backend=backend) if halves else hw.glu(*both.chunk(2, -1), backend=backend)
        return y @ weight[:12]

    plain = torch.autograd.grad(layer(x).square().sum(), (x, weight))
    again = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False).square().sum(), (x, weight))
    torch.testing.assert_close(again, plain)


@each_backend
def test_only_the_inputs_are_kept(backend):
    gate, up = leaves(backend, 8, 16)
    y = hw.glu(gate, up, backend=backend)
    saved = [t for t in y.grad_fn.saved_tensors if t is not None]
    assert {t.data_ptr() for t in saved} == {gate.data_ptr(), up.data_ptr()}


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@each_backend
def test_halves_are_what_two_tensors_are(backend, dtype):
    (both,) = leaves(backend, 7, 3, 36, dtype=dtype, count=1)
    gate, up = (x.contiguous().detach().requires_grad_() for x in both.chunk(2, -1))
    y, expected = hw.glu(both, activation="gelu", backend=backend), hw.glu(gate, up, "gelu", backend=backend)
    # PyTorch's kernels on the CPU differ in the last digit between loops over vectors and over their rest.
    room = {"rtol": 1e-6 if dtype == F32 else 2**-7, "atol": 1e-6} if backend == "cpu" else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(y, expected, **room)
    grad = torch.randn(y.shape, dtype=F32, generator=torch.Generator().manual_seed(5)).to(y)
    (dboth,) = torch.autograd.grad(y, both, grad)
    assert dboth.is_contiguous()
    torch.testing.assert_close(dboth, torch.cat(torch.autograd.grad(expected, (gate, up), grad), -1), **room)
    assert torch.equal(hw.glu_backward(grad, both.detach(), activation="gelu", backend=backend), dboth)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "sigmoid"])
@each_backend
def test_large_gates_overflow_nothing(backend, activation, dtype):
    gate = torch.tensor([-1e4, -200.0, -89.0, 89.0, 1e4], dtype=dtype, device=DEVICE[backend], requires_grad=True)
    up = torch.ones_like(gate, requires_grad=True)
    y = hw.glu(gate, up, activation, backend=backend)
    dgate, dup = torch.autograd.grad(y, (gate, up), torch.ones_like(y))
    positive = torch.ones(2, dtype=dtype) if activation == "sigmoid" else gate.detach()[3:].cpu()
    zeros = torch.zeros(3, dtype=dtype)
    for found in (y.detach().cpu(), dup.cpu()):
        torch.testing.assert_close(found[:3], zeros, rtol=0, atol=1e-30)
        torch.testing.assert_close(found[3:], positive)
    slopes = torch.zeros(2, dtype=dtype) if activation == "sigmoid" else torch.ones(2, dtype=dtype)
    torch.testing.assert_close(dgate.cpu(), torch.cat([zeros, slopes]), rtol=0, atol=1e-30)


@each_backend
def test_tail_of_gelu_is_relatively_accurate(backend):
    """1 + erf(x) loses all digits where it is used. On the CPU it is PyTorch's own kernel, that does."""
    gate = torch.linspace(-9.0, -2.0, 2001, device=DEVICE[backend])
    y = hw.glu(gate, torch.ones_like(gate), "gelu", backend=backend).double().cpu()
    a = gate.double().cpu()
    exact = a * torch.special.erfc(-a / 2**0.5) / 2
    if backend == "cpu":
        assert (y - exact).abs().max() <= 2 * (F.gelu(gate).double() - exact).abs().max()
    else:
        assert ((y - exact) / exact).abs().max() <= 8e-6
        near = a >= -5
        assert ((y - exact) / exact)[near].abs().max() <= 3e-6


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@each_activation
@each_backend
def test_sixteen_bits_are_rounded_once(backend, activation, dtype):
    gate, up, grad = (x.detach() for x in leaves(backend, 30, 70, dtype=dtype, count=3))
    wide = hw.glu(gate.float(), up.float(), activation, backend=backend)
    # The last digit of a float32 exponential may differ between loops over vectors and over their rest.
    assert _off_by_rounding(hw.glu(gate, up, activation, backend=backend), wide) <= 2e-6
    found = hw.glu_backward(grad, gate, up, activation, backend=backend)
    for ours, exact in zip(
        found, hw.glu_backward(grad.float(), gate.float(), up.float(), activation, backend=backend), strict=True
    ):
        assert _off_by_rounding(ours, exact) <= 2e-6


def _off_by_rounding(ours, wide):
    """How far beyond half a unit in the last place of ``ours`` the float32 result is, relative to itself."""
    digits = 8 if ours.dtype == BF16 else 11
    smallest = -133 if ours.dtype == BF16 else -24
    wide, ours = wide.double().cpu(), ours.double().cpu()
    exponent = torch.frexp(wide).exponent
    half = torch.maximum(torch.ldexp(torch.ones_like(wide), exponent - digits - 1), torch.tensor(2.0**smallest / 2))
    return (((ours - wide).abs() - half) / wide.abs().clamp_min(1e-30)).max().item()


@pytest.mark.skipif(not settings.triton_interpret, reason="for Triton's interpreter (TRITON_INTERPRET=1)")
def test_triton_indices_of_64_bits_find_the_same_elements(monkeypatch):
    from headwise.backends.triton import glu

    both, grad = torch.randn(9, 66), torch.randn(9, 33)
    gate, up = (x.contiguous() for x in both.chunk(2, -1))
    calls = [
        lambda: (hw.glu(both, backend="triton"), hw.glu_backward(grad, both, backend="triton")),
        lambda: (hw.glu(gate, up, backend="triton"), *hw.glu_backward(grad, gate, up, backend="triton")),
    ]
    narrow = [call() for call in calls]
    monkeypatch.setattr(glu, "_INT32", 0)
    for before, call in zip(narrow, calls, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(before, call(), strict=True))


@each_backend
def test_gives_the_same_bits_every_time(backend):
    gate, up, grad = (x.detach() for x in leaves(backend, 300, 200, count=3))
    y, found = hw.glu(gate, up, backend=backend), hw.glu_backward(grad, gate, up, backend=backend)
    for _ in range(3):
        assert torch.equal(hw.glu(gate, up, backend=backend), y)
        again = hw.glu_backward(grad, gate, up, backend=backend)
        assert all(torch.equal(a, b) for a, b in zip(again, found, strict=True))


@pytest.mark.parametrize("width", [32, 33])
def test_webgpu_halves_and_chunks_are_read_in_place_by_one_dispatch(width):
    both = hw.webgpu.array(torch.randn(10, 2 * width))
    gate, up = both.narrow(1, 0, width), both.narrow(1, width, width)
    grad = hw.webgpu.array(torch.randn(10, width))
    calls = [
        lambda: hw.glu(both),
        lambda: hw.glu(gate, up),
        lambda: hw.glu_backward(grad, both),
        lambda: hw.glu_backward(grad, gate, up),
    ]
    for call in calls:
        call()
        before = hw.webgpu.counts().dispatches
        call()
        assert hw.webgpu.counts().dispatches - before == 1


def test_second_order_raises():
    gate, up = leaves("cpu", 2, 5)
    (dgate,) = torch.autograd.grad(hw.glu(gate, up).sum(), gate, create_graph=True)
    with pytest.raises(NotImplementedError, match="second-order"):
        dgate.sum().backward()


def test_opcheck():
    gate, up, grad = (x.detach() for x in leaves("cpu", 2, 3, 8, count=3))
    torch.library.opcheck(torch.ops.headwise.glu_backward, (grad, gate, up, "gelu", "cpu"))
    torch.library.opcheck(torch.ops.headwise.glu_backward, (grad[..., :4], gate, None, "silu", "cpu"))
    gate.requires_grad_()
    torch.library.opcheck(torch.ops.headwise.glu_forward, (gate, up, "silu", "cpu"))
    torch.library.opcheck(torch.ops.headwise.glu_forward, (gate, None, "silu", "cpu"))


def test_one_compiled_function_takes_every_shape():
    torch._dynamo.reset()
    compiled = torch.compile(hw.glu, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((3, 5, 18), (2, 9, 40), (6, 4, 112)):
        (both,) = leaves("cpu", *shape, count=1)
        ours, eager = compiled(both, activation="gelu_tanh"), hw.glu(both, activation="gelu_tanh")
        assert torch.equal(ours, eager)
        assert torch.equal(*(torch.autograd.grad(y.square().sum(), both)[0] for y in (ours, eager)))
