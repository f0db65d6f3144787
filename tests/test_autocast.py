"""Autocast means for our ops what it means for PyTorch's: low products, float32 norms, the widest dtype elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from attention_calls import on_every_backend
from backends_under_test import DEVICE
from torch.utils.checkpoint import checkpoint

import headwise as hw
from headwise import testing
from headwise.ops import _autocast
from headwise.ops._op import OPS

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
ENDS, LENGTHS, TARGETS = torch.tensor([0, 20, 50]), torch.tensor([7, 50]), torch.arange(50) % 11
ANGLES = torch.outer(torch.arange(50.0), 10000 ** (-torch.arange(4) / 4))


def normal(*shape, dtype=F32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def mixed(shapes, dtypes):
    return [normal(*shape, dtype=dtype, seed=i) for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))]


QKV, PACKED, ROWS = [(2, 2, 50, 8)] * 3, [(50, 2, 8)] * 3, [(50, 8), (8,)]
# By op: what it is given, the call, and the dtypes that its floating tensors have where it computes.
CALLS = {
    "attention": (mixed(QKV, (F32, BF16, F16)), lambda q, k, v: hw.attention(q, k, v, causal=True), [BF16] * 3),
    "attention_varlen": (
        mixed(PACKED, (F32, F32, BF16)), lambda q, k, v: hw.attention_varlen(q, k, v, ENDS, ENDS, 30, 30), [BF16] * 3,
    ),
    "attention_decode": (
        mixed([(2, 2, 8), *QKV[1:]], (F32, BF16, BF16)), lambda q, k, v: hw.attention_decode(q, k, v, LENGTHS), [BF16] * 3,
    ),
    "attention_probs": (mixed(QKV[:2], (F32, BF16)), hw.attention_probs, [BF16] * 2),
    "linear_cross_entropy": (
        mixed([(50, 8), (11, 8), (11,)], (F32, BF16, F32)),
        lambda h, w, b: hw.linear_cross_entropy(h, w, TARGETS, bias=b), [BF16] * 3,
    ),
    "rms_norm": (mixed(ROWS, (BF16, F32)), hw.rms_norm, [F32] * 2),
    "layer_norm": (mixed([*ROWS, (8,)], (BF16, F32, BF16)), hw.layer_norm, [F32] * 3),
    "add_rms_norm": (mixed([ROWS[0], *ROWS], (BF16, F32, F32)), hw.add_rms_norm, [F32] * 3),
    "softmax": (mixed(ROWS[:1], (BF16,)), hw.softmax, [F32]),
    "glu": (mixed([(50, 8)] * 2, (BF16, F32)), hw.glu, [F32] * 2),
    "rope": (
        mixed(QKV[:2], (BF16, F32)), lambda q, k: hw.rope((q, k), ANGLES.cos(), ANGLES.sin()), [F32] * 2,
    ),
}  # fmt: skip
# These compute in the dtype of their tensors: losses are float32 inside whatever they get, lookups and copies have no
# arithmetic, parts of a row have the dtype of their attention, and an explicit backward is given what its forward was.
WITHOUT_RULE = {"cross_entropy", "cross_entropy_forward_backward", "linear_cross_entropy_forward_backward", "embedding",
                "transpose", "merge_attention"}  # fmt: skip


def results_of(call, tensors):
    found = call(*tensors)
    return list(found) if isinstance(found, tuple) else [found]


def gradients_of(call, tensors, autocast):
    inputs = [x.clone().requires_grad_() for x in tensors]
    with torch.autocast("cpu", BF16, enabled=autocast):
        found = results_of(call, inputs)
    given = [normal(*y.shape, dtype=y.dtype, seed=9) for y in found]
    return [y.detach() for y in found], list(torch.autograd.grad(found, inputs, given))


def test_every_op_has_a_rule_or_needs_none():
    backwards = {name for name in OPS if name.endswith("_backward")}
    assert {name for name, op in OPS.items() if op.autocast is not None} == set(CALLS)
    assert set(OPS) == set(CALLS) | WITHOUT_RULE | backwards


@pytest.mark.parametrize("name", CALLS)
def test_the_op_computes_in_the_dtype_that_it_states(name):
    """The bits of the same call with the tensors cast by hand; gradients have the inputs' dtypes."""
    tensors, call, dtypes = CALLS[name]
    expected, expected_grads = gradients_of(call, [x.to(d) for x, d in zip(tensors, dtypes, strict=True)], False)
    for _ in range(3):  # made, found by its key, found by its guards
        found, grads = gradients_of(call, tensors, True)
        assert [y.dtype for y in found] == [y.dtype for y in expected]
        assert all(map(torch.equal, found, expected))
        assert [g.dtype for g in grads] == [x.dtype for x in tensors]
        assert all(torch.equal(g, e.to(g.dtype)) for g, e in zip(grads, expected_grads, strict=True))
        with torch.no_grad(), torch.autocast("cpu", BF16):
            assert all(map(torch.equal, results_of(call, tensors), expected))


