"""Arrays as PyTorch sees them: gradients through views and over the bus, writing in place, replayed calls, validation."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.utils.checkpoint

import headwise as hw
from headwise import webgpu
from headwise.backends.webgpu import array as headwise_array
from headwise.backends.webgpu import runtime
from headwise.config import Settings, settings

FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def _weights(y):
    return torch.arange(y.numel(), dtype=torch.float32).view(y.shape).sin().to(y.dtype)


def _parts(x):
    q, k, _ = x.split(24, -1)
    a, b = x[:, 1::2].unbind(0)
    return (
        hw.softmax(q.contiguous()),
        hw.softmax(k.contiguous()),  # nothing depends on the third part
        hw.softmax(torch.cat([a, b[:2]], 0)),
        hw.softmax(torch.stack([a, b], 1)),
        hw.softmax(x[1]),
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gradients_go_through_views_parts_and_joins(dtype):
    torch.manual_seed(0)
    plain = torch.randn(2, 9, 72).to(dtype)
    x, resident = plain.clone().requires_grad_(), webgpu.array(plain).requires_grad_()
    outputs, found = _parts(x), _parts(resident)
    (wanted,) = torch.autograd.grad(outputs, x, [_weights(y) for y in outputs])
    before = webgpu.counts().readbacks
    (grad,) = torch.autograd.grad(found, resident, [webgpu.array(_weights(y)) for y in outputs])
    assert webgpu.counts().readbacks == before
    for y, of_cpu in zip(found, outputs, strict=True):
        torch.testing.assert_close(y.detach().torch(), of_cpu.detach())
    torch.testing.assert_close(grad.torch(), wanted)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32], ids=str)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_writing_into_the_first_elements_leaves_the_others(dtype, count):
    plain = torch.arange(8).to(dtype)
    x = webgpu.array(plain)
    x[:count].add_(webgpu.array(torch.ones(count, dtype=dtype)))
    plain[:count] += 1
    assert torch.equal(x.torch(), plain)


def test_bytes_are_not_added():
    x = webgpu.array(torch.tensor([200, 100], dtype=torch.uint8))
    with pytest.raises(NotImplementedError, match="floats or int32"):
        x + x


def test_what_is_written_in_a_hook_is_written():
    x = webgpu.array(torch.ones(4)).requires_grad_()

    def step(leaf):
        leaf.data.add_(leaf.grad)

    x.register_post_accumulate_grad_hook(step)
    hw.softmax(x).backward(webgpu.array(torch.tensor([4.0, 0.0, 0.0, 0.0])))
    wanted = torch.ones(4) + torch.tensor([0.75, -0.25, -0.25, -0.25])
    torch.testing.assert_close(x.detach().torch(), wanted)


def test_two_gradients_of_one_memory_do_not_meet():
    x, w = (webgpu.array(torch.zeros(3, 3)).requires_grad_() for _ in range(2))
    for _ in range(3):
        (x + w.t()).backward(webgpu.array(torch.ones(3, 3)))
    assert torch.equal(x.grad.torch(), torch.full((3, 3), 3.0))
    assert torch.equal(w.grad.torch(), torch.full((3, 3), 3.0))


class _GradientFrom(torch.autograd.Function):
    """softmax(x), whose backward pass says that the gradient of x is what ``of(out)`` was in the forward pass."""

    @staticmethod
    def forward(ctx, x, of):
        out = hw.softmax(x)
        ctx.save_for_backward(of(out))
        return out

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0], None


def test_a_gradient_that_was_saved_is_nobodys_memory():
    shared = webgpu.array(torch.ones(4))
    x = webgpu.array(torch.zeros(4)).requires_grad_()
    for _ in range(3):
        _GradientFrom.apply(x, lambda out: shared.detach()).backward(webgpu.array(torch.ones(4)))
    assert torch.equal(x.grad.torch(), torch.full((4,), 3.0))
    assert torch.equal(shared.torch(), torch.ones(4))


def test_an_output_that_is_a_gradient_too_stays_what_it_is():
    x = webgpu.array(torch.zeros(4)).requires_grad_()
    outputs = [_GradientFrom.apply(x, lambda out: out) for _ in range(3)]
    for out in outputs:
        out.backward(webgpu.array(torch.ones(4)))
    assert torch.equal(x.grad.torch(), torch.full((4,), 0.75))
    assert all(torch.equal(out.detach().torch(), torch.full((4,), 0.25)) for out in outputs)


def test_a_gradient_that_a_hook_gives_is_nobodys_memory():
    shared = webgpu.array(torch.ones(4))
    x = webgpu.array(torch.zeros(4)).requires_grad_()
    x.register_hook(lambda grad: shared.detach())
    for _ in range(3):
        hw.softmax(x).backward(webgpu.array(torch.ones(4)))
    assert torch.equal(x.grad.torch(), torch.full((4,), 3.0))
    assert torch.equal(shared.torch(), torch.ones(4))


def test_what_a_hook_writes_into_a_gradient_is_seen():
    x, one = webgpu.array(torch.zeros(4)).requires_grad_(), webgpu.array(torch.ones(4))

    def add_one(leaf):
        leaf.grad.detach().add_(one)

    x.register_post_accumulate_grad_hook(add_one)
    hw.softmax(x).backward(webgpu.array(torch.tensor([4.0, 0.0, 0.0, 0.0])))
    assert torch.equal(x.grad.torch(), torch.tensor([1.75, 0.75, 0.75, 0.75]))


def _dispatches_of_backward(y, x, grad):
    before = webgpu.counts().dispatches
    torch.autograd.grad(y, x, grad)
    return webgpu.counts().dispatches - before


def test_what_was_saved_for_backward_is_used_where_it_lies():
    x, grad = webgpu.array(torch.randn(5, 64)).requires_grad_(), webgpu.array(torch.randn(5, 64))
    assert _dispatches_of_backward(hw.softmax(x), x, grad) == 1
    again = torch.utils.checkpoint.checkpoint(hw.softmax, x, use_reentrant=False)
    assert _dispatches_of_backward(again, x, grad) == 2  # the output again, and the gradient


def test_gradients_cross_the_bus_both_ways():
    torch.manual_seed(0)
    x = torch.randn(4, 5, requires_grad=True)
    (hw.softmax(x * 2) * _weights(x)).sum().backward()
    wanted, x.grad = x.grad, None
    (hw.softmax(webgpu.array(x * 2)).to("cpu") * _weights(x)).sum().backward()
    torch.testing.assert_close(x.grad, wanted)


def test_an_array_is_copied_and_not_pickled():
    x = webgpu.array(torch.randn(3, 4)).requires_grad_()
    other = copy.deepcopy(x)
    assert other.requires_grad
    assert torch.equal(other.detach().torch(), x.detach().torch())
    with pytest.raises(TypeError, match=r"x\.torch\(\)"):
        pickle.dumps(x)


@pytest.mark.parametrize("shared", [False, True])
def test_a_replayed_call_computes_anew(shared):
    """Forward, backward and merge, three times each over other data; with q, k, v in one memory or in three."""
    torch.manual_seed(0)
    for _ in range(3):
        qkv = torch.randn(3, 1, 2, 37, 24)
        weights = torch.randn(1, 2, 37, 24)
        leaves = qkv.unbind(0) if shared else [x.clone() for x in qkv]
        plain = [x.clone().requires_grad_() for x in qkv]
        whole = webgpu.array(qkv)
        arrays = [x.detach().requires_grad_() for x in whole.unbind(0)]
        if not shared:
            arrays = [webgpu.array(x).requires_grad_() for x in leaves]
        out = hw.attention(*plain, causal=True)
        found, found_lse = hw.attention(*arrays, causal=True, return_lse=True)
        torch.testing.assert_close(found.detach().torch(), out.detach(), rtol=1e-4, atol=1e-5)
        grads = torch.autograd.grad(out, plain, weights)
        for mine, theirs in zip(torch.autograd.grad(found, arrays, webgpu.array(weights)), grads, strict=True):
            torch.testing.assert_close(mine.torch(), theirs, rtol=1e-4, atol=1e-5)
        merged, _ = hw.merge_attention([found.detach()] * 2, [found_lse.detach()] * 2)
        torch.testing.assert_close(merged.torch(), out.detach(), rtol=1e-4, atol=1e-5)


def test_a_replayed_call_binds_the_memory_of_its_own_arguments():
    """The same buffers in other roles, results that are kept, and more dispatches than one command buffer takes."""
    torch.manual_seed(0)
    a, b = torch.randn(5, 12), torch.randn(5, 12)
    x, y = webgpu.array(a), webgpu.array(b)
    kept = []
    for i in range(70):
        first, second, p, g = (x, y, a, b) if i % 2 else (y, x, b, a)
        kept.append((hw.softmax_backward(first, second), p * (g - (p * g).sum(-1, keepdim=True))))
        if i % 3 == 0:
            kept = kept[-4:]  # memory goes back, and is taken again in another order
    for found, expected in kept:
        torch.testing.assert_close(found.torch(), expected, rtol=1e-5, atol=1e-5)


def test_validation_reads_arrays_back(monkeypatch):
    monkeypatch.setattr(settings, "validate", True)
    table = webgpu.array(torch.randn(10, 4))
    hw.embedding(webgpu.array(torch.tensor([1, 9])), table)
    with pytest.raises(ValueError, match=r"ids\[1\] is 10"):
        hw.embedding(webgpu.array(torch.tensor([1, 10])), table)


def test_like_an_array_but_on_the_cpu_is_refused():
    x = webgpu.array(torch.ones(3))
    with pytest.raises(NotImplementedError, match="cpu"):
        torch.ones_like(x, device="cpu")


@pytest.mark.parametrize("value", ["abc", "-5", "300"])
def test_a_binding_that_makes_no_sense_names_its_variable(monkeypatch, value):
    monkeypatch.setenv("HEADWISE_WEBGPU_BINDING", value)
    with pytest.raises(ValueError, match="HEADWISE_WEBGPU_BINDING"):
        Settings.from_environment()


# ------------------------------------------------------------------------------------------------------- prepared calls


def arrays(*shapes):
    return [webgpu.array(torch.randn(shape)) for shape in shapes]


def close(ours, expected):
    torch.testing.assert_close(ours.torch(), expected, rtol=1e-5, atol=1e-5)


def test_a_prepared_call_knows_which_arguments_lie_in_one_memory():
    """Of one kind by shapes, and not one plan: k is v in some calls, q is k in others, and all are apart in the last."""
    shape = (1, 2, 5, 8)
    for _ in range(3):
        a, b, c = arrays(shape, shape, shape)
        for q, k, v in ((a, b, b), (a, a, b), (a, b, a), (a, a, a), (a, b, c), (c, b, a)):
            expected = hw.attention(*(x.torch() for x in (q, k, v)), causal=True, backend="cpu")
            close(hw.attention(q, k, v, causal=True), expected)


def test_a_prepared_call_of_two_arguments_knows_it_too():
    for _ in range(2):
        a, b = arrays((9, 8), (9, 8))
        for x, weight in ((a, a), (a, b), (b, b), (b, a)):
            expected = torch.nn.functional.rms_norm(x.torch()[:8], (8,), weight.torch()[8], 1e-6)
            close(hw.rms_norm(x[:8], weight[8]), expected)


def test_a_prepared_call_on_a_view_reads_the_view():
    """The layout is the same but for where it begins."""
    x = webgpu.array(torch.randn(6, 8))
    for _ in range(2):
        for first in range(3):
            part = x[first : first + 4]
            close(hw.softmax(part), x.torch()[first : first + 4].softmax(-1))


def test_a_prepared_call_goes_on_after_plans_were_forgotten():
    x = webgpu.array(torch.randn(4, 8))
    device = runtime.device()
    for _ in range(3):
        close(hw.softmax(x), x.torch().softmax(-1))
        device.plans.clear()


def test_a_prepared_call_goes_on_when_the_device_was_opened_again():
    for _ in range(3):
        x = webgpu.array(torch.randn(4, 8))
        close(hw.softmax(x), x.torch().softmax(-1))
        runtime.forget()


def test_rms_norm_without_gradients_makes_one_array(monkeypatch):
    """What only a backward reads is neither written nor wrapped; with gradients it is."""
    x, weight = arrays((4, 8), (8,))
    expected = torch.nn.functional.rms_norm(x.torch(), (8,), weight.torch(), 1e-6)
    hw.rms_norm(x, weight)
    made = []
    make = headwise_array._array_of
    monkeypatch.setattr(headwise_array, "_array_of", lambda *arguments: made.append(1) or make(*arguments))
    y = hw.rms_norm(x, weight)
    close(y, expected)
    assert len(made) == 1
    leaf = webgpu.array(x.torch()).requires_grad_()
    for _ in range(2):
        made.clear()
        z = hw.rms_norm(leaf, weight)
    assert len(made) == 2
    assert torch.equal(z.detach().torch(), y.torch())
    z.backward(webgpu.array(torch.ones(4, 8)))
    on_cpu = x.torch().requires_grad_()
    torch.nn.functional.rms_norm(on_cpu, (8,), weight.torch(), 1e-6).sum().backward()
    close(leaf.grad, on_cpu.grad)


def test_rms_norm_without_gradients_of_nothing():
    assert hw.rms_norm(webgpu.array(torch.zeros(0, 8)), None).shape == (0, 8)
    assert hw.rms_norm(webgpu.array(torch.zeros(4, 0)), None).shape == (4, 0)


def test_decoding_one_token_needs_no_dim_for_it():
    q, k, v = arrays((2, 4, 8), (2, 2, 12, 8), (2, 2, 12, 6))
    lengths = webgpu.array(torch.tensor([12, 5]))
    for _ in range(2):
        out, lse = hw.attention_decode(q, k, v, lengths, return_lse=True)
        assert out.shape == (2, 4, 6)
        expected = hw.attention_decode(*(x.torch() for x in (q, k, v, lengths)), return_lse=True, backend="cpu")
        close(out, expected[0])
        close(lse, expected[1])
    # Heads may lie apart.
    wide = webgpu.array(torch.randn(4, 2, 8)).transpose(0, 1)
    out = hw.attention_decode(wide, k, v, lengths)
    close(out, hw.attention_decode(*(x.torch() for x in (wide, k, v, lengths)), backend="cpu"))


def test_what_is_prepared_keeps_no_array_alive():
    x, weight = arrays((4, 8), (8,))
    seen = [weakref.ref(x), weakref.ref(weight)]
    hw.softmax(x), hw.rms_norm(x, weight), hw.attention(*arrays(*[(1, 1, 4, 8)] * 3))
    del x, weight
    gc.collect()
    assert [ref() for ref in seen] == [None, None]
