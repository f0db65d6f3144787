"""What Triton launchers prepare: later calls of the same kind launch what the first one did, on their own tensors."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from headwise.backends import registry
from headwise.backends.triton import launch as launching
from headwise.ops.attention._arguments import Flags

BF16, F32 = torch.bfloat16, torch.float32
FLAGS = Flags(left=-1, right=0, scale=0.125, softcap=0.0, deterministic=True)


def tensor(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype, device="meta")


def heads_inside(*shape):
    return tensor(*shape).transpose(1, 2)


LENGTHS = tensor(2, dtype=torch.int32)
CACHE = tensor(2, 4, 900, 32)
NONE = (None,) * 4
# The launcher, its tensors, and its other arguments.
CALLS = {
    "attention": ("attention_forward", (*[tensor(2, 4, 70, 32)] * 3, *NONE), (FLAGS,)),
    "attention, heads inside": ("attention_forward", (*[heads_inside(2, 70, 4, 32)] * 3, *NONE), (FLAGS,)),
    "attention, another dim of v": (
        "attention_forward",
        (tensor(2, 4, 70, 32), tensor(2, 4, 70, 32), tensor(2, 4, 70, 16), *NONE),
        (FLAGS,),
    ),
    "attention, everything": (
        "attention_forward",
        (
            *[tensor(2, 4, 70, 32)] * 3, tensor(2, 1, 70, 70, dtype=torch.bool), tensor(1, 4, 70, 70), LENGTHS,
            tensor(4, dtype=torch.float32),
        ),
        (FLAGS,),
    ),
    "attention, float32": ("attention_forward", (*[tensor(2, 4, 70, 32, dtype=torch.float32)] * 3, *NONE), (FLAGS,)),
    "attention, no queries": ("attention_forward", (tensor(2, 4, 0, 32), *[tensor(2, 4, 70, 32)] * 2, *NONE), (FLAGS,)),
    "attention, output alone": ("attention_output", (*[tensor(2, 4, 70, 32)] * 3, *NONE), (FLAGS,)),
    "attention, output alone, float32": (
        "attention_output",
        (*[tensor(2, 4, 70, 32, dtype=torch.float32)] * 3, *NONE),
        (FLAGS,),
    ),
    "decode": ("attention_decode", (tensor(2, 8, 32), CACHE, CACHE, LENGTHS, None, None), (FLAGS, 0)),
    "decode, some tokens": ("attention_decode", (tensor(2, 8, 3, 32), CACHE, CACHE, LENGTHS, None, None), (FLAGS, 4)),
    "decode, float32": (
        "attention_decode",
        (tensor(2, 8, 32, dtype=F32), *[tensor(2, 4, 900, 32, dtype=F32)] * 2, LENGTHS, None, None),
        (FLAGS, 0),
    ),
    "decode, pages": (
        "attention_decode",
        (tensor(2, 8, 32), CACHE, CACHE, LENGTHS, tensor(2, 8, dtype=torch.int32)[:, ::2], tensor(8, dtype=torch.float32)),
        (FLAGS, 0),
    ),
    "rms_norm": ("rms_norm_forward", (tensor(5, 7, 64), tensor(64)), (1e-6, 0.0)),
    "rms_norm, no weight, strides": ("rms_norm_forward", (tensor(7, 5, 64).transpose(0, 1), None), (1e-6, 0.0)),
    "rms_norm, output alone": ("rms_norm_output", (tensor(5, 7, 64), tensor(64)), (1e-6, 0.0)),
    "rms_norm, output alone, long rows": ("rms_norm_output", (tensor(500, 65536), tensor(65536)), (1e-6, 0.0)),
    "rms_norm, long rows": ("rms_norm_forward", (tensor(500, 65536), tensor(65536)), (1e-6, 0.0)),
    "softmax": ("softmax_forward", (tensor(5, 7, 64),), ()),
    "softmax, strides": ("softmax_forward", (tensor(7, 5, 64).transpose(0, 1),), ()),
    "softmax, no rows": ("softmax_forward", (tensor(0, 64),), ()),
}  # fmt: skip


@pytest.fixture
def launches(monkeypatch):
    seen = []

    def note(kernel, grid, tensors, numbers, constants, *options):
        layouts = [t if t is None else (t.dtype, t.shape, t.stride()) for t in tensors]
        seen.append((kernel, tuple(grid) + (1,) * (3 - len(grid)), layouts, numbers, constants, options))

    import headwise.backends.triton.rms_norm
    import headwise.backends.triton.softmax

    for module in (launching, headwise.backends.triton.rms_norm, headwise.backends.triton.softmax):
        monkeypatch.setattr(module, "launch", note)
    return seen


@pytest.mark.parametrize("name", CALLS)
def test_prepared_calls_launch_what_the_call_launches(launches, name):
    launcher, tensors, others = CALLS[name]
    launch = registry.launcher("triton", launcher)
    results = launch(*tensors, *others)
    expected = launches.copy()
    prepared = launch.prepare(*tensors, *others)
    assert launches == expected, "to prepare is not to launch"
    assert bool(expected) == ("no " not in name or "weight" in name)
    for _ in range(2):
        launches.clear()
        again = prepared(*tensors)
        assert launches == expected
        for one, other in zip(_all(results), _all(again), strict=True):
            assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
            assert one is not other


@pytest.mark.parametrize("name", CALLS)
def test_what_is_prepared_holds_no_tensor(launches, name):
    launcher, tensors, others = CALLS[name]
    copies = [t if t is None else t.clone() for t in tensors]
    prepared = registry.launcher("triton", launcher).prepare(*copies, *others)
    held = [weakref.ref(t) for t in copies if t is not None]
    prepared(*tensors)
    copies.clear()
    gc.collect()
    assert all(ref() is None for ref in held)


def _all(results):
    return results if isinstance(results, tuple) else (results,)


@pytest.mark.parametrize("precision", ["tf32", "tf32x3"])
@pytest.mark.parametrize("name", ["attention, float32", "decode, float32"])
def test_how_float32_is_multiplied_is_asked_for_at_every_call(launches, monkeypatch, name, precision):
    from headwise.backends.triton import attention_forward, decode

    def switch_to(precision):
        for module in (attention_forward, decode):
            monkeypatch.setattr(module, "dot_precision", lambda dtype, widest=0: precision)

    before = {"tf32": "tf32x3", "tf32x3": "tf32"}[precision]
    launcher, tensors, others = CALLS[name]
    switch_to(before)
    prepared = registry.launcher("triton", launcher).prepare(*tensors, *others)
    for asked_for in (before, precision, before):
        switch_to(asked_for)
        launches.clear()
        prepared(*tensors)
        of_products = [constants for kernel, *_, constants, _ in launches if kernel.fn.__name__ != "_merge"]
        assert of_products
        for constants in of_products:
            assert {"tf32", "tf32x3"} & set(constants) == {asked_for}


@pytest.mark.parametrize("takes", [True, False])
def test_the_plain_kernel_is_worked_out_once_and_where_hopper_refuses(launches, monkeypatch, takes):
    from headwise.backends.triton import attention_forward

    prepare_plain, worked_out, asked = attention_forward._prepare_plain, [], []
    monkeypatch.setattr(attention_forward, "_prepare_plain", lambda *args: worked_out.append(1) or prepare_plain(*args))
    monkeypatch.setattr(attention_forward, "_for_hopper", lambda q: True)
    monkeypatch.setattr(attention_forward, "_hopper_forward", lambda: lambda *of: lambda *on: asked.append(1) or takes)
    _, tensors, others = CALLS["attention"]
    prepared = attention_forward.prepare_attention_forward(*tensors, *others)
    assert not worked_out
    for _ in range(3):
        prepared(*tensors)
    assert len(asked) == 3
    assert len(worked_out) == (0 if takes else 1)
    assert len(launches) == (0 if takes else 3)


def test_limits_of_the_plain_kernel_are_none_of_hopper(monkeypatch):
    from headwise.backends.triton import attention_forward

    far_apart = torch.empty_strided((1, 16, 2048, 64), (2**40, 64, 2**25, 1), dtype=BF16, device="meta")
    call = (*[far_apart] * 3, *NONE, FLAGS)
    with pytest.raises(ValueError, match="from token to token"):
        attention_forward.attention_forward(*call)
    launched = []
    monkeypatch.setattr(attention_forward, "_for_hopper", lambda q: True)
    monkeypatch.setattr(
        attention_forward, "_hopper_forward", lambda: lambda *of: lambda *on: launched.append(1) or True
    )
    attention_forward.attention_forward(*call)
    assert launched