@pytest.mark.parametrize("name", CALLS)
def test_float64_is_left_alone(name):
    tensors, call, _ = CALLS[name]
    wide = [x.double() for x in tensors]
    with torch.autocast("cpu", BF16):
        assert all(map(torch.equal, results_of(call, wide), results_of(call, wide)))
        assert results_of(call, wide)[0].dtype == F64


def test_the_rules_are_those_of_pytorchs_lists():
    header = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()

    def listed(macro):
        body = re.search(rf"#define {macro}\(_\)(.*?)\n\n", header, re.DOTALL)
        return set(re.findall(r"_\((\w+)", body[1]))

    assert {"scaled_dot_product_attention", "matmul", "linear"} <= listed("AT_FORALL_LOWER_PRECISION_FP")
    for name in ("attention", "attention_varlen", "attention_probs", "linear_cross_entropy"):
        assert OPS[name].autocast.dtype is _autocast.low
    assert {"rms_norm", "layer_norm"} <= listed("AT_FORALL_FP32")
    assert "softmax" in listed("AT_FORALL_FP32_SET_OPT_DTYPE")
    for name in ("rms_norm", "layer_norm", "add_rms_norm", "softmax"):
        assert OPS[name].autocast.dtype is _autocast.float32
    for macro in re.findall(r"#define (AT_FORALL_\w+)\(_\)", header):
        assert not listed(macro) & {"silu", "gelu", "mul", "add", "embedding"}


def pytorchs_glu(gate, up):
    return F.silu(gate) * up


def pytorchs_loss(hidden, weight, bias):
    return F.cross_entropy(F.linear(hidden, weight, bias), TARGETS, reduction="none")


def losses_per_token(hidden, weight, bias):
    return hw.linear_cross_entropy(hidden, weight, TARGETS, bias=bias, reduction="none")


def pytorchs_attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize(
    ("name", "call", "pytorchs"),
    [
        ("attention", CALLS["attention"][1], pytorchs_attention),
        ("linear_cross_entropy", losses_per_token, pytorchs_loss),
        ("glu", hw.glu, pytorchs_glu),
    ],
)
def test_as_close_as_pytorchs_own_under_autocast(name, call, pytorchs):
    tensors = CALLS[name][0]
    truth, true_grads = gradients_of(pytorchs, [x.double() for x in tensors], False)
    plain, plain_grads = gradients_of(pytorchs, tensors, True)
    found, grads = gradients_of(call, tensors, True)
    assert [y.dtype for y in (*found, *grads)] == [y.dtype for y in (*plain, *plain_grads)]
    for ours, true, theirs in zip((*found, *grads), (*truth, *true_grads), (*plain, *plain_grads), strict=True):
        error = testing.compare(name, ours, true, theirs)
        assert error.ok, str(error)


def test_what_autocast_says_now_counts():
    """Its dtype, its device and whether it is on are asked for at every call, also of one that is known."""
    q = normal(1, 2, 9, 8)
    seen = []
    for _ in range(2):
        for dtype in (BF16, F16):
            with torch.autocast("cpu", dtype):
                seen.append(hw.attention(q, q, q).dtype)
                with torch.autocast("cpu", enabled=False):
                    seen.append(hw.attention(q, q, q).dtype)
        seen.append(hw.attention(q, q, q).dtype)
    assert seen == [BF16, F32, F16, F32, F32] * 2


def test_autocast_of_another_device_changes_nothing():
    q = normal(1, 2, 9, 8)
    plain = hw.attention(q, q, q)
    before = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)
    try:
        for _ in range(3):
            assert torch.equal(hw.attention(q, q, q), plain)
        with torch.autocast("cpu", BF16):
            assert hw.attention(q, q, q).dtype == BF16
    finally:
        torch.set_autocast_enabled("cuda", before)


