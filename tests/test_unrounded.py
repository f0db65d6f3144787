"""Results of 16-bit inputs that stay float32, for those who merge or sum them: as far from the truth as float32 is."""

from __future__ import annotations

import pytest
import torch
from backends_under_test import DEVICE, RUNNABLE

import headwise as hw
from headwise.backends.triton.hopper import covers_backward, covers_forward
from headwise.ops.attention import unrounded
from headwise.ops.attention._arguments import Attention, Flags

LOW = [torch.bfloat16, torch.float16]
FLAGS = {"window": (40, 0), "scale": 0.2, "softcap": None, "deterministic": True}
ROUNDING = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}  # about the relative error of a rounded tensor
# GPUs round the weights to 16 bits before they multiply them with values; Triton's interpreter and other backends do not.
DIGITS = 1e-6


@pytest.fixture(params=RUNNABLE)
def backend(request):
    if DEVICE[request.param] == "cuda":
        pytest.skip("weights are rounded there: tests/gpu/test_gpu_unrounded.py")
    return request.param


def inputs(dtype, *, length=90, head_dim=20, value_dim=12):
    """q, k, v and a gradient of the result; `length` is more than a tile."""
    random = torch.Generator().manual_seed(3)
    shapes = ((2, 4, length, head_dim), (2, 2, length, head_dim), (2, 2, length, value_dim), (2, 4, length, value_dim))
    return [torch.randn(shape, generator=random).to(dtype) for shape in shapes]


def far_off(ours, truth):
    return ((ours.double() - truth.double()).norm() / truth.double().norm()).item()


@pytest.mark.parametrize("dtype", LOW)
def test_the_forward_keeps_its_digits(backend, dtype):
    q, k, v, _ = inputs(dtype)
    bias = torch.randn(4, 90, 90, generator=torch.Generator().manual_seed(4)).to(dtype)
    mask = torch.rand(90, 90, generator=torch.Generator().manual_seed(5)) < 0.8
    for given in ({}, {"bias": bias, "mask": mask, "softcap": 3.0}):
        wide = {name: x.double() if name == "bias" else x for name, x in given.items()}
        truth = hw.attention(q.double(), k.double(), v.double(), backend="cpu", return_lse=True, **FLAGS | wide)
        rounded = hw.attention(q, k, v, backend=backend, **FLAGS | given)
        out, lse = unrounded.attention(q, k, v, backend=backend, **FLAGS | given)
        assert (out.dtype, lse.dtype, rounded.dtype) == (torch.float32, torch.float32, dtype)
        assert out.stride() == rounded.stride()
        assert far_off(out, truth[0]) < DIGITS < ROUNDING[dtype] / 100
        assert far_off(rounded, truth[0]) > ROUNDING[dtype] / 4


@pytest.mark.parametrize("dtype", LOW)
def test_gradients_keep_their_digits(backend, dtype):
    q, k, v, grad = inputs(dtype)
    out, lse = hw.attention(q, k, v, backend=backend, return_lse=True, **FLAGS)
    given = grad, q, k, v, out  # what was rounded before is the same for all
    truth = hw.attention_backward(*(x.double() for x in given), lse.double(), backend="cpu", **FLAGS)
    rounded = hw.attention_backward(*given, lse, backend=backend, **FLAGS)
    ours = unrounded.attention_backward(*given, lse, backend=backend, **FLAGS)
    for wide, low, true in zip(ours, rounded, truth, strict=True):
        assert (wide.dtype, low.dtype, wide.stride()) == (torch.float32, dtype, low.stride())
        assert far_off(wide, true) < 3 * DIGITS < ROUNDING[dtype] / 50
        assert far_off(low, true) > ROUNDING[dtype] / 4


