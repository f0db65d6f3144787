"""Recording dispatches straight into wgpu-native: the same results as wgpu's own methods, and no error lost."""

from __future__ import annotations

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
        return lambda *arguments: self.calls.append((name, *arguments))


def test_webgpu_a_pass_of_another_make_is_used_by_its_methods():
    made = CountingPass()
    encoding = passes.encoding(made)
    encoding.set_pipeline(encoding.handle(made), "pipeline")
    encoding.set_bind_group(made, 0, "group", 0, encoding.no_offsets)
    encoding.dispatch(made, 3, 2, 1)
    assert made.calls == [
        ("set_pipeline", "pipeline"), ("set_bind_group", 0, "group"), ("dispatch_workgroups", 3, 2, 1),
    ]  # fmt: skip


def test_webgpu_this_wgpu_is_recorded_directly():
    """Otherwise the tests below compare a thing with itself."""
    assert passes._library(runtime.device().gpu) is not None


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
