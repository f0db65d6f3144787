"""Rotary position embedding, beyond the case table: models' own formulas, far positions, pairs, layouts, one launch."""

from __future__ import annotations

import pytest
import torch
from backends_under_test import DEVICE, RUNNABLE
from torch.utils.checkpoint import checkpoint

import headwise as hw
from headwise.config import settings

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
each_backend = pytest.mark.parametrize("backend", RUNNABLE)
each_pairing = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])


def tables(backend, known, pairs, dtype=F32):
    angles = torch.outer(torch.arange(known, dtype=F64), 10000.0 ** -(torch.arange(pairs, dtype=F64) / pairs))
    return angles.cos().to(DEVICE[backend], dtype), angles.sin().to(DEVICE[backend], dtype)


def normal(backend, *shape, dtype=F32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE[backend], dtype)


def rotate_half(x):
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def test_halves_are_the_formula_of_hugging_face():
    x, (cos, sin) = normal("cpu", 2, 3, 7, 16, dtype=F64), tables("cpu", 7, 8, F64)
    expected = x * torch.cat([cos, cos], -1) + rotate_half(x) * torch.cat([sin, sin], -1)
    torch.testing.assert_close(hw.rope(x, cos, sin), expected, rtol=1e-14, atol=1e-14)


def test_interleaved_is_the_product_of_complex_numbers():
    """As in the code of Llama itself."""
    x, (cos, sin) = normal("cpu", 2, 3, 7, 16, dtype=F64), tables("cpu", 7, 8, F64)
    turned = torch.view_as_complex(x.unflatten(-1, (8, 2))) * torch.complex(cos, sin)
    expected = torch.view_as_real(turned).flatten(-2)
    torch.testing.assert_close(hw.rope(x, cos, sin, interleaved=True), expected, rtol=1e-14, atol=1e-14)


@each_pairing
def test_gradients_are_those_of_the_formula(interleaved):
    q, k = (normal("cpu", 2, h, 3, 10, dtype=F64, seed=h).requires_grad_() for h in (3, 2))
    cos, sin = tables("cpu", 9, 4, F64)
    positions = torch.tensor([[0, 8, 3], [1, 1, 7]])
    assert torch.autograd.gradcheck(lambda q, k: hw.rope((q, k), cos, sin, positions, interleaved), (q, k))


@each_pairing
@each_backend
def test_the_gradient_undoes_the_rotation(backend, interleaved):
    x, (cos, sin) = normal(backend, 2, 3, 20, 32), tables(backend, 20, 16)
    y = hw.rope(x, cos, sin, interleaved=interleaved, backend=backend)
    back = hw.rope_backward(y, cos, sin, interleaved=interleaved, backend=backend)
    torch.testing.assert_close(back, x, rtol=1e-5, atol=1e-6)


@each_pairing
@each_backend
def test_far_positions_do_not_drift(backend, interleaved):
    """Angles in bfloat16 are off by radians past position 8192."""
    known, pairs = 140000, 16
    cos, sin = tables(backend, known, pairs)
    positions = torch.tensor([0, 1, 8191, 8192, 8193, 65535, 65536, 131071, 139999], device=DEVICE[backend])
    x = normal(backend, 9, 2, 32, dtype=BF16)
    y = hw.rope(x, cos, sin, positions, interleaved, backend=backend)
    wide_cos, wide_sin = tables(backend, known, pairs, F64)
    exact = hw.reference.rope(x.double(), wide_cos, wide_sin, positions, interleaved)
    # One rounding to eight digits, and that of the float32 tables.
    assert ((y.double() - exact).abs() <= exact.abs() * 2**-8 * 1.01 + 1e-6).all()


@each_pairing
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@each_backend
def test_elements_beyond_the_pairs_pass_through(backend, dtype, interleaved):
    x, (cos, sin) = normal(backend, 2, 3, 11, 24, dtype=dtype), tables(backend, 11, 4)
    y = hw.rope(x, cos, sin, interleaved=interleaved, backend=backend)
    assert torch.equal(y[..., 8:], x[..., 8:])
    assert not torch.equal(y[..., :8], x[..., :8])
    assert torch.equal(y[:, :, 0], x[:, :, 0])  # position 0: an angle of 0


@each_backend
def test_nothing_is_rotated_in_place(backend):
    q, k = (normal(backend, 2, 9, h, 16).transpose(1, 2) for h in (4, 2))
    cos, sin = tables(backend, 9, 8)
    before = [x.clone() for x in (q, k, cos, sin)]
    q.requires_grad_()
    k.requires_grad_()
    yq, yk = hw.rope((q, k), cos, sin, backend=backend)
    grads = torch.ones_like(yq), torch.ones_like(yk)
    torch.autograd.grad((yq, yk), (q, k), grads)
    for x, kept in zip((q, k, cos, sin), before, strict=True):
        assert torch.equal(x.detach(), kept)
    assert all((g == 1).all() for g in grads)


