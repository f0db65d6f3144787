"""Recording dispatches straight into wgpu-native: the same results as wgpu's own methods, and no error lost."""

from __future__ import annotations

import functools

import pytest
import torch
import wgpu

import headwise as hw
from headwise.backends.webgpu import passes, runtime
from headwise.webgpu import array


class CountingPass:
    """A pass that is not wgpu's: it can be used by its methods alone."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *arguments, **named: self.calls.append((name, *arguments, *([named] if named else [])))


def test_webgpu_a_pass_of_another_make_is_used_by_its_methods():
    made = CountingPass()
    encoding = passes.encoding(made)
    encoding.set_pipeline(encoding.handle(made), "pipeline")
    encoding.set_bind_group(made, 0, "group", 0, encoding.no_offsets)
    encoding.dispatch(made, 3, 2, 1)
    encoding.bind_group("layout", [("buffer", 256, 64)])
    name, described = made.calls.pop()
    assert (name, described["layout"]) == ("create_bind_group", "layout")
    assert described["entries"] == [{"binding": 0, "resource": {"buffer": "buffer", "offset": 256, "size": 64}}]
    assert made.calls == [
        ("set_pipeline", "pipeline"), ("set_bind_group", 0, "group"), ("dispatch_workgroups", 3, 2, 1),
    ]  # fmt: skip


def test_webgpu_this_wgpu_is_recorded_directly():
    """Otherwise the tests below compare a thing with itself."""
    assert passes._library(runtime.device().gpu) is not None
    assert "create_bind_group" not in repr(runtime.device().encoding.bind_group)
    assert not isinstance(runtime.device().encoding.bind_group, functools.partial)


def test_webgpu_both_ways_give_the_same_bits(monkeypatch):
    x, weight = torch.randn(7, 33), torch.randn(33)

    def chain():
        return hw.softmax(hw.rms_norm(hw.softmax(array(x)), array(weight))).torch()

    direct = chain()
    monkeypatch.setattr(passes, "_library", lambda gpu: None)
    runtime.forget()
    assert torch.equal(direct, chain())
    runtime.forget()


def test_webgpu_what_is_wrong_with_a_dispatch_is_raised():
    device = runtime.device()
    with device.lock:
        device.flush()
        y = device.empty((8,), torch.float32)
        kernel = device.kernel("fill")
        device.run(kernel, (1 << 20, 1, 1), (8, 0), y=y)
        with pytest.raises(wgpu.GPUError, match=r"[Ww]orkgroup|[Dd]ispatch"):
            device.flush()
    assert torch.equal(hw.softmax(torch.zeros(1, 2), backend="webgpu"), torch.full((1, 2), 0.5))


def test_webgpu_what_is_wrong_with_a_bind_group_is_raised():
    device = runtime.device()
    with device.lock:
        kernel = device.kernel("fill")
        storage = device.pool.take(1024)
        uniform = device.uniform(bytes(64))
        for first, size in ((0, 2048), (4, 256)):  # past the end, and not at a multiple of 256
            with pytest.raises(wgpu.GPUError, match=r"(?i)range|offset|align"):
                device.command(kernel, (1, 1, 1), (uniform, 0, 16), [(storage.buffer, first, size)])
    assert torch.equal(hw.softmax(torch.zeros(1, 2), backend="webgpu"), torch.full((1, 2), 0.5))


def _bound_anew(monkeypatch, step, times):
    """How many bind groups each repetition of a step makes."""
    device, made = runtime.device(), []
    bind = device.encoding.bind_group

    def noted(layout, bound):
        made[-1] += 1
        return bind(layout, bound)

    monkeypatch.setattr(device, "encoding", device.encoding._replace(bind_group=noted))
    for _ in range(times):
        made.append(0)
        step()
    return made


def test_webgpu_a_step_that_repeats_gets_the_same_buffers_again(monkeypatch):
    """A chain that autograd keeps gives its buffers back in another order than it took them. The pool lends them in the old
    one, so that the bind groups of the first step fit all others."""
    x, weight = array(torch.randn(64, 96)).requires_grad_(), array(torch.randn(96)).requires_grad_()

    def step():
        y = x
        for _ in range(20):
            y = hw.softmax(hw.rms_norm(y, weight)) * x
        y.backward(y.detach())
        x.grad = weight.grad = None

    made = _bound_anew(monkeypatch, step, 4)
    assert made[0] > 100
    assert made[2:] == [0, 0]


def test_webgpu_what_is_kept_from_the_last_step_takes_turns(monkeypatch):
    """A result that lives until the next one is there."""
    x, last = array(torch.randn(64, 96)).requires_grad_(), []

    def step():
        y = x
        for _ in range(20):
            y = hw.softmax(y)
        last[:] = [y]
        torch.autograd.grad(y, x, y.detach())

    assert sum(_bound_anew(monkeypatch, step, 8)[4:]) == 0