def test_packed_gradients_and_those_of_bias_and_sink(backend):
    q, k, v, grad = inputs(torch.bfloat16)
    sink, bias = torch.linspace(-1, 1, 4, dtype=torch.bfloat16), torch.zeros(4, 1, 90)
    out, lse = hw.attention(q, k, v, sink=sink, bias=bias, backend=backend, return_lse=True, **FLAGS)
    both = {"need_bias_grad": True, "need_sink_grad": True, "backend": backend, **FLAGS}
    *grads, dbias, dsink = unrounded.attention_backward(grad, q, k, v, out, lse, sink=sink, bias=bias, **both)
    assert ({x.dtype for x in grads}, dbias.dtype, dsink.dtype) == ({torch.float32}, torch.float32, torch.bfloat16)
    q, k, v, grad, out = (x[0].transpose(0, 1) for x in (q, k, v, grad, out))
    ends = torch.tensor([0, 40, 41, 80])
    out, lse = hw.attention_varlen(q, k, v, ends, ends, 40, 40, sink=sink, backend=backend, return_lse=True, **FLAGS)
    given = grad, q, k, v, out
    truth = hw.attention_varlen_backward(
        *(x.double() for x in given), lse.double(), ends, ends, 40, 40, sink=sink.double(), backend="cpu", **FLAGS
    )  # fmt: skip
    ours = unrounded.attention_varlen_backward(*given, lse, ends, 40, sink=sink, backend=backend, **FLAGS)
    for wide, true in zip(ours, truth, strict=True):
        assert wide.dtype == torch.float32
        assert far_off(wide, true) < 3 * DIGITS


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("queries", [None, 3])
def test_decoding_keeps_its_digits(backend, dtype, queries):
    random = torch.Generator().manual_seed(6)
    q, lengths = torch.randn(2, 4, *(() if queries is None else (queries,)), 24, generator=random), [90, 37]
    k, v = (torch.randn(2, 2, 96, 24, generator=random) for _ in range(2))
    q, k, v, lengths, starts = q.to(dtype), k.to(dtype), v.to(dtype), torch.tensor(lengths), torch.tensor([0, 5])
    truth = hw.attention_decode(q.double(), k.double(), v.double(), lengths, kv_starts=starts, backend="cpu")
    tables = torch.arange(12, dtype=torch.int32).flip(0).view(2, 6)
    pages = [x.unflatten(2, (6, 16)).transpose(1, 2).flatten(0, 1).flip(0) for x in (k, v)]
    common = {"kv_starts": starts, "scale": 24**-0.5, "softcap": None, "backend": backend}
    for caches, table in (((k, v), None), (pages, tables)):
        out, _ = unrounded.attention_decode(q, *caches, lengths, block_table=table, **common)
        rounded = hw.attention_decode(q, *caches, lengths, kv_starts=starts, block_table=table, backend=backend)
        assert (out.dtype, rounded.dtype, out.shape) == (torch.float32, dtype, rounded.shape)
        # The decoding kernel of Triton rounds the weights in the interpreter, too: one rounding in place of two.
        assert far_off(out, truth) < (0.8 * far_off(rounded, truth) if backend == "triton" else DIGITS)
        assert far_off(rounded, truth) > ROUNDING[dtype] / 4


def test_float64_stays_float64():
    q, k, v, grad = inputs(torch.float64)
    out, lse = unrounded.attention(q, k, v, backend="cpu", **FLAGS)
    grads = unrounded.attention_backward(grad, q, k, v, out, lse, backend="cpu", **FLAGS)
    assert {x.dtype for x in (out, lse, *grads)} == {torch.float64}


def test_what_is_planned_has_the_same_dtypes():
    """Tensors without memory: the fake kernels."""
    q, k, v, grad = (x.to("meta") for x in inputs(torch.bfloat16))
    out, lse = unrounded.attention(q, k, v, backend=None, **FLAGS)
    rounded, _ = hw.attention(q, k, v, return_lse=True, **FLAGS)
    grads = unrounded.attention_backward(grad, q, k, v, rounded, lse, backend=None, **FLAGS)
    assert {x.dtype for x in (out, *grads)} == {torch.float32}
    assert rounded.dtype == torch.bfloat16
    ends = torch.zeros(3, dtype=torch.int32, device="meta")
    packed = [x[0].transpose(0, 1) for x in (grad, q, k, v, rounded)]
    grads = unrounded.attention_varlen_backward(*packed, lse[0], ends, 9, backend=None, **FLAGS)
    assert {x.dtype for x in grads} == {torch.float32}
    for rows in (q[:, :, 0], q[:, :, :2]):
        out, _ = unrounded.attention_decode(
            rows, k, v, ends[:2], kv_starts=ends[:2], block_table=None, scale=1.0, softcap=None, backend=None
        )  # fmt: skip
        assert out.dtype == torch.float32


def test_hopper_kernels_say_that_they_round():
    q, k, v, _ = (x.to("meta") for x in inputs(torch.bfloat16, length=4096, head_dim=64, value_dim=64))
    for flag, said in ((False, None), (True, "results in the dtype of q")):
        flags = Flags(-1, 0, 0.125, 0.0, True, unrounded=flag)
        args = Attention(q, k, v, None, None, None, None, None, None, None, flags)
        for reason in (covers_forward(args), covers_backward(args)):
            assert (reason is None) if said is None else said in reason
