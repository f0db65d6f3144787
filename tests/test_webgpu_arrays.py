"""Arrays as PyTorch sees them: gradients through views and over the bus, writing in place, replayed calls, validation."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import weakref
from collections import Counter

import pytest
import torch
import torch.utils.checkpoint

import headwise as hw
from headwise import webgpu
from headwise.backends.webgpu import copies, recorder, runtime
from headwise.backends.webgpu.rms_norm import rms_norm_forward
from headwise.config import Settings, settings
from headwise.ops.rms_norm import RmsNorm

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


PARTS = {
    "rows of a cache": lambda x: x[:, :, 3:4],
    "columns": lambda x: x[..., 1:4],
    "one column": lambda x: x[..., 2],
    "every other column": lambda x: x[..., 1::2],
    "one element": lambda x: x[1, 2, 3, 4],
    "transposed": lambda x: x.transpose(1, 3)[:, 1:],
    "odd columns of a permuted part": lambda x: x[:, 1:].permute(3, 0, 2, 1)[1:],
    "all": lambda x: x,
}


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int32, torch.bool], ids=str)
@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_written_and_the_rest_stays(part, dtype):
    """Elements of 16 and 8 bits share a word with others, which must not be touched."""
    torch.manual_seed(0)
    plain = (torch.rand(2, 3, 5, 7) * 100).to(dtype)
    cache = webgpu.array(plain)
    new = (torch.rand(PARTS[part](plain).shape) * 100).to(dtype)
    for value in (new, new.flip(0) if new.dim() else new):  # the second is replayed
        PARTS[part](plain).copy_(value)
        PARTS[part](cache).copy_(webgpu.array(value))
        assert torch.equal(cache.torch(), plain)


def test_a_cache_takes_new_keys():
    plain, new = torch.zeros(2, 3, 8, 5, dtype=torch.bfloat16), torch.randn(2, 3, 1, 5).bfloat16()
    cache = webgpu.array(plain)
    for at in (3, 0, 7):
        plain[:, :, at : at + 1] = new
        cache[:, :, at : at + 1] = webgpu.array(new)
        new = new + 1
    plain[:, 1:2] = plain[:, 2:]  # within one memory, and one head for all
    cache[:, 1:2] = cache[:, 2:]
    plain[1] = plain[0, :1]
    cache[1] = cache[0, :1]
    plain[0, 0, 0] = new[0, 0, 0]  # from the CPU
    cache[0, 0, 0] = new[0, 0, 0]
    plain[:, :, 3:4] = new.float() / 3  # of another dtype: rounded
    cache[:, :, 3:4] = webgpu.array(new.float() / 3)
    assert torch.equal(cache.torch(), plain)


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


def test_an_array_is_copied_and_pickled():
    x = webgpu.array(torch.randn(3, 4)).requires_grad_()
    other = copy.deepcopy(x)
    assert other.requires_grad
    assert torch.equal(other.detach().torch(), x.detach().torch())
    loaded = pickle.loads(pickle.dumps(x))
    assert loaded.requires_grad
    assert torch.equal(loaded.detach().torch(), x.detach().torch())


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


def test_like_an_array_but_on_the_cpu():
    x = webgpu.array(torch.ones(3))
    made = torch.zeros_like(x, device="cpu")
    assert made.device.type == "cpu"
    assert torch.equal(made, torch.zeros(3))


@pytest.mark.parametrize("value", ["abc", "-5", "300"])
def test_a_binding_that_makes_no_sense_names_its_variable(monkeypatch, value):
    monkeypatch.setenv("HEADWISE_WEBGPU_BINDING", value)
    with pytest.raises(ValueError, match="HEADWISE_WEBGPU_BINDING"):
        Settings.from_environment()


# ------------------------------------------------------------------------------------------------------- replayed calls


def arrays(*shapes):
    return [webgpu.array(torch.randn(shape)) for shape in shapes]


def close(ours, expected):
    torch.testing.assert_close(ours.torch(), expected, rtol=1e-5, atol=1e-5)


def test_a_record_does_not_know_which_arguments_share_a_buffer():
    """k is v in the first call, q is k in others, and all are apart in the last."""
    shape = (1, 2, 5, 8)
    for _ in range(3):
        a, b, c = arrays(shape, shape, shape)
        for q, k, v in ((a, b, b), (a, a, b), (a, b, a), (a, a, a), (a, b, c), (c, b, a)):
            expected = hw.attention(*(x.torch() for x in (q, k, v)), causal=True, backend="cpu")
            close(hw.attention(q, k, v, causal=True), expected)


def test_a_record_reads_the_view_it_is_given():
    """The layout is the same but for where it begins."""
    x = webgpu.array(torch.randn(6, 8))
    for _ in range(2):
        for first in range(3):
            part = x[first : first + 4]
            close(hw.softmax(part), x.torch()[first : first + 4].softmax(-1))


def test_calls_go_on_when_the_device_was_opened_again():
    on_cpu = torch.randn(4, 8)
    for _ in range(3):
        x = webgpu.array(torch.randn(4, 8))
        close(hw.softmax(x), x.torch().softmax(-1))
        torch.testing.assert_close(hw.softmax(on_cpu, backend="webgpu"), on_cpu.softmax(-1))
        runtime.forget()


def calls_of_ours(function):
    """Functions of Headwise that a call passes, and how often."""
    seen = Counter()

    def notice(frame, event, argument):
        if event == "call" and "/headwise/" in frame.f_code.co_filename:
            seen[frame.f_code.co_filename, frame.f_code.co_name] += 1

    sys.setprofile(notice)
    try:
        kept = function()  # noqa: F841  dies after the count
    finally:
        sys.setprofile(None)
    return seen


def test_a_replayed_call_passes_few_functions():
    x, weight = arrays((4, 8), (8,))
    for _ in range(3):
        y = hw.rms_norm(x, weight)
    del y
    seen = calls_of_ours(lambda: hw.rms_norm(x, weight))
    assert len(seen) <= 5, seen
    assert sum(seen.values()) <= 12, seen


def test_rms_norm_without_gradients_makes_no_rstd():
    """What only a backward reads is neither written nor wrapped; with gradients it is."""
    x, weight = arrays((4, 8), (8,))
    expected = torch.nn.functional.rms_norm(x.torch(), (8,), weight.torch(), 1e-6)
    y = hw.rms_norm(x, weight)
    close(y, expected)
    assert recorder.record(rms_norm_forward, RmsNorm(x, weight, 1e-6, 0.0, with_rstd=False))(x, weight)[1] is None
    leaf = webgpu.array(x.torch()).requires_grad_()
    z = hw.rms_norm(leaf, weight)
    assert torch.equal(z.detach().torch(), y.torch())
    z.backward(webgpu.array(torch.ones(4, 8)))
    on_cpu = x.torch().requires_grad_()
    torch.nn.functional.rms_norm(on_cpu, (8,), weight.torch(), 1e-6).sum().backward()
    close(leaf.grad, on_cpu.grad)


def test_a_record_takes_no_more_memory_than_its_launcher():
    """Buffers that a launcher drops are lent to it again."""

    def chain(device, x):
        for _ in range(10):
            x = copies.copied(device, x)
        return x

    x = webgpu.array(torch.randn(1000))
    close(recorder.replayed(chain, [x]), x.torch())
    (record,) = [kept for key, kept in recorder._kept.items() if key[0] is chain]
    assert len(record._sizes) == 2


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


def test_records_keep_no_array_alive():
    x, weight = arrays((4, 8), (8,))
    seen = [weakref.ref(x), weakref.ref(weight)]
    hw.softmax(x), hw.rms_norm(x, weight), hw.attention(*arrays(*[(1, 1, 4, 8)] * 3))
    del x, weight
    gc.collect()
    assert [ref() for ref in seen] == [None, None]