@each_pairing
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@each_backend
def test_a_pair_is_two_calls(backend, dtype, interleaved):
    q, k = (normal(backend, 2, h, 21, 24, dtype=dtype, seed=h).requires_grad_() for h in (5, 2))
    cos, sin = tables(backend, 40, 8)
    positions = torch.arange(21, device=DEVICE[backend]).flip(0)
    together = hw.rope((q, k), cos, sin, positions, interleaved, backend=backend)
    alone = [hw.rope(x, cos, sin, positions, interleaved, backend=backend) for x in (q, k)]
    assert isinstance(together, tuple)
    grads = [normal(backend, *x.shape, dtype=dtype, seed=9) for x in (q, k)]
    together += torch.autograd.grad(together, (q, k), grads)
    alone += [torch.autograd.grad(y, x, g)[0] for y, x, g in zip(alone, (q, k), grads, strict=True)]
    together += hw.rope_backward(tuple(grads), cos, sin, positions, interleaved, backend=backend)
    alone += alone[2:]
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))


@each_backend
def test_of_a_pair_one_may_be_unused_or_want_no_gradient(backend):
    q, k = (normal(backend, 2, h, 6, 8, seed=h).requires_grad_() for h in (4, 2))
    cos, sin = tables(backend, 6, 4)
    yq, yk = hw.rope((q, k), cos, sin, backend=backend)
    grad = torch.ones_like(yk)
    dq, dk = torch.autograd.grad(yk, (q, k), grad, allow_unused=True, retain_graph=True)
    assert dq is None
    assert torch.equal(dk, hw.rope_backward(grad, cos, sin, backend=backend))
    yq, _ = hw.rope((q, k.detach()), cos, sin, backend=backend)
    yq.sum().backward()
    assert k.grad is None
    assert torch.equal(q.grad, hw.rope_backward(torch.ones_like(yq).contiguous(), cos, sin, backend=backend))


@pytest.mark.parametrize("bad", [-1, 9, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@each_pairing
@each_backend
def test_position_outside_the_tables_gives_nan_for_its_token_alone(backend, interleaved, dtype, bad):
    x, (cos, sin) = normal(backend, 5, 3, 12), tables(backend, 9, 4)
    good = torch.tensor([0, 8, 2, 2, 7], dtype=dtype, device=DEVICE[backend])
    positions = good.clone()
    positions[3] = bad
    expected = hw.rope(x, cos, sin, good, interleaved, backend=backend)
    for run in (hw.rope, hw.rope_backward):
        y = run(x, cos, sin, positions, interleaved, backend=backend)
        assert y[3].isnan().all()
        assert torch.equal(y[[0, 1, 2, 4]].isnan().any(), torch.tensor(False, device=y.device))
    y = hw.rope(x, cos, sin, positions, interleaved, backend=backend)
    assert torch.equal(y[[0, 1, 2, 4]], expected[[0, 1, 2, 4]])


@each_backend
def test_tables_without_rows_give_nan(backend):
    x, (cos, sin) = normal(backend, 5, 3, 12), tables(backend, 9, 4)
    positions = torch.zeros(5, dtype=torch.int64, device=DEVICE[backend])
    assert hw.rope(x, cos[:0], sin[:0], positions, backend=backend).isnan().all()


@each_backend
def test_packed_documents_with_positions_are_documents_alone(backend):
    lengths, (cos, sin) = [3, 8, 1], tables(backend, 12, 4)
    x = normal(backend, sum(lengths), 2, 8)
    positions = torch.cat([torch.arange(n) for n in lengths]).to(DEVICE[backend])
    packed = hw.rope(x, cos, sin, positions, backend=backend)
    alone = [hw.rope(part.contiguous(), cos, sin, backend=backend) for part in x.split(lengths)]
    assert torch.equal(packed, torch.cat(alone))
    assert not torch.equal(packed, hw.rope(x, cos, sin, backend=backend))


@each_backend
def test_results_lie_as_x_does(backend):
    cos, sin = tables(backend, 9, 4)
    inside, outside = normal(backend, 2, 9, 3, 10).transpose(1, 2), normal(backend, 2, 3, 9, 10)
    for x in (inside, outside, inside.to(BF16), normal(backend, 9, 3, 10)):
        y = hw.rope(x, cos, sin, backend=backend)
        assert y.stride() == x.stride()
        assert hw.rope_backward(y, cos, sin, backend=backend).stride() == x.stride()


@each_pairing
@each_backend
def test_memory_that_begins_at_an_odd_element(backend, interleaved):
    x, (cos, sin) = normal(backend, 1 + 2 * 3 * 8)[1:].view(1, 2, 3, 8), tables(backend, 3, 4)
    expected = hw.rope(x.clone(), cos, sin, None, interleaved, backend=backend)
    assert torch.equal(hw.rope(x, cos, sin, None, interleaved, backend=backend), expected)


@pytest.mark.parametrize("shape", [(2, 9), (9,)], ids=str)
@each_backend
def test_positions_of_any_strides(backend, shape):
    x, (cos, sin) = normal(backend, 2, 3, 9, 8), tables(backend, 30, 4)
    positions = torch.randint(0, 30, shape, generator=torch.Generator().manual_seed(1)).to(DEVICE[backend])
    expected = hw.rope(x, cos, sin, positions, backend=backend)
    spread = torch.empty(*shape[:-1], 27, dtype=torch.int64, device=DEVICE[backend])[..., ::3].copy_(positions)
    assert torch.equal(hw.rope(x, cos, sin, spread, backend=backend), expected)
    shared = positions[..., :].view(-1)[:9]
    both = hw.rope(x, cos, sin, shared.expand(2, 9), backend=backend)
    assert torch.equal(both, hw.rope(x, cos, sin, shared, backend=backend))


@each_backend
def test_backward_runs_twice_and_under_checkpointing(backend):
    x, (cos, sin) = normal(backend, 1, 2, 6, 8).requires_grad_(), tables(backend, 6, 4)

    def layer(x):
        return hw.rope(torch.tanh(x), cos, sin, backend=backend).square()

    y = layer(x)
    once = torch.autograd.grad(y.sum(), x, retain_graph=True)[0].clone()
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], once)
    again = checkpoint(layer, x, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(again.sum(), x)[0], once)