def test_what_is_added_or_joins_the_denominator_may_stay_float32():
    q, bias, sink = normal(2, 2, 9, 8), normal(2, 1, 9, 9, seed=1), normal(2, seed=2)
    low = q.to(BF16)
    plain = hw.attention(low, low, low, bias=bias, sink=sink)
    with torch.autocast("cpu", BF16):
        assert torch.equal(hw.attention(q, q, q, bias=bias, sink=sink), plain)
        for other in (F16, BF16):
            out = hw.attention(q, q, q, bias=bias.to(other), sink=sink.to(other))
            torch.testing.assert_close(out, plain, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("dtype", [F32, F16])
def test_no_cache_is_copied_for_a_token(dtype):
    """Decoding follows the caches; where keys and values differ, as after a norm of keys alone, autocast decides."""
    q, (k, v) = normal(2, 2, 8), mixed(QKV[:2], (dtype, dtype))
    with torch.autocast("cpu", BF16):
        out = hw.attention_decode(q, k, v, LENGTHS)
        assert hw.attention_decode(q, k, v.to(BF16), LENGTHS).dtype == BF16
    assert torch.equal(out, hw.attention_decode(q.to(dtype), k, v, LENGTHS))


def test_float16_gradients_wait_for_the_scale_of_the_loss():
    """The gradients of a loss of many tokens would be lost in float16, so the forward does not make them at once."""
    hidden, weight = normal(50, 8).requires_grad_(), (normal(11, 8) * 1e-4).requires_grad_()
    with torch.autocast("cpu", F16):
        scaled = hw.linear_cross_entropy(hidden, weight, TARGETS) * 2.0**16
    (grad,) = torch.autograd.grad(scaled, hidden)
    (true,) = torch.autograd.grad(F.cross_entropy(hidden.double() @ weight.double().T, TARGETS), hidden)
    assert (grad / 2.0**16 - true).norm() < 0.01 * true.norm()


@pytest.mark.parametrize("name", CALLS)
def test_compiled(name):
    tensors, call, _ = CALLS[name]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    expected, expected_grads = gradients_of(call, tensors, True)
    found, grads = gradients_of(compiled, tensors, True)
    assert [y.dtype for y in (*found, *grads)] == [y.dtype for y in (*expected, *expected_grads)]
    for ours, eager in zip((*found, *grads), (*expected, *expected_grads), strict=True):
        torch.testing.assert_close(ours, eager)


def test_transforms_checkpoints_and_watchers():
    q, k, v = normal(3, 1, 2, 9, 8)
    with torch.autocast("cpu", BF16):
        out = hw.attention(q, k, v)
        grad = torch.func.grad(lambda q: hw.attention(q, k, v).float().square().sum())(q)
        mapped = torch.vmap(hw.attention)(*(x[None] for x in (q, k, v)))[0]
        with torch.profiler.profile():
            watched = hw.attention(q, k, v)
        q.requires_grad_()
        (again,) = torch.autograd.grad(checkpoint(hw.attention, q, k, v, use_reentrant=False).float().square().sum(), q)
    assert torch.equal(mapped, out)
    assert torch.equal(watched, out)
    assert grad.dtype == F32
    assert torch.equal(grad, again)


def test_explain_says_what_runs():
    q = normal(1, 2, 9, 8)
    with torch.autocast("cpu", BF16):
        assert hw.explain("attention", q, q, q).call.dtype == BF16
        assert hw.explain("rms_norm", q.to(BF16)).call.dtype == F32


@on_every_backend
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_every_backend_computes_what_it_is_given(backend, softcap):
    """Inside, in both directions, autocast has no say: the bits are those of the call on bfloat16 tensors."""
    low = [normal(1, 2, 700, 32, dtype=BF16, seed=i).to(DEVICE[backend]).requires_grad_() for i in range(3)]
    wide = [x.detach().float().requires_grad_() for x in low]
    plain = hw.attention(*low, causal=True, softcap=softcap, backend=backend)
    grads = torch.autograd.grad(plain.float().sum(), low)
    for inputs in (low, wide):
        with torch.autocast(DEVICE[backend], BF16):
            cast = hw.attention(*inputs, causal=True, softcap=softcap, backend=backend)
            cast_grads = torch.autograd.grad(cast.float().sum(), inputs)
        assert torch.equal(plain, cast)
        assert all(torch.equal(a, b.to(BF16)) for a, b in zip(grads, cast_grads, strict=True))