@pytest.mark.skipif(not settings.triton_interpret, reason="for Triton's interpreter (TRITON_INTERPRET=1)")
def test_triton_indices_of_64_bits_find_the_same_elements(monkeypatch):
    from headwise.backends.triton import rope

    x, tables_ = normal("triton", 3, 2, 9, 12), tables("triton", 9, 4)
    before = hw.rope(x, *tables_, backend="triton")
    monkeypatch.setattr(rope, "_INT32", 0)
    assert torch.equal(hw.rope(x, *tables_, backend="triton"), before)


def test_webgpu_pair_is_one_dispatch():
    q, k = (hw.webgpu.array(normal("cpu", 2, 9, h, 16)).transpose(1, 2) for h in (4, 2))
    cos, sin = (hw.webgpu.array(t) for t in tables("cpu", 9, 8))
    for run in (hw.rope, hw.rope_backward):
        run((q, k), cos, sin)
        before = hw.webgpu.counts().dispatches
        run((q, k), cos, sin)
        assert hw.webgpu.counts().dispatches - before == 1


def test_opcheck():
    q, k = (normal("cpu", 2, h, 6, 8) for h in (3, 1))
    cos, sin = tables("cpu", 9, 4)
    torch.library.opcheck(torch.ops.headwise.rope_backward, ([q, k], cos, sin, None, False, "cpu"))
    q.requires_grad_()
    torch.library.opcheck(torch.ops.headwise.rope_forward, ([q, k], cos, sin, torch.arange(6), True, "cpu"))
    torch.library.opcheck(torch.ops.headwise.rope_forward, ([q], cos, sin, None, False, "cpu"))


def test_one_compiled_function_takes_every_shape():
    torch._dynamo.reset()
    compiled = torch.compile(hw.rope, fullgraph=True, dynamic=True, backend="aot_eager")
    for b, s, d in ((2, 5, 16), (3, 9, 24), (4, 11, 40)):
        q, k = (normal("cpu", b, s, h, d).transpose(1, 2).requires_grad_() for h in (4, 2))
        cos, sin = tables("cpu", 50, d // 2)
        ours, eager = compiled((q, k), cos, sin), hw.rope((q, k), cos, sin)
        assert all(torch.equal(a, b) for a, b in zip(ours, eager, strict=True))
        gradients = [torch.autograd.grad(sum(y.square().sum() for y in ys), (q, k)) for ys in (ours, eager)]
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_second_order_raises():
    x, (cos, sin) = normal("cpu", 1, 2, 6, 8).requires_grad_(), tables("cpu", 6, 4)
    (dx,) = torch.autograd.grad(hw.rope(x, cos, sin).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="second-order"):
        dx.sum().backward()


def test_tables_may_want_gradients_where_none_are_recorded():
    x, (cos, sin) = normal("cpu", 1, 2, 6, 8), tables("cpu", 6, 4)
    expected = hw.rope(x, cos, sin)
    cos.requires_grad_()
    with torch.no_grad():
        assert torch.equal(hw.rope(x, cos, sin), expected)
    with pytest.raises(ValueError, match=r"cos requires a gradient.*cos\.detach\(\)"):
        hw.rope(x, cos, sin)
